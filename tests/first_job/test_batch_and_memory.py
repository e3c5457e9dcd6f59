"""Numbers that contradict each other, a precision or a memory that is not there: B, M and more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.first_job.harness import (
    Change,
    Found,
    assert_found,
    assert_silent,
    both,
    bundle_of_variants,
    check,
    edit,
    programs,
    remove,
    run_runner,
    torch_of,
    write_run,
)

GPT2: dict[str, Any] = {"task": "causal-lm", "model": {"asset": "gpt2"}, "precision": None}
HUGE = GPT2 | {
    "model": {"asset": "huge", "init": "scratch"},
    "sequence_length": 32,
    "batch": {"global": 128, "micro": 1},
}
LAYERS = {"n_embd": 8192, "n_layer": 40, "n_head": 64}
V100 = {"options": {"gres": "gpu:v100:4"}, "tasks_per_node": 4}
A100 = {"options": {"gres": "gpu:a100:1"}, "tasks_per_node": 1}
SHARED = {"nodes": 32, "tasks_per_node": 4, "options": {"gres": "gpu:a100:4", "mem": "40G"}}
OFFLOAD = {"nodes": 1, "tasks_per_node": 4, "options": {"gres": "gpu:a100:4", "mem": "300G"}}


def theirs(**settings: Any) -> dict[str, Any]:
    """Keys of a run file that names the user's ds_config.json, with these settings."""
    return {"ds": settings, "engine": {"config": "ds.json"}}


# entry -> keys of the run file (`ds`: the user's ds_config.json), what `check` says
ROWS: dict[str, tuple[dict[str, Any], Found]] = {
    "B1": (
        GPT2
        | {"batch": None}
        | theirs(
            train_batch_size=8,
            train_micro_batch_size_per_gpu=2,
            gradient_accumulation_steps=1,
        ),
        Found(("8 = 2 ranks x 2 x 2", "gradient_accumulation_steps: 1"), "train_batch_size", 0),
    ),
    "B2": (
        GPT2 | theirs(optimizer={"type": "AdamW", "params": {"lr": 0.5}}),
        Found(("lr", "0.5", "0.003"), "ds.json"),
    ),
    "B3": (
        GPT2 | {"precision": "bf16"} | theirs(fp16={"enabled": True}),
        Found(("precision", "bf16", "fp16"), "ds.json"),
    ),
    "B5": (
        GPT2 | {"precision": "bf16", "slurm": V100},
        Found(("precision bf16", "v100 does not have it"), "fp16, or auto"),
    ),
    "B6": (GPT2 | {"tf32": True}, Found(("unknown key `tf32`",), "")),
    "B8": (
        GPT2 | {"model": {"asset": "bfloat"}, "precision": "fp16", "slurm": V100},
        Found(("was trained in bfloat16",), "fp32", 0),
    ),
    "B10": (
        GPT2 | theirs(zero_optimization={"stage": 3, "stage3_prefetch_bucket_size": 15099494.4}),
        Found(("must be a whole number, found `15099494.4`",), '"stage3_prefetch_bucket_size"'),
    ),
    "megabytes": (
        GPT2 | {"slurm": {"options": {"mem": 64, "gres": "gpu:a100:1"}}},
        Found(("mem: 64 is 64 MB",), "mem: 64G"),
    ),
    "minutes": (
        GPT2 | {"slurm": {"time": "00:00:30"}},
        Found(("slurm.time 00:00:30", "begins again"), '"00:10:00", or more', 0),
    ),
    "M1": (
        GPT2 | {"batch": {"global": 5_000_000, "micro": 5_000_000}, "slurm": A100},
        Found(("batch.micro 5000000 needs about", "has 85.9 GB"), "Set batch.micro: "),
    ),
    "M2": (
        HUGE | {"engine": {"name": "ddp"}, "slurm": V100},
        Found(
            ("the model's state does not fit with ddp",), "Set engine: {name: deepspeed, zero: 3"
        ),
    ),
    "M3": (
        HUGE | {"engine": {"zero": 3}, "slurm": SHARED},
        Found(
            ("holds up to", "42.9 GB of memory per node"),
            'slurm.options: {"gres": "gpu:a100:4", "mem": "',
        ),
    ),
    "J12": (
        HUGE | {"engine": {"zero": 3}, "slurm": SHARED},
        Found(("while the model is loaded",), '"mem": "'),
    ),
    "M4": (
        HUGE | {"engine": {"zero": 2, "offload": "cpu"}, "slurm": OFFLOAD},
        Found(("offload keeps", "of model state on each node"), "or use more nodes"),
    ),
}


