"""Whether an environment finds what it was locked on: the Python and the torch of its site.

`bootstrap.sh` asks it for a new environment, by that environment's own Python:

    python -I -m stage.environment.check.on_site

The runner asks at each start: the site may have another torch by then.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path


def provided(folder: Path = Path(sys.prefix, ".airlift")) -> dict[str, str]:
    """What the site provides to an environment: name -> version; none: it is whole.

    Args:
        folder: of its `env.json`; also in a bundle.
    """
    try:
        facts = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        return dict(facts.get("provides") or {})
    except (OSError, ValueError, AttributeError):
        return {}


def change_of_site(prefix: Path, path: Sequence[str] | None = None) -> str:
    """What this Python finds instead of what its environment was made on; empty: the same.

    Args:
        path: where it looks; None: `sys.path`.
    """
    for name, version in provided(prefix / ".airlift").items():
        if name == "python":  # `lib/pythonX.Y`: another one finds nothing in it
            continue
        if (found := _found(name, path)) is None:
            return f"{prefix} was made on {name} {version}; its python now finds none."
        if found.version != version:
            there = f"{found.version} in {found.locate_file('')}"
            return f"{prefix} was made on {name} {version}; its python now finds {there}."
    return ""


def whose_torch(path: Sequence[str] | None = None) -> str:
    """A line on the torch that this environment imports, if it is the site's; else empty.

    Args:
        path: where it looks; None: `sys.path`. `change_of_site` is empty for it.
    """
    found = _found("torch", path) if "torch" in provided() else None
    if found is None:
        return ""
    return f"torch {found.version} is the site's, in {found.locate_file('')}; not of {sys.prefix}"


def _found(name: str, path: Sequence[str] | None) -> Distribution | None:
    there = Distribution.discover(name=name, path=[*(sys.path if path is None else path)])
    return next(iter(there), None)


ANOTHER = (
    "Load the module that it was made on. For the torch that is there now: run env-probe.sh, lock "
    "and fetch with that profile, and make the environment in another folder."
)
TRY_AGAIN = (
    "What is missing has to come with the site's torch (another module?), or from environment.yml."
)


def problem_of_new(prefix: Path) -> tuple[str, str]:
    """Why a new environment cannot be used on this site, and what helps; empty: all was tried."""
    from stage.environment.check.imports import WANTED, faults, importable, try_imports

    if problem := change_of_site(prefix):
        return problem, ANOTHER
    own = sysconfig.get_path("purelib")
    names = [found.metadata["Name"] for found in distributions(path=[own])]
    for name in names:
        if (where := str(distribution(name).locate_file(""))) != own:
            problem = f"`{name}` would be imported from {where}, before the environment's own."
            unset = "unset PYTHONPATH EBPYTHONPREFIXES"
            return problem, f"Load no module that has it, or: {unset}; then run this again."
    wanted = importable([*names, *provided(prefix / ".airlift")], WANTED)
    answers, code, last_line = try_imports(prefix, wanted, os.environ)
    for fault in faults(answers, code):
        if fault.known_here:
            there = "Where only compute nodes have a driver that it loads, run this on one."
            # The folder is removed: no command can name its Python.
            remedy = TRY_AGAIN if str(prefix) in fault.remedy else fault.remedy
            return f"{fault.message.removesuffix('.')}.", f"{remedy} {there}"
        print(f"not known here: {fault.message}")
    base = os.path.realpath(sys.executable)
    why = f"its Python does not start: {last_line or code}."
    return "" if answers.python else why, f"To see why: {shlex.quote(base)} -I -c 'import site'"


if __name__ == "__main__":
    problem, remedy = problem_of_new(Path(sys.prefix))
    if problem:
        print(f"{problem} Nothing is left.\n  -> {remedy}", file=sys.stderr)
        sys.exit(1)
