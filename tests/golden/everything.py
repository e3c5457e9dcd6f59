"""One manifest with every kind of asset, and the bundle that `stage fetch` makes of it.

The repositories are served by the Hub in scripts/lib/hub, the packages of the environment lie in a
folder. What a library writes with other bytes in another version (parquet, Arrow, PNG, pickles) is
in `materials`.
"""

from __future__ import annotations

import json
import sys
import tarfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.stage.convert.test_archives import tar, zipped
from tests.support.environment.channel import make_channel
from tests.support.environment.laptop import new_laptop, sdist, stand_ins, wheel_of_installed
from tests.support.servers.hubs import TestHub
from tests.support.servers.web import serve
from tests.support.staging import Laptop, model_files, safetensors

MATERIALS = Path(__file__).resolve().parent / "materials"
SHARDS = ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001")
CARD = b"""---
license: cc0-1.0
configs:
- config_name: plain
  data_files:
  - split: train
    path: plain/train-*
  - split: validation
    path: plain/validation-*
---
# Lines
"""
CARD_OF_TABLES = b"""---
configs:
- config_name: default
  sep: ";"
  data_files:
  - split: train
    path: a.csv
  - split: test
    path: b.csv
dataset_info:
  features:
  - name: kind
    dtype:
      class_label:
        names:
          '0': good
          '1': bad
---
"""
# Each column is a rule of the conversion: what keeps a column from being numbers, what is null.
CSV = """\
whole,fraction,truth,zeros,date,long,missing,mixed,words,text
1,0.5,true,007,2024-02-29,12345678901234567890,NA,1,NA,"two
lines, ""quoted\"""
-17,1e-05,False,010,2023-01-01,10000000000000000000,,x,,
9223372036854775807,.25,TRUE,000,1999-12-31,99999999999999999999,3,2.5,None,  spaces  ü
"""
JSON = """\
[{"id": 1, "tags": ["a", "b"], "who": {"name": "Ann", "age": 3}, "ratio": 0.5, "ok": true},
 {"id": 2, "tags": [], "who": {"name": null}, "ratio": 2.0, "ok": null, "date": "2024-02-29"},
 {"id": -9007199254740993, "who": {"age": 4, "zip": "007"}, "ratio": 1e300}]
"""
JSONL = """\
{"messages": [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Yes.\\n"}]}
{"messages": [{"role": "user", "content": "ü\\u0001"}], "n": 12345678901}
"""


def material(name: str) -> bytes:
    return (MATERIALS / name).read_bytes()


def fill(hub: TestHub) -> None:
    """The repositories: models, code, datasets in several formats, a metric, an old name."""
    hub.commit("models", "acme/tiny-bert", model_files(20_000))
    hub.configure("models", "old/tiny-bert", moved_to="acme/tiny-bert")
    pickled = {"config.json": b'{"model_type": "bert"}\n', "LICENSE": b"Do as you like.\n"}
    pickled["pytorch_model.bin"] = material("pytorch_model.bin")
    hub.commit("models", "acme/pickled", pickled, tag="v1")
    code = {"modeling_x.py": b"from .layers_x import A\n", "layers_x.py": b"A = 1\n"}
    hub.commit("models", "acme/code", {**code, "README.md": b"---\nlicense: mit\n---\n"})
    names = {"AutoModel": "acme/code--modeling_x.Model"}
    config = json.dumps({"model_type": "x", "auto_map": names}).encode()
    hub.commit(
        "models", "acme/coded", {"config.json": config, "model.safetensors": safetensors(100)}
    )
    lines = {f"plain/{name}.parquet": material(f"{name}.parquet") for name in SHARDS}
    hub.commit("datasets", "acme/lines", {**lines, "README.md": CARD})
    tables = {"a.csv": b"kind;n\ngood;1\nbad;2\n", "b.csv": b"kind;n\nbad;3\n"}
    hub.commit("datasets", "acme/tables", {**tables, "README.md": CARD_OF_TABLES})
    hub.commit("datasets", "acme/chats", {"train.jsonl": JSONL.encode(), "LICENSE": b"Free.\n"})
    hub.commit("datasets", "acme/pictures", pictures())
    hub.commit("datasets", "acme/scripted", {"scripted.py": b"raise SystemExit\n"})
    published = {"default/train/0000.parquet": material(f"{SHARDS[0]}.parquet")}
    hub.commit("datasets", "acme/scripted", published, ref="refs/convert/parquet")
    metric = {"share.py": b"from .counting import equal\n", "counting.py": b"equal = 1\n"}
    metric["README.md"] = b"---\nlicense: apache-2.0\nsdk: gradio\n---\n"
    hub.commit("spaces", "evaluate-metric/share", {**metric, "app.py": b"import gradio\n"})


def pictures() -> dict[str, bytes]:
    names = {"train/cat/1.png": "red", "train/dog/2.png": "green", "test/dog/3.png": "blue"}
    return {path: material(f"{name}.png") for path, name in names.items()}


