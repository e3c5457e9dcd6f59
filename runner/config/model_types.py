"""Model types that peft knows: it needs torch, and a launcher runs without it.

Copied from the version in envs/constraints.txt; `tests/runner/config/test_model_types.py` compares
them. The model types that transformers knows are in `runner.tasks`, in each task's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# peft/utils/constants.py: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
LORA_TARGETS: dict[str, Sequence[str]] = {
    "RefinedWeb": ["query_key_value"],
    "RefinedWebModel": ["query_key_value"],
    "bart": ["q_proj", "v_proj"],
    "bert": ["query", "value"],
    "blip-2": ["q", "v", "q_proj", "v_proj"],
    "bloom": ["query_key_value"],
    "btlm": ["c_proj", "c_attn"],
    "chatglm": ["query_key_value"],
    "codegen": ["qkv_proj"],
    "deberta": ["in_proj"],
    "deberta-v2": ["query_proj", "value_proj"],
    "electra": ["query", "value"],
    "falcon": ["query_key_value"],
    "gemma": ["q_proj", "v_proj"],
    "gemma2": ["q_proj", "v_proj"],
    "gemma3_text": ["q_proj", "v_proj"],
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    "gpt2": ["c_attn"],
    "gpt_bigcode": ["c_attn"],
    "gpt_neo": ["q_proj", "v_proj"],
    "gpt_neox": ["query_key_value"],
    "gptj": ["q_proj", "v_proj"],
    "layoutlm": ["query", "value"],
    "llama": ["q_proj", "v_proj"],
    "llama4": ["q_proj", "v_proj"],
    "mistral": ["q_proj", "v_proj"],
    "mixtral": ["q_proj", "v_proj"],
    "mpt": ["Wqkv"],
    "mt5": ["q", "v"],
    "nemotron_h": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "opt": ["q_proj", "v_proj"],
    "phi": ["q_proj", "v_proj", "fc1", "fc2"],
    "qwen2": ["q_proj", "v_proj"],
    "qwen3": ["q_proj", "v_proj"],
    "roberta": ["query", "value"],
    "rwkv": ["key", "value", "receptance", "output"],
    "rwkv7": ["r_proj", "k_proj", "v_proj", "o_proj", "key", "value"],
    "stablelm": ["q_proj", "v_proj"],
    "t5": ["q", "v"],
    "xlm-roberta": ["query", "value"],
}


def targets_in_peft(
    model_type: object, known: Mapping[str, Sequence[str]] = LORA_TARGETS
) -> list[str]:
    """Returns the modules that peft chooses for LoRA in an architecture; empty: peft lists none.

    For some it has a pattern in their place (gemma4). All linear layers are taken then.

    Args:
        known: peft's own table.
    """
    found = known.get(str(model_type), [])
    return [] if isinstance(found, str) else list(found)
