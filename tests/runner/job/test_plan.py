"""The arithmetic of a run: what `auto` becomes, and what is refused with the nearest that works."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.job import installed
from runner.job.memory import activation_bytes, state_needed
from runner.job.plan import MicroBound, TrainingPlan, check_batch, check_step, num_steps, with_micro
from runner.job.shapes import Device, ModelShape
from runner.training.components.optimization import Schedule
from tests.support.plans import decide

GIB = 2**30
CPU = Device("cpu", "CPU", 16 * GIB, False, False)
A100 = Device("cuda", "A100", 80 * GIB, True, True)
V100 = Device("cuda", "V100", 32 * GIB, False, True)
P100 = Device("cuda", "P100", 16 * GIB, False, False)
BERT = ModelShape(335_000_000, 512, 1024, 24, 30522)
CHECKPOINTS = "activation_checkpointing=true"


def of_size(billions: float) -> ModelShape:
    return ModelShape(int(billions * 1e9), 4096, 4096, 32, 32000)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "mine.yaml"
    path.write_text(
        "format: 1\ntask: masked-lm\nmodel: {asset: bert}\ndataset: {asset: wikitext}\n"
    )
    return path


def planned(
    run_file: Path, device: Device, world_size: int, *overrides: str, shape: ModelShape = BERT
) -> TrainingPlan:
    return decide(RunConfig.load(run_file, overrides), shape, device, world_size)


def refused(
    run_file: Path, device: Device, world_size: int, *overrides: str, shape: ModelShape = BERT
) -> str:
    with pytest.raises(UsageError) as caught:
        planned(run_file, device, world_size, *overrides, shape=shape)
    return str(caught.value)


def reason(plan: TrainingPlan, key: str) -> str:
    (found,) = [choice.reason for choice in plan.choices if choice.key == key]
    return found


@given(
    total=st.integers(1, 300) | st.just("auto"),
    micro=st.integers(1, 20) | st.just("auto"),
    ranks=st.integers(1, 17),
)
def test_every_batch_either_divides_or_is_refused_with_ones_that_do(
    run_file: Path, total: int | str, micro: int | str, ranks: int
) -> None:
    given_micro = f"batch.micro={micro}"
    try:
        plan = planned(run_file, A100, ranks, f"batch.global={total}", given_micro)
    except UsageError as error:
        totals, _, micros = error.remedy.partition("batch.micro")
        nearest = [int(number) for number in re.findall(r"\d+", totals)]
        assert nearest and isinstance(total, int) and total not in nearest
        for works in nearest:
            check_batch(RunConfig.load(run_file, [f"batch.global={works}", given_micro]), ranks)
        for works in re.findall(r"\d+", micros):
            check_batch(
                RunConfig.load(run_file, [f"batch.global={total}", f"batch.micro={works}"]), ranks
            )
    else:
        assert plan.total == ranks * plan.micro * plan.accumulation
        assert total in ("auto", plan.total) and micro in ("auto", plan.micro)


# Measured on torch's meta device (torch 2.10), in bytes of a sequence; see docs/adr/0016.
@pytest.mark.parametrize(
    ("shape", "length", "overrides", "bytes_each"),
    [
        (ModelShape(110_000_000, 512, 768, 12, 30522), 512, ["engine.name=ddp"], 232e6),
        (ModelShape(110_000_000, 512, 768, 12, 30522), 512, ["precision=fp32"], 357e6),
        (ModelShape(124_000_000, 1024, 768, 12, 50257), 1024, ["engine.zero=2"], 346e6),
        (ModelShape(1_500_000_000, 2048, 2048, 16, 128256), 1024, ["engine.zero=2"], 1869e6),
        (ModelShape(1_500_000_000, 2048, 2048, 16, 128256), 1024, [CHECKPOINTS], 88e6),
        (ModelShape(460_000_000, 2048, 1024, 24, 151936), 1024, ["engine.name=ddp"], 1478e6),
        (ModelShape(86_000_000, None, 768, 12, 0), 197, ["engine.zero=2"], 64e6),
    ],
)
def test_the_guess_is_within_a_factor_of_two_of_what_was_measured(
    run_file: Path, shape: ModelShape, length: int, overrides: list[str], bytes_each: float
) -> None:
    config = RunConfig.load(run_file, ["precision=bf16", *overrides])
    _, each = activation_bytes(config, shape, length, 2)
    assert bytes_each / 2 < each < 2 * bytes_each


@pytest.mark.parametrize(("torch", "works"), [("2.6.0+cu118", False), ("2.7.1", True)])
def test_fsdp_on_cpus_is_refused_where_torch_has_it_for_gpus_only(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, torch: str, works: bool
) -> None:
    monkeypatch.setattr(installed, "version", lambda _: torch)
    config = RunConfig.load(run_file, ["engine={name: fsdp}"])
    installed.check_fsdp(config, "cuda")
    if works:
        installed.check_fsdp(config, "cpu")
    else:
        with pytest.raises(UsageError, match=r"needs torch 2.7 or newer; this is 2.6.0\+cu118"):
            installed.check_fsdp(config, "cpu")


@pytest.mark.parametrize(("device", "precision"), [(V100, "bf16"), (P100, "fp16"), (CPU, "fp16")])
def test_a_precision_the_device_lacks_is_refused(
    run_file: Path, device: Device, precision: str
) -> None:
    said = refused(run_file, device, 1, f"precision={precision}")
    assert f"precision {precision}: the device {device.name} does not have it" in said
    suggested = re.findall(r"bf16|fp16|fp32", said.partition("->")[2])
    assert suggested
    for other in suggested:
        assert planned(run_file, device, 1, f"precision={other}").precision == other


def test_a_model_that_fits_nowhere_says_how_many_devices_it_needs(run_file: Path) -> None:
    tight = replace(A100, host_memory=40 * GIB)  # nothing to offload to
    said = refused(run_file, tight, 8, shape=of_size(70))
    (needed,) = re.findall(r"at least (\d+) devices", said)
    assert planned(run_file, tight, int(needed), shape=of_size(70)).zero == 3
    refused(run_file, tight, int(needed) - 1, shape=of_size(70))


@pytest.mark.parametrize(
    ("engine", "billions", "ranks"),
    [
        (("engine.name=ddp",), 7, 4),
        (("engine.name=ddp", "optimizer.name=adafactor"), 11, 4),
        (("engine.zero=1",), 30, 8),
        (("engine.name=fsdp", "engine.sharding=grad_op"), 60, 8),
        ((), 25, 2),
        ((), 70, 8),
    ],
    ids=[
        "ddp",
        "an optimizer of ddp",
        "a stage too low",
        "grad_op",
        "any stage on two",
        "any stage on eight",
    ],
)
def test_what_does_not_fit_is_refused_with_an_engine_that_does(
    run_file: Path, engine: tuple[str, ...], billions: float, ranks: int
) -> None:
    device = replace(A100, host_memory=400 * GIB)
    said = refused(run_file, device, ranks, *engine, shape=of_size(billions))
    assert "does not fit" in said
    (advised,) = re.findall(r"Set engine: \{(.*?)\}", said)
    settings = [f"engine.{key}={value}" for key, value in re.findall(r"(\w+): (\w+)", advised)]
    plan = planned(run_file, device, ranks, *settings, shape=of_size(billions))
    assert f"zero: {plan.zero}" in advised
    assert (plan.offload == "cpu") == ("offload" in advised)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_never_trains_at_stage_0(run_file: Path, precision: str) -> None:
    plan = planned(run_file, A100, 1, "engine.zero=0", f"precision={precision}")
    assert plan.zero == 1
    assert "stage 0" in reason(plan, "engine.zero")
    assert planned(run_file, A100, 1, "engine.zero=0", "precision=fp32").zero == 0


@pytest.mark.parametrize(
    ("settings", "longest", "layers"),
    [
        (
            {
                "model_type": "bert",
                "hidden_size": 8,
                "num_hidden_layers": 2,
                "max_position_embeddings": 512,
            },
            512,
            2,
        ),
        ({"model_type": "gpt2", "n_embd": 8, "n_layer": 3, "n_positions": 1024}, 1024, 3),
        (
            {
                "model_type": "roberta",
                "hidden_size": 8,
                "num_hidden_layers": 2,
                "max_position_embeddings": 514,
            },
            512,
            2,
        ),
        (
            {
                "text_config": {
                    "hidden_size": 8,
                    "num_hidden_layers": 4,
                    "max_position_embeddings": 2048,
                }
            },
            2048,
            4,
        ),
        ({"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 2}, None, 2),
        ({"dim": 8, "n_layers": 2, "image_size": 224, "patch_size": 16}, 14 * 14 + 1, 2),
    ],
    ids=["bert", "gpt2", "roberta's first two positions", "nested", "no positions", "patches"],
)
def test_a_models_shape_is_read_from_its_config(
    settings: dict[str, object], longest: int | None, layers: int
) -> None:
    words = 0 if "text_config" in settings else 100
    shape = ModelShape(0, longest, 8, layers, words)
    assert ModelShape.of({**settings, "vocab_size": 100}) == shape
    assert ModelShape.of({**settings, "vocab_size": 100}, 123) == replace(shape, num_parameters=123)


def test_steps_cover_all_epochs_and_are_never_none(run_file: Path) -> None:
    def steps(*overrides: str, sequences: int = 100) -> int:
        return num_steps(RunConfig.load(run_file, overrides), sequences, 8)

    asked = ("epochs=2", "epochs=1", "epochs=0.5", "epochs=0.001", "steps=7")
    assert [*map(steps, asked)] == [25, 13, 7, 1, 7]


@pytest.mark.parametrize(
    ("overrides", "sequences", "said"),
    [
        (["epochs=3"], 13, "several times. 3 whole steps end at epoch 3.69, not 3."),
        (["epochs=1"], 33, "a step takes 16. 3 whole steps end at epoch 1.45, not 1."),
        (["epochs=3"], 160, ""),
        (["steps=4"], 33, ""),
        (["steps=4"], 13, "each step has some of them several times."),
    ],
)
def test_steps_that_make_a_run_much_longer_are_said(
    run_file: Path, overrides: list[str], sequences: int, said: str
) -> None:
    """`epochs: 3` ended at epoch 3.69 without a word."""
    found = list(check_step(RunConfig.load(run_file, overrides), sequences, 16))
    assert [finding.level for finding in found] == (["warning"] if said else [])
    assert all(finding.message.endswith(said) for finding in found), found


@pytest.mark.parametrize(
    ("overrides", "evaluates", "end"),
    [
        (["epochs=1.9"], [3, 5], " (epochs: 1.9 is 4.8 steps, rounded up)"),
        (["epochs=2", "evaluation.every=2"], [2, 4, 5], ""),
        (["steps=5", "evaluation.every=9"], [5], ""),
    ],
)
def test_epochs_end_in_the_step_that_takes_their_last_sample(
    run_file: Path, overrides: list[str], evaluates: list[int], end: str
) -> None:
    schedule = Schedule(RunConfig.load(run_file, overrides), 5, 4, 10)
    assert [step for step in range(1, 6) if schedule.ends_epoch(step)] == [3, 5]
    assert [step for step in range(1, 6) if schedule.evaluates_after(step)] == evaluates
    assert [schedule.epoch(step) for step in (0, 3, 5)] == [0.0, 1.2, 2.0]
    assert schedule.describe("2 ranks") == f"training 5 steps of 4 sequences on 2 ranks{end}"


@pytest.mark.parametrize(
    ("micro", "numbers", "chosen"),
    [
        ("2", (24, 2, 3), {"batch.global"}),
        ('"auto"', (36, 3, 3), {"batch.global", "batch.micro"}),
    ],
)
def test_their_accumulation_is_kept_where_nothing_else_decides_the_batch(
    run_file: Path, micro: str, numbers: tuple[int, int, int], chosen: set[str]
) -> None:
    theirs = f'{{"train_micro_batch_size_per_gpu": {micro}, "gradient_accumulation_steps": 3}}'
    run_file.with_name("ds_config.json").write_text(theirs)
    plan = planned(run_file, A100, 4, "engine.config=ds_config.json")
    assert (plan.total, plan.micro, plan.accumulation) == numbers
    assert {c.key for c in plan.choices if c.key.startswith("batch.")} == chosen


@pytest.mark.parametrize(
    ("overrides", "most", "micro", "accumulation"),
    [
        (["batch.global=32"], 4, 4, 4),
        (["batch.global=32"], 8, 8, 2),  # what it begins with
        (["batch.global=32"], 100, 8, 2),
        (["batch.global=12"], 4, 3, 2),  # 4 does not divide a share of 6
        (["batch.global=32"], 1, 1, 16),
        (["batch.global=32", "batch.micro=16"], 4, 16, 1),  # the user's
    ],
)
def test_what_did_not_fit_bounds_an_automatic_micro_batch_and_no_other(
    run_file: Path, overrides: list[str], most: int, micro: int, accumulation: int
) -> None:
    config = RunConfig.load(run_file, overrides)
    plan = decide(config, of_size(0.001), CPU, 2)
    bounded = with_micro(config, plan, MicroBound({}, most, "8 did not fit"))
    assert (bounded.micro, bounded.accumulation) == (micro, accumulation)
    kept = ("total", "precision", "zero")
    assert [getattr(bounded, key) for key in kept] == [getattr(plan, key) for key in kept]
    assert len(bounded.choices) == len(plan.choices)
    if micro < plan.micro:
        assert reason(bounded, "batch.micro").endswith(f"up to {most}: 8 did not fit")
        assert reason(bounded, "accumulation").endswith(f"2 ranks x {micro} x {accumulation}")


def test_an_optimizer_with_smaller_moments_needs_less(run_file: Path) -> None:
    adamw, lion, sgd, plain = (
        state_needed(RunConfig.load(run_file, [f"optimizer={{name: {n}}}"]), BERT, 4)
        for n in ("adamw", "lion", "sgd", "sgd, momentum: 0")
    )
    assert sgd == lion and lion[0] - plain[0] == 4 * BERT.num_parameters
    assert adamw[0] - lion[0] == 4 * BERT.num_parameters
    assert adamw[3] - lion[3] == BERT.num_parameters
