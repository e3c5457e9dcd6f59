"""What solvers say, in words a researcher can act on. The messages are real ones; those of rattler and uv are also met
alive in test_env_lock.py and test_env_pip.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage.environment.conflicts import (
    conda_conflict,
    is_network_problem,
    names_without_fitting_wheel,
)
from stage.environment.profile import Profile
from stage.environment.spec import EnvironmentSpec

A800 = Profile(
    path=Path("a800.yml"), name="a800", platform="linux-64", glibc="2.28", cuda="12.2", compute_capability="8.0"
)
CPU = Profile(path=Path("cpu.yml"), name="cpu", platform="linux-64", glibc="2.28")

LIBMAMBA = """\
error    libmamba Could not solve for environment specs
    The following packages are incompatible
    ├─ numba 0.56**  is installable with the potential options
    │  └─ numba 0.56.4 would require
    │     └─ python >=3.9,<3.10.0a0 , which can be installed;
    └─ python 3.12**  is not installable because it conflicts with any installable versions previously reported.
"""
NO_DRIVER = """\
Cannot solve the request because of: cudatoolkit 13.* cannot be installed because there are no viable options:
└─ cudatoolkit 13.0.0 would require
   └─ __cuda >=13, for which no candidates were found.
"""


@pytest.fixture
def spec(tmp_path: Path) -> EnvironmentSpec:
    path = tmp_path / "environment.yml"
    path.write_text("channels: [c]\ndependencies:\n  - python=3.12\n  - numba=0.56\n  - cudatoolkit=13\n")
    return EnvironmentSpec.load(path)


def test_what_libmamba_says(spec: EnvironmentSpec) -> None:
    error = conda_conflict(LIBMAMBA, spec, A800)
    assert "`numba 0.56.4` needs `python >=3.9,<3.10.0a0`" in error.message
    assert "no version of python suits all of them" in error.message
    assert "`python=3.12` (" in error.remedy and "`numba=0.56` (" in error.remedy and "cudatoolkit" not in error.remedy
    assert "\n" not in error.message


def test_what_the_cluster_lacks_is_said_of_the_cluster(spec: EnvironmentSpec) -> None:
    assert "the driver of a800 has CUDA 12.2" in conda_conflict(NO_DRIVER, spec, A800).message
    assert "cpu has no GPU" in conda_conflict(NO_DRIVER, spec, CPU).message


def test_a_message_of_no_known_form_is_told_as_it_is(spec: EnvironmentSpec) -> None:
    assert "something new, over two lines" in conda_conflict("something new,\n  over two lines", spec, A800).message


def test_want_of_an_answer_is_no_conflict() -> None:
    assert is_network_problem("error sending request for url (https://h.example/x)\nCaused by: dns error")
    assert is_network_problem("CondaHTTPError: HTTP 000 CONNECTION FAILED for url <https://h.example>")
    assert not is_network_problem(LIBMAMBA) and not is_network_problem(NO_DRIVER)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("Because torch>=2.7.0,<=2.14.1 has no wheels with a matching platform tag (e.g., `x`) and", ["torch"]),
        ("Because numpy==2.4.0 has no usable wheels and you require numpy==2.4.0\n\nhint: Wheels are required for "
         "`numpy` because building from source is disabled", ["numpy"]),
        ("cause: Building source distributions for `Rouge_Score` is disabled", ["rouge-score"]),
        ("Because torch==99 was not found and you require torch==99", []),
    ],
)  # fmt: skip
def test_whose_wheels_do_not_fit(said: str, names: list[str]) -> None:
    assert names_without_fitting_wheel(said) == names
