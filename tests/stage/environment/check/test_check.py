"""An environment that would not run on the cluster is refused, with a version that would run.

The rules are tables, and so are their tests; what is not known must never be refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stage.environment.check.check import Needs, glibc_needed, verdicts
from stage.environment.check.torch_builds import (
    architectures_of,
    numbers,
    runs_on,
    toolkit_dropped,
    torch_limit,
)
from stage.environment.spec.conda_lock import Package
from stage.environment.spec.profile import Profile

PROFILES = Path(__file__).resolve().parents[4] / "envs" / "profiles"


def locked(
    name: str,
    version: str,
    manager: str = "pip",
    url: str = "https://example.org/none-any.whl",
) -> Package:
    return Package(
        name=name,
        version=version,
        manager=manager,
        platform="linux-64",
        url=url,
        sha256="0" * 64,
    )


def torch(version: str, tag: str = "manylinux_2_28_x86_64") -> Package:
    return locked(
        "torch",
        version,
        url=f"https://example.org/torch-{version}-cp310-cp310-{tag}.whl".replace("+", "%2B"),
    )


def runtime(version: str) -> Package:
    return locked(f"nvidia-cuda-runtime-cu{numbers(version)[0]}", version)


def conda(name: str, version: str, build: str) -> Package:
    return locked(
        name, version, "conda", f"https://conda.example.org/linux-64/{name}-{version}-{build}.conda"
    )


def profile(name: str) -> Profile:
    return Profile.load(PROFILES / f"{name}.yml")


# --- architectures


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("8.0", "8.0", True),
        ("8.0", "8.6", True),
        ("8.0", "8.9", True),
        ("8.6", "8.0", False),
        ("8.0", "9.0", False),
        ("7.5", "7.0", False),
        ("7.0 9.0", "8.0", False),
        ("9.0 10.0 12.0", "12.1", True),
        ("12.0", "10.0", False),
        ("9.0+PTX", "10.0", True),
        ("9.0+PTX", "8.0", False),
        ("", "8.0", False),
    ],
)
def test_which_gpu_runs_which_code(architectures: str, capability: str, runs: bool) -> None:
    assert runs_on(tuple(architectures.split()), capability) is runs


@pytest.mark.parametrize(
    ("version", "cuda", "volta", "blackwell"),
    [
        ("2.6.0", "12.4.127", True, False),
        ("2.7.1", "12.8", False, True),
        ("2.8.0", "12.8.90", True, True),
        ("2.10.0", "12.8", True, True),
        ("2.10.0", "13.0", False, True),
        ("2.11.0", "12.8", False, True),
        ("2.11.0", "12.6", True, False),
    ],
)
def test_which_wheel_has_code_for_v100_and_for_blackwell(
    version: str, cuda: str, volta: bool, blackwell: bool
) -> None:
    architectures = architectures_of(version, cuda)
    assert architectures is not None
    assert (runs_on(architectures, "7.0"), runs_on(architectures, "12.0")) == (volta, blackwell)


@pytest.mark.parametrize(
    ("cuda", "capability", "oldest"),
    [
        ("13.0", "7.0", "7.5"),
        ("13.2.1", "7.5", None),
        ("12.8", "3.7", "5.0"),
        ("11.8", "3.7", None),
        ("99.0", "1.0", None),
    ],
)
def test_a_cuda_compiles_for_nothing_older_than_its_toolkit_knows(
    cuda: str, capability: str, oldest: str | None
) -> None:
    assert toolkit_dropped(cuda, capability) == oldest


@pytest.mark.parametrize(
    ("node", "tags", "limit"),
    [
        ("v100-cuda11", (), "2.1"),
        ("v100-cuda11", ("cu118",), "2.7"),
        ("v100-cuda11", ("cu126",), "2.1"),
        ("v100-cuda11", ("cu118", "cu126"), "2.7"),
        ("v100", (), "2.11"),
        ("a800", (), "2.11"),
        ("cpu", ("cu118", "cu126"), None),
    ],
)
def test_how_far_torch_may_go_depends_on_the_indexes_that_are_asked(
    node: str, tags: tuple[str, ...], limit: str | None
) -> None:
    """For an old driver PyPI's own ends at 2.0 (CUDA 11.7)."""
    assert torch_limit(profile(node), tags) == limit


# --- Arm


GH200 = Profile(
    path=Path("gh200.yml"), name="gh200", platform="linux-aarch64", glibc="2.34", cuda="12.4",
    compute_capability="9.0", gpu="NVIDIA GH200 480GB",
)  # fmt: skip


