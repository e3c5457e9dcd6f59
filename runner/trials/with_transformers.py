"""The exported model loads, and computes: in a child process, since it imports torch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers

from runner import offline
from runner.data.store import Store
from runner.errors import StageError
from runner.job.training_run import TrainingRun
from runner.tasks import task_named


def load_export(run: TrainingRun) -> str:
    """Loads the exported model and its tokenizer as anybody would, and computes once with them.

    Returns:
        What was loaded.

    Raises:
        StageError: it does not load, or gives no numbers.
    """
    offline.close_network()
    warnings.simplefilter("ignore")
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
