"""What `stage show` and `stage verify` print of a bundle: text for people, JSON for programs.

The words of a verdict are `verifier`'s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stage.bundle import bundle as layout
from stage.bundle.bundle import VERIFIER, Bundle, is_known_verifier
from stage.bundle.receipt import KnownDamage, find_damage, format_findings, record
from stage.bundle.signature import Trust, check_signature, signed_by
from stage.bundle.verifier import (
    HOW,
    VerificationReport,
    describe_sound,
    keep_verdict,
    state_folder,
    suggest_fixes,
)
from stage.cli.base import say
from stage.errors import DamageError, UsageError, quoted
from stage.files import human_count, human_size, is_hex, read_file
from stage.lock.model import LockedAsset, LockedEnvironment, read_lock
from stage.progress import Reporter

LARGEST_CARD = 2**20
"""Bytes of a model card that is read."""


def describe(root: Path, signers: Path | None = None) -> str:
    """The text of `stage show`.

    Args:
        signers: a file of allowed signers to check the signature against.

    Raises:
        UsageError, DamageError: as for `Bundle.open`.
        SignatureError: with `signers`, as for `check_signature`.
    """
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
    if signers is not None:
        return f"signed by {check_signature(root, signers)}"
    if key := signed_by(root):
        return f"signed with {key} (not checked: give --signers)"
    return "signature damaged" if (root / layout.SIGNATURE).exists() else "not signed"


def describe_json(root: Path, signers: Path | None = None) -> dict[str, Any]:
    """The document of `stage show --json`.

    Raises:
        StageError: as for `describe`.
    """
    bundle = Bundle.open(root)
    return {
        "bundle": str(root),
        "bundle_id": bundle.id,
        "name": bundle.lock.name,
        "files": len(bundle.lock.files),
        "bytes": bundle.lock.size,
        "signed": (root / layout.SIGNATURE).exists(),
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


def bundle_id_of(text: str | None) -> str | None:
    """The id that is meant by `--id`.

    Raises:
        UsageError: neither an id nor a complete lock.
    """
    if text is None:
        return None
    if is_hex(value := text.removeprefix("sha256:").lower(), 64):
        return value
    try:
        data = read_file(Path(text))
    except OSError as error:
        raise UsageError(
            f"--id {text}: neither an id (64 hex digits) nor a lock that can be read "
            f"({error.strerror}).",
            "`stage show` prints the id where the bundle was made; its lock is the x.lock beside "
            "the manifest.",
        ) from None
    lock = read_lock(data, text)
    if not lock.is_complete:
        raise UsageError(
            f"--id {text}: an incomplete lock: no bundle was ever finished with it.",
            "Give the id of the finished bundle: `stage show BUNDLE` prints it.",
        )
    return lock.id


def keep_receipt(result: VerificationReport, trust: Trust, state: Path, reporter: Reporter) -> None:
    """Keeps a receipt, or the record of damage.

    If a signature is demanded and cannot be believed, a sound bundle gets no receipt.
    """
    if result.is_another or (result.ok and trust.error is not None):
        return
    if why_not := keep_verdict(record, state, result):
        reporter.note(why_not)


def known_damage(result: VerificationReport, state: Path) -> KnownDamage | None:
    """The damage on record: found now, or by an earlier verification and not repaired since."""
    was_all_read = result.ok and result.level != "fast"
    return None if was_all_read or result.is_another else find_damage(state, result.root)


def verdict_json(
    result: VerificationReport, trust: Trust, known: KnownDamage | None
) -> dict[str, Any]:
    """What `--json` prints; without `known`, what `--report` writes."""
    found = result.to_json() | trust.to_json()
    if result.ok and known is not None:  # found by a verification that read the bytes
        damage = {"findings": len(known.report.findings), "report": str(known.written)}
        found["known_damage"] = damage
    return found


def exit_code(result: VerificationReport, trust: Trust, known: KnownDamage | None) -> int:
    """A missing signature comes before damage: who signed is what was asked."""
    if trust.error is not None:
        return trust.error.exit_code
    return DamageError.exit_code if known is not None else result.exit_code


def print_verdict(
    result: VerificationReport,
    trust: Trust,
    report: Path | None,
    known: KnownDamage | None,
    *,
    quiet: bool,
) -> None:
    """Prints the verdict, what repairs the bundle, and who signed it.

    Args:
        report: the file of `--report`.
        known: the damage on record.
    """
    is_signed = trust.signer is not None
    for line in format_findings(result):
        say(line)
    if not result.ok:
        kept = known.written if known else None
        _print_damage(result, "", report or kept)
        if kept is not None:
            say(f"The report is kept in {kept}", err=True)
    elif known is not None:  # found by a verification that read the bytes, as `--fast` does not
        say(f"{result.root}: known to be damaged; {HOW[result.level]}")
        when = f": {known.describe(time.time())}, and not repaired since"
        _print_damage(known.report, when, known.written)
    elif not quiet:
        count, size = human_count(result.files, "file"), human_size(result.size)
        for line in describe_sound(result, count, size, is_signed):
            say(line)
    if not is_signed and _has_unknown_verifier(result):
        say(
            f"{result.root}: this version of airlift does not know its {VERIFIER}: another version "
            "wrote it, or it was replaced. The bundle id does not cover it: do not run it "
            "unless the bundle is signed (--signers)",
            err=True,
        )
    if is_signed and not quiet:
        but = (
            "" if result.ok else ": the signature is good; what is damaged is not as it was signed"
        )
        say(f"signed by {trust.signer}{but}")
    if trust.error is not None:
        say(f"error: {trust.error}", err=True)


def _print_damage(report: VerificationReport, when: str, written: Path | None) -> None:
    count = human_count(len(report.findings), "finding")
    advice = "\n     ".join(suggest_fixes(report, written))
    say(f"error: {DamageError(f'{report.root}: {count}{when}.', advice)}", err=True)


def _has_unknown_verifier(result: VerificationReport) -> bool:
    return VERIFIER in result.unproven and not is_known_verifier(
        read_file(result.root / VERIFIER, follow=False)
    )
