"""The pip half of a lock: real uv against a small index on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.lib.conda_channel import File, Package, write_package
from stage.environment import wheels
from stage.environment.lockfile import LockedPackage
from stage.environment.profile import Profile
from stage.environment.spec import EnvironmentSpec
from stage.errors import DamageError, IncompleteError, PolicyError, StageError, UsageError
from stage.sources.environment.contents import Provided, provided
from stage.sources.environment.indexes import choose_indexes
from stage.sources.environment.pip import lock_pip
from stage.sources.environment.uv import PipRequest
from tests.support.pypi import Index, sdist, serve_index, wheel

UV_IS_SET_UP = {"UV_INDEX": "https://uv.example/simple"}
"""So that nobody asks what pip is set up for; uv itself is not told of it."""
GREETER = Provided(
    name="greeter", version="1.1", conda="python-greeter", url="file:///no", metadata="site-packages/no"
)  # fmt: skip


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    with serve_index() as index:
        yield index


def asked(folder: Path, *lines: str, glibc: str = "2.28", index: Index | None = None) -> PipRequest:
    """A request for the lines of a pip section, from one index alone."""
    every = [f"--index-url {index.secret_url if index.password else index.url}", *lines] if index else lines
    listed = "".join(f"    - {line!r}\n" for line in every)
    path = folder / "environment.yml"
    path.write_text(f"channels: [c]\ndependencies:\n  - python\n  - pip:\n{listed}")
    spec = EnvironmentSpec.load(path)
    return PipRequest(
        spec=spec,
        profile=Profile(path=Path("a800.yml"), name="a800", platform="linux-64", glibc=glibc),
        own_requirements=(),
        python="3.11.7",
        provided=(),
        indexes=choose_indexes(spec.pip, UV_IS_SET_UP),
    )


def names(packages: list[LockedPackage]) -> dict[str, str]:
    return {package.name: package.version for package in packages}


def refusal(kind: type[StageError], request: PipRequest) -> str:
    with pytest.raises(kind) as refused:
        lock_pip(request)
    assert type(refused.value) is kind
    return str(refused.value)


def test_the_best_wheel_up_to_the_clusters_glibc(tmp_path: Path, index: Index) -> None:
    """2_28 rather than 2_17, and 2_34 not at all; abi3 and other machines stand back."""
    tags = ("cp311-cp311-manylinux_2_34_x86_64", "cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64",
            "cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64", "cp38-abi3-manylinux_2_28_x86_64",
            "cp311-cp311-manylinux_2_28_aarch64", "cp312-cp312-manylinux_2_28_x86_64")  # fmt: skip
    index.add(*(wheel("maths", "1.0", tag=tag) for tag in tags))
    for glibc, tag in (("2.28", tags[1]), ("2.30", tags[1]), ("2.34", tags[0]), ("2.17", tags[2])):
        (package,) = lock_pip(asked(tmp_path, "maths", glibc=glibc, index=index))
        name = f"maths-1.0-{tag}.whl"
        assert (package.file_name, package.sha256) == (name, index.sha256(name)), glibc


def test_a_later_build_of_a_wheel_goes_before_the_one_without_a_build_tag() -> None:
    """PEP 427: no tag is the lowest. What fits better still goes before, whatever its build."""
    fitting = wheels.ranks("3.11", "x86_64", "2.28")
    plain, first, second = (f"x-1.0{build}-py3-none-any.whl" for build in ("", "-1", "-2"))
    lettered, better = "x-1.0-1a-py3-none-any.whl", "x-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert wheels.best([plain, first], fitting) == first
    assert wheels.best([second, plain, first], fitting) == second
    assert wheels.best([first, lettered, plain], fitting) == lettered
    assert wheels.best([second, better], fitting) == better
    assert wheels.best(["x-1.0-cp312-cp312-win_amd64.whl", "x.whl"], fitting) is None


def test_markers_are_those_of_the_target(tmp_path: Path, index: Index) -> None:
    index.add(wheel("a", "1", requires=["b ; platform_machine == 'x86_64'", "gone ; python_version < '3.11'"]))
    index.add(wheel("b", "1"))
    lines = ("a", "no-such ; sys_platform == 'win32'", "nor-this ; platform_machine == 'arm64'")
    assert names(lock_pip(asked(tmp_path, *lines, index=index))) == {"a": "1", "b": "1"}


def test_what_conda_provides_is_not_installed_twice(tmp_path: Path, index: Index) -> None:
    """Not even where the index has a newer one; and what it needs is conda's business."""
    index.add(wheel("app", "1", requires=["greeter>=1"]), wheel("greeter", "9", requires=["nowhere"]))
    request = replace(asked(tmp_path, "app", index=index), provided=(GREETER,))
    assert names(lock_pip(request)) == {"app": "1"}


