"""Each allowed path means one file everywhere, in the bundle, on one line of a manifest."""

from __future__ import annotations

import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stage.bundle.bundle import manifest_text, parse_manifest
from stage.digests import sha256_of_bytes
from stage.errors import PolicyError, as_shown
from stage.paths import (
    check_collisions,
    check_path,
    check_paths,
    collisions,
    folded,
    printable,
    problem_with_asset_name,
    problem_with_path,
)

# Characters that have broken tools before, and enough ordinary ones to pass.
NASTY = "/\\.%~ \t\n\r\x00\x1b\x7f\x85\u2028\u2029\u202e\ufeff\ud800éeE\u0301ßſKKıİ😀-_*?:'\"$`ab"
components = st.text(st.sampled_from(NASTY) | st.characters(), max_size=8)
paths = st.lists(components, max_size=4).map("/".join) | st.text(
    st.sampled_from(NASTY), max_size=12
)


@given(paths)
@example("../x")
@example("a/../../x")
@example("~/.ssh/authorized_keys")
def test_what_passes_lies_inside_the_root(path: str) -> None:
    if problem_with_path(path) is None:
        root = Path("/bundle")
        inside = Path(root, path)
        assert inside.as_posix() == f"/bundle/{path}"
        assert ".." not in inside.parts and inside.is_relative_to(root) and inside != root


@given(st.lists(paths, max_size=5))
def test_what_passes_survives_a_manifest_line(many: list[str]) -> None:
    digests = {
        path: sha256_of_bytes(path.encode()) for path in many if problem_with_path(path) is None
    }
    text = manifest_text(digests)
    assert parse_manifest(text) == digests
    assert len(text.decode().splitlines()) == len(digests)


@given(paths)
def test_what_passes_can_be_read_on_a_terminal(path: str) -> None:
    assert {unicodedata.category(c) for c in printable(path)}.isdisjoint({"Cc", "Cs", "Zl", "Zp"})
    printable(path).encode()
    if problem_with_path(path) is None:
        assert printable(path) == f"`{path}`" == as_shown(f"`{path}`")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("a//b", "empty component"),
        ("a/", "empty component"),
        ("./a", "`.`"),
        ("a/..", "`..`"),
        ("a\\b", "backslash"),
        ("a%0Ab", "%"),
        ("a\nb", "U+000A"),
        ("a\x7fb", "U+007F"),
        ("a\x85b", "U+0085"),
        ("a\u2028b", "U+2028"),
        ("a\udcffb", "U+DCFF"),
        (" a", "space"),
        ("a /b", "space"),
        ("a\xa0", "space"),
        ("x" * 256, "255"),
        ("é" * 128, "255"),
        ("/".join(["x" * 200] * 6), "1024"),
        ("model.safetensors.partial", ".partial"),
    ],
)
def test_a_path_that_may_not_travel_is_refused_in_words(path: str, said: str) -> None:
    with pytest.raises(PolicyError, match="may not be in a bundle") as refusal:
        check_path(path, "model bert")
    assert said in refusal.value.message and refusal.value.message.startswith("model bert: ")
    assert refusal.value.exit_code == 3 and refusal.value.remedy


@pytest.mark.parametrize(
    "path",
    [
        "config.json",
        "data/models/x/1_Pooling/config.json",
        "...",
        "a/..b",
        "~",
        "数据/文件.txt",
        "a  b",
        "x" * 255,
    ],
)
def test_ordinary_and_merely_odd_paths_travel(path: str) -> None:
    check_path(path, "x")


def test_coreutils_and_bagit_read_the_names_that_travel_as_we_do(tmp_path: Path) -> None:
    odd = [
        "a  b",
        "*a",
        "#a",
        "-a",
        "~",
        "é",
        "e\u0301x",
        "😀",
        "a'b\"c",
        "$(a)",
        "`a`",
        "a:b",
        "\u200fa",
        "x" * 255,
    ]
    names = [f"data/{name}" for name in odd]
    assert [name for name in names if problem_with_path(name)] == []
    (tmp_path / "data").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    manifest = manifest_text({name: sha256_of_bytes(name.encode()) for name in names})
    (tmp_path / "manifest-sha256.txt").write_bytes(manifest)
    (tmp_path / "bagit.txt").write_text("BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n")
    checked = subprocess.run(
        ["sha256sum", "-c", "--strict", "manifest-sha256.txt"], cwd=tmp_path, capture_output=True
    )
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count(b": OK") == len(names)
    bagged = subprocess.run(
        [sys.executable, "-m", "bagit", "--validate", tmp_path], capture_output=True, text=True
    )
    assert bagged.returncode == 0, bagged.stderr


