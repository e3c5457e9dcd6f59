"""Runs uv for another machine: requirements -> a pylock document (PEP 751), or an error.

It takes wheels only, except for packages that are published as source only (`Uv.permit_sources`).
For each distribution that conda or the site provides, uv gets an empty wheel of that version. So uv
checks the requirements on it, and nothing is installed twice.

Its indexes are those of the spec, and those that this machine's uv or pip has. A laptop behind a
mirror has it in pip's configuration. uv does not read that, so `pip config list` is run here. Local
folders in pip's configuration are ignored: a lock should work on every machine. A spec may name
one. A lock has no secrets; those of private channels and indexes are put back for each request from
`environment.yml` (best as `${NAME}`) or from pip's configuration.

`build_wheel` makes the wheel of a source, on the laptop, the same bytes each time: the build tools
are pinned (their versions are written into the wheel), and dates and hash seeds are fixed. Only
wheels for any platform are accepted: code that a laptop compiles does not run on a cluster.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from email.parser import HeaderParser
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from stage.download.http import origin_of
from stage.environment.check.torch_builds import build_of, index_of, what_fits
from stage.environment.image.image import pure_wheel
from stage.environment.solve.advice import (
    Target,
    advice_for,
    compiled_advice,
    is_network_problem,
    uv_conflict,
)
from stage.environment.solve.conda import Provided, metadata_of
from stage.environment.spec.conda_lock import Package
from stage.environment.spec.environment_yml import EnvironmentSpec, PipSection, userinfo
from stage.environment.spec.profile import Profile
from stage.errors import (
    DamageError,
    IncompleteError,
    Place,
    PolicyError,
    StageError,
    UsageError,
    without_secrets,
)
from stage.installation import install_command
from stage.progress import Reporter
from stage.sandbox import isolated

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UV_VARIABLES = (
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_INDEX_URL",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
    "UV_NO_INDEX",
)
_ENTRY = re.compile(r"^(global|install|:env:)\.([\w-]+)=(.*)$")


@dataclass(frozen=True)
class Indexes:
    """Options for uv's requirements file, and their origin.

    Attributes:
        lines: `--index-url ...` and so on, perhaps with secrets: kept out of `repr`.
        constraints: paths of files.
        origin: for the user, without secrets; None: nothing to print.
    """

    lines: tuple[str, ...] = field(default=(), repr=False)
    constraints: tuple[str, ...] = ()
    origin: str | None = None


def index_names(indexes: Indexes) -> set[str]:
    """The last part of each index's address. PyTorch's own, and mirrors of them, end in a build.

    >>> index_names(Indexes(("--extra-index-url https://download.pytorch.org/whl/cu118/",)))
    {'cu118'}
    """
    lines = [*indexes.lines, *(os.environ.get(name, "") for name in _UV_VARIABLES)]
    words = [word for line in lines for word in line.split() if "/" in word]
    return {word.rstrip("/").rpartition("/")[2] for word in words}


def choose_indexes(section: PipSection, environment: Mapping[str, str]) -> Indexes:
    """Joins the indexes of the spec and of this machine, like pip does for a requirements file."""
    configured, origin = _configured(environment) if not section.no_index else ({}, None)
    lines = []
    if section.no_index:
        lines.append("--no-index")
    elif index := section.index_url or configured.get("index-url"):
        lines.append(f"--index-url {index}")
    extra = (*section.extra_index_urls, *configured.get("extra-index-url", "").split())
    links = (*section.find_links, *configured.get("find-links", "").split())
    lines += [f"--extra-index-url {url}" for url in extra]
    lines += [f"--find-links {place}" for place in links]
    return Indexes(tuple(lines), tuple(configured.get("constraint", "").split()), origin)


def _configured(environment: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """The settings of this machine's pip, and the line to print; uv has its own if it is set.

    Folders of this machine are left out.
    """
    own = [name for name in _UV_VARIABLES if environment.get(name)] or _uv_files(environment)
    if own:
        return {}, f"uv's own settings ({', '.join(own)})"
    found = _pip_configuration(environment)
    kept: dict[str, str] = {}
    ignored: list[str] = []
    for key in ("index-url", "extra-index-url", "find-links", "constraint"):
        values = found.get(key, "").split()
        if key in ("extra-index-url", "find-links"):
            ignored += filter(_is_local, values)
            values = [value for value in values if not _is_local(value)]
        if values:
            kept[key] = " ".join(values)
    shown = [f"{key} {' '.join(map(without_secrets, v.split()))}" for key, v in kept.items()]
    if ignored:
        shown.append(f"without its folders of this machine ({', '.join(ignored)})")
    return kept, f"pip's configuration: {', '.join(shown)}" if shown else None


def _is_local(place: str) -> bool:
    return "://" not in place or place.startswith("file:")


def _uv_files(environment: Mapping[str, str]) -> list[str]:
    home = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    files = [path for path in (Path(home, "uv/uv.toml"), Path("/etc/uv/uv.toml")) if path.is_file()]
    texts = {str(path): path.read_text(encoding="utf-8", errors="replace") for path in files}
    return [path for path, text in texts.items() if re.search(r"index|find-links", text)][:1]


def _pip_configuration(environment: Mapping[str, str]) -> dict[str, str]:
    """pip's settings for `pip install`, by key; empty where this Python has no pip."""
    command = isolated("pip", "config", "list")
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    by_scope: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        if match := _ENTRY.match(line):
            by_scope[match[1]][match[2]] = str(ast.literal_eval(match[3]))
    return {**by_scope["global"], **by_scope["install"], **by_scope[":env:"]}


