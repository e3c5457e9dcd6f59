"""`environment.yml`: accepted entries, refused ones with the fix, and changes that stale a lock."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stage.environment.solve.conda import lock_conda
from stage.environment.solve.indexes import Indexes, address_to_ask
from stage.environment.solve.uv import uv_platform
from stage.environment.spec.conda_lock import Package
from stage.environment.spec.environment_yml import EnvironmentSpec, content_hash
from stage.environment.spec.profile import Profile
from stage.environment.spec.urls import expand, without_secrets
from stage.errors import PolicyError, StageError, UsageError
from stage.progress import Reporter
from tests.remedies.obeyed import in_it, obeys

A800 = Profile(path=Path("a800.yml"), name="a800", platform="linux-64", glibc="2.28")


def load(folder: Path, text: str, **variables: str) -> EnvironmentSpec:
    path = folder / "environment.yml"
    path.write_text(text)
    return EnvironmentSpec.load(path, variables)


def with_pip(folder: Path, *lines: str, **variables: str) -> EnvironmentSpec:
    listed = "".join(f"    - {line!r}\n" for line in lines)
    return load(
        folder, f"channels: [c]\ndependencies:\n  - python\n  - pip:\n{listed}", **variables
    )


def test_both_halves_with_the_line_of_each(tmp_path: Path) -> None:
    text = """\
name: train
channels: [conda-forge, nodefaults, "https://mirror.example/${TOKEN}/own"]
dependencies:
  - python=3.11
  - conda-forge::openmpi >=4,<5
  - cudatoolkit[version='>=12']
  - pip:
    - Torch>=2 ; sys_platform == 'linux'   # a comment
    - --extra-index-url https://two.example/simple
"""
    spec = load(tmp_path, text, TOKEN="tk")
    assert spec.channels == ("conda-forge", "https://mirror.example/tk/own")
    assert [(d.name, d.place.rpartition(":")[2]) for d in spec.conda] == [
        ("python", "4"), ("openmpi", "5"), ("cudatoolkit", "6"),
    ]  # fmt: skip
    (torch,) = spec.pip.requirements
    assert (torch.name, torch.text) == ("torch", 'Torch>=2; sys_platform == "linux"')
    assert torch.place.endswith("environment.yml:8")
    assert spec.pip.extra_index_urls == ["https://two.example/simple"]
    assert spec.lock_path == tmp_path / "conda-lock.yml"


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = """\
nam: train
channels: [conda-forge]
channels: [bioconda]
dependencies:
  - "=3.11"
  - {a: b}
  - pip:
    - -e .
    - torch
    - "torch >=>1"