def test_a_wheel_that_wants_another_version_than_condas(tmp_path: Path, index: Index) -> None:
    index.add(wheel("app", "1", requires=["greeter>=2"]), wheel("greeter", "9"))
    words = refusal(UsageError, replace(asked(tmp_path, "app", index=index), provided=(GREETER,)))
    assert "greeter 1.1 (`python-greeter`) comes from conda" in words and "`app` (" in words
    assert "environment.yml:6)" in words


def test_another_version_than_condas_is_not_called_missing(tmp_path: Path, index: Index) -> None:
    """The index has the very version that is asked for: conda is what is in the way."""
    index.add(wheel("greeter", "9"))
    words = refusal(UsageError, replace(asked(tmp_path, "greeter==9", index=index), provided=(GREETER,)))
    assert "environment.yml:6: `greeter==9` cannot be had: conda already gives greeter 1.1 (in its `python-g" in words
    in_spec = replace(GREETER, conda="python")
    words = refusal(UsageError, replace(asked(tmp_path, "greeter==9", index=index), provided=(in_spec,)))
    assert "conda already gives greeter 1.1 (line 3)" in words and "Drop one" in words and "newest" not in words


def test_a_build_of_pytorchs_own_index_names_the_line_that_is_lacking(tmp_path: Path, index: Index) -> None:
    index.add(wheel("torch", "2.6.0"))
    words = refusal(UsageError, asked(tmp_path, "torch==2.6.0+cu118", index=index))
    assert "environment.yml:6: there is no `torch==2.6.0+cu118`" in words
    assert "`--extra-index-url https://download.pytorch.org/whl/cu118`" in words


def test_an_extra_of_what_conda_provides_brings_its_packages(tmp_path: Path, index: Index) -> None:
    """conda knows no extras: `fsspec[http]` with conda's fsspec needs aiohttp all the same."""
    metadata = "Metadata-Version: 2.1\nName: Fsspec\nVersion: 2026.1\nProvides-Extra: http\n"
    metadata += "Requires-Dist: aiohttp ; extra == 'http'\nRequires-Dist: not-needed\n"
    package = Package(
        name="fsspec-core", version="2026.1", python=True, depends=("python",),
        payload={"site-packages/fsspec-2026.1.dist-info/METADATA": File(metadata.encode())},
    )  # fmt: skip
    path = write_package(tmp_path / "channel", package)
    locked = LockedPackage(
        name="fsspec-core", version="2026.1", manager="conda", platform="linux-64", url=path.as_uri(), sha256="a" * 64,
        dependencies={"python": ""},
    )  # fmt: skip
    in_conda = provided([locked], {})
    assert [(d.name, d.version, d.conda) for d in in_conda] == [("fsspec", "2026.1", "fsspec-core")]
    index.add(wheel("app", "1", requires=["fsspec[http]"]), wheel("aiohttp", "3"))
    request = replace(asked(tmp_path, "app", index=index), provided=tuple(in_conda))
    assert names(lock_pip(request)) == {"aiohttp": "3", "app": "1"}


def test_no_wheel_and_no_permission_to_build_one(tmp_path: Path, index: Index) -> None:
    index.add(sdist("pure", "1.0"))
    words = refusal(PolicyError, asked(tmp_path, "pure", index=index))
    assert "environment.yml:6: `pure` has no wheel" in words and "`--no-binary pure`" in words
    (package,) = lock_pip(asked(tmp_path, "pure", "--no-binary pure", index=index))
    assert package.is_sdist and package.sha256 == index.sha256("pure-1.0.tar.gz")


