"""Remedies of `stage` where a Hub or a web server answers: on one Hub on loopback."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stage.staging.sources import repository
from tests.remedies.obeyed import in_it, obeys
from tests.support.servers.hubs import MEMBER_TOKEN, TestHub
from tests.support.staging import Laptop, dataset_files, model_files

CLIENT = "stage/hub/client.py"
DATASETS = "stage/hub/datasets.py"
REFUSALS = "stage/hub/client.py"
REPOSITORY = "stage/staging/sources/repository.py"
METRICS = "stage/hub/models.py"
LOCK = "lock tiny.yaml"
FETCH = "fetch tiny.yaml -o bundle --no-offline-check"
ROWS = b"text\na film\n"
CONFIGS = b"""---
configs:
- {config_name: numbers, data_files: [{split: train, path: n.jsonl}, {split: test, path: one.csv}]}
- {config_name: odd, data_files: [{split: "a/b", path: b.parquet}]}
- {config_name: one, data_files: [{split: train, path: one.csv}]}
- {config_name: two, data_files: [{split: train, path: two.csv}]}
---
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHub]:
    """A Hub whose repositories no test changes."""
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        code = {"config.json": b'{"auto_map": {"AutoModel": "own.Model"}}', "own.py": b"import re"}
        hub.commit("models", "acme/code", {**model_files(100), **code})
        for name in ("closed", "mirrored"):
            hub.commit("models", f"acme/{name}", model_files(100))
        hub.configure("models", "acme/closed", private=True, members=("tester",))
        for space in ("evaluate-metric/share", "acme/share"):
            hub.commit("spaces", space, {"share.py": b"import evaluate"})
        parquet = next(data for name, data in dataset_files().items() if "parquet" in name)
        files = {"README.md": CONFIGS, "n.jsonl": b'{"n": 1}\n', "b.parquet": parquet}
        hub.commit("datasets", "acme/several", {**files, "one.csv": ROWS, "two.csv": ROWS})
        hub.commit("datasets", "acme/unknown", {"a.npz": b"PK", "helper.py": b"import re"})
        yield hub


class User(Laptop):
    """Writes manifests, runs `stage`, and reads what it says."""

    def wants(self, **assets: dict[str, Any]) -> None:
        self.write(json.dumps({"format": 1, "name": "tiny", "assets": assets}))

    def works(self, command: str, **environment: str) -> str:
        done = self.stage(*shlex.split(command.removeprefix("stage ")), **environment)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout + done.stderr

    def remedy(self, command: str, code: int = 2, **environment: str) -> str:
        """What the failing command prints as its remedy."""
        done = self.stage(*shlex.split(command), **environment)
        assert (done.returncode, "-> " in done.stderr) == (code, True), done.stderr
        return " ".join(done.stderr.partition("-> ")[2].split())

    def shell(self, command: str) -> None:
        environment = self.environment(HF_HUB_DISABLE_UPDATE_CHECK="1")
        subprocess.run(command, shell=True, check=True, cwd=self.folder, env=environment)


@pytest.fixture
def user(tmp_path: Path, shared: TestHub) -> User:
    (tmp_path / "user").mkdir()
    return User(tmp_path / "user", shared)


@obeys(REFUSALS, "Check the spelling (org/name). For a private one give a token: {}")
@obeys(CLIENT, "Copy it again: export HF_TOKEN=hf_...; or look at the file")
def test_a_token_and_the_name_are_written_well(user: User) -> None:
    user.wants(a={"model": "acme/closed"})
    assert "set HF_TOKEN" in user.remedy(LOCK)
    again = in_it(user.remedy(LOCK, HF_TOKEN="hf tester"), r"export HF_TOKEN=hf_")
    token = MEMBER_TOKEN.removeprefix("hf_")
    user.works(LOCK, HF_TOKEN=again.partition("=")[2] + token)
    file = user.folder / "hf/token"
    file.parent.mkdir(exist_ok=True)
    file.write_text("hf tester")
    assert in_it(user.remedy(LOCK), r"\S+/token") == str(file)
    file.write_text(MEMBER_TOKEN)
    user.works(f"{LOCK} --update a")
    file.unlink()

    user.wants(a={"model": "acme/cloesd"})
    assert "Check the spelling" in user.remedy(LOCK, HF_TOKEN=MEMBER_TOKEN)
    user.wants(a={"model": "acme/closed"})
    user.works(f"{LOCK} --update a", HF_TOKEN=MEMBER_TOKEN)


@obeys(CLIENT, "unset HF_HUB_OFFLINE")
def test_a_laptop_that_was_set_offline(user: User) -> None:
    user.wants(a={"dataset": "acme/several", "config": "one"})
    user.own_process = True  # huggingface_hub reads it once
    name = in_it(user.remedy(LOCK, HF_HUB_OFFLINE="1"), r"(?<=unset )\w+")
    assert name == "HF_HUB_OFFLINE"
    user.own_process = False
    user.works(LOCK)


