"""Puts the site's folders behind those of the environment, at each start of its Python.

In an image on the site's torch this file is `_airlift_site.py`, and `zz-airlift-site.pth` beside it
names the folders and imports it. Without it, a `module load` after `activate` sets PYTHONPATH, and
the site's old packages are imported. A folder that the user adds to PYTHONPATH stays first.
Standard library only.
"""

from __future__ import annotations

import os
import sys

FOLDERS = "zz-airlift-site.pth"


def put_behind(own: str, path: list[str]) -> list[str]:
    """Moves the folders that are named in `own` right behind it; returns them.

    Args:
        own: the environment's `site-packages`.
        path: `sys.path`; changed.
    """
    with open(os.path.join(own, FOLDERS), encoding="utf-8") as file:
        site = [line.rstrip("\n") for line in file if line.startswith("/")]
    there = [folder for folder in site if folder in path]
    path[:] = [folder for folder in path if folder not in there]
    at = path.index(own) + 1
    path[at:at] = there
    return site


if __name__ == "_airlift_site":
    SITE = put_behind(os.path.dirname(os.path.abspath(__file__)), sys.path)
