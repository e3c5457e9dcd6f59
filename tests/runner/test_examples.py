"""`runner init` writes a run file that `runner check` accepts, from what is in the bundle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from runner.cli import main
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.inputs import SplitInput, resolve
from runner.job.devices import check_precision_on
from runner.job.examples import _data
from runner.tasks import TASKS
from stage.bundle.bundle import Bundle
from stage.cli import main as stage
from tests.support.training.models import tiny_model_files

ROOT = Path(__file__).resolve().parents[2]
LONG = [f"the film number {n} is longer than its title" for n in range(40)]
KINDS = ["sport", "news"] * 20
FEW = [1, 2, 3, 4, 5] * 8


def init(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["init", *map(str, words)], prog_name="runner")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_file_names_what_fits_the_task(bundle: Path) -> None:
    done = init("causal-lm", "--bundle", bundle, "-o", "mine.yaml")
    assert done.exit_code == 0, done.output
    assert "model tiny-gpt2: the only one that fits the task" in done.output
    assert f"next: runner check mine.yaml --bundle {bundle}" in done.output
    config = RunConfig.load(Path("mine.yaml"))
    assert config.name == "mine" and config.sequence_length == 64, "no more than the model takes"
    assert resolve(config, bundle).model.asset == "tiny-gpt2"


def test_gpus_are_asked_for_where_the_profile_of_the_nodes_says_so(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job for nodes without a GPU asked for one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path.cwd()))  # no clusters.yaml of the user
    profile = 'format: 1\nname: n\nplatform: linux-64\nglibc: "2.28"\n'
    for more, line in (
        (None, "  gpus_per_node: 2 "),  # not known: as in the example
        ("", "  gpus_per_node: 0 "),
        ('cuda: "12.2"\ncompute_capability: "8.0"\n', "  gpus_per_node: 2 "),
    ):
        if more is not None:
            Path("clusters.yaml").write_text("far: {host: h, folder: f, profile: node.yml}\n")
            Path("node.yml").write_text(profile + more)
        done = init("causal-lm", "--bundle", bundle, "-o", "new.yaml")
        assert done.exit_code == 0, done.output
        text = Path("new.yaml").read_text()
        assert line in text, text
        Path("new.yaml").unlink()
    # A precision that no GPU there has was seen in the ranks only.
    Path("node.yml").write_text(profile + 'cuda: "12.2"\ncompute_capability: "7.0"\n')
    Path("bf16.yaml").write_text(f"{text}precision: bf16\n".replace("precision: auto\n", ""))
    config = RunConfig.load(Path("bf16.yaml"))
    with pytest.raises(UsageError, match=r"bf16: the device GPU \(by node.yml\) does not have it"):
        check_precision_on(config, [Path("node.yml")])
    check_precision_on(replace(config, precision="fp16"), [Path("node.yml")])
    done = CliRunner().invoke(main, ["check", "bf16.yaml", "--bundle", str(bundle)])
    assert "Only `submit --to` refuses it: this check does not know" in done.output, done.output


@pytest.mark.parametrize("task", TASKS)
def test_each_task_begins_as_its_example(task: str, twins_bundle: Path) -> None:
    """The twins have the assets of all examples, so the examples' own settings stay."""
    done = init(task, "--bundle", twins_bundle)
    assert done.exit_code == 0, done.output
    config = RunConfig.load(Path(f"{task}.yaml"))
    resolve(config, twins_bundle)
    example = RunConfig.load(ROOT / "runs" / TASKS[task].example)
    for key in ("task", "schedule", "engine", "checkpoint"):
        assert getattr(config, key) == getattr(example, key), key
    own = replace(example.slurm, partition=None, modules=())
    assert config.slurm == own, "a partition and modules of another site"
    assert config.batch.total == "auto", "the example's batch is larger than a twin's data"


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"id": range(40), "review": LONG, "stars": FEW}, ("review", "stars")),
        ({"split": ["train"] * 40, "topic": KINDS, "review": LONG}, ("review", "topic")),
        ({"idx": range(40), "text": LONG, "label": FEW}, ("text", "label")),
    ],
)
def test_the_column_of_the_classes_is_the_one_that_looks_like_classes(
    columns: dict[str, Iterable[object]], found: tuple[str, str], here: Path
) -> None:
    """The number of the row was taken for its class."""
    table = pa.table({name: list(values) for name, values in columns.items()})
    pq.write_table(table, here / "train.parquet")
    kinds = {column.name: str(column.type) for column in table.schema}
    split = SplitInput("train", (here / "train.parquet",), (), 40, kinds)
    chosen, _others, _unusual = TASKS["text-classification"].choose(split)
    assert (chosen["text"], chosen["label"]) == found


