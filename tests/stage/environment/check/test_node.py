"""An environment that cannot run on this node is reported before anything is unpacked.

The same script under every shell; the node around it is made of programs that answer as the real
ones do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stage.environment.check.torch_builds import runs_on
from tests.support.environment.laptop import EnvironmentLaptop
from tests.support.node import SHELLS, Node
from tests.support.staging import run_here

FACTS: dict[str, Any] = {
    "architectures": "7.0 7.5 8.0 8.6 9.0 10.0 12.0",
    "cuda": "12.8",
    "files": 30000,
    "format": 1,
    "glibc": "2.28",
    "modules": 9000,
    "placeholder": "/airlift-environment-prefix" + "_placeholder" * 8,
    "platform": "linux-64",
    "size": 6 << 30,
    "torch": "2.8.0",
    "virtual_packages": {"__cuda": "12.2", "cuda": "not this one", "__glibc": "2.28"},
}
ROOMY = """case $1 in
  -Pk) echo H; echo "/dev/sda1 900000000 1 800000000 1% /scratch" ;;
  -Pi) echo H; echo "/dev/sda1 90000000 1 80000000 1% /scratch" ;;
esac"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node of the cluster: A800, driver 535, glibc 2.28, and room."""
    node = Node(tmp_path)
    node.add_gpu("NVIDIA A800-SXM4-80GB", "535.104.05", "8.0", "CUDA Version: 12.2")
    node.add("df", ROOMY)
    return node


def check(
    node: Node,
    *prefix: Path,
    shell: Sequence[str] = ("sh",),
    environment: dict[str, str] | None = None,
    **facts: object,
) -> tuple[int, str]:
    """Exit code and output of the check of an environment that fits, except for `facts`."""
    folder = node.folder / "asset"
    folder.mkdir(exist_ok=True)
    merged = {**FACTS, **facts}
    (folder / "env.json").write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
    done = node.run(
        "env-check.sh", "--environment", folder, *prefix, shell=shell, **(environment or {})
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_what_fits_is_said_to_fit_under_any_shell(node: Node, shell: list[str]) -> None:
    if shell[0] == "busybox":
        node.add("df", f'exec {shutil.which("df")} "$@"')  # it takes its own
        code, said = check(node, node.folder / "new" / "prefix", shell=shell, size=4096, files=3)
    else:
        code, said = check(node, node.folder / "new" / "prefix", shell=shell)
        assert f"6.0 GiB are needed at {node.folder}, 762.9 GiB are free" in said
    assert code == 0
    assert [line for line in said.splitlines() if line.startswith("bad")] == []
    assert "ok    glibc 2.28; the environment needs 2.28" in said
    assert "note  CUDA 12.8 on a driver with CUDA 12.2 runs by minor-version compatibility" in said
    assert "ok    torch 2.8.0 has code for NVIDIA A800-SXM4-80GB (compute capability 8.0)" in said
    assert not list(node.folder.glob(".env*"))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"platform": "linux-aarch64"},
            "bad   the environment is for linux-aarch64; this is x86_64",
        ),
        (
            {"architectures": "7.0+PTX"},
            "bad   torch 2.8.0 has no code",
        ),  # the driver is older than what made the PTX
    ],
)
def test_what_would_not_run_is_bad(node: Node, facts: dict[str, Any], said: str) -> None:
    code, output = check(node, **facts)
    assert code == 1
    assert said in output
    assert "      -> " in output
    assert output.splitlines()[-1] == "1 bad: the environment would not run here as it is"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"glibc": "2.5"}, "ok    glibc 2.28; the environment needs 2.5"),
        ({"glibc": None}, "ok    glibc 2.28\n"),
        ({"cuda": None}, "ok    no CUDA in the environment, so no GPU is needed"),
        ({"cuda": "12.2"}, "ok    CUDA 12.2; the driver (535.104.05) has CUDA 12.2"),
        ({"cuda": "11.8"}, "ok    CUDA 11.8; the driver (535.104.05) has CUDA 12.2"),
        ({"architectures": "7.0+PTX", "cuda": "12.1"}, "ok    torch 2.8.0 has code for"),
        ({"architectures": None}, "note  not known whether torch 2.8.0 was built for NVIDIA A800"),
    ],
)
def test_what_runs_or_is_not_known_is_not_bad(node: Node, facts: dict[str, Any], said: str) -> None:
    code, output = check(node, **facts)
    assert code == 0
    assert said in output


