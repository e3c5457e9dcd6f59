"""`stage show`: what is inside a bundle, as text for people or JSON for programs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stage.cli.base import bundle_argument, json_option, print_json, say, signers_option
from stage.errors import UsageError, quoted
from stage.files import human_count, human_size
from stage.installation import check_libraries

if TYPE_CHECKING:
    from stage.lock.model import LockedAsset, LockedEnvironment

LARGEST_CARD = 2**20
"""Bytes of a model card that is read."""


@click.command()
@bundle_argument
@signers_option
@click.option("--sbom", is_flag=True, help="The bill of materials instead, as CycloneDX 1.6.")
@json_option
def show(bundle: Path, signers: Path | None, sbom: bool, as_json: bool) -> None:
    """Show what is inside BUNDLE: assets, revisions, licences, id.

    \b
    Examples:
      stage show bundle
      stage show bundle --signers allowed_signers
      stage show bundle --sbom > bundle.cdx.json
    """
    if sbom:
        from stage.bundle.bundle import Bundle

        if as_json or signers is not None:
            raise UsageError(
                "--sbom is a document of its own, without --json and --signers.",
                f"stage show {quoted(bundle)} --sbom",
            )
        check_libraries("--sbom", "cyclonedx-python-lib", extra="sbom")
        from stage.lock.bom import bom_text

        click.echo(bom_text(Bundle.open(bundle).lock))
    elif as_json:
        print_json(describe_json(bundle, signers))
    else:
        say(describe(bundle, signers))


def describe(root: Path, signers: Path | None = None) -> str:
    """The text of `stage show`.

    Args:
        signers: a file of allowed signers to check the signature against.

    Raises:
        UsageError, DamageError: as for `Bundle.open`.
        SignatureError: with `signers`, as for `check_signature`.
    """
    from stage.bundle.bundle import Bundle
    from stage.bundle.receipt import find_damage
    from stage.bundle.verifier import state_folder

    bundle = Bundle.open(root)
    signed = _signature(root, signers)
    files = human_count(len(bundle.lock.files), "file")
    lines = [
        f"{root}: {bundle.lock.name}: {files}, {human_size(bundle.lock.size)}, {signed}",
        f"bundle id {bundle.id}",
    ]
    if (known := find_damage(state_folder(os.environ), root)) is not None:
        findings = human_count(len(known.report.findings), "finding")
        lines.append(f"damaged: {findings}: {known.describe(time.time())}: {known.written}")
    for asset in bundle.lock.assets.values():
        lines += ["", *_asset_lines(root, asset)]
    return "\n".join(lines)


def _asset_lines(root: Path, asset: LockedAsset) -> Iterator[str]:
    source = asset.source
    files = human_count(len(asset.files), "file")
    yield f"{asset.name}  {asset.kind}, {files}, {human_size(asset.size)}"
    revision = f" ({source.requested_revision})" if source.requested_revision else ""
    yield f"  from     {source.location}{revision}"
    if source.commit:
        yield f"  commit   {source.commit}"
    if source.parquet_commit:
        yield f"  parquet  {source.parquet_commit} (the Hub's conversion)"
    if asset.made_from:
        how = ", ".join(sorted({file.made_by for file in asset.files if file.made_by}))
        made_from = human_count(len(asset.made_from), "file")
        size = human_size(sum(i.size or 0 for i in asset.made_from))
        yield f"  made     by {how} from {made_from}, {size} (named in stage.lock)"
    yield from _relation_lines(asset)
    by_hand = " (as the manifest says)" if "licence" in asset.request else ""
    yield f"  licence  {asset.licence or 'none stated'}{by_hand}"
    if asset.environment is not None:
        yield from _environment_lines(asset.environment)
    for config, splits in asset.configs.items():
        for name, split in splits.items():
            columns = ", ".join(f"{c.name}: {c.type}" for c in split.schema or ())
            yield f"  split    {config}/{name}: {human_count(split.rows or 0, 'row')} ({columns})"
    if trained := _trained(root, asset):
        yield f"  trained  by the run {trained['run']}, in bundle {trained['bundle']}"
        yield from (f"           {source}" for source in trained["made_from"])
    yield f"  path     {asset.folder}"
    if asset.environment is not None:
        yield f"  create   sh {quoted(f'{asset.folder}/bootstrap.sh')} PREFIX"
    if asset.left_out:
        left_out = human_count(len(asset.left_out), "file")
        size = human_size(sum(o.size for o in asset.left_out))
        yield f"  left out {left_out}, {size} (reasons in stage.lock)"


def _trained(root: Path, asset: LockedAsset) -> dict[str, Any] | None:
    """What the card of a model that `runner train` exported says about its origin; else None."""
    card = root / asset.folder / "README.md"
    ours = {file.path: file.size for file in asset.files}
    size = ours.get(f"{asset.folder}/README.md")
    if asset.source.commit or size is None or size > LARGEST_CARD:
        return None
    from stage.lock.yaml_lines import split_card

    try:
        found = split_card(card.read_text(encoding="utf-8", errors="replace"))[0].get("airlift")
    except OSError:
        return None  # `stage verify` reports it
    if not isinstance(found, dict):
        return None
    sources = found.get("made_from")
    return {
        "run": _one_line(found.get("run")),
        "bundle": _one_line(found.get("bundle")),
        "made_from": [_one_line(text) for text in sources] if isinstance(sources, list) else [],
    }


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def _relation_lines(asset: LockedAsset) -> Iterator[str]:
    """Lines on other repositories and assets that belong to an asset."""
    if asset.base:
        yield f"  adapter  of {asset.base.repository} ({asset.base.revision})"
    is_adapter = any(file.path == f"{asset.folder}/adapter_config.json" for file in asset.files)
    if is_adapter and asset.request.get("base") is False:
        yield "  adapter  its base model is left out (`base: false` in the manifest)"
    for code in asset.code:
        count = human_count(len(code.files), "file")
        yield f"  code     {count} of {code.repository}@{code.commit}: runs when it is loaded"
    if asset.aliases:
        yield f"  also     {', '.join(asset.aliases)}"


def _environment_lines(environment: LockedEnvironment) -> Iterator[str]:
    packages = environment.packages
    python = next((p.version for p in packages if p.name == "python"), "unknown")
    solved = ", ".join(
        f"{name.strip('_')} {version}"
        for name, version in sorted(environment.virtual_packages.items())
    )
    solved_for = f" (solved for {solved})" if solved else ""
    yield f"  python   {python} on {environment.platform}{solved_for}"
    counts = ", ".join(f"{sum(p.manager == m for p in packages)} {m}" for m in ("conda", "pip"))
    yield f"  packages {counts} (named in stage.lock)"
    yield f"  tree     {environment.tree}"


def _signature(root: Path, signers: Path | None) -> str:
    from stage.bundle.bundle import SIGNATURE
    from stage.bundle.signature import check_signature, signed_by

    if signers is not None:
        return f"signed by {check_signature(root, signers)}"
    if key := signed_by(root):
        return f"signed with {key} (not checked: give --signers)"
    return "signature damaged" if (root / SIGNATURE).exists() else "not signed"


def describe_json(root: Path, signers: Path | None = None) -> dict[str, Any]:
    """The document of `stage show --json`.

    Raises:
        StageError: as for `describe`.
    """
    from stage.bundle.bundle import SIGNATURE, Bundle
    from stage.bundle.signature import check_signature

    bundle = Bundle.open(root)
    return {
        "bundle": str(root),
        "bundle_id": bundle.id,
        "name": bundle.lock.name,
        "files": len(bundle.lock.files),
        "bytes": bundle.lock.size,
        "signed": (root / SIGNATURE).exists(),
        "signer": check_signature(root, signers).to_json() if signers is not None else None,
        "assets": {
            name: {**_asset_json(asset), "trained": _trained(root, asset)}
            for name, asset in bundle.lock.assets.items()
        },
    }


def _asset_json(asset: LockedAsset) -> dict[str, Any]:
    return {
        "kind": asset.kind,
        "path": asset.folder,
        "source": asset.source.location,
        "requested_revision": asset.source.requested_revision,
        "commit": asset.source.commit,
        "aliases": list(asset.aliases),
        "licence": asset.licence,
        "base": asset.base.repository if asset.base else None,
        "code": [
            {"repository": c.repository, "commit": c.commit, "files": list(c.files)}
            for c in asset.code
        ],
        "made_from": [
            {"origin": i.origin, "size": i.size, "sha256": i.sha256} for i in asset.made_from
        ],
        "files": len(asset.files),
        "bytes": asset.size,
        "environment": asdict(asset.environment) if asset.environment else None,
        "configs": {
            config: {
                name: {"rows": split.rows, "columns": {c.name: c.type for c in split.schema or ()}}
                for name, split in splits.items()
            }
            for config, splits in asset.configs.items()
        },
        "left_out": len(asset.left_out),
    }