def test_a_dataset_with_the_usual_names_comes_first_and_a_guess_is_said() -> None:
    """The first dataset by alphabet was taken, with its first two columns, and no word."""
    for name, columns in {"letters": "номер,дата", "news": "instruction,response"}.items():
        rows = "".join(f"a{n},b{n}\n" for n in range(3))
        Path(f"{name}.csv").write_text(f"{columns}\n{rows}", "utf-8")
    Path("m.yaml").write_text(
        "format: 1\nname: m\nassets:\n  letters: {path: letters.csv, convert: csv}\n"
        "  news: {path: news.csv, convert: csv}\n  gpt: {path: gpt}\n"
    )
    for name, content in tiny_model_files(Path("t"), "gpt2").items():
        (Path("gpt") / name).parent.mkdir(exist_ok=True)
        (Path("gpt") / name).write_bytes(content)
    assert CliRunner().invoke(stage, ["fetch", "m.yaml", "-o", "b"]).exit_code == 0
    done = init("instruction", "--bundle", "b", "-o", "mine.yaml")
    said = "dataset news (also: letters): prompt: instruction, response: response, "
    assert said in done.output, done.output
    manifest = Path("m.yaml").read_text()
    Path("m.yaml").write_text(manifest.replace("  news: {path: news.csv, convert: csv}\n", ""))
    assert CliRunner().invoke(stage, ["fetch", "m.yaml", "-o", "c"]).exit_code == 0
    done = init("instruction", "--bundle", "c", "-o", "guess.yaml")
    assert "dataset.prompt and dataset.response: a guess" in done.output, done.output
    assert 'prompt: "номер"   # a guess; also: дата' in Path("guess.yaml").read_text("utf-8")


def test_a_file_that_is_there_is_never_overwritten() -> None:
    Path("masked-lm.yaml").write_text("mine\n")
    done = init("masked-lm")
    assert done.exit_code == 2 and "is there already" in done.output
    assert Path("masked-lm.yaml").read_text() == "mine\n"


@pytest.mark.parametrize(("package", "folder"), [("runner", "runs"), ("stage", "manifests")])
def test_every_example_is_in_its_package(package: str, folder: str) -> None:
    shown = {path.name: path.read_bytes() for path in (ROOT / folder).glob("*.yaml")}
    packed = {path.name: path.read_bytes() for path in (ROOT / package / "examples").glob("*.yaml")}
    assert packed == shown and packed


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("image-classification", "no model in this bundle fits the task"),
        ("token-classification", "no dataset in this bundle has columns for the task"),
    ],
)
def test_a_bundle_that_has_nothing_for_a_task_is_refused(
    bundle: Path, task: str, said: str
) -> None:
    done = init(task, "--bundle", bundle, "-o", "mine.yaml")
    assert done.exit_code == 2 and said in done.output, done.output
    assert not Path("mine.yaml").exists()


def test_a_dataset_that_travels_as_published_is_refused_with_how_to_get_its_columns(
    bundle: Path,
) -> None:
    opened = Bundle.open(bundle)
    assets = {
        name: replace(asset, configs={}) if asset.kind == "dataset" else asset
        for name, asset in opened.lock.assets.items()
    }
    published = replace(opened, lock=replace(opened.lock, assets=assets))
    with pytest.raises(UsageError, match="travel as published, not as parquet") as refused:
        _data(TASKS["masked-lm"], published)
    assert "remove `include` and `exclude` of" in refused.value.remedy


def test_stage_init_writes_an_example_manifest() -> None:
    def run(name: str) -> Result:
        return CliRunner().invoke(stage, ["init", "--example", name], prog_name="stage")

    assert run("bert-large-wikitext2").exit_code == 0
    assert (
        Path("manifest.yaml").read_bytes()
        == (ROOT / "manifests/bert-large-wikitext2.yaml").read_bytes()
    )
    assert "is there already" in run("cifar10").output
    assert "Did you mean `cifar10`?" in run("cifar").output


def test_a_label_with_one_value_is_said_when_the_run_file_is_made() -> None:
    """Only the check found it; another dataset of the bundle could be learned."""
    Path("one.csv").write_text("text,label\n" + "".join(f"t{n},spam\n" for n in range(4)))
    Path("two.csv").write_text("review,stars\n" + "".join(f"t{n},{n % 2}\n" for n in range(4)))
    Path("bert").mkdir()
    for name, content in tiny_model_files(Path("t"), "bert").items():
        (Path("bert") / name).write_bytes(content)
    said = "warning: `runner check` refuses it: split `train`: all labels in `label` are spam"
    for number, (more, expected) in enumerate(
        {"": True, "  two: {path: two.csv, convert: csv}\n": False}.items()
    ):
        Path(f"{number}.yaml").write_text(
            f"format: 1\nname: m\nassets:\n  one: {{path: one.csv, convert: csv}}\n{more}"
            "  bert: {path: bert}\n"
        )
        fetch = ["fetch", f"{number}.yaml", "-o", str(number), "--no-offline-check"]
        assert CliRunner().invoke(stage, fetch).exit_code == 0
        done = init("text-classification", "--bundle", str(number), "-o", f"r{number}.yaml")
        assert done.exit_code == 0 and (said in done.output) == expected, done.output
        assert ("dataset two (also: one)" in done.output) != expected
