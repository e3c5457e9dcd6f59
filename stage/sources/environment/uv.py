"""uv, run for a machine that is not here: requirements -> a pylock document (PEP 751), or the reason in words.

Wheels only, but for the named exceptions. What conda provides is known to uv as an empty wheel of that version:
requirements on it are checked, and nothing of it is installed twice.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from stage.environment.addresses import without_secrets
from stage.environment.conflicts import (
    absent,
    index_lacking,
    is_network_problem,
    names_without_fitting_wheel,
    twice,
    uv_conflict,
)
from stage.environment.fit import torch_that_fits
from stage.environment.profile import Profile
from stage.environment.spec import EnvironmentSpec
from stage.errors import IncompleteError, PolicyError, StageError, UsageError
from stage.sources.environment.contents import Provided, metadata_of
from stage.sources.environment.indexes import Indexes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")

GLIBC_OF_UV = (17, 28, *range(31, 41))
"""The minors of glibc 2 that `uv --python-platform` knows; others are rounded down, so that what is chosen fits."""


@dataclass(frozen=True, kw_only=True)
class PipRequest:
    """What the pip half is made of.

    Attributes:
        own_requirements: airlift's own.
        python: full version of the target's Python.
        provided: what conda provides.
        kept: name -> version of an earlier lock, to stay where that is possible.
        addresses: url of a conda package as locked -> url to ask, where the two differ.
    """

    spec: EnvironmentSpec
    profile: Profile
    own_requirements: tuple[str, ...]
    python: str
    provided: tuple[Provided, ...]
    indexes: Indexes
    kept: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)


class Uv:
    """uv in a folder of its own. Addresses with secrets stand in files only this user may read, not in a command."""

    def __init__(self, folder: Path, request: PipRequest) -> None:
        self._folder, self._request = folder, request
        self._stubs = folder / "provided"
        self.stubbed = {d.name: d for d in request.provided}

    def write_stubs(self, extras: Mapping[str, set[str]]) -> None:
        """A wheel without contents for each distribution that conda provides.

        Its requirements are conda's business, but for those of extras that pip requirements ask for: these conda knows
        nothing of.
        """
        self._stubs.mkdir(exist_ok=True)
        lines = []
        for distribution in self.stubbed.values():
            headers = f"Metadata-Version: 2.1\nName: {distribution.name}\nVersion: {distribution.version}\n"
            if extras.get(distribution.name):
                headers += _extras(metadata_of(distribution, self._request.addresses))
            path = _write_stub(self._stubs, distribution, headers)
            lines.append(f"{distribution.name} @ {path.as_uri()}\n")
        (self._folder / "provided.txt").write_text("".join(lines))

    def compile(self) -> tuple[dict[str, Any], str]:
        """Resolves; returns the pylock document (PEP 751) and uv's warnings.

        Raises:
            StageError: as for `pip.lock_pip`.
        """
        request = self._request
        asked, output = self._folder / "requirements.in", self._folder / "pylock.toml"
        asked_for = (requirement.text for requirement in request.spec.pip.requirements)
        lines = [*request.indexes.lines, *asked_for, *request.own_requirements]
        _write_private(asked, "\n".join(lines) + "\n")
        constraints = self._folder / "constraints.txt"
        constraints.write_text("".join(f"{r.text}\n" for r in request.spec.pip.constraints))
        _write_kept(output, request.kept)
        command = [*self._command(), str(asked), "-o", str(output)]
        for file in (constraints, self._folder / "provided.txt", *map(Path, request.indexes.constraints)):
            command += ["-c", str(file)] if file.stat().st_size else []
        for name in self.stubbed:
            command += ["--no-emit-package", name]
        done = self._run(command)
        if done.returncode != 0:
            raise self._failure(done.stderr)
        return tomllib.loads(output.read_text(encoding="utf-8")), done.stderr

    def newest_fitting(self, name: str) -> str | None:
        """The newest version of a package that has a wheel for the target; None: there is none."""
        asked = self._folder / "one.in"
        _write_private(asked, "\n".join([*self._request.indexes.lines, name]) + "\n")
        output = self._folder / "pylock.one.toml"
        done = self._run([*self._command(), str(asked), "-o", str(output), "--no-deps"])
        if "No solution found" in done.stderr:
            return None
        if done.returncode != 0:
            raise IncompleteError(f"{name}: uv cannot tell which version would fit: {done.stderr.strip()[-400:]}")
        packages = tomllib.loads(output.read_text(encoding="utf-8"))["packages"]
        return next((str(p["version"]) for p in packages if p["name"] == name and p.get("wheels")), None)

    def _command(self) -> list[str]:
        section, profile = self._request.spec.pip, self._request.profile
        command = [find_uv(), "pip", "compile", "--format", "pylock.toml", "--no-header", "--no-sources"]
        command += ["--python", sys.executable, "--python-version", self._request.python]
        command += ["--python-platform", uv_platform(profile.machine, profile.glibc)]
        command += ["--index-strategy", "unsafe-best-match", "--only-binary", ":all:"]
        for name in section.sdists:
            command += ["--no-binary", name]
        for host in section.insecure_hosts:
            command += ["--allow-insecure-host", host]
        return command + (["--prerelease", "allow"] if section.prereleases else [])

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = uv_environment(os.environ)
        if self._request.spec.pip.index_url:  # the file's own index; to uv, a variable would go before it
            environment = {name: v for name, v in environment.items() if name not in _INDEX_VARIABLES}
        return subprocess.run(command, cwd=self._folder, env=environment, capture_output=True, text=True, check=False)

    def _failure(self, said: str) -> StageError:
        spec, profile = self._request.spec, self._request.profile
        said = _without_secrets(said, self._request.indexes)
        if is_network_problem(said):
            return IncompleteError(
                f"{spec.path}: a Python index cannot be reached: {' '.join(said.split())[:400]}",
                "Check the network and the index, then run the same command again.",
            )
        target = f"Python {self._request.python}, {profile.machine}, glibc {profile.glibc}"
        for name in names_without_fitting_wheel(said):
            place = next((f"{r.place}: " for r in spec.pip.requirements if r.name == name), f"{spec.path}: ")
            if version := self.newest_fitting(name):
                fits = torch_that_fits(profile) if name == "torch" else f"The newest that fits there: {name}=={version}"
                return UsageError(
                    f"{place}no wheel of `{name}` fits both what is asked and {profile.name} ({target}).",
                    f"{fits.rstrip('.')}; or ask for another Python in `dependencies:`.",
                )
            return PolicyError(
                f"{place}`{name}` has no wheel for {profile.name} ({target}), and building it is not permitted.",
                f"If it is Python alone, permit it with one more line in the pip section: `--no-binary {name}`; "
                "else take it from a conda channel.",
            )
        if found := absent(said, spec):
            return self._absent(*found, target)
        if "Failed to build" in said or "Failed to download and build" in said:
            tail = " ".join(said.split())[-600:]
            return UsageError(
                f"{spec.path}: a permitted source distribution could not say what it needs: {tail}",
                "Take it from a conda channel, or another version of it.",
            )
        provided = {d.name: f"{d.version} (`{d.conda}`)" for d in self._request.provided}
        return uv_conflict(said, spec, provided, self._request.own_requirements, self._request.python)

    def _absent(self, name: str, asked: str, place: str, target: str) -> StageError:
        if name in self.stubbed:  # to uv, conda's version is the only one there is
            return twice(
                self.stubbed[name].conda, f"{name} {self.stubbed[name].version}", asked, place, self._request.spec
            )
        if index := index_lacking(asked, self._request.spec):
            return UsageError(
                f"{place}: there is no `{asked}`: such builds are in PyTorch's own index alone.",
                f"One more line in the pip section: `--extra-index-url {index}`",
            )
        if newest := self.newest_fitting(name):
            problem, remedy = f"there is no `{asked}`", f"The newest that fits {target}: {name}=={newest}."
            if name == "torch" and self._request.profile.cuda:
                remedy = torch_that_fits(self._request.profile)
        else:
            problem = f"no index has a package `{name}`"
            remedy = (
                "Look at the spelling. To uv, an index that refuses for want of the right password has nothing, too."
            )
        return UsageError(f"{place}: {problem}.", remedy)


def uv_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables uv runs with: quiet, no Python of its own, and the CA certificates that `stage` itself trusts."""
    trusted = {"UV_SYSTEM_CERTS": "true"}
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"):
        if environment.get(variable):
            trusted.setdefault("SSL_CERT_FILE", environment[variable])
    # DS_BUILD_OPS: deepspeed's metadata is made by its setup.py, which must not look for a compiler.
    quiet = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1", "DS_BUILD_OPS": "0"}
    return {**trusted, **environment, **quiet}


