"""A manifest is read; every mistake is reported with file:line before any request is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stage.errors import PolicyError, UsageError
from stage.lock.manifest import Manifest
from stage.lock.requests import (
    DatasetRequest,
    EnvironmentRequest,
    ModelRequest,
    PathRequest,
    UrlRequest,
    as_lock_request,
)

ROOT = Path(__file__).resolve().parents[3]
EVERY_KIND = """\
format: 1
name: bert-large-wikitext2
policy:
  licences: [apache-2.0, cc-by-sa-3.0]
assets:
  bert-large-uncased:
    model: google-bert/bert-large-uncased
    revision: main
    include: ["*.safetensors", "*.json", "vocab.txt"]
    exclude: "onnx/"
  tok:
    tokenizer: bert-base-uncased
  wikitext-2:
    dataset: Salesforce/wikitext
    config: wikitext-2-raw-v1
    splits: [train, validation]
  cifar-10:
    url: https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz
    sha256: 6D958BE074577803D12ECDEFD02955F39262C83C16FE9348329D7FE0B5C001CE
    unpack: true
    convert: cifar
  prompts:
    path: ./midjourney_prompt_dataset.csv
    convert: csv
  train-env:
    environment: ../envs/bert-large.yml
    profile: ../envs/profiles/a800.yml
