"""The values that only a manifest has: repositories, addresses, paths, separators of CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stage import paths as util_paths
from stage.digests import is_hex
from stage.files import is_file
from stage.lock.fields import YamlFields, keeps_mistakes

_CONVERSIONS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
}
_MAX_NAME = 96  # characters of a repository's name (huggingface_hub, utils/_validators.py)


class Entry(YamlFields):
    """One mapping of a manifest; mistakes are reported with file:line."""

    @keeps_mistakes(None)
    def separator(self, of: str | None = None) -> str | None:
        """The character between the cells of a CSV.

        Args:
            of: the conversion that the key requires; None: it may always be given.
        """
        value = self.optional("separator")
        if value is None:
            return None
        if len(value.encode()) != 1 or value in '"\r\n':
            self.wrong("separator", 'should be one character, such as ";" or "\\t"')
        if of is not None and self.data.get("convert") != of:
            self.wrong("separator", f"goes with `convert: {of}`")
        return value

    @keeps_mistakes(None)
    def check_not_both(self, patterns: Sequence[str], of_splits: Sequence[str]) -> None:
        """Refuses a dataset that is to be both files as published and splits of a config."""
        pattern = next((key for key in patterns if self.data.get(key)), None)
        other = next((key for key in of_splits if self.data.get(key)), None)
        if pattern and other:
            self.fail(
                f"cannot stand beside `{pattern}`: with that, files travel as they are published, "
                "and the script chooses among them",
                other,
                remedy=f"Remove one of the two. For `runner train`, keep `{other}`.",
            )

    @keeps_mistakes("")
    def local_path(self) -> str:
        """The file or folder of a `path:` entry."""
        path = self.text("path")
        self._check_not_ftp("path", path)
        if path.startswith(("http://", "https://")):
            self.fail(
                "names a file or folder on this machine; this is an address",
                "path",
                remedy=f"Write `url: {path}`.",
            )
        return path

    @keeps_mistakes("")
    def address(self) -> str:
        """The address of a `url:` entry."""
        url = self.text("url")
        self._check_not_ftp("url", url)
        if url and not url.startswith(("http://", "https://")):
            self.wrong("url", "should begin with https:// or http://")
        if url and (problem := util_paths.problem_with_address(url)):
            self.wrong("url", f"is not a valid address: {problem}")
        return url

    @keeps_mistakes(None)
    def sha256(self) -> str | None:
        """The sha256 of a `url:` entry, in lower case."""
        value = self.text("sha256", default="").lower()
        if value and not is_hex(value, 64):
            self.wrong("sha256", "should be 64 hex digits")
        return value or None

    def _check_not_ftp(self, key: str, address: str) -> None:
        """Raises for an ftp address. The message omits it, because it may hold a password.

        Raises:
            UsageError: it is one.
        """
        if not address.lower().startswith(("ftp://", "ftps://")):
            return
        _, slash, file = address.partition("://")[2].rpartition("/")
        file = file if slash and file else "FILE"
        self.fail(
            "is an ftp address: ftp addresses are not fetched",
            key,
            remedy=f"Download it by hand (curl -O ADDRESS), and name the file: path: {file}. "
            "Or use its https address.",
        )

    @keeps_mistakes("")
    def repository(self, key: str) -> str:
        """A Hub repository id: `name` or `org/name`."""
        value = self.text(key)
        if not value:
            return value
        for prefix in ("https://huggingface.co/", "hf://"):
            if value.startswith(prefix):
                bare = value.removeprefix(prefix).strip("/")
                for part in ("datasets/", "spaces/"):
                    bare = bare.removeprefix(part)
                self.fail("is an address", key, remedy=f"Write `{key}: {bare}`.")
        if is_local(value, self.lines.path.parent):
            how = _CONVERSIONS.get(Path(value).suffix.lower())
            also = f", and how to read it: `convert: {how}`" if key == "dataset" and how else ""
            self.fail(
                f"{value} is a local file or folder; `{key}` names a repository on the Hub, "
                "such as org/name",
                key,
                remedy=f"Write `path: {value}`{also}. `stage init {value}` writes the whole entry.",
            )
        parts = value.split("/")
        allowed = all(
            0 < len(part) <= _MAX_NAME and all(c.isalnum() or c in "-_." for c in part)
            for part in parts
        )
        if len(parts) > 2 or not allowed or ".." in value:
            self.wrong(key, "should be a repository such as org/name")
        return value


def is_local(value: str, folder: Path) -> bool:
    """Whether a value names a file on this machine, not a repository.

    A folder `org/name` is not enough: it may be a clone of the repository.
    """
    is_data = "/" not in value and Path(value).suffix.lower() in _CONVERSIONS
    return util_paths.names_a_local_path(value) or is_data or is_file(folder / value)