def private_address(url: str, spec_path: Path) -> tuple[str, str | None]:
    """The URL to fetch a package from, perhaps with a channel's token in it, and `user:password`.

    It is the locked one if the environment file is not here. Never to be shown.

    Raises:
        UsageError: the file cannot be read, or names a variable that is not set.
    """
    known = _read(spec_path)
    if known is None:
        return url, None
    asked = address_to_ask(url, *known)
    login, parts = userinfo(asked), urlsplit(asked)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return bare, unquote(login) if login else None


@lru_cache
def _read(spec_path: Path) -> tuple[EnvironmentSpec, Indexes] | None:
    if not spec_path.is_file():
        return None
    spec = EnvironmentSpec.load(spec_path)
    return spec, choose_indexes(spec.pip, os.environ)


def address_to_ask(url: str, spec: EnvironmentSpec, indexes: Indexes) -> str:
    """The URL to fetch a locked package from, with the token or password of its channel or index.

    A password goes only to the scheme, host and port that it was written for.
    """
    for channel in spec.channels:
        clean = without_secrets(channel).rstrip("/")
        if clean != channel.rstrip("/") and url.startswith(f"{clean}/"):
            return channel.rstrip("/") + url.removeprefix(clean)
    parts = urlsplit(url)
    for index in (line.partition(" ")[2] for line in indexes.lines if "://" in line):
        login = userinfo(index)
        if login and origin_of(index) == origin_of(url):
            netloc = f"{login}@{parts.netloc}"
            return urlunsplit((parts.scheme, netloc, parts.path, parts.query, ""))
    return url


_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")

GLIBC_OF_UV = (17, 28, *range(31, 41))
"""The minor versions of glibc 2 that `uv --python-platform` knows. Others are rounded down."""


@dataclass(frozen=True, kw_only=True)
class PipRequest:
    """The input for resolving the pip half.

    Attributes:
        own_requirements: the requirements of airlift itself.
        python: full version of the target's Python.
        provided: the distributions that conda or the site provides.
        kept: name -> version of an earlier lock, kept where that is possible.
        constraints: constraints that airlift adds (`torch<2.11`).
        say: prints one line for the user.
    """

    spec: EnvironmentSpec
    profile: Profile
    own_requirements: tuple[str, ...]
    python: str
    provided: tuple[Provided, ...]
    indexes: Indexes
    kept: Mapping[str, str] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    say: Callable[[str], None] = lambda _: None

    def place_of(self, name: str) -> Place:
        """file:line of the requirement on a package; the file's name if the spec has none."""
        return next(
            (r.place for r in self.spec.pip.requirements if r.name == name), self.spec.place()
        )

    def advice_target(self) -> Target:
        """The properties that a wheel has to fit."""
        pinned = next((r.text for r in self.spec.pip.requirements if r.name == "torch"), "")
        version = re.search(r"==\s*(\d+\.\d+[\w.+]*)", pinned)
        return Target(self.python, self.profile.machine, version[1] if version else None)