"""


def load(folder: Path, text: str) -> Manifest:
    path = folder / "x.yaml"
    path.write_text(text)
    return Manifest.load(path)


def asset(entry: str, head: str = "format: 1\n") -> str:
    return f"{head}assets:\n  a:\n" + "".join(f"    {line}\n" for line in entry.splitlines())


def test_every_kind_of_asset_is_read_with_its_options(tmp_path: Path) -> None:
    manifest = load(tmp_path, EVERY_KIND)
    assert manifest.name == "bert-large-wikitext2" and manifest.licences == (
        "apache-2.0",
        "cc-by-sa-3.0",
    )
    assert manifest.text == EVERY_KIND.encode() and manifest.lock_path == tmp_path / "x.lock"
    assert dict(manifest.requests) == {
        "bert-large-uncased": ModelRequest(
            repository="google-bert/bert-large-uncased",
            include=("*.safetensors", "*.json", "vocab.txt"),
            exclude=("onnx/",),
        ),
        "tok": ModelRequest(repository="bert-base-uncased", tokenizer_only=True),
        "wikitext-2": DatasetRequest(
            repository="Salesforce/wikitext",
            config="wikitext-2-raw-v1",
            splits=("train", "validation"),
        ),
        "cifar-10": UrlRequest(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            unpack=True,
            convert="cifar",
        ),
        "prompts": PathRequest(path="./midjourney_prompt_dataset.csv", convert="csv"),
        "train-env": EnvironmentRequest(
            environment="../envs/bert-large.yml", profile="../envs/profiles/a800.yml"
        ),
    }


@pytest.mark.parametrize(
    "path", sorted((ROOT / "manifests").glob("*.yaml")), ids=lambda path: path.name
)
def test_our_own_manifests_are_read(path: Path) -> None:
    assert Manifest.load(path).requests


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("name: x\nassets: {a: {model: b}}\n", None, "`format` is missing|Write `format: 1`"),
        ("format: 0\nassets: {a: {model: b}}\n", 1, "`format` must be 1, found `0`"),
        (
            "format: 2\nassets: {a: {model: b}}\n",
            1,
            "format 2; this version of airlift reads format 1|Use a newer airlift",
        ),
        (
            "format: true\nassets: {a: {model: b}}\n",
            1,
            "`format` must be 1, found `true`|Write `format: 1`",
        ),
        (
            "format: on\nassets: {a: {model: b}}\n",
            1,
            "`format` must be 1, found `on`, which is true here",
        ),
        ("format: 1\n", None, "no assets"),
        ("format: 1\nassets: {}\n", 2, "no assets"),
        ("format: 1\nassets: [a]\n", 2, "`assets` must be `key: value` lines"),
        ("format: 1\nasets: {}\n", 2, "unknown key `asets`|`assets`"),
        (
            "format: 1\nname: 7\nassets: {a: {model: b}}\n",
            2,
            "`name` must be text, found `7`|quotes",
        ),
        ("format: 1\nname:\nassets: {a: {model: b}}\n", 2, "`name` must be text"),
        (asset("model: a/b\nrevison: main"), 5, "unknown key `revison` in `assets.a`|`revision`"),
        (asset("modle: a/b"), 4, "unknown key `modle`|`model`"),
        (asset("revision: main"), 3, "does not say what it is|model, tokenizer, dataset"),
        (asset("model: a/b\ndataset: a/c"), 3, "has both `model` and `dataset`"),
        (asset("model: a/b\nsplits: [train]"), 5, "unknown key `splits`"),
        (asset("tokenizer: a/b\ninclude: ['*']"), 5, "unknown key `include`"),
        ("format: 1\nassets:\n  a: org/name\n", 3, "should be a mapping such as `model: org/name`"),
        ("format: 1\nassets:\n  a:\n", 3, "should be a mapping"),
        ("format: 1\nassets:\n  a b: {model: x}\n", 3, "cannot name an asset"),
        ("format: 1\nassets:\n  ../a: {model: x}\n", 3, "cannot name an asset"),
        (asset("model: https://huggingface.co/a/b"), 4, "is an address|`model: a/b`"),
        (asset("dataset: hf://datasets/a/b"), 4, "is an address|`dataset: a/b`"),
        (asset("model: a/b/c"), 4, "must be a repository such as org/name"),
        (asset("model: a/.."), 4, "must be a repository"),
        (
            asset("model: ./folder"),
            4,
            "is a local file or folder; `model` names a repository on the Hub",
        ),
        (
            asset("dataset: rows.csv"),
            4,
            "is a local file or folder; `dataset` names a repository on the Hub",
        ),
        (
            asset("dataset: rows.csv"),
            4,
            "Write `path: rows.csv`, and how to read it: `convert: csv`. `stage init rows.csv`",
        ),
        (asset("model: rows.csv"), 4, "Write `path: rows.csv`. `stage init rows.csv`"),
        (asset("dataset: ./rows"), 4, "Write `path: ./rows`. `stage init ./rows`"),
        (
            asset("dataset: a/b\ninclude: ['*']\nconfig: c"),
            6,
            "`config` cannot stand beside `include`|For `runner train`, keep `config`",
        ),
        (
            asset("dataset: a/b\nsplits: [train]\nexclude: ['*']"),
            5,
            "`splits` cannot stand beside `exclude`",
        ),
        (asset(f"model: {'a' * 97}"), 4, "must be a repository"),
        (
            asset("path: gone.csv\nconvret: csv"),
            None,
            "x.yaml:5: unknown key `convret`|x.yaml:4: `a`: there is no ",
        ),
        (asset("model: 'a b'"), 4, "must be a repository"),
        (asset("model: [a/b]"), 4, "`assets.a.model` must be text"),
        (asset("path: http://h/x.csv"), 4, "this is an address|Write `url: http://h/x.csv`"),
        (
            asset("model: a/b\ninclude: [{x: y}]"),
            5,
            "must be a list of text; item 1 is `{x: y}`",
        ),
        (asset("model:"), 4, "`assets.a.model` must be text, found nothing"),
        ("format: 1\nassets:\n", 2, "`assets` must be `key: value` lines, found nothing"),
        (
            asset("model: a/b\nrevision: 1234567"),
            5,
            '`assets.a.revision` must be text, found `1234567`|revision: "1234567"',
        ),
        (asset("model: a/b\nrevision: 1.10"), 5, 'found `1.10`|revision: "1.10"'),
        (
            asset("dataset: a/b\nconfig: no"),
            5,
            '`assets.a.config` must be text, found `no`, which is false here|config: "no"',
        ),
        (
            asset("dataset: a/b\nsplits: [train,\n      yes]"),
            6,
            "item 2 is `yes`, which is true here|in quotes",
        ),
        (
            asset("url: https://x/y\nconvert: yes"),
            5,
            "must be `csv` | `json` |found `yes`, which is true here",
        ),
        (asset("url: https://x/y\nconvert: true"), 5, "must be `csv` | `json` |found `true`."),
        (asset("model: a/b\nrevision: 1e4567"), 5, "`assets.a.revision` must be text|quotes"),
        (asset("model: a/b\nrevision: ''"), 5, "`assets.a.revision` must be text"),
        (asset("model: a/b\ninclude: [1]"), 5, "`assets.a.include` must be a list of text"),
        (asset("model: a/b\ninclude: {a: b}"), 5, "`assets.a.include` must be a list of text"),
        (asset("model: a/b\nallow_code: 'yes'"), 5, "must be true or false"),
        (asset("model: a/b\nbase: other/base"), 5, "must be true or false"),
        (asset("dataset: a/b\nsplits: ''"), 5, "`assets.a.splits` must be a list"),
        (asset("url: https://x/y\nconvert: xml"), 5, "`assets.a.convert` must be `csv` | `json`"),
        (asset("url: file:///etc/passwd"), 4, "must begin with https://"),
        (asset("url: https://x/y\nsha256: abc"), 5, "`assets.a.sha256` must be 64 hex digits"),
        (asset("url: https://x/y\nunpack: 1"), 5, "must be true or false"),
        (
            asset("model: a/b", "format: 1\npolicy: {license: [mit]}\n"),
            2,
            "unknown key `license`|`licences`",
        ),
        (asset("model: a/b\nlicence: mit\nlicense: mit"), 6, "two spellings of one key"),
        (
            asset("url: https://x/y\nconvert: json\nseparator: ';'"),
            6,
            "`separator` goes with `convert: csv`",
        ),
        (
            asset("url: https://x/y\nconvert: csv\nseparator: '::'"),
            6,
            "`assets.a.separator` must be one character",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line(
    tmp_path: Path, text: str, line: int | None, said: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        load(tmp_path, text)
    message = str(refusal.value)
    assert message.startswith(
        f"{tmp_path / 'x.yaml'}:{line}: " if line else f"{tmp_path / 'x.yaml'}: "
    )
    assert [part for part in said.split("|") if part not in message] == []


def test_assets_that_differ_in_case_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"\.yaml:\d+: the assets `Bert` and `bert`"):
        load(tmp_path, "format: 1\nassets:\n  bert: {model: a/b}\n  Bert: {model: a/c}\n")


def test_a_recorded_request_reads_back_as_the_same_request(tmp_path: Path) -> None:
    """So a lock still answers a manifest that states the same in another form."""
    for name, request in load(tmp_path, EVERY_KIND).requests.items():
        entry = json.dumps({name: as_lock_request(request)})
        assert load(tmp_path, f"format: 1\nassets: {entry}\n").requests[name] == request
