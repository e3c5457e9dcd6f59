"""`python -m scripts.lib.conda.example_locks` makes envs/locks/ again, the locks of the examples.

The pip half is real: PyPI's files for the example's Python and the profile's glibc. conda-forge
could not be reached where these were made, so a stand-in channel is made in the run: empty
packages of the right name and version. Its URL in the lock can never exist, so nobody mistakes it
for a channel; `stage env lock` solves the conda half again from conda-forge, and keeps the
versions of the pip half.

An existing lock keeps its versions, so that the result is the same bytes; delete it for newer ones.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.lib.conda.channel import File, Package, index, write_package
from scripts.lib.demo.environment_materials import CPU_INDEX
from stage.environment.solve.lock import lock_environment, own_requirements
from stage.environment.spec.conda_lock import EnvironmentLock, LockedPackage
from stage.environment.spec.environment_yml import EnvironmentSpec, content_hash
from stage.environment.spec.profile import Profile
from stage.errors import StageError
from stage.util.files import write_atomically
from stage.util.progress import Reporter

ENVS = Path(__file__).resolve().parents[3] / "envs"
STAND_IN = "https://conda-forge.invalid/stand-in"
"""Names below `.invalid` never resolve (RFC 2606)."""

PYTHONS, PIP = ("3.10.18", "3.11.13"), "25.2"


@dataclass(frozen=True)
class Example:
    """A shipped environment and the cluster that it is locked for."""

    name: str
    profile: str

    @property
    def spec_path(self) -> Path:
        return ENVS / f"{self.name}.yml"

    @property
    def lock_path(self) -> Path:
        return ENVS / "locks" / f"{self.name}.{self.profile}.conda-lock.yml"

    def stand_in_text(self, channel: str) -> str:
        """The environment file with `channel` for conda-forge, and without PyTorch's index."""
        text = self.spec_path.read_text(encoding="utf-8")
        text = text.replace("channels: [conda-forge]", f"channels: [{channel}]")
        return "".join(line for line in text.splitlines(keepends=True) if CPU_INDEX not in line)

    def load_profile(self) -> Profile:
        return Profile.load(ENVS / "profiles" / f"{self.profile}.yml")


EXAMPLES = (
    Example("bert-large", "a800"),
    Example("bert-large", "v100"),
    Example("qlora", "a800"),
    Example("demo-cpu", "cpu"),
)


def make_stand_in(folder: Path) -> str:
    """Makes the channel of empty packages; returns its URL. The same bytes on each machine."""
    for version in PYTHONS:
        tag = version.rpartition(".")[0]
        constrains = (f"python_abi {tag}.* *_cp{tag.replace('.', '')}",)
        package = Package(name="python", version=version, payload={}, constrains=constrains)
        write_package(folder, package)
    metadata = File(f"Metadata-Version: 2.1\nName: pip\nVersion: {PIP}\n".encode())
    payload = {f"site-packages/pip-{PIP}.dist-info/METADATA": metadata}
    needs = ("python >=3.9",)
    pip = Package(name="pip", version=PIP, payload=payload, depends=needs, python=True)
    write_package(folder, pip)
    index(folder)
    return folder.as_uri()


def make_lock(
    example: Example, kept: EnvironmentLock | None, work: Path, reporter: Reporter
) -> EnvironmentLock:
    """Locks one example like `stage env lock`, with the URL `STAND_IN` for the channel.

    Args:
        kept: an earlier lock, whose versions are kept where that is possible.
        work: an empty folder.

    Raises:
        StageError: as for `stage env lock`.
    """
    channel = make_stand_in(work / "channel")
    spec, output = work / example.spec_path.name, work / "lock.yml"
    spec.write_text(example.stand_in_text(channel), encoding="utf-8")
    if kept is not None:
        output.write_bytes(replace(kept, content_hash="").to_yaml())
    profile = example.load_profile()
    made = lock_environment(spec, profile.path, reporter=reporter, output=output).lock
    return replace(
        made,
        content_hash=expected_hash(example, work),
        channels=(STAND_IN,),
        sources=(f"../{example.spec_path.name}",),
        packages=tuple(_readdressed(made.packages, channel)),
        notes={**made.notes, "stands_in": f"{STAND_IN} for conda-forge: envs/locks/README.md"},
    )


def expected_hash(example: Example, work: Path) -> str:
    """The digest of the inputs of a lock: the example, its profile and airlift's requirements."""
    spec = work / "stand-in" / example.spec_path.name
    spec.parent.mkdir(parents=True, exist_ok=True)
    spec.write_text(example.stand_in_text(STAND_IN), encoding="utf-8")
    return content_hash(EnvironmentSpec.load(spec), example.load_profile(), own_requirements())


def _readdressed(packages: Iterable[LockedPackage], channel: str) -> Iterable[LockedPackage]:
    for package in packages:
        is_conda = package.manager == "conda"
        url = package.url.replace(channel, STAND_IN) if is_conda else package.url
        yield replace(package, url=url)


def main() -> int:
    """Makes every lock; returns the exit code."""
    with Reporter() as reporter:
        for example in EXAMPLES:
            path = example.lock_path
            with tempfile.TemporaryDirectory() as work:
                try:
                    kept = EnvironmentLock.load(path) if path.exists() else None
                    text = make_lock(example, kept, Path(work), reporter).to_yaml()
                except StageError as error:
                    print(f"{path.name}: {error.message}\n  -> {error.remedy}", file=sys.stderr)
                    return error.exit_code
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