def test_deepspeed_needs_no_permission(tmp_path: Path, index: Index) -> None:
    index.add(sdist("deepspeed", "0.19.8", requires=["psutil"]), wheel("psutil", "7"))
    found = {p.name: p.is_sdist for p in lock_pip(asked(tmp_path, "deepspeed", index=index))}
    assert found == {"deepspeed": True, "psutil": False}


def test_wheels_above_the_clusters_glibc_name_the_version_that_fits(tmp_path: Path, index: Index) -> None:
    index.add(*(wheel("maths", v, tag=f"cp311-cp311-manylinux_2_{minor}_x86_64")
                for v, minor in (("1.0", 17), ("2.0", 28), ("3.0", 28))))  # fmt: skip
    assert names(lock_pip(asked(tmp_path, "maths", glibc="2.17", index=index))) == {"maths": "1.0"}
    words = refusal(UsageError, asked(tmp_path, "maths>=2", glibc="2.17", index=index))
    assert "environment.yml:6: no wheel of `maths` fits" in words and "glibc 2.17" in words and "maths==1.0" in words


def test_what_was_locked_stays_and_what_may_move_moves(tmp_path: Path, index: Index) -> None:
    index.add(*(wheel(name, version) for name in "ab" for version in ("1.0", "2.0")))
    request = asked(tmp_path, "a", "b", index=index)
    assert names(lock_pip(request)) == {"a": "2.0", "b": "2.0"}
    assert names(lock_pip(replace(request, kept={"a": "1.0", "b": "1.0"}))) == {"a": "1.0", "b": "1.0"}
    assert names(lock_pip(replace(request, kept={"a": "1.0"}))) == {"a": "1.0", "b": "2.0"}
    stricter = asked(tmp_path, "a>=2", "b", index=index)
    assert names(lock_pip(replace(stricter, kept={"a": "1.0", "b": "1.0"}))) == {"a": "2.0", "b": "1.0"}


def test_a_password_is_used_and_never_kept(tmp_path: Path, index: Index) -> None:
    index.password = "member:s3cret"
    index.add(wheel("mine", "1.0"))
    request = asked(tmp_path, "mine", index=index)
    (package,) = lock_pip(request)
    assert package.url == f"http://127.0.0.1:{index.port}/files/mine-1.0-py3-none-any.whl"
    assert "s3cret" not in repr(request)
    for line in ("mine==9", "absent"):
        assert "s3cret" not in refusal(UsageError, asked(tmp_path, line, index=index))
    assert "for want of the right password" in refusal(UsageError, asked(tmp_path, f"--index-url {index.url}", "mine"))


