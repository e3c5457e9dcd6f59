"""A bundle gets the files that from_pretrained needs, in one weight format; on real listings."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stage.errors import PolicyError, StageError, UsageError
from stage.files import Digest
from stage.hub.model_files import (
    RemoteFile,
    select_by_patterns,
    select_model,
    select_tokenizer,
)
from tests.remedies.obeyed import in_it, obeys

GIT = Digest("git-sha1", "a" * 40)
HERE = "stage/hub/model_files.py"


def listing(paths: str) -> list[RemoteFile]:
    return [RemoteFile(path, 1, upstream=GIT) for path in paths.split()]


def selected(
    paths: str, *exclude: str, tokenizer_only: bool = False
) -> tuple[set[str], dict[str, str]]:
    """The chosen paths, and path -> reason of the others; together they are the listing."""
    if tokenizer_only:
        taken, left_out = select_tokenizer(listing(paths), exclude)
    else:
        taken, left_out, _ = select_model(listing(paths), exclude)
    assert sorted([f.path for f in taken] + [o.path for o in left_out]) == sorted(paths.split())
    return {file.path for file in taken}, {o.path: o.reason for o in left_out}


# google-bert/bert-base-uncased
BERT = """
.gitattributes LICENSE README.md config.json flax_model.msgpack model.onnx model.safetensors
pytorch_model.bin rust_model.ot tf_model.h5 tokenizer.json tokenizer_config.json vocab.txt
coreml/fill-mask/float32_model.mlpackage/Manifest.json
coreml/fill-mask/float32_model.mlpackage/Data/com.apple.CoreML/model.mlmodel
coreml/fill-mask/float32_model.mlpackage/Data/com.apple.CoreML/weights/weight.bin
"""
# openai-community/gpt2
GPT2 = """
.gitattributes 64-8bits.tflite 64-fp16.tflite 64.tflite README.md config.json flax_model.msgpack
generation_config.json merges.txt model.safetensors onnx/config.json onnx/decoder_model.onnx
onnx/tokenizer.json pytorch_model.bin rust_model.ot tf_model.h5 tokenizer.json
tokenizer_config.json vocab.json
"""
# meta-llama/Meta-Llama-3-8B-Instruct
LLAMA = """
.gitattributes LICENSE README.md USE_POLICY.md config.json generation_config.json
model-00001-of-00004.safetensors model-00002-of-00004.safetensors model-00003-of-00004.safetensors
model-00004-of-00004.safetensors model.safetensors.index.json special_tokens_map.json tokenizer.json
tokenizer_config.json original/consolidated.00.pth original/params.json original/tokenizer.model
"""
# mistralai/Mistral-7B-Instruct-v0.3
MISTRAL = """
.gitattributes README.md config.json consolidated.safetensors generation_config.json
model-00001-of-00002.safetensors model-00002-of-00002.safetensors model.safetensors.index.json
params.json special_tokens_map.json tokenizer.json tokenizer.model tokenizer.model.v3
tokenizer_config.json
"""
# sentence-transformers, with a Dense module and the exports of today
SENTENCE = """
.gitattributes 1_Pooling/config.json 2_Dense/config.json 2_Dense/model.safetensors
2_Dense/pytorch_model.bin README.md config.json config_sentence_transformers.json data_config.json
model.safetensors modules.json onnx/config.json onnx/model.onnx onnx/tokenizer.json
openvino/openvino_model.bin openvino/openvino_model.xml pytorch_model.bin rust_model.ot
sentence_bert_config.json special_tokens_map.json tf_model.h5 tokenizer.json tokenizer_config.json
train_script.py vocab.txt
"""
# stabilityai/stable-diffusion-xl-base-1.0, shortened
DIFFUSERS = """
.gitattributes LICENSE.md README.md model_index.json sd_xl_base_1.0.safetensors
sd_xl_base_1.0_0.9vae.safetensors sd_xl_offset_example-lora_1.0.safetensors comparison.png
scheduler/scheduler_config.json text_encoder/config.json text_encoder/flax_model.msgpack
text_encoder/model.fp16.safetensors text_encoder/model.onnx text_encoder/model.safetensors
tokenizer/merges.txt tokenizer/special_tokens_map.json tokenizer/tokenizer_config.json
tokenizer/vocab.json unet/config.json unet/diffusion_flax_model.msgpack
unet/diffusion_pytorch_model.fp16.safetensors unet/diffusion_pytorch_model.safetensors
unet/model.onnx vae/config.json vae/diffusion_pytorch_model.safetensors vae_decoder/config.json
vae_decoder/model.onnx
"""
# a LoRA adapter of peft with a trainer's leftover files
ADAPTER = """
.gitattributes README.md adapter_config.json adapter_model.bin adapter_model.safetensors
special_tokens_map.json tokenizer.json tokenizer_config.json training_args.bin
checkpoint-500/adapter_model.safetensors checkpoint-500/optimizer.pt
checkpoint-500/trainer_state.json runs/events.out.tfevents.1
"""


# a quantised model with exports, and with the authors' own format beside it
COPIES = """
config.json model.safetensors llama.Q4_K_M.gguf gguf/llama.Q8_0.gguf onnx/model.onnx
onnx/model.onnx_data model.onnx original/consolidated.safetensors original/params.json
original/tokenizer.model consolidated.safetensors
"""

UNREAD = "in a folder that from_pretrained does not read"
COPY = "another copy of the weights"
LISTINGS: dict[str, tuple[str, str, dict[str, str]]] = {
    # listing -> what travels, and some of the reasons of what stays
    "one of six formats": (
        BERT,
        "LICENSE README.md config.json model.safetensors tokenizer.json tokenizer_config.json "
        "vocab.txt",
        {
            "tf_model.h5": "TensorFlow weights",
            "model.onnx": "an ONNX copy",
            "pytorch_model.bin": "a pickle",
            "rust_model.ot": "Rust weights",
            "coreml/fill-mask/float32_model.mlpackage/Manifest.json": UNREAD,
        },
    ),
    "copies for phones": (
        GPT2,
        "README.md config.json generation_config.json merges.txt model.safetensors tokenizer.json "
        "tokenizer_config.json vocab.json",
        {"64.tflite": "a TensorFlow Lite copy"},
    ),
    "shards with their index, and the original": (
        LLAMA,
        "LICENSE README.md USE_POLICY.md config.json generation_config.json "
        "model-00001-of-00004.safetensors model-00002-of-00004.safetensors "
        "model-00003-of-00004.safetensors model-00004-of-00004.safetensors "
        "model.safetensors.index.json special_tokens_map.json tokenizer.json "
        "tokenizer_config.json",
        {"original/params.json": UNREAD},
    ),
    "a consolidated copy": (
        MISTRAL,
        "README.md config.json generation_config.json model-00001-of-00002.safetensors "
        "model-00002-of-00002.safetensors model.safetensors.index.json params.json "
        "special_tokens_map.json tokenizer.json tokenizer.model tokenizer_config.json",
        {"consolidated.safetensors": COPY},
    ),
    "a single file and shards of it": (
        "config.json model.safetensors "
        "model-00001-of-00001.safetensors model.safetensors.index.json",
        "config.json model.safetensors",
        {"model.safetensors.index.json": "an index of shards not taken"},
    ),
    "modules": (
        SENTENCE,
        "1_Pooling/config.json 2_Dense/config.json 2_Dense/model.safetensors README.md config.json "
        "config_sentence_transformers.json data_config.json model.safetensors modules.json "
        "sentence_bert_config.json special_tokens_map.json tokenizer.json tokenizer_config.json "
        "vocab.txt",
        {"train_script.py": "code of the repository"},
    ),
    "a pipeline in several precisions": (
        DIFFUSERS,
        "LICENSE.md README.md model_index.json scheduler/scheduler_config.json "
        "text_encoder/config.json text_encoder/model.safetensors tokenizer/merges.txt "
        "tokenizer/special_tokens_map.json tokenizer/tokenizer_config.json "
        "tokenizer/vocab.json unet/config.json unet/diffusion_pytorch_model.safetensors "
        "vae/config.json vae/diffusion_pytorch_model.safetensors vae_decoder/config.json",
        {
            "sd_xl_base_1.0.safetensors": COPY,
            "unet/diffusion_pytorch_model.fp16.safetensors": COPY,
        },
    ),
    "an adapter with what a trainer left": (
        ADAPTER,
        "README.md adapter_config.json adapter_model.safetensors special_tokens_map.json "
        "tokenizer.json tokenizer_config.json",
        {"training_args.bin": "a pickle", "checkpoint-500/optimizer.pt": UNREAD},
    ),
    "weights of an unusual name alone": (
        "config.json model.fp16.safetensors",
        "config.json model.fp16.safetensors",
        {},
    ),
    "chat templates": (
        "config.json model.safetensors chat_template.jinja "
        "additional_chat_templates/tool_use.jinja x/y.jinja",
        "config.json model.safetensors chat_template.jinja "
        "additional_chat_templates/tool_use.jinja",
        {"x/y.jinja": UNREAD},
    ),
    "the tokenizer of one of six formats": (
        BERT,
        "LICENSE README.md config.json tokenizer.json tokenizer_config.json vocab.txt",
        {
            "model.safetensors": "not part of the tokenizer",
            "coreml/fill-mask/float32_model.mlpackage/Manifest.json": "not part of the tokenizer",
        },
    ),
    "the tokenizer alone": (
        "tokenizer.bin tokenizer.model vocab.txt.PKL x/vocab.txt "
        "additional_chat_templates/tool.jinja",
        "tokenizer.model additional_chat_templates/tool.jinja",
        {
            "tokenizer.bin": "a pickle",
            "vocab.txt.PKL": "a pickle",
            "x/vocab.txt": "not part of the tokenizer",
        },
    ),
    "configuration alone": (
        "config.json tokenizer.json vocab.txt .gitattributes",
        "config.json tokenizer.json vocab.txt",
        {},
    ),
    "GGUF, ONNX and the authors' own format": (
        COPIES,
        "config.json model.safetensors",
        {
            "llama.Q4_K_M.gguf": "a GGUF copy",
            "model.onnx": "an ONNX copy",
            "consolidated.safetensors": COPY,
            "onnx/model.onnx": UNREAD,
            "gguf/llama.Q8_0.gguf": UNREAD,
            "original/params.json": UNREAD,
        },
    ),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_what_from_pretrained_needs_travels_and_the_rest_stays_with_a_reason(name: str) -> None:
    paths, travels, reasons = LISTINGS[name]
    taken, stay = selected(paths, tokenizer_only=name.startswith("the tokenizer"))
    assert taken == set(travels.split())
    assert {path: stay[path] for path in reasons} == reasons


@pytest.mark.parametrize(
    "paths",
    [
        "config.json pytorch_model.bin",
        "config.json pytorch_model-00001-of-00002.bin pytorch_model-00002-of-00002.bin "
        "pytorch_model.bin.index.json",
        "params.json consolidated.00.pth tokenizer.model",
        "config.json model.ckpt",
        "config.json tf_model.h5 pytorch_model.bin",
        "modules.json config.json model.safetensors 2_Dense/config.json 2_Dense/pytorch_model.bin",
        "model_index.json unet/config.json unet/diffusion_pytorch_model.safetensors "
        "vae/config.json vae/diffusion_pytorch_model.bin",
    ],
)
def test_a_part_whose_weights_are_pickles_alone_is_refused(paths: str) -> None:
    with pytest.raises(PolicyError, match="weights are pickles") as refusal:
        selected(paths)
    assert refusal.value.exit_code == 3
    assert "exclude" in refusal.value.remedy and "safetensors" in refusal.value.remedy


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (
            "config.json model-00001-of-00003.safetensors model-00003-of-00003.safetensors",
            "1 of 3 weight files are missing, number 2 first",
        ),
        (
            "config.json model-00002-of-00002.safetensors model.safetensors.index.json",
            "1 of 2 weight files are missing, number 1 first",
        ),
        (
            "config.json model.safetensors.index.json",
            "an index of weight files, and none of the files",
        ),
        (
            "model_index.json unet/config.json "
            "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
            "1 of 2 weight files are missing, number 2 first",
        ),
    ],
)
def test_a_missing_shard_is_noticed_on_the_laptop(paths: str, said: str) -> None:
    with pytest.raises(UsageError) as refusal:
        selected(paths)
    assert said in refusal.value.message


SHARDS = "config.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors"
PICKLES = "config.json pytorch_model-00001-of-00002.bin pytorch_model-00002-of-00002.bin"


@obeys(HERE, "If a pattern of `exclude` takes it", "Take a revision with safetensors (often")
@obeys(HERE, "Take a repository or revision with safetensors. If you want")
@pytest.mark.parametrize(
    ("paths", "exclude"),
    [
        (f"{SHARDS} model.safetensors.index.json", "*-00001-*"),
        (f"{PICKLES} pytorch_model.bin.index.json", "*.h5"),
        ("config.json tf_model.h5 flax_model.msgpack", "*.md"),
        ("config.json rust_model.ot", "*.md"),
    ],
)
def test_weights_that_do_not_travel_are_excluded_as_the_message_says(
    paths: str, exclude: str
) -> None:
    """The index of the shards was left, and with it obeying led to "the upload is incomplete"."""
    with pytest.raises(StageError) as refusal:
        selected(paths, exclude)
    remedy = refusal.value.remedy
    patterns = yaml.safe_load(in_it(remedy, r"(?<=exclude: )\[.*?\]"))
    assert selected(paths, *patterns)[0] == {"config.json"}
    if "remove that pattern" in remedy:
        assert selected(paths)[0] == set(paths.split())
    if "with `include`" in remedy:
        files = paths.split()
        assert len(select_by_patterns(listing(paths), files, [])[0]) == len(files)
    if "--allow-pickle" in remedy:
        assert select_model(listing(paths), [], allow_pickle=True)[2] == paths.split()[1:3]


def test_patterns_take_what_they_say_and_nothing_else() -> None:
    taken, stay = select_by_patterns(
        listing(LLAMA), ["*.json", "LICENSE"], ["original/", "*_map.json"]
    )
    assert {file.path for file in taken} == {"LICENSE", "README.md", "USE_POLICY.md"} | {
        path
        for path in LLAMA.split()
        if path.endswith(".json") and "/" not in path and "_map" not in path
    }
    reasons = {left.path: left.reason for left in stay}
    assert reasons["original/params.json"] == "excluded by the manifest"
    assert reasons[".gitattributes"] == "not in the manifest's `include`"


@pytest.mark.parametrize(
    ("pattern", "said"), [("*", "pickle"), ("*.pth", "pickle"), ("modeling.py", "code")]
)
def test_a_pattern_does_not_let_pickles_and_code_in(pattern: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        select_by_patterns(listing("a.PTH modeling.py x/original.pth config.json"), [pattern], [])


@given(
    st.lists(
        st.sampled_from([*BERT.split(), *LLAMA.split(), *DIFFUSERS.split(), *SENTENCE.split()]),
        unique=True,
    )
)
def test_any_listing_is_parted_in_two_or_refused_in_words(paths: list[str]) -> None:
    try:
        taken, stay = selected(" ".join(paths))
    except (PolicyError, UsageError) as refusal:
        assert refusal.message and refusal.remedy
    else:
        assert all(stay.values())
        assert not [
            path
            for path in taken
            if path.endswith((".bin", ".pth", ".py", ".h5", ".msgpack", ".onnx"))
        ]


@pytest.mark.parametrize("paths", [BERT, GPT2, LLAMA, MISTRAL, ADAPTER])
def test_a_tokenizer_travels_without_weights(paths: str) -> None:
    taken, _ = selected(paths, tokenizer_only=True)
    assert "tokenizer.json" in taken and "tokenizer_config.json" in taken
    assert not [
        path
        for path in taken
        if path.endswith((".safetensors", ".bin", ".pth", ".h5", ".index.json"))
    ]
    assert "config.json" in taken or "adapter_config.json" in paths
