"""Whether an environment runs on a cluster: `Needs` and a `Profile` -> verdicts. Pure.

A refusal names versions that fit. Something that is not known is a note, never a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass

from stage.environment.check.needs import Needs
from stage.environment.check.torch_builds import (
    newest_toolkit,
    numbers,
    runs_on,
    toolkit_dropped,
    what_fits,
)
from stage.environment.spec.profile import Profile

DRIVERS = {11: "450", 12: "525", 13: "580"}
"""CUDA major version -> the oldest driver that runs it.

Source: CUDA Compatibility guide, "Minor Version Compatibility".
"""


@dataclass(frozen=True)
class Verdict:
    """One thing about an environment on a cluster.

    Attributes:
        refused: it would not run; False: a note.
        problem: one sentence.
        remedy: versions that fit; empty for most notes.
    """

    refused: bool
    problem: str
    remedy: str = ""


def verdicts(needs: Needs, profile: Profile) -> list[Verdict]:
    """All verdicts on an environment on a kind of node; empty: it runs."""
    found = [*_glibc(needs, profile), *_cuda(needs, profile)]
    if not any(verdict.refused for verdict in found):
        found += _architectures(needs, profile)
    return found


def _glibc(needs: Needs, profile: Profile) -> list[Verdict]:
    found = []
    if needs.glibc and numbers(needs.glibc) > numbers(profile.glibc):
        package, has = needs.glibc_of, profile.glibc
        problem = f"{package} needs glibc {needs.glibc}; {profile.name} has {has}."
        older = f"Ask for an older {package.split()[0]}, one with a wheel for glibc {has} or older."
        is_torch = needs.torch is not None and package.startswith("torch ")
        found.append(Verdict(True, problem, _what_fits(needs, profile) if is_torch else older))
    if needs.unstated:
        wheels = ", ".join(needs.unstated)
        found.append(Verdict(False, f"{wheels}: the wheel does not say which glibc it needs."))
    return found


def _cuda(needs: Needs, profile: Profile) -> list[Verdict]:
    if needs.cuda is None:
        if not needs.torch or not profile.cuda:
            return []
        gpu = profile.gpu or "the GPU"
        if needs.without_cuda:
            problem = f"{needs.without_cuda} is a build without CUDA: it does not use {gpu}."
            return [Verdict(True, problem, _what_fits(needs, profile))]
        problem = (
            f"Not known whether torch {needs.torch} uses {gpu}: nothing in the lock says which "
            "CUDA it has."
        )
        return [Verdict(False, problem, _what_fits(needs, profile))]
    if profile.cuda is None:
        cuda = f"{needs.cuda_of} brings CUDA {needs.cuda}"
        return [Verdict(False, f"{cuda}, which nodes without a GPU do not use.")]
    return _driver(needs, needs.cuda, profile)


def _driver(needs: Needs, cuda: str, profile: Profile) -> list[Verdict]:
    assert profile.cuda is not None
    runtime, driver = numbers(cuda), numbers(profile.cuda)
    if runtime[0] > driver[0]:
        oldest = DRIVERS.get(runtime[0])
        needed = f"CUDA {runtime[0]}.0 or newer" + (f" (driver {oldest}+)" if oldest else "")
        problem = (
            f"CUDA {cuda} ({needs.cuda_of}) needs a driver with {needed}; the driver of "
            f"{profile.name} has CUDA {profile.cuda}."
        )
        return [Verdict(True, problem, _what_fits(needs, profile))]
    if runtime[0] == driver[0] and runtime > driver:
        problem = (
            f"CUDA {cuda} ({needs.cuda_of}) on a driver with CUDA {profile.cuda} runs by CUDA's "
            "minor-version compatibility: machine code does, intermediate code (PTX) does not."
        )
        return [Verdict(False, problem)]
    return []


def _architectures(needs: Needs, profile: Profile) -> list[Verdict]:
    capability = profile.compute_capability
    if needs.torch is None or needs.cuda is None or capability is None or profile.cuda is None:
        return []
    gpu = f"{profile.gpu or profile.name} (compute capability {capability})"
    oldest = toolkit_dropped(needs.cuda, capability)
    if oldest:
        problem = (
            f"torch {needs.torch} is built with CUDA {needs.cuda}, which knows no GPU older than"
            f" {oldest}: not {gpu}."
        )
        return [Verdict(True, problem, _what_fits(needs, profile))]
    torch = f"torch {needs.torch} with CUDA {needs.cuda}"
    if needs.architectures is None:
        remedy = "On such a node: python -c 'import torch; print(torch.cuda.get_arch_list())'"
        return [Verdict(False, f"Not known whether {torch} was built for {gpu}.", remedy)]
    ptx = numbers(needs.cuda) <= numbers(profile.cuda)
    if not runs_on(needs.architectures, capability, ptx=ptx):
        compiled_for = ", ".join(needs.architectures)
        problem = f"{torch} has no code for {gpu}, only for {compiled_for}."
        return [Verdict(True, problem, _what_fits(needs, profile))]
    return []


def _what_fits(needs: Needs, profile: Profile) -> str:
    """Advice for a torch that does not run there, or does not use the GPU."""
    if needs.torch_manager == "conda" and profile.cuda and profile.compute_capability:
        major = newest_toolkit(profile.cuda, profile.compute_capability)
        return f"Write `pytorch=*=cuda*` and `cuda-version {major}.*` in the conda dependencies."
    return what_fits(profile)
