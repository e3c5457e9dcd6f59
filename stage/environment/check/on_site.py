"""Whether an environment finds what it was locked on: the Python and the torch of its site.

`bootstrap.sh` asks it for a new environment, by that environment's own Python:

    python -I -m stage.environment.check.on_site

The runner asks at each start: the site may have another torch by then.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path


def provided(prefix: Path = Path(sys.prefix)) -> dict[str, str]:
    """What the site provides to the environment at `prefix`: name -> version; none: it is whole."""
    try:
        facts = json.loads((prefix / ".airlift" / "env.json").read_text(encoding="utf-8"))
        return dict(facts.get("provides") or {})
    except (OSError, ValueError, AttributeError):
        return {}


def change_of_site(prefix: Path) -> str:
    """What this Python finds instead of what its environment was made on; empty: the same."""
    for name, version in provided(prefix).items():
        if name == "python":  # `lib/pythonX.Y`: another one finds nothing in it
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            return f"{prefix} was made on {name} {version}; its python now finds none."
        if found.version != version:
            there = f"{found.version} in {found.locate_file('')}"
            return f"{prefix} was made on {name} {version}; its python now finds {there}."
    return ""


def whose_torch(prefix: Path = Path(sys.prefix)) -> str:
    """A line on the torch that this environment imports, if it is the site's; else empty."""
    if "torch" not in provided(prefix) or change_of_site(prefix):
        return ""
    found = distribution("torch")
    return f"torch {found.version} is the site's, in {found.locate_file('')}; not of {prefix}"


ANOTHER = "Load the module that it was made on; or remove it and run bootstrap.sh again."


def problem_of_new(prefix: Path) -> tuple[str, str]:
    """Why a new environment cannot be used on this site, and what helps; empty: all was tried."""
    from stage.environment.check.imports import faults, importable
    from stage.environment.image.try_imports import WANTED, try_imports

    if problem := change_of_site(prefix):
        return problem, ANOTHER
    own = sysconfig.get_path("purelib")
    names = [found.metadata["Name"] for found in distributions(path=[own])]
    for name in names:
        if (where := str(distribution(name).locate_file(""))) != own:
            problem = f"`{name}` would be imported from {where}, before the environment's own."
            return problem, "Take it out of PYTHONPATH, then run this again."
    wanted = importable([*names, *provided(prefix)], WANTED)
    answers, code, last_line = try_imports(prefix, wanted, os.environ)
    for fault in faults(answers, code):
        if fault.known_here:
            there = "Where only compute nodes have a driver that it loads, run this on one."
            return f"{fault.message}.", f"{fault.remedy} {there}"
        print(f"not known here: {fault.message}")
    return "" if answers.python else f"its Python does not start: {last_line or code}", ANOTHER


if __name__ == "__main__":
    problem, remedy = problem_of_new(Path(sys.prefix))
    if problem:
        print(f"{problem} Nothing is left.\n  -> {remedy}", file=sys.stderr)
        sys.exit(1)
