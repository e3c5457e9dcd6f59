"""The pip half of a lock: real uv against a small index on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.lib.conda.channel import File, Package, write_package
from stage.environment.check.check import best_wheel, tag_ranks
from stage.environment.solve.conda import Provided, provided_by_conda
from stage.environment.solve.lock import lock_pip
from stage.environment.solve.uv import PipRequest, choose_indexes, missing_torch_index
from stage.environment.spec.conda_lock import Package as Locked
from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.environment.spec.profile import Profile
from stage.errors import DamageError, IncompleteError, PolicyError, StageError, UsageError
from tests.support.environment.pypi import Index, dynamic_sdist, sdist, serve_index, wheel

UV_IS_SET_UP = {"UV_INDEX": "https://uv.example/simple"}
"""So that nobody asks what pip is set up for; uv itself is not told of it."""
GREETER = Provided(
    name="greeter", version="1.1", conda="python-greeter", url="file:///no",
    metadata="site-packages/no"
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
    every = (
        [f"--index-url {index.secret_url if index.password else index.url}", *lines]
        if index
        else lines
    )
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


def names(packages: list[Locked]) -> dict[str, str]:
    return {package.name: package.version for package in packages}


def refusal(kind: type[StageError], request: PipRequest) -> str:
    with pytest.raises(kind) as refused:
        lock_pip(request)
    assert type(refused.value) is kind
    return str(refused.value)


def test_the_best_wheel_up_to_the_clusters_glibc(tmp_path: Path, index: Index) -> None:
    """2_28 rather than 2_17, and 2_34 not at all; abi3 and other machines stand back."""
    tags = ("cp311-cp311-manylinux_2_34_x86_64",
            "cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64",
            "cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64",
            "cp38-abi3-manylinux_2_28_x86_64",
            "cp311-cp311-manylinux_2_28_aarch64", "cp312-cp312-manylinux_2_28_x86_64")  # fmt: skip
    index.add(*(wheel("maths", "1.0", tag=tag) for tag in tags))
    for glibc, tag in (("2.28", tags[1]), ("2.30", tags[1]), ("2.34", tags[0]), ("2.17", tags[2])):
        (package,) = lock_pip(asked(tmp_path, "maths", glibc=glibc, index=index))
        name = f"maths-1.0-{tag}.whl"
        assert (package.file_name, package.sha256) == (name, index.sha256(name)), glibc


def test_what_conda_provides_is_not_installed_twice(tmp_path: Path, index: Index) -> None:
    """Not even where the index has a newer one; and what it needs is conda's business."""
    index.add(
        wheel("app", "1", requires=["greeter>=1"]), wheel("greeter", "9", requires=["nowhere"])
    )
    request = replace(asked(tmp_path, "app", index=index), provided=(GREETER,))
    assert names(lock_pip(request)) == {"app": "1"}


def test_an_extra_of_what_conda_provides_brings_its_packages(tmp_path: Path, index: Index) -> None:
    """conda knows no extras: `fsspec[http]` with conda's fsspec needs aiohttp all the same."""
    metadata = "Metadata-Version: 2.1\nName: Fsspec\nVersion: 2026.1\nProvides-Extra: http\n"
    metadata += "Requires-Dist: aiohttp ; extra == 'http'\nRequires-Dist: not-needed\n"
    package = Package(
        name="fsspec-core", version="2026.1", python=True, depends=("python",),
        payload={"site-packages/fsspec-2026.1.dist-info/METADATA": File(metadata.encode())},
    )  # fmt: skip
    path = write_package(tmp_path / "channel", package)
    locked = Locked(
        name="fsspec-core", version="2026.1", manager="conda", platform="linux-64",
        url=path.as_uri(), sha256="a" * 64,
        dependencies={"python": ""},
    )  # fmt: skip
    in_conda = provided_by_conda([locked], {})
    assert [(d.name, d.version, d.conda) for d in in_conda] == [("fsspec", "2026.1", "fsspec-core")]
    index.add(wheel("app", "1", requires=["fsspec[http]"]), wheel("aiohttp", "3"))
    request = replace(asked(tmp_path, "app", index=index), provided=tuple(in_conda))
    assert names(lock_pip(request)) == {"aiohttp": "3", "app": "1"}


