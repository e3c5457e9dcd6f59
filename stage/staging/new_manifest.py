"""`stage init`: makes a first manifest, commented and valid as it is.

Names of repositories and paths of this machine become entries; facts from the Hub (licence,
configs) become comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from stage.errors import as_shown
from stage.hub.lookup import RepositoryLookup
from stage.lock.licences import identifiers
from stage.lock.manifest import FORMAT
from stage.lock.yaml_lines import scalar
from stage.paths import folded, problem_with_asset_name
from stage.staging.sources.entry import LocalEntry

_SHOWN_CONFIGS = 12


def manifest_text(path: Path, found: Sequence[RepositoryLookup | LocalEntry]) -> str:
    """The text of a manifest with one entry for each repository, file or folder."""
    hub = [item for item in found if isinstance(item, RepositoryLookup)]
    names = asset_names(
        item.repository if isinstance(item, RepositoryLookup) else item.name for item in found
    )
    bundle = names[0] if path.stem == "manifest" else path.stem
    stated = dict.fromkeys(word for item in hub for word in identifiers(item.licence))
    lines = [
        f"# Next: stage fetch {comment(path.name)} -o {place_for_bundle(found)}   "
        "(--dry-run first shows the sizes)",
        f"format: {FORMAT}",
        f"name: {scalar(bundle)}",
        *[
            f"# policy: {{licences: [{', '.join(_flow(comment(licence)) for licence in stated)}]}}"
            "   # refuses others"
        ]
        * bool(hub),
        "assets:",
    ]
    for name, item in zip(names, found, strict=True):
        entry = item.lines(path) if isinstance(item, LocalEntry) else _entry(item)
        lines += [f"  {scalar(name)}:", *(f"    {line}" for line in entry)]
    return "\n".join(lines) + "\n"


def place_for_bundle(found: Iterable[RepositoryLookup | LocalEntry]) -> Path:
    """Where the bundle can be made: in no folder that it takes in."""
    here = Path.cwd()
    taken = [item.path.resolve() for item in found if isinstance(item, LocalEntry)]
    outer = next((path for path in taken if path in (here, *here.parents)), None)
    return Path("bundle") if outer is None else outer.with_name(f"{outer.name}-bundle")


def _entry(found: RepositoryLookup) -> list[str]:
    notes = [f"licence: {found.licence or 'none stated'}"]
    if found.gated:
        notes.append("gated: accept its terms on the Hub, and set HF_TOKEN")
    if found.also:
        notes.append("a dataset has this name too: `dataset:` in place of `model:`")
    lines = [f"# {comment('; '.join(notes))}", f"{found.kind}: {scalar(found.repository)}"]
    lines.append(
        f"revision: {scalar(found.revision)}"
        if found.revision
        else "# revision: main   # or a tag or a commit; the .lock pins the commit"
    )
    if found.kind == "model":
        lines.append(
            '# include: ["*.safetensors", "*.json"]   # by default, what from_pretrained needs'
        )
        return lines
    if found.configs:
        chosen = found.default_config or found.configs[0]
        others = [config for config in found.configs if config != chosen]
        if others and found.default_config is None:
            lines.append(
                "# several configs and no default: the first is taken; "
                f"choose (of {len(found.configs)})"
            )
        more = ", ..." if len(others) > _SHOWN_CONFIGS else ""
        also = f"   # also: {comment(', '.join(others[:_SHOWN_CONFIGS]))}{more}" if others else ""
        lines.append(f"config: {scalar(chosen)}{also}")
    lines.append("# splits: [train, validation]   # all by default")
    return lines


def asset_names(repositories: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """A name for each: the repository's name; if taken, with its owner's name, or with a number."""
    used = {folded(name) for name in taken}
    result = []
    for repository in repositories:
        own = _usable(repository.rpartition("/")[2])
        candidates = [
            own,
            _usable(repository.replace("/", "-")),
            *(f"{own}-{n}" for n in range(2, len(used) + 3)),
        ]
        name = next(c for c in candidates if folded(c) not in used)
        used.add(folded(name))
        result.append(name)
    return result


def _usable(name: str) -> str:
    return (
        name
        if problem_with_asset_name(name) is None
        else (re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "asset")
    )


def _flow(text: str) -> str:
    """Text as a member of a YAML list in brackets."""
    return (
        text
        if re.fullmatch(r"[\w. ()-]+", text) and text[0].isalnum()
        else json.dumps(text, ensure_ascii=False)
    )


def comment(text: str) -> str:
    """Text fit for one line behind a `#`."""
    return as_shown(" ".join(text.split()))
