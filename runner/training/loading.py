"""How a model is loaded: the same on every rank, with its weights on rank 0."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from runner.config.run_config import RunConfig
from runner.data.tokenizing import rows_needed
from runner.errors import UsageError
from runner.inputs import ModelInput
from runner.job.findings import raise_errors
from runner.job.looks import judge
from runner.training.components import adapter
from runner.training.components.device import use_tanh_gelu
from runner.training.patches import in_file_types
from runner.training.weights import from_first, widen_untrained


def load_model(
    auto: Any, config: RunConfig, model: ModelInput, *, fresh: tuple[str, ...] = (), **settings: Any
) -> tuple[Any, str]:
    """Loads a transformers model, the same on every rank.

    The weights are pretrained, or random from config.json (`init: scratch`). Weights that the
    checkpoint does not have (a new head) are drawn with the run's seed.

    Args:
        auto: the `AutoModelFor...` class.
        config: the run file, with its precision decided.
        model: the bundle's model.
        fresh: first parts of names of weights that may have another shape in the checkpoint; they
            get new random values.
        settings: values that replace those of config.json.

    Returns:
        The model, and where its weights come from, for printing. Ranks other than 0 have a model
        without weights (on `meta`): the engine spreads those of rank 0, which are float32, or in
        the types of the files and to become float32. With LoRA, frozen weights are in the run's
        precision. Quantised weights are on every rank's device.

    Raises:
        UsageError: weights of the checkpoint do not fit the model of its config.json.
    """
    if config.model.folder is not None:
        model = replace(model, asset=str(config.model.folder), path=config.model.folder)
    torch.manual_seed(config.seed)
    if config.quantization is not None:
        # Each rank quantises on its own device, weight by weight; the files are mapped once a node.
        made, drawn = _read(auto, config, model, fresh, settings)
    else:
        made, drawn = _made_once(auto, config, model, fresh, settings)
    origin = f"all weights from {model.asset}"
    if config.model.init == "scratch":
        origin = "all weights are new and random (init: scratch)"
    elif drawn:
        origin = (
            f"weights from {model.asset}; {len(drawn)} it does not have are random: "
            f"{', '.join(drawn[:3])}..."
        )
    if config.lora is not None:
        origin = f"{origin}; {adapter.attach(made, config, model, drawn, fresh)}"
    if config.activation_checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made.config.use_cache = False
    made.train()
    return made, "; ".join(filter(None, (origin, use_tanh_gelu(made))))


def _made_once(
    auto: Any,
    config: RunConfig,
    model: ModelInput,
    fresh: tuple[str, ...],
    settings: dict[str, Any],
) -> tuple[Any, list[str]]:
    """The model, with weights on rank 0 only; and the names of its weights that are new."""
    made: list[Any] = []

    def read() -> list[str]:
        """On rank 0 only."""
        if config.model.init == "scratch":
            made.append(grow(_bare(auto, config, model, settings), model))
            return []
        # LoRA draws its matrices in the type of the weight beside them.
        lazily = config.lora is None and torch.distributed.is_initialized()
        with in_file_types() if lazily else nullcontext():
            found, drawn = _read(auto, config, model, fresh, settings)
            grow(found, model)
        if lazily:
            widen_untrained(found)
        made.append(found)
        return drawn

    drawn = from_first(read)
    if not made:
        with torch.device("meta"):
            made.append(grow(_bare(auto, config, model, settings), model))
    return made[0], drawn


def grow(made: Any, model: ModelInput) -> Any:
    """Gives a model's embedding rows for the tokens that the run adds, as transformers does.

    They are drawn around the mean of the others, with a billionth of their covariance.
    """
    rows = rows_needed(model)
    embedding = made.get_input_embeddings() if rows else None
    if embedding is not None and rows > embedding.num_embeddings:
        made.resize_token_embeddings(rows, mean_resizing=not embedding.weight.is_meta)
    return made


def _bare(auto: Any, config: RunConfig, model: ModelInput, settings: dict[str, Any]) -> Any:
    """A model with random weights, as its config.json says."""
    from transformers import AutoConfig

    built_from = AutoConfig.from_pretrained(str(model.path), local_files_only=True, **settings)
    return auto.from_config(built_from, dtype=_how(config)["dtype"])


def _how(config: RunConfig) -> dict[str, Any]:
    return {"dtype": torch.float32} if config.lora is None else adapter.loading(config)


def _read(
    auto: Any,
    config: RunConfig,
    model: ModelInput,
    fresh: tuple[str, ...],
    settings: dict[str, Any],
) -> tuple[Any, list[str]]:
    """The pretrained model, and the names of its weights that the checkpoint does not have."""
    made, info = auto.from_pretrained(
        str(model.path),
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=bool(fresh),
        **_how(config),
        **settings,
    )
    return made, _drawn(info, model, fresh)


def _drawn(info: dict[str, Any], model: ModelInput, fresh: tuple[str, ...]) -> list[str]:
    """The names of the weights that the checkpoint does not have.

    Raises:
        UsageError: weights have another shape, or layers have none, and are not `fresh`.
    """
    misfits = sorted(
        key if isinstance(key, str) else str(key[0]) for key in info["mismatched_keys"]
    )
    if wrong := [name for name in misfits if not name.startswith(fresh or ("\0",))]:
        raise UsageError(
            f"{model.path}: weights do not fit config.json: {wrong[0]}",
            "Stage weights and config together.",
        )
    missing = [name for name in info["missing_keys"] if not name.startswith(fresh or ("\0",))]
    raise_errors(judge(model.asset, {"missing_keys": missing}, model.settings))
    return sorted({*info["missing_keys"], *misfits})
