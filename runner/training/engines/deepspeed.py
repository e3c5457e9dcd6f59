"""DeepSpeed at ZeRO 0 to 3, on GPUs (nccl) and CPUs (gloo).

`ds_config` says what is set and why: a function of the plan and of the user's ds_config.json.
Nothing is compiled at start: DeepSpeed would build its own Adam for the CPU, where torch's fused
Adam is as good, and a shared-memory collective that only inference uses. Only NVMe offload needs a
compiler (for its asynchronous files).
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runner.config.ds_config import HALF, OFFLOADS, named_in, place_of
from runner.config.run_config import RunConfig
from runner.from_stage import (
    StageError,
    UsageError,
    human_count,
    isolated,
    join_errors,
    nearest_name,
    shortage,
)
from runner.job.plan import TrainingPlan
from runner.run_folder.training_state import read_state
from runner.training import patches
from runner.training.components.device import DTYPES
from runner.training.components.optimization import (
    DeepSpeedRate,
    clip,
    make_optimizer,
    skips_on_device,
)
from runner.training.engines.base import compile_model, gathered, transformer_blocks
from runner.training.weights import Weights, from_first

# Reduces gradients during the backward, in buckets of 5e7 elements (200 MB in float32).
# With DeepSpeed's own 5e8 the first bucket of most models is full when the backward has ended.
BUCKETS = {"overlap_comm": True, "reduce_bucket_size": 5e7, "allgather_bucket_size": 5e7}
_HALF_BY_DEFAULT: dict[str, dict[str, Any]] = {
    # Stage 1 in bf16 has an optimizer of its own, which adds each gradient to a float32 sum. At
    # once: otherwise it would keep a second, bf16 copy of all gradients until the step.
    "bf16": {"immediate_grad_update": True},
    # loss_scale 0 means dynamic, from 2**16 down.
    "fp16": {"loss_scale": 0, "initial_scale_power": 16},
}
TAG = "engine"
CONVERTED = "universal.tmp"


def ds_config(config: RunConfig, plan: TrainingPlan, *, pin: bool = False) -> dict[str, Any]:
    """The configuration for DeepSpeed: the user's, overridden by what this run decided. Pure.

    Args:
        config: the run file, with the user's DeepSpeed settings.
        plan: precision, batch sizes and ZeRO stage of the run.
        pin: whether offloaded tensors are in pinned memory, which only a GPU uses.
    """
    theirs = {key: value for key, value in config.deepspeed.items() if key != "scheduler"}
    zero = {**BUCKETS, **dict(theirs.pop("zero_optimization", {})), "stage": plan.zero}
    if not any(key.startswith("offload_") for key in zero):
        zero |= _offload(config, plan, pin)
    for name in OFFLOADS:
        if (zero.get(name) or {}).get("device") == "nvme":
            zero[name] = {"nvme_path": config.engine.nvme_path, **zero[name]}
    halves = {name: {**theirs.pop(name, {}), "enabled": False} for name in HALF}
    if plan.precision in HALF:
        halves[plan.precision] = {
            **_HALF_BY_DEFAULT[plan.precision],
            **halves[plan.precision],
            "enabled": True,
        }
    # By default DeepSpeed adds gradients up and reduces them in the type of the weights. In bf16
    # the sum of 64 micro batches is then 0.8 % off. Only defaults: a ds_config.json may differ.
    sums = {"grad_accum_dtype": "fp32", **dict(theirs.pop("data_types", {}))}
    return {
        "steps_per_print": 2**31,
        "communication_data_type": "fp32",
        # They wait for the device twice per step; StepClock measures the same.
        "timers": {"throughput": {"enabled": False}},
        **theirs,
        "data_types": sums,
        **halves,
        "zero_optimization": zero,
        "train_batch_size": plan.total,
        "train_micro_batch_size_per_gpu": plan.micro,
        "gradient_accumulation_steps": plan.accumulation,
        # At stage 0 in fp32 `step` clips: DeepSpeed would compute the norm a second time.
        "gradient_clipping": 0.0 if _is_plain(plan) else config.optimizer.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
    }


def check_settings(config: RunConfig, settings: Mapping[str, Any]) -> None:
    """Asks DeepSpeed whether it takes what became of the user's ds_config.json.

    Its own configuration reads all values, and its scheduler its own settings; both take
    milliseconds, and no model.

    Args:
        config: the run file, which names the ds_config.json.
        settings: of `ds_config`.

    Raises:
        UsageError: it does not; all mistakes, with DeepSpeed's words and the file's lines.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    wanted = settings["data_types"].get("param_dtype")
    path, errors = Path(config.engine.config or ""), list[StageError]()
    if wanted and config.precision not in ("auto", wanted):
        said = f"param_dtype {wanted} and a precision of {config.precision}"
        errors.append(_refused(path, "param_dtype", said))
    errors += _asked(path, lambda: DeepSpeedConfig(dict(settings)))
    if "scheduler" in config.deepspeed:
        errors += _asked(path, lambda: DeepSpeedRate(config, num_steps=1000))
    errors += _unknown_parameters(config, path)
    if errors:
        raise join_errors(errors, "mistakes", str(path))


