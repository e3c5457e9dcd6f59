"""What a rehearsal does in child processes, because it imports torch.

Every GPU of a node computes once: a GPU that fails ends only that child. The exported model loads,
and computes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from runner import offline
from runner.data.store import Store
from runner.from_stage import StageError
from runner.job.training_run import TrainingRun
from runner.tasks import task_named


def run_kernels() -> tuple[int, str]:
    """Runs one kernel on each GPU that torch sees.

    Returns:
        How many there are, and the first one's name.

    Raises:
        StageError: torch has no kernels for a GPU, or the GPU does not work.
    """
    number = torch.cuda.device_count()
    for index in range(number):
        try:
            torch.ones(8, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            name = torch.cuda.get_device_name(index)
            raise StageError(
                f"GPU {index} ({name}): {str(error).splitlines()[0]} torch {torch.__version__} is "
                f"compiled for {' '.join(torch.cuda.get_arch_list())}.",
                "Stage an environment for this device: `stage env probe` prints its profile here.",
                exit_code=1,
            ) from None
    return number, torch.cuda.get_device_name(0) if number else ""


def load_export(run: TrainingRun) -> str:
    """Loads the exported model and its tokenizer as anybody would, and computes once with them.

    Returns:
        What was loaded.

    Raises:
        StageError: it does not load, or gives no numbers.
    """
    offline.close_network()
    warnings.simplefilter("ignore")
    import transformers  # takes seconds, which the kernels do not need

    transformers.utils.logging.disable_progress_bar()
    try:
        return _load(run)
    except StageError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the libraries raise
        raise StageError(
            f"the exported model does not load in transformers {transformers.__version__}: "
            f"{type(error).__name__}: {error}",
            "The model of the run would not load either: look at config.json, "
            "generation_config.json and the tokenizer's files of the staged model.",
            exit_code=1,
        ) from None


def _load(run: TrainingRun) -> str:
    task = task_named(run.config.task)
    auto = task.model_class()
    folder, lora = run.folder.model, run.config.lora
    if lora is not None and not lora.merge:
        from peft import PeftModel

        base = auto.from_pretrained(run.inputs.model.path, **_head(run), local_files_only=True)
        model = PeftModel.from_pretrained(base, str(folder))
    else:
        model, info = auto.from_pretrained(folder, output_loading_info=True, local_files_only=True)
        if lost := sorted(info["missing_keys"]):
            raise StageError(
                f"the exported model lacks {len(lost)} weights: {', '.join(map(str, lost[:3]))}.",
                "Look at config.json of the staged model: the weights and it must be of one model.",
                exit_code=1,
            )
    model.eval()
    with torch.no_grad():
        logits = model(**task.trial_inputs(model, folder)).logits
    if not bool(torch.isfinite(logits).all()):
        raise StageError(
            "the exported model gives nan or inf.",
            "Verify the weights (stage verify BUNDLE --deep), or lower optimizer.lr.",
            exit_code=1,
        )
    return f"{type(model).__name__}, from_pretrained"


def _head(run: TrainingRun) -> dict[str, Any]:
    """The keyword arguments with which a base gets the head that an adapter was trained with."""
    if not task_named(run.config.task).has_classes:
        return {}
    stores = map(Store, run.folder.stores.glob("*.arrow"))
    number = max(len(store.facts.class_names) for store in stores)
    return {"num_labels": number, "ignore_mismatched_sizes": True}
