"""What solvers say, and what they cannot know of the cluster. The messages are real ones; those of
rattler and uv are also met alive in test_env_lock.py and test_env_pip.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage.environment.solve.conflicts import conda_conflict, is_network_problem
from stage.environment.solve.uv import requirements_without_wheel
from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.environment.spec.profile import Profile

A800 = Profile(
    path=Path("a800.yml"),
    name="a800",
    platform="linux-64",
    glibc="2.28",
    cuda="12.2",
    compute_capability="8.0",
)
CPU = Profile(path=Path("cpu.yml"), name="cpu", platform="linux-64", glibc="2.28")

LIBMAMBA = """\
error    libmamba Could not solve for environment specs
    The following packages are incompatible
    ├─ numba 0.56**  is installable with the potential options
    │  └─ numba 0.56.4 would require
    │     └─ python >=3.9,<3.10.0a0 , which can be installed;
    └─ python 3.12**  is not installable because it conflicts with any installable versions
    previously reported.
"""
NO_DRIVER = """\
Cannot solve the request because of: cudatoolkit 13.* cannot be installed because there are no
viable options: └─ cudatoolkit 13.0.0 would require
   └─ __cuda >=13, for which no candidates were found.
"""


@pytest.fixture
def spec(tmp_path: Path) -> EnvironmentSpec:
    path = tmp_path / "environment.yml"
    path.write_text(
        "channels: [c]\ndependencies:\n  - python=3.12\n  - numba=0.56\n  - cudatoolkit=13\n"
    )
    return EnvironmentSpec.load(path)


def test_what_the_cluster_lacks_is_said_of_the_cluster(spec: EnvironmentSpec) -> None:
    """A solver knows `__cuda` and `__glibc`, and not whose they are."""
    assert NO_DRIVER.strip() in conda_conflict(NO_DRIVER, spec, A800).message
    assert (
        "`__cuda`: the driver of a800 has CUDA 12.2" in conda_conflict(NO_DRIVER, spec, A800).remedy
    )
    assert "`__cuda`: cpu has no GPU" in conda_conflict(NO_DRIVER, spec, CPU).remedy
    glibc = "nothing provides __glibc >=2.34 needed by newer-glibc-2.0-h0000000_0"
    assert "`__glibc`: a800 has glibc 2.28" in conda_conflict(glibc, spec, A800).remedy


def test_want_of_an_answer_is_no_conflict() -> None:
    assert is_network_problem(
        "error sending request for url (https://h.example/x)\nCaused by: dns error"
    )
    assert is_network_problem(
        "CondaHTTPError: HTTP 000 CONNECTION FAILED for url <https://h.example>"
    )
    assert not is_network_problem(LIBMAMBA) and not is_network_problem(NO_DRIVER)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("Because torch>=2.7.0,<=2.14.1 has no wheels with a matching platform tag (e.g., `x`) and",
         {"torch": "torch<=2.14.1,>=2.7.0"}),
        ("Because numpy==2.4.0 has no usable wheels and you require numpy==2.4.0\n\nhint: Wheels "
         "are required for `numpy` because building from source is disabled",
         {"numpy": "numpy==2.4.0"}),
        ("cause: Building source distributions for `Rouge_Score` is disabled",
         {"rouge-score": "Rouge_Score"}),
        ("Because torch==99 was not found and you require torch==99", {}),
    ],
)  # fmt: skip
def test_whose_wheels_do_not_fit(said: str, names: dict[str, str]) -> None:
    assert requirements_without_wheel(said) == names
