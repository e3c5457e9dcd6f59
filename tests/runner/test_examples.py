"""`runner init` writes a run file that `runner check` accepts, from what is in the bundle."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from runner.cli import main
from runner.config.run_config import RunConfig
from runner.inputs import SplitInput, resolve
from runner.job.example_columns import choose
from runner.job.examples import EXAMPLES
from stage.cli import main as stage
from tests.remedies.obeyed import in_it, obeys
from tests.support.staging import run_as, run_here

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


def test_check_has_no_word_on_examples_of_another_site(bundle: Path) -> None:
    """`init` wrote a partition, modules and a batch, and `check` warned of each."""
    assert init("masked-lm", "--bundle", bundle, "-o", "mine.yaml").exit_code == 0
    text = Path("mine.yaml").read_text()
    assert "  # partition: gpu   # an example" in text and "# modules: [" in text
    done = CliRunner().invoke(
        main, ["check", "mine.yaml", "--bundle", str(bundle), "--processes", "1"]
    )
    assert done.exit_code == 0, done.output
    assert done.output.count("warning:") <= 1 and "nothing found that would fail" in done.output


@pytest.fixture(scope="session")
def own_bundle(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Path:
    """A bundle of a person's own files, from `stage init PATH...`. Treat it as read-only."""
    folder = tmp_path_factory.mktemp("own")
    models = {
        "gpt2": ("tiny-gpt2", ()),  # its name is the beginning of the example's
        "bare": ("tiny-gpt2", ("model.safetensors",)),
        "mute": ("tiny-gpt2", ("tokenizer.json", "tokenizer_config.json")),
        "bert": ("tiny-bert", ()),
    }
    for name, (asset, left) in models.items():
        source = bundle / "data/models" / asset
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns(*left))
    rows = "".join(f"sentence number {n},{KINDS[n % 40]}\n" for n in range(200))
    (folder / "reviews.csv").write_text(f"text,kind\n{rows}")
    for file, names in {
        "gpt2": ("gpt2", "mute"),
        "bare": ("bare", "mute"),
        "mute": ("mute",),
        "bert": ("bert",),
    }.items():
        for words in (
            ("init", "reviews.csv", *names, "-o", f"{file}.yaml"),
            ("fetch", f"{file}.yaml", "-o", f"{file}-bundle"),
        ):
            assert run_as(words, folder, {"HOME": str(folder)}).returncode == 0
    return folder


@pytest.mark.parametrize(
    ("models", "task"),
    [
        ("gpt2", "causal-lm"),
        ("bare", "causal-lm"),
        ("bert", "text-classification"),
    ],
)
@obeys("runner/job/check.py", "Below `dataset:` write: validation: 10%")
def test_what_init_writes_for_files_of_ones_own_passes_check(
    models: str, task: str, own_bundle: Path
) -> None:
    """A GPT-2 of 64 positions got `sequence_length: 1024`; one without weights, `pretrained`."""
    where = own_bundle / f"{models}-bundle"
    done = init(task, "--bundle", where, "-o", "mine.yaml")
    assert done.exit_code == 0 and f"model {models}: " in done.output, done.output
    options = ["mine.yaml", "--bundle", str(where), "--processes", "1"]
    done = CliRunner().invoke(main, ["check", *options], prog_name="runner")
    assert done.exit_code == 0 and "nothing is held out" not in done.output, done.output
    text = Path("mine.yaml").read_text()
    assert "\n  validation: 10% " in text
    Path("mine.yaml").write_text(text.replace("  validation: 10% ", "  validation: null "))
    blind = CliRunner().invoke(main, ["check", *options], prog_name="runner").output
    assert blind.count("note: nothing is held out") == 1
    assert in_it(blind, "(?<=write: )validation: 10%") + " " in text


@pytest.mark.parametrize(
    ("models", "task", "why"),
    [
        ("bert", "causal-lm", "bert (bert: an encoder). Tasks that they fit: masked-lm, text-"),
        ("bert", "instruction", "bert (bert: an encoder)"),
        ("mute", "causal-lm", "mute (gpt2: no tokenizer). Or stage another one"),
        ("gpt2", "masked-lm", "gpt2 (gpt2), mute (gpt2)"),
    ],
)
def test_a_model_that_check_would_refuse_is_not_offered(
    models: str, task: str, why: str, own_bundle: Path
) -> None:
    """Of a BERT alone it said "the only one that fits the task" causal-lm."""
    done = init(task, "--bundle", own_bundle / f"{models}-bundle", "-o", "mine.yaml")
    assert done.exit_code == 2 and why in done.output, done.output
    assert not Path("mine.yaml").exists()


