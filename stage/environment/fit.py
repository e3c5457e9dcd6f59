"""Whether an environment runs on a cluster: `Needs` against a `Profile` -> verdicts. Pure.

A refusal names what would fit; what cannot be known is a note, never a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass

from stage.environment.needs import Needs
from stage.environment.profile import Profile
from stage.environment.torch_builds import numbers, runs_on, toolkit_dropped, what_fits

DRIVERS = {11: "450", 12: "525", 13: "580"}
"""CUDA major version -> the oldest driver that runs it (CUDA Compatibility guide, "Minor Version Compatibility")."""


@dataclass(frozen=True)
class Verdict:
    """One thing about an environment on a cluster.

    Attributes:
        refused: it would not run; else a note.
        problem: what, in a sentence.
        remedy: what would fit; empty for most notes.
    """

    refused: bool
    problem: str
    remedy: str = ""


def verdicts(needs: Needs, profile: Profile) -> list[Verdict]:
    """Everything that is to be said of an environment on a kind of node; empty: it fits, without reserve."""
    found = [*_glibc(needs, profile), *_cuda(needs, profile)]
    if not any(verdict.refused for verdict in found):
        found += _architectures(needs, profile)
    return found


def _glibc(needs: Needs, profile: Profile) -> list[Verdict]:
    found = []
    if needs.glibc and numbers(needs.glibc) > numbers(profile.glibc):
        is_torch = needs.torch is not None and needs.glibc_of.startswith("torch ")
        remedy = (
            _what_fits(needs, profile)
            if is_torch
            else f"Ask for an older {needs.glibc_of.split()[0]}, one with a wheel for glibc {profile.glibc} or older."
        )
        found.append(
            Verdict(True, f"{needs.glibc_of} needs glibc {needs.glibc}; {profile.name} has {profile.glibc}.", remedy)
        )
    if needs.unstated:
        found.append(Verdict(False, f"{', '.join(needs.unstated)}: the wheel does not say which glibc it needs."))
    return found


def _cuda(needs: Needs, profile: Profile) -> list[Verdict]:
    if needs.cuda is None:
        if needs.torch and profile.cuda:
            problem = f"torch {needs.torch} is a build without CUDA: it will not use {profile.gpu or 'the GPU'}."
            return [Verdict(False, problem, _what_fits(needs, profile))]
        return []
    if profile.cuda is None:
        return [Verdict(False, f"{needs.cuda_of} brings CUDA {needs.cuda}, which nodes without a GPU do not use.")]
    return _driver(needs, needs.cuda, profile)


def _driver(needs: Needs, cuda: str, profile: Profile) -> list[Verdict]:
    assert profile.cuda is not None
    runtime, driver = numbers(cuda), numbers(profile.cuda)
    if runtime[0] > driver[0]:
        oldest = DRIVERS.get(runtime[0])
        needed = f"CUDA {runtime[0]}.0 or newer" + (f" (driver {oldest}+)" if oldest else "")
        return [
            Verdict(
                True,
                f"CUDA {cuda} ({needs.cuda_of}) needs a driver with {needed}; the driver of {profile.name} has CUDA"
                f" {profile.cuda}.",
                _what_fits(needs, profile),
            )
        ]
    if runtime[0] == driver[0] and runtime > driver:
        return [
            Verdict(
                False,
                f"CUDA {cuda} ({needs.cuda_of}) on a driver with CUDA {profile.cuda} runs by CUDA's minor-version"
                " compatibility: machine code does, intermediate code (PTX) does not.",
            )
        ]
    return []


def _architectures(needs: Needs, profile: Profile) -> list[Verdict]:
    capability = profile.compute_capability
    if needs.torch is None or needs.cuda is None or capability is None or profile.cuda is None:
        return []
    gpu = f"{profile.gpu or profile.name} (compute capability {capability})"
    oldest = toolkit_dropped(needs.cuda, capability)
    if oldest:
        problem = (
            f"torch {needs.torch} is built with CUDA {needs.cuda}, which knows no GPU older than {oldest}: not {gpu}."
        )
        return [Verdict(True, problem, _what_fits(needs, profile))]
    if needs.architectures is None:
        return [
            Verdict(
                False,
                f"Not known whether torch {needs.torch} with CUDA {needs.cuda} was built for {gpu}.",
                "On such a node: python -c 'import torch; print(torch.cuda.get_arch_list())'",
            )
        ]
    if not runs_on(needs.architectures, capability, ptx=numbers(needs.cuda) <= numbers(profile.cuda)):
        compiled_for = ", ".join(needs.architectures)
        problem = f"torch {needs.torch} with CUDA {needs.cuda} has no code for {gpu}, only for {compiled_for}."
        return [Verdict(True, problem, _what_fits(needs, profile))]
    return []


def _what_fits(needs: Needs, profile: Profile) -> str:
    if needs.torch_manager == "conda" and profile.cuda is not None:
        return f"Add `cuda-version {numbers(profile.cuda)[0]}.*` to the conda dependencies."
    return torch_that_fits(profile)


def torch_that_fits(profile: Profile) -> str:
    """Which torch to ask for on such nodes, in a sentence."""
    if profile.machine != "x86_64":
        return f"Ask for a torch that is published for {profile.machine} and CUDA {profile.cuda or '(none)'}."
    if profile.cuda is None or profile.compute_capability is None:
        return "Ask for an older torch."
    return what_fits(profile.compute_capability, profile.cuda, profile.glibc)
