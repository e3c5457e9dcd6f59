"""A ds_config.json from a tutorial works unchanged; a contradiction names both files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.config import ds_config, fields
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.job.shapes import Device, ModelShape
from tests.support.plans import decide

TUTORIAL = """\
{
    "train_batch_size": 4,                // must be micro batch * accumulation * number of GPUs
    "train_micro_batch_size_per_gpu": 1,  // micro batch of each GPU
    "gradient_accumulation_steps": 1,     // batches before each update

    // ZeRO-3
    "zero_allow_untested_optimizer": true,
    "zero_optimization":{
        "stage": 3
    },

    // the optimizer
    "optimizer": {
        "type": "Adam",
        "params": {
            "lr": 1e-4,
            "betas": [0.9, 0.98],
            "eps": 1e-7
        }
    }
}
"""
WITH_AUTO = """\
{
    "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": true,
        "allgather_bucket_size": 2e8,
        "overlap_comm": true,
        "reduce_bucket_size": "auto",
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 20,
            "total_num_steps": "auto"
        },
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wandb": {"enabled": true},
}
"""


def load(folder: Path, theirs: str, run: str = "") -> RunConfig:
    (folder / "ds_config.json").write_bytes(theirs.encode("utf-8", "surrogateescape"))
    lines = "format: 1\ntask: masked-lm\nmodel: {asset: bert}\ndataset: {asset: wikitext}\n"
    engine = "" if "engine:" in run else "engine: {config: ds_config.json}\n"
    (folder / "mine.yaml").write_text(lines + run + engine)
    return RunConfig.load(folder / "mine.yaml")


def refused(folder: Path, theirs: str, run: str = "") -> str:
    with pytest.raises(UsageError) as caught:
        load(folder, theirs, run)
    return str(caught.value).replace(f"{folder.resolve()}/", "").replace(f"{folder}/", "")


def test_a_tutorials_file_with_comments_is_taken_as_it_is(tmp_path: Path) -> None:
    config = load(tmp_path, TUTORIAL)
    assert (config.batch.total, config.batch.micro, config.engine.zero) == (4, 1, 3)
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.eps) == (
        1e-4,
        (0.9, 0.98),
        1e-7,
    )
    assert config.deepspeed == {}
    taken = {choice.key: choice.reason for choice in config.explain()}
    assert taken["engine.zero"] == taken["optimizer.lr"] == "from ds_config.json"
    # DeepSpeed's Adam has no weight decay by default; the run file's default has one.
    assert config.optimizer.weight_decay == 0.0
    assert "DeepSpeed's default" in taken["optimizer.weight_decay"]


def test_auto_means_what_the_run_file_says(tmp_path: Path) -> None:
    run = "batch: {global: 16, micro: 2}\noptimizer: {lr: 3e-5, weight_decay: 0.1}\n"
    config = load(tmp_path, WITH_AUTO, run)
    assert (config.batch.total, config.batch.micro) == (16, 2)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (3e-5, 0.1)
    assert (config.precision, config.engine.zero) == ("fp16", 2)
    assert (config.schedule.name, config.schedule.warmup) == ("linear", 20.0)
    assert config.deepspeed == {
        "zero_optimization": {
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
        },
        "fp16": {"loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0}},
    }


ALL_AUTO = """\
{
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
            "total_num_steps": "auto", "warmup_type": "linear"
        }
    },
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": "auto", "offload_optimizer": {"device": "auto"}, "reduce_bucket_size": "auto"
    }
}
"""


def test_auto_is_the_run_files_value_or_its_default_and_each_is_said(tmp_path: Path) -> None:
    """`weight_decay: "auto"` beside an optimizer once became 0.0."""
    run = (
        "optimizer: {lr: 3e-5, eps: 1e-6}\nschedule: {warmup: 0.2}\n"
        "engine: {config: ds_config.json, offload: cpu}\n"
    )
    config = load(tmp_path, ALL_AUTO, run)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.betas) == (3e-5, 1e-6, (0.9, 0.999))
    assert (optimizer.weight_decay, optimizer.clip) == (0.01, 1.0)
    assert (config.schedule.name, config.schedule.warmup) == ("linear", 0.2)
    assert (config.engine.zero, config.engine.offload) == ("auto", "cpu")
    # The run file's offload goes to DeepSpeed, and no section of theirs is in its way.
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}}
    assert config.deepspeed == {"scheduler": scheduler}
    found = {choice.key: choice for choice in config.explain()}
    left = {key for key, choice in found.items() if choice.group == '"auto" in ds_config.json'}
    assert left == {
        *(f"optimizer.{key}" for key in ("lr", "betas", "eps", "weight_decay", "clip")),
        "schedule.warmup",
        "engine.offload",
    }
    assert found["optimizer.lr"].reason == "as the run file says"
    assert found["optimizer.weight_decay"].reason == "as BERT; never on biases and norms"
    assert found["zero_optimization.reduce_bucket_size"].value == "DeepSpeed's default"
    lines = fields.choice_lines(config.explain())
    assert "optimizer.lr: 3e-05  (as the run file says)" in lines


def test_an_auto_that_the_run_file_leaves_to_the_ranks_is_left_to_them(tmp_path: Path) -> None:
    config = load(tmp_path, '{"bf16": {"enabled": "auto"}, "train_batch_size": "auto"}')
    assert (config.precision, config.batch.total) == ("auto", "auto")
    assert not [choice for choice in config.explain() if choice.group and choice.value == "auto"]
    assert load(tmp_path, '{"fp16": {"enabled": false}}').precision == "fp32"


def test_what_reports_over_the_network_is_left_out_and_said(tmp_path: Path) -> None:
    config = load(tmp_path, WITH_AUTO)
    assert "wandb" not in config.deepspeed
    assert {choice.key: choice.value for choice in config.explain()}["wandb"] == "left out"
    assert [line for line in fields.of_ds_config(config.notes) if "left out" in line] == [
        "ds_config.json: wandb: left out  (it reports over the network; the run file's key of that "
        "name does not)"
    ]
    params = '{"torch_adam": true, "adam_w_mode": true, "weight_decay": 0.1, "lr": 1e-4}'
    theirs = f'{{"optimizer": {{"type": "Adam", "params": {params}}}, "gradient_clipping": 1}}'
    found = fields.of_ds_config(load(tmp_path, theirs).notes)
    assert any("optimizer.params.torch_adam: left out  (torch's" in line for line in found)


def test_contradictions_name_both_places_all_at_once(tmp_path: Path) -> None:
    run = "batch: {global: 8}\noptimizer:\n  lr: 3e-4\nengine: {zero: 2, config: ds_config.json}\n"
    said = refused(tmp_path, TUTORIAL, run)
    assert "ds_config.json says train_batch_size: 4, mine.yaml:5 says batch.global: 8" in said
    assert (
        "ds_config.json says optimizer.params.lr: 0.0001, mine.yaml:7 says optimizer.lr: 0.0003"
        in said
    )
    assert "ds_config.json says zero_optimization.stage: 3, mine.yaml:8 says engine.zero: 2" in said


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ('{"train_batch_size": 4\n "gradient_clipping" 1.0}', "ds_config.json:2: not JSON"),
        ('{\n"zero_optimization": {"stage": 2},\n', "not JSON"),
        ("[1, 2]", "is one JSON object"),
        ('{"a": "\udce9"}', "ds_config.json is not UTF-8 text"),
        ('{"train_batch_size": 4, "train_batch_size": 8}', "`train_batch_size` is written twice"),
        ('{"optimizer": {"type": "Lamb"}}', "optimizer.type Lamb is not supported"),
        ('{"optimizer": "AdamW"}', "`optimizer` must be {...}"),
        ('{"optimizer": {"type": "Adam", "params": [1]}}', "`optimizer.params` must be {...}"),
        ('{"fp16": true}', "`fp16` must be {...}"),
        ('{"zero_optimization": 3}', "`zero_optimization` must be {...}"),
        (
            '{"zero_optimization": {"offload_optimizer": "cpu"}}',
            "`zero_optimization.offload_optimizer` must be {...}",
        ),
        ('{"scheduler": "WarmupLR"}', "`scheduler` must be {...}"),
        ('{"scheduler": {"type": ["WarmupLR"]}}', "scheduler.type ['WarmupLR'] is not supp"),
        ('{"data_types": "fp32"}', "`data_types` must be {...}"),
        ('{"scheduler": {"type": "OneCycle"}}', "scheduler.type OneCycle is not supported"),
        ('{"zero_optimization": {"stage": 5}}', "`engine.zero` must be"),
        ('{"train_micro_batch_size_per_gpu": 0}', "`batch.micro` must be at least 1"),
        ('{"gradient_accumulation_steps": 0}', "gradient_accumulation_steps must be a whole"),
        ('{"train_batch_size": 4.5}', "`batch.global` must be a whole number"),
        ('{"optimizer": {"params": {"betas": [0.9]}}}', "`optimizer.betas` must be"),
        ('{"gradient_clipping": "none"}', "`optimizer.clip` must be a number"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_a_message(
    tmp_path: Path, theirs: str, said: str
) -> None:
    found = refused(tmp_path, theirs)
    assert said in found
    assert "ds_config.json" in found or "not supported" in found


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '{\n // "b": 2,\n "a": [1, 2,], # x\n}',
        '{"a": "// no # comment, }", /* "c": 1,\n */ "b": {"c": "auto", } ,\n}',
        '{"path": "/tmp//x", "q": "\\"//\\"", "n": -1e-4, "t": true, "z": null}',
    ],
)
def test_comments_are_read_without_hjson_as_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    expected = ds_config.load(path)
    monkeypatch.setitem(sys.modules, "hjson", None)
    assert ds_config.load(path) == expected
    path.write_text('{\n // x\n "a": 1,\n "a": 2}')
    with pytest.raises(UsageError, match="`a` is written twice"):
        ds_config.load(path)
    path.write_text('{\n /* x\n */ "a": ?}')
    with pytest.raises(UsageError, match=r"ds.json:3: not JSON"):
        ds_config.load(path)


def test_their_sgd_is_sgd_with_deepspeeds_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, '{"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}')
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr) == ("sgd", 0.1)
    assert (optimizer.momentum, optimizer.weight_decay) == (0.0, 0.0)
    theirs = '{"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}'
    assert load(tmp_path, theirs).optimizer.momentum == 0.9
    said = refused(tmp_path, theirs, "optimizer: {name: sgd, momentum: 0.5}\n")
    assert "optimizer.params.momentum: 0.9, mine.yaml:5 says optimizer.momentum: 0.5" in said
    assert "optimizer.type: sgd" in refused(tmp_path, theirs, "optimizer: {name: lion}\n")


def test_one_value_is_not_said_to_come_from_two_places(tmp_path: Path) -> None:
    """The launcher once said "from ds_config.json", and the ranks "as the run file says"."""
    config = load(tmp_path, TUTORIAL.replace("{\n", '{ "fp16": {"enabled": false}, ', 1))
    plan = decide(
        config, ModelShape(1000, 512, 64, 2, 100), Device("cpu", "CPU", 2**34, False, False), 4
    )
    assert (plan.zero, plan.precision, plan.micro) == (3, "fp32", 1)
    assert {choice.key for choice in plan.choices} == {"sequence_length", "accumulation"}
    assert config.as_said("engine.zero") == "as ds_config.json says"
    lines = fields.choice_lines(config.explain())
    assert sum("engine.zero: 3" in line for line in lines) == 1
    assert "as the run file says" not in " ".join(lines)