"""
    with pytest.raises(StageError) as caught:
        load(tmp_path, text)
    said = str(caught.value)
    assert "environment.yml: 6 mistakes:" in said, said
    assert [f"environment.yml:{line}: " in said for line in range(1, 11)] == [
        True, False, True, False, True, True, False, True, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("-e .", PolicyError, "`.` cannot be locked: an editable install"),
        (
            "-e git+https://me:s3cret@g.example/x#egg=x",
            PolicyError,
            "`git+https://g.example/x` cannot be locked",
        ),
        ("./mine", PolicyError, "pip wheel --no-deps ./mine -w wheels"),
        ("/home/me/mine.whl", PolicyError, "--find-links FOLDER"),
        (
            "mine @ file:///home/me/mine",
            PolicyError,
            "a local path means nothing on another machine",
        ),
        ("git+https://g.example/x", PolicyError, "a repository is no package"),
        ("x @ git+ssh://git@g.example/x", PolicyError, "a repository is no package"),
        ("https://me:s3cret@g.example/x.whl", UsageError, "Write NAME @ URL"),
        ("torch=2.5", UsageError, "pip wants two: torch==2.5"),
        ("airlift==2026.11", UsageError, "always included. The index has another program"),
        ("airlift_hpc>=0.2", UsageError, "airlift is always included"),
        ("--no-binary :all:", PolicyError, "would have every package built from source"),
        ("--no-such-option", UsageError, "`--no-such-option` has no effect"),
        ("torch==2 --config-settings a=b", UsageError, "`--config-settings` has no effect"),
        ("torch==2 --hash=md5:abc", UsageError, "is not a sha256"),
        ("--index-url", UsageError, "one option per line"),
        ("--index-url https://a.example b", UsageError, "one option per line"),
        ("-r no-such.txt", UsageError, "no-such.txt cannot be read"),
        ("--index-url https://${NO_SUCH}@a.example", UsageError, "the variable NO_SUCH is not set"),
    ],
)
def test_what_cannot_be_locked_is_refused_with_its_line_and_the_fix(
    tmp_path: Path, line: str, kind: type[StageError], words: str
) -> None:
    with pytest.raises(kind) as refused:
        with_pip(tmp_path, "numpy", line)
    said = str(refused.value)
    assert (
        "environment.yml:6: " in said
        and words in said
        and refused.value.remedy
        and "s3cret" not in said
    )


PIP = "stage/environment/spec/pip_section.py"


@obeys(PIP, "Known are -r, -c, --index-url,", "Name those that have no wheel: --no-binary NAME")
@obeys(
    PIP, "Make a wheel of it: pip wheel", "Name the package and the folder of its wheel: `--find"
)
@obeys("stage/environment/spec/urls.py", "export {}=..., then again.")
@obeys("stage/environment/spec/environment_yml.py", "For example dependencies: [python=3.11, pip,")
@obeys("stage/environment/solve/conda.py", "For example channels: [conda-forge]")
def test_lines_are_written_as_their_remedies_say(tmp_path: Path) -> None:
    def remedy(line: str) -> str:
        with pytest.raises(StageError) as refused:
            with_pip(tmp_path, "numpy", line)
        return refused.value.remedy

    known = remedy("--no-such-option x")
    values = {"-r": "r.txt", "-c": "r.txt", "--no-index": "", "--pre": "", "--no-binary": ""}
    (tmp_path / "r.txt").write_text("torch>=2\n")
    options = re.findall(r"--?[a-z][a-z-]*(?: NAME)?", known)
    assert len(options) == 9
    for option in options:
        value = values.get(option.removesuffix(" NAME"), "https://a.example")
        with_pip(tmp_path, f"{option} {value}".strip())
    binary = in_it(remedy("--no-binary :all:"), "--no-binary NAME")
    assert with_pip(tmp_path, binary.replace("NAME", "ftfy")).pip.sdists[-1] == "ftfy"

    assert "pip wheel --no-deps ./mine -w wheels" in remedy("./mine")
    for told in (remedy("./mine"), remedy("/home/me/mine.whl")):
        links = in_it(told, "--find-links (?:./wheels|FOLDER)").replace("FOLDER", "./wheels")
        line = in_it(told, "NAME==VERSION").replace("NAME", "mine").replace("VERSION", "1")
        spec = with_pip(tmp_path, links, line)
        assert spec.pip.find_links == [str(tmp_path / "wheels")]

    index = "--index-url https://${NO_SUCH}@a.example"
    name = in_it(remedy(index), r"(?<=export )\w+")
    assert with_pip(tmp_path, index, **{name: "t"}).pip.index_url == "https://t@a.example"
    with pytest.raises(UsageError) as refused:
        load(tmp_path, "channels: [c]")
    example = in_it(refused.value.remedy, r"dependencies: \[.*\]")
    spec = load(tmp_path, f"channels: [c]\n{example}")
    assert [one.name for one in (*spec.conda, *spec.pip.requirements)] == ["python", "pip", "torch"]
    with pytest.raises(UsageError, match="no channels") as refused:
        lock_conda(load(tmp_path, example), A800, (None, ""), (), Reporter(quiet=True))
    channels = in_it(refused.value.remedy, r"channels: \[.*\]")
    assert load(tmp_path, f"{channels}\n{example}").channels == ("conda-forge",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("channels: {c: d}\ndependencies: [python]", "`channels` must be a list of text"),
        ("channels: [c]", "`dependencies` should be a list"),
        ("channels: [c]\ndependencies: [{python: 3.11}]", ":2: `python:` is no package"),
        ("channels: [c]\ndependencies: [3.11]", ":2: 3.11 is no package"),
        ("channels: [c]\ndependencies: ['>=3']", ":2: `>=3` is no conda package"),
        ("channels: [c]\ndependencies: [{pip: torch}]", ":2: `pip` should be a list"),
        ("channels: [c]\ndependencys: [python]", "Did you mean `dependencies`?"),
    ],
)
def test_a_file_that_is_no_environment(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(tmp_path, text)
    assert words in str(refused.value)


def test_requirements_files_are_followed_and_their_lines_told(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text(
        "# what we train with\ntorch==2.9.0 \\\n    --hash=sha256:"
        + "a" * 64
        + "\n-r b.txt\n-c limits.txt\n"
    )
    (tmp_path / "more" / "b.txt").write_text("einops\n./local\n")
    (tmp_path / "more" / "limits.txt").write_text("numpy<3\n")
    with pytest.raises(PolicyError, match=r"b\.txt:2: `\./local`"):
        with_pip(tmp_path, "-r more/a.txt")
    (tmp_path / "more" / "b.txt").write_text("einops\n-f wheels\n")
    pip = with_pip(tmp_path, "-r more/a.txt").pip
    assert [(r.name, r.sha256) for r in pip.requirements] == [
        ("torch", ("a" * 64,)),
        ("einops", ()),
    ]
    assert pip.requirements[0].place.endswith("a.txt:2")
    assert [r.text for r in pip.constraints] == ["numpy<3"]
    assert pip.find_links == [str(tmp_path / "more" / "wheels")]
    (tmp_path / "more" / "b.txt").write_text("-r a.txt\n")
    with pytest.raises(UsageError, match=r"b\.txt:1: .* names itself again"):
        with_pip(tmp_path, "-r more/a.txt")


def test_secrets_are_neither_shown_nor_kept(tmp_path: Path) -> None:
    spec = with_pip(
        tmp_path, "--index-url https://me:${WORD}@a.example/simple", "numpy", WORD="s3cret"
    )
    assert spec.pip.index_url == "https://me:s3cret@a.example/simple"
    assert "s3cret" not in repr(spec) and "s3cret" not in str(spec.pip.as_document(tmp_path))
    assert (
        without_secrets("https://h.example:8/t/tk-1/chan/x.conda")
        == "https://h.example:8/chan/x.conda"
    )
    assert (
        without_secrets("conda-forge") == "conda-forge"
        and without_secrets("file:///t/a/b") == "file:///t/a/b"
    )
    assert expand("${A}-$B", {"A": "1", "B": "2"}, "here") == "1-$B"


def test_a_password_is_put_back_for_its_own_server_alone(tmp_path: Path) -> None:
    spec = load(tmp_path, 'channels: ["https://h.example/t/tk/own"]\ndependencies: [python]\n')
    indexes = Indexes(("--index-url https://me:pw@a.example/simple",))
    assert address_to_ask("https://h.example/own/noarch/x.conda", spec, indexes).startswith(
        "https://h.example/t/tk/own/"
    )
    assert (
        address_to_ask("https://a.example/f/x.whl", spec, indexes)
        == "https://me:pw@a.example/f/x.whl"
    )
    for other in (
        "http://a.example/f/x.whl",
        "https://a.example:444/x.whl",
        "https://files.example/x.whl",
    ):
        assert address_to_ask(other, spec, indexes) == other


def test_a_lock_is_stale_when_what_it_depends_on_changes_and_only_then(tmp_path: Path) -> None:
    def digest(
        *lines: str, profile: Profile = A800, own: tuple[str, ...] = ("click",), **variables: str
    ) -> str:
        return content_hash(with_pip(tmp_path, *lines, **variables), profile, own)

    torch = digest("torch")
    same = [
        digest("torch   # newest"),
        digest(
            "torch",
            profile=Profile(
                path=Path("b.yml"), name="b", platform="linux-64", glibc="2.28", gpu="X"
            ),
        ),
    ]
    with_password = [
        digest("torch", "--index-url https://u:${W}@a.example/s", W=word) for word in ("one", "two")
    ]
    assert same == [torch, torch] and with_password[0] == with_password[1]
    others = [
        digest("torch>2"),
        digest("torch", "einops"),
        digest("torch", "--pre"),
        digest("torch", "--no-binary einops"),
        digest("torch", "--find-links ./wheels"),
        digest("torch", own=("click", "tqdm")),
        digest(
            "torch",
            profile=Profile(path=Path("a800.yml"), name="a800", platform="linux-64", glibc="2.17"),
        ),
        with_password[0],
    ]
    assert len({torch, *others}) == len(others) + 1


def test_a_glibc_that_uv_does_not_know_is_rounded_down() -> None:
    assert [uv_platform("x86_64", g) for g in ("2.17", "2.27", "2.28", "2.30", "2.34", "2.99")] == [
        f"x86_64-manylinux_2_{minor}" for minor in (17, 17, 28, 28, 34, 40)
    ]
    with pytest.raises(UsageError, match=r"older than 2\.17"):
        uv_platform("x86_64", "2.12")


def test_an_sdist_is_known_by_its_name() -> None:
    def package(url: str, manager: str = "pip") -> Package:
        return Package(
            name="a", version="1", manager=manager, platform="linux-64", url=url, sha256="a" * 64
        )

    assert package("https://a.example/a-1.tar.gz").is_sdist
    assert not package("https://a.example/a-1-py3-none-any.whl#sha256=1").is_sdist
    assert not package("https://a.example/noarch/a-1-0.tar.bz2", "conda").is_sdist
