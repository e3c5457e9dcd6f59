"""Impossible requests: the asset, the reason and the remedy are printed before any download."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.remedies.obeyed import in_it
from tests.support.servers.hubs import STRANGER_TOKEN
from tests.support.staging import DATASET, LANDING, MANIFEST, MODEL, Laptop

pytestmark = pytest.mark.usefixtures("impatient")


def nothing_was_downloaded(laptop: Laptop) -> bool:
    """Only configs may be downloaded: they show what else a model needs."""
    asked = [
        r
        for r in laptop.hub.requests()
        if r.file in LANDING and not r.file.endswith("/config.json")
    ]
    return not laptop.bundle.exists() and not asked


def line_of(manifest: str, text: str) -> int:
    return next(number for number, line in enumerate(manifest.splitlines(), 1) if text in line)


@pytest.mark.parametrize("token", [None, STRANGER_TOKEN])
def test_an_unknown_repository(laptop: Laptop, token: str | None) -> None:
    manifest = MANIFEST.replace(MODEL, "acme/tiny-brt")
    laptop.write(manifest)
    message = laptop.refused(2, **({"HF_TOKEN": token} if token else {}))
    assert f"tiny.yaml:{line_of(manifest, 'tiny-bert:')}: `tiny-bert`" in message
    assert (
        "acme/tiny-brt" in message
        and "does not exist or is private" in message
        and "hf auth login" in message
    )
    assert nothing_was_downloaded(laptop)


@pytest.mark.parametrize(
    ("wrong", "kind", "other"),
    [(MANIFEST.replace(f"model: {MODEL}", f"model: {DATASET}"), "model", "dataset"),
     (MANIFEST.replace(f"dataset: {DATASET}", f"dataset: {MODEL}"), "dataset", "model")],
)  # fmt: skip
def test_a_dataset_asked_for_as_a_model_and_the_reverse(
    laptop: Laptop, wrong: str, kind: str, other: str
) -> None:
    laptop.write(wrong)
    message = laptop.refused(2)
    name = DATASET if other == "dataset" else MODEL
    assert (
        f"`{name}` is a {other}, not a {kind}" in message and f"Write `{other}: {name}`" in message
    )


def test_a_file_that_the_storage_has_not_got_is_not_asked_for_again(laptop: Laptop) -> None:
    laptop.hub.faults.add(side="cdn", path=r"model\.safetensors", status=404)
    message = laptop.refused(5)
    assert (
        "tiny-bert: model.safetensors: HTTP 404: 127.0.0.1 redirects to a storage server" in message
    )
    assert (
        len(
            [
                r
                for r in laptop.hub.requests()
                if r.side == "cdn" and "safetensors" in (r.file or "")
            ]
        )
        == 1
    )


def test_a_token_that_the_hub_refuses_is_named_and_the_remedy_goes_on_without_it(
    laptop: Laptop,
) -> None:
    """Public models "do not exist or are private"."""
    message = laptop.refused(2, HF_TOKEN="hf_expired")
    assert "refuses your token (HTTP 401)" in message and nothing_was_downloaded(laptop)
    assert "does not exist" not in message and "need none: unset HF_TOKEN." in message
    done = laptop.stage("init", MODEL, "-o", "new.yaml", HF_TOKEN="hf_expired")
    assert done.returncode == 2 and "refuses your token" in done.stderr
    assert laptop.fetch(HF_TOKEN="").returncode == 0


@pytest.mark.parametrize("token", ["\u201chf_abc\u201d", "hf_abc hf_def", "'hf_abc'"])
def test_a_token_that_no_header_carries_is_refused_and_not_printed(
    laptop: Laptop, token: str
) -> None:
    message = laptop.refused(2, HF_TOKEN=token)
    assert "that no token has" in message and "hf_abc" not in message
    assert nothing_was_downloaded(laptop)


IMPOSSIBLE = {
    # a line of the manifest -> what stands there instead, and what is said
    "an unknown revision": (
        f"model: {MODEL}",
        f"model: {MODEL}\n    revision: v9",
        ("`tiny-bert`", "no revision `v9`", "main"),
    ),
    "a pattern that matches nothing": (
        f"model: {MODEL}",
        f'model: {MODEL}\n    include: ["*.json", "*.safetensor"]',
        ("`*.safetensor` matches none", "model.safetensors"),
    ),
    "nothing that is left": (
        f"model: {MODEL}",
        f'model: {MODEL}\n    exclude: ["*"]',
        (f"no file of {MODEL} is left to take",),
    ),
    "an unknown config": ("config: plain", "config: fancy", ("`lines`", "no config `fancy`")),
    "an unknown split": (
        "config: plain",
        "config: plain\n    splits: [train, dev]",
        ("`lines`", "no split `dev`"),
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_the_repository_does_not_have_is_named(laptop: Laptop, name: str) -> None:
    old, new, words = IMPOSSIBLE[name]
    laptop.write(MANIFEST.replace(old, new))
    message = laptop.refused(2)
    assert [part for part in words if part not in message] == [], message
    assert nothing_was_downloaded(laptop)


def test_patterns_that_leave_out_the_config_are_reported_before_the_download(
    laptop: Laptop,
) -> None:
    patterns = 'include: ["*.safetensors"]'
    laptop.write(MANIFEST.replace(f"model: {MODEL}", f"model: {MODEL}\n    {patterns}"))
    done = laptop.stage("fetch", "tiny.yaml", "-o", "bundle")
    assert (
        done.returncode == 2
        and 'Add to `include` (or remove from `exclude`): "config.json"' in done.stderr
    )
    assert (
        "tiny.yaml:4: `tiny-bert`: `include` leaves out its tokenizer (tokenizer.json, vocab.txt)"
        in done.stderr
    )
    assert nothing_was_downloaded(laptop)
    done = laptop.fetch()  # --no-offline-check: as they are
    assert (
        done.returncode == 0
        and "warning: tiny.yaml:4: `tiny-bert`: its weights will not load" in done.stderr
    )


def test_a_folder_of_something_else_is_left_alone(laptop: Laptop) -> None:
    laptop.bundle.mkdir()
    (laptop.bundle / "thesis.tex").write_text("years of work")
    message = laptop.refused(2)
    assert "not a bundle" in message
    assert [path.name for path in laptop.bundle.iterdir()] == ["thesis.tex"]
    assert laptop.hub.requests() == []


def test_a_refusal_leaves_neither_folders_nor_a_lock(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(laptop.folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    (laptop.folder / "mine.txt").write_bytes(bytes(2000))
    store = {"AIRLIFT_STORE": str(laptop.folder / "store")}
    for manifest in (MANIFEST, "format: 1\nname: x\nassets:\n  mine: {path: mine.txt}\n"):
        laptop.write(manifest)
        before = sorted(laptop.folder.rglob("*"))
        done = laptop.fetch("new/deeper/bundle", **store)
        assert done.returncode == 5 and "are missing. Nothing was written" in done.stderr
        assert sorted(laptop.folder.rglob("*")) == before


def test_on_a_full_disk_the_store_is_cleared_only_where_that_frees_something(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(laptop.folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    store = laptop.folder / "my cache/airlift/store"
    store.mkdir(parents=True)
    (store / "old").write_text("of no bundle")
    monkeypatch.delenv("AIRLIFT_STORE", raising=False)
    cache = {"XDG_CACHE_HOME": str(store.parents[1])}
    said = laptop.fetch("bundle", **cache).stderr
    subprocess.run(in_it(said, "(?<=`)find [^`]*"), shell=True, check=True)
    assert not (store / "old").exists() and store.is_dir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if Path(elsewhere).stat().st_dev != laptop.folder.stat().st_dev:
            said = laptop.fetch("bundle", AIRLIFT_STORE=elsewhere).stderr
            assert " are missing. Nothing was written.\n  -> Free " in said and "find" not in said
