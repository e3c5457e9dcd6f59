"""A conda channel for tests, with one of each kind of package that is hard to carry.

Besides a real Python and pip it has packages that

- need a GPU driver (`cudatoolkit`);
- name their prefix in text and in binaries (`openmpi`), have links (`links`), or would run a
  script when they are linked (`scripted`), which must never happen;
- are Python for any platform, with a command (`greeter`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.lib.conda.channel import (
    PLACEHOLDER,
    File,
    Package,
    index,
    package_from_wheel,
    write_package,
)
from scripts.lib.conda.python import bundled_wheels, python_package
from tests.support.once import once

GREETING = "hello from the environment"
SCRIPT_RAN = "post-link-ran"
"""The file that `scripted`'s post-link script would leave in the prefix."""


def make_channel(channel: Path) -> None:
    """Writes the whole channel; each call writes the same bytes."""
    packages = [
        python_package(),
        *map(package_from_wheel, bundled_wheels()),
        *_cuda(),
        *_hard_to_carry(),
        greeter("1.0"),
        greeter("1.1"),
    ]
    for package in packages:
        write_package(channel, package)
    index(channel)


@pytest.fixture(scope="session")
def conda_channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The channel's folder, made once for all workers of a test run. Treat it as read-only."""
    return once(tmp_path_factory, "conda-channel", make_channel)


def _cuda() -> list[Package]:
    """The packages by which conda-forge distinguishes CUDA versions."""
    return [
        Package(
            name="cudatoolkit",
            version=version,
            payload={"lib/libcudart.txt": File(f"CUDA {version}\n".encode())},
            depends=(f"__cuda >={version.partition('.')[0]}", f"__glibc >={glibc}"),
        )
        for version, glibc in (("11.8.0", "2.17"), ("12.4.1", "2.17"), ("13.0.0", "2.28"))
    ]


def _hard_to_carry() -> list[Package]:
    prefix = PLACEHOLDER.encode()
    mpi = {
        "bin/mpirun": File(
            b'#!/bin/sh\nexec "' + prefix + b'/bin/orterun" "$@"\n', executable=True
        ),
        "bin/orterun": File(b'#!/bin/sh\necho "orterun of $0"\n', executable=True),
        "etc/openmpi-mca-params.conf": File(b"prefix = " + prefix + b"\n"),
        # As in a compiled library: C strings between NULs; the second is longer than the prefix.
        "lib/libmpi.so.40": File(
            b"\x7fNOT-AN-ELF\0" + prefix + b"\0\0" + prefix + b"/etc:" + prefix + b"/share\0tail\0"
        ),
        "lib/libmpi.so": File(link="libmpi.so.40"),
    }
    links = {
        "share/links/file.txt": File(b"content\n"),
        "share/links/to-file": File(link="file.txt"),
        "share/links/across": File(link="../../etc/links.conf"),
        "share/links/to-folder": File(link="../links-folder"),
        "share/links/dangling": File(link="not-there"),
        "share/links-folder/inside.txt": File(b"inside\n"),
        "share/links/ünï cödé.txt": File("naïve\n".encode()),
        "share/links/tool": File(b"#!/bin/sh\necho tool\n", executable=True),
        "share/links/empty": File(b""),
        "etc/links.conf": File(b"# no prefix in here\n"),
    }
    script = f'#!/bin/sh\ntouch "$PREFIX/{SCRIPT_RAN}"\n'.encode()
    scripted = {
        "bin/.scripted-post-link.sh": File(script, executable=True),
        "bin/.scripted-pre-link.sh": File(script, executable=True),
        "share/scripted/data": File(b"data\n"),
    }
    return [
        Package(name="openmpi", version="5.0.6", payload=mpi, depends=("__glibc >=2.17",)),
        Package(name="links", version="1.0", payload=links),
        Package(name="scripted", version="1.0", payload=scripted),
    ]


def greeter(version: str) -> Package:
    """A noarch Python package with a command, `greet`."""
    code = f'VERSION = "{version}"\n\n\ndef main():\n    print("{GREETING}", VERSION)\n'
    info = f"site-packages/greeter-{version}.dist-info"
    return Package(
        name="greeter",
        version=version,
        build="pyh0000000_0",
        depends=("python >=3.9",),
        payload={
            "site-packages/greeter/__init__.py": File(code.encode()),
            f"{info}/METADATA": File(
                f"Metadata-Version: 2.1\nName: greeter\nVersion: {version}\n".encode()
            ),
            f"{info}/INSTALLER": File(b"conda\n"),
        },
        python=True,
        entry_points=("greet = greeter:main",),
    )
