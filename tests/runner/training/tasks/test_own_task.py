"""A task of one's own, as the how-to page has it: it trains, but only with permission."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from runner.config.run_config import RunConfig
from runner.data.own.code import own_task
from runner.data.own.look import METHODS, check_code
from runner.data.own.store import OwnStore
from runner.data.prepare import prepare
from runner.data.recipe import data_key, recipes
from runner.errors import DamageError, PolicyError, StageError, UsageError
from runner.inputs import CodeInput, resolve
from runner.launch.train import Run, prepare_in_sandbox
from tests.runner.conftest import Cluster, in_ranks, metrics

RUN: dict[str, Any] = {
    "task": "my_tasks.WordsAndPairs",
    "code": {"asset": "my-tasks", "allow": True},
    "model": {"asset": "still-bert"},
    "dataset": {"asset": "glue-mrpc"},
    "sequence_length": 32,
    "steps": 6,
    "evaluation": {"every": 3},
    "checkpoint": {"every": 3, "keep": 5},
    "schedule": {"name": "constant", "warmup": 0},
    "optimizer": {"lr": 0.003, "weight_decay": 0.1},
    "engine": {"name": "ddp"},
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, twins_bundle: Path) -> Cluster:
    """`whole` made its six steps at once; `parts` three, and three more."""
    cluster = Cluster(tmp_path_factory.mktemp("own"), twins_bundle)
    runs = [
        cluster.write("whole", **RUN),
        cluster.write("parts.first", **RUN | {"steps": 3}),
        cluster.write("parts", **RUN),
    ]
    done = cluster.run("prepare", str(runs[0]))  # behind the wall, as users do it
    assert done.returncode == 0, done.stderr
    in_ranks(cluster, 2, *runs)
    return cluster


def test_the_task_of_the_page_learns_on_two_ranks_and_measures_each_loss(own: Cluster) -> None:
    folder = own.output("whole")
    losses = [loss for _, loss in metrics(folder)]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    last = {
        k: metrics(folder, f"validation_{k}")[-1][1] for k in ("loss", "words", "pairs", "right")
    }
    assert last["loss"] == pytest.approx(last["words"] + last["pairs"], rel=1e-6)
    assert 0 <= last["right"] <= 1
    assert (last["right"] * 40) == pytest.approx(round(last["right"] * 40), abs=1e-6), "of 40 rows"


def test_it_resumes_exactly(own: Cluster) -> None:
    for key in ("loss", "grad_norm", "validation_loss", "validation_right"):
        whole = dict(metrics(own.output("whole"), key))
        assert dict(metrics(own.output("parts"), key)) == whole, key
    model = "model/model.safetensors"
    whole_, parts = (own.output(name) / model for name in ("whole", "parts"))
    assert whole_.read_bytes() == parts.read_bytes()


def test_the_export_loads_in_plain_transformers(own: Cluster) -> None:
    from transformers import AutoTokenizer, BertForPreTraining

    folder = own.output("whole") / "model"
    _, info = BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    AutoTokenizer.from_pretrained(folder)
    assert "my_tasks.WordsAndPairs" in (folder / "README.md").read_text()


def test_losses_are_those_of_transformers_trainer(own: Cluster, tmp_path: Path) -> None:
    """With the same class, on the same batches, in fp32 within 1e-4."""
    import torch
    from transformers import Trainer, TrainingArguments

    from runner.training.components.batches import Order, sample_rng

    config = RunConfig.load(own.folder / "whole.yaml")
    inputs = resolve(config, own.bundle)
    (recipe,) = recipes(config, inputs, 32)["train"]
    store, order = OwnStore.open(own.folder / "output/.stores" / recipe.key), Order(200, 42)
    assert inputs.code is not None
    theirs = own_task(inputs.code, inputs.model, 32)
    batches: Any = []
    for step in range(4):
        samples = order.step(step, 8, 0, 1, 8)[0]
        random = [sample_rng(42, sample) for sample in samples]
        batches.append(theirs.batch(store.rows([s.index for s in samples]), random))

    class WithOwnLoss(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(batches)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return theirs.loss(model, dict(inputs))["loss"].mean()

    auto, _ = theirs.model()
    torch.manual_seed(42)
    model = auto.from_pretrained(inputs.model.path, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=1, learning_rate=0.003,
        weight_decay=0.1, optim="adamw_torch", lr_scheduler_type="constant", max_grad_norm=1.0,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = WithOwnLoss(
        model=model, args=arguments, train_dataset=batches, data_collator=lambda items: items[0]
    )
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    ours = [loss for _, loss in metrics(own.output("whole"))]
    assert ours[:4] == pytest.approx(expected, abs=1e-4)


def test_a_sample_that_fills_up_a_batch_of_an_evaluation_counts_nowhere(own: Cluster) -> None:
    import torch

    from runner.training.components.batches import Sample
    from runner.training.tasks import task_named

    config = RunConfig.load(own.folder / "whole.yaml")
    inputs = resolve(config, own.bundle)
    (recipe,) = recipes(config, inputs, 32)["train"]
    store = OwnStore.open(own.folder / "output/.stores" / recipe.key)
    task = task_named(config.task, inputs.code)(config, inputs.model, store.facts)
    task.module.eval()
    samples = [Sample(n, -1) for n in range(3)]
    batch = task.collate(store.rows([0, 1, 2]), samples)
    assert task.num_predictions(batch) == 3
    batch["labels"][2] = -100
    assert task.num_predictions(batch) == 2
    with torch.no_grad():
        three = task.module(**batch)
        each = [
            task.module(**task.collate(store.rows([n]), [sample]))
            for n, sample in enumerate(samples[:2])
        ]
    torch.testing.assert_close(three, sum(each), rtol=1e-5, atol=1e-5)


# What is refused, and what it says.

GOOD = """\
class Mine:
    def __init__(self, tokenizer, length):
        pass
    def model(self):
        pass
    def sample(self, row):
        return {"n": 1}
    def batch(self, samples, random):
        pass
    def loss(self, model, batch):
        pass
