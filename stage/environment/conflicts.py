"""What solvers say when there is no solution -> one paragraph a researcher can act on. Pure.

conda's solvers print a tree of requirements; uv prints a proof. Both name versions nobody asked for. Here: who needs
what, what the cluster or conda has instead, and where in `environment.yml` those stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from stage.environment.profile import Profile
from stage.environment.spec import EnvironmentSpec
from stage.errors import UsageError

_LONGEST = 1200
_MOST_NEEDS = 10
_NETWORK = re.compile(
    r"error sending request|dns error|failed to fetch|CondaHTTPError|ConnectionError|Could not (download|connect)"
    r"|could not find subdir|Request failed after|HTTP status (client|server) error|timed? ?out|Connection refused"
    r"|invalid peer certificate",
    re.IGNORECASE,
)
_NODE = re.compile(r"^(?P<indent>[│├└─ ]*)(?P<text>\S.*)$")
_ENDING = re.compile(
    r",? ?(?:which )?(?:can be installed(?: with any of the following options)?|would require|"
    r"is installable(?: with the potential options)?|"
    r"(?:cannot be installed|is not installable|is uninstallable) because there are no viable options)[:;]?$"
)
_DEAD_END = re.compile(
    r",? ?(?:for which no candidates were found|which does not exist.*|but there are no viable .*)\.?$"
)
_CLASH = re.compile(
    r",? ?(?:which |which cannot be installed because it |is (?:not installable|uninstallable) because it )"
    r"conflicts with .*$"
)


def is_network_problem(message: str) -> bool:
    """Whether a solver failed for want of an answer from a server, not of a solution."""
    return bool(_NETWORK.search(message)) and "No solution found" not in message


def conda_conflict(message: str, spec: EnvironmentSpec, profile: Profile) -> UsageError:
    """No solution of the conda half, in words.

    Args:
        message: what rattler, libmamba or conda said.
    """
    needs, missing, clash = _read_tree(message)
    words = [f"`{who}` needs `{what}`" for who, what in needs[:_MOST_NEEDS]]
    words += [f"and {len(needs) - _MOST_NEEDS} more such"] if len(needs) > _MOST_NEEDS else []
    words += [_missing(what, spec, profile) for what in missing]
    if clash:
        words.append(f"no version of {clash} suits all of them")
    if not words:
        words = [_shortened(message)]
    roots = [d for d in spec.conda if re.search(rf"(?<![\w-]){re.escape(d.name)}(?![\w-])", message)]
    return UsageError(
        f"{spec.path}: the conda packages cannot be had together on {profile.name}: {'; '.join(words)}.",
        _where([(d.text, d.place) for d in roots], spec),
    )


def _read_tree(message: str) -> tuple[list[tuple[str, str]], list[str], str | None]:
    """The solver's tree -> who needs what, what no channel has, and the package over which it breaks."""
    needs: dict[str, dict[str, None]] = {}
    missing: dict[str, None] = {}
    clash: str | None = None
    parents: list[tuple[int, str, bool]] = []
    for line in message.splitlines():
        match = _NODE.match(line)
        if match is None:
            continue
        depth = len(match["indent"])
        text = re.sub(r"^.*(?:because of|No candidates were found for):? ", _keep_candidates, match["text"])
        clashes, dead = bool(_CLASH.search(text)), bool(_DEAD_END.search(text))
        requires = bool(re.search(r"would require", text))
        text = _spec(_CLASH.sub("", _DEAD_END.sub("", _ENDING.sub("", text))))
        while parents and parents[-1][0] >= depth:
            parents.pop()
        if text.startswith("No candidates were found for "):
            text, dead = _spec(text.removeprefix("No candidates were found for ")), True
        if parents and parents[-1][2]:
            needs.setdefault(parents[-1][1], {})[text] = None
        if dead:
            missing[text] = None
        if clashes:
            clash = text.split()[0]
        parents.append((depth, text, requires))
    return [(who, what) for who, all_of_it in needs.items() for what in all_of_it], list(missing), clash


def _keep_candidates(match: re.Match[str]) -> str:
    return "No candidates were found for " if "No candidates" in match[0] else ""


def _spec(text: str) -> str:
    """`name *` -> `name`, without the punctuation of a sentence."""
    return text.strip().rstrip(".,;:").removesuffix(" *").strip()


def _missing(what: str, spec: EnvironmentSpec, profile: Profile) -> str:
    name = what.split()[0]
    has = profile.virtual_packages().get(name)
    match name:
        case "__cuda":
            return f"the driver of {profile.name} has CUDA {has}" if has else f"{profile.name} has no GPU"
        case "__glibc":
            return f"{profile.name} has glibc {has}"
        case _ if name.startswith("__"):
            return f"{profile.name} has {name} {has}" if has else f"{profile.name} has no {name}"
        case _:
            return f"no channel of this file has `{what}`"


_ABSENT = re.compile(
    r"Because (?:there is no version of (?P<versions>\S+)|(?P<name>\S+) was not found in any index)"
    r" and you require \S+, there is none\.$"
)
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?((?:[<>=!~]=?=?[^\s,]+,?)*)")


