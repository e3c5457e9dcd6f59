"""Causal language modelling: predict each token from those before it."""

from __future__ import annotations

from collections.abc import Mapping
from operator import methodcaller
from typing import Any

from runner.config.run_config import RunConfig
from runner.data.store import IGNORED, Rows, SamplePlace
from runner.inputs import ModelInput
from runner.tasks import masked_lm
from runner.tasks.shared.kinds import TEXT, DocumentTask, LanguageObjective
from runner.tasks.shared.task import Batch

# Model types whose logits are their output embedding applied to their hidden states, and no more
# (transformers' modeling files). tests/runner/tasks/test_language.py tests each of them.
HEADS = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3"})


MODEL_TYPES = """
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
"""


class CausalLM(DocumentTask):
    """Each token of a document from those before it."""

    def sees_ahead(self, settings: Mapping[str, Any]) -> bool:
        """Whether it is an encoder: many of them can also be loaded as a decoder."""
        is_encoder = settings.get("model_type") in masked_lm.TASK.model_types
        return is_encoder and not settings.get("is_decoder")

    def objective(self, config: RunConfig, model: ModelInput, facts: Any) -> CausalObjective:
        return CausalObjective(self.model_class(), config, model, facts)


TASK = CausalLM(
    name="causal-lm",
    place=2,
    auto="AutoModelForCausalLM",
    table="CAUSAL_LM",
    model_types=frozenset(MODEL_TYPES.split()),
    pipeline="text-generation",
    peft_type="CAUSAL_LM",
    reads={"text": TEXT},
    chosen=("text",),
    packing=("joined", "separate", "alone"),
    example="gpt2-large-fsdp.yaml",
)


class CausalObjective(LanguageObjective):
    """The next token, for any model that `AutoModelForCausalLM` loads."""

    logits_at_predictions = False

    def __init__(self, auto: Any, config: RunConfig, model: ModelInput, facts: Any) -> None:
        from runner.training.components import language

        super().__init__(auto, config, model)
        known = self.model.config.model_type in HEADS
        head = methodcaller("get_output_embeddings") if known else None
        self.module = language.Language(
            self.model, causal=True, head=head, smoothing=config.label_smoothing
        )
        self._in_blocks = False
        if getattr(facts, "documents", None) == "separate":
            self._in_blocks, note = language.choose_flex(self.model, language.gpu_capability())
            self.note = f"{self.note}; {note}"
        if self._in_blocks:
            self.model.set_attn_implementation("flex_attention")

    def collate(self, rows: Rows, samples: list[SamplePlace]) -> Batch:
        """Builds the labels: the sequence itself, where it is learned. Nothing is random.

        The first token of a document is not predicted.
        """
        import torch

        from runner.training.components import language

        in_blocks = self._in_blocks and rows.layout == "separate"
        rows = language.whole_blocks(rows) if in_blocks else rows
        ids = torch.from_numpy(rows.ids)
        guessed = rows.learned.copy()
        guessed[:, 0] = False
        guessed[:, 1:] &= rows.documents[:, 1:] == rows.documents[:, :-1]
        labels = ids.masked_fill(torch.from_numpy(~guessed), IGNORED)
        batch = {"input_ids": ids, "labels": labels}
        if in_blocks:
            batch["blocks"] = torch.from_numpy(language.blocks_of(rows.documents))
        return batch | language.position_inputs(rows, self._first)