def _asked(path: Path, ask: Callable[[], object]) -> list[StageError]:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from pydantic import ValidationError

    try:
        ask()
    except ValidationError as error:
        models = {model.__name__: model for model in DeepSpeedConfigModel.__subclasses__()}
        fields = getattr(models.get(error.title), "model_fields", {})
        known = [name for key, field in fields.items() for name in (field.alias or key,)]
        found = []
        for wrong in error.errors():
            key = ".".join(map(str, wrong["loc"]))
            is_unknown = wrong["type"] == "extra_forbidden"
            said = f"{error.title}: {f'{key}: ' if key else ''}{wrong['msg']}"
            found.append(_refused(path, key, said, known if is_unknown else ()))
        return found
    except Exception as error:
        if shortage(error):
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        return [_refused(path, named_in(said, path), said)]
    return []


def _refused(path: Path, key: str, said: str, known: Iterable[str] = ()) -> StageError:
    near = nearest_name(key, known)
    meant = f"Write `{near}`, if that is meant; else correct" if near else "Correct"
    return UsageError(
        f"{place_of(path, key) if key else path}: DeepSpeed {version('deepspeed')} refuses it: "
        f"{said}",
        f"{meant} or remove `{key}` there." if key else "Correct it there.",
    )


def _unknown_parameters(config: RunConfig, path: Path) -> list[StageError]:
    """Finds settings of the user's optimizer that none of DeepSpeed's for it takes.

    DeepSpeed would find them while it makes the optimizer, which needs a compiler.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    kinds: dict[str, tuple[Any, ...]] = {
        "adamw": (FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW),
        "lion": (FusedLion, DeepSpeedCPULion),
        "sgd": (torch.optim.SGD,),
    }
    known = {"torch_adam"}  # DeepSpeed's engine takes it out by itself
    for kind in kinds.get(config.optimizer.name, ()):
        known |= signature(kind).parameters.keys()
    begin = "optimizer.params."
    names = [n.key.removeprefix(begin) for n in config.notes if n.key.startswith(begin)]
    what = f"none of its optimizers for {config.optimizer.name} has"
    return [_refused(path, name, f"{what} {name}", known) for name in names if name not in known]


def _is_plain(plan: TrainingPlan) -> bool:
    """Whether DeepSpeed keeps torch's own optimizer, which computes no norm."""
    return plan.zero == 0 and plan.precision == "fp32"


