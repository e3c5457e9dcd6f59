"""stage: makes, verifies and reads bundles. This is the public Python API.

Its page is docs/reference/python-api.md.

Everything here is imported at first use (PEP 562), so `import stage` is fast and modules can move
without breaking user code. Modules below `stage` are internal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from stage.bundle.bundle import Bundle, BundleAsset
    from stage.errors import StageError
    from stage.fetch import FetchPackage
    from stage.fetch.plan import FetchOutcome
    from stage.lock.write import Lockfile
    from stage.manifest.manifest import Manifest
    from stage.verify import VerifyPackage
    from stage.verify.report import VerificationReport

    fetch: FetchPackage
    verify: VerifyPackage

__all__ = [
    "Bundle",
    "BundleAsset",
    "FetchOutcome",
    "Lockfile",
    "Manifest",
    "StageError",
    "VerificationReport",
    "__version__",
    "fetch",
    "open_bundle",
    "resolve",
    "verify",
]

_MODULES = {
    "Bundle": "stage.bundle.bundle",
    "BundleAsset": "stage.bundle.bundle",
    "FetchOutcome": "stage.fetch.plan",
    "Lockfile": "stage.lock.write",
    "Manifest": "stage.manifest.manifest",
    "StageError": "stage.errors",
    "VerificationReport": "stage.verify.report",
}
_CALLABLE_PACKAGES = ("fetch", "verify")


def open_bundle(path: Path | str) -> Bundle:
    """Opens a finished bundle. Compares its lock with the tag manifest; reads no payload.

    `open_bundle(path)["bert"].path` is the folder of the asset `bert`.

    Raises:
        StageError: exit code 1 the lock is damaged, 2 not a finished bundle, or a newer format.
    """
    from stage.bundle.bundle import Bundle

    return Bundle.open(path)


def resolve(
    manifest: Manifest | Path | str,
    *,
    update: Iterable[str] = (),
    locked: bool = False,
    endpoint: str | None = None,
    allow_pickle: bool = False,
    quiet: bool = False,
) -> Lockfile:
    """Resolves a manifest to exact commits and files, as `stage lock` does, but writes no file.

    Assets that the lock beside the manifest answers keep their pins.

    Args:
        update: names of assets to resolve again although the lock pins them; `*`: all.
        locked: raise where the lock does not answer the manifest.
        endpoint: URL of the Hub or of a mirror; None: $HF_ENDPOINT, else the public Hub.
        allow_pickle: accept models that have only pickles (they are converted to safetensors).
        quiet: print warnings only. Notes and warnings go to stderr.

    Raises:
        StageError: exit code 2 a wrong manifest, 3 refused by policy, 5 run it again.
    """
    from stage.fetch.resolve import look_at_local, read_previous
    from stage.fetch.resolve import resolve as resolve_manifest
    from stage.fetch.sources import Sources
    from stage.hub.library import check_hub_library
    from stage.manifest.manifest import Manifest
    from stage.util.progress import Reporter

    check_hub_library()
    loaded = manifest if isinstance(manifest, Manifest) else Manifest.load(manifest)
    updates = set(update)
    with Reporter(quiet=quiet) as reporter:
        sources = Sources(endpoint, reporter, allow_pickle=allow_pickle, keep_locks=False)
        previous = read_previous(loaded)
        look_at_local(loaded, previous, sources, updates)
        return resolve_manifest(
            loaded, previous, sources, reporter, updates=updates, locked=locked
        ).lock


if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name at its first use."""
        from importlib import import_module

        if name in _CALLABLE_PACKAGES:
            return import_module(f"stage.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'stage' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
