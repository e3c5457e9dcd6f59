"""Relocation changes only the placeholders and can be reverted: one digest for each prefix."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stage.environment.image.relocate import (
    NotAsMade,
    digest_of,
    find_regions,
    replace,
    restore,
    tree_lines,
)

OLD = b"/placeholder/long/enough/for/all"
prefixes = st.sampled_from([b"/a", b"/home/me/env", OLD, OLD[:-1]])
pieces = st.lists(
    st.sampled_from([OLD, b"\0", b"/a", b"/bin:", b"text", b"\n", b"/home/me/env"]), max_size=12
)


@given(pieces, prefixes)
def test_a_binary_keeps_its_length_and_every_string_its_place(
    parts: list[bytes], new: bytes
) -> None:
    content = b"".join(parts)
    regions = find_regions(content, OLD, is_binary=True)
    changed = replace(content, regions, OLD, new, is_binary=True)
    assert len(changed) == len(content)
    assert restore(changed, regions, OLD, new, is_binary=True) == content
    strings = [text.replace(OLD, new) for text in content.split(b"\0")]
    assert [text for text in changed.split(b"\0") if text] == [text for text in strings if text]


@given(pieces, prefixes, st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_a_byte_changed_after_relocation_is_never_restored_to_what_was_made(
    parts: list[bytes], new: bytes, place: int, change: int
) -> None:
    content = b"".join([OLD, *parts])
    regions = find_regions(content, OLD, is_binary=True)
    changed = bytearray(replace(content, regions, OLD, new, is_binary=True))
    changed[place % len(changed)] ^= change
    with suppress(NotAsMade):
        assert restore(bytes(changed), regions, OLD, new, is_binary=True) != content


def test_the_digest_sees_content_modes_links_and_names(tmp_path: Path) -> None:
    def digest() -> str:
        return digest_of(tree_lines(str(tmp_path), {}, OLD, OLD))

    seen = {digest()}
    file = tmp_path / "bin/tool"
    file.parent.mkdir()
    for change in (
        lambda: file.write_bytes(b"1"),
        lambda: file.write_bytes(b"2"),
        lambda: file.chmod(0o755),
        lambda: (tmp_path / "link").symlink_to("bin"),
        lambda: ((tmp_path / "link").unlink(), (tmp_path / "link").symlink_to("bin/tool")),
        lambda: file.rename(tmp_path / "bin/other"),
    ):
        change()
        assert digest() not in seen
        seen.add(digest())


def test_the_digest_sees_neither_bytecode_nor_bookkeeping_nor_umask(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_bytes(b"")
    before = tree_lines(str(tmp_path), {}, OLD, OLD)
    for path in ("__pycache__/m.cpython-310.pyc", ".airlift/env.json"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(b"x")
    (tmp_path / "m.py").chmod(0o600)
    assert tree_lines(str(tmp_path), {}, OLD, OLD) == before


@given(pieces, prefixes)
def test_text_is_relocated_and_restored(parts: list[bytes], new: bytes) -> None:
    content = b"".join(part for part in parts if part != b"\0")
    regions = find_regions(content, OLD, is_binary=False)
    changed = replace(content, regions, OLD, new, is_binary=False)
    assert changed == content.replace(OLD, new)
    assert restore(changed, regions, OLD, new, is_binary=False) == content
