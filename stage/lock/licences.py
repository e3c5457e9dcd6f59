"""Licences: what a repository's card states, and what a manifest's policy allows.

The licence of an asset is text, as the card states it: an identifier of the Hub's list (mostly
SPDX's, in lower case), several of them separated by commas, `other (name)` for one that is not in
the list, or nothing. Nothing counts as `unknown`, the Hub's own term.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from stage.errors import PolicyError, UsageError
from stage.lock.manifest import Manifest
from stage.lock.model import LockedAsset, Lockfile
from stage.lock.requests import AssetRequest

UNKNOWN = "unknown"
OTHER = "other"


def stated(identifiers: Sequence[object], name: object) -> str | None:
    """The statement of a card, from its `license` and `license_name`; None if it states nothing."""
    words = [str(identifier).strip() for identifier in identifiers if str(identifier).strip()]
    named = " ".join(name.replace(",", " ").split()) if isinstance(name, str) else ""
    return (
        ", ".join(f"{OTHER} ({named})" if word == OTHER and named else word for word in words)
        or None
    )


def identifiers(statement: str | None) -> list[str]:
    """The licences of a statement, `unknown` if there is none."""
    return [word for word in (statement or "").split(", ") if word] or [UNKNOWN]


def not_allowed(statement: str | None, allowed: Collection[str]) -> list[str]:
    """The licences of a statement that a policy does not allow.

    Each has to be allowed, because a card does not say whether several mean "or" or "and". `other
    (name)` is allowed by `name`, by `other (name)` and by `other`. Case does not matter (SPDX 2.3,
    annex D.2).
    """
    known = {word.casefold() for word in allowed}
    return [word for word in identifiers(statement) if not _spellings(word.casefold()) & known]


def _spellings(word: str) -> set[str]:
    if word.startswith(f"{OTHER} (") and word.endswith(")"):
        return {word, word.removeprefix(f"{OTHER} (").removesuffix(")"), OTHER}
    return {word}


def states_nothing(statement: str | None) -> bool:
    """Whether a user may know more than the card states."""
    return all(word == UNKNOWN or word.startswith(OTHER) for word in identifiers(statement))


def with_stated_licence(
    asset: LockedAsset, request: AssetRequest, manifest: Manifest
) -> LockedAsset:
    """The asset with the licence that the manifest states, where its repository states none.

    Raises:
        UsageError: the repository states another.
    """
    licence = getattr(request, "licence", None)
    if licence is None:
        return asset
    if not states_nothing(asset.licence) and asset.licence != licence:
        raise UsageError(
            f"{manifest.place(asset.name, 'licence')}: `{asset.name}`: {asset.source.location} "
            f"states the licence {asset.licence}, not {licence}.",
            "`licence:` is for repositories that state none: remove it.",
        )
    return replace(asset, licence=licence)


def check_licences(manifest: Manifest, lock: Lockfile) -> None:
    """Checks that the manifest's policy allows each licence, those of code included.

    Raises:
        PolicyError: names the assets, and the licences that are not allowed.
    """
    if manifest.licences is None:
        return
    refused = [
        (asset.name, f"{whose}{', '.join(names)}{' (none is stated)' if licence is None else ''}")
        for asset in lock.assets.values()
        for whose, licence in _statements(asset).items()
        if (names := not_allowed(licence, manifest.licences))
    ]
    if not refused:
        return
    listed = "; ".join(f"{manifest.place(name)}: `{name}`: {which}" for name, which in refused)
    raise PolicyError(
        f"Licences that the policy does not allow: {listed}. "
        f"It allows {', '.join(manifest.licences)}.",
        "Take another repository; or, after reading the licence, add it to "
        "`policy: {licences: [...]}`. If the repository states none, write the licence that you "
        "know: `licence: mit` in its entry.",
    )


def _statements(asset: LockedAsset) -> dict[str, str | None]:
    """The stated licences: of the asset (key `""`), and of code from other repositories."""
    others = {
        f"code of {c.repository}: ": c.licence
        for c in asset.code
        if c.repository != asset.source.location
    }
    return {"": asset.licence, **others}
