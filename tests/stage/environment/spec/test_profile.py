"""A cluster's profile is read as documented; a mistake is reported with file:line and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage.environment.spec.profile import Profile
from stage.errors import UsageError

ROOT = Path(__file__).resolve().parents[4]
A800 = """\
format: 1
name: a800
platform: linux-64
glibc: "2.28"
cuda: "12.2"
compute_capability: "8.0"
gpu: NVIDIA A800 80GB
mpi: openmpi 4.1
modules: [nvidia/cuda/12.2]
"""


def load(folder: Path, text: str) -> Profile:
    path = folder / "p.yml"
    path.write_text(text)
    return Profile.load(path)


def test_every_key_is_read(tmp_path: Path) -> None:
    assert load(tmp_path, A800) == Profile(
        path=tmp_path / "p.yml",
        name="a800",
        platform="linux-64",
        glibc="2.28",
        cuda="12.2",
        compute_capability="8.0",
        gpu="NVIDIA A800 80GB",
        mpi="openmpi 4.1",
        modules=("nvidia/cuda/12.2",),
    )


def test_the_solver_is_told_what_the_node_has(tmp_path: Path) -> None:
    assert load(tmp_path, A800).virtual_packages() == {
        "__archspec": "1 x86_64",
        "__cuda": "12.2",
        "__glibc": "2.28",
        "__linux": "3.10",
        "__unix": "0",
    }


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("format: 1", "format: 2", 1, "Use a newer airlift"),
        ("format: 1\n", "", None, "`format` is missing"),
        ("linux-64", "win-64", 3, "`linux-64` | `linux-aarch64`, found `win-64`"),
        ("platform: linux-64\n", "", None, "`platform` is missing"),
        ('glibc: "2.28"\n', "", None, "`glibc` is missing"),
        ('glibc: "2.28"', "glibc: 2.30", 4, 'Put it in quotes: glibc: "2.30"'),
        ('glibc: "2.28"', 'glibc: "2.28-251.el8"', 4, "ldd --version"),
        ('cuda: "12.2"', "cuda: 12.2", 5, "Put it in quotes"),
        ('cuda: "12.2"', 'cuda: "535.104.05"', 5, "nvidia-smi"),
        ('cuda: "12.2"\n', "", 5, "`compute_capability` without `cuda`"),
        ('compute_capability: "8.0"\n', "", 5, "`cuda` without `compute_capability`"),
        ('compute_capability: "8.0"', 'compute_capability: "sm_80"', 6, "MAJOR.MINOR"),
        ("gpu: NVIDIA A800 80GB", "gpu: [a, b]", 7, "`gpu` must be text"),
        ("modules: [nvidia/cuda/12.2]", "modules: {cuda: 12}", 9, "must be a list of text"),
        ("modules:", "module:", 9, "Did you mean `modules`?"),
    ],
)
def test_a_mistake_is_told_with_its_line(
    tmp_path: Path, old: str, new: str, line: int | None, said: str
) -> None:
    assert old in A800
    with pytest.raises(UsageError) as caught:
        load(tmp_path, A800.replace(old, new))
    place = f"{tmp_path / 'p.yml'}:{line}:" if line else f"{tmp_path / 'p.yml'}"
    assert str(caught.value).startswith(place)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "envs" / "profiles").glob("*.yml")), ids=lambda path: path.stem
)
def test_a_shipped_profile_is_valid_and_named_as_its_file(path: Path) -> None:
    assert Profile.load(path).name == path.stem


def test_what_a_site_provides_has_names_as_pip_compares_them(tmp_path: Path) -> None:
    provided = '{python: "3.11.2", torch: "2.7.1+rocm6.3", Nvidia_NCCL.cu12: "2.26"}'
    found = load(tmp_path, A800 + f"provides: {provided}\n")
    expected = {"python": "3.11.2", "torch": "2.7.1+rocm6.3", "nvidia-nccl-cu12": "2.26"}
    assert found.provides == expected


@pytest.mark.parametrize(
    ("provided", "words"),
    [
        ('{torch: "2.7.1"}', "`provides` needs `python` and `torch`, found"),
        ('{python: "3.11", torch: two}', "`provides`: `torch`: two is no version"),
        ('{python: "3.11", torch: "v2.7"}', "`provides`: `torch`: v2.7 is no version"),
        ('{python: "3.11", torch: "2.7 $(id)"}', "`provides`: `torch`: 2.7 $(id) is no version"),
        ('{python: 3.11, torch: "2.7.1"}', "`provides` must be `key: value` lines"),
    ],
)
def test_what_a_site_cannot_provide(tmp_path: Path, provided: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, A800 + f"provides: {provided}\n")
    assert words in caught.value.message and "p.yml:" in caught.value.message


def test_without_a_gpu_the_solver_is_told_of_no_cuda(tmp_path: Path) -> None:
    text = 'format: 1\nplatform: linux-aarch64\nglibc: "2.34"\nlinux: "5.14"\n'
    profile = load(tmp_path, text)
    assert profile.name == "p"
    assert profile.virtual_packages() == {
        "__archspec": "1 aarch64",
        "__glibc": "2.34",
        "__linux": "5.14",
        "__unix": "0",
    }