TWO_NUMBERS = [
    wheel("numbers", "1.0"),
    wheel("numbers", "2.0", tag="cp311-cp311-manylinux_2_34_x86_64"),
]
# transformer-engine: without a wheel for `[pytorch]`, only an empty 0.0.0 fits
ENGINES = [
    wheel("transformer-engine", "0.0.0"),
    sdist("transformer-engine-torch", "2.20.2"),
    wheel(
        "transformer-engine",
        "2.20.2",
        requires=["transformer-engine-torch==2.20.2 ; extra == 'pytorch'"],
        extras=["pytorch"],
    ),
]
REFUSALS: dict[str, tuple[list[tuple[str, bytes]], list[str], type[StageError], tuple[str, ...]]]
REFUSALS = {
    # the index, the pip section, and what is said; line 6 of the file is the first after the index
    "a requirement of a package against conda's version": (
        [wheel("app", "1", requires=["greeter>=2"]), wheel("greeter", "9")],
        ["app"],
        UsageError,
        ("greeter 1.1 (`python-greeter`) comes from conda", "`app` (", "environment.yml:6)",
         "greeter>=2"),
    ),
    "a version that the index has and conda has not": (
        [wheel("greeter", "9")],
        ["greeter==9"],
        UsageError,
        ("greeter 1.1 (`python-greeter`) comes from conda", "drop one of: `greeter==9` (",
         "environment.yml:6)"),
    ),
    "a build of PyTorch's own index": (
        [wheel("torch", "2.6.0")],
        ["torch==2.6.0+cu118"],
        UsageError,
        ("environment.yml:6: `torch==2.6.0+cu118`: only PyTorch's own index has such builds",
         "`--extra-index-url https://download.pytorch.org/whl/cu118`"),
    ),
    "a source that cannot say what it needs": (
        [dynamic_sdist("kernels", "1.0", fails="no nvcc here")],
        ["kernels"],
        UsageError,
        ("environment.yml:6: `kernels` is published as source only", "no nvcc here",
         "its conda package"),
    ),
    "an extra that the version that fits has not": (
        ENGINES,
        ["transformer-engine[pytorch]"],
        UsageError,
        ("environment.yml:6: `transformer-engine[pytorch]`: transformer-engine 0.0.0 has no extra "
         "`pytorch`", "ask for a version that has it", "`transformer-engine-torch`"),
    ),
    "an extra that has to be compiled": (
        ENGINES,
        ["transformer-engine[pytorch]==2.20.2"],
        PolicyError,
        ("`transformer-engine-torch` has no wheel",),
    ),
    "a name that is nowhere": (
        TWO_NUMBERS,
        ["numbers", "nubmers"],
        UsageError,
        ("nubmers was not found", "environment.yml:7)"),
    ),
    "a version that is nowhere": (
        TWO_NUMBERS,
        ["numbers==99"],
        UsageError,
        ("there is no version of numbers==99", "environment.yml:6)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_had_is_refused_with_its_line_and_the_way_out(
    tmp_path: Path, index: Index, name: str
) -> None:
    files, lines, kind, words = REFUSALS[name]
    index.add(*files)
    request = replace(asked(tmp_path, *lines, index=index), provided=(GREETER,))
    said = refusal(kind, request)
    assert [part for part in words if part not in said] == [], said


def test_a_source_whose_metadata_has_to_be_made_is_asked_without_a_network(
    tmp_path: Path, index: Index
) -> None:
    """As fire 0.4.0: its setup.py says what it needs."""
    index.add(
        dynamic_sdist("fire", "0.4.0", requires=["termcolor"]),
        wheel("termcolor", "3"),
        wheel("fire", "0.7.1"),
    )
    found = {
        p.name: (p.version, p.is_sdist)
        for p in lock_pip(asked(tmp_path, "fire==0.4.0", index=index))
    }
    assert found == {"fire": ("0.4.0", True), "termcolor": ("3", False)}


def test_an_old_wheel_is_not_taken_for_a_newer_source(tmp_path: Path, index: Index) -> None:
    """uv, with wheels only, goes back by five versions, or because of a source that one needs."""
    index.add(wheel("lib", "0.3"), sdist("lib", "0.19"), wheel("app", "0.2"), sdist("words", "1"))
    index.add(wheel("app", "0.4", requires=["words"]))
    found = {
        p.name: (p.version, p.is_sdist)
        for p in lock_pip(asked(tmp_path, "lib", "app", index=index))
    }
    assert found == {"lib": ("0.19", True), "app": ("0.4", False), "words": ("1", True)}
    held = replace(asked(tmp_path, "lib", index=index), kept={"lib": "0.3"})
    assert names(lock_pip(held)) == {"lib": "0.3"}, "an earlier lock is kept"
    assert names(lock_pip(asked(tmp_path, "lib<0.10", index=index))) == {"lib": "0.3"}


def test_wheels_for_older_systems_stay_before_newer_sources(tmp_path: Path, index: Index) -> None:
    """pyarrow on CentOS 7: a source is published too, but it is compiled."""
    index.add(
        wheel("arrow", "17.0", tag="cp311-cp311-manylinux_2_17_x86_64"), sdist("arrow", "25.0")
    )
    index.add(wheel("arrow", "25.0", tag="cp311-cp311-manylinux_2_28_x86_64"))
    (package,) = lock_pip(asked(tmp_path, "arrow", glibc="2.17", index=index))
    assert (package.version, package.is_sdist) == ("17.0", False)
    words = refusal(UsageError, asked(tmp_path, "arrow==25.0", glibc="2.17", index=index))
    assert "arrow==17.0" in words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flash-attn", "flash_attn-VERSION+cu12torch2.8cxx11abi...-cp311-cp311-linux_x86_64.whl"),
        ("apex", "PyPI's `apex` is another project"),
        ("causal-conv1d", "https://github.com/Dao-AILab/causal-conv1d/releases"),
        ("mamba-ssm", "https://github.com/state-spaces/mamba/releases"),
        ("torch-scatter", "https://data.pyg.org/whl/torch-2.8.0+cuXXX.html"),
        ("mpi4py", "Write `mpi4py>=4`, which has wheels"),
        ("pytorch", "The package is called `torch` there"),
        ("transformer-engine-torch", "conda-forge's `transformer-engine-torch`"),
        ("sklearn", "scikit-learn"),
    ],
)
def test_what_has_to_be_compiled_comes_with_ready_advice(
    tmp_path: Path, index: Index, name: str, words: str
) -> None:
    """At once, and nothing of it is built: its sources would ask for torch and nvcc."""
    index.add(sdist(name, "2.8.3"), wheel("torch", "2.8.0"))
    said = refusal(PolicyError, asked(tmp_path, "torch==2.8.0", name, index=index))
    assert f"environment.yml:7: `{name}` has no wheel for a800" in said and words in said
    assert not [path for path in index.requests if path.endswith(".tar.gz")]


