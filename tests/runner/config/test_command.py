"""The run file of a command: what it takes, what it refuses, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.config.command_config import CommandConfig, has_command, load_run_file
from runner.config.job_config import OF_COMMANDS, JobConfig
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError, keys_of
from tests.remedies.obeyed import obeys

HERE = "runner/config/command_config.py"

SMALLEST = "format: 1\ncommand: torchrun train.py --lr 1e-4\n"
TRAINING = "format: 1\ntask: masked-lm\nmodel: {asset: bert}\ndataset: {asset: wikitext}\n"


def load(
    folder: Path, text: str = SMALLEST, *overrides: str, name: str = "mine"
) -> RunConfig | CommandConfig:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return load_run_file(path, overrides)


def command(folder: Path, text: str = SMALLEST, *overrides: str) -> CommandConfig:
    loaded = load(folder, text, *overrides)
    assert isinstance(loaded, CommandConfig)
    return loaded


def refused(folder: Path, text: str = SMALLEST, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(folder, text, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "")


def test_the_keys_of_a_command_are_named_once() -> None:
    own = keys_of(CommandConfig).keys() - keys_of(JobConfig).keys() - {"command"}
    assert set(OF_COMMANDS) == own
    assert own.isdisjoint(keys_of(RunConfig))


def test_a_whole_run_file_is_read_and_written_again(tmp_path: Path) -> None:
    text = (
        "format: 1\nname: sft-1\nmanifest: m.yaml\n"
        "command: accelerate launch sft.py --lr ${lr} --seed ${seed}\n"
        "code: ..\ninclude: .env\nresults: [out/**, logs]\nlaunch: node\n"
        "values: {lr: 1e-4, seed: 3}\nresumes: true\non_limit: USR1\n"
        "on_resume: --resume_from_checkpoint latest\nhang_after: 600\n"
        "slurm: {nodes: 2, gpus_per_node: 4}\n"
    )
    config = command(tmp_path, text)
    assert (config.name, config.include, config.results) == ("sft-1", (".env",), ("out/**", "logs"))
    assert (config.on_resume, config.on_limit) == (("--resume_from_checkpoint", "latest"), "USR1")
    assert config.hang_after == 600.0 and config.project == tmp_path.resolve().parent
    again = command(tmp_path, config.to_yaml())
    assert again.to_mapping() == config.to_mapping()
    assert again.with_values() == config.with_values()


def test_defaults(tmp_path: Path) -> None:
    config = command(tmp_path)
    assert (config.name, config.launch, config.resumes) == ("mine", "auto", False)
    assert (config.project, config.on_limit, config.on_resume) == (None, None, ())


@pytest.mark.parametrize(
    ("value", "words"),
    [("1e-4", "lr 0.0001"), ("'a b'", "lr 'a b'"), ("true", "lr true"), ("0.5", "lr 0.5")],
)
def test_a_value_stands_in_a_text_as_a_shell_reads_it(
    tmp_path: Path, value: str, words: str
) -> None:
    text = f"format: 1\ncommand: train lr ${{lr}} ${{HOME}}\nvalues: {{lr: {value}}}\n"
    assert command(tmp_path, text).with_values() == f"train {words} ${{HOME}}"


def test_a_value_in_a_list_is_no_more_words(tmp_path: Path) -> None:
    text = "format: 1\ncommand: [train, '--x=${x}', '${y}']\nvalues: {x: a b}\n"
    assert command(tmp_path, text).with_values() == ("train", "--x=a b", "${y}")


def test_set_changes_the_command_and_its_values(tmp_path: Path) -> None:
    assert command(tmp_path, SMALLEST, "command=python other.py").command == "python other.py"
    text = "format: 1\ncommand: train ${lr}\nvalues: {lr: 1}\n"
    assert command(tmp_path, text, "values.lr=3e-4").with_values() == "train 0.0003"
    bare = "format: 1\nname: x\n"
    assert command(tmp_path, bare, "command=[python, a.py]").command == ("python", "a.py")


@pytest.mark.parametrize("line", ["'command': x", '"command" : x', "command: x", "command:\n  x"])
def test_a_run_file_with_command_is_that_of_a_command(tmp_path: Path, line: str) -> None:
    assert isinstance(load(tmp_path, f"format: 1\n{line}\n"), CommandConfig)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_run_file_in_braces_is_that_of_a_command(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps({"format": 1, "command": "x"}, indent=indent)
    assert isinstance(load(tmp_path, text), CommandConfig)


def test_a_comment_or_an_inner_key_is_no_command(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"# command: x\n{TRAINING}slurm: {{setup: ['command: x']}}\n  # command: y\n")
    assert not has_command(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{TRAINING}command: x\n", "mine.yaml:2: `task` and `command` are both given"),
        (f"{TRAINING}command: x\n", "mine.yaml:3: `model` and `command` are both given"),
        (f"{SMALLEST}steps: 3\n", "mine.yaml:3: `steps` is a key of a training"),
        (f"{SMALLEST}batch: {{micro: 2}}\n", "`batch` is a key of a training"),
        (f"{SMALLEST}result: [x]\n", "Did you mean `results`?"),
        (f"{SMALLEST}values: {{lr: 1}}\n", "mine.yaml:3: the command has no `${lr}`"),
        (f"{SMALLEST}on_resume: --again\n", "mine.yaml:3: `on_resume` adds words to a command"),
        (f"{SMALLEST}on_limit: KILL\n", "`on_limit` must be"),
        (f"{SMALLEST}launch: all\n", "`launch` must be"),
        ("format: 1\ncommand: ''\n", "-> For instance: command: torchrun train.py"),
        ("format: 1\ncommand: '  '\n", "mine.yaml:2: `command` has no words"),
        ("format: 1\ncommand: []\n", "mine.yaml:2: `command` has no words"),
        ("format: 1\ncommand: ['', x]\n", "mine.yaml:2: `command` must be"),
        ("format: 1\ncommand: {a: b}\n", "`command` must be"),
        ("format: 1\ncommand:\n", "`command` "),
        (f'{SMALLEST}resumes: true\non_resume: "--x \'y"\n', "has a quote that does not end"),
        ("command: x\n", "format"),
    ],
)
def test_what_is_refused_says_why(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


@pytest.mark.parametrize("key", OF_COMMANDS)
def test_a_training_refuses_the_keys_of_a_command_with_the_reason(tmp_path: Path, key: str) -> None:
    said = refused(tmp_path, f"{TRAINING}{key}: x\n")
    assert f"mine.yaml:5: `{key}`" in said and "command" in said, said


def test_a_place_for_a_value_that_is_almost_named(tmp_path: Path) -> None:
    text = "format: 1\ncommand: train ${learning_rate}\nvalues: {learning_rte: 1}\n"
    assert "learning_rate" in refused(tmp_path, text)


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    said = refused(tmp_path, f"{SMALLEST}steps: 3\nresumes: maybe\nlaunch: all\n")
    assert all(key in said for key in ("`steps`", "`resumes`", "`launch`")), said


@obeys(HERE, "Write the line that you type on the laptop", "Set resumes: true, if the command")
@pytest.mark.parametrize(
    ("wrong", "remedy", "right"),
    [
        ("command: ' '\n", "command: torchrun train.py", "command: torchrun train.py\n"),
        ("command: x\non_resume: --y\n", "resumes: true",
         "command: x\non_resume: --y\nresumes: true\n"),
    ],
)  # fmt: skip
def test_who_does_what_a_remedy_says_is_let_through(
    tmp_path: Path, wrong: str, remedy: str, right: str
) -> None:
    assert remedy in refused(tmp_path, f"format: 1\n{wrong}")
    command(tmp_path, f"format: 1\n{right}")