def local_files() -> dict[str, bytes]:
    """Files beside the manifest."""
    captions = {
        "captioned/metadata.csv": b"caption,file_name,n\nzwei,a/2.png,2\neins,1.png,1\n",
        "captioned/1.png": material("red.png"),
        "captioned/a/2.png": material("grey.png"),
    }
    return {
        "notes/a b/größe.txt": b"\n\n",
        "notes/deep/one.txt": b"one\n",
        "notes/skipped.log": b"log\n",
        "table.csv": CSV.encode(),
        "semicolons.csv": b"\xef\xbb\xbfa;b\n1;x,y\n2;\n",
        "records.json": JSON.encode(),
        "talks/train.jsonl": JSONL.encode(),
        "talks/test.jsonl": JSONL.splitlines()[0].encode(),
        "story.txt": "first\n\nthird ü\n".encode(),
        "table.arrow": material("table.arrow"),
        "table.parquet": material("table.parquet"),
        **{f"pictures/{path}": data for path, data in pictures().items()},
        **captions,
    }


def assets(web: str) -> dict[str, Any]:
    """The manifest's assets: name -> entry. `web`: the address of `web_files`."""
    return {
        "bert": {"model": "old/tiny-bert"},
        "bert-all": {"model": "acme/tiny-bert", "include": ["*.json", "onnx/*"]},
        "pickled": {"model": "acme/pickled", "revision": "v1"},
        "coded": {"model": "acme/coded", "allow_code": True},
        "tok": {"tokenizer": "acme/tiny-bert"},
        "lines": {"dataset": "acme/lines", "config": "plain", "splits": ["train"]},
        "lines-all": {"dataset": "acme/lines"},
        "scripted": {"dataset": "acme/scripted"},
        "tables": {"dataset": "acme/tables"},
        "chats": {"dataset": "acme/chats"},
        "hub-pictures": {"dataset": "acme/pictures"},
        "share": {"metric": "share", "allow_code": True},
        "notes": {"path": "./notes", "exclude": ["*.log"], "licence": "cc0-1.0"},
        "csv": {"path": "./table.csv", "convert": "csv"},
        "semicolons": {"path": "./semicolons.csv", "convert": "csv", "separator": ";"},
        "json": {"path": "./records.json", "convert": "json"},
        "talks": {"path": "./talks", "convert": "jsonl"},
        "story": {"path": "./story.txt", "convert": "text"},
        "arrow": {"path": "./table.arrow", "convert": "arrow"},
        "parquet": {"path": "./table.parquet", "convert": "parquet"},
        "pictures": {"path": "./pictures", "convert": "imagefolder"},
        "captioned": {"path": "./captioned", "convert": "imagefolder"},
        "plain-url": {"url": f"{web}/one.txt"},
        "tar": {"url": f"{web}/files.tar", "unpack": True},
        "zip": {"url": f"{web}/files.zip", "unpack": True},
        "cifar": {
            "url": f"{web}/cifar-10-python.tar.gz",
            "unpack": True,
            "convert": "cifar",
        },
        "env": {"environment": "./environment.yml", "profile": "./cluster.yml"},
    }


def web_files() -> dict[str, bytes]:
    members = {"files/one.txt": b"one\n", "files/deep/two.txt": b"two\n"}
    return {
        "/one.txt": b"one\n",
        "/files.tar": tar(list(members.items()), tarfile.USTAR_FORMAT),
        "/files.zip": zipped([(zipfile.ZipInfo(name), data) for name, data in members.items()]),
        "/cifar-10-python.tar.gz": material("cifar-10-python.tar.gz"),
    }


def fetch_everything(folder: Path) -> tuple[Path, str]:
    """Makes the bundle; returns its folder, and the address of the web server in its lock."""
    channel = folder / "channel"
    make_channel(channel)
    packages = [wheel_of_installed("click", folder), sdist(folder, "py3-none-any")]
    environment = new_laptop(folder / "laptop", channel)
    environment.lock(["python", "pip", "links", "greeter", *stand_ins(channel)], packages)
    for path, data in local_files().items():
        (environment.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (environment.folder / path).write_bytes(data)
    with ExitStack() as stack:
        web = stack.enter_context(serve())
        web.files.update(web_files())
        hub = TestHub(folder / "hub", stack)
        fill(hub)
        manifest = {"format": 1, "name": "everything", "assets": assets(web.url(""))}
        laptop = Laptop(environment.folder, hub, {"UV_NO_INDEX": "1"})
        (laptop.folder / "tiny.yaml").write_text(json.dumps(manifest))
        laptop.fetched("bundle", "--allow-pickle", PATH=_path())
    return laptop.bundle, web.url("")


def _path() -> str:
    """Where `uv` and `git` are: those of the tests."""
    return f"{Path(sys.executable).parent}:/usr/bin:/bin"
