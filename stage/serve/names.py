"""What to add to the manifest for a name or a file that is not here."""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Mapping

from stage.lock.model import EXCLUDED, NOT_INCLUDED, LeftOut, LockedAsset
from stage.lock.yaml_lines import scalar
from stage.serve.catalogue import ENTRY_KEYS, OWN, Catalogue

_METRICS = re.compile(r"evaluate-(?:metric|comparison|measurement)/(.+)")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def why_missing(catalogue: Catalogue, kind: str, name: str) -> str:
    """What is not here, and what to add to the manifest, for the log of the server."""
    what = ENTRY_KEYS[kind]
    if (kind, f"{OWN}/{name}") in catalogue.repositories:
        return f"{what} {name}: not in this bundle; it is here as `{OWN}/{name}`"
    if name.startswith(f"{OWN}/"):
        return f"{what} {name}: not in this bundle; no asset has that name"
    others = " and ".join(found.id for found in catalogue.namesakes(kind, name))
    text = f"{what} {_in_manifest(kind, name)}: not in this bundle"
    if others and "/" not in name:
        return f"{text} under this name, but {others}: write one of these names"
    own = f"{OWN}/{name.rpartition('/')[2]}"
    if (kind, own) in catalogue.repositories:
        text += f" (your own {own.rpartition('/')[2]} is here as `{own}`)"
    taken = {id.rpartition("/")[2] for _, id in catalogue.repositories if id.startswith(f"{OWN}/")}
    return f"{text}; {entry(kind, name, taken=taken)}"


def entry(
    kind: str, name: str, more: Mapping[str, str] | None = None, taken: Collection[str] = ()
) -> str:
    """The entry for the manifest, as YAML to paste below `assets:`.

    Args:
        more: further keys of the entry.
        taken: the names of assets that the manifest has already.
    """
    if not _REPOSITORY.fullmatch(name):
        return "that is not the name of a repository"
    repository = _in_manifest(kind, name)
    base = repository.rpartition("/")[2]
    base = repository if base in taken else base
    asset = "-".join([base, *(more or {}).values()])
    lines = [f"  {scalar(re.sub(r'[^A-Za-z0-9._-]+', '-', asset).strip('.'))}:"]
    lines += [f"    {ENTRY_KEYS[kind]}: {scalar(repository)}"]
    lines += [f"    {key}: {scalar(value)}" for key, value in (more or {}).items()]
    if kind == "spaces":
        lines.append("    allow_code: true   # a metric is Python code: read it first")
    head = "on the laptop, write this below `assets:` of the manifest, and fetch again:"
    return "\n".join([head, *lines])


def how_to_bring(asset: LockedAsset, left: LeftOut) -> str:
    """What to change in the manifest for a file that was left out; empty if nothing."""
    if asset.kind == "dataset" and left.path.endswith(".py"):
        return ""  # `load_dataset` asks for the code of each dataset, and goes on without it
    where = f"of `{asset.name}` in the manifest, and fetch again"
    if left.reason == EXCLUDED:
        return f"remove its pattern from `exclude` {where}"
    if left.reason == NOT_INCLUDED:
        return f"add {scalar(glob.escape(left.path))} to `include` {where}"
    if asset.kind == "dataset":
        return f'write `include: ["*"]` in place of `config` and `splits` {where}'
    more = {"include": glob.escape(left.path)}
    return entry("models", asset.source.repository, more, taken=(asset.name,))


def _in_manifest(kind: str, name: str) -> str:
    """The name that a manifest has for it: `accuracy` for `evaluate-metric/accuracy`."""
    match = _METRICS.fullmatch(name) if kind == "spaces" else None
    return match[1] if match else name
