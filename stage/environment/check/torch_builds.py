"""The GPUs that the published builds of torch run on: a table with its sources. Pure.

A wheel has machine code for some GPU architectures, and no other GPU runs it with any driver: the
job fails at its first kernel with "no kernel image is available". A build that is not in the table
is not known, and is never refused.

Sources, for Linux:

- pytorch/pytorch RELEASE.md (compatibility matrix, CUDA support matrix), and there
  `.ci/manywheel/build_cuda.sh` and `.ci/aarch64_linux/aarch64_ci_build.sh` (TORCH_CUDA_ARCH_LIST);
  issues 147953, 172663, 178665, pulls 164471, 182849;
- `cuobjdump` of the builds: moi90/pytorch_compute_capabilities;
- the tags and requirements of the wheels on PyPI, for `glibc` and `pypi`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from stage.environment.spec.profile import Profile

PTX = "+PTX"
"""After an architecture: the wheel has its intermediate code too, for newer GPUs."""

OLDEST_SERIES = "2.0"

_MAXWELL_TO_AMPERE = "5.0 6.0 7.0 7.5 8.0 8.6"
_MAXWELL_TO_HOPPER = f"{_MAXWELL_TO_AMPERE} 9.0"
_VOLTA_TO_BLACKWELL = "7.0 7.5 8.0 8.6 9.0 10.0 12.0"
_TURING_TO_BLACKWELL = "7.5 8.0 8.6 9.0 10.0 12.0"
_GRACE = "8.0 9.0"
_GRACE_BLACKWELL = "8.0 9.0 10.0 12.0"
_GRACE_THOR = f"8.0 9.0 10.0 11.0 12.0{PTX}"

_OLDEST_OF_TOOLKIT = {11: "3.5", 12: "5.0", 13: "7.5"}
"""The oldest compute capability that a CUDA major version can compile for (its release notes)."""


@dataclass(frozen=True)
class TorchBuild:
    """One published build.

    Attributes:
        series: of torch, "2.8".
        cuda: the runtime it brings, "12.8".
        architectures: such as "8.6" or "12.0+PTX".
        glibc: the oldest it runs with.
        pypi: whether this is the one that PyPI has; the others come from PyTorch's own index.
        machine: `uname -m` of the machines it is for.
    """

    series: str
    cuda: str
    architectures: tuple[str, ...]
    glibc: str
    pypi: bool
    machine: str = "x86_64"

    @property
    def tag(self) -> str:
        """Name of its index, and of its local version: "cu128"."""
        return f"cu{self.cuda.replace('.', '')}"

    def __str__(self) -> str:
        if self.pypi:
            return f"torch {self.series} from PyPI (CUDA {self.cuda})"
        version, index = f"{self.series}.0+{self.tag}", index_of(self.tag)
        return f"torch {version} from the CUDA {self.cuda} index ({index})"


def index_of(tag: str) -> str:
    """Address of PyTorch's own index for a local version: "cu118", "cpu"."""
    return f"https://download.pytorch.org/whl/{tag}"


def _build(
    series: str,
    cuda: str,
    architectures: str,
    *,
    glibc: str = "2.28",
    pypi: bool = False,
    machine: str = "x86_64",
) -> TorchBuild:
    return TorchBuild(series, cuda, tuple(architectures.split()), glibc, pypi, machine)


def _arm(series: str, cuda: str, architectures: str, *, pypi: bool = False) -> TorchBuild:
    return _build(series, cuda, architectures, pypi=pypi, machine="aarch64")