"""


def coded(folder: Path, text: str, *, allowed: bool = True, task: str = "mine.Mine") -> CodeInput:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(text)
    digests = {"mine.py": sha256(text.encode()).hexdigest()}
    return CodeInput("mine", folder, digests, task, allowed)


def test_code_without_permission_is_imported_nowhere(tmp_path: Path, own: Cluster) -> None:
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\n{GOOD}"
    code = coded(tmp_path / "code", text, allowed=False)
    model = resolve(RunConfig.load(own.folder / "whole.yaml"), own.bundle).model
    with pytest.raises(PolicyError, match="the run file does not allow it to run") as caught:
        check_code(code, runs_here=True)
    assert "code: {asset: mine, allow: true}" in caught.value.remedy
    with pytest.raises(PolicyError):
        own_task(code, model, 32)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "command",
    ["check", *(pytest.param(c, marks=pytest.mark.slow) for c in ("prepare", "rehearse", "train"))],
)
def test_every_command_refuses_it_with_exit_code_3(own: Cluster, command: str) -> None:
    path = own.write("closed", **RUN | {"code": {"asset": "my-tasks"}})
    said = own.refused(command, str(path), code=3)
    assert "Read it; then write code: {asset: my-tasks, allow: true}" in " ".join(said.split())


def test_check_passes_and_says_whose_code_runs(own: Cluster) -> None:
    done = own.run("check", str(own.folder / "whole.yaml"), "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert "code of the asset `my-tasks`, allowed by code.allow" in " ".join(done.stdout.split())


MISTAKES = {
    "class Other:\n    pass\n": "mine.py: there is no class `Mine`",
    GOOD.replace("def loss", "def los"): "Did you mean `los`",
    GOOD.replace("self, row", "self"): "`sample(self)` is called as `sample(self, row)`",
    GOOD.replace("pass", "pa ss", 1): "mine.py:3: not Python 3",
    f"import seqevall\n{GOOD}": "mine.py:1: it imports `seqevall`, which is not installed",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_what_is_missing_is_said_without_running_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_code(coded(tmp_path, text), runs_here=True)
    assert MISTAKES[text] in f"{caught.value.message} {caught.value.remedy}"


def test_a_class_that_inherits_its_methods_passes(tmp_path: Path) -> None:
    text = GOOD.replace("class Mine", "class Base") + "class Mine(Base):\n    pass\n"
    check_code(coded(tmp_path, text), runs_here=True)


def test_only_the_bytes_of_the_lock_are_run(tmp_path: Path, own: Cluster) -> None:
    code = coded(tmp_path, GOOD)
    (tmp_path / "mine.py").write_text(GOOD + "# changed\n")
    model = resolve(RunConfig.load(own.folder / "whole.yaml"), own.bundle).model
    with pytest.raises(DamageError, match="its bytes are not those that were fetched"):
        own_task(replace(code, task="mine.Mine"), model, 32)


def test_other_code_is_other_data(own: Cluster, tmp_path: Path) -> None:
    """So its samples are made again, and a run does not resume with it."""
    config = RunConfig.load(own.folder / "whole.yaml")
    inputs = resolve(config, own.bundle)
    keys = {
        data_key(recipes(config, replace(inputs, code=code), 32)["train"])
        for code in (inputs.code, coded(tmp_path, GOOD))
    }
    assert len(keys) == 2


def with_code(own: Cluster, folder: Path, text: str) -> Run:
    """The run with other code in place of the page's."""
    run = Run.load(own.folder / "whole.yaml", own.bundle, folder / "output", ())
    return replace(run, inputs=replace(run.inputs, code=coded(folder / "code", text)))