def test_an_index_that_does_not_answer_can_be_tried_again(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    words = refusal(IncompleteError, asked(tmp_path, "--index-url http://u:s3cret@127.0.0.1:1/simple", "a"))
    assert "cannot be reached" in words and "s3cret" not in words


def test_the_files_own_index_goes_before_the_one_uv_is_set_up_with(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:1/simple")
    index.add(wheel("a", "1.0"))
    assert names(lock_pip(asked(tmp_path, "a", index=index))) == {"a": "1.0"}
    assert "cannot be reached" in refusal(IncompleteError, asked(tmp_path, "a"))


def test_digests_in_the_spec_hold(tmp_path: Path, index: Index) -> None:
    name, data = wheel("a", "1.0")
    index.add((name, data))
    line = f"a==1.0 --hash=sha256:{index.sha256(name)}"
    assert names(lock_pip(asked(tmp_path, line, index=index))) == {"a": "1.0"}
    words = refusal(DamageError, asked(tmp_path, f"a==1.0 --hash=sha256:{'0' * 64}", index=index))
    assert "environment.yml:6" in words and index.sha256(name) in words


def test_a_wheel_by_its_address(tmp_path: Path, index: Index) -> None:
    name, new = "a-1.0-py3-none-any.whl", "b-1.0-cp311-cp311-manylinux_2_34_x86_64.whl"
    index.add(wheel("a", "1.0"), wheel("b", "1.0", tag="cp311-cp311-manylinux_2_34_x86_64"))
    files = f"http://127.0.0.1:{index.port}/files"
    (package,) = lock_pip(asked(tmp_path, f"a @ {files}/{name}", index=index))
    assert (package.version, package.url, package.sha256) == ("1.0", f"{files}/{name}", index.sha256(name))
    words = refusal(UsageError, asked(tmp_path, f"b @ {files}/{new}", index=index))
    assert "environment.yml:6" in words and "glibc 2.34" in words


def test_a_folder_of_wheels_beside_the_spec(tmp_path: Path, index: Index) -> None:
    (tmp_path / "wheels").mkdir()
    name, data = wheel("mine", "1.0")
    (tmp_path / "wheels" / name).write_bytes(data)
    (package,) = lock_pip(asked(tmp_path, "--no-index", "--find-links ./wheels", "mine==1.0"))
    assert package.url == (tmp_path / "wheels" / name).as_uri()


def test_a_conflict_says_who_wants_what(tmp_path: Path, index: Index) -> None:
    index.add(wheel("old", "4.40", requires=["hub<1"]), wheel("hub", "0.9"), wheel("hub", "2.4"))
    request = replace(asked(tmp_path, "old", index=index), own_requirements=("hub>=2.4",))
    words = refusal(UsageError, request)
    assert "hub<1" in words and "airlift itself, which is in every environment, needs hub>=2.4" in words
    assert "`old` (" in words and "hint" not in words and "cause:" not in words


def test_what_airlift_requires_is_not_called_yours(tmp_path: Path, index: Index) -> None:
    index.add(wheel("hub", "0.9"), wheel("hub", "2.4"))
    request = replace(asked(tmp_path, "hub==0.9", index=index), own_requirements=("Hub<3,>=2.4",))
    words = refusal(UsageError, request)
    assert "you require hub==0.9 and airlift requires hub>=2.4,<3" in words
    assert "airlift itself, which is in every environment, needs Hub<3,>=2.4" in words


def test_a_name_or_a_version_that_is_nowhere_is_told_at_its_line(tmp_path: Path, index: Index) -> None:
    index.add(wheel("numbers", "1.0"), wheel("numbers", "2.0", tag="cp311-cp311-manylinux_2_34_x86_64"))
    words = refusal(UsageError, asked(tmp_path, "numbers", "nubmers", index=index))
    assert "environment.yml:7: no index has a package `nubmers`" in words and "spelling" in words
    words = refusal(UsageError, asked(tmp_path, "numbers==99", index=index))
    assert "environment.yml:6: there is no `numbers==99`" in words and "numbers==1.0" in words


def test_for_torch_the_build_that_the_driver_runs_is_named(tmp_path: Path, index: Index) -> None:
    """Not the newest that has a fitting wheel: on an old driver that one is refused next."""
    index.add(*(wheel("torch", v, tag=f"cp311-cp311-manylinux_2_{minor}_x86_64")
                for v, minor in (("2.6.0", 17), ("2.8.0", 28))))  # fmt: skip
    request = asked(tmp_path, "torch==2.8.0", glibc="2.17", index=index)
    old = replace(request.profile, cuda="11.8", compute_capability="7.0")
    words = refusal(UsageError, replace(request, profile=old))
    assert "environment.yml:6: no wheel of `torch` fits" in words and "torch 2.6.0+cu118" in words
    assert "torch==2.6.0;" not in words


def test_pips_settings_are_those_of_this_laptop(tmp_path: Path) -> None:
    """A mirror is used, its password kept out of what is told; folders of this machine are left out, and said."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://me:s3cret@mirror.example/simple\nextra-index-url = file:///opt/x\n"
        "  https://two.example/simple\n"
    )
    settings = {"HOME": "/nonexistent", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    chosen = choose_indexes(asked(tmp_path, "a").spec.pip, settings)
    assert chosen.lines == (
        "--index-url https://me:s3cret@mirror.example/simple",
        "--extra-index-url https://two.example/simple",
    )
    assert chosen.origin and "s3cret" not in chosen.origin + repr(chosen) and "file:///opt/x" in chosen.origin
    spoken = choose_indexes(asked(tmp_path, "--index-url https://own.example/simple", "a").spec.pip, settings)
    assert spoken.lines[0] == "--index-url https://own.example/simple"
    uv = choose_indexes(asked(tmp_path, "a").spec.pip, {**settings, **UV_IS_SET_UP})
    assert uv.lines == () and uv.origin and "UV_INDEX" in uv.origin