class Uv:
    """uv with a working folder. URLs with secrets are in files of mode 0600, not in the command."""

    def __init__(self, folder: Path, request: PipRequest) -> None:
        self._folder, self.request = folder, request
        self._stubs = folder / "provided"
        self.stubbed = {d.name: d for d in request.provided}
        self.sources: set[str] = set(request.spec.pip.sdists)

    def write_stubs(self, extras: Mapping[str, set[str]]) -> None:
        """Writes an empty wheel for each distribution that is provided.

        conda or the site met its requirements already. Only the requirements of extras are
        written, because conda has no extras.

        Args:
            extras: name -> the extras of it that pip requirements ask for.
        """
        lines = []
        for distribution in self.stubbed.values():
            name, version = distribution.name, _as_in_a_file_name(distribution.version)
            headers = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            if extras.get(name):
                headers += _extras(metadata_of(distribution))
            stub = pure_wheel(self._stubs, name, version, {}, {"METADATA": headers.encode()})
            lines.append(f"{name} @ {stub.as_uri()}\n")
        (self._folder / "provided.txt").write_text("".join(lines))

    def compile(self, *more: str) -> tuple[dict[str, Any] | None, str]:
        """Resolves the requirements.

        Args:
            more: constraints for this call only.

        Returns:
            the pylock document (PEP 751), None without a solution; and the output of uv.

        Raises:
            IncompleteError: an index cannot be reached.
        """
        request = self.request
        constraints = self._folder / "constraints.txt"
        listed = [*(r.text for r in request.spec.pip.constraints), *request.constraints, *more]
        constraints.write_text("".join(f"{text}\n" for text in listed))
        _write_kept(self._folder / "pylock.toml", request.kept)
        command = self._command()
        provided = self._folder / "provided.txt"
        for file in (constraints, provided, *map(Path, request.indexes.constraints)):
            if file.stat().st_size:
                command += ["-c", str(file)]
        for name in self.stubbed:
            command += ["--no-emit-package", name]
        texts = (requirement.text for requirement in request.spec.pip.requirements)
        document, said = self._locked(command, [*texts, *request.own_requirements])
        said = without_secrets(said)
        if document is None and is_network_problem(said):
            raise IncompleteError(
                f"{request.spec.path}: a Python index cannot be reached: "
                f"{' '.join(said.split())[:400]}",
                "Check the network and the index, then run the same command again.",
            )
        return document, said

    def permit_sources(self, said: str) -> bool:
        """Permits as source the packages without a wheel for any platform.

        Packages that are known to need a compiler are not permitted. Another package that turns out
        to compile code is refused when its wheel is built.

        Args:
            said: the output of uv, which names the packages without a wheel for the target.

        Returns:
            whether a package is permitted that was not before.
        """
        asked = {r.name: r.text for r in self.request.spec.pip.requirements}
        new = {
            name
            for name, text in requirements_without_wheel(said).items()
            if self._is_candidate(name) and self.is_source_only(asked.get(name, text))
        }
        self.sources |= new
        return bool(new)

    def _is_candidate(self, name: str) -> bool:
        known = advice_for(name, self.request.advice_target())
        return name not in self.sources and name not in self.stubbed and known is None

    def is_source_only(self, requirement: str) -> bool:
        """Whether the newest version that meets a requirement has no wheel for any platform."""
        found = self.newest_anywhere([requirement])
        return bool(found) and all("sdist" in entry and not entry.get("wheels") for entry in found)

    def newest_anywhere(self, requirements: Iterable[str]) -> list[dict[str, Any]]:
        """Pylock entry of the newest version that meets each requirement, for any platform.

        Empty if uv finds no answer. Nothing is built, and dependencies are not resolved.
        """
        document, _ = self._locked([*self._common(), "--universal", "--no-deps"], requirements)
        return list(document.get("packages", []) if document else [])

    def newest_fitting(self, name: str) -> str | None:
        """The newest version of a package with a wheel for the target; None: no version has one."""
        document, _ = self._locked([*self._command(), "--no-deps"], [name])
        found = document["packages"] if document else []
        return next(
            (str(p["version"]) for p in found if p["name"] == name and p.get("wheels")), None
        )

    def _locked(
        self, command: list[str], requirements: Iterable[str]
    ) -> tuple[dict[str, Any] | None, str]:
        """The pylock document for requirements, None without one; and the output of uv."""
        asked, output = self._folder / "requirements.in", self._folder / "pylock.toml"
        asked.touch(mode=0o600)  # addresses of indexes may have passwords
        asked.write_text("\n".join([*self.request.indexes.lines, *requirements]) + "\n")
        environment = uv_environment(os.environ)
        if self.request.spec.pip.index_url:  # to uv, these come before the file's index
            environment = {k: v for k, v in environment.items() if k not in _INDEX_VARIABLES}
        done = subprocess.run(
            [*command, str(asked), "-o", str(output)],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        solved = done.returncode == 0
        document = tomllib.loads(output.read_text(encoding="utf-8")) if solved else None
        output.unlink(missing_ok=True)  # uv prefers the versions of an output file that exists
        return document, done.stderr

    def _common(self) -> list[str]:
        command = [find_uv(), "pip", "compile", "--format", "pylock.toml"]
        command += ["--no-header", "--no-sources"]
        command += ["--python", sys.executable, "--python-version", self.request.python]
        command += ["--index-strategy", "unsafe-best-match"]
        for host in self.request.spec.pip.insecure_hosts:
            command += ["--allow-insecure-host", host]
        return command + (["--prerelease", "allow"] if self.request.spec.pip.prereleases else [])

    def _command(self) -> list[str]:
        platform = uv_platform(self.request.profile.machine, self.request.profile.glibc)
        command = [*self._common(), "--python-platform", platform, "--only-binary", ":all:"]
        for name in sorted(self.sources):
            command += ["--no-binary", name]
        return command

    def failure(self, said: str) -> StageError:
        """The error for a resolution without a solution, with what to write instead.

        Args:
            said: the output of uv.
        """
        request = self.request
        if built := re.search(r"Failed to (?:build|download and build) `([A-Za-z0-9._-]+)", said):
            return self._unbuildable(built[1], said)
        for name in requirements_without_wheel(said):
            return self._without_wheel(name)
        if missing := missing_torch_index(request):
            return missing
        provided = {d.name: d.origin for d in request.provided}
        if provided and request.profile.provides:
            added = {Requirement(text).name: text for text in request.constraints}
            provided |= {n: f"airlift adds {t} for the site's numpy." for n, t in added.items()}
        return uv_conflict(said, request.spec, provided, request.own_requirements)

    def _without_wheel(self, name: str) -> StageError:
        request = self.request
        place, profile, target = request.place_of(name), request.profile, request.advice_target()
        machine = f"{profile.machine}, glibc {profile.glibc}"
        node = f"{profile.name} (Python {request.python}, {machine})"
        if advice := advice_for(name, target):
            return PolicyError(f"{place}: `{name}` has no wheel for {node}.", advice)
        if version := self.newest_fitting(name):
            fits = f"The newest that fits there: {name}=={version}."
            fits = what_fits(profile) if name == "torch" else fits
            return UsageError(
                f"{place}: no wheel of `{name}` fits both what is asked and {node}.",
                f"{fits} Or ask for another Python in `dependencies:`.",
            )
        return PolicyError(
            f"{place}: `{name}` has no wheel for {node}, and is published for other machines: it "
            "is compiled.",
            compiled_advice(name, target),
        )

    def _unbuildable(self, name: str, said: str) -> StageError:
        name = canonicalize_name(name)
        tail = " ".join(said.split())[-600:]
        return UsageError(
            f"{self.request.place_of(name)}: `{name}` is published as source only, and its "
            f"requirements could not be read: {tail}",
            compiled_advice(name, self.request.advice_target()),
        )


def missing_torch_index(request: PipRequest) -> StageError | None:
    """The error for `torch==2.6.0+cu118` and the like without PyTorch's index for such builds."""
    here = index_names(request.indexes)
    for requirement in request.spec.pip.requirements:
        build = build_of(requirement.text)
        is_torch = requirement.name.startswith("torch")
        if not build or not is_torch or requirement.name in request.profile.provides:
            continue
        if build not in here:
            return UsageError(
                f"{requirement.place}: `{requirement.text}`: only PyTorch's own index has such "
                "builds.",
                f"Add a line to the pip section: `--extra-index-url {index_of(build)}`",
            )
    return None


def _as_in_a_file_name(version: str) -> str:
    """A version in a wheel's name, where `-` separates; unchanged if PEP 440 does not know it."""
    try:
        return str(Version(version))
    except InvalidVersion:
        return version


def requirements_without_wheel(said: str) -> dict[str, str]:
    """Name -> requirement of the packages that have no wheel for the target, from the output of uv.

    >>> requirements_without_wheel("Because fire==0.4.0 has no usable wheels and you require ...")
    {'fire': 'fire==0.4.0'}
    """
    found = re.findall(
        r"([A-Za-z0-9][A-Za-z0-9._-]*?)((?:[<>=!~][^\s]*)?) has no (?:usable )?wheels", said
    )
    required = r"(?:Wheels are required|Building source distributions) for `([^`]+)`"
    found += [(name, "") for name in re.findall(required, said)]
    named: dict[str, str] = {}
    for name, versions in found:
        named.setdefault(canonicalize_name(name), _as_requirement(name, versions))
    return named


def _as_requirement(name: str, versions: str) -> str:
    try:
        return str(Requirement(f"{name}{versions}"))
    except InvalidRequirement:
        return name


def uv_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for uv: no progress bar, no download of Python, `stage`'s CA certificates."""
    trusted = {"UV_SYSTEM_CERTS": "true"}
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"):
        if environment.get(variable):
            trusted.setdefault("SSL_CERT_FILE", environment[variable])
    # DS_BUILD_OPS: deepspeed's setup.py writes its metadata, and must not look for a compiler.
    quiet = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    quiet |= {"DS_BUILD_OPS": "0", "PYTHONNOUSERSITE": "1"}
    # An sdist's setup.py would import from these folders before the library of its Python.
    foreign = ("PYTHONPATH", "PYTHONHOME")
    return {**trusted, **{k: v for k, v in environment.items() if k not in foreign}, **quiet}


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
        raise UsageError("uv is not installed here.", install_command("laptop")) from None


def uv_platform(machine: str, glibc: str) -> str:
    """uv's name for a target, with the newest glibc that is not newer than the cluster's.

    >>> uv_platform("x86_64", "2.30")
    'x86_64-manylinux_2_28'

    Raises:
        UsageError: no wheels are built for this old glibc.
    """
    major, minor = (int(part) for part in glibc.split("."))
    fitting = [known for known in GLIBC_OF_UV if known <= minor]
    if major != 2 or not fitting:
        raise UsageError(
            f"glibc {glibc} is older than 2.17, the oldest that today's wheels support.",
            "Use a container there.",
        )
    return f"{machine}-manylinux_2_{fitting[-1]}"


def _write_kept(path: Path, kept: Mapping[str, str]) -> None:
    """Writes an earlier result; uv prefers the versions of an output file that exists."""
    lines = ['lock-version = "1.0"', 'created-by = "airlift"']
    for name, version in sorted(kept.items()):
        lines += ["", "[[packages]]", f'name = "{name}"', f'version = "{version}"']
    path.unlink(missing_ok=True)
    if kept:
        path.write_text("\n".join(lines) + "\n")


def _extras(metadata: str) -> str:
    """The lines of a METADATA that are about extras."""
    headers = HeaderParser().parsestr(metadata)
    required = [v for v in headers.get_all("Requires-Dist", []) if "extra" in v]
    lines = [f"Provides-Extra: {value}\n" for value in headers.get_all("Provides-Extra", [])]
    return "".join([*lines, *(f"Requires-Dist: {value}\n" for value in required)])


BUILD_TOOLS = (
    "setuptools==80.9.0",
    "wheel==0.45.1",
    "hatchling==1.27.0",
    "flit-core==3.12.0",
    "poetry-core==2.1.3",
    "packaging==25.0",
)
"""Constraints on the tools that write the bytes of a wheel; a build installs those it needs."""

# A date within the years that zip files can have, from 1980 on.
SETTINGS = {"SOURCE_DATE_EPOCH": "1700000000", "PYTHONHASHSEED": "0", "DS_BUILD_OPS": "0"}


def build_wheel(
    sdist: Path, package: Package, out: Path, target: Target, reporter: Reporter
) -> Path:
    """Builds the wheel of an sdist into `out`.

    Args:
        target: the properties of the cluster, for advice.

    Raises:
        UsageError: the wheel is for one platform only, or it is not one.
        DamageError: the wheel is of another package or version.
        IncompleteError: the build failed; the message has the last lines of its output.
    """
    reporter.note(
        f"{package.name} {package.version}: no wheel is published; building one from {sdist.name}"
    )
    with tempfile.TemporaryDirectory(prefix="airlift-build-") as folder:
        pins = Path(folder, "build-constraints.txt")
        lines = choose_indexes(PipSection(), os.environ).lines
        options = [part for line in lines for part in line.split(" ", 1)]
        pins.write_text("".join(f"{pin}\n" for pin in BUILD_TOOLS), encoding="utf-8")
        command = [find_uv(), "build", "--wheel", "--no-config", "--python", sys.executable]
        command += [*options, "--build-constraints", str(pins)]
        command += ["--out-dir", f"{folder}/out", str(sdist.absolute())]
        done = subprocess.run(
            command, env={**uv_environment(os.environ), **SETTINGS}, capture_output=True, cwd=folder
        )
        if done.returncode != 0:
            said = (line.strip() for line in done.stderr.decode(errors="replace").splitlines())
            last = [line for line in said if line and not line.startswith("hint:")][-6:]
            raise IncompleteError(
                f"{package.name} {package.version}: no wheel could be built from {sdist.name}: "
                f"{' / '.join(last)}",
                "Check that the index with the build's requirements can be reached. If it "
                f"compiles: {compiled_advice(package.name, target)}",
            )
        wheels = sorted(Path(folder, "out").glob("*.whl"))
        wheel = _the_one(wheels, package, sdist, target)
        out.mkdir(parents=True, exist_ok=True)
        built = out / wheel.name
        built.write_bytes(wheel.read_bytes())
    return built


def _the_one(wheels: list[Path], package: Package, sdist: Path, target: Target) -> Path:
    if len(wheels) != 1:
        raise UsageError(
            f"{package.name} {package.version}: building {sdist.name} gives "
            f"{', '.join(wheel.name for wheel in wheels) or 'no wheel'}, not one wheel.",
            compiled_advice(package.name, target),
        )
    (wheel,) = wheels
    name, version, _, _ = parse_wheel_filename(wheel.name)
    if (name, str(version)) != (canonicalize_name(package.name), package.version):
        raise DamageError(
            f"{sdist.name}: its build gives {wheel.name}, another package or version.",
            "Lock again.",
        )
    if not wheel.name.endswith("-none-any.whl"):
        raise UsageError(
            f"{package.name} {package.version}: {wheel.name} is compiled for this machine, not for "
            "the cluster.",
            compiled_advice(package.name, target),
        )
    return wheel