def test_a_placeholder_is_never_what_is_meant(tmp_path: Path, index: Index) -> None:
    """Asked for itself or brought by another; asked for exactly, it is taken."""
    index.add(
        wheel("dali", "0.0.1"),
        wheel("dali", "1.2", requires=["base>=2"]),
        wheel("base", "1"),
        wheel("base", "2"),
    )
    index.add(wheel("app", "1", requires=["dali"]), wheel("tiny", "0.0.1"))
    for line in ("dali", "app"):
        words = refusal(UsageError, asked(tmp_path, line, "base<2", index=index))
        assert "of `dali` only 0.0.1, a placeholder, fits" in words and "Write `dali==1.2`" in words
    lines = ("dali==0.0.1", "base<2", "tiny")
    assert names(lock_pip(asked(tmp_path, *lines, index=index))) == {
        "base": "1",
        "dali": "0.0.1",
        "tiny": "0.0.1",
    }


def test_a_password_is_used_and_never_kept(tmp_path: Path, index: Index) -> None:
    index.password = "member:s3cret"
    index.add(wheel("mine", "1.0"))
    request = asked(tmp_path, "mine", index=index)
    (package,) = lock_pip(request)
    assert package.url == f"http://127.0.0.1:{index.port}/files/mine-1.0-py3-none-any.whl"
    assert "s3cret" not in repr(request)
    for line in ("mine==9", "absent"):
        assert "s3cret" not in refusal(UsageError, asked(tmp_path, line, index=index))
    assert "mine" in refusal(UsageError, asked(tmp_path, f"--index-url {index.url}", "mine"))


