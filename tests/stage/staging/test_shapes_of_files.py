"""Files whose shape would lose rows, talks or weights without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.remedies.obeyed import in_it, obeys
from tests.support.staging import Laptop, safetensors

CARD = b"---\nlicense: mit\n---\n"


def taken(laptop: Laptop, name: str, data: dict[str, str]) -> str:
    """Writes files into a folder, and stages it as `stage init` says; returns what was printed."""
    for path, text in data.items():
        target = laptop.folder / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (laptop.folder / "tiny.yaml").unlink(missing_ok=True)
    done = laptop.stage("init", name, "-o", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    done = laptop.fetch()
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("header", "value"),
    [("0,A dull film.", "0"), ("text,It is a bad film!", "It is a bad film!"), ("id,size", "")],
)
def test_a_header_that_looks_like_a_row_is_a_warning(
    laptop: Laptop, header: str, value: str
) -> None:
    """The first row became the names, and was lost."""
    said = taken(laptop, "d", {"a.csv": f"{header}\n1,A fine film.\n1,I laughed.\n"})
    expected = f"warning: d: default/train: a column is called {value!r}: the first line"
    assert (expected in said) == bool(value), said


def test_a_file_whose_name_has_two_splits_is_said_to_be_in_both(laptop: Laptop) -> None:
    rows = "a,b\n1,2\n"
    said = taken(laptop, "d", {"x_test_dev.csv": rows, "x_train.csv": rows})
    assert "x_test_dev.csv is in validation and test, as with `load_dataset`" in said, said
    assert "x_train.csv is in" not in said


MODELS = {
    "a diffusers pipeline": {
        "model_index.json": '{"_class_name": "SomePipeline"}',
        "tokenizer/tokenizer_config.json": "{}",
        "unet/config.json": "{}",
    },
    "a part of one": {"config.json": "{}", "diffusion_pytorch_model.safetensors": ""},
    "a CLIP of sentence-transformers": {
        "config_sentence_transformers.json": "{}",
        "modules.json": "[]",
        "0_CLIPModel/config.json": "{}",
    },
    "weights as Meta publishes them": {"params.json": "{}", "consolidated.00.pth": "x"},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_with_a_models_layout_is_no_table_of_its_settings(
    laptop: Laptop, name: str
) -> None:
    """`convert: json` made rows of the configs, and the weights stayed behind."""
    weights = laptop.folder / "pipe/unet/diffusion_pytorch_model.safetensors"
    if name == "a diffusers pipeline":
        weights.parent.mkdir(parents=True)
        weights.write_bytes(safetensors(10))
    for path, text in MODELS[name].items():
        target = laptop.folder / "pipe" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(safetensors(10) if path.endswith(".safetensors") else text.encode())
    (laptop.folder / "tiny.yaml").unlink(missing_ok=True)
    done = laptop.stage("init", "pipe", "-o", "tiny.yaml")
    assert done.returncode == 0 and "a model" in done.stdout, done.stdout + done.stderr
    assert "convert" not in (laptop.folder / "tiny.yaml").read_text()
    laptop.fetched()
    if weights.exists():
        assert (laptop.bundle / "data/files/pipe/unet" / weights.name).is_file()


@obeys("stage/hub/model_files.py", "Name with `include` what you need")
def test_a_model_of_which_nothing_would_load_is_refused(laptop: Laptop) -> None:
    """A card and a meta.yaml were taken, and called sound."""
    files = {
        "README.md": CARD,
        "meta.yaml": b"a: 1\n",
        "exp/run1/best.pth": b"weights",
        "models/default.zip": b"PK",
    }
    laptop.hub.commit("models", "acme/odd", files)
    laptop.write("format: 1\nname: tiny\nassets:\n  odd: {model: acme/odd}\n")
    said = laptop.refused(2)
    assert "neither weights nor a config.json are among the files" in said
    assert (
        "`README.md`, `meta.yaml`" in said and "`exp/run1/best.pth`, `models/default.zip`" in said
    )
    key = in_it(said, "(?<=Name with `).*?(?=`)")
    laptop.write(
        "format: 1\nname: tiny\nassets:\n"
        f'  odd: {{model: acme/odd, {key}: ["models/default.zip"]}}\n  mine: {{path: best.pth}}\n'
    )
    assert "with `path:`" in said
    (laptop.folder / "best.pth").write_bytes(b"weights")
    laptop.fetched()
    assert (laptop.bundle / "data/models/odd/models/default.zip").is_file()
    assert next((laptop.bundle / "data/files").rglob("best.pth")).read_bytes() == b"weights"


SOUND = {
    "a tokenizer": ["tokenizer.json", "tokenizer_config.json"],
    "an image processor": ["preprocessor_config.json"],
    "settings to train from scratch": ["config.json"],
    "an adapter": ["adapter_config.json", "adapter_model.safetensors"],
    "weights of a tool": ["pytorch_lora_weights.safetensors"],
    "a pipeline": ["model_index.json", "scheduler/scheduler_config.json"],
    "sentence-transformers": ["modules.json", "config_sentence_transformers.json"],
}


@pytest.mark.parametrize("name", SOUND)
def test_a_model_without_weights_or_settings_at_its_top_may_be_sound(
    laptop: Laptop, name: str
) -> None:
    contents = {".safetensors": safetensors(10), ".json": json.dumps({}).encode()}
    files = {path: contents[Path(path).suffix] for path in SOUND[name]}
    laptop.hub.commit("models", "acme/odd", {"README.md": CARD, **files})
    laptop.write("format: 1\nname: tiny\nassets:\n  odd: {model: acme/odd}\n")
    laptop.fetched()


def test_pickled_weights_are_named_before_the_state_of_an_optimizer(laptop: Laptop) -> None:
    files = {"config.json": b"{}", "optimizer.pt": b"x", "pytorch_model.bin": b"x"}
    laptop.hub.commit("models", "acme/odd", files)
    laptop.write("format: 1\nname: tiny\nassets:\n  odd: {model: acme/odd}\n")
    assert "its weights are pickles (`pytorch_model.bin`)" in laptop.refused(3)