def find_uv() -> str:
    """The uv beside this Python, or on the PATH.

    Raises:
        UsageError: there is none.
    """
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        if found := shutil.which("uv"):
            return found
        raise UsageError(
            "uv is not installed here, and locking an environment needs it.", "pip install 'airlift[env]'"
        ) from None


def uv_platform(machine: str, glibc: str) -> str:
    """uv's name for a target: its newest glibc that is not newer than the cluster's.

    >>> uv_platform("x86_64", "2.30")
    'x86_64-manylinux_2_28'

    Raises:
        UsageError: a glibc for which no wheels are made any more.
    """
    major, minor = (int(part) for part in glibc.split("."))
    fitting = [known for known in GLIBC_OF_UV if known <= minor]
    if major != 2 or not fitting:
        raise UsageError(f"glibc {glibc} is older than any wheel today is made for (2.17).", "Use a container there.")
    return f"{machine}-manylinux_2_{fitting[-1]}"


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _write_kept(path: Path, kept: Mapping[str, str]) -> None:
    """An earlier result, as uv takes it for a preference."""
    lines = ['lock-version = "1.0"', 'created-by = "airlift"']
    for name, version in sorted(kept.items()):
        lines += ["", "[[packages]]", f'name = "{name}"', f'version = "{version}"']
    path.unlink(missing_ok=True)
    if kept:
        path.write_text("\n".join(lines) + "\n")


def _write_stub(folder: Path, distribution: Provided, headers: str) -> Path:
    name = distribution.name.replace("-", "_")
    info = f"{name}-{distribution.version}.dist-info"
    path = folder / f"{name}-{distribution.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", headers)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def _extras(metadata: str) -> str:
    """The lines of a METADATA that are about extras."""
    headers = HeaderParser().parsestr(metadata)
    lines = [f"Provides-Extra: {value}" for value in headers.get_all("Provides-Extra", [])]
    lines += [f"Requires-Dist: {value}" for value in headers.get_all("Requires-Dist", []) if "extra" in value]
    return "".join(f"{line}\n" for line in lines)


def _without_secrets(text: str, indexes: Indexes) -> str:
    for line in indexes.lines:
        url = line.partition(" ")[2]
        text = text.replace(url, without_secrets(url)).replace(url.rstrip("/"), without_secrets(url.rstrip("/")))
    return re.sub(r"(\w+://)[^/\s@`]+@", r"\1", text)