def bfloat(settings: dict[str, Any]) -> None:
    settings["dtype"] = "bfloat16"


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Path:
    """A sound GPT-2, one trained in bfloat16, and the config of a huge one."""
    source = bundle / "data/models/tiny-gpt2"
    huge: Change = both(remove("*.safetensors"), edit("config.json", lambda d: d.update(LAYERS)))
    models: dict[str, Change] = {
        "gpt2": lambda _folder: None,
        "bfloat": edit("config.json", bfloat),
        "huge": huge,
    }
    sources = {name: (source, change) for name, change in models.items()}
    return bundle_of_variants(tmp_path_factory.mktemp("variants"), sources)


@pytest.mark.parametrize("entry", ROWS)
def test_what_cannot_be_is_found_on_the_login_node(
    variants: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    keys, found = ROWS[entry]
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**15))
    monkeypatch.syspath_prepend(torch_of(tmp_path / "site", "2.10.0", "'12.8'"))
    keys = dict(keys)
    (tmp_path / "ds.json").write_text(json.dumps(keys.pop("ds", {})))
    assert_found(check(tmp_path, variants, **keys), found)


def test_a_model_that_the_partitions_own_memory_does_not_hold_is_refused_with_the_reason(
    variants: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has the memory; a job that asks for none gets less."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**15))
    config = "DefMemPerCPU = 100\nSelectTypeParameters = CR_CORE_MEMORY"
    path = programs(
        tmp_path / "bin",
        sinfo="echo 'batch*|64|9000000|(null)|infinite'",
        scontrol=f'[ $2 = partition ] && echo "DefMemPerNode=UNLIMITED" || echo "{config}"',
        sbatch="exit 0",
        squeue="exit 0",
    )
    command = ("check", "tiny.yaml", "--bundle", str(variants))
    write_run(tmp_path, **GPT2)
    said = run_runner(tmp_path, *command, PATH=path)
    assert "memory of the node: 6.71 GB per rank: DefMemPerCPU of slurm.conf, 100 MB" in said.out
    write_run(tmp_path, **HUGE)
    said = run_runner(tmp_path, *command, PATH=path)
    limit = "are available on CPU (DefMemPerCPU of slurm.conf, 100 MB x 64 CPUs;"
    assert_found(said, Found((limit,), "mem in slurm.options"))
    write_run(tmp_path, **HUGE, slurm={"options": {"mem": "9000G"}})
    said = run_runner(tmp_path, *command, PATH=path)
    assert said.code == 0 and "memory of the node" not in said.out, said.out + said.err


def test_a_warm_up_that_never_ends_is_told(variants: Path, tmp_path: Path) -> None:
    """Training goes on without an error, and the model hardly changes."""
    said = check(tmp_path, variants, **GPT2, schedule={"warmup": 100})
    assert_found(said, Found(("never reaches 0.003",), "schedule.warmup: 0.05", 0))


def test_a_rate_that_is_a_slip_of_the_pen_is_told(variants: Path, tmp_path: Path) -> None:
    said = check(tmp_path, variants, **GPT2, optimizer={"lr": 5})
    assert_found(said, Found(("optimizer.lr 5", "nothing is left of the model"), "5.0e-5", 0))


def test_tokens_in_place_of_sequences_are_refused(variants: Path, tmp_path: Path) -> None:
    """A step would have each of some sequences thousands of times, and never end."""
    said = check(tmp_path, variants, **GPT2, batch={"global": 2**20})
    assert_found(said, Found(("each step would take 1,048,576", "not tokens"), "or less"))


def test_a_scheduler_in_ds_config_ends_where_it_says(variants: Path, tmp_path: Path) -> None:
    params = {"total_num_steps": 260, "warmup_num_steps": 2, "warmup_max_lr": 1e-4}
    (tmp_path / "ds.json").write_text(
        json.dumps({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    )
    run = GPT2 | {"engine": {"config": "ds.json"}, "schedule": None, "optimizer": None}
    said = check(tmp_path, variants, **run)
    assert_silent(said)
    assert "total_num_steps: 260  (the rate falls until then, also in a run of" in said.out