plain_paths = st.lists(
    st.sampled_from(["a", "A", "b", "ß", "SS", "ss", "é", "e\u0301", "É", "ﬁ", "fi"]),
    min_size=1,
    max_size=3,
).map("/".join)


def clash_on_a_folding_disk(paths: list[str]) -> bool:
    """The same on a simulated disk that ignores case: write each file, and see which collide."""
    disk: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            entry = "/".join(parts[:depth])
            kind = "file" if depth == len(parts) else "folder " + entry
            known = disk.setdefault(folded(entry), kind)
            if known != kind or (kind == "file" and sum(p == path for p in paths) > 1):
                return True
            if kind == "file":
                disk[folded(entry)] = "file, written"
    return False


@given(st.lists(plain_paths, max_size=6))
@example(["a/b", "A"])
@example(["A", "a/b"])
@example(["a/x", "A/y"])
@example(["a", "a"])
def test_collisions_are_what_a_folding_disk_could_not_hold(many: list[str]) -> None:
    assert bool(collisions(many)) == clash_on_a_folding_disk(many)


@given(st.lists(plain_paths, max_size=6), st.randoms())
def test_collisions_do_not_depend_on_the_order(many: list[str], chance: object) -> None:
    shuffled = list(many)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert collisions(many) == collisions(shuffled)


@given(plain_paths, plain_paths)
def test_collisions_are_symmetric(one: str, other: str) -> None:
    assert collisions([one, other]) == collisions([other, one])
    assert not collisions([one])


def test_a_collision_names_both_and_counts_the_rest() -> None:
    with pytest.raises(
        PolicyError,
        match=r"`Model\.bin` and `model\.bin` would be the same file .*1 more such pair",
    ):
        check_collisions(["a/x", "Model.bin", "model.bin", "A/y"], "model x")


@given(st.text(max_size=12))
@example("CON")
@example("..")
@example("-rf")
@example("a/b")
def test_an_asset_name_is_a_plain_folder_name(name: str) -> None:
    if problem_with_asset_name(name) is None:
        assert problem_with_path(f"data/models/{name}/config.json") is None
        assert "/" not in name and not name.startswith(("-", "."))
        assert unicodedata.normalize("NFC", name) == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "empty"),
        ("a b", "only letters"),
        ("a/b", "`/`"),
        (".hidden", "begins"),
        ("-o", "begins"),
        ("e\u0301", "only letters"),
        ("a\x1b", "U+001B"),
        ("..", "component"),
    ],
)
def test_an_asset_name_that_cannot_be_says_why(name: str, said: str) -> None:
    assert said in (problem_with_asset_name(name) or "")


@given(st.text())
def test_what_is_shown_holds_no_escape_sequence(text: str) -> None:
    shown = as_shown(text)
    shown.encode()
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c != "\n"]
    assert shown.count("\n") == text.count("\n")


ordinary = st.lists(st.text("abAB09._-", min_size=1, max_size=6), min_size=1, max_size=3).map(
    "/".join
)


@given(st.lists(ordinary | paths, max_size=6))
def test_many_at_once_are_judged_as_one_by_one(many: list[str]) -> None:
    if any(problem_with_path(path) for path in many):
        with pytest.raises(PolicyError):
            check_paths(many, "x")
    else:
        check_paths(many, "x")


@given(st.lists(ordinary, max_size=6))
def test_collisions_of_ordinary_paths_are_those_of_any(many: list[str]) -> None:
    """A letter beyond ASCII before each path avoids the fast check for ASCII."""
    plain = [(one.strip("/"), other.strip("/")) for one, other in collisions(many)]
    assert [(f"é/{one}", f"é/{other}") for one, other in plain] == [
        (one.rstrip("/"), other) for one, other in collisions([f"é/{path}" for path in many])
    ]
