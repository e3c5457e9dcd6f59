"""Whoever does what a remedy says is better off: remedies are obeyed, word by word."""

from __future__ import annotations

import ast
import copy
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from stage.cli import main as stage
from tests.support.staging import model_files

ROOT = Path(__file__).parents[2]
ROWS = "text,label\na film,good\nanother,bad\n"
PROSE = r"(?:are|entry|file|instance|it|line|made|names?|now|one|own|quotes|them):"
VALUE = r"(\[[^]]*\]|\{[^}]*\}|\"[^\"]*\"|[^\s,;`)]+)"


@dataclass(frozen=True)
class Case:
    """A fault, and the remedy that is obeyed.

    Attributes:
        remedy: how it begins.
        entry: an entry of a manifest, or settings of a run file.
        files: of the user: path -> content.
        command: what is run; `-o` is the bundle.
        later: files that change after the command succeeded once.
        before: commands that succeed before it.
    """

    remedy: str
    entry: dict[str, Any] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    command: str = "fetch m.yaml -o bundle"
    later: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", self.remedy)[:60]


FETCH = "fetch m.yaml -o bundle"
SIGNERS = ("ssh-keygen -q -t ed25519 -N '' -f KEY", 'echo "me $(cat KEY.pub)" > signers')
MODEL = {f"mine/{name}": data for name, data in model_files(100).items() if "token" not in name}
MANIFESTS = (
    Case("Write `convert: ", {"path": "t", "convert": "csv"},
         {"t/a.jsonl": '{"text": "a"}\n', "t/b.jsonl": '{"text": "b"}\n'}),
    Case("Write `convert: ", {"path": "t", "convert": "csv"},
         {"t/1.png": b"\x89PNGIEND", "t/2.png": b"\x89PNGIEND", "t/metadata.json": "[]"}),
    Case("Copy it again from where it came, or omit it", {"path": "t", "convert": "imagefolder"},
         {"t/1.png": b"\x89PNGIEND", "t/2.jpg": b"\xff\xd8.."}),
    Case("Remove `convert`", {"path": "mine", "convert": "csv"}, MODEL),
    Case("Remove `convert`", {"path": "mine", "convert": "json"}, MODEL),
    Case("Add to its entry: separator", {"path": "a.csv",
         "convert": "csv"}, {"a.csv": ROWS.replace(",", ";")}),
    Case("A CSV begins with a line", {"path": "a.csv",
         "convert": "csv"}, {"a.csv": "one\ntwo, and more\n"}),
    Case("Is it the right file", {"path": "a.csv", "convert": "csv"},
         {"a.csv": "a line of text\n"}),
    Case("or omit it: exclude", {"path": "t", "convert": "csv"},
         {"t/a.csv": ROWS, "t/b.csv": ""}),
    Case("Omit them: exclude", {"path": "t"}, {"t/a.txt": "x", "t/.env": "PASSWORD=x\n"}),
    Case("Write `path: ", {"model": "./mine"}, MODEL),
    Case("Write `path: ", {"dataset": "a.csv"}, {"a.csv": ROWS}),
    Case("Write `path: ", {"dataset": "a.jsonl"},
         {"a.jsonl": '{"text": "a"}\n'}),
    Case("Choose a folder outside", {"path": "."}, {"a.txt": "x"}),
    Case("Choose a folder outside", {"path": "t"}, {"t/a.txt": "x"},
         "fetch m.yaml -o t/deep/bundle"),
    Case("mkdir -p", {"path": "a.txt"}, {"a.txt": "x"},
         "verify bundle --report new/r.json", before=(FETCH,)),
    Case("To take the files of", {"path": "a.txt"},
         {"a.txt": "x"}, later={"a.txt": "y"}),
    Case("Make one: ssh-keygen", {"path": "a.txt"}, {"a.txt": "x"},
         "sign bundle --key KEY", before=(FETCH,)),
    Case("Where it was made: stage sign", {"path": "a.txt"}, {"a.txt": "x"},
         "verify bundle --signers signers", before=(FETCH, *SIGNERS)),
    Case("Give it a folder of its own", {"path": "a.txt"},
         {"a.txt": "x", "n.yaml": "format: 1\nname: n\nassets: {a: {path: a.txt}}\n"},
         "fetch n.yaml -o bundle", before=(FETCH,)),
    Case("stage lock", {"path": "a.txt"}, {"a.txt": "x"},
         "fetch m.yaml -o bundle --locked"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return folder


TAKES_A_PATH = re.compile(
    r"(?:^|[`(:;, ])(?:(?:stage|runner) \w+|chmod \S+|ls -ld?|namei -l|rm -\w+|mv|git -C|sh|cp"
    r"|mkdir -p|--output|--bundle|-o) $"
)


def unquoted(source: str) -> Iterator[str]:
    """Each value in a command of this code that a shell may take for several words."""
    for node in ast.walk(ast.parse(source)):
        before = ""
        for part in node.values if isinstance(node, ast.JoinedStr) else ():
            if isinstance(part, ast.FormattedValue) and TAKES_A_PATH.search(before):
                value = ast.unparse(part.value)
                named = rf"\b{re.escape(value)}\b[^=\n]* = .*quote"
                is_word = re.match(r"quoted?\(|shlex\.|.*remote\.inside\(", value)
                if not is_word and not re.search(named, source):
                    yield value
            before += str(part.value) if isinstance(part, ast.Constant) else "{}"


def test_a_path_in_a_command_is_one_word_for_a_shell() -> None:
    """`rm -r {folder}` removed another folder than the one with a space in its name."""
    words = {"comment(quoted(path))", "place_for_bundle(every)", "place_for_bundle(found)"}
    paths = [path for package in ("stage", "runner") for path in (ROOT / package).rglob("*.py")]
    found = {value for path in paths for value in unquoted(path.read_text("utf-8"))}
    assert found - words == set() and len(paths) > 200


def changes(remedy: str, entry: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, value) of each line of YAML in a remedy; None: the key is to be removed."""
    for found in re.finditer(rf"(?<![\w-])(?!{PROSE})([a-z_]+(?:\.[a-z_]+)*): {VALUE}", remedy):
        yield found[1], yaml.safe_load(found[2].rstrip("."))
    for found in re.finditer(r"[Rr]emove (?!the)(?:`?([a-z_.]*[a-z_])`?)", remedy):
        yield (found[1] if found[1] != "it" else ".".join(last_key(entry))), None


def last_key(entry: dict[str, Any]) -> list[str]:
    """The key that a case ends with: the one that is too many."""
    name, value = list(entry.items())[-1]
    return [name, *(last_key(value) if isinstance(value, dict) and value else [])]


def changed(settings: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The settings with one key replaced, or removed; `a.b` is below `a`."""
    result = copy.deepcopy(settings)
    *above, last = key.split(".")
    inner = result
    for name in above:
        inner = inner.setdefault(name, {})
    if value is None:
        inner.pop(last, None)
    else:
        inner[last] = value
    return result


def write_manifest(entry: dict[str, Any]) -> None:
    if entry:
        document = {"format": 1, "name": "m", "assets": {"a": entry}}
        Path("m.yaml").write_text(yaml.safe_dump(document))


def run(command: str) -> tuple[int, str]:
    words = shlex.split(command)
    if words[0] not in ("fetch", "init", "lock", "sign", "verify"):
        done = subprocess.run(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stderr
    said = CliRunner().invoke(stage, words, prog_name="stage")
    return said.exit_code, said.output


@pytest.mark.parametrize("case", MANIFESTS, ids=str)
def test_a_remedy_of_stage_leads_on(case: Case) -> None:
    for name, content in case.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    write_manifest(case.entry)
    command = f"{case.command} --no-offline-check" if "fetch" in case.command else case.command
    for first in (*case.before, *([command] if case.later else ())):
        assert run(first)[0] == 0
    for name, text in case.later.items():
        Path(name).write_text(text)
    code, said = run(command)
    remedy = " ".join(said.partition("-> ")[2].split())
    assert code in (2, 3, 4) and remedy, said
    assert case.remedy.replace("{}", "") in remedy, remedy
    ways: list[Any] = [{key: value} for key, value in changes(remedy, case.entry)]
    if any("path" in way for way in ways):  # what an entry is, and how to read it
        ways = [{key: value for way in ways for key, value in way.items()}]
    for way in ways:
        entry = {} if "path" in way else case.entry
        for key, value in way.items():
            entry = changed(entry, key, value)
        write_manifest(entry)
        code, said = run(command)
        assert code == 0, f"{way}\n{said}"
    write_manifest(case.entry)
    for folder in re.findall(r"[^.]: -o (\S+?)[.,]?(?: |$)", remedy):
        ways.append(("-o", folder))
        assert run(re.sub(r"-o \S+", f"-o {folder}", command))[0] == 0
    commands = "mkdir|lock|fetch|sign|ssh-keygen"
    if found := re.search(rf"(?:^|: )(?:stage )?((?:{commands}) [^;(]*)", remedy):
        ways.append(("command", found[1]))
        assert run(found[1])[0] == 0
        # A fetch into another folder is all; after other commands the first one has to succeed.
        assert found[1].startswith("fetch") or run(command)[0] == 0
    assert ways, f"nothing to obey in: {remedy}"