def test_an_index_that_does_not_answer_can_be_tried_again(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    words = refusal(
        IncompleteError, asked(tmp_path, "--index-url http://u:s3cret@127.0.0.1:1/simple", "a")
    )
    assert "cannot be reached" in words and "s3cret" not in words


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
    assert (package.version, package.url, package.sha256) == (
        "1.0",
        f"{files}/{name}",
        index.sha256(name),
    )
    words = refusal(UsageError, asked(tmp_path, f"b @ {files}/{new}", index=index))
    assert "environment.yml:6" in words and "glibc 2.34" in words


def test_pips_settings_are_those_of_this_laptop(tmp_path: Path) -> None:
    """A mirror is used, its password never printed; ignored folders of this machine are printed."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://me:s3cret@mirror.example/simple\nextra-index-url = "
        "file:///opt/x\n  https://two.example/simple\n"
    )
    settings = {
        "HOME": "/nonexistent",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
    }
    chosen = choose_indexes(asked(tmp_path, "a").spec.pip, settings)
    assert chosen.lines == (
        "--index-url https://me:s3cret@mirror.example/simple",
        "--extra-index-url https://two.example/simple",
    )
    assert (
        chosen.origin
        and "s3cret" not in chosen.origin + repr(chosen)
        and "file:///opt/x" in chosen.origin
    )
    spoken = choose_indexes(
        asked(tmp_path, "--index-url https://own.example/simple", "a").spec.pip, settings
    )
    assert spoken.lines[0] == "--index-url https://own.example/simple"
    uv = choose_indexes(asked(tmp_path, "a").spec.pip, {**settings, **UV_IS_SET_UP})
    assert uv.lines == () and uv.origin and "UV_INDEX" in uv.origin


@pytest.mark.parametrize(
    ("builds", "best"),
    [
        (["-py3-none-any", "-1-py3-none-any"], "-1-py3-none-any"),
        (["-2-py3-none-any", "-py3-none-any", "-1-py3-none-any"], "-2-py3-none-any"),
        (["-1-py3-none-any", "-1a-py3-none-any", "-py3-none-any"], "-1a-py3-none-any"),
        (
            ["-2-py3-none-any", "-cp311-cp311-manylinux_2_28_x86_64"],
            "-cp311-cp311-manylinux_2_28_x86_64",
        ),
        (["-cp312-cp312-win_amd64", ""], None),
        (["", "-py3-none-any"], "-py3-none-any"),
    ],
)
def test_a_later_build_of_a_wheel_goes_before_the_one_without_a_build_tag(
    builds: list[str], best: str | None
) -> None:
    """PEP 427: no tag is the lowest. What fits better still goes before, whatever its build."""
    fitting = tag_ranks("3.11", "x86_64", "2.28")
    found = best_wheel([f"x-1.0{build}.whl" for build in builds], fitting)
    assert found == (best and f"x-1.0{best}.whl")


def test_an_index_of_pytorch_in_uvs_own_settings_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked(tmp_path, "torch==2.6.0+cu118")
    assert missing_torch_index(request) is not None
    monkeypatch.setenv("UV_INDEX", "ours=https://mirror.example/whl/cu118/")
    assert missing_torch_index(request) is None
