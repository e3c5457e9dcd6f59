"""The chats of LLaMA-Factory, axolotl and others: `runner init`, then the samples of a run of it.

What is learned is the answers. Each column with a text is in the sample, or in what init prints.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from runner.cli import main as runner
from runner.config.run_config import RunConfig
from runner.data.prepare import prepare
from runner.data.recipe import recipes
from runner.data.store import Stores
from runner.inputs import resolve
from runner.job.plan import sequence_length
from runner.job.shapes import ModelShape
from runner.tasks.instruction import Writer
from stage.cli import main as stage
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster
from tests.support.training.twins import model_files

FETCH = ("fetch", "m.yaml", "-o", "b", "--no-offline-check")
INIT = ("init", "instruction", "--bundle", "b", "-o", "r.yaml")
ASKED, ANSWER, MORE, LAST = "name a red fruit", "the cherry is red", "and a tool", "a saw"
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\nname a red fruit\n\n{}### Response:\nthe cherry is red"
)
OURS = [("user", ASKED), ("assistant", ANSWER), ("user", MORE), ("assistant", LAST)]


class Format(NamedTuple):
    """One row, the columns that must be named as not read, and what is learned."""

    row: dict[str, Any]
    named: str = ""
    learned: tuple[str, ...] = (ANSWER,)
    keys: str = ""


def talk(role: str, content: str, **names: str) -> list[dict[str, str]]:
    return [{role: names.get(who, who), content: said} for who, said in OURS]


BOTH = (ANSWER, LAST)
SHAREGPT = {"user": "human", "assistant": "gpt"}
FORMATS = {
    "alpaca": Format(
        {"instruction": ASKED, "input": "of the garden", "output": ANSWER}, keys="format"
    ),
    "alpaca without an input": Format({"instruction": ASKED, "output": ANSWER}),
    "alpaca, an empty input": Format(
        {"instruction": ASKED, "input": "", "output": ANSWER}, keys="format"
    ),
    "alpaca with a system and a history": Format(
        {"system": "be kind", "instruction": ASKED, "output": ANSWER, "history": [["hi", "ho"]]},
        "system, history",
    ),
    "alpaca of preferences": Format(
        {"instruction": ASKED, "input": "ripe", "chosen": ANSWER, "rejected": "no"}, "rejected"
    ),
    "sharegpt": Format(
        {"conversations": talk("from", "value", **SHAREGPT), "tools": "[]", "system": "be kind"},
        "tools, system",
        BOTH,
        "messages",
    ),
    "from, content": Format({"chat": talk("from", "content")}, "", BOTH, "messages"),
    "pygmalion": Format({"conversations": talk("role", "value")}, "", BOTH, "messages"),
    "openai": Format({"source": "web", "messages": talk("role", "content")}, "source", BOTH),
    "pairs": Format(
        {
            "topic": "x",
            "talk": [{"human": ASKED, "assistant": ANSWER}, {"human": MORE, "assistant": LAST}],
            "source": "y",
        },
        "topic, source",
        BOTH,
        "messages",
    ),
    "a system and a query": Format(
        {"system": "be brief", "query": ASKED, "response": ANSWER}, "system"
    ),
    "prompt and completion": Format({"prompt": ASKED, "completion": ANSWER}),
    "question and answer": Format(
        {"category": "fruit", "question": ASKED, "answer": ANSWER}, "category"
    ),
    "context_qa": Format(
        {"context": "the cherry is a red fruit", "question": ASKED, "answer": ANSWER},
        keys="format",
    ),
    "summarizetldr": Format({"article": ASKED, "summary": ANSWER}),
    "metharme": Format({"prompt": ASKED, "generation": ANSWER}),
    "oasst": Format({"INSTRUCTION": ASKED, "RESPONSE": ANSWER}),
    "preferences with messages": Format(
        {
            "chosen": talk("role", "content"),
            "rejected": talk("role", "content"),
            "messages": talk("role", "content"),
        },
        "chosen, rejected",
        BOTH,
        "messages: messages   # lists of {role, content}; also: chosen",
    ),
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template that reads longer texts than the other tiny ones."""
    folder = tmp_path_factory.mktemp("chat")
    model_files(folder, "chat")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return folder


