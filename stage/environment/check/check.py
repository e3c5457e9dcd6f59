"""Whether an environment runs on a cluster: `Needs` and a `Profile` -> verdicts. Pure.

A refusal names versions that fit. Something that is not known is a note, never a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def _glibc(needs: Needs, profile: Profile) -> Iterator[Verdict]:
    if needs.glibc and numbers(needs.glibc) > numbers(profile.glibc):
        package, has = needs.glibc_of, profile.glibc
        problem = f"{package} needs glibc {needs.glibc}; {profile.name} has {has}."
        older = f"Ask for an older {package.split()[0]}, one with a wheel for glibc {has} or older."
        is_torch = needs.torch is not None and package.startswith("torch ")
        yield Verdict(True, problem, _what_fits(needs, profile) if is_torch else older)
    if needs.unstated:
        wheels = ", ".join(needs.unstated)
        yield Verdict(False, f"{wheels}: the wheel does not say which glibc it needs.")


def _cuda(needs: Needs, profile: Profile) -> Iterator[Verdict]:
    gpu = profile.gpu or "the GPU"
    if needs.cuda is not None and profile.cuda is not None:
        yield from _driver(needs, needs.cuda, profile, profile.cuda)
    elif needs.cuda is not None:
        cuda = f"{needs.cuda_of} brings CUDA {needs.cuda}"
        yield Verdict(False, f"{cuda}, which nodes without a GPU do not use.")
    elif needs.without_cuda and profile.cuda:
        problem = f"{needs.without_cuda} is a build without CUDA: it does not use {gpu}."
        yield Verdict(True, problem, _what_fits(needs, profile))
    elif needs.torch and profile.cuda:
        problem = (
            f"Not known whether torch {needs.torch} uses {gpu}: nothing in the lock says which "
            "CUDA it has."
        )
        yield Verdict(False, problem, _what_fits(needs, profile))


def _driver(needs: Needs, cuda: str, profile: Profile, driver_cuda: str) -> Iterator[Verdict]:
    runtime, driver = numbers(cuda), numbers(driver_cuda)
    if runtime[0] > driver[0]:
        oldest = DRIVERS.get(runtime[0])
        needed = f"CUDA {runtime[0]}.0 or newer" + (f" (driver {oldest}+)" if oldest else "")
        problem = (
            f"CUDA {cuda} ({needs.cuda_of}) needs a driver with {needed}; the driver of "
            f"{profile.name} has CUDA {driver_cuda}."
        )
        yield Verdict(True, problem, _what_fits(needs, profile))
    elif runtime[0] == driver[0] and runtime > driver:
        problem = (
            f"CUDA {cuda} ({needs.cuda_of}) on a driver with CUDA {driver_cuda} runs by CUDA's "
            "minor-version compatibility: machine code does, intermediate code (PTX) does not."
        )
        yield Verdict(False, problem)


def _architectures(needs: Needs, profile: Profile) -> Iterator[Verdict]:
    capability = profile.compute_capability
    if needs.torch is None or needs.cuda is None or capability is None or profile.cuda is None:
        return
    gpu = f"{profile.gpu or profile.name} (compute capability {capability})"
    torch = f"torch {needs.torch} with CUDA {needs.cuda}"
    if oldest := toolkit_dropped(needs.cuda, capability):
        problem = (
            f"torch {needs.torch} is built with CUDA {needs.cuda}, which knows no GPU older than"
            f" {oldest}: not {gpu}."
        )
        yield Verdict(True, problem, _what_fits(needs, profile))
    elif needs.architectures is None:
        remedy = "On such a node: python -c 'import torch; print(torch.cuda.get_arch_list())'"
        yield Verdict(False, f"Not known whether {torch} was built for {gpu}.", remedy)
    # PTX, the intermediate code, is compiled by the driver: one that knows this CUDA.
    elif not runs_on(
        needs.architectures, capability, ptx=numbers(needs.cuda) <= numbers(profile.cuda)
    ):
        compiled_for = ", ".join(needs.architectures)
        problem = f"{torch} has no code for {gpu}, only for {compiled_for}."
        yield Verdict(True, problem, _what_fits(needs, profile))


def _what_fits(needs: Needs, profile: Profile) -> str:
    """Advice for a torch that does not run there, or does not use the GPU."""
    if needs.torch_manager == "conda" and profile.cuda and profile.compute_capability:
        major = newest_toolkit(profile.cuda, profile.compute_capability)
        return f"Write `pytorch=*=cuda*` and `cuda-version {major}.*` in the conda dependencies."
    return what_fits(profile)