@pytest.mark.parametrize("capability", ["7.0", "8.9", "12.1"])
@pytest.mark.parametrize(
    ("architectures", "cuda"),
    [("7.0 8.0 9.0", "12.2"), ("7.5+PTX 12.0", "12.2"), ("8.6+PTX", "12.4")],
)
def test_sh_and_python_agree_on_which_gpu_runs_which_code(
    node: Node, capability: str, architectures: str, cuda: str
) -> None:
    """The rule stands twice, in `torch_builds.runs_on` and in the script."""
    node.add_gpu("NVIDIA X", "535.1", capability, "CUDA Version: 12.2")
    runs = runs_on(tuple(architectures.split()), capability, ptx=cuda == "12.2")
    assert check(node, architectures=architectures, cuda=cuda)[0] == (0 if runs else 1)


def df(blocks: object, inodes: object) -> str:
    return f"""case $1 in
      -Pk) echo H; echo "me@o2ib:/lustre 90 1 {blocks} 1% /lustre" ;;
      -Pi) echo H; echo "me@o2ib:/lustre 90 1 {inodes} 1% /lustre" ;;
    esac"""


@pytest.mark.parametrize(
    ("blocks", "inodes", "said"),
    [
        (5 << 20, 10**6, "5.0 GiB are free at"),
        (9 << 20, 38999, "39000 files are needed at"),
    ],
)
def test_a_full_disk_is_said_before_unpacking(
    node: Node, blocks: int, inodes: int, said: str
) -> None:
    node.add("df", df(blocks, inodes))
    code, output = check(node, node.folder / "p")
    assert code == 1
    assert said in output


def test_a_disk_that_does_not_say_how_many_files_it_takes_is_not_full(node: Node) -> None:
    node.add("df", df(9 << 20, 0))
    assert check(node, node.folder / "p")[0] == 0
    node.add("df", df("-", "-"))
    assert check(node, node.folder / "p")[0] == 0


LFS = """[ "$1 $2 $3" = "quota -q -u" ] || exit 1
echo "/lustre/a/very/long/name"
echo "    {used}  {soft} {hard} - {files} {soft_files} {hard_files} -"
"""


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"used": 95 << 20, "hard": 100 << 20}, "5.0 GiB are left of your quota"),
        ({"used": f"{101 << 20}*", "soft": 100 << 20}, "0 MiB are left of your quota"),
        (
            {"files": 170000, "soft_files": 190000, "hard_files": 200000},
            "30000 files are left of your quota",
        ),
    ],
)
def test_a_lustre_quota_counts(node: Node, numbers: dict[str, Any], said: str) -> None:
    empty = dict.fromkeys(("used", "soft", "hard", "files", "soft_files", "hard_files"), 0)
    node.add("lfs", LFS.format(**{**empty, **numbers}))
    code, output = check(node, node.folder / "p")
    assert code == 1
    assert said in output
    node.add("lfs", LFS.format(**empty))
    assert "your quota at" in check(node, node.folder / "p")[1]


# --- stage env check


def test_the_command_checks_this_very_machine(
    environment_laptop: EnvironmentLaptop, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_here("env", "check", environment_laptop.bundle, "--prefix", tmp_path / "new")
    assert "ok    glibc" in capfd.readouterr().out


def test_the_command_says_what_is_bad_and_exits_with_1(
    environment_laptop: EnvironmentLaptop, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = environment_laptop.bundle
    run_here("env", "check", bundle, "small-env", "--prefix", bundle, code=1)
    said = capfd.readouterr().out
    assert f"bad   {bundle} is there already\n      -> Choose another path" in said
