"""A lack of memory in a rank: one paragraph with what would fit, and no traceback."""

from __future__ import annotations

import os

import pytest
import torch

from runner.config.run_config import RunConfig
from runner.job.shapes import Device, ModelShape
from runner.run_folder.heartbeat import read_failure
from runner.training.faults import explain, is_out_of_memory
from tests.runner.conftest import Cluster
from tests.support.code import run_warm
from tests.support.plans import decide

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.15 GiB of "
    "which 512.00 MiB is free. Process 4711 has 12.00 GiB memory in use. Including non-PyTorch "
    "memory, this process has 66.60 GiB memory in use. Of the allocated memory 60.10 GiB is "
    "allocated by PyTorch, and 5.75 GiB is reserved by PyTorch but unallocated. If reserved but"
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * 2**30, True, True)
GPT2_LARGE = ModelShape(774_030_080, 1024, 1280, 36, 50257)


# A rank of `runner train`. Its model raises the error of CUDA's allocator in its third pass.
RANK = """
import os, sys
from pathlib import Path
import torch
from runner.cli.run import WORKS
from runner.job.training_run import TrainingRun
from runner.launch.resolved import Resolved, write_resolved
from runner.training.rank import be_rank
calls = []
def fail(module, *_):
    if type(module).__name__.endswith("ForMaskedLM") or type(module).__name__ == "BertModel":
        calls.append(module)
        if len(calls) == 3:
            raise torch.OutOfMemoryError(sys.argv[3])
torch.nn.modules.module.register_module_forward_pre_hook(fail)
run = TrainingRun.load(Path(sys.argv[1]), Path(sys.argv[2]), None, ())
run.folder.make()
write_resolved(Resolved.of(run))
be_rank(run.folder, WORKS["train"], os.environ)
"""


# On an H100 that another process had filled, NCCL's error came with a traceback.
NO_ROOM = """
import runner.training.setup
def full(*_):
    raise torch.distributed.DistBackendError(sys.argv[3])
runner.training.setup.meet = full
run = TrainingRun.load"""
FULL = "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'"


@pytest.mark.parametrize(
    ("code", "raised", "micro", "words"),
    [
        (
            RANK, CUDA, 8,
            ("rank 0, after step 2: out of memory on CPU",
             "it needed 2.50 GiB more, and 512.00 MiB are free", "Set batch.micro: 4"),
        ),
        (
            RANK.replace("\nrun = TrainingRun.load", NO_ROOM), FULL, "auto",
            ("rank 0: out of memory on CPU", "nvidia-smi", "Cuda failure 2 'out of memory'"),
        ),
    ],
    ids=["in a step", "before the run begins"],
)  # fmt: skip
def test_a_rank_without_memory_says_in_one_paragraph_what_would_fit(
    cluster: Cluster, code: str, raised: str, micro: int | str, words: tuple[str, ...]
) -> None:
    path = cluster.write("large", batch={"global": 8, "micro": micro}, engine={"name": "ddp"})
    cluster.prepare(path)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "AIRLIFT_MEETING_FILE": str(cluster.folder / "meet")}
    environ = os.environ | place | {"OMP_NUM_THREADS": "1"}
    arguments = (str(path), str(cluster.bundle), raised)
    done = run_warm(code, *arguments, cwd=cluster.folder, env=environ)
    assert done.returncode == 5 and "Traceback" not in done.stdout + done.stderr, done
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    failure = read_failure(cluster.output("large") / "logs", 0)
    # Less at once helps in a step alone: only then the launcher starts the ranks again.
    assert failure is not None and failure.no_memory is (code == RANK) and not failure.consequence


@pytest.mark.parametrize(
    ("changes", "world_size", "advice", "absent"),
    [
        ({}, 4, ["batch.micro: 4", "activation_checkpointing: true", "zero: 2"], "offload"),
        (
            {"activation_checkpointing": True, "batch": {"global": 4, "micro": 1},
             "engine": {"zero": 3}},
            4, ["engine.offload: cpu"], "micro:",
        ),
        ({"engine": {"name": "ddp"}}, 4, ["{name: deepspeed, zero: 2}"], "offload"),
        ({"engine": {"name": "fsdp", "sharding": "grad_op"}}, 2, ["sharding: full"], "zero"),
        (
            {"engine": {"name": "ddp"}, "activation_checkpointing": True,
             "batch": {"global": 1, "micro": 1}},
            1, ["Use more devices, or devices with more memory"], "Set",
        ),
    ],
)  # fmt: skip
def test_the_advice_is_what_has_not_been_tried_yet(
    cluster: Cluster, changes: dict[str, object], world_size: int, advice: list[str], absent: str
) -> None:
    settings: dict[str, object] = {"precision": "bf16", "activation_checkpointing": False}
    settings |= {"batch": {"global": 64, "micro": 8}, "engine": {"zero": 1}, **changes}
    config = RunConfig.load(cluster.write("oom", **settings))
    plan = decide(config, GPT2_LARGE, A100, world_size)
    text = "CUDA out of memory. Tried to allocate 20.00 MiB."
    fault = explain(torch.OutOfMemoryError(text), config, plan, A100, "rank 0")
    assert [words for words in advice if words not in fault.remedy] == [], fault.remedy
    assert absent not in fault.remedy
    assert fault.exit_code == 5
    assert f"micro batch {plan.micro} of" in fault.message


def test_what_libraries_say_of_too_little_memory_is_known() -> None:
    cublas, onednn = "CUBLAS_STATUS_ALLOC_FAILED when calling", "could not create a primitive"
    for text in (CPU, f"CUDA error: {cublas}", "std::bad_alloc", onednn):
        assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
    assert not is_out_of_memory(RuntimeError("can't start new thread"))
