"""Names as scripts write them: without an owner, in another case, old ones. By a real client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stage.lock.model import EXCLUDED, NOT_INCLUDED, LeftOut
from stage.serve.hub_api import how_to_bring
from tests.stage.locks import every_kind
from tests.support.clients import answer_of, run_client
from tests.support.servers.hubs import TestHub
from tests.support.serving import Served, fetched, serving_here

LARGE = "google-bert/bert-large-uncased"
ASSETS = f"""\
  large: {{model: {LARGE}, include: [config.json]}}
  one: {{model: a/twin, include: [config.json]}}
  other: {{model: b/twin, include: [config.json]}}
  renamed: {{model: old-org/small, include: [config.json]}}
  cased: {{model: Org/MixedCase, include: [config.json]}}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHub]:
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        for name in (LARGE, "a/twin", "b/twin", "new-org/small", "Org/MixedCase"):
            config = f'{{"model_type": "bert", "name": "{name}"}}'
            hub.commit("models", name, {"config.json": config.encode()})
        hub.configure("models", "old-org/small", moved_to="new-org/small")
        yield hub


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, source: TestHub) -> Iterator[Served]:
    bundle = fetched(tmp_path_factory.mktemp("laptop"), source, ASSETS)
    with serving_here(bundle) as served:
        yield served


@pytest.mark.parametrize(
    ("asked", "id"),
    [
        ("bert-large-uncased", LARGE),
        ("Bert-Large-Uncased", LARGE),
        ("GOOGLE-bert/bert-large-uncased", LARGE),
        ("old-org/small", "new-org/small"),
        ("small", "new-org/small"),
        ("org/mixedcase", "Org/MixedCase"),
        ("b/twin", "b/twin"),
    ],
)
def test_a_client_finds_a_repository_by_the_name_in_its_script(
    served: Served, tmp_path: Path, asked: str, id: str
) -> None:
    script = f"""
import json
from huggingface_hub import HfApi, hf_hub_download
api = HfApi()
config = json.load(open(hf_hub_download("{asked}", "config.json")))
paths = [entry.path for entry in api.get_paths_info("{asked}", ["config.json"])]
seen = [entry.path for entry in api.list_repo_tree("{asked}")]
print(json.dumps([api.model_info("{asked}").id, config["name"], paths, "config.json" in seen]))
"""
    done = run_client(script, served.address, tmp_path)
    assert answer_of(done) == [id, id, ["config.json"], True]
    if asked != id and asked != "old-org/small":
        assert any(text.startswith(f"{asked} is answered by {id}: ") for text in served.said)


def test_a_name_that_two_repositories_have_is_refused_with_both(
    served: Served, tmp_path: Path
) -> None:
    script = """
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import RepositoryNotFoundError
try:
    hf_hub_download("twin", "config.json")
except RepositoryNotFoundError:
    print("[]")
"""
    done = run_client(script, served.address, tmp_path)
    assert answer_of(done) == []
    assert (
        "asked for, not here: model twin: not in this bundle under this name, but a/twin and "
        "b/twin: write one of these names"
    ) in served.said


@pytest.mark.parametrize(
    ("asset", "reason", "path", "way"),
    [
        ("bert", EXCLUDED, "a[1].json", "remove its pattern from `exclude` of `bert`"),
        ("bert", NOT_INCLUDED, "a[1].json", 'add "a[[]1].json" to `include` of `bert`'),
        (
            "bert",
            "a pickle",
            "a[1].bin",
            '  bert-large-a-1-.bin:\n    model: acme/bert-large\n    include: "a[[]1].bin"',
        ),
        ("lines", "not parquet", "x.csv", 'write `include: ["*"]` in place of `config`'),
        ("lines", EXCLUDED, "lines.py", ""),
    ],
)
def test_a_file_that_was_left_out_is_brought_by_a_line_of_its_entry(
    asset: str, reason: str, path: str, way: str
) -> None:
    assert way in how_to_bring(every_kind().assets[asset], LeftOut(path, 1, reason))
