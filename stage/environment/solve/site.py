"""An environment on a site's own torch: what the site provides is checked, and never locked. Pure.

The solver takes it for installed (`Provided`). A requirement of the environment file that it does
not meet is refused here, with both files' lines: uv's own message does not have the version.
"""

from __future__ import annotations

import re

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from stage.environment.solve.conda_contents import Provided
from stage.environment.spec.conda_lock import Package
from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.environment.spec.profile import Profile
from stage.errors import Mistakes, Place, UsageError

FOR_ONE_TORCH = (
    "torchvision", "torchaudio", "torchtext", "torchcodec", "torch-npu", "xformers", "vllm",
    "flash-attn", "torch-scatter", "torch-sparse", "torch-cluster", "torch-spline-conv", "pyg-lib",
    "mamba-ssm", "causal-conv1d", "intel-extension-for-pytorch", "transformer-engine-torch",
)  # fmt: skip
"""Compiled against one torch: what an index has does not go with a torch that a site built."""

OLDER_THAN_ITS_NUMPY = ("pyarrow<26",)
"""For a numpy below 2. pyarrow 26 declares nothing, and refuses that numpy when it is imported."""

_PRINT_AGAIN = "print the profile again (sh env-probe.sh)."


def provided_by_site(spec: EnvironmentSpec, profile: Profile) -> list[Provided]:
    """The site's distributions, for the solver.

    Raises:
        UsageError: a conda package; requirements that the site's versions do not meet.
    """
    mistakes = Mistakes()
    for dependency in spec.conda:
        with mistakes:
            if dependency.name == "python":
                asked = _as_specifier(dependency.text)
                _check(profile, "python", asked, dependency.text, dependency.place)
            elif dependency.name != "pip":
                raise UsageError(
                    f"{dependency.place}: `{dependency.name}` is a conda package; on the site's "
                    "Python there are pip packages only.",
                    "Take it out: the site's modules bring it.",
                )
    for requirement in (*spec.pip.requirements, *spec.pip.constraints):
        with mistakes:
            if requirement.name in profile.provides:
                specifier = Requirement(requirement.text).specifier
                _check(profile, requirement.name, specifier, requirement.text, requirement.place)
    mistakes.check(str(spec.path))
    return [
        Provided(name, version, place=profile.lines.place("provides", name))
        for name, version in sorted(profile.provides.items())
        if name != "python"
    ]


def _as_specifier(text: str) -> SpecifierSet | None:
    """conda's `python=3.11` as pip writes it; of a full version, X.Y counts. None: it cannot be."""
    asked = re.sub(r"^(\S+::)?python", "", text).replace(" ", "")
    pinned = re.fullmatch(r"=*(\d+\.\d+)[.\d*]*(=.*)?", asked)
    try:
        return SpecifierSet(f"=={pinned[1]}.*" if pinned else asked)
    except InvalidSpecifier:
        return None


def _check(
    profile: Profile, name: str, asked: SpecifierSet | None, text: str, place: Place
) -> None:
    version = profile.provides[name]
    if asked is not None and asked.contains(version, prereleases=True):
        return
    site = f"{name} {version} ({profile.lines.place('provides', name)})"
    base = Version(version).base_version
    if asked is not None and asked.contains(base):
        raise UsageError(
            f"{place}: `{text}`, and the site has {site}, which comes before {base} by PEP 440.",
            f"Write {name}>={Version(version).public}.",
        )
    again = f"load a module with another {name} and {_PRINT_AGAIN}"
    raise UsageError(f"{place}: `{text}`, and the site has {site}.", f"Loosen it, or {again}")


def check_compiled(packages: list[Package], spec: EnvironmentSpec, profile: Profile) -> None:
    """Refuses what an index has compiled for its own torch; an address of a wheel is the user's.

    Raises:
        UsageError: there is some.
    """
    asked = {requirement.name: requirement for requirement in spec.pip.requirements}
    for package in packages:
        requirement = asked.get(package.name)
        if package.name in FOR_ONE_TORCH and not (requirement and "@" in requirement.text):
            raise UsageError(
                f"{requirement.place if requirement else spec.path}: `{package.name}` "
                f"{package.version} is compiled for PyPI's torch, not for the site's "
                f"{profile.provides['torch']} ({profile.lines.place('provides', 'torch')}).",
                f"Take it out, or load the module that has it and {_PRINT_AGAIN} A wheel that was "
                f"built for that torch: {package.name} @ ADDRESS",
            )
