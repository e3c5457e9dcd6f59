"""A repository in a bundle is files of a commit, under the names that were asked for."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.servers.hubs import TestHub
from tests.support.serving import Served, fetched, serving_here
from tests.support.staging import Laptop, dataset_files

BRANCH = "fix/one"


class Source:
    """A Hub whose repositories have four versions with different bytes."""

    def __init__(self, hub: TestHub) -> None:
        self.hub = hub
        self.commits: dict[str, str] = {}
        options: dict[str, dict[str, str]] = {
            "v1": {"tag": "v1"},
            "by commit": {},
            BRANCH: {"ref": f"refs/heads/{BRANCH}"},
            "main": {},
        }
        for name, where in options.items():
            files = {"README.md": b"# A\n", "config.json": b"{}\n", "a.txt": name.encode()}
            self.commits[name] = hub.commit("models", "acme/a", files, **where)
        plain = dataset_files()
        card = plain["README.md"]
        raw = {"labels.json": b'{"0": "no"}', "more/x.csv": b"a,b\n1,2\n", "code.py": b"1\n"}
        self.card = card
        hub.commit("datasets", "acme/d", {**plain, **raw})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with ExitStack() as stack:
        yield Source(TestHub(tmp_path_factory.mktemp("hub"), stack))


@pytest.fixture(scope="module")
def served(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    commit = source.commits["by commit"]
    assets = "".join(
        f"  a{number}: {{model: acme/a, revision: {revision}}}\n"
        for number, revision in enumerate(("v1", commit, BRANCH, "main"))
    )
    assets += "  d: {dataset: acme/d, include: [labels.json, plain/]}\n"
    bundle = fetched(tmp_path_factory.mktemp("laptop") / "l", source.hub, assets)
    with serving_here(bundle) as served:
        yield served


def get(served: Served, path: str) -> bytes:
    with urllib.request.urlopen(served.address + path) as answer:
        return bytes(answer.read())


def refusal(served: Served, path: str) -> tuple[int, str, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(served, path)
    headers = caught.value.headers
    return caught.value.code, headers["X-Error-Code"], headers["X-Error-Message"]


def listed(served: Served, path: str) -> Any:
    return json.loads(get(served, path))


def test_each_name_gets_its_own_commit(source: Source, served: Served) -> None:
    for name, commit in source.commits.items():
        for asked in (name, commit, commit[:7]):
            if asked == "by commit":
                continue
            revision = quote(asked, safe="")
            assert get(served, f"/acme/a/resolve/{revision}/a.txt") == name.encode()
            assert listed(served, f"/api/models/acme/a/revision/{revision}")["sha"] == commit
    assert get(served, f"/acme/a/resolve/{BRANCH}/a.txt") == BRANCH.encode()
    refs = listed(served, "/api/models/acme/a/refs")["branches"]
    assert {r["name"]: r["targetCommit"] for r in refs} == {
        name: source.commits[name] for name in ("v1", BRANCH, "main")
    }


@pytest.mark.parametrize("revision", ["v2", "0" * 40, "1234567", "fix", "refs/pr/1"])
def test_a_name_that_was_not_asked_for_is_an_error(served: Served, revision: str) -> None:
    path = f"/acme/a/resolve/{quote(revision, safe='')}/a.txt"
    code, error, message = refusal(served, path)
    assert (code, error) == (404, "RevisionNotFound")
    assert "it has main (" in message
    line = f"    revision: {revision}\n" if "/" in revision or revision == "v2" else ""
    assert any(line in f"{text}\n" for text in served.said)


def test_main_is_no_other_version(source: Source, tmp_path: Path) -> None:
    bundle = fetched(tmp_path / "l", source.hub, "  a: {model: acme/a, revision: v1}\n")
    with serving_here(bundle) as served:
        assert refusal(served, "/acme/a/resolve/main/a.txt")[:2] == (404, "RevisionNotFound")
        assert refusal(served, "/api/models/acme/a")[1] == "RevisionNotFound"
        assert any("revision: main" in text for text in served.said)


@pytest.mark.parametrize(
    ("entry", "code", "words"),
    [
        ("include: [x.csv], splits: [train]", 2, "`splits` cannot stand beside `include`"),
        ("include: [none/]", 2, "the pattern `none/` matches none of its files"),
        ('exclude: ["*"]', 2, "no file of acme/d is left to take"),
        ("include: [code.py]", 3, "allow_code: true"),
    ],
)
def test_patterns_of_a_dataset_that_cannot_be_meant(
    source: Source, tmp_path: Path, entry: str, code: int, words: str
) -> None:
    laptop = Laptop(tmp_path, source.hub)
    laptop.write(f"format: 1\nname: t\nassets:\n  d: {{dataset: acme/d, {entry}}}\n")
    assert words in laptop.refused(code)
