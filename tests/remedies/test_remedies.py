"""Whoever does what a remedy says is better off: each is obeyed, word by word, or named as not.

`not_obeyed.txt` has the remedies that nobody obeys here, each with its reason. A new remedy with a
command or a line of YAML in it is in neither list, and fails the first test.
"""

from __future__ import annotations

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

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from stage.cli import main as stage
from tests.remedies.obeyed import stories
from tests.remedies.walk import remedies, unquoted
from tests.support.staging import model_files

NOT_OBEYED = Path(__file__).with_name("not_obeyed.txt")
REASONS = {
    "accounts": "needs Slurm's accounts (slurmdbd), which the tests' site has not",
    "choice": "the user has to choose, or to look first; no one line is right for all",
    "double": "its command, or line of YAML, is that of another remedy, which is obeyed",
    "device": "needs a GPU, a driver, or memory that this machine has not",
    "hub": "needs a Hub, a server or a proxy that answers so",
    "index": "needs an index of packages",
    "once": "a test obeyed it, and left: the test of the fault stays, with the words",
    "shows": "shows where to look, and changes nothing",
    "system": "needs another disk, right, program or limit of the system",
}
ROWS = "text,label\na film,good\nanother,bad\n"
SMALLEST: dict[str, Any] = {
    "format": 1,
    "task": "masked-lm",
    "model": {"asset": "bert"},
    "dataset": {"asset": "wikitext"},
}
PROSE = r"(?:are|entry|file|instance|it|line|made|names?|now|one|own|quotes|them):"
VALUE = r"(\[[^]]*\]|\{[^}]*\}|\"[^\"]*\"|[^\s,;`)]+)"


@dataclass(frozen=True)
class Case:
    """A fault, and the remedy that is obeyed.

    Attributes:
        file, remedy: where the remedy stands, and how it begins.
        entry: an entry of a manifest, or settings of a run file.
        files: of the user: path -> content.
        command: what is run; `-o` is the bundle.
        later: files that change after the command succeeded once.
        before: commands that succeed before it.
    """

    file: str
    remedy: str
    entry: dict[str, Any] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    command: str = "fetch m.yaml -o bundle"
    later: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", f"{Path(self.file).stem}-{self.remedy}")[:60]


