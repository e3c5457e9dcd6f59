"""Run folders made by hand: as runs leave them, and as no run writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOSTILE = (
    "</title><script>document.title='owned'</script>"
    "<img src=http://example.invalid/x onerror=alert(1)>\u202eevil"
)


def run_folder(root: Path, *, steps: int = 40, name: str = "made", **facts: Any) -> Path:
    """A run folder whose loss falls."""
    (root / "logs").mkdir(parents=True)
    (root / "checkpoints" / "step-20").mkdir(parents=True)
    (root / "checkpoints" / "step-20" / "files.json").write_text("{}")
    (root / "checkpoints" / "step-40.tmp").mkdir()
    (root / "config.yaml").write_text(
        f"format: 1\nname: {json.dumps(name)}\nsteps: 40\noptimizer:\n  lr: 0.001\n"
    )
    facts = {"num_steps": 40, "bundle_id": "ab" * 32, "host": "gpu7", "pid": 1, **facts}
    (root / "environment.json").write_text(json.dumps(facts))
    lines = [line(step) for step in range(1, steps + 1)]
    at_end = {"step": steps, "epoch": 1.0}
    lines += [
        {**at_end, "load_host_gib": 1.0},
        {**at_end, "train_device_gib": 2.0, "train_host_gib": 3.0},
        {**at_end, "validation_loss": 3.25, "validation_perplexity": 25.8},
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return root


def line(step: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    entry = {
        "step": step, "epoch": step / 40, "loss": 7.0 - step / 20, "lr": 1e-3, "grad_norm": 1.0,
        "tokens": 256, "tokens_per_s": 1000.0, "samples_per_s": 8.0, "step_s": 2.0,
        "data_wait": 0.01, "memory_gib": 1.5,
    }  # fmt: skip
    return {**entry, **changes}


def hostile_folder(root: Path) -> Path:
    """The remains of a killed run or a full disk, and the content of an attacker."""
    run_folder(root, name=HOSTILE)
    good = json.dumps(line(5))
    lines = [
        json.dumps(line(1)), json.dumps(line(2, loss=None, grad_norm=None)),
        '{"step": 3, "loss": NaN, "lr": Infinity}', '{"step": 4, "lo', "[]", "null",
        '{"step": "five", "loss": 1}', '{"step": true}', '{"loss": 1}', "\u0000\u0000",
        '{"step": 6, "loss": 1e308, "lr": -1e308, "grad_norm": "<b>", "tokens_per_s": [1]}',
        '{"step": 7, "loss": -1e308, "lr": 1e308}', '{"step": 8, "loss": ' + "9" * 4000 + "}",
        '{"step": -9007199254740992, "loss": 1}', '{"step": 9007199254740993, "loss": 1}',
        "[" * 100_000, good,
    ]  # fmt: skip
    text = "\n".join(lines) + '\n{"step": 41, "loss": 2.'  # the last line is still being written
    (root / "metrics.jsonl").write_bytes(text.encode() + b"\xff")
    facts = {HOSTILE: HOSTILE, "git_commit": HOSTILE, "command": [HOSTILE] * 3,
             "versions": {"torch": HOSTILE}, "host": 7, "pid": "x", "num_steps": -1,
             "slurm": {"a": {"b": {"c": {}}}}}  # fmt: skip
    (root / "environment.json").write_text(json.dumps(facts))
    hostile = json.dumps(HOSTILE)
    config = f"format: 1\nname: {hostile}\n{hostile}: {hostile}\nbig: 0x{'f' * 9000}\n"
    (root / "config.yaml").write_text(config)
    return root
