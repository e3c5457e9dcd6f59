"""Every engine learns the same and resumes exactly on any number of ranks, with real ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runner.conftest import Cluster, in_ranks, metrics

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp-full": {"name": "fsdp"},
    "fsdp-grad-op": {"name": "fsdp", "sharding": "grad_op", "wrap": {"min_params": 10_000}},
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
}
OFFLOADED = {f"zero{stage}-offload": {"zero": stage, "offload": "cpu"} for stage in (2, 3)}
STEPS = 12
# Engine by engine what a run goes through: on 2 ranks past step 4, on 1 to step 8, on 4 to step 12.
JOURNEYS = {
    "sharded-whole-sharded": ("fsdp-full", "ddp", "fsdp-grad-op"),
    "zero-2-1-2": ("zero2", "zero1", "zero2"),
    "zero-3": ("zero3", "zero3", "zero3"),
}


def write(
    cluster: Cluster, name: str, engine: dict[str, Any], steps: int, **checkpoint: Any
) -> Path:
    """A run file; all these runs see the same data and have no dropout, which would differ from
    rank to rank.
    """
    return cluster.write(
        name,
        model={"asset": "steady-bert"},
        dataset={"asset": "reference", "limit": {"train": 300}, "validation": None},
        # A calm run: where the loss jumps about, so do roundings.
        optimizer={"lr": 1.0e-3, "weight_decay": 1.0},
        schedule={"name": "constant", "warmup": 0},
        checkpoint={"every": 1000, "keep": 1, **checkpoint},
        engine=engine,
        steps=steps,
    )


@pytest.fixture(scope="module")
def on_two(shared_cluster: Cluster) -> Cluster:
    """12 steps with every engine, and the beginnings of all journeys, on two ranks."""
    runs = [write(shared_cluster, name, engine, STEPS) for name, engine in ENGINES.items()]
    runs += [write(shared_cluster, name, engine, 10) for name, engine in OFFLOADED.items()]
    runs += [
        write(shared_cluster, f"{name}.2", ENGINES[begin], 5, every=4, keep=2)
        for name, (begin, _, _) in JOURNEYS.items()
    ]
    shared_cluster.prepare(runs[0])
    in_ranks(shared_cluster, 2, *runs)
    return shared_cluster


def assert_like_ddp(cluster: Cluster, name: str, steps: int, difference: float) -> None:
    for key in ("loss", "grad_norm"):
        expected, found = (
            metrics(cluster.output("ddp"), key)[:steps],
            metrics(cluster.output(name), key),
        )
        assert [step for step, _ in found] == list(range(1, steps + 1))
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in expected], abs=difference
        ), key
    assert found[-1][1] > 0


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "ddp"])
def test_every_engine_learns_what_ddp_learns(on_two: Cluster, engine: str) -> None:
    assert_like_ddp(on_two, engine, STEPS, 1e-3)


@pytest.mark.parametrize("engine", OFFLOADED)
def test_what_is_offloaded_learns_the_same(on_two: Cluster, engine: str) -> None:
    assert_like_ddp(on_two, engine, 10, 1e-3)


@pytest.fixture(scope="module")
def travelled(on_two: Cluster) -> Cluster:
    """All journeys to their ends, from the checkpoint before the end."""
    for name in JOURNEYS:
        shutil.rmtree(on_two.output(name) / "checkpoints" / "step-5")
    for place, (ranks, steps) in enumerate([(1, 8), (4, 12)], start=1):
        runs = [
            write(on_two, f"{n}.{ranks}", ENGINES[engines[place]], steps)
            for n, engines in JOURNEYS.items()
        ]
        in_ranks(on_two, ranks, *runs)
    return on_two


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_run_goes_on_exactly_on_any_number_of_ranks(travelled: Cluster, journey: str) -> None:
    assert_like_ddp(travelled, journey, 12, 1e-5)


@pytest.mark.slow  # half a minute: the order itself has property tests in test_batches
def test_several_packed_datasets_go_on_in_their_order_on_any_number_of_ranks(
    tmp_path: Path, twins_bundle: Path
) -> None:
    cluster = Cluster(tmp_path, twins_bundle)

    def instructed(name: str, steps: int) -> Path:
        return cluster.write(
            name, task="instruction", model={"asset": "tiny-chat"}, dataset=None,
            sequence_length=128, steps=steps,
            datasets=[
                {"asset": "prompts", "prompt": "User", "response": "Prompt", "weight": 1.5},
                {"asset": "chats", "messages": "messages", "weight": 0.5, "validation": None},
            ],
            packing={"documents": "separate"}, batch={"global": 32, "micro": 8},
            engine={"name": "fsdp"}, optimizer={"lr": 0.001},
            schedule={"name": "constant", "warmup": 0}, evaluation={"every": 1000},
            checkpoint={"every": 1000, "keep": 1},
        )  # fmt: skip

    undisturbed = instructed("undisturbed", 18)
    done = cluster.run("prepare", "undisturbed.yaml")
    assert done.returncode == 0, done.stderr
    in_ranks(cluster, 2, undisturbed, instructed("journey.2", 6))
    in_ranks(cluster, 1, instructed("journey.1", 12))
    in_ranks(cluster, 4, instructed("journey.4", 18))
    found, expected = cluster.output("journey"), cluster.output("undisturbed")
    # More than an epoch, and step by step the very same tokens.
    assert metrics(expected, "epoch")[-1][1] > 2
    assert metrics(found, "tokens") == metrics(expected, "tokens")
    assert len({count for _, count in metrics(found, "tokens")}) > 5
    assert [loss for _, loss in metrics(found)] == pytest.approx(
        [loss for _, loss in metrics(expected)], abs=1e-5
    )


@pytest.mark.slow  # saving/test_back_into_a_bundle.py goes on from what a run exported
def test_the_command_goes_on_from_what_another_engine_exported(on_two: Cluster) -> None:
    on_two.write(
        "second",
        model={"asset": "steady-bert", "init": "output/zero3/model"},
        engine={"name": "fsdp"},
        activation_checkpointing=True,
        precision="bf16",
        steps=2,
        schedule={"name": "wsd", "warmup": 0, "decay": 1},
        checkpoint={"every": "1 h", "keep": 1},
    )
    folder = on_two.trained("second")
    before = [loss for _, loss in metrics(on_two.output("ddp"))]
    after = [loss for _, loss in metrics(folder)]
    # In bf16, whose rounding is the processor's; 0.5 after 12 steps, and a batch differs by 0.2.
    assert after[0] < before[0] - 0.3
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-2"}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_deepspeed_rank_without_compile_imports_no_compiler(tmp_path: Path, stage: int) -> None:
    program = f"""
import os, sys, torch
from runner.training.engines.deepspeed import _import_joined
os.environ |= {{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}}
torch.distributed.init_process_group(
    "gloo", init_method="file://{tmp_path}/meeting", rank=0, world_size=1
)
model = torch.nn.Linear(4, 4)
_import_joined(torch.device("cpu")).initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), dist_init_required=False,
    config={{
        "train_batch_size": 1, "zero_optimization": {{"stage": {stage}}},
        "zero_allow_untested_optimizer": True,
    }},
)
sys.exit("torch._inductor.compile_fx" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
