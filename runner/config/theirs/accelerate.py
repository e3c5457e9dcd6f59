"""The YAML that `accelerate config` writes, as keys of a run file: engine, precision, clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from runner.config.fields import Choice
from runner.config.theirs.found import Found, is_set, is_true
from runner.errors import Lines, UsageError, reading_yaml, suggest_path

ENGINES = {
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "NO": "ddp",
}
SHARDING = {
    "FULL_SHARD": "full",
    "1": "full",
    "SHARD_GRAD_OP": "grad_op",
    "2": "grad_op",
}
PRECISION = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
_LAUNCH = "the launcher here decides it: `slurm:` of the run file, or --processes"
_OURS = "the engine here has its own way"
_REASONS = {
    "compute_environment": _LAUNCH,
    "num_processes": _LAUNCH,
    "num_machines": _LAUNCH,
    "machine_rank": _LAUNCH,
    "main_process_ip": _LAUNCH,
    "main_process_port": _LAUNCH,
    "main_training_function": _LAUNCH,
    "rdzv_backend": _LAUNCH,
    "same_network": _LAUNCH,
    "gpu_ids": _LAUNCH,
    "use_cpu": _LAUNCH,
    "enable_cpu_affinity": _LAUNCH,
    "gradient_accumulation_steps": "it follows from batch.global, batch.micro and the ranks",
    "zero3_init_flag": "the weights are loaded in pieces at ZeRO 3 by themselves",
    "fsdp_state_dict_type": "checkpoints are always one file per rank",
    "zero3_save_16bit_model": "the export is always one whole model",
}
_NO_EQUAL = "no equal here"


def load(path: Path, place: str) -> Found:
    """Reads a configuration of Accelerate.

    Args:
        path: the YAML file.
        place: where the run file names it, for the message.

    Raises:
        UsageError: there is no such file, it is not YAML, or something in it changes what is
            trained and cannot be done here.
    """
    if not path.is_file():
        raise UsageError(
            f"{place}: {path}: no such file",
            suggest_path(path, "The path is relative to the run file."),
        )
    with reading_yaml(path) as (data, lines):
        return read(data, path, lines)


def read(data: Mapping[str, Any], path: Path, lines: Lines) -> Found:
    """Translates the settings.

    Raises:
        UsageError: see `load`.
    """
    found = Found()
    kind = str(data.get("distributed_type", "NO"))
    engine = ENGINES.get(kind.upper())
    if engine is None:
        raise UsageError(
            f"{lines.place('distributed_type')}: {kind} cannot be done here.",
            f"Use one of {', '.join(ENGINES)}; or run your own script: runner exec.",
        )
    found.take("engine.name", engine, "distributed_type", kind)
    for key, value in data.items():
        match key:
            case "distributed_type":
                pass
            case "mixed_precision":
                _precision(found, str(value), lines)
            case "fsdp_config" if engine == "fsdp":
                found.add(of_fsdp(value or {}, partial(lines.place, "fsdp_config")))
            case "deepspeed_config" if engine == "deepspeed":
                _of_deepspeed(found, value or {}, path)
            case "dynamo_config" | "dynamo_backend":
                _compile(found, key, value)
            case _ if is_set(value) or key in ("num_processes", "num_machines"):
                found.leave(key, value, _REASONS.get(key, _NO_EQUAL))
    return found


def _precision(found: Found, value: str, lines: Lines) -> None:
    value = {"False": "no", "false": "no"}.get(value, value)  # YAML 1.1 reads `no` as false
    if value not in PRECISION:
        raise UsageError(
            f"{lines.place('mixed_precision')}: {value} cannot be done here.",
            f"Use one of {', '.join(PRECISION)}; or run your own script: runner exec.",
        )
    found.take("precision", PRECISION[value], "mixed_precision", value)


def _compile(found: Found, key: str, value: object) -> None:
    settings = value if isinstance(value, dict) else {"dynamo_backend": value}
    backend = str(settings.get("dynamo_backend", "NO")).upper()
    if backend == "INDUCTOR":
        found.take("compile", True, "dynamo_backend", backend)
    elif is_set(backend) and backend != "FALSE":
        found.leave(key, backend, "`compile: true` is torch's own backend, INDUCTOR")


def of_fsdp(settings: Mapping[str, Any], place: Callable[..., str]) -> Found:
    """Translates `fsdp_config`, whose keys begin with `fsdp_`.

    Args:
        place: key -> where it is, for messages.

    Raises:
        UsageError: a way of sharding that cannot be done here.
    """
    found = Found()
    policy = str(settings.get("fsdp_auto_wrap_policy", "")).upper()
    for key, value in settings.items():
        match key:
            case "fsdp_sharding_strategy":
                _sharding(found, str(value), place(key))
            case "fsdp_reshard_after_forward" if str(value).upper() in SHARDING:
                _sharding(found, str(value), place(key))
            case "fsdp_reshard_after_forward":
                found.take("engine.sharding", "full" if is_true(value) else "grad_op", key, value)
            case "fsdp_offload_params":
                found.take("engine.offload", "cpu" if is_true(value) else "none", key, value)
            case "fsdp_activation_checkpointing":
                found.take("activation_checkpointing", is_true(value), key, value)
            case "fsdp_transformer_layer_cls_to_wrap" if policy == "TRANSFORMER_BASED_WRAP":
                _layer(found, key, value)
            case "fsdp_min_num_params" if policy == "SIZE_BASED_WRAP":
                found.take("engine.wrap", {"min_params": int(value)}, key, value)
            case "fsdp_auto_wrap_policy" if policy == "NO_WRAP":
                found.leave(key, value, "the layers are always wrapped one by one")
            case "fsdp_auto_wrap_policy" | "fsdp_transformer_layer_cls_to_wrap":
                pass
            case "fsdp_min_num_params":
                pass
            case _ if is_set(value):
                found.leave(key, value, _REASONS.get(key, _OURS))
    return found


def _sharding(found: Found, value: str, place: str) -> None:
    sharding = SHARDING.get(value.upper())
    if sharding is None:
        raise UsageError(
            f"{place}: {value} cannot be done here.",
            "Use FULL_SHARD or SHARD_GRAD_OP; for NO_SHARD write `distributed_type: MULTI_GPU`.",
        )
    found.take("engine.sharding", sharding, "fsdp_sharding_strategy", value)


def _layer(found: Found, key: str, value: object) -> None:
    names = value if isinstance(value, list) else str(value).split(",")
    if len(names) == 1:
        found.take("engine.wrap", {"layer": str(names[0]).strip()}, key, value)
    else:
        found.leave(key, value, "one class at most; without, the layers of the model are wrapped")


def _of_deepspeed(found: Found, settings: Mapping[str, Any], path: Path) -> None:
    devices = []
    for key, value in settings.items():
        match key:
            case "deepspeed_config_file":
                found.take("engine.config", str((path.parent / str(value)).resolve()), key, value)
            case "zero_stage":
                found.take("engine.zero", int(value), key, value)
            case "gradient_clipping" if value != "auto":
                found.take("optimizer.clip", float(value), key, value)
            case "offload_optimizer_device" | "offload_param_device":
                devices.append((key, str(value)))
            case "offload_optimizer_nvme_path" | "offload_param_nvme_path" if is_set(value):
                found.take("engine.nvme_path", value, key, value)
            case _ if is_set(value) and value != "auto":
                found.leave(key, value, _REASONS.get(key, _NO_EQUAL))
    key, device = next((pair for pair in devices if pair[1] != "none"), ("", "none"))
    if devices:
        found.take("engine.offload", device, key or devices[0][0], device)


def expand(data: dict[str, Any], path: Path, lines: Lines) -> tuple[Choice, ...]:
    """Replaces `engine.accelerate` of a run file by the keys that this file sets.

    Args:
        data: the run file; it is changed.
        path: the run file.
        lines: its line numbers; mistakes are kept there.

    Returns:
        What was taken and what was left out, for printing.
    """
    engine = data.get("engine")
    if not isinstance(engine, dict) or "accelerate" not in engine:
        return ()
    place, theirs = lines.place("engine", "accelerate"), engine.pop("accelerate")
    with lines.mistakes:
        if not isinstance(theirs, str):
            raise UsageError(
                f"{place}: `engine.accelerate` is the path of a YAML file.",
                "`accelerate config --config_file fsdp.yaml` writes one.",
            )
        file = path.parent / theirs
        found = load(file, place)
        _check_contradictions(found, data, file.name, lines)
        for key, value in found.values.items():
            *sections, last = key.split(".")
            here = data
            for section in sections:
                here = here.setdefault(section, {})
            if here.get(last) in (None, "auto"):
                here[last] = value
        taken = [Choice(k, v, found.reasons[k], file.name) for k, v in found.values.items()]
        left = [Choice(k, "left out", why, file.name) for k, why in found.left_out.items()]
        return (*taken, *left)
    return ()


def _check_contradictions(found: Found, data: Mapping[str, Any], name: str, lines: Lines) -> None:
    clashes = []
    for key, value in found.values.items():
        here: Any = data
        for part in key.split("."):
            here = here.get(part) if isinstance(here, dict) else None
        if here not in (None, "auto", value):
            where = lines.place(*key.split("."))
            clashes.append(f"{name} says {found.reasons[key]}, {where} says {key}: {here}")
    if clashes:
        raise UsageError(f"{'; '.join(clashes)}.", "Make them equal, or remove one of them.")
