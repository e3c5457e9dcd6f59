"""What solvers say, and what they cannot know of the cluster. The messages are real ones; those of
rattler and uv are also met alive in test_env_lock.py and test_env_pip.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage.environment.solve.advice import conda_conflict, is_network_problem
from stage.environment.solve.uv import requirements_without_wheel
from stage.environment.spec.environment_yml import EnvironmentSpec, PipSection
from stage.environment.spec.profile import Profile
from stage.lock.reader import Lines

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


@pytest.mark.parametrize(
    ("said", "is_network"),
    [
        ("error sending request for url (https://h.example/x)\nCaused by: dns error", True),
        ("CondaHTTPError: HTTP 000 CONNECTION FAILED for url <https://h.example>", True),
        ("timed out\nNo solution found when resolving dependencies", False),
        (LIBMAMBA, False),
        (NO_DRIVER, False),
    ],
)
def test_want_of_an_answer_is_no_conflict(said: str, is_network: bool) -> None:
    assert is_network_problem(said) == is_network


FITS = " Ask for versions that such a node runs."


@pytest.mark.parametrize(
    ("said", "cuda", "remedy"),
    [
        (LIBMAMBA, "12.2", "Loosen or drop one of them in environment.yml."),
        (NO_DRIVER, "12.2", f"`__cuda`: the driver of a800 has CUDA 12.2.{FITS}"),
        (NO_DRIVER, None, f"`__cuda`: a800 has no GPU.{FITS}"),
        (
            "__glibc >=2.34 and __cuda",
            None,
            f"`__cuda`: a800 has no GPU; `__glibc`: a800 has glibc 2.28.{FITS}",
        ),
    ],
)
def test_a_conflict_with_what_the_node_has_says_so(
    said: str, cuda: str | None, remedy: str
) -> None:
    spec = EnvironmentSpec(
        path=Path("environment.yml"), name="e", channels=(), conda=(), pip=PipSection(),
        lines=Lines(Path("environment.yml")),
    )  # fmt: skip
    node = Profile(name="a800", platform="linux-64", glibc="2.28", cuda=cuda)
    assert conda_conflict(said, spec, node).remedy == remedy


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
