"""`environment.yml`: accepted entries, refused ones with the fix, and changes that stale a lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage.environment.solve.uv import Indexes, address_to_ask, uv_platform
from stage.environment.spec.environment_yml import (
    EnvironmentSpec,
    PipRequirement,
    PipSection,
    content_hash,
)
from stage.environment.spec.profile import Profile
from stage.errors import Place, PolicyError, StageError, UsageError

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


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("-e .", PolicyError, "`.` cannot be locked: an editable install"),
        (
            "-e git+https://me:s3cret@g.example/x#egg=x",
            PolicyError,
            "`git+https://g.example/x` cannot be locked",
        ),
        ("-e git+https://g.example/x", PolicyError, "a repository is no package"),
        ("'jsonpickle',", UsageError, "Omit quotes and commas: jsonpickle"),
        ("airlift-hpc @ file:///home/me/airlift", UsageError, "Remove this line."),
        ("-e git+https://g.example/a@1#egg=airlift_hpc", UsageError, "Remove this line."),
        ("./airlift", PolicyError, "pip wheel --no-deps ./airlift -w wheels"),
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
        ("mine.whl", PolicyError, "--find-links FOLDER"),
        ("torch==2 --hash=sha256:abc", UsageError, "`--hash sha256:abc` is not a sha256"),
        (f"torch==2 --hash=md5:{'a' * 64}", UsageError, "is not a sha256"),
        ("--index-url", UsageError, "one option per line"),
        ("--index-url 'https://a.example", UsageError, "Close the quote"),
        ("-rno-such.txt", UsageError, "no-such.txt cannot be read"),
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


def test_all_mistakes_of_a_requirements_file_are_listed_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("tool==1==2\ngit+https://g.example/b.git\n-r b.txt\n-e .\n")
    (tmp_path / "b.txt").write_text("./local\n")
    with pytest.raises(StageError) as refused:
        with_pip(tmp_path, "numpy=1", "-r a.txt")
    said = str(refused.value)
    for place in ("environment.yml:5", "a.txt:1", "a.txt:2", "b.txt:1", "a.txt:4"):
        assert f"{place}: " in said


def test_the_name_of_a_wheel_is_in_its_address(tmp_path: Path) -> None:
    address = "https://h.example/whl/some_tool-1.0%2Bcu118-cp311-cp311-linux_x86_64.whl"
    pip = with_pip(tmp_path, address, f"{address} ; python_version > '3'").pip
    assert [(r.name, r.url) for r in pip.requirements] == [("some-tool", address)] * 2


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
    pip = with_pip(
        tmp_path,
        *("-r more/a.txt", "-cmore/limits.txt", "--pre", "--no-binary=A_b,c"),
        *("--index-url=https://i.example/s", "--extra-index-url https://e.example/s"),
        "--trusted-host h.example",
    ).pip
    at = f"{tmp_path}/more"
    limit = PipRequirement(text="numpy<3", name="numpy", place=Place(f"{at}/limits.txt", 1))
    assert pip == PipSection(
        requirements=[
            PipRequirement(
                text="torch==2.9.0", name="torch", place=Place(f"{at}/a.txt", 2), sha256=("a" * 64,)
            ),
            PipRequirement(text="einops", name="einops", place=Place(f"{at}/b.txt", 1)),
        ],
        constraints=[limit, limit],
        index_url="https://i.example/s",
        extra_index_urls=["https://e.example/s"],
        find_links=[f"{at}/wheels"],
        prereleases=True,
        insecure_hosts=["h.example"],
        sdists=["deepspeed", "a-b", "c"],
    )
    assert [requirement.is_pinned for requirement in pip.requirements] == [True, False]
    (tmp_path / "more" / "b.txt").write_text("-r a.txt\n")
    with pytest.raises(UsageError, match=r"b\.txt:1: .* includes itself"):
        with_pip(tmp_path, "-r more/a.txt")


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