def absent(message: str, spec: EnvironmentSpec) -> tuple[str, str, str] | None:
    """Where all that uv says is that there is no such package, or no such version of it, and the spec asks for it.

    Returns:
        its name, what was asked for ("numpy==99", or the name where no version is there), and file:line.
    """
    if (match := _ABSENT.match(_proof(message))) is None:
        return None
    asked = match["versions"] or match["name"]
    name = canonicalize_name(_REQUIREMENT.match(asked)[1])  # type: ignore[index]
    place = next((r.place for r in spec.pip.requirements if r.name == name), None)
    return (name, asked, place) if place else None


def twice(conda: str, has: str, asked: str, place: str, spec: EnvironmentSpec) -> UsageError:
    """A pip requirement on what conda has in another version.

    Args:
        conda: name of the conda package.
        has: "six 1.16.0", what is in it.
    """
    where = next((d.place.rpartition(":")[2] for d in spec.conda if d.name == conda), None)
    where = f"line {where}" if where else f"in its `{conda}`, which another package brings"
    return UsageError(
        f"{place}: `{asked}` cannot be had: conda already gives {has} ({where}).",
        "Drop one of the two." if where.startswith("line") else "Drop this line, or ask conda for that version.",
    )


def index_lacking(asked: str, spec: EnvironmentSpec) -> str | None:
    """Of a build that only PyTorch's own index has ("torch==2.6.0+cu118"), that index, if the spec does not name it."""
    build = re.search(r"\+(cu\d+|cpu|rocm[\d.]+)$", asked)
    if build is None or not canonicalize_name(re.split(r"[=\[]", asked)[0]).startswith("torch"):
        return None
    index = f"https://download.pytorch.org/whl/{build[1]}"
    named = (spec.pip.index_url or "", *spec.pip.extra_index_urls)
    return None if index in (url.rstrip("/") for url in named) else index


def uv_conflict(
    message: str, spec: EnvironmentSpec, provided: Mapping[str, str], own_requirements: Iterable[str], python: str
) -> UsageError:
    """No solution of the pip half, in words.

    Args:
        message: what uv said.
        provided: name -> "version (conda package)" of what conda provides.
        own_requirements: airlift's own.
        python: version of the target's Python.
    """
    proof = _proof(message)
    named = {canonicalize_name(name) for name in re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*", proof)}
    asked = {requirement.name for requirement in spec.pip.requirements}
    own = {r: Requirement(r) for r in own_requirements}
    own = {text: r for text, r in own.items() if canonicalize_name(r.name) in named}
    ours = [token for token in _requirements_in(proof) if any(_is_same(token, r) for r in own.values())]
    words = [_as_airlifts(proof, ours).rstrip(".") + "."]
    words += [f"{name} {provided[name]} comes from conda." for name in sorted(named & set(provided))]
    if ours or any(canonicalize_name(r.name) not in asked for r in own.values()):
        words.append(f"airlift itself, which is in every environment, needs {', '.join(own)}.")
    roots = [(r.text, r.place) for r in spec.pip.requirements if r.name in named]
    if "was not found in any index" in proof:
        words.append("(To uv an index that refuses, for want of the right password, is one that has nothing.)")
    return UsageError(
        f"{spec.path}: the Python packages cannot be had together for Python {python}: {' '.join(words)}",
        _where(roots, spec),
    )


def _requirements_in(proof: str) -> list[str]:
    return [match[0].rstrip(".,;") for match in _REQUIREMENT.finditer(proof) if match[2]]


def _is_same(token: str, requirement: Requirement) -> bool:
    try:
        found = Requirement(token)
    except InvalidRequirement:
        return False
    return canonicalize_name(found.name) == canonicalize_name(requirement.name) and (
        found.specifier == requirement.specifier
    )


def _as_airlifts(proof: str, ours: Iterable[str]) -> str:
    """To uv everything is what "you" require, airlift's own too."""
    for token in ours:
        proof = proof.replace(f"you require {token}", f"airlift requires {token}")
        proof = re.sub(rf"(you require \S+) and {re.escape(token)}", rf"\1 and airlift requires {token}", proof)
    return proof


def names_without_fitting_wheel(message: str) -> list[str]:
    """Packages of which uv says that their wheels do not fit the target."""
    found = re.findall(r"([A-Za-z0-9][A-Za-z0-9._-]*?)(?:[<>=!~][^\s]*)? has no (?:usable )?wheels", message)
    found += re.findall(r"Wheels are required for `([^`]+)`", message)
    found += re.findall(r"Building source distributions for `([^`]+)` is disabled", message)
    return list(dict.fromkeys(canonicalize_name(name) for name in found))


def _proof(message: str) -> str:
    """uv's `cause:` paragraph as prose; its hints are about options that nobody here has given."""
    text = re.split(r"\n\s*\n?hint:", message)[0]
    text = text.partition("cause:")[2] or text.partition("error:")[2] or text
    text = " ".join(text.split()).replace("we can conclude that your requirements are unsatisfiable", "there is none")
    text = text.replace("in the package registry", "in any index").replace("we can conclude that ", "")
    return _shortened(text)


def _where(roots: list[tuple[str, str]], spec: EnvironmentSpec) -> str:
    if not roots:
        return f"Loosen or drop one of them in {spec.path}."
    listed = ", ".join(f"`{text}` ({place})" for text, place in roots[:6])
    return f"Loosen or drop one of: {listed}."


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