def staged(row: dict[str, Any], model: Path) -> None:
    """Stages a row, three times, and a model in this folder as `b`."""
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    Path("m.yaml").write_text(
        "format: 1\nname: m\nassets:\n  rows: {path: rows.jsonl, convert: jsonl}\n"
        f"  gpt: {{path: {json.dumps(str(model))}}}\n"
    )
    done = CliRunner().invoke(stage, FETCH)
    assert done.exit_code == 0, done.output


def begun(row: dict[str, Any], model: Path) -> str:
    """Stages a row and a model, and writes `r.yaml`; returns what init prints."""
    staged(row, model)
    done = CliRunner().invoke(runner, INIT)
    assert done.exit_code == 0, done.output
    return done.output


def samples(run_file: str = "r.yaml") -> list[tuple[str, str]]:
    """Of each sample of a run: the text, and that of what is learned."""
    config = RunConfig.load(Path(run_file))
    inputs = resolve(config, Path("b"))
    length, _ = sequence_length(config, ModelShape.of(inputs.model.settings))
    (recipe,) = recipes(config, inputs, length)["train"]
    store = prepare(recipe, Path("stores"), print)
    names = AutoTokenizer.from_pretrained(inputs.model.path).convert_ids_to_tokens

    def shown(ids: Any) -> str:
        return "".join(names(ids.tolist())).replace("Ġ", " ").replace("Ċ", "\n")

    found = []
    for number in range(len(store)):
        row = Stores([store]).row(number)
        parts = row.get("documents", row["ids"] * 0 + 1)
        for part in sorted(set(parts.tolist())):
            ids, learned = row["ids"][parts == part], row["learned"][parts == part]
            found.append((shown(ids), shown(ids[learned == 1])))
    return found