def test_how_far_torch_may_go_on_arm_depends_on_the_index() -> None:
    assert torch_limit(GH200, ()) is None and torch_limit(GH200, ("cu126",)) == "2.15"


# --- what the packages say


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("a-1-py3-none-any.whl", ""),
        ("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", "2.28"),
        ("a-1-cp310-cp310-manylinux1_x86_64.whl", "2.5"),
        ("a-1-cp310-cp310-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "2.17"),
        ("a-1-cp310-cp310-manylinux_2_27_x86_64.manylinux_2_34_x86_64.whl", "2.27"),
        ("a-1-cp310-cp310-linux_x86_64.whl", None),
        ("a-1-cp310-cp310-manylinux_2_28_aarch64.whl", ""),
        ("a-1-cp310-cp310-musllinux_1_2_x86_64.whl", ""),
        ("a-1-cp310-cp310-macosx_11_0_arm64.whl", ""),
        ("a-1-cp310-cp310-win_amd64.whl", ""),
    ],
)
def test_what_a_wheels_name_says_of_glibc(file: str, expected: str | None) -> None:
    assert glibc_needed(file, "x86_64") == expected


@pytest.mark.parametrize(
    ("packages", "cuda", "of"),
    [
        ([torch("2.8.0"), runtime("12.8.90")], "12.8", "nvidia-cuda-runtime-cu12 12.8.90"),
        ([torch("2.11.0"), locked("cuda-toolkit", "13.0.2")], "13.0", "cuda-toolkit 13.0.2"),
        ([torch("2.11.0+cu126"), locked("cuda-toolkit", "13.0.2")], "12.6", "torch 2.11.0+cu126"),
        (
            [torch("2.13.0"), locked("nvidia-cuda-runtime", "13.0.96")],
            "13.0",
            "nvidia-cuda-runtime 13.0.96",
        ),
        ([torch("2.13.0+cpu")], None, "torch 2.13.0+cpu"),
        ([torch("2.13.0")], None, ""),
        (
            [conda("pytorch", "2.7.1", "cuda126_generic_py311_h1_200")],
            "12.6",
            "pytorch 2.7.1 (cuda126_generic_py311_h1_200)",
        ),
        (
            [conda("pytorch", "2.5.1", "py3.11_cuda12.4_cudnn9.1.0_0")],
            "12.4",
            "pytorch 2.5.1 (py3.11_cuda12.4_cudnn9.1.0_0)",
        ),
        (
            [
                conda("pytorch", "2.7.1", "cpu_mkl_py311_h1_100"),
                conda("cuda-version", "12.6", "h0_3"),
            ],
            None,
            "pytorch 2.7.1 (cpu_mkl_py311_h1_100)",
        ),
        ([conda("cuda-version", "12.6", "h0_3")], "12.6", "cuda-version 12.6"),
        ([conda("cudatoolkit", "11.8.0", "h0_3")], "11.8", "cudatoolkit 11.8.0"),
        ([locked("numpy", "2.4.6")], None, ""),
    ],
)
def test_which_cuda_an_environment_brings(
    packages: list[Package], cuda: str | None, of: str
) -> None:
    needs = Needs.of(packages)
    assert needs.cuda == cuda and of == (needs.cuda_of if cuda else needs.without_cuda)
    assert not (needs.cuda_of if needs.cuda is None else needs.without_cuda)


NEW = locked("new", "1", url="https://example.org/new-1-cp310-cp310-manylinux_2_34_x86_64.whl")


@pytest.mark.parametrize(
    ("packages", "glibc"),
    [
        ([torch("2.8.0"), NEW], "2.34"),
        ([NEW, torch("2.8.0")], "2.34"),
        (
            [
                torch("2.8.0"),
                replace(conda("a", "1", "0"), dependencies={"__glibc": ">=2.30,<3.0.a0"}),
            ],
            "2.30",
        ),
        ([locked("pure", "1")], None),
    ],
)
def test_the_newest_glibc_that_anything_needs_counts(
    packages: list[Package], glibc: str | None
) -> None:
    assert Needs.of(packages).glibc == glibc


# --- verdicts


def notes(packages: list[Package], node: str) -> str:
    found = verdicts(Needs.of(packages), profile(node))
    assert not [verdict for verdict in found if verdict.refused]
    return " ".join(f"{verdict.problem} {verdict.remedy}" for verdict in found)


A800, ARM = profile("a800"), "manylinux_2_28_aarch64"
FITS = "What fits: torch 2.10 from PyPI (CUDA 12.8), or torch 2.14.0+cu126 from the CUDA 12.6 index"
FITS_ARM = "What fits: torch 2.14.0+cu126 from the CUDA 12.6 index"


