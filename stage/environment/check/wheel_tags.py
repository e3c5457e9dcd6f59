"""The wheel of a release for a cluster, by the rules of tags (PEP 425, PEP 600). Pure.

manylinux_2_28 needs glibc 2.28 or newer. Each tag up to the cluster's glibc fits, the highest best.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import BuildTag, InvalidWheelFilename, parse_wheel_filename

_OLDEST_MINOR = 5  # manylinux1
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def ranks(python: str, machine: str, glibc: str) -> dict[Tag, int]:
    """Each tag that fits -> its rank, 0 the best.

    Args:
        python: "3.11" or "3.11.7", CPython.
        machine: "x86_64" or "aarch64".
        glibc: "2.28".
    """
    major, minor = (int(part) for part in python.split(".")[:2])
    platforms = list(_platforms(machine, glibc))
    name = f"cp{major}{minor}"
    tags = [
        *cpython_tags((major, minor), abis=[name], platforms=platforms),
        *compatible_tags((major, minor), name, platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}


def _platforms(machine: str, glibc: str) -> Iterable[str]:
    major, newest = (int(part) for part in glibc.split("."))
    for minor in range(newest, _OLDEST_MINOR - 1, -1):
        yield f"manylinux_{major}_{minor}_{machine}"
        if minor in _LEGACY:
            yield f"{_LEGACY[minor]}_{machine}"
    yield f"linux_{machine}"


def best(file_names: Iterable[str], fitting: Mapping[Tag, int]) -> str | None:
    """The best of the wheels; None if none fits.

    Of equal ranks the higher build tag wins, and any against none: it is a later build (PEP 427).
    """
    rated: list[tuple[tuple[int, BuildTag], str]] = []
    for file_name in file_names:
        try:
            _, _, build, tags = parse_wheel_filename(file_name)
        except InvalidWheelFilename:
            continue
        if found := [fitting[tag] for tag in tags if tag in fitting]:
            rated.append(((-min(found), build), file_name))
    if not rated:
        return None
    top = max(rating for rating, _ in rated)
    return min(file_name for rating, file_name in rated if rating == top)


def glibc_needed(file_name: str, machine: str) -> str | None:
    """The oldest glibc that a wheel states for a machine; "": it needs none; None: it is not said.

    >>> glibc_needed("torch-2.7.1-cp311-cp311-manylinux_2_28_x86_64.whl", "x86_64")
    '2.28'
    """
    platforms = file_name.removesuffix(".whl").rpartition("-")[2].split(".")
    versions = [version for platform in platforms if (version := _glibc(platform, machine))]
    if versions:
        return min(versions, key=lambda version: int(version.partition(".")[2]))
    return None if f"linux_{machine}" in platforms else ""


def _glibc(platform: str, machine: str) -> str | None:
    for minor, legacy in _LEGACY.items():
        if platform == f"{legacy}_{machine}":
            return f"2.{minor}"
    match = re.fullmatch(rf"manylinux_2_(\d+)_{machine}", platform)
    return f"2.{match[1]}" if match else None