def texts_of(value: Any) -> list[str]:
    """The texts in a value that are long enough to be found again."""
    if isinstance(value, str):
        return [value] if value.strip() else []
    items = value.values() if isinstance(value, dict) else value
    return [text for item in items for text in texts_of(item)]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_learned_of_a_format_is_its_answers_and_no_column_is_lost(
    name: str, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 13 of 16 Alpaca files half of each question was not learned, without a word."""
    monkeypatch.chdir(tmp_path)
    row, named, learned, keys = FORMATS[name]
    said = begun(row, chat)
    assert keys in Path("r.yaml").read_text()
    assert "a guess" not in said
    unread = f"columns that are not read, and not learned: {named}\n"
    assert unread in said if named else "not read" not in said, said
    found = samples()
    assert len(found) == 3
    for text, only in found:
        rest = only
        for answer in learned:
            assert answer in rest, only
            rest = rest.replace(answer, "", 1)
        assert rest.replace("</s>", "").strip() == "", only
        for column, value in row.items():
            whole = [part for part in texts_of(value) if part not in ("human", "gpt")]
            assert column in named.split(", ") or all(part in text for part in whole), text


def test_the_rows_of_alpaca_become_its_two_templates(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input that is null took the whole row away; an empty one left its heading."""
    monkeypatch.chdir(tmp_path)
    row = {"instruction": ASKED, "input": "of the garden", "output": ANSWER}
    begun(row, chat)
    rows: list[dict[str, Any]] = [row, row | {"input": ""}, row | {"input": None}]
    inputs = resolve(RunConfig.load(Path("r.yaml")), Path("b"))
    tokenizer = AutoTokenizer.from_pretrained(inputs.model.path)
    writer = Writer.of(inputs.datasets[0].settings, tokenizer, {})
    written = [writer.write(row) for row in rows]
    with_input, without = ALPACA.format("### Input:\nof the garden\n\n"), ALPACA.format("")
    assert [s and s.text for s in written] == [with_input, without, without]
    assert {s and s.text[s.response[0][0] : s.response[0][1]] for s in written} == {ANSWER}
    nothing = writer.write({"instruction": None, "input": " ", "output": ANSWER})
    assert nothing is None, "an answer to nothing"


def test_a_chat_with_other_keys_is_shown_with_the_keys_that_rename_them(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = begun({"topic": "x", "talk": talk("speaker", "text"), "source": "y"}, chat)
    assert "talk holds list<" in said and "a guess" in said, said
    advised = in_it(said, r"messages: talk, fields: \{.*\}")
    settled = advised.replace("role: KEY", "role: speaker").replace("content: KEY", "content: text")
    text = Path("r.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("  prompt", "  response"))]
    at = lines.index("dataset:") + 1
    lines[at:at] = [f"  {line}" for line in settled.replace(", fields", "\nfields").split("\n")]
    Path("r.yaml").write_text("\n".join(lines))
    assert [only.replace("</s>", "").split() for _, only in samples()] == [
        f"{ANSWER} {LAST}".split()
    ] * 3


@obeys("runner/job/examples.py", "Where a talk is in two columns")
def test_a_talk_in_two_columns_or_with_other_keys_alone_is_refused_with_the_way_on(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's prompts and completions can be lists of messages, too."""
    monkeypatch.chdir(tmp_path)
    whole = talk("role", "content")
    staged({"prompt": whole[:1], "completion": whole[1:2]}, chat)
    done = CliRunner().invoke(runner, INIT)
    assert done.exit_code == 2 and "rows: prompt holds list<" in done.output, done.output
    assert "join them to one list, `messages`" in done.output
    Path("m.lock").unlink()
    begun({"messages": whole[:2]}, chat)
    assert samples()[0][1].replace("</s>", "").strip() == ANSWER

    for path in ("m.lock", "r.yaml"):
        Path(path).unlink()
    staged({"id": 1, "talk": talk("speaker", "text")}, chat)
    done = CliRunner().invoke(runner, INIT)
    assert done.exit_code == 2 and "rows: talk holds list<" in done.output, done.output
    command = in_it(done.output, "(?<=`runner )init instruction(?=`)").split()
    assert CliRunner().invoke(runner, [*command, "-o", "r.yaml"]).exit_code == 0
    lines = Path("r.yaml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("  prompt", "  response", "  asset"))]
    fields = "{role: speaker, content: text}"
    at = kept.index("dataset:") + 1
    kept[at:at] = ["  asset: rows", "  messages: talk", f"  fields: {fields}"]
    text = "\n".join(kept)
    text = re.sub("(?m)^model:.*", "model: {asset: gpt}", text)
    Path("r.yaml").write_text(text)
    assert samples()[0][1].replace("</s>", "").split() == f"{ANSWER} {LAST}".split()


@obeys("runner/tasks/instruction.py", "Train the model's chat version")
def test_a_base_model_learns_talks_by_the_template_of_the_message(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has no template, and `format` reads no lists: the advice led nowhere."""
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    shutil.copytree(chat, base, ignore=shutil.ignore_patterns("chat_template.jinja"))
    row = {"conversations": talk("from", "value", **SHAREGPT)}
    begun(row, base)
    check = ["check", "r.yaml", "--bundle", "b", "--set", "slurm.gpus_per_node=0"]
    done = CliRunner().invoke(runner, check)
    assert done.exit_code == 2 and "has no chat template" in done.output, done.output
    shutil.copytree(base, "copy")
    template = in_it(done.output, "(?<=such as: ).*")
    Path("copy/chat_template.jinja").write_text(template)
    for path in ("r.yaml", "m.lock"):
        Path(path).unlink()
    begun(row, Path("copy"))
    assert samples()[0][1].replace("</s>", "").split() == f"{ANSWER} {LAST}".split()
    run = ("steps=2", "slurm.gpus_per_node=0", "batch.global=2", "name=r", "epochs=null")
    cluster = Cluster(tmp_path, Path("b"))
    folder = cluster.trained("r", *(f"--set={pair}" for pair in run), processes=1)
    assert (folder / "model").is_dir()
