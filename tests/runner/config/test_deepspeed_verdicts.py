"""A ds_config.json of somebody else means what DeepSpeed says, or `check` says why it cannot."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config import deepspeed_keys as keys
from runner.config.fields import of_ds_config
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.job.memory import model_state
from runner.job.model_probe import check_ds_config
from runner.job.plan import TrainingPlan
from runner.job.shapes import Device, ModelShape
from runner.training.components.optimization import Schedule
from runner.training.engines.deepspeed import ds_config
from tests.first_job.harness import run_runner
from tests.remedies.obeyed import obeys
from tests.support.plans import decide

RUN = """\
format: 1
task: masked-lm
model: {asset: tiny-bert}
dataset: {asset: reference, limit: {train: 100, validation: 10}}
sequence_length: 32
steps: 3
engine: {name: deepspeed, config: ds.json}
"""
FILE = "runner/config/ds_config.py"
H100 = Device("cuda", "H100", 80 * 2**30, has_bf16=True, has_fp16=True)
V100 = Device("cuda", "V100", 32 * 2**30, has_bf16=False, has_fp16=True)
SHAPE = ModelShape(30_000_000_000, 2048, 64, 2, 100)


def load(folder: Path, theirs: object, more: str = "") -> RunConfig:
    text = theirs if isinstance(theirs, str) else json.dumps(theirs, indent=1)
    (folder / "ds.json").write_text(text)
    (folder / "run.yaml").write_text(RUN + more)
    return RunConfig.load(folder / "run.yaml")


def plan_of(config: RunConfig, precision: str, zero: int = 1) -> TrainingPlan:
    return TrainingPlan(32, 1, 1, 1, 1, precision, zero, (), config.engine.offload)


def refused(folder: Path, bundle: Path, theirs: object, more: str = "") -> str:
    """What `runner check` prints of a file that it refuses."""
    with pytest.raises(UsageError):
        load(folder, theirs, more)
    said = run_runner(folder, "check", "run.yaml", "--bundle", str(bundle), "--processes", "1")
    assert said.code == 2 and "Traceback" not in said.err, said.err
    return said.err.replace(f"{folder.resolve()}/", "")


def passes(folder: Path, theirs: object) -> None:
    """Asserts that a remedy helped."""
    load(folder, theirs)


def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path: Path, bundle: Path) -> None:
    theirs = {"gradient_cliping": 0.7, "offload_param_device": "cpu", "train_batch_size ": 8}
    said = refused(tmp_path, bundle, theirs)
    assert "ds.json:2: `gradient_cliping` is no key" in said
    assert "-> Write `gradient_clipping`, if that is meant; else remove `gradient_cliping`." in said
    assert "-> Write `train_batch_size`, if that is meant; else remove `train_batch_size `." in said
    assert "-> Remove `offload_param_device`." in said
    passes(tmp_path, {"gradient_clipping": 0.7, "train_batch_size": 8, "_comment": "mine"})


@obeys("stage/file_kinds.py", "Write engine: {name: deepspeed, config: {}} (relative")
def test_a_file_of_accelerate_is_called_one_and_names_the_ds_config(
    tmp_path: Path, bundle: Path
) -> None:
    accelerate = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
    said = refused(tmp_path, bundle, accelerate + "deepspeed_config: {zero_stage: 2}\n")
    assert "this is a file of `accelerate config`, not a ds_config.json" in said
    said = refused(
        tmp_path,
        bundle,
        accelerate + "deepspeed_config:\n  deepspeed_config_file: zero2.json\n",
    )
    assert "Write engine: {name: deepspeed, config: zero2.json}" in said
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "run.yaml").write_text(RUN.replace("ds.json", "zero2.json"))
    assert RunConfig.load(tmp_path / "run.yaml").engine.zero == 2


@pytest.mark.parametrize("key", sorted(keys.REMOVED))
def test_what_deepspeed_has_removed_is_refused(tmp_path: Path, bundle: Path, key: str) -> None:
    said = refused(tmp_path, bundle, {"train_batch_size": 8, key: {"enabled": False}})
    assert f"ds.json:3: DeepSpeed has removed `{key}`" in said
    passes(tmp_path, {"train_batch_size": 8})


@pytest.mark.parametrize(
    ("theirs", "place", "words"),
    [
        ({"fp16": {"enabled": False, "opt_level": "O2"}}, "ds.json:4", "opt_level: Extra inputs"),
        ({"fp16": {"enabled": "auto", "min_loss_scale": 0.5}}, "ds.json:4", "min_loss_scale"),
        ({"compile": {"backend": "inductor"}}, "ds.json:3", "CompileConfig: backend: Extra"),
        ({"communication_data_type": "fp8"}, "ds.json:2", "Invalid communication_data_type"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warm_num_steps": 9}}},
            "ds.json:5",
            "unexpected keyword argument 'warm_num_steps'",
        ),
        ({"data_types": {"param_dtype": "bf16"}}, "ds.json:3", "param_dtype bf16 and a prec"),
        (
            {"optimizer": {"type": "Adam", "params": {"weight_deacy": 0.1}}},
            "ds.json:5",
            "none of its optimizers for adamw has weight_deacy",
        ),
    ],
)
def test_deepspeed_judges_its_own_values_with_the_line(
    tmp_path: Path, theirs: dict[str, Any], place: str, words: str
) -> None:
    """31 of 322 files of other people ended in the ranks, after a check that said 0."""
    config = load(tmp_path, theirs)
    with pytest.raises(UsageError) as caught:
        check_ds_config(config)
    said = str(caught.value).replace(f"{tmp_path.resolve()}/", "")
    assert place in said and words in said, said
    if "weight_deacy" in words:
        assert "-> Write `weight_decay`, if that is meant; else correct or remove" in said
    check_ds_config(load(tmp_path, {}))


def test_all_that_deepspeed_refuses_is_printed_at_once(tmp_path: Path) -> None:
    theirs = {
        "optimizer": {"type": "Adam", "params": {"weight_deacy": 0.1}},
        "fp16": {"enable": True, "loss_scal": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warm_steps": 3}},
    }
    with pytest.raises(UsageError) as caught:
        check_ds_config(load(tmp_path, theirs))
    said = str(caught.value)
    assert said.count("DeepSpeed 0.") == 4 and "4 mistakes" in said
    assert "Write `enabled`, if that is meant" in said


def test_adam_with_l2_is_not_taken_for_adamw(tmp_path: Path, bundle: Path) -> None:
    theirs = {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}
    said = refused(tmp_path, bundle, {"optimizer": theirs})
    assert "ds.json:5: adam_w_mode: false is Adam with the decay in its gradient" in said
    theirs["params"] = {"adam_w_mode": False}
    assert load(tmp_path, {"optimizer": theirs}).optimizer.weight_decay == 0.0
    theirs["params"] = {"torch_adam": True}  # torch's own default
    assert load(tmp_path, {"optimizer": theirs}).optimizer.weight_decay == 0.01


def test_a_wrong_value_is_named_with_its_line_and_its_own_key(tmp_path: Path, bundle: Path) -> None:
    said = refused(tmp_path, bundle, {"gradient_clipping": "0.5"})
    assert "ds.json:2: gradient_clipping: `optimizer.clip` must be a number" in said
    assert "-> Write it without quotes: 0.5" in said
    assert load(tmp_path, {"gradient_clipping": 0.5}).optimizer.clip == 0.5


def test_what_auto_became_is_printed_on_one_line(tmp_path: Path) -> None:
    config = load(tmp_path, {"gradient_clipping": "auto", "fp16": {"enabled": True}})
    line = of_ds_config(config.notes, config.explain())[-1]
    assert line == '"auto" in ds.json: optimizer.clip 1.0  (the run file\'s value, or its default)'


def test_check_and_train_print_deepspeeds_verdict_and_no_traceback(
    tmp_path: Path, bundle: Path
) -> None:
    load(tmp_path, {"zero_optimization": {"stage": 1, "stage3_max_live_params": 9}})
    words = ("run.yaml", "--bundle", str(bundle), "--processes", "1")
    said = run_runner(tmp_path, "check", *words, "--json")
    assert said.code == 2
    finding = json.loads(said.out)["findings"][0]
    assert "ds.json:4: DeepSpeed " in finding["message"] and "Extra inputs" in finding["message"]


def test_the_tables_are_those_of_the_installed_deepspeed() -> None:
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lion import FusedLion
    from deepspeed.runtime import config, constants

    asked = set[str]()

    class Asked(dict[str, Any]):
        """A configuration that notes which keys are read of it."""

        def get(self, key: str, default: object = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self  # `key in config.keys()`

        def __copy__(self) -> Asked:
            return self

    config.DeepSpeedConfig(Asked(train_micro_batch_size_per_gpu=1))
    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == keys.REMOVED
    assert set(config._REMOVED_ZERO_CONFIG_KEYS) == keys.REMOVED_FROM_ZERO
    # The last one is read only where ranks have joined.
    assert asked - keys.REMOVED == keys.KNOWN - {"sequence_parallel_size"}
    assert keys.CLIP == constants.GRADIENT_CLIPPING_DEFAULT
    for kind, name in ((FusedAdam, "adamw"), (FusedLion, "lion"), (torch.optim.SGD, "SGD")):
        defaults = inspect.signature(kind).parameters
        for key, value in keys.OPTIMIZERS[name][1].items():
            theirs = defaults[key].default
            assert value == (list(theirs) if isinstance(theirs, tuple) else theirs), (name, key)


def test_the_old_name_of_bf16_is_bf16(tmp_path: Path) -> None:
    config = load(tmp_path, {"bfloat16": {"enabled": True}, "fp16": {"enabled": False}})
    assert config.precision == "bf16"
    assert ds_config(config, plan_of(config, "bf16"))["bf16"]["enabled"] is True


def test_no_offload_there_and_offload_here_is_a_contradiction(tmp_path: Path, bundle: Path) -> None:
    none = {"device": "none"}
    theirs = {"zero_optimization": {"stage": 3, "offload_optimizer": none, "offload_param": none}}
    (tmp_path / "ds.json").write_text(json.dumps(theirs))
    (tmp_path / "run.yaml").write_text(RUN.replace("ds.json}", "ds.json, offload: cpu}"))
    said = run_runner(tmp_path, "check", "run.yaml", "--bundle", str(bundle), "--processes", "1")
    assert said.code == 2 and "offload_optimizer.device: none" in said.err
    assert "engine.offload: cpu" in said.err
    assert load(tmp_path, theirs).engine.offload == "none"


@pytest.mark.parametrize(
    ("half", "gib"), [("offload_optimizer", 30e9 * 2 / 8), ("offload_param", 30e9 * 16 / 8)]
)
def test_one_half_that_is_offloaded_counts_as_one_half(
    tmp_path: Path, half: str, gib: float
) -> None:
    theirs = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, half: {"device": "cpu"}},
    }
    config = load(tmp_path, theirs)
    assert config.engine.offload == "cpu"
    assert model_state(config, SHAPE, 3, 8, "cpu") == pytest.approx(gib)
    assert model_state(config, SHAPE, 3, 8, "none") == pytest.approx(30e9 * 18 / 8)


def test_old_names_of_offload_still_offload(tmp_path: Path) -> None:
    config = load(tmp_path, {"zero_optimization": {"stage": 2, "cpu_offload": True}})
    zero = ds_config(config, plan_of(config, "bf16", 2))["zero_optimization"]
    assert config.engine.offload == "cpu" and zero["offload_optimizer"] == {"device": "cpu"}
    assert load(tmp_path, {"zero_optimization": True}).engine.zero == 1


@pytest.mark.parametrize(
    ("theirs", "more", "batch"),
    [
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, "", (16, 4, 2)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}, "", (8, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 4}, "", (8, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 4}, "batch: {global: 32}\n", (32, 4, 4)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, "", (8, 4, 1)),
        ({"gradient_accumulation_steps": 2}, "", (32, 8, 2)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, "", (12, 3, 2)),
        ({}, "batch: {micro: 4}\n", (8, 4, 1)),
    ],
)
@pytest.mark.parametrize("null", [True, False])
def test_accumulation_that_is_absent_or_null_is_one(
    tmp_path: Path, theirs: dict[str, Any], more: str, batch: tuple[int, ...], null: bool
) -> None:
    """A micro batch of 4 alone once made steps of 32 sequences."""
    theirs = {**({"gradient_accumulation_steps": None} if null else {}), **theirs}
    config = load(tmp_path, theirs, more)
    cpu = Device("cpu", "CPU", 2**40, has_bf16=False, has_fp16=False)
    plan = decide(config, ModelShape(1000, 512, 64, 2, 100), cpu, 2)
    assert (plan.total, plan.micro, plan.accumulation) == batch
    is_default = "gradient_accumulation_steps" in " ".join(of_ds_config(config.notes))
    assert is_default == (batch[2] == 1 and theirs.get("gradient_accumulation_steps") is None)


def test_the_path_of_nvme_is_read_from_its_section(tmp_path: Path) -> None:
    section = {"device": "nvme", "nvme_path": "/local/swap"}
    theirs = {"zero_optimization": {"stage": 3, "offload_param": section}}
    config = load(tmp_path, theirs)
    assert (config.engine.offload, config.engine.nvme_path) == ("nvme", "/local/swap")
    (tmp_path / "run.yaml").write_text(RUN.replace("ds.json}", "ds.json, nvme_path: /other}"))
    with pytest.raises(UsageError, match=r"nvme_path: /local/swap, .*engine.nvme_path: /other"):
        RunConfig.load(tmp_path / "run.yaml")
    kept = {"device": "cpu", "nvme_path": "/unused"}
    theirs = {"zero_optimization": {"stage": 3, "offload_param": kept}}
    assert load(tmp_path, theirs).engine.offload == "cpu"


@pytest.mark.parametrize(
    ("value", "precision"), [("true", "fp16"), (1, "fp16"), ("False", "fp32"), (0, "fp32")]
)
def test_enabled_is_read_as_deepspeed_reads_it(
    tmp_path: Path, value: object, precision: str
) -> None:
    assert load(tmp_path, {"fp16": {"enabled": value}}).precision == precision


def test_enabled_that_is_no_truth_value_is_refused(tmp_path: Path, bundle: Path) -> None:
    said = refused(tmp_path, bundle, {"fp16": {"enabled": "maybe"}})
    assert "ds.json:2: fp16.enabled must be true or false, found `maybe`." in said
    said = refused(tmp_path, bundle, {"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert "bf16 and fp16 are both enabled" in said
    assert load(tmp_path, {"fp16": {"enabled": True}}).precision == "fp16"


@pytest.mark.parametrize(
    "theirs",
    [
        {"tensor_parallel": {"autotp_size": 2}},
        {"sequence_parallel_size": 2},
        {"expert_parallel": {"enabled": True}},
    ],
)
def test_ranks_that_are_not_data_parallel_are_refused(
    tmp_path: Path, bundle: Path, theirs: dict[str, Any]
) -> None:
    said = refused(tmp_path, bundle, theirs)
    assert "the ranks of `runner train` are all data-parallel" in said
    assert f"Remove `{next(iter(theirs))}" in said and "; or run a script" in said
    passes(tmp_path, {})


def test_a_sum_of_gradients_over_the_ranks_is_refused(tmp_path: Path, bundle: Path) -> None:
    said = refused(tmp_path, bundle, {"gradient_allreduce_op": "SUM"})
    assert "gradient_allreduce_op: SUM: a sum would multiply the gradient" in said
    passes(tmp_path, {})


def test_an_accumulation_that_nothing_counts_is_refused(tmp_path: Path, bundle: Path) -> None:
    said = refused(tmp_path, bundle, {"managed_gradient_accumulation": False})
    assert "would update the weights after each micro batch" in said


@pytest.mark.parametrize(
    "zero", [{"zenflow": {"topk_ratio": 0.1}}, {"offload_optimizer": {"super_offload": True}}]
)
def test_what_needs_an_optimizer_of_deepspeeds_own_is_refused(
    tmp_path: Path, bundle: Path, zero: dict[str, Any]
) -> None:
    """A file with zenflow once ended in the ranks, after a check that said 0."""
    said = refused(tmp_path, bundle, {"zero_optimization": {"stage": 2, **zero}})
    assert "it works with an optimizer of DeepSpeed's own alone" in said


@pytest.mark.parametrize(
    ("stage", "name"), [("0", "offload_optimizer"), (2, "offload_param"), (1, "offload_param")]
)
def test_what_a_stage_does_not_offload_is_left_out(
    tmp_path: Path, stage: object, name: str
) -> None:
    theirs = {"zero_optimization": {"stage": stage, name: {"device": "cpu"}}}
    config = load(tmp_path, theirs)
    assert (config.engine.zero, config.engine.offload) == (int(str(stage)), "none")
    assert any(f"{name}: left out  (stage {stage} " in line for line in of_ds_config(config.notes))


def test_autocast_of_torch_is_printed(tmp_path: Path) -> None:
    config = load(tmp_path, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    assert config.precision == "fp32"
    lines = of_ds_config(config.notes)
    assert any(line.startswith("ds.json: torch_autocast: bfloat16  (Deep") for line in lines)


def test_the_rate_of_the_scheduler_wins_and_is_printed(tmp_path: Path) -> None:
    params = {"warmup_max_lr": 3e-3, "warmup_num_steps": 1}
    theirs = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "scheduler": {"type": "WarmupLR", "params": params},
    }
    config = load(tmp_path, theirs)
    assert config.optimizer.lr == 3e-3
    lines = of_ds_config(config.notes)
    assert any("optimizer.params.lr: left out  (DeepSpeed's WarmupLR" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {}),
        ("WarmupLR", {"warmup_type": "linear", "warmup_min_lr": 1e-6}),
        ("WarmupDecayLR", {"total_num_steps": 7}),
        ("WarmupDecayLR", {"total_num_steps": "auto"}),
        ("WarmupCosineLR", {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}),
    ],
)
def test_each_rate_is_that_of_deepspeeds_own_scheduler(
    tmp_path: Path, kind: str, params: dict[str, Any]
) -> None:
    """WarmupLR without a type rises as a logarithm; it once rose linearly."""
    from deepspeed.runtime import lr_schedules

    peak = {} if kind == "WarmupCosineLR" else {"warmup_max_lr": 1e-3}
    given = {"warmup_num_steps": 4, **peak, **params}
    config = load(
        tmp_path,
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "scheduler": {"type": kind, "params": given},
        },
    )
    schedule = Schedule(config, num_steps=10, total=8, per_epoch=80)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    if kind != "WarmupLR":
        total = given.get("total_num_steps", "auto")
        given["total_num_steps"] = 10 if total == "auto" else total
    theirs = getattr(lr_schedules, kind)(optimizer, **given)
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        theirs.step()
    assert [schedule.rate(step) for step in range(10)] == expected
    assert schedule.rate(3) == expected[3]  # a resumed run begins there


def test_an_optimizer_without_a_scheduler_keeps_its_rate(tmp_path: Path) -> None:
    optimizer = {"optimizer": {"type": "AdamW", "params": {}}}
    config = load(tmp_path, optimizer)
    assert (config.schedule.name, config.schedule.warmup, config.optimizer.lr) == (
        "constant",
        0.0,
        1e-3,
    )
    assert config.precision == "fp32" and config.optimizer.clip == 1.0
    lines = of_ds_config(config.notes)
    assert all(line.startswith("ds.json: ") and "DeepSpeed's default" in line for line in lines)
    assert {line.split(": ")[1] for line in lines} == {
        *("schedule.name", "schedule.warmup", "optimizer.lr", "optimizer.weight_decay"),
        *("precision", "optimizer.clip"),
    }
    more = "schedule: {name: cosine}\noptimizer: {lr: 2e-5, clip: 0}\nprecision: bf16\n"
    said = load(tmp_path, optimizer, more)
    assert (said.schedule.name, said.optimizer.lr, said.optimizer.clip) == ("cosine", 2e-5, 0)
    assert said.precision == "bf16"


def test_without_an_optimizer_the_run_files_defaults_hold(tmp_path: Path) -> None:
    config = load(tmp_path, {"zero_optimization": {"stage": 2}})
    assert (config.optimizer.lr, config.schedule.name) == (5e-5, "cosine")
    assert (
        "ds.json: optimizer: the run file's, with its schedule  (ds.json has none, and"
        in (of_ds_config(config.notes)[0])
    )


def test_a_warm_up_of_no_steps_is_refused_as_by_deepspeed(tmp_path: Path, bundle: Path) -> None:
    theirs = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}
    assert "must be a whole number from 1 on, found `0`" in refused(tmp_path, bundle, theirs)
    passes(tmp_path, json.dumps(theirs).replace(": 0", ": 1"))


@pytest.mark.parametrize(
    ("name", "ours"),
    [("adamw", "adamw"), ("ADAM", "adamw"), ("Lion", "lion"), ("SGD", "sgd")],
)
def test_names_of_optimizers_are_read_as_deepspeed_reads_them(
    tmp_path: Path, name: str, ours: str
) -> None:
    config = load(tmp_path, {"optimizer": {"type": name, "params": {"lr": 1e-4}}})
    assert config.optimizer.name == ours


@pytest.mark.parametrize("section", ["zero_optimization", "fp16", "optimizer", "scheduler"])
def test_a_section_that_is_null_is_absent(tmp_path: Path, section: str) -> None:
    config = load(tmp_path, {"train_batch_size": 8, section: None})
    assert section not in config.deepspeed
    assert ds_config(config, plan_of(config, "fp32"))["zero_optimization"]["stage"] == 1


@obeys(FILE, "Run the lines of the job script that write this file")
def test_the_text_of_a_here_document_is_to_be_filled_in(tmp_path: Path, bundle: Path) -> None:
    theirs = '{\n  "train_micro_batch_size_per_gpu": $MB,\n  "zero_optimization": {"stage": $S}\n}'
    said = refused(tmp_path, bundle, theirs)
    assert "ds.json:2: `$MB`, `$S`: for a shell" in said
    command = said[said.index("envsubst") :].partition("   and")[0]
    assert command.replace(f"{tmp_path}/", "") == "envsubst < ds.json > ds-filled.json"
    filled = theirs.replace("$MB", "4").replace("$S", "2")  # what envsubst writes
    passes(tmp_path, filled)
    assert "`${USE}`: for a shell" in refused(tmp_path, bundle, '{"fp16": {"enabled": ${USE}}}')
    assert "`$((2 * MB))`: for" in refused(tmp_path, bundle, '{"train_batch_size": $((2 * MB))}')
    assert load(tmp_path, '{"train_batch_size": 8}  // $MB comes later').batch.total == 8


def test_all_settings_of_bf16_and_fp16_reach_deepspeed(tmp_path: Path) -> None:
    half = {"enabled": True, "bf16_master_weights_and_grads": True, "check_grad_overflow": False}
    config = load(tmp_path, {"bf16": half})
    assert half.items() <= ds_config(config, plan_of(config, "bf16", 3))["bf16"].items()


def test_what_the_file_forbids_is_not_chosen(tmp_path: Path, bundle: Path) -> None:
    theirs = {"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}
    said = refused(tmp_path, bundle, theirs, "precision: bf16\n")
    assert "ds.json says bf16.enabled: false, " in said and "precision: bf16" in said
    config = load(tmp_path, theirs)
    small = ModelShape(1000, 512, 64, 2, 100)
    assert decide(config, small, H100, 1).precision == "fp16"
    only_bf16 = load(tmp_path, {"bf16": {"enabled": "auto"}})
    assert decide(only_bf16, small, H100, 1).precision == "bf16"
    assert decide(only_bf16, small, V100, 1).precision == "fp32"


@pytest.mark.parametrize(
    "key", ["autotuning", "data_efficiency", "activation_checkpointing", "wall_clock_breakdown"]
)
def test_what_has_no_effect_is_printed(tmp_path: Path, key: str) -> None:
    theirs = {key: True if key == "wall_clock_breakdown" else {"enabled": True}}
    lines = of_ds_config(load(tmp_path, theirs).notes)
    assert any(line.startswith(f"ds.json: {key}: left out  (") for line in lines)
    assert not any(key in line for line in of_ds_config(load(tmp_path, {key: False}).notes))


def test_a_missing_comma_is_read_as_deepspeed_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{\n "train_batch_size": 8\n "fp16": {"enabled": true}\n "gradient_clipping": 1,\n}'
    expected = load(tmp_path, text)
    monkeypatch.setitem(__import__("sys").modules, "hjson", None)
    assert load(tmp_path, text).batch.total == expected.batch.total == 8