@pytest.fixture
def prepared(own: Cluster, tmp_path: Path) -> Iterator[Callable[[str], OwnStore]]:
    """Prepares data with other code, in this process."""

    def prepare_with(text: str) -> OwnStore:
        run = with_code(own, tmp_path, text)
        (recipe,) = recipes(run.config, run.inputs, 32)["train"]
        store = prepare(recipe, tmp_path / "stores", print)
        assert isinstance(store, OwnStore)
        return store

    before = list(sys.meta_path)
    yield prepare_with
    sys.meta_path[:] = before
    sys.modules.pop("mine", None)


def test_a_sample_that_reaches_for_the_network_is_stopped(own: Cluster, tmp_path: Path) -> None:
    text = "import socket\n" + GOOD.replace(
        "return {", "socket.create_connection(('192.0.2.1', 80), 1)\n        return {"
    )
    with pytest.raises(StageError, match=r"mine\.py:8: PermissionError: .*in `sample`"):
        prepare_in_sandbox(with_code(own, tmp_path, text))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("{'n': 'text'}", "row 0: what `sample` returned is no sample: `n` is str: text"),
        ("{'n': [[1], [2]]}", "`n` is list"),
        ("{'n': row['label'] or [1]}", "a list in one sample and a number in another"),
        ("{'n': 1 if row['label'] else 0.5}", "`n` has fractions; in the first one it had none"),
        ("{str(row['label']): 1}", "its names are"),
        ("None", "nothing to train on: the task left out 200 rows"),
        ("{'n': 1 / 0}", "mine.py:7: ZeroDivisionError: division by zero (in `sample`, at split"),
    ],
)
def test_what_is_no_sample_is_refused_with_its_row(
    prepared: Callable[[str], Any], returned: str, words: str
) -> None:
    with pytest.raises(StageError) as caught:
        prepared(GOOD.replace('{"n": 1}', returned))
    assert words in " ".join(caught.value.message.split())


def test_numbers_and_lists_come_back_as_they_were(prepared: Callable[[str], Any]) -> None:
    text = GOOD.replace(
        '{"n": 1}', "{'n': row['label'], 'x': 0.5, 'ids': list(range(row['label'] + 1)), 'e': []}"
    )
    store = prepared(text)
    for number in range(20):
        row = store.row(number)
        assert row["ids"].tolist() == list(range(row["n"] + 1))
        assert (row["x"], row["e"].tolist()) == (0.5, [])
    assert store.lengths([0, 1]) == [len(store.row(n)["ids"]) for n in (0, 1)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"code": None}, "no asset has its code"),
        ({"task": "masked-lm"}, "runs no code of yours"),
        ({"label_smoothing": 0.1}, "is in its own code"),
        ({"task": "masked-ml", "code": None}, "Did you mean `masked-lm`"),
        ({"dataset": {"asset": "glue-mrpc", "text": "a"}}, "gets all columns"),
    ],
)
def test_keys_that_do_not_go_together_are_named_with_their_line(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = Cluster(tmp_path, tmp_path).write(**RUN | changes)
    with pytest.raises(UsageError, match=r"tiny\.yaml:\d+") as caught:
        RunConfig.load(path)
    assert words in f"{caught.value.message} {caught.value.remedy}"


def test_a_file_that_the_asset_lacks_is_named_with_the_nearest(own: Cluster) -> None:
    config = RunConfig.load(own.write("typo", **RUN | {"task": "my_task.WordsAndPairs"}))
    with pytest.raises(UsageError, match=r"has no my_task\.py") as caught:
        resolve(config, own.bundle)
    assert "Did you mean `my_tasks`" in caught.value.remedy


def test_the_page_names_the_five_methods() -> None:
    page = Path(__file__).parents[4] / "docs/howto/training/own-task.md"
    text = page.read_text(encoding="utf-8")
    assert all(f"| `{name}{arguments}` |" in text for name, arguments in METHODS.items())
