"""`stage fetch`: from the manifest to the lock, from the lock to the bundle.

`stage.fetch` is both this package and the function of the Python API. Python sets the attribute
`fetch` of `stage` to this package as soon as any module of it is imported; a function of that name
would be replaced. So the package itself can be called, whatever was imported before.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from stage.fetch.plan import FetchOutcome
    from stage.manifest.manifest import Manifest


class FetchPackage(ModuleType):
    """The type of the package `stage.fetch`."""

    def __call__(
        self,
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

        from stage.fetch.fetch import fetch_manifest
        from stage.fetch.store import store_from
        from stage.hub.library import check_hub_library
        from stage.manifest.manifest import Manifest
        from stage.util.progress import Reporter

        check_hub_library()
        with Reporter(quiet=quiet) as reporter:
            return fetch_manifest(
                manifest.path if isinstance(manifest, Manifest) else Path(manifest),
                Path(output),
                endpoint=endpoint,
                jobs=jobs,
                locked=locked,
                updates=update,
                dry_run=dry_run,
                reporter=reporter,
                allow_pickle=allow_pickle,
                offline_check=offline_check,
                store=store_from(os.environ),
            )


sys.modules[__name__].__class__ = FetchPackage