@obeys("stage/hub/models.py", "Read that code ({}/{}/tree/{}); if it may run on your cluster")
@obeys(METRICS, "Read that code ({}/spaces/{}/tree/{}); if it may run on your cluster")
@obeys(METRICS, "{}; one of another owner is `metric: owner/name`.")
@obeys("stage/hub/model_files.py", "Remove it from `include`; or read it, then write")
def test_code_is_allowed_or_left(user: User) -> None:
    allow = {"allow_code": True}

    def obeyed(remedy: str) -> None:
        assert in_it(remedy, r"`allow_code: true`")

    model = {"model": "acme/code"}
    user.wants(a=model)
    remedy = user.remedy(LOCK, 3)
    obeyed(remedy)
    left = json.loads(in_it(remedy, r"(?<=`exclude: )\[.*?\]"))
    for way in (allow, {"exclude": left}):
        user.wants(a=model | way)
        user.works(LOCK)

    metric = {"metric": "share"}
    user.wants(a=metric)
    obeyed(user.remedy(LOCK, 3))
    user.wants(a=metric | allow)
    user.works(LOCK)
    user.wants(a={"metric": "shares"} | allow)
    form = in_it(user.remedy(LOCK), r"`metric: owner/name`").strip("`").partition(": ")
    user.wants(a={form[0]: form[2].replace("owner/name", "acme/share")} | allow)
    user.works(LOCK)

    files = {"dataset": "acme/unknown", "include": ["*.npz", "helper.py"]}
    user.wants(a=files)
    remedy = user.remedy(LOCK, 3)
    obeyed(remedy)
    assert "Remove it from `include`" in remedy
    for changes in (allow, {"include": ["*.npz"]}):
        user.wants(a=files | changes)
        user.works(LOCK)


@obeys(DATASETS, "{}{}Write `config:` and one of: {}.")
@obeys(DATASETS, "Check `config`; or download the files (hf download) and name them with `path:`.")
@obeys(DATASETS, "Get the dataset with `hf download`, rename the split, and use `path:`.")
@obeys(DATASETS, "Download its files (hf download) and name them with `path:`.")
@obeys(
    "stage/staging/sources/repository.py",
    "hf download {}{} --revision {} --local-dir {} Then write",
)
def test_what_is_no_dataset_here_is_downloaded_and_named(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.wants(a={"dataset": "acme/several"})
    configs = in_it(user.remedy(LOCK), r"(?<=Write `config:` and one of: )[^.]*").split(", ")
    assert configs == ["one", "two"], "those that can be taken"
    for config in configs:
        user.wants(a={"dataset": "acme/several", "config": config})
        user.works(LOCK)

    with monkeypatch.context() as patch:
        patch.setattr(repository, "HTTP_LIMIT", len(ROWS) - 1)
        remedy = user.remedy(f"{LOCK} --update a")
    line, _, entry = remedy.partition(" Then write in the manifest, in place of that entry: ")
    user.shell(line)
    name, folder = in_it(entry, r"\w+: \{path: [^}]*").split(": {path: ")
    user.wants(**{name: {"path": f"{folder}/two.csv", "convert": "csv"}})
    user.works(FETCH)
    files = user.folder / folder

    user.wants(a={"dataset": "acme/several", "config": "numbers"})
    assert "hf download" in in_it(user.remedy(LOCK), "Check `config`; .* with `path:`")
    user.wants(a={"path": f"{folder}/n.jsonl", "convert": "jsonl"})
    user.works(FETCH)
    user.wants(a={"dataset": "acme/several", "config": "odd"})
    assert "hf download" in in_it(user.remedy(LOCK, 3), "Get the dataset with .* use `path:`")
    (files / "b.parquet").rename(files / "train.parquet")
    user.wants(a={"path": f"{folder}/train.parquet", "convert": "parquet"})
    user.works(FETCH)

    user.wants(a={"dataset": "acme/unknown"})
    assert "hf download" in in_it(user.remedy(LOCK), "Download its files .* with `path:`")
    user.shell("hf download --repo-type dataset acme/unknown --local-dir unknown")
    user.wants(a={"path": "unknown", "exclude": [".cache/**"]})
    user.works(FETCH)


@obeys(REFUSALS, "Its commit may have been deleted: run again with --update")
@obeys("stage/staging/resolve.py", "{} --update {}")
@obeys("stage/staging/sources/source.py", "Find out where that lock comes from. To resolve again")
@obeys("stage/download/downloader.py", "That server or a proxy is misconfigured: try another")
def test_a_repository_moves_on(hub: TestHub, user: User) -> None:
    mirror, user.hub = user.hub, hub
    first = hub.commit("models", "acme/m", {"config.json": b"{}", "a.txt": b"old"})
    entry = {"model": "acme/m"}
    user.wants(a=entry)
    user.works(LOCK)
    second = hub.commit("models", "acme/m", {"config.json": b"{}", "a.txt": b"new"})

    user.wants(a=entry, b={**entry, "include": ["a.txt"]})
    user.works(in_it(user.remedy(LOCK), r"stage lock \S+ --update a --update b"))
    lock = user.folder / "tiny.lock"
    assert second in lock.read_text() and first not in lock.read_text()

    user.wants(a={**entry, "revision": second})
    user.works(LOCK)
    lock.write_text(lock.read_text().replace(f'"commit": "{second}"', f'"commit": "{first}"'))
    user.works(in_it(user.remedy(LOCK), r"stage lock \S+ --update a"))
    assert first not in lock.read_text()

    user.wants(a=entry)
    user.works(LOCK)
    hub.faults.add(side="hub", path=f"resolve/{second}", status=404)
    remedy = user.remedy(FETCH)
    hub.commit("models", "acme/m", {"config.json": b"{}", "a.txt": b"third"})
    user.works(f"{FETCH} {in_it(remedy, r'--update (?=ASSET)')}a")
    hub.faults.clear()

    hub.commit("models", "acme/mirrored", model_files(100))
    user.wants(a={"model": "acme/mirrored"})
    away = {"Location": "file:///etc/passwd"}
    hub.faults.add(side="hub", path="resolve/", status=302, headers=away)
    option = in_it(user.remedy(f"{FETCH} --update a", 3), "(?<=try another )--endpoint")
    user.works(f"{FETCH} {option} {mirror.endpoint}")
