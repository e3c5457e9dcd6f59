"""`stage init`: from names to a manifest that loads and fetches."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.lock.manifest import Manifest
from stage.lock.requests import DatasetRequest, ModelRequest
from stage.staging.new_manifest import RepositoryLookup, RepositoryName, new_manifest
from tests.remedies.obeyed import in_it, obeys
from tests.support.staging import DATASET, MODEL, Laptop, dataset_files


def test_names_become_a_manifest_that_fetches(laptop: Laptop) -> None:
    done = laptop.stage(
        "init", MODEL, f"https://huggingface.co/datasets/{DATASET}", "-o", "new.yaml"
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"{MODEL}: model, licence apache-2.0" in done.stdout
        and f"{DATASET}: dataset" in done.stdout
    )
    manifest = Manifest.load(laptop.folder / "new.yaml")
    assert manifest.name == "new"
    assert manifest.requests["tiny-bert"] == ModelRequest(repository=MODEL)
    assert manifest.requests["lines"] == DatasetRequest(repository=DATASET, config="plain")
    assert laptop.stage("fetch", "new.yaml", "-o", "new", "--no-offline-check").returncode == 0


def test_without_a_network_init_names_what_needs_none(laptop: Laptop) -> None:
    """It said "it continues where it stopped", of which nothing is true for `init`."""
    done = laptop.stage("init", MODEL, "-o", "off.yaml", "--endpoint", "http://127.0.0.1:9")
    assert done.returncode == 5 and not (laptop.folder / "off.yaml").exists()
    assert "stage init --example NAME" in done.stderr and "a mirror with --endpoint" in done.stderr
    assert "continues" not in done.stderr and "No such file or folder is here" in done.stderr


@obeys("stage/cli/init.py", "clusters.yaml names:")
def test_a_script_and_a_missing_profile_get_the_command_that_helps(laptop: Laptop) -> None:
    (laptop.folder / "train.py").write_text("print(1)\n")
    done = laptop.stage("init", "train.py", "-o", "script.yaml")
    assert "stage trace -o NEW.yaml -- python train.py" in done.stdout, done.stderr
    (laptop.folder / "far").mkdir()
    (laptop.folder / "far/node.yml").write_text(
        "format: 1\nname: far\nplatform: linux-64\nglibc: '2.28'\n"
    )
    (laptop.folder / "clusters.yaml").write_text("far: {host: h, profile: far/node.yml}\n")
    done = laptop.stage("init", "train.py", "-o", "new.yaml", "--profile", "node.yml")
    assert done.returncode == 2 and "clusters.yaml names: --profile far/node.yml" in done.stderr
    words = in_it(done.stderr, "--profile far.*").split()
    assert laptop.stage("init", "train.py", "-o", "new.yaml", *words).returncode == 0


def test_an_existing_manifest_is_not_overwritten(laptop: Laptop) -> None:
    before = (laptop.folder / "tiny.yaml").read_bytes()
    done = laptop.stage("init", MODEL, "-o", "tiny.yaml")
    assert done.returncode == 2 and "is not overwritten" in done.stderr
    assert (laptop.folder / "tiny.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("acme/bert", RepositoryName("acme/bert")),
        ("bert-base", RepositoryName("bert-base")),
        ("datasets/acme/lines", RepositoryName("acme/lines", "dataset")),
        ("datasets/lines", RepositoryName("lines", "dataset")),
        ("models/acme/bert", RepositoryName("acme/bert", "model")),
        ("models/bert", RepositoryName("models/bert")),  # an organisation may be called so
        ("hf://datasets/acme/lines", RepositoryName("acme/lines", "dataset")),
        ("https://huggingface.co/acme/bert/", RepositoryName("acme/bert")),
        ("https://hf-mirror.com/datasets/acme/lines?x=1", RepositoryName("acme/lines", "dataset")),
        ("https://huggingface.co/acme/bert/tree/main", RepositoryName("acme/bert")),
        ("https://huggingface.co/acme/bert/tree/v1.0", RepositoryName("acme/bert", None, "v1.0")),
        (
            "https://huggingface.co/acme/bert/blob/refs%2Fpr%2F3/config.json",
            RepositoryName("acme/bert", None, "refs/pr/3"),
        ),
    ],
)
def test_a_name_or_the_address_of_any_page_of_it(text: str, asked: RepositoryName) -> None:
    assert RepositoryName.parse(text) == asked


def test_an_unknown_name_writes_nothing(laptop: Laptop) -> None:
    done = laptop.stage("init", MODEL, "acme/tiny-brt")
    assert (
        done.returncode == 2
        and "no model and no dataset" in done.stderr
        and "acme/tiny-brt" in done.stderr
    )
    assert not (laptop.folder / "manifest.yaml").exists()
    assert laptop.stage("init", "acme/a b").returncode == 2


repositories = st.from_regex(r"[A-Za-z0-9_.-]{1,8}(/[A-Za-z0-9_.-]{1,8})?", fullmatch=True).filter(
    lambda r: ".." not in r and not r.startswith("./") and r != "."
)


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


found = st.builds(
    RepositoryLookup,
    st.sampled_from(["model", "dataset"]),
    repositories,
    st.none() | words,
    st.booleans(),
    st.lists(words, max_size=4, unique=True).map(tuple),
    st.none(),
    st.booleans(),
)


@settings(max_examples=50)
@given(many=st.lists(found, min_size=1, max_size=4))
def test_whatever_the_hub_says_the_manifest_loads(
    tmp_path_factory: pytest.TempPathFactory, many: list[RepositoryLookup]
) -> None:
    path = tmp_path_factory.getbasetemp() / "init.yaml"
    path.write_text(new_manifest(Path("init.yaml"), many), encoding="utf-8")
    requests = list(Manifest.load(path).requests.values())
    assert [r.location for r in requests] == [item.repository for item in many]
    assert [r.config for r in requests if isinstance(r, DatasetRequest)] == [
        item.configs[0] if item.configs else None for item in many if item.kind == "dataset"
    ]


def test_the_cards_first_config_is_taken_not_the_alphabets(laptop: Laptop) -> None:
    card = (
        "---\nconfigs:\n"
        + "".join(f"- config_name: {c}\n  data_files: {c}/*\n" for c in ("main", "extra"))
        + "---\n"
    )
    parquet = dataset_files()["plain/train-00000-of-00002.parquet"]
    files = {
        "README.md": card.encode(),
        "main/train.parquet": parquet,
        "extra/train.parquet": parquet,
    }
    laptop.hub.commit("datasets", "acme/ordered", files)
    laptop.hub.configure("datasets", "acme/ordered", gated="manual")
    done = laptop.stage("init", "acme/ordered")
    assert done.returncode == 0 and "gated: accept its terms on the Hub" in done.stdout
    assert "config: main   # also: extra" in (laptop.folder / "manifest.yaml").read_text()
