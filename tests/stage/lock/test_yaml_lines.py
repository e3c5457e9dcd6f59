"""A mistake in a YAML file is reported with file:line and the nearest key; no input is a crash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stage.errors import UsageError
from stage.lock.yaml_lines import load_yaml_with_lines, read_value


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("yaml") / "x.yaml"


def refused(file: Path, text: str | bytes) -> str:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as refusal:
        load_yaml_with_lines(file)
    assert refusal.value.exit_code == 2
    return str(refusal.value)


def test_a_space_or_colon_in_a_text_is_one(file: Path) -> None:
    file.write_text("a: 'note:\u00a0quoted'\nb: see\u00a0this\nc: |\n  key:\u00a0text\n")
    assert load_yaml_with_lines(file)[0] == {
        "a": "note:\u00a0quoted",
        "b": "see\u00a0this",
        "c": "key:\u00a0text\n",
    }


def test_every_key_and_item_knows_its_line(file: Path) -> None:
    file.write_text(
        "# a comment\na: 1\nb:\n  - x\n  - c: 2\n    d:\n      e: {f: 3,\n          g: 4}\n"
    )
    data, lines = load_yaml_with_lines(file)
    assert data == {"a": 1, "b": ["x", {"c": 2, "d": {"e": {"f": 3, "g": 4}}}]}
    where = {
        ("a",): 2,
        ("b",): 3,
        ("b", 0): 4,
        ("b", 1): 5,
        ("b", 1, "c"): 5,
        ("b", 1, "d", "e", "g"): 8,
    }
    assert {key: lines.of(*key) for key in where} == where
    assert lines.of("b", 1, "missing") == 5 and lines.of("missing") is None
    assert str(lines.place("b", 1, "d")) == f"{file}:6" and str(lines.place("missing")) == str(file)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "`a` is written twice (first on line 1)"),
        ("a:\n  b: 1\n  b: 2\n", 3, "`b` is written twice (first on line 2)"),
        ("a: [1, 2\nb: 3\n", 2, "not valid YAML"),
        ("a:\n\tb: 1\n", 2, "not valid YAML"),
        ("a: 'x\n", 2, "not valid YAML"),
        ("a: &x 1\nb: *x\n", 2, "aliases"),
        ("a: 1\n? [x]\n: 2\n", 2, "a key must be plain text"),
        ("a: 1\nb: !!python/object/apply:os.system [id]\nc: !!int x\n", 3, "`x` cannot be read"),
        ("a: !!int ''\n", 1, "cannot be read"),
        ("a: !!bool maybe\n", 1, "`maybe` cannot be read"),
        ("a: !!timestamp soon\n", 1, "`soon` cannot be read"),
        ("a: !own x\n", 1, "`x` cannot be read"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        # Lines that were copied from a web page, or typed with a Chinese keyboard.
        ("a:\n  lr:\u00a00.003\n", 2, "`lr`: U+00A0 (no-break space).\n  -> Write `lr: ` with"),
        ("a:\n  lr\uff1a0.003\n", 2, "after `lr`: U+FF1A (fullwidth colon)"),
        ("a: 1\nsteps\uff1a8\nb: 2\n", 3, "Line 2 has U+FF1A"),
        ("a\n\n  b: 1\n", 3, "Is a `:` missing at the end of line 1?"),
        ("a: b\n  c: 1\n", 2, "-> Correct that line."),
        ("a: 1\nb: @x y\n", 2, 'Put it in quotes: "@x"'),
        ("a: [1,\n  %x]\n", 2, 'Put it in quotes: "%x"'),
        ("a:\n  b: 1\n\tc: 2\n", 3, "Line 3 begins with a tab. Write spaces."),
    ],
)
def test_a_mistake_is_told_with_its_line(file: Path, text: str, line: int, said: str) -> None:
    message = refused(file, text)
    assert message.startswith(f"{file}:{line}: ") and said in message


DEEP = (b"a: " + b"[" * 1000 + b"]" * 1000, b"a: {" * 1000 + b"}" * 1000)


@pytest.mark.parametrize(
    "text",
    [
        b"a: \xff\n",
        "a: 1".encode("utf-16"),
        ("a: 1\n" * 9).encode("utf-16-le"),
        b"a: \0\n",
        b"a: \x1b[31m\n",
        *DEEP,
    ],
)
def test_a_file_that_is_no_text_or_no_end_is_refused(file: Path, text: bytes) -> None:
    assert refused(file, text).startswith(f"{file}")


# Not `1e5`: a number here, as people mean it, and for PyYAML a text that it writes without quotes.
words = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=6).filter(
    lambda text: not re.fullmatch(r"[-+]?[\d_.]+[eE][-+]?\d+", text)
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(words, plain, max_size=4))
def test_what_pyyaml_writes_reads_back(file: Path, data: dict[str, object]) -> None:
    file.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    if data:
        found, lines = load_yaml_with_lines(file)
        assert found == data
        assert all(lines.of(key) for key in data)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-1.5E+3", -1500.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("7", 7),
        ("-1_000", -1000),
        ("0", 0),
        ("0x1F", 31),
        ("1:00:00", "1:00:00"),  # 3600 in YAML 1.1
        ("12:30.5", "12:30.5"),
        ("0123", "0123"),  # 83 in YAML 1.1
        ("2024-01-01", "2024-01-01"),
        ("12.2.1", "12.2.1"),
        ("true", True),
        ("null", None),
        ("[1, a]", [1, "a"]),
        ("1.0e-4", 1e-4),
        ("+1E3", 1e3),
        ("3.10", 3.1),
        ('"3.10"', "3.10"),
        ("e5", "e5"),
        ("1e", "1e"),
    ],
)
def test_a_value_is_what_people_mean_in_a_file_and_on_the_command_line(
    file: Path, text: str, value: object
) -> None:
    file.write_text(f"a: {text}\n")
    for found in (load_yaml_with_lines(file)[0]["a"], read_value(text)):
        assert found == value and type(found) is type(value)
