"""Which wheel of a release a cluster takes: rules of tags (PEP 425, PEP 600), for a Python that is not here.

Pure. manylinux_2_28 means: needs glibc 2.28 or newer. Every tag up to the cluster's glibc is good, the highest first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import BuildTag, InvalidWheelFilename, parse_wheel_filename

_OLDEST_MINOR = 5  # manylinux1
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_")


def ranks(python: str, machine: str, glibc: str) -> dict[Tag, int]:
    """Every tag that fits -> its rank, 0 the best.

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
    """The wheel to take; None if none fits.

    Between equals the higher build tag wins, and any wins against none: it is a later build (PEP 427).
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


def glibc_needed(file_name: str) -> str | None:
    """The lowest glibc a wheel says it runs with; None for one that has nothing to do with it.

    >>> glibc_needed("torch-2.7.1-cp311-cp311-manylinux_2_28_x86_64.whl")
    '2.28'
    """
    try:
        platforms = {tag.platform for tag in parse_wheel_filename(file_name)[3]}
    except InvalidWheelFilename:
        return None
    for minor, legacy in _LEGACY.items():
        platforms = {re.sub(rf"^{legacy}_", f"manylinux_2_{minor}_", platform) for platform in platforms}
    versions = [(int(m[1]), int(m[2])) for platform in platforms if (m := _MANYLINUX.match(platform))]
    return "{}.{}".format(*min(versions)) if versions else None
