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
    from stage.bundle.verifier import VerificationReport
    from stage.errors import StageError
    from stage.lock.manifest import Manifest
    from stage.lock.model import Lockfile
    from stage.staging.fetch import FetchOutcome

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
    "FetchOutcome": "stage.staging.fetch",
    "Lockfile": "stage.lock.model",
    "Manifest": "stage.lock.manifest",
    "StageError": "stage.errors",
    "VerificationReport": "stage.bundle.verifier",
}


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
    from stage.installation import TO_FETCH, check_libraries
    from stage.lock.manifest import Manifest
    from stage.progress import Reporter
    from stage.staging.fetch import resolve_manifest
    from stage.staging.sources.source import FetchOptions

    check_libraries("stage.resolve", *TO_FETCH)
    loaded = manifest if isinstance(manifest, Manifest) else Manifest.load(manifest)
    options = FetchOptions(
        endpoint=endpoint,
        locked=locked,
        update=tuple(update),
        dry_run=True,
        allow_pickle=allow_pickle,
    )
    with Reporter(quiet=quiet) as reporter:
        return resolve_manifest(loaded, options, reporter)


def fetch(
    manifest: Manifest | Path | str,
    output: Path | str,
    *,
    locked: bool = False,
    update: Iterable[str] = (),
    dry_run: bool = False,
    endpoint: str | None = None,
    jobs: int = 8,
    allow_pickle: bool = False,
    offline_check: bool = True,
    quiet: bool = False,
) -> FetchOutcome:
    """Makes `output` the bundle that a manifest describes, as `stage fetch` does.

    Call it again after an interruption: it resumes.

    Args:
        manifest: the manifest, or the path of its file. Its lock is beside that file.
        output: the folder of the bundle; created where it does not exist.
        locked: raise where the lock does not answer the manifest.
        update: names of assets to resolve again although the lock pins them; `*`: all.
        dry_run: print the plan with sizes; download and write nothing.
        endpoint: URL of the Hub or of a mirror; None: $HF_ENDPOINT, else the public Hub.
        jobs: downloads at the same time.
        allow_pickle: accept models that have only pickles; they are converted to safetensors.
        offline_check: load the configs and tokenizers without a network before finishing.
        quiet: print warnings only. Notes, warnings and progress go to stderr.

    Raises:
        StageError: exit code 1 damaged downloads, 2 a wrong manifest, 3 refused by policy,
            5 call it again.
    """
    import os
    from pathlib import Path

    from stage.installation import TO_FETCH, check_libraries
    from stage.lock.manifest import Manifest
    from stage.progress import Reporter
    from stage.staging.fetch import fetch_manifest
    from stage.staging.sources.source import FetchOptions
    from stage.staging.working_folder import store_from

    check_libraries("stage.fetch", *TO_FETCH)
    path = manifest.path if isinstance(manifest, Manifest) else Path(manifest)
    options = FetchOptions(
        endpoint=endpoint,
        jobs=jobs,
        locked=locked,
        update=tuple(update),
        dry_run=dry_run,
        allow_pickle=allow_pickle,
        offline_check=offline_check,
        store=store_from(os.environ),
    )
    with Reporter(quiet=quiet) as reporter:
        return fetch_manifest(path, Path(output), options, reporter)


def verify(
    path: Path | str,
    level: str = "full",
    *,
    jobs: int | None = None,
    bundle_id: str | None = None,
    quiet: bool = False,
) -> VerificationReport:
    """Compares a bundle with its lock, and returns all findings.

    Writes nothing: no receipt and no journal to resume from. `stage verify` writes both.

    Args:
        path: the folder of the bundle.
        level: `fast` compares names, kinds and sizes; `full` also reads every byte; `deep`
            also loads configs, headers of weights, tokenizers and parquet footers.
        jobs: processes that read; None: one per core that this process may use.
        bundle_id: the id that the bundle must have, 64 hex digits; None: any.
        quiet: print nothing. Progress, and what `deep` could not check, go to stderr.

    Returns:
        The report. `report.ok` is true where there is no finding; damage is not an exception.

    Raises:
        StageError: exit code 2 not a bundle, a newer format, or a wrong argument, 5 run it
            again.
    """
    from pathlib import Path

    from stage.bundle.bundle import verify_shown
    from stage.bundle.verifier import LEVELS
    from stage.errors import UsageError
    from stage.files import is_hex
    from stage.installation import check_libraries
    from stage.progress import Reporter

    if level not in LEVELS:
        raise UsageError(
            f"level={level!r}: there is no such level.", f"Use one of: {', '.join(LEVELS)}."
        )
    if bundle_id is not None:
        bundle_id = bundle_id.removeprefix("sha256:").lower()
        if not is_hex(bundle_id, 64):
            raise UsageError(
                f"bundle_id={bundle_id!r}: a bundle id has 64 hex digits.",
                "`stage show BUNDLE` prints it.",
            )
    if level == "deep":
        check_libraries("level='deep'", "pyarrow")
    read = "full" if level == "deep" else level
    with Reporter(quiet=quiet) as reporter:
        report = verify_shown(Path(path), read, reporter, jobs=jobs, bundle_id=bundle_id)
        if level == "deep":
            from stage.staging.load_test import verify_deep

            report = verify_deep(report, reporter)
    return report


if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name at its first use."""
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module 'stage' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