TORCH_BUILDS = (
    _build("2.0", "11.7", f"3.7 {_MAXWELL_TO_AMPERE}", glibc="2.17", pypi=True),
    _build("2.0", "11.8", f"3.7 {_MAXWELL_TO_HOPPER}", glibc="2.17"),
    _build("2.1", "11.8", f"3.7 {_MAXWELL_TO_HOPPER}", glibc="2.17"),
    _build("2.1", "12.1", _MAXWELL_TO_HOPPER, glibc="2.17", pypi=True),
    _build("2.2", "11.8", f"3.7 {_MAXWELL_TO_HOPPER}", glibc="2.17"),
    _build("2.2", "12.1", _MAXWELL_TO_HOPPER, glibc="2.17", pypi=True),
    _build("2.3", "11.8", f"3.7 {_MAXWELL_TO_HOPPER}", glibc="2.17"),
    _build("2.3", "12.1", _MAXWELL_TO_HOPPER, glibc="2.17", pypi=True),
    _build("2.4", "11.8", f"3.7 {_MAXWELL_TO_HOPPER}", glibc="2.17"),
    _build("2.4", "12.1", _MAXWELL_TO_HOPPER, glibc="2.17", pypi=True),
    _build("2.4", "12.4", _MAXWELL_TO_HOPPER, glibc="2.17"),
    _build("2.5", "11.8", f"3.7 {_MAXWELL_TO_HOPPER}", glibc="2.17"),
    _build("2.5", "12.1", _MAXWELL_TO_HOPPER, glibc="2.17"),
    _build("2.5", "12.4", _MAXWELL_TO_HOPPER, glibc="2.17", pypi=True),
    _build("2.6", "11.8", f"3.7 {_MAXWELL_TO_HOPPER}", glibc="2.17"),
    _build("2.6", "12.4", _MAXWELL_TO_HOPPER, glibc="2.17", pypi=True),
    _build("2.6", "12.6", _MAXWELL_TO_HOPPER),
    _build("2.7", "11.8", f"3.7 {_MAXWELL_TO_HOPPER}"),
    _build("2.7", "12.6", _MAXWELL_TO_HOPPER, pypi=True),
    _build("2.7", "12.8", _TURING_TO_BLACKWELL),
    _build("2.8", "12.6", _MAXWELL_TO_HOPPER),
    _build("2.8", "12.8", _VOLTA_TO_BLACKWELL, pypi=True),
    _build("2.8", "12.9", f"{_VOLTA_TO_BLACKWELL}{PTX}"),
    _build("2.9", "12.6", _MAXWELL_TO_HOPPER),
    _build("2.9", "12.8", _VOLTA_TO_BLACKWELL, pypi=True),
    _build("2.9", "13.0", f"{_TURING_TO_BLACKWELL}{PTX}"),
    _build("2.10", "12.6", _MAXWELL_TO_HOPPER),
    _build("2.10", "12.8", _VOLTA_TO_BLACKWELL, pypi=True),
    _build("2.10", "13.0", f"{_TURING_TO_BLACKWELL}{PTX}"),
    _build("2.11", "12.6", _MAXWELL_TO_HOPPER),
    _build("2.11", "12.8", _TURING_TO_BLACKWELL),
    _build("2.11", "13.0", f"{_TURING_TO_BLACKWELL}{PTX}", pypi=True),
    _build("2.12", "12.6", _MAXWELL_TO_HOPPER),
    _build("2.12", "13.0", f"{_TURING_TO_BLACKWELL}{PTX}", pypi=True),
    _build("2.12", "13.2", f"{_TURING_TO_BLACKWELL}{PTX}"),
    _build("2.13", "12.6", _MAXWELL_TO_HOPPER),
    _build("2.13", "13.0", f"{_TURING_TO_BLACKWELL}{PTX}", pypi=True),
    _build("2.13", "13.2", f"{_TURING_TO_BLACKWELL}{PTX}"),
    _build("2.14", "12.6", _MAXWELL_TO_HOPPER),
    _build("2.14", "13.0", f"{_TURING_TO_BLACKWELL}{PTX}", pypi=True),
    _build("2.14", "13.2", f"{_TURING_TO_BLACKWELL}{PTX}"),
    # Arm (GH200, GB200). PyPI's torch for Arm has CUDA from 2.11 on; too little is known about 2.7,
    # 2.8.
    _arm("2.6", "12.6", "5.0 8.0 8.6 8.9 9.0"),
    _arm("2.9", "12.6", _GRACE),
    _arm("2.9", "12.8", _GRACE_BLACKWELL),
    _arm("2.9", "13.0", _GRACE_THOR),
    _arm("2.10", "12.6", _GRACE),
    _arm("2.10", "12.8", _GRACE_BLACKWELL),
    _arm("2.10", "13.0", _GRACE_THOR),
    _arm("2.11", "12.6", _GRACE),
    _arm("2.11", "12.8", _GRACE_BLACKWELL),
    _arm("2.11", "13.0", _GRACE_THOR, pypi=True),
    _arm("2.12", "12.6", _GRACE),
    _arm("2.12", "13.0", _GRACE_THOR, pypi=True),
    _arm("2.12", "13.2", _GRACE_THOR),
    _arm("2.13", "12.6", _GRACE),
    _arm("2.13", "13.0", _GRACE_THOR, pypi=True),
    _arm("2.13", "13.2", _GRACE_THOR),
    _arm("2.14", "12.6", _GRACE),
    _arm("2.14", "13.0", _GRACE_THOR, pypi=True),
    _arm("2.14", "13.2", _GRACE_THOR),
)

_FIRST_WITH_CUDA_ON_PYPI = {"aarch64": (2, 11)}
"""Machine -> the first series on PyPI with CUDA for it; older ones there are for CPUs."""


def numbers(version: str) -> tuple[int, int]:
    """MAJOR and MINOR of a version, for comparison: `12.6.77` -> (12, 6).

    Raises:
        ValueError: it does not begin with a number.
    """
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return int(major), int(minor) if minor.isdigit() else 0


def build_of(version: str) -> str:
    """The build in a version or requirement of torch: `cu118` of `2.6.0+cu118`; empty: none."""
    match = re.search(r"\+(cu\d{2,3}|cpu|rocm[\d.]*|xpu)(?:$|\.)", version)
    return match[1] if match else ""


