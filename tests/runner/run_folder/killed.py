"""Real writers of checkpoints, killed in the middle: `python -m tests.runner.run_folder.killed`.

    killed WRITER WORK KILLS SEED

The libraries are imported once. Each start is a fork that goes on from the last checkpoint and
saves all the time; it is killed by SIGKILL at a random moment. Then what is half-written is set
aside, and what is left must load whole. Prints one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from runner.run_folder.results import half_written, progress, results, set_aside


def _model(width: int = 192) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)))


def trainer(work: Path) -> None:
    """transformers' Trainer, which rotates its checkpoints; resumes if there is one."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    data = [{"input_ids": [i % 60] * 8, "labels": [i % 60] * 8} for i in range(4000)]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=128, n_layer=3, n_head=2))
    arguments = TrainingArguments(
        output_dir=str(work / "out"), save_steps=1, save_total_limit=3, logging_steps=1,
        per_device_train_batch_size=1, max_steps=4000, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    last = get_last_checkpoint(work / "out") if (work / "out").is_dir() else None
    Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=last)


def accelerate(work: Path) -> None:
    """accelerate's save_state, into numbered folders; loads the last one."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            str(work), automatic_checkpoint_naming=True, total_limit=3
        ),
    )
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, 192)).sum().backward()
    optimizer.step()
    folders = sorted((work / "checkpoints").glob("checkpoint_*"), key=lambda p: int(p.name[11:]))
    if folders:
        accelerator.load_state(str(folders[-1]))
        accelerator.project_configuration.iteration = int(folders[-1].name[11:]) + 1
    while True:
        accelerator.save_state()


def plain(work: Path) -> None:
    """torch.save of one file per epoch; all that are there must load."""
    for path in work.glob("*.pt"):
        torch.load(path)
    model = _model(512)
    for number in itertools.count():
        torch.save(model.state_dict(), work / f"epoch_{number % 10}.pt")


def tensors(work: Path) -> None:
    """safetensors' save_file."""
    from safetensors.torch import load_file, save_file

    for path in work.glob("*.safetensors"):
        load_file(path)
    model = _model(512)
    for number in itertools.count():
        save_file(model.state_dict(), work / f"model-{number % 10}.safetensors")


def deepspeed(work: Path) -> None:
    """DeepSpeed's save_checkpoint; loads what `latest` names."""
    import deepspeed

    model = _model()
    engine, *_ = deepspeed.initialize(
        model=model,
        config={"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
                "zero_optimization": {"stage": 1}},
    )  # fmt: skip
    folder = work / "out"
    is_left = any(folder.glob("global_step*"))
    loaded, _ = engine.load_checkpoint(str(folder)) if is_left else ("", {})
    if is_left and loaded is None:
        raise SystemExit("nothing was loaded")
    while True:
        engine(torch.ones(1, 192)).sum().backward()
        engine.global_steps += 1
        engine.save_checkpoint(str(folder))


WRITERS = {each.__name__: each for each in (trainer, accelerate, plain, tensors, deepspeed)}


def start(write: Callable[[Path], None], work: Path, log: Path) -> int:
    """A start in a process of its own."""
    if child := os.fork():
        return child
    status = 1
    try:
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        write(work)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def main(writer: str, work: Path, kills: int, seed: int, longest: float = 0.5) -> dict[str, object]:
    """Kills and starts again; what was found, and the end of the log of a start that failed."""
    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29713") if writer == "deepspeed" else None  # fmt: skip
    if writer == "trainer":
        from transformers import GPT2LMHeadModel, Trainer

        assert GPT2LMHeadModel and Trainer  # imported now, not in each start
    elif writer in ("accelerate", "deepspeed"):
        __import__(writer)
    chosen = random.Random(seed)
    log, lines = work.parent / "log", []
    work.mkdir(parents=True, exist_ok=True)
    for number in range(kills):
        before = results(work, {})
        child = start(WRITERS[writer], work, log)
        end = time.monotonic() + 60
        while progress(before, results(work, {})) == [] and time.monotonic() < end:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.005)
        time.sleep(chosen.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            return {"kill": number, "lines": lines, "failed": log.read_text()[-3000:]}
        broken = half_written(work, results(work, {}))
        lines += set_aside(work, broken, work.parent / "half-written" / str(number))
        if half_written(work, results(work, {})):
            return {"kill": number, "lines": lines, "failed": "still half-written"}
    return {"lines": lines, "failed": ""}


if __name__ == "__main__":
    name, folder, *numbers = sys.argv[1:]
    print(json.dumps(main(name, Path(folder), *map(int, numbers[:2]), *map(float, numbers[2:]))))
