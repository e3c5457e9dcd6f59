"""Model types that transformers and peft know: both need torch, and a launcher runs without it.

Copied from the versions in envs/constraints.txt; `tests/runner/config/test_model_types.py` compares
them. Another transformers can know other types, so a type that is in no table here is left to
transformers itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# transformers/models/auto/modeling_auto.py: the keys of MODEL_FOR_..._MAPPING_NAMES
MODEL_TYPES = {
    "MASKED_LM": """
    albert bart bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert
    electra ernie esm esmc eurobert flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm
    longformer luke mbart megatron-bert mobilebert modernbert modernvbert mpnet mra mvp neomme
    nomic_bert nystromformer perceiver reformer rembert roberta roberta-prelayernorm roc_bert
    roformer squeezebert tapas ultrabert ultravbert xlm xlm-roberta xlm-roberta-xl xmod yoso
    """,
    "CAUSAL_LM": """
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation
    big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom blt camembert
    codegen cohere cohere2 cohere2_moe cohere_compass_text cpmant ctrl cwm data2vec-text dbrx
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 dots3_note
    dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1
    falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text
    gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant
    gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text inkling_text internlm3 iquestcoder
    jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4 llama4_text
    longcat_flash mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama modernbert-decoder
    moshi moss_transcribe_diarize mpt musicgen musicgen_melody mvp nanochat nemotron nemotron_h
    olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phi4_multimodal
    phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma reformer rembert
    roberta roberta-prelayernorm roc_bert roformer rwkv seed_oss smollm3 solar_open stablelm
    starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod
    youtu zamba zamba2 zaya
    """,
    "SEQUENCE_CLASSIFICATION": """
    albert arcee axk1 axk2 bart bert big_bird bigbird_pegasus biogpt bloom camembert canine
    cohere_compass_text convbert ctrl data2vec-text deberta deberta-v2 deepseek_v2 deepseek_v3
    diffllama distilbert doge electra ernie esm esmc eurobert exaone4 falcon flaubert fnet funnel
    gemma gemma2 gemma3 gemma3_text glm glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss
    gptj gte helium hunyuan_v1_dense hunyuan_v1_moe ibert jamba jetmoe jina_embeddings_v3 layoutlm
    layoutlmv2 layoutlmv3 lilt llama longformer luke markuplm mbart megatron-bert minicpm3 minimax
    ministral ministral3 mistral mistral4 mixtral mobilebert modernbert modernbert-decoder
    modernvbert mpnet mpt mra mt5 mvp nemotron nomic_bert nystromformer olmo olmo2 olmo3
    openai-gpt opt perceiver persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5
    qwen3_5_text qwen3_moe qwen3_next reformer rembert roberta roberta-prelayernorm roc_bert
    roformer seed_oss smollm3 squeezebert stablelm starcoder2 t5 t5gemma t5gemma2 tapas ultrabert
    ultravbert umt5 xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso zamba zamba2
    """,
    "TOKEN_CLASSIFICATION": """
    albert apertus arcee axk1 axk2 bert big_bird biogpt bloom bros camembert canine convbert
    data2vec-text deberta deberta-v2 deepseek_v3 diffllama distilbert electra ernie esm esmc
    eurobert exaone4 falcon flaubert fnet funnel gemma gemma2 glm glm4 gpt-sw3 gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_oss gte helium ibert jina_embeddings_v3 layoutlm layoutlmv2 layoutlmv3
    lilt llama longformer luke markuplm megatron-bert minimax ministral ministral3 mistral
    mistral4 mixtral mobilebert modernbert modernvbert mpnet mpt mra mt5 nemotron nomic_bert
    nystromformer openai_privacy_filter persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_5 qwen3_asr
    qwen3_moe qwen3_next rembert roberta roberta-prelayernorm roc_bert roformer seed_oss smollm3
    squeezebert stablelm starcoder2 t5 t5gemma t5gemma2 ultrabert ultravbert umt5 xlm xlm-roberta
    xlm-roberta-xl xlnet xmod yoso
    """,
    "IMAGE_CLASSIFICATION": """
    beit bit clip convnext convnextv2 cvt data2vec-vision deit dinat dinov2
    dinov2_with_registers donut-swin efficientnet focalnet hgnet_v2 hiera ijepa imagegpt levit
    metaclip_2 mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 perceiver poolformer pp_lcnet pvt
    pvt_v2 regnet resnet segformer shieldgemma2 siglip siglip2 swiftformer swin swinv2 textnet
    timm_wrapper vit vit_msn
    """,
}

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


def model_types(table: str) -> frozenset[str]:
    """Returns the model types of a table.

    Args:
        table: as in `MODEL_TYPES`: the part of the table's name that is the task.
    """
    return frozenset(MODEL_TYPES[table].split())


def is_encoder(settings: Mapping[str, Any]) -> bool:
    """Returns whether a model's tokens see the ones after them, by its config.json."""
    return settings.get("model_type") in model_types("MASKED_LM") and not settings.get("is_decoder")


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
