"""`stage init`: from names to a manifest that loads and fetches."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.hub.lookup import RepositoryLookup, RepositoryName
from stage.lock.manifest import Manifest
from stage.lock.requests import DatasetRequest, ModelRequest
from stage.paths import collisions, names_a_local_path, problem_with_asset_name
from stage.staging.new_manifest import asset_names, manifest_text
from tests.support.staging import DATASET, MODEL, Laptop, dataset_files, model_files


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
    assert "continues" not in done.stderr


def test_several_configs_are_listed_and_one_is_taken(laptop: Laptop) -> None:
    files = dataset_files()
    configs = "".join(f"- config_name: {c}\n  data_files: {c}/*\n" for c in ("a-raw", "b-raw"))
    laptop.hub.commit(
        "datasets",
        "acme/several",
        {
            "README.md": f"---\nconfigs:\n{configs}---\n".encode(),
            "a-raw/train.parquet": files["plain/train-00000-of-00002.parquet"],
            "b-raw/train.parquet": files["plain/train-00000-of-00002.parquet"],
        },
    )
    laptop.hub.commit(
        "datasets",
        "acme/several",
        {"converted/train/0000.parquet": files["plain/train-00000-of-00002.parquet"]},
        ref="refs/convert/parquet",
    )
    done = laptop.stage("init", "acme/several")
    assert done.returncode == 0, done.stderr
    assert "3 configs" in done.stdout
    text = (laptop.folder / "manifest.yaml").read_text()
    assert (
        "config: a-raw   # also: b-raw, converted" in text
        and "several configs and no default" in text
    )
    assert laptop.stage("lock", "manifest.yaml").returncode == 0


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
    assert laptop.stage("init", "acme/ordered").returncode == 0
    assert "config: main   # also: extra" in (laptop.folder / "manifest.yaml").read_text()


def test_a_moved_repository_is_written_by_its_name_today(laptop: Laptop) -> None:
    laptop.hub.configure("models", "tiny-bert", moved_to=MODEL)
    assert laptop.stage("init", "tiny-bert").returncode == 0
    assert f"model: {MODEL}" in (laptop.folder / "manifest.yaml").read_text()


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


def test_the_revision_of_a_pages_address_and_the_licences_found_are_written(laptop: Laptop) -> None:
    laptop.hub.commit("models", MODEL, model_files(1000), tag="v1.0")
    done = laptop.stage("init", f"https://huggingface.co/{MODEL}/tree/v1.0", f"datasets/{DATASET}")
    assert done.returncode == 0, done.stderr
    text = (laptop.folder / "manifest.yaml").read_text()
    assert "# policy: {licences: [apache-2.0, cc0-1.0]}   # refuses others" in text
    (laptop.folder / "manifest.yaml").write_text(text.replace("# policy", "policy"))
    manifest = Manifest.load(laptop.folder / "manifest.yaml")
    assert manifest.name == "tiny-bert" and manifest.licences == ("apache-2.0", "cc0-1.0")
    assert manifest.requests["tiny-bert"] == ModelRequest(repository=MODEL, revision="v1.0")
    assert laptop.stage("lock", "manifest.yaml").returncode == 0


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
    lambda r: ".." not in r and not names_a_local_path(r)
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
    path.write_text(manifest_text(Path("init.yaml"), many), encoding="utf-8")
    requests = list(Manifest.load(path).requests.values())
    assert [r.repository for r in requests] == [item.repository for item in many]  # type: ignore[union-attr]
    assert [r.config for r in requests if isinstance(r, DatasetRequest)] == [
        item.configs[0] if item.configs else None for item in many if item.kind == "dataset"
    ]


@given(many=st.lists(repositories, max_size=6))
def test_every_asset_gets_a_name_of_its_own(many: list[str]) -> None:
    names = asset_names(many)
    assert len(names) == len(many) and not collisions(names)
    assert all(problem_with_asset_name(name) is None for name in names)