def note_on_sums(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The line to print about the types in which gradients are added up."""
    added, sent = settings["data_types"]["grad_accum_dtype"], settings["communication_data_type"]
    return (
        f"gradients: added up in {added} and reduced in {sent} (a ds_config.json may change it: "
        "data_types.grad_accum_dtype, communication_data_type)",
    )


def _offload(config: RunConfig, plan: TrainingPlan, pin: bool) -> dict[str, Any]:
    """Optimizer state off the device; at stage 3 the weights too."""
    if plan.offload == "none":
        return {}
    place: dict[str, Any] = {"device": plan.offload, "pin_memory": pin}
    if plan.offload == "nvme":
        place["nvme_path"] = config.engine.nvme_path
    return {"offload_optimizer": place, **({"offload_param": place} if plan.zero == 3 else {})}


class DeepSpeedEngine:
    """`deepspeed.initialize` behind the loop's protocol."""

    notes: tuple[str, ...] = ()

    def __init__(
        self, module: nn.Module, config: RunConfig, plan: TrainingPlan, device: torch.device
    ) -> None:
        deepspeed = _import_joined(device)
        self._plan, self._config, self._device = plan, config, device
        settings = ds_config(config, plan, pin=device.type == "cuda")
        if config.engine.config is not None:
            check_settings(config, settings)
        if plan.precision != "fp32" or "communication_data_type" in config.deepspeed:
            self.notes = note_on_sums(settings)
        # DeepCompile replaces the compiler's backend, and needs the whole model in one graph.
        deepcompile = bool(dict(settings.get("compile", {})).get("deepcompile"))
        if config.compile and not deepcompile:
            self.notes = (*self.notes, _compile(module, plan.zero))
        _place(module, config, plan, device, settings)
        self._base = make_optimizer(module, config.optimizer)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=self._base, config=settings, dist_init_required=False
        )
        self._allow_smallest_loss_scale()
        if config.compile and deepcompile:
            self.notes = (*self.notes, "compile: the whole model (deepcompile of a ds_config.json)")
            self._engine.compile()

    def forward(self, batch: Mapping[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        return self._engine(**{name: tensor.to(self._device) for name, tensor in batch.items()})  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # DeepSpeed divides by accumulation and averages over ranks; the loop has scaled for the
        # sum.
        self._engine.backward(loss * (self._plan.accumulation * self._plan.world_size))
        if not last:
            self._engine.step()  # counts the micro batch; updates nothing before the boundary

    def step(self, rate: float) -> float | torch.Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = None
        if _is_plain(self._plan):
            norm = clip(self._engine.module.parameters(), self._config.optimizer.clip)
        if norm is None or skips_on_device(self._optimizer, norm) or math.isfinite(norm):
            self._engine.step()
        else:  # the other stages skip such a step themselves
            self._engine.module.zero_grad(set_to_none=True)
            self._engine.micro_steps += 1
        # A scalar on the device, or inf: no comparison here, which would wait for it.
        found = norm if norm is not None else self._engine.get_global_grad_norm()
        return 0.0 if found is None else found

    def save(self, folder: Path) -> None:
        engine, faults = self._engine, list[Exception]()
        with patches.faults_of_save(engine, faults):
            engine.save_checkpoint(
                str(folder),
                tag=TAG,
                save_latest=False,
                exclude_frozen_parameters=self._omits_frozen,
            )
        if faults:
            raise faults[0]

    def load(self, folder: Path) -> None:
        saved = read_state(folder)
        # At stage 0 every rank holds everything, so any number of ranks can read it.
        if self._plan.zero == 0 or (saved.world_size, saved.zero) == (
            self._plan.world_size,
            self._plan.zero,
        ):
            self._load(folder)
        else:
            self._load_converted(folder, saved.world_size)

    def _load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(
            str(folder), tag=TAG, load_module_strict=not self._omits_frozen
        )
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")
        self._allow_smallest_loss_scale()  # the checkpoint has its own loss scaler

    def _allow_smallest_loss_scale(self) -> None:
        """Stops DeepSpeed from raising a bare `Exception` at the smallest loss scale.

        DeepSpeed then skips the step as it skipped those before, and stays at that scale. The loop
        counts and reports such steps.
        """
        scaler: Any = getattr(self._optimizer, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False

    @property
    def _omits_frozen(self) -> bool:
        """Whether a checkpoint omits the weights that LoRA does not train: the bundle has them.

        At stage 3 DeepSpeed saves them with the rest.
        """
        return self._config.lora is not None and self._plan.zero < 3

    def _load_converted(self, folder: Path, saved_ranks: int) -> None:
        """Loads a checkpoint of another number of ranks, which rank 0 converts.

        DeepSpeed's universal checkpoint supports only AdamW on a whole model. Other runs are
        rejected before (runner.run_folder.resume).
        """
        # Beside the checkpoint: a checkpoint has only the files of its list.
        converted = folder.parent / CONVERTED
        from_first(lambda: _convert(folder / TAG, converted))
        kept = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self._optimizer.param_groups
        ]
        with patches.loads_converted(self._engine):
            self._load(converted)
        # At stage 3 DeepSpeed gives every group the decay of the first group, and all weights one
        # shared step counter, which each of them would increase.
        for group, values in zip(self._optimizer.param_groups, kept, strict=True):
            group.update(values)
        for state in self._base.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(converted)
        self.notes = (
            *self.notes,
            f"checkpoint of {human_count(saved_ranks, 'rank')} converted for "
            f"{self._plan.world_size}",
        )

    def export(self, *, frozen: bool = True) -> dict[str, Any]:
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        is_partitioned = self._plan.zero == 3 or (
            self._plan.zero and self._plan.precision != "fp32"
        )

        def whole(_: str, parameter: nn.Parameter) -> torch.Tensor:
            # Only trained weights have a float32 copy; frozen ones must be gathered at stage 3.
            full = (
                safe_get_full_fp32_param(parameter)
                if is_partitioned and parameter.requires_grad
                else None
            )
            if full is None and hasattr(parameter, "ds_id"):
                with deepspeed.zero.GatheredParameters(parameter):
                    return parameter.data.clone()
            return parameter.data if full is None else full

        dtype, is_first = DTYPES[self._plan.precision], dist.get_rank() == 0
        return gathered(self._engine.module, dtype, whole, is_first=is_first, frozen=frozen)


def _compile(module: nn.Module, zero: int) -> str:
    """Compiles a module before DeepSpeed wraps it, and says how.

    At stage 3 DeepSpeed gathers weights in hooks of each small module, where a compiled graph would
    end. As a "leaf" a block is gathered in one piece, by hooks around it, as with FSDP2.
    """
    blocks = transformer_blocks(module)
    if zero < 3 or not blocks:
        return compile_model(module)
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(module, list({type(block) for block in blocks}))
    return f"{compile_model(module, hooked=True)}; each block is gathered in one piece"


def _place(
    module: nn.Module,
    config: RunConfig,
    plan: TrainingPlan,
    device: torch.device,
    settings: Mapping[str, Any],
) -> None:
    """Fills in a module's weights, in the type that DeepSpeed computes in; at stage 3 partitioned.

    At stage 3 `zero.Init` partitions weights in the type they have, and the engine then skips its
    own cast: with float32 weights it would compute in float32.
    """
    if config.quantization is not None:  # never at stage 3; each rank has quantised its own
        for parameter in module.parameters():
            # Partitioning fails on views (DeepSpeed#6571).
            parameter.data = parameter.data.contiguous()
        return
    narrow = DTYPES[plan.precision] if plan.precision != "fp32" else None
    weights = Weights(module, device, narrow=narrow)
    if plan.zero < 3:
        weights.fill(module.parameters())
        return
    import deepspeed

    deepspeed.zero.Init(module=_OneByOne(module, weights), config_dict_or_path=settings)
    weights.finish()


class _OneByOne(nn.Module):
    """A module for `zero.Init`, which partitions each of `parameters` before it asks for the next.

    So a rank never holds more than one whole weight. `zero.Init` itself broadcasts rank 0's.
    """

    def __init__(self, module: nn.Module, weights: Weights) -> None:
        super().__init__()
        self.module, self._weights = module, weights

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters, each filled in when it is asked for."""
        for empty in list(self.module.parameters()):
            yield from self._weights.lend([empty], broadcast=False)


def _import_joined(device: torch.device) -> Any:
    """Imports DeepSpeed after the ranks have joined, and gives it their process group."""
    import deepspeed

    if device.type == "cpu":
        patches.omit_shared_memory_op()
    else:
        # DeepSpeed uses the GPU of this number. Where Slurm shows each task only its own GPU, it is
        # 0 on every rank.
        os.environ["LOCAL_RANK"] = str(device.index)
    patches.import_uncompiled_muon()
    # All five rank variables are set; DeepSpeed must not search for MPI in any case.
    deepspeed.init_distributed(
        "nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False
    )
    return deepspeed


def _convert(source: Path, target: Path) -> None:
    """Runs DeepSpeed's converter in its own process. It uses no device.

    Raises:
        OSError: it failed; with the last line of its error output.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    done = subprocess.run(
        isolated(
            "deepspeed.checkpoint.ds_to_universal",
            *("--input_folder", str(source), "--output_folder", str(target / TAG)),
            "--inject_missing_state",
        ),
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise OSError(f"{source.parent}: converting it for other ranks failed: {said}")