def test_without_a_task_the_tasks_are_on_one_line() -> None:
    """It printed a literal `\\t` before each of them."""
    done = init()
    assert done.exit_code == 2 and "Choose from: masked-lm, causal-lm," in done.output
    assert "\\t" not in done.output


def test_other_assets_that_fit_are_named_in_comments(bundle: Path) -> None:
    assert init("masked-lm", "--bundle", bundle).exit_code == 0
    text = Path("masked-lm.yaml").read_text()
    assert "also: steady-bert, tiny-bert" in text and "asset: numbers   # also: reference" in text


@pytest.mark.parametrize("task", EXAMPLES)
def test_each_task_begins_as_its_example(task: str, twins_bundle: Path) -> None:
    """The twins have the assets of all examples, so the examples' own settings stay."""
    done = init(task, "--bundle", twins_bundle)
    assert done.exit_code == 0, done.output
    config = RunConfig.load(Path(f"{task}.yaml"))
    resolve(config, twins_bundle)
    example = RunConfig.load(ROOT / "runs" / EXAMPLES[task])
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
    chosen, _others = choose("text-classification", split)
    assert (chosen["text"], chosen["label"]) == found


@pytest.mark.parametrize("task", EXAMPLES)
def test_without_a_bundle_the_file_is_the_example(task: str) -> None:
    done = init(task)
    assert done.exit_code == 0 and f"runs/{EXAMPLES[task]}" in done.output
    config = RunConfig.load(Path(f"{task}.yaml"))
    example = RunConfig.load(ROOT / "runs" / EXAMPLES[task])
    assert (config.model, config.dataset) == (example.model, example.dataset)


def test_a_file_that_is_there_is_never_overwritten() -> None:
    Path("masked-lm.yaml").write_text("mine\n")
    done = init("masked-lm")
    assert done.exit_code == 2 and "is there already" in done.output
    assert Path("masked-lm.yaml").read_text() == "mine\n"


@obeys("runner/job/examples.py", "Its models: {}. Tasks that they fit", "Its datasets: {}; `stage")
def test_what_a_bundle_fits_and_what_has_columns_is_named_and_can_be_taken(
    bundle: Path, own_bundle: Path
) -> None:
    here = own_bundle / "bert-bundle"
    said = " ".join(init("causal-lm", "--bundle", here, "-o", "x.yaml").output.split())
    tasks = in_it(said, r"(?<=Tasks that they fit: )[^.]*").split(", ")
    for task in tasks:
        done = init(task, "--bundle", here, "-o", f"{task}.yaml")
        wanting = done.exit_code == 2 and "no dataset in this bundle has columns" in done.output
        assert done.exit_code == 0 or wanting, done.output
    done = init("token-classification", "--bundle", here, "-o", "y.yaml")
    assert done.exit_code == 2 and "reviews" in in_it(done.output, r"Its datasets: [^;]*")
    show = shlex.split(in_it(" ".join(done.output.split()), r"stage show [^`]*"))
    assert "kind" in run_here(*show[1:]).output


@pytest.mark.parametrize(("package", "folder"), [("runner", "runs"), ("stage", "manifests")])
def test_every_example_is_in_its_package(package: str, folder: str) -> None:
    shown = {path.name: path.read_bytes() for path in (ROOT / folder).glob("*.yaml")}
    packed = {path.name: path.read_bytes() for path in (ROOT / package / "examples").glob("*.yaml")}
    assert packed == shown and packed


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


def test_the_environments_that_manifests_name_are_there() -> None:
    for path in (ROOT / "manifests").glob("*.yaml"):
        for found in re.findall(r"\.\./envs/[\w./-]+\.yml", path.read_text(encoding="utf-8")):
            assert (path.parent / found).is_file(), f"{path}: {found}"


def test_the_manifest_of_the_bundle_is_named_where_it_is_found(bundle: Path) -> None:
    """`runner submit --to` fetches from it."""
    Path("manifests").mkdir()
    Path("runs").mkdir()
    Path("manifests/mine.yaml").touch()
    Path("here").symlink_to(bundle)
    Path("runs/clusters.yaml").write_text("far: {host: login, folder: work}\n")
    done = init("masked-lm", "--bundle", "here", "-o", "runs/none.yaml")
    assert done.output.endswith("next: runner check runs/none.yaml --bundle here\n"), done.output
    assert RunConfig.load(Path("runs/none.yaml")).manifest is None
    Path("manifests/mine.lock").write_bytes((bundle / "stage.lock").read_bytes())
    done = init("masked-lm", "--bundle", "here", "-o", "runs/one.yaml")
    assert done.output.endswith("next: runner submit runs/one.yaml --bundle here --to far\n")
    assert RunConfig.load(Path("runs/one.yaml")).manifest == "../manifests/mine.yaml"