def cuda_in(build: str) -> str | None:
    """The CUDA that a build of torch names, pip's by its version, conda's by its build string.

    >>> cuda_in("2.8.0+cu126"), cuda_in("cuda126_mkl_py311_h0_0"), cuda_in("py3.11_cuda12.6_0")
    ('12.6', '12.6', '12.6')
    """
    match = re.search(r"\+cu(\d{2,3})(?:$|\.)|cuda(\d{2,3}|\d+\.\d+)(?=_|$|py)", build)
    if match is None:
        return None
    digits = match[1] or match[2]
    return digits if "." in digits else f"{digits[:-1]}.{digits[-1]}"


def is_without_cuda(torch: str, machine: str) -> bool:
    """Whether a torch is known to have no CUDA: `2.8.0+cpu`, or PyPI's for Arm before 2.11."""
    plain, _, local = torch.partition("+")
    if local:  # a site's own, such as `2.5.0+a1b2`, has what it has
        return local.startswith(("cpu", "rocm", "xpu"))
    return numbers(plain) < _FIRST_WITH_CUDA_ON_PYPI.get(machine, (0, 0))


def architectures_of(torch: str, cuda: str, machine: str = "x86_64") -> tuple[str, ...] | None:
    """The GPUs that a wheel of torch (`2.8.0`, CUDA `12.8.90`) is compiled for; None: not known."""
    wanted = numbers(torch), numbers(cuda), machine
    for build in TORCH_BUILDS:
        if (numbers(build.series), numbers(build.cuda), build.machine) == wanted:
            return build.architectures
    return None


def runs_on(architectures: tuple[str, ...], capability: str, *, ptx: bool = True) -> bool:
    """Whether code for `architectures` runs on a GPU of compute capability `capability`.

    Code for 8.0 runs on 8.6 and 8.9, not on 9.0 (CUDA C++ Programming Guide, "Binary
    Compatibility"). With PTX it runs on any newer GPU, if the driver can compile it (`ptx`).
    """
    have = numbers(capability)
    for architecture in architectures:
        compiled_for = numbers(architecture.removesuffix(PTX))
        if compiled_for[0] == have[0] and compiled_for <= have:
            return True
        if ptx and architecture.endswith(PTX) and compiled_for <= have:
            return True
    return False


def toolkit_dropped(cuda: str, capability: str) -> str | None:
    """The oldest compute capability that this CUDA compiles for, if `capability` is older."""
    oldest = _OLDEST_OF_TOOLKIT.get(numbers(cuda)[0])
    return oldest if oldest and numbers(capability) < numbers(oldest) else None


def newest_toolkit(driver_cuda: str, capability: str) -> int:
    """The newest CUDA major version that a driver runs, and that compiles for a GPU."""
    driver, gpu = numbers(driver_cuda)[0], numbers(capability)
    fitting = [
        m for m, oldest in _OLDEST_OF_TOOLKIT.items() if m <= driver and numbers(oldest) <= gpu
    ]
    return max(fitting, default=driver)


def builds_for(profile: Profile) -> tuple[TorchBuild, ...]:
    """The known builds that such a node runs, newest last: by torch, then by CUDA.

    In a series, a CUDA that is not newer than the driver's comes last: it needs no compatibility
    mode. None for a node without a GPU, or with one that the profile does not name.
    """
    if profile.cuda is None or profile.compute_capability is None:
        return ()
    driver, capability = numbers(profile.cuda), profile.compute_capability
    fitting = [
        build
        for build in TORCH_BUILDS
        if build.machine == profile.machine
        and numbers(build.cuda)[0] <= driver[0]
        and numbers(build.glibc) <= numbers(profile.glibc)
        and runs_on(build.architectures, capability, ptx=numbers(build.cuda) <= driver)
    ]

    def newness(build: TorchBuild) -> tuple[tuple[int, int], bool, tuple[int, int]]:
        return numbers(build.series), numbers(build.cuda) <= driver, numbers(build.cuda)

    return tuple(sorted(fitting, key=newness))


def torch_limit(profile: Profile, tags: Collection[str]) -> str | None:
    """The first version of torch that does not run on such nodes: the bound for a resolver.

    Args:
        tags: of PyTorch's own indexes that are configured besides PyPI: "cu118".

    Returns:
        The version after the newest that fits; None: no known build does.
    """
    within_reach = [
        numbers(build.series) for build in builds_for(profile) if build.pypi or build.tag in tags
    ]
    if not within_reach:
        return None
    major, minor = max(within_reach)
    return f"{major}.{minor + 1}"


def what_fits(profile: Profile) -> str:
    """A sentence: the newest torch of PyPI for such a node, and a newer one of PyTorch's index."""
    if profile.cuda is None or profile.compute_capability is None:
        return "Ask for an older torch."
    fitting = builds_for(profile)
    if not fitting:
        return (
            f"No published torch since {OLDEST_SERIES} is known to run there: compile one for it."
        )
    from_pypi = [build for build in fitting if build.pypi]
    offered = from_pypi[-1:]
    if not offered or numbers(fitting[-1].series) > numbers(offered[0].series):
        offered = [*offered, fitting[-1]]
    return f"What fits: {', or '.join(map(str, offered))}."
