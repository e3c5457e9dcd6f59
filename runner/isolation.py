"""Keeps a run from importing packages outside its environment: from PYTHONPATH and `~/.local`.

`module load python` sets PYTHONPATH, and an old `pip install --user` filled `~/.local`. Both come
before the environment's own packages, so the ranks would train with another torch than the locked
and verified one.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Callable, Mapping, MutableMapping
from importlib.machinery import PathFinder
from pathlib import Path

NEEDED = "torch"
"""PYTHONPATH stays if this package is nowhere else: a site's modules may provide it so."""

HIDDEN = ("torch", "numpy", "transformers", "tokenizers", "datasets", "accelerate", "deepspeed")
"""Packages of another version would change or end a script."""


def isolate(
    environ: MutableMapping[str, str], say: Callable[[str], None], path: list[str] | None = None
) -> None:
    """Removes PYTHONPATH and `~/.local` from this process and its children, and reports it.

    Also PYTHONOPTIMIZE, from its children.

    Args:
        environ: the variables of this process, which its children inherit; changed.
        say: prints a line.
        path: a list instead of `sys.path`; changed.
    """
    path = sys.path if path is None else path
    if environ.pop("PYTHONOPTIMIZE", ""):
        say("PYTHONOPTIMIZE is unset: transformers reads docstrings, which it takes away")
    theirs = folders(environ)
    user = site.getusersitepackages()
    elsewhere = [entry for entry in path if _real(entry) not in {*map(_real, theirs), _real(user)}]
    # With torch: a site's modules may give each package a folder of its own, numpy's too.
    give_torch = _give_torch(theirs, elsewhere)
    kept = [folder for folder in theirs if give_torch or _is_ours(folder)]
    environ.pop("PYTHONPATH", None)
    if kept:
        environ["PYTHONPATH"] = os.pathsep.join(kept)
    left_out = [folder for folder in theirs if folder not in kept]
    if left_out:
        say(
            f"not imported from: {', '.join(left_out)} (PYTHONPATH); "
            "`runner exec` keeps it for your own scripts"
        )
    if kept:
        say(f"imported from: {', '.join(kept)} (PYTHONPATH), because the packages in it are needed")
    if user not in path:
        environ["PYTHONNOUSERSITE"] = "1"
    elif _is_ours(user) or _give_torch([user], elsewhere):
        say(f"imported from: {user}, because the packages in it are needed")
    else:
        environ["PYTHONNOUSERSITE"] = "1"
        left_out.append(user)
        say(f"not imported from: {user} (pip install --user)")
    # For processes that libraries start with `python -m` (Python 3.11 and newer).
    environ["PYTHONSAFEPATH"] = "1"
    gone = set(map(_real, left_out))
    path[:] = [entry for entry in path if _real(entry) not in gone]


def folders(environ: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH, each once. An empty entry, the current folder, is omitted.

    Also those of the site's torch, which this environment names as its own.
    """
    named = dict.fromkeys(filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)))
    # Imported at the start of a Python that is on a site's own torch (stage's site_path.py).
    own = set(map(_real, getattr(sys.modules.get("_airlift_site"), "SITE", ())))
    return [folder for folder in named if _real(folder) not in own]


def note_for_script(environ: Mapping[str, str]) -> str | None:
    """A line for a user's own script, which keeps its PYTHONPATH and `~/.local`; None: nothing."""
    if found := folders(environ):
        return (
            f"PYTHONPATH is set: the script imports from {', '.join(found)} before its environment "
            "(not meant? unset PYTHONPATH)"
        )
    user = site.getusersitepackages()
    if user not in sys.path or environ.get("PYTHONNOUSERSITE"):
        return None
    hides = [name for name in HIDDEN if PathFinder.find_spec(name, [user]) is not None]
    if not hides:
        return None
    return (
        f"the script imports {', '.join(hides)} from {user} (pip install --user), before those of "
        "its environment (not meant? export PYTHONNOUSERSITE=1)"
    )


def _is_ours(folder: str) -> bool:
    """Whether this program is in a folder."""
    return _real(folder) == _real(str(Path(__file__).parents[1]))


def _give_torch(theirs: list[str], elsewhere: list[str]) -> bool:
    """Whether the needed package is in these folders and nowhere else."""
    return (
        PathFinder.find_spec(NEEDED, theirs) is not None
        and PathFinder.find_spec(NEEDED, elsewhere) is None
    )


def _real(folder: str) -> str:
    return os.path.realpath(folder or ".")
