"""`scripts/package`: builds the wheel and the sdist from a copy of the checkout.

The address of the repository is given, not stored: a mirror's packages lead to the mirror.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from stage.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "stage", "runner")
PAGES = {
    "Repository": "",
    "Documentation": "/blob/v{version}/docs/README.md",
    "Changelog": "/blob/v{version}/docs/CHANGELOG.md",
    "Security": "/blob/v{version}/docs/SECURITY.md",
}
_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?://|#)([^)]+)\)")
_CLONE = "git clone ADDRESS"


def main() -> int:
    """Builds both; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/package", description="Builds wheel and sdist.")
    parser.add_argument("--url", default="", metavar="ADDRESS", help="address of the repository")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("dist"))
    arguments = parser.parse_args()
    url = arguments.url.removesuffix("/").removesuffix(".git")
    if url and not url.startswith("https://"):
        parser.error(f"{url}: the address of a repository begins with https://")
    with tempfile.TemporaryDirectory(prefix="airlift-package-") as folder:
        _copy(Path(folder), url)
        command = [sys.executable, "-m", "build", "--no-isolation"]
        done = subprocess.run([*command, "--outdir", arguments.folder.absolute(), folder])
    return done.returncode


def _copy(folder: Path, url: str) -> None:
    """Copies what is packaged, with the links of README.md and pyproject.toml for `url`."""
    for name in PARTS:
        if (ROOT / name).is_dir():
            litter = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / name, folder / name, ignore=litter)
        else:
            shutil.copy(ROOT / name, folder / name)
    readme = folder / "README.md"
    readme.write_text(for_package_page(readme.read_text("utf-8"), url), encoding="utf-8")
    if url:
        with (folder / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write("\n[project.urls]\n")
            for name, page in PAGES.items():
                file.write(f'{name} = "{url}{page.format(version=__version__)}"\n')


def for_package_page(readme: str, url: str) -> str:
    """The README with links that work on a page that has no other files of the repository. Pure.

    Args:
        url: the address of the repository; empty: links become text, and pictures go.
    """

    def link(found: re.Match[str]) -> str:
        is_picture, text, target = found.groups()
        if not url:
            return "" if is_picture else text
        kind = "raw" if is_picture else "blob"
        return f"{is_picture}[{text}]({url}/{kind}/v{__version__}/{target})"

    return _LINK.sub(link, readme).replace(_CLONE, f"git clone {url}" if url else _CLONE)


if __name__ == "__main__":
    sys.exit(main())
