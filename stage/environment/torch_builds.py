"""Which GPUs the published builds of torch run on. A table with its sources, and three questions to it. Pure.

A wheel holds machine code for some GPU architectures and no other GPU runs it, whatever the driver says: the job fails
at its first kernel with "no kernel image is available". What is not in the table is not known, and is said to be so.

Sources: pytorch/pytorch RELEASE.md and `.ci/manywheel/build_cuda.sh` (TORCH_CUDA_ARCH_LIST), pull 175253 and issue
172352 there; `cuobjdump` of the wheels (moi90/pytorch_compute_capabilities); the wheels' own tags and requirements on
PyPI for `glibc` and `pypi`. Looked up for Linux on x86-64.
"""

from __future__ import annotations

from dataclasses import dataclass

PTX = "+PTX"
"""After an architecture: its intermediate code is in the wheel too, which the driver can compile for any newer GPU."""

_MAXWELL_TO_HOPPER = "5.0 6.0 7.0 7.5 8.0 8.6 9.0"
_VOLTA_TO_BLACKWELL = "7.0 7.5 8.0 8.6 9.0 10.0 12.0"
_TURING_TO_BLACKWELL = "7.5 8.0 8.6 9.0 10.0 12.0"

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
    """

    series: str
    cuda: str
    architectures: tuple[str, ...]
    glibc: str
    pypi: bool

    def __str__(self) -> str:
        if self.pypi:
            return f"torch {self.series} from PyPI (CUDA {self.cuda})"
        tag = f"cu{self.cuda.replace('.', '')}"
        return f"torch {self.series}.0+{tag} from the CUDA {self.cuda} index (https://download.pytorch.org/whl/{tag})"


def _build(series: str, cuda: str, architectures: str, *, glibc: str = "2.28", pypi: bool = False) -> TorchBuild:
    return TorchBuild(series, cuda, tuple(architectures.split()), glibc, pypi)


TORCH_BUILDS = (
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
)


def numbers(version: str) -> tuple[int, int]:
    """MAJOR and MINOR of a version, `12.6.77` -> (12, 6), to be compared.

    Raises:
        ValueError: it does not begin with a number.
    """
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return int(major), int(minor) if minor.isdigit() else 0


def architectures_of(torch: str, cuda: str) -> tuple[str, ...] | None:
    """What a wheel of torch (`2.8.0`, with CUDA `12.8` or `12.8.90`) was compiled for; None: not known."""
    wanted = numbers(torch), numbers(cuda)
    for build in TORCH_BUILDS:
        if (numbers(build.series), numbers(build.cuda)) == wanted:
            return build.architectures
    return None


def runs_on(architectures: tuple[str, ...], capability: str, *, ptx: bool = True) -> bool:
    """Whether code for `architectures` runs on a GPU of compute capability `capability`.

    Code for 8.0 runs on 8.6 and 8.9, not on 9.0 (CUDA C++ Programming Guide, "Binary Compatibility"). With PTX it runs
    on whatever is newer, if the driver can compile it (`ptx`).
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
    """The oldest compute capability this CUDA can compile for, if `capability` is older still; holds for any torch."""
    oldest = _OLDEST_OF_TOOLKIT.get(numbers(cuda)[0])
    return oldest if oldest and numbers(capability) < numbers(oldest) else None


def builds_for(capability: str, driver_cuda: str, glibc: str) -> tuple[TorchBuild, ...]:
    """The known builds that such a node runs, newest last: torch first, then CUDA.

    Among those of one series a CUDA no newer than the driver's counts as newer: it needs no compatibility mode.
    """
    fitting = [
        build
        for build in TORCH_BUILDS
        if numbers(build.cuda)[0] <= numbers(driver_cuda)[0]
        and numbers(build.glibc) <= numbers(glibc)
        and runs_on(build.architectures, capability, ptx=numbers(build.cuda) <= numbers(driver_cuda))
    ]
    return tuple(
        sorted(fitting, key=lambda b: (numbers(b.series), numbers(b.cuda) <= numbers(driver_cuda), numbers(b.cuda)))
    )


def what_fits(capability: str, driver_cuda: str, glibc: str) -> str:
    """The torch to ask for on such a node, in words: the newest from PyPI, and a newer one from PyTorch's own index."""
    fitting = builds_for(capability, driver_cuda, glibc)
    if not fitting:
        return "No published torch since 2.5 runs there: it would have to be compiled for it."
    from_pypi = [build for build in fitting if build.pypi]
    offered = from_pypi[-1:]
    if not offered or numbers(fitting[-1].series) > numbers(offered[0].series):
        offered = [*offered, fitting[-1]]
    return f"What fits: {', or '.join(map(str, offered))}."
