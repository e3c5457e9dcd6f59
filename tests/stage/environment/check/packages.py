"""Packages of a few lines in a real environment, which fail as the real ones do."""

from __future__ import annotations

from pathlib import Path

TORCH = """\
from . import version
from .version import __version__
class cuda:
    is_available = staticmethod(lambda: False)
class _C:
    _cuda_getArchFlags = staticmethod(lambda: "sm_50 sm_80 sm_90")
class zeros:
    def __init__(self, n): pass
    def numpy(self): return 0
"""
VERSION = "__version__ = '2.6.0'\ncuda: str = '12.4'\nhip = None\n"


def write_packages(prefix: Path, *, cuda: str = "12.4", **code: str) -> None:
    """Writes packages into the site-packages of an environment.

    Args:
        cuda: of torch.
        code: name -> the text of its `__init__.py`.
    """
    site = next(prefix.glob("lib/python*/site-packages"))
    for name, text in code.items():
        (site / name).mkdir(exist_ok=True)
        (site / name / "__init__.py").write_text(text)
    if "torch" in code:
        (site / "torch" / "version.py").write_text(VERSION.replace("12.4", cuda))
