"""`--allow-pickle`: pickled weights become safetensors with equal tensors; no code in them runs."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stage.bundle.bundle import Bundle
from stage.convert.pickled_weights import convert_file, convert_pickles
from stage.errors import DamageError, PolicyError, StageError, about
from tests.support.staging import MODEL, Laptop, model_files


def pickled(value: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink, **options)
    return sink.getvalue()


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tied = torch.randn(7, 3)
    return {
        "embeddings.weight": tied,
        "head.weight": tied,
        "part.of": tied[2:4],
        "turned": torch.randn(4, 5).t(),
        "half": torch.randn(3).to(torch.bfloat16),
        "nan": torch.tensor([float("nan"), 1.0]),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n].nan_to_num(7), other[n].nan_to_num(7))
        for n in one
    )


def converted(tmp_path: Path, files: dict[str, bytes]) -> tuple[dict[str, str], Path]:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
    with about("m.yaml:3: `x`"):
        return convert_pickles({name: tmp_path / name for name in files}, out), out


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_are_equal_and_ties_are_written_out(tmp_path: Path, zipped: bool) -> None:
    made, out = converted(
        tmp_path, {"pytorch_model.bin": pickled(state(), _use_new_zipfile_serialization=zipped)}
    )
    assert made == {"model.safetensors": "pytorch_model.bin"}
    assert equal(load_file(out / "model.safetensors"), state())
    assert (out / "model.safetensors").stat().st_mode & 0o077 == 0o044
    again, second = converted(tmp_path, {"pytorch_model.bin": pickled({"state_dict": state()})})
    assert (
        again == made
        and (second / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    )


def test_shards_get_an_index_of_their_own(tmp_path: Path) -> None:
    files = {
        "pytorch_model-00001-of-00002.bin": pickled({"a": torch.ones(2)}),
        "pytorch_model-00002-of-00002.bin": pickled({"b": torch.ones(3, dtype=torch.float16)}),
    }
    made, out = converted(tmp_path, files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 14
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    assert set(made) == {*index["weight_map"].values(), "model.safetensors.index.json"}


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch EVIL",)


REFUSED: dict[str, tuple[bytes, type[StageError]]] = {
    "code": (pickled({"a": torch.ones(1), "b": _Evil()}), PolicyError),
    "code in the old format": (pickled(_Evil(), _use_new_zipfile_serialization=False), PolicyError),
    "a module": (pickled(torch.nn.Linear(1, 1)), PolicyError),
    "no tensors": (pickled({"a": 1}), DamageError),
    "a list": (pickled([torch.ones(1)]), DamageError),
    "nothing": (b"", DamageError),
    "torn": (pickled(state())[:-500], DamageError),
    "sparse": (pickled({"a": torch.eye(2).to_sparse()}), DamageError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pickle_of_anything_but_tensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data, kind = REFUSED[name]
    Path("x.bin").write_bytes(data)
    with pytest.raises(kind, match=r"x\.bin") as caught:
        convert_file("x.bin", "x.bin", "x.safetensors")
    assert caught.value.remedy
    assert not Path("EVIL").exists() and not Path("x.safetensors").exists()


def test_what_the_child_refuses_is_an_error_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        StageError, match=r"m\.yaml:3: `x`: pytorch_model\.bin: the pickle holds more"
    ) as caught:
        converted(tmp_path, {"pytorch_model.bin": REFUSED["code"][0]})
    assert caught.value.exit_code == 3
    assert not Path("EVIL").exists()


def test_a_model_of_pickles_is_fetched_with_leave_only(laptop: Laptop) -> None:
    weights = pickled(state())
    files = {name: data for name, data in model_files().items() if name != "model.safetensors"}
    laptop.hub.commit("models", MODEL, {**files, "pytorch_model.bin": weights})
    said = laptop.refused(3)
    assert "--allow-pickle" in said and "pytorch_model.bin" in said
    id = laptop.fetched("bundle", "--allow-pickle")
    asset = Bundle.open(laptop.bundle).asset("tiny-bert")
    (ingredient,) = asset.made_from
    assert (
        ingredient.origin == "pytorch_model.bin"
        and ingredient.size == len(weights)
        and ingredient.sha256
    )
    assert equal(load_file(laptop.bundle / "data/models/tiny-bert/model.safetensors"), state())
    assert not list(laptop.bundle.rglob("*.bin")) and "pytorch_model.bin" not in [
        o.path for o in asset.left_out
    ]
    assert laptop.stage("verify", "bundle").returncode == 0
    assert laptop.fetched("bundle") == id  # complete: nothing to make, so no leave is needed
    (laptop.bundle / "data/models/tiny-bert/model.safetensors").unlink()
    done = laptop.fetch("bundle")
    assert done.returncode == 3 and "--allow-pickle" in done.stderr
    assert laptop.fetched("bundle", "--allow-pickle") == id
