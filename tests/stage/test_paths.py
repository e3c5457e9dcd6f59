"""Each allowed path means one file everywhere, in the bundle, on one line of a manifest."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stage.bundle.bundle import manifest_text, parse_manifest
from stage.errors import PolicyError, as_shown
from stage.files import sha256_of_bytes
from stage.paths import (
    check_collisions,
    check_path,
    collisions,
    folded,
    problem_with_asset_name,
    problem_with_path,
)

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
        (f"{'é' * 127}xy", "255"),
        ("/".join(["x" * 200] * 6), "1024"),
        ("/".join([*["x" * 200] * 5, "x" * 20]), "1024"),
        ("model.safetensors.partial", ".partial"),
    ],
)
def test_a_path_that_may_not_travel_is_refused_in_words(path: str, said: str) -> None:
    with pytest.raises(PolicyError, match="may not be in a bundle") as refusal:
        check_path(path)
    assert said in refusal.value.message
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
        "é" * 127 + "x",
        "/".join([*["x" * 200] * 5, "x" * 19]),
    ],
)
def test_ordinary_and_merely_odd_paths_travel(path: str) -> None:
    check_path(path)


def test_a_collision_names_both_and_counts_the_rest() -> None:
    with pytest.raises(
        PolicyError,
        match=r"`Model\.bin` and `model\.bin` would be the same file .*1 more such pair",
    ):
        check_collisions(["a/x", "Model.bin", "model.bin", "A/y"])


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
        ("\u212b", "normal form C"),
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


@given(st.lists(plain_paths, max_size=6))
@example(["a/b", "A"])
@example(["A", "a/b"])
@example(["a/x", "A/y"])
@example(["a", "a"])
def test_collisions_are_what_a_folding_disk_could_not_hold(many: list[str]) -> None:
    assert bool(collisions(many)) == clash_on_a_folding_disk(many)