@pytest.mark.parametrize(
    ("packages", "node", "problem", "remedy"),
    [
        (
            [torch("2.8.0"), NEW],
            A800,
            "new 1 needs glibc 2.34; a800 has 2.28.",
            "Ask for an older new, one with a wheel for glibc 2.28 or older.",
        ),
        (
            [torch("2.8.0", "manylinux_2_34_x86_64"), runtime("12.8.90")],
            A800,
            "torch 2.8.0 needs glibc 2.34",
            FITS,
        ),
        (
            [torch("2.8.0", "manylinux_2_34_x86_64")],
            replace(A800, cuda="13.2"),
            "torch 2.8.0 needs glibc 2.34",
            "What fits: torch 2.14 from PyPI (CUDA 13.0).",
        ),
        (
            [torch("2.8.0", "manylinux_2_34_x86_64")],
            profile("cpu"),
            "torch 2.8.0 needs glibc 2.34",
            "Ask for an older torch.",
        ),
        (
            [torch("2.7.1"), runtime("12.8.90")],
            profile("v100"),
            "torch 2.7.1 with CUDA 12.8 has no code for Tesla V100-SXM2-32GB (compute capability "
            "7.0), only for 7.5, 8.0, 8.6, 9.0, 10.0, 12.0.",
            FITS,
        ),
        (
            [torch("2.13.0"), locked("nvidia-cuda-runtime", "13.0.96")],
            A800,
            "CUDA 13.0 or newer (driver 580+); the driver of a800 has CUDA 12.2.",
            FITS,
        ),
        (
            [conda("pytorch", "2.7.1", "cpu_mkl_py311_h1_100")],
            A800,
            "is a build without CUDA: it does not use NVIDIA A800-SXM4-80GB.",
            "Write `pytorch=*=cuda*` and `cuda-version 12.*` in the conda dependencies.",
        ),
        (
            [torch("2.13.0+cpu")],
            replace(A800, cuda="10.2", compute_capability="3.5", gpu=None),
            "it does not use the GPU.",
            "No published torch since 2.0 is known to run there",
        ),
        (
            [torch("2.99.0+cu130")],
            replace(A800, glibc="2.34", cuda="13.0", compute_capability="7.0"),
            "knows no GPU older than 7.5",
            "What fits: torch 2.1",
        ),
        (
            [torch("2.10.0", ARM)],
            GH200,
            "torch 2.10.0 is a build without CUDA: it does not use NVIDIA GH200",
            FITS_ARM,
        ),
        (
            [torch("2.11.0", ARM), locked("cuda-toolkit", "13.0.2")],
            GH200,
            "needs a driver with CUDA 13.0",
            FITS_ARM,
        ),
    ],
)
def test_what_would_not_run_is_refused_with_what_does(
    packages: list[Package], node: Profile, problem: str, remedy: str
) -> None:
    found = verdicts(Needs.of(packages, node.machine), node)
    (refused,) = [verdict for verdict in found if verdict.refused]
    assert problem in refused.problem and refused.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("packages", "node", "said"),
    [
        ([torch("2.10.0"), runtime("12.8.90")], "a800", "minor-version compatibility"),
        ([torch("2.99.0+cu121")], "a800", "Not known whether torch 2.99.0"),
        ([conda("pytorch", "2.7.1", "cuda118_generic_py311_h1_200")], "a800", "get_arch_list"),
        ([torch("2.6.0+cu118", "linux_x86_64")], "v100",
         "torch 2.6.0+cu118: the wheel does not say which glibc"),
        ([torch("2.10.0")], "v100", "Not known whether torch 2.10.0 uses"),
        ([torch("2.8.0"), runtime("12.8.90")], "cpu", "nodes without a GPU do not use"),
    ],
)  # fmt: skip
def test_what_is_not_known_or_not_used_is_a_note(
    packages: list[Package], node: str, said: str
) -> None:
    assert said in notes(packages, node)


@pytest.mark.parametrize(
    ("packages", "node"),
    [
        ([torch("2.8.0"), runtime("12.8.90")], "h200"),
        ([torch("2.6.0+cu118", "manylinux1_x86_64")], "v100-cuda11"),
        ([torch("2.13.0+cpu")], "cpu"),
        ([torch("2.10.0+cpu")], "cpu"),
        ([locked("numpy", "2.4.6")], "a800"),
    ],
)
def test_what_fits_without_reserve_is_not_spoken_of(packages: list[Package], node: str) -> None:
    assert verdicts(Needs.of(packages), profile(node)) == []
