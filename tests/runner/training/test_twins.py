"""The losses of transformers' Trainer, and pictures on two real ranks: a ResNet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments, pipeline

from runner.config.run_config import RunConfig
from runner.data.prepare import store_path
from runner.data.recipe import recipes
from runner.data.store import Store, Stores
from runner.inputs import resolve
from runner.tasks import task_named
from runner.tasks.image_classification import Pictures
from runner.training.components.batches import Order, WeightedDataset
from tests.runner.conftest import Cluster, in_ranks, metrics
from tests.support.training import twins


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory, twins_bundle: Path) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"), twins_bundle)


QUICK: dict[str, Any] = {
    "checkpoint": {"every": 100, "keep": 1},
    "schedule": {"name": "constant", "warmup": 0},
}


def opened(name: str, cluster: Cluster, length: int) -> tuple[Any, Order]:
    """The training data of a run, and its order."""
    config = RunConfig.load(cluster.folder / f"{name}.yaml")
    wanted = recipes(config, resolve(config, cluster.bundle), length)["train"]
    stores = [
        Store(store_path(recipe, cluster.output(name).parent / ".stores")) for recipe in wanted
    ]
    weights = [recipe.dataset.weight for recipe in wanted]
    parts = [
        WeightedDataset(len(store), weight) for store, weight in zip(stores, weights, strict=True)
    ]
    return Stores(stores), Order(parts, config.seed)


def accuracy(run: Path) -> float:
    """The accuracy of the exported model, as transformers loads it."""
    model = AutoModelForImageClassification.from_pretrained(run / "model")
    assert [model.config.id2label[n] for n in range(10)] == list(twins.CLASSES)
    stores = map(Store, (run.parent / ".stores").glob("*.arrow"))
    store = Stores([next(store for store in stores if len(store) == 40)])
    pictures = store.rows(range(40), Pictures.of)
    with torch.no_grad():
        scaled = (torch.from_numpy(pictures.pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        right = (
            (model(pixel_values=scaled).logits.argmax(-1) == torch.from_numpy(pictures.labels))
            .float()
            .mean()
        )
    return float(right.item())


@pytest.fixture(scope="module")
def convolved(shared_cluster: Cluster) -> Cluster:
    """A ResNet from a staged config, with every engine; all but DDP are stopped and resumed."""

    def run(name: str, engine: dict[str, Any], steps: int) -> Path:
        return shared_cluster.write(
            name, task="image-classification", model={"asset": "tiny-resnet", "init": "scratch"},
            sequence_length=None,
            dataset={"asset": "cifar-10", "validation": "test"}, batch={"global": 16, "micro": 4},
            steps=steps, optimizer={"lr": 0.003}, engine=engine, **QUICK,
        )  # fmt: skip

    runs = [run("resnet", {"name": "ddp"}, 24)]
    for name, engine in RESNETS.items():
        runs += [run(f"{name}.half", engine, 12), run(f"{name}.whole", engine, 24)]
    shared_cluster.prepare(runs[0])
    in_ranks(shared_cluster, 2, *runs)
    return shared_cluster


RESNETS: dict[str, dict[str, Any]] = {
    "resnet-fsdp": {"name": "fsdp"},
    "resnet-zero2": {"zero": 2},
}


@pytest.mark.parametrize("name", RESNETS)
def test_batch_norm_is_evaluated_alike_with_every_engine_and_after_a_stop(
    convolved: Cluster, name: str
) -> None:
    """Running means and variances are those of all ranks: not rank 0's, nor each rank's own."""
    for key in ("loss", "validation_loss"):
        expected = dict(metrics(convolved.output("resnet"), key))
        found = dict(
            metrics(convolved.output(name), key)
        )  # has one more evaluation, where it stopped
        assert {step: found[step] for step in expected} == pytest.approx(expected, abs=1e-4), key


@pytest.mark.parametrize("name", ["resnet", *RESNETS])
def test_the_resnet_that_is_exported_is_the_one_that_was_evaluated(
    convolved: Cluster, name: str
) -> None:
    folder = convolved.output(name)
    assert accuracy(folder) == pytest.approx(
        metrics(folder, "validation_accuracy")[-1][1], abs=1e-6
    )


CLASSIFIED: dict[str, dict[str, Any]] = {
    "text-classification": {"asset": "glue-mrpc", "text": "sentence1", "pair": "sentence2"},
    "token-classification": {"asset": "conll2003"},
}


def test_the_exported_classifiers_load_in_transformers_with_their_classes(
    alone: Cluster,
) -> None:
    def load(task: str) -> Any:
        return pipeline(task, model=str(alone.output(f"parity-{task}") / "model"), device="cpu")

    texts, words = (load(task) for task in CLASSIFIED)
    asked = {"text": "It is a truth", "text_pair": "yes, yes, yes!"}
    assert texts(asked)["label"] == "equivalent"
    found = {token["word"]: token["entity"] for token in words("Jane went to Rosings .")}
    assert set(found.values()) == {"B-PER", "B-LOC"}


PARITY = {
    "masked-lm": ("still-bert", "AutoModelForMaskedLM"),
    "causal-lm": ("tiny-chat", "AutoModelForCausalLM"),
    "lora": ("tiny-chat", "AutoModelForCausalLM"),
    "text-classification": ("still-bert", "AutoModelForSequenceClassification"),
    "token-classification": ("still-bert", "AutoModelForTokenClassification"),
}
RATE = {"masked-lm": 0.001, "causal-lm": 0.001}
# Of rank 8, and without dropout, which would be drawn in another order.
LORA = {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def alone(shared_cluster: Cluster) -> Cluster:
    """The tasks of `PARITY` on one rank."""
    runs = [
        shared_cluster.write(
            f"parity-{task}", model={"asset": asset}, steps=20,
            **({"task": "causal-lm", "lora": LORA} if task == "lora" else {"task": task}),
            batch={"global": 8, "micro": 8},
            dataset={"asset": "reference", "limit": {"train": 300}, "validation": None}
            | CLASSIFIED.get(task, {}),
            optimizer={"lr": RATE.get(task, 0.003), "weight_decay": 0.1}, **QUICK,
        )
        for task, (asset, _) in PARITY.items()
    ]  # fmt: skip
    shared_cluster.prepare(*runs)
    in_ranks(shared_cluster, 1, *runs)
    return shared_cluster


@pytest.mark.parametrize("task", PARITY)
def test_losses_are_those_of_transformers_trainer(
    alone: Cluster, task: str, tmp_path: Path
) -> None:
    """In fp32 on the same batches, within a millionth: loss, optimizer, decay and clipping."""
    _, auto = PARITY[task]
    steps = 6 if task in CLASSIFIED else 20
    expected = trainer_losses(f"parity-{task}", alone, auto, tmp_path, steps)
    assert len(expected) == steps
    ours = [loss for _, loss in metrics(alone.output(f"parity-{task}"))]
    assert ours[:steps] == pytest.approx(expected, rel=1e-6)


def trainer_losses(
    name: str, cluster: Cluster, auto: str, scratch: Path, steps: int
) -> list[float]:
    """The losses of transformers' Trainer, not rounded, with the first batches of a run."""
    import peft

    config = RunConfig.load(cluster.folder / f"{name}.yaml")
    model = resolve(config, cluster.bundle).model
    store, order = opened(name, cluster, 32)
    task = task_named(config.task).objective(config, model, store.facts)
    batches = []
    for step in range(steps):
        (part,) = order.step(step, 8, 0, 1, 8)
        batch = task.collate(store.rows([sample.index for sample in part], task.rows), part)
        batches.append({name: value for name, value in batch.items() if name != "guessed"})

    losses = list[float]()

    class InOrder(Trainer):
        def training_step(self, *arguments: Any, **more: Any) -> Any:
            loss = super().training_step(*arguments, **more)
            losses.append(loss.item())
            return loss

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(batches)

    arguments = TrainingArguments(
        output_dir=str(scratch), max_steps=steps, per_device_train_batch_size=1,
        learning_rate=config.optimizer.lr,
        weight_decay=0.1, optim="adamw_torch",
        lr_scheduler_type="constant", max_grad_norm=1.0, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    labels = {"num_labels": task.model.config.num_labels} if name[7:] in CLASSIFIED else {}
    theirs = getattr(transformers, auto).from_pretrained(model.path, dtype=torch.float32, **labels)
    if config.lora is not None:
        options: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": LORA["targets"]}
        peft.get_peft_model(theirs, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    theirs.load_state_dict(task.model.state_dict())  # a head that is drawn with the run's seed
    data: Any = batches
    trainer = InOrder(
        model=theirs, args=arguments, train_dataset=data, data_collator=lambda items: items[0]
    )
    trainer.train()
    return losses
