"""A fetched bundle: the same id wherever it is made, valid for other tools, no secrets."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.support.servers.hubs import MEMBER_TOKEN, TestHub
from tests.support.staging import (
    DATASET,
    LANDING,
    MANIFEST,
    MODEL,
    Laptop,
    model_files,
    payload,
)


def test_two_folders_two_hubs_one_id(laptop: Laptop, undisturbed_id: str) -> None:
    """`undisturbed_id` comes from our own Hub; this one may come from the other."""
    assert laptop.fetched("here", "--jobs", "1") == undisturbed_id
    (laptop.folder / "tiny.lock").unlink()
    assert laptop.fetched("there", "--jobs", "8") == undisturbed_id
    assert laptop.fetched("followed", "--locked") == undisturbed_id


def test_the_token_reaches_only_the_hub_and_no_file(laptop: Laptop) -> None:
    for kind, repository in (("models", MODEL), ("datasets", DATASET)):
        laptop.hub.configure(kind, repository, gated="manual", members=("tester",))
    laptop.own_process = True
    done = laptop.fetch(HF_TOKEN=MEMBER_TOKEN)
    assert done.returncode == 0, done.stderr
    asked = laptop.hub.requests()
    assert {request.token for request in asked if request.side == "cdn"} == {False}
    assert [request.path for request in asked if request.side == "hub" and not request.token] == []
    assert MEMBER_TOKEN not in done.stdout + done.stderr
    written = [path for path in laptop.folder.rglob("*") if path.is_file()]
    assert laptop.bundle / "bag-info.txt" in written
    assert not [path for path in written if MEMBER_TOKEN.encode() in path.read_bytes()]


def test_a_redirect_to_another_host_loses_the_token(
    laptop: Laptop, tmp_path: Path, undisturbed_id: str
) -> None:
    """A Hub may redirect to any host for a file."""
    with ExitStack() as stack:
        elsewhere: TestHub = TestHub(tmp_path / "elsewhere", stack)
        elsewhere.commit("models", MODEL, model_files())
        location = f"{elsewhere.endpoint}/{MODEL}/resolve/main/vocab.txt"
        laptop.hub.faults.add(
            side="hub", path=r"/resolve/.*vocab\.txt$", status=302, headers={"Location": location}
        )
        assert laptop.fetched(HF_TOKEN=MEMBER_TOKEN) == undisturbed_id
        seen = elsewhere.requests()
    assert seen and not any(request.token for request in seen)


def test_a_listing_of_many_pages_is_taken_whole(
    hub_factory: Callable[..., TestHub], tmp_path: Path
) -> None:
    laptop = Laptop(tmp_path, hub_factory(page_size=20))
    laptop.write(f"format: 1\nassets:\n  many:\n    model: {MODEL}\n")
    many = {f"vocab-{number:03}.txt": b"%d\n" % number for number in range(70)}
    laptop.hub.commit("models", MODEL, {**model_files(1000), **many})
    laptop.fetched()
    assert {f"data/models/many/{name}" for name in many} <= set(payload(laptop.bundle))
    assert len(laptop.hub.requests("/tree/")) == 4


def test_files_are_asked_for_by_commit(laptop: Laptop) -> None:
    """A branch that moves during a fetch must not mix two commits."""
    laptop.fetched()
    asked = laptop.hub.requests("/resolve/")
    assert asked and all(re.search(r"/resolve/[0-9a-f]{40}/", request.path) for request in asked)


def test_removed_files_and_an_invalid_signature_are_reported(laptop: Laptop) -> None:
    laptop.fetched()
    (laptop.bundle / "tagmanifest-sha256.txt.sig").write_text("somebody's\n")
    laptop.write(MANIFEST.partition("  lines:")[0])
    done = laptop.fetch()
    assert done.returncode == 0, done.stderr
    assert "removes 4 files (" in done.stderr and "tiny.yaml does not ask for" in done.stderr
    assert "not signed any more" in done.stderr
    assert not (laptop.bundle / "tagmanifest-sha256.txt.sig").exists()


def test_coreutils_and_bagit_find_it_sound(laptop: Laptop) -> None:
    laptop.fetched()
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "manifest-sha256.txt"],
        cwd=laptop.bundle,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count(": OK") == len(payload(laptop.bundle)) == len(LANDING)
    validated = subprocess.run(
        [sys.executable, "-m", "bagit", "--validate", laptop.bundle], capture_output=True, text=True
    )
    assert validated.returncode == 0, validated.stderr


def test_the_token_of_hf_auth_login_is_used(laptop: Laptop, undisturbed_id: str) -> None:
    laptop.hub.configure("models", MODEL, private=True, members=("tester",))
    saved = laptop.folder / "hf" / "token"
    saved.parent.mkdir()
    saved.write_text(MEMBER_TOKEN)
    laptop.own_process = True
    assert laptop.fetched() == undisturbed_id