CONVERT = "stage/convert/convert.py"
LOCAL = "stage/staging/sources/listing.py"
SIGNATURE = "stage/bundle/signature.py"
FETCH = "fetch m.yaml -o bundle"
SIGNERS = ("ssh-keygen -q -t ed25519 -N '' -f KEY", 'echo "me $(cat KEY.pub)" > signers')
MODEL = {f"mine/{name}": data for name, data in model_files(100).items() if "token" not in name}
MANIFESTS = (
    Case(CONVERT, "Write `convert: ", {"path": "t", "convert": "csv"},
         {"t/a.jsonl": '{"text": "a"}\n', "t/b.jsonl": '{"text": "b"}\n'}),
    Case(CONVERT, "Write `convert: ", {"path": "t", "convert": "csv"},
         {"t/1.png": b"\x89PNGIEND", "t/2.png": b"\x89PNGIEND", "t/metadata.json": "[]"}),
    Case("stage/convert/images.py", "Copy it again from where it came, or omit it",
         {"path": "t", "convert": "imagefolder"},
         {"t/1.png": b"\x89PNGIEND", "t/2.jpg": b"\xff\xd8.."}),
    Case(CONVERT, "Remove `convert`", {"path": "mine", "convert": "csv"}, MODEL),
    Case(CONVERT, "Remove `convert`", {"path": "mine", "convert": "json"}, MODEL),
    Case("stage/convert/csv_files.py", "Add to its entry: separator", {"path": "a.csv",
         "convert": "csv"}, {"a.csv": ROWS.replace(",", ";")}),
    Case("stage/convert/csv_files.py", "A CSV begins with a line", {"path": "a.csv",
         "convert": "csv"}, {"a.csv": "one\ntwo, and more\n"}),
    Case("stage/staging/build.py", "Is it the right file", {"path": "a.csv", "convert": "csv"},
         {"a.csv": "a line of text\n"}),
    Case("stage/staging/sources/listing.py", "or omit it: exclude", {"path": "t", "convert": "csv"},
         {"t/a.csv": ROWS, "t/b.csv": ""}),
    Case(LOCAL, "Omit them: exclude", {"path": "t"}, {"t/a.txt": "x", "t/.env": "PASSWORD=x\n"}),
    Case("stage/lock/manifest.py", "Write `path: ", {"model": "./mine"}, MODEL),
    Case("stage/lock/manifest.py", "Write `path: ", {"dataset": "a.csv"}, {"a.csv": ROWS}),
    Case("stage/lock/manifest.py", "Write `path: ", {"dataset": "a.jsonl"},
         {"a.jsonl": '{"text": "a"}\n'}),
    Case("stage/staging/prechecks.py", "Choose a folder outside", {"path": "."}, {"a.txt": "x"}),
    Case("stage/staging/prechecks.py", "Choose a folder outside", {"path": "t"}, {"t/a.txt": "x"},
         "fetch m.yaml -o t/deep/bundle"),
    Case("stage/files.py", "mkdir -p", {"path": "a.txt"}, {"a.txt": "x"},
         "verify bundle --report new/r.json", before=(FETCH,)),
    Case("stage/staging/sources/files.py", "To take the files of", {"path": "a.txt"},
         {"a.txt": "x"}, later={"a.txt": "y"}),
    Case(SIGNATURE, "Make one: ssh-keygen", {"path": "a.txt"}, {"a.txt": "x"},
         "sign bundle --key KEY", before=(FETCH,)),
    Case(SIGNATURE, "Where it was made: stage sign", {"path": "a.txt"}, {"a.txt": "x"},
         "verify bundle --signers signers", before=(FETCH, *SIGNERS)),
    Case("stage/staging/working_folder.py", "Give it a folder of its own", {"path": "a.txt"},
         {"a.txt": "x", "n.yaml": "format: 1\nname: n\nassets: {a: {path: a.txt}}\n"},
         "fetch n.yaml -o bundle", before=(FETCH,)),
    Case("stage/staging/resolve.py", "stage lock", {"path": "a.txt"}, {"a.txt": "x"},
         "fetch m.yaml -o bundle --locked"),
)  # fmt: skip
ENGINE = "runner/config/engine.py"
LORA = "runner/config/lora.py"
KEYS = "runner/config/fields.py"
RUN_FILES = (
    Case(ENGINE, "Set engine.zero: 1", {"engine": {"zero": 0, "offload": "cpu"}}),
    Case(ENGINE, "Set engine.name: {}, or", {"optimizer": {"name": "adamw_8bit"}}),
    Case(KEYS, "Remove it, or set schedule", {"schedule": {"decay": 0.5}}),
    Case(KEYS, "Remove it, or set optimizer.name", {"optimizer": {"momentum": 0.5}}),
    Case(KEYS, "Remove it, or set engine.name", {"engine": {"name": "ddp", "zero": 2}}),
    Case(ENGINE, "Write wrap: ", {"engine": {"name": "fsdp", "wrap": {"layers": "Block"}}}),
    Case(LORA, "Add `lora: ", {"quantization": {"bits": 4}}),
    Case(
        LORA,
        "Set engine: {name: ddp}, or",
        {"engine": {"zero": 3}, "lora": {}, "quantization": {"bits": 4}},
    ),
    Case(KEYS, "Remove it, or", {"lora": {}, "quantization": {"bits": 8, "double": False}}),
    Case(LORA, "Remove `lora`, or set", {"model": {"asset": "b", "init": "scratch"}, "lora": {}}),
    Case(KEYS, "Remove it, or set task", {"task": "causal-lm", "whole_words": True}),
    Case("runner/config/engine.py", "For instance: every", {"checkpoint": {"every": "often"}}),
    Case(KEYS, "Remove it, or set engine", {"engine": {"name": "ddp", "offload": "cpu"}}),
    Case(
        "runner/config/chats.py",
        "For instance: fields: ",
        {
            "task": "instruction",
            "dataset": {"asset": "chats", "messages": "m", "fields": {"rolle": "from"}},
        },
    ),
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return folder


def not_obeyed() -> dict[tuple[str, str], str]:
    """(file, remedy) -> a key of `REASONS`."""
    lines = NOT_OBEYED.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    return {(file, text): reason for reason, file, text in rows}


def is_obeyed(file: str, text: str) -> bool:
    """Whether a test does what this remedy says."""
    cases = [(case.file, case.remedy) for case in (*MANIFESTS, *RUN_FILES)]
    return any(file == of and remedy in text for of, remedy in [*cases, *stories()])


def test_every_remedy_is_obeyed_or_it_is_said_why_not() -> None:
    """To record: python -m tests.remedies.record, then give each new line its reason."""
    obeyed = {row for row in remedies() if is_obeyed(*row)}
    listed = not_obeyed()
    assert set(listed.values()) <= REASONS.keys()
    assert remedies() - obeyed - listed.keys() == set(), "new: obey it, or say why not"
    assert listed.keys() - remedies() == set(), "no remedy any more"
    assert listed.keys() & obeyed == set(), "obeyed by now"
    there = remedies()
    stale = [s for s in stories() if not any(s[0] == of and s[1] in text for of, text in there)]
    assert stale == [], "said to be obeyed, and no remedy any more"


def test_a_path_in_a_command_is_one_word_for_a_shell() -> None:
    """`rm -r {folder}` removed another folder than the one with a space in its name."""
    words = {"comment(quoted(path))", "place_for_bundle(every)", "place_for_bundle(found)"}
    assert [one for one in unquoted() if one[1] not in words] == []


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


@pytest.mark.parametrize("case", RUN_FILES, ids=str)
def test_a_remedy_of_a_run_file_leads_on(case: Case) -> None:
    settings = {**SMALLEST, **case.entry}
    with pytest.raises(UsageError) as caught:
        load(settings)
    ways = list(changes(caught.value.remedy, case.entry))
    assert ways, caught.value.remedy
    for key, value in ways:
        where = re.search(rf"`([a-z_]+)\.{key}`", caught.value.message)
        group = next((g for g, of in reversed(case.entry.items()) if isinstance(of, dict)), "")
        in_group = "." not in key and key not in (*SMALLEST, *case.entry, "lora")
        full = f"{where[1]}.{key}" if where else f"{group}.{key}" if in_group and group else key
        load(changed(settings, full, value))


def load(settings: dict[str, Any]) -> RunConfig:
    Path("mine.yaml").write_text(yaml.safe_dump(settings))
    return RunConfig.load(Path("mine.yaml"))
