"""`stage trace`: from a script nobody here changed, to a bundle in which it runs without a Hub."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from stage.download.http import Connections, tls_context
from stage.lock.manifest import Manifest
from stage.lock.requests import UrlRequest
from stage.serve.hub_api import Address
from stage.serve.trace import Asked, Exchange, Recorder, _patterns, entries_of, gather
from tests.remedies.obeyed import in_it, obeys
from tests.stage.download.test_network import hub as hub_at
from tests.support.servers.hubs import TestHub
from tests.support.servers.web import Web
from tests.support.servers.web import serve as serve_web
from tests.support.staging import model_files


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHub]:
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        hub.commit("models", "acme/other", model_files(10_000))
        coded = {"a.py": b"pass", "pytorch_model.bin": b"x", "config.json": b"{}"}
        hub.commit("models", "acme/coded", {**coded, "README.md": b""}, tag="v1")
        hub.commit("spaces", "evaluate-metric/sum", {"sum.py": b"pass", "app.py": b"pass"})
        yield hub


def trace(
    folder: Path,
    hub: TestHub,
    *command: str,
    options: tuple[str, ...] = (),
    new_session: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`stage trace`, as a user runs it, with a cache that has nothing to do with it."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment = {
        **kept,
        "HOME": str(folder),
        "HF_HOME": str(folder / "hf"),
    }
    argv = [sys.executable, "-m", "stage", "trace", "-o", "my.yaml", *options]
    argv += ["--endpoint", hub.endpoint, "--", *command]
    return subprocess.run(
        argv,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=new_session,
    )


def stage(folder: Path, hub: TestHub, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "HF_ENDPOINT": hub.endpoint}
    argv = [sys.executable, "-m", "stage", *arguments]
    return subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_plain_addresses_are_seen_and_of_https_the_host(source: TestHub, tmp_path: Path) -> None:
    code = """
import urllib.request, sys
from huggingface_hub import hf_hub_download
hf_hub_download("acme/other", "config.json")
print(urllib.request.urlopen(sys.argv[1]).read().decode())
try:
    urllib.request.urlopen(sys.argv[1].replace("http:", "https:"))
except OSError:
    pass
"""
    with serve_web() as web:
        url = far(web, "/words.txt", b"some words")
        done = trace(tmp_path, source, sys.executable, "-c", code, url)
    assert done.returncode == 1 and "some words" in done.stdout
    assert f"cannot travel under its own address: {url}" in done.stderr
    line = f'words.txt: {{url: "{url}"}}'
    assert f"remove the `#` before its line in my.yaml:\n  {line}\n" in done.stderr
    assert "asked 127.1:" in done.stderr and "$AIRLIFT_BUNDLE/data/files/NAME/FILE" in done.stderr
    text = (tmp_path / "my.yaml").read_text()
    assert list(yaml.safe_load(text)["assets"]) == ["other"] and f"  # {line}\n" in text
    (tmp_path / "my.yaml").write_text(text.replace(f"  # {line}", f"  {line}"))
    assert Manifest.load(tmp_path / "my.yaml").requests["words.txt"] == UrlRequest(url=url)


def far(web: Web, path: str, data: bytes) -> str:
    """An address that no rule about loopback exempts from the proxy."""
    web.files[path] = data
    return web.url(path).replace("127.0.0.1", "127.1")


@obeys("stage/serve/trace.py", "stage trace -- python {}; a program")
def test_a_script_that_asked_for_nothing_writes_no_manifest(
    source: TestHub, tmp_path: Path
) -> None:
    done = trace(tmp_path, source, sys.executable, "-c", "pass")
    assert done.returncode == 2 and "asked the Hub for nothing" in done.stderr
    assert "set HF_ENDPOINT itself?" in done.stderr and not (tmp_path / "my.yaml").exists()
    done = trace(tmp_path, source, sys.executable, "-c", "1 / 0")
    assert "and ended with 1." in done.stderr and "Its own error is above" in done.stderr
    (tmp_path / "mine.py").write_text("print('mine')")
    done = trace(tmp_path, source, "./mine.py")
    words = in_it(done.stderr, r"(?<=stage trace -- python )\S+(?=;)")
    done = trace(tmp_path, source, sys.executable, words)
    assert done.stdout == "mine\n"
    assert "or set HF_ENDPOINT itself?" in done.stderr


@obeys("stage/cli/serve.py", "Fix what its own error says")
def test_a_dataset_without_its_owner_is_told_the_name_to_write(
    source: TestHub, tmp_path: Path
) -> None:
    """What huggingface_hub 2.4 asks before it refuses `load_dataset("notes")`."""
    source.commit("datasets", "acme/notes", {"README.md": b"# Notes\n"})
    source.configure("datasets", "notes", moved_to="acme/notes")
    code = "from huggingface_hub import HfApi; print(HfApi().dataset_info('notes').id); 1 / 0"
    done = trace(tmp_path, source, sys.executable, "-c", code)
    assert "acme/notes" in done.stdout and done.returncode == 1, done.stderr
    assert "write acme/notes in the script" in done.stdout
    assert "next: " not in done.stdout, "a script that failed has not named all that it needs"
    subprocess.run(in_it(done.stderr, r"rm \S+(?= first)"), shell=True, cwd=tmp_path, check=True)
    done = trace(tmp_path, source, sys.executable, "-c", code.partition("; 1 / 0")[0])
    assert done.returncode == 0 and "next: stage fetch my.yaml" in done.stdout


def test_a_model_that_the_hub_refuses_is_no_entry_of_a_card(
    source: TestHub, tmp_path: Path
) -> None:
    """The fetch of such an entry, with the token, was a sound bundle without the weights."""
    source.commit("models", "acme/closed", {"config.json": b"{}", ".gitattributes": b""})
    source.configure("models", "acme/closed", gated="manual", members=("tester",))
    code = "import sys, huggingface_hub as h; api = h.HfApi()\nfor name in ('other', 'closed'):\n"
    code += "    sys.argv[1:] and api.model_info('acme/' + name)\n"
    code += "    h.hf_hub_download('acme/' + name, 'config.json')"
    for asks in ([], ["first"]):
        done = trace(tmp_path, source, sys.executable, "-c", code, *asks)
        assert "give a token: HF_TOKEN, and trace again" in done.stdout and done.returncode == 1
        assert list(yaml.safe_load((tmp_path / "my.yaml").read_text())["assets"]) == ["other"]
        (tmp_path / "my.yaml").unlink()


def test_a_refusal_of_head_has_no_body() -> None:
    """A client that keeps its connection would read it as the next answer."""
    connections = Connections(read_timeout_s=5, at_once=1, trust=tls_context())
    with Recorder("http://127.0.0.1:9", connections) as recorder:
        host, _, port = recorder.address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(
                b"HEAD /x HTTP/1.1\r\nHost: x\r\n\r\n"
                b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            answers = client.makefile("rb").read()
    _, after_head, body = answers.split(b"\r\n\r\n")
    assert after_head.startswith(b"HTTP/1.1 502") and body.startswith(b"stage trace: ")


@pytest.mark.parametrize(
    ("target", "address", "split"),
    [
        ("/api/models/gpt2", Address("models", "gpt2"), ("main", "")),
        ("/api/models/a/b", Address("models", "a/b"), ("main", "")),
        (
            "/api/datasets/a/b/revision/v1?x=y",
            Address("datasets", "a/b", "revision", ("v1",)),
            ("v1", ""),
        ),
        (
            "/api/datasets/a/b/tree/refs%2Fconvert%2Fparquet/c",
            Address("datasets", "a/b", "tree", ("refs/convert/parquet", "c")),
            ("refs/convert/parquet", "c"),
        ),
        (
            "/gpt2/resolve/main/a/b.json",
            Address("models", "gpt2", "resolve", ("main", "a", "b.json")),
            ("main", "a/b.json"),
        ),
        (
            "/a/b/resolve/refs/pr/3/c",
            Address("models", "a/b", "resolve", ("refs", "pr", "3", "c")),
            ("refs/pr/3", "c"),
        ),
        (
            "/spaces/o/m/resolve/main/m.py",
            Address("spaces", "o/m", "resolve", ("main", "m.py")),
            ("main", "m.py"),
        ),
        ("/api/whoami-v2", None, None),
        ("/api/models", None, None),
        ("/", None, None),
    ],
)
def test_an_address_names_a_repository(
    target: str, address: Address | None, split: tuple[str, str] | None
) -> None:
    found = Address.parse(target)
    assert found == address and (found and found.split()) == split


def test_a_redirect_to_the_new_name_does_not_show_that_the_file_exists() -> None:
    """from_pretrained asks for files that most models lack; `include` must not name those."""
    exchanges = []
    for file, status in (("config.json", 200), ("tokenizer.model", 404)):
        moved = f"/openai-community/gpt2/resolve/main/{file}"
        exchanges += [Exchange(f"/gpt2/resolve/main/{file}", 307, None, moved)]
        exchanges += [Exchange(moved, status, "c" * 40)]
    (found,) = gather(exchanges)
    assert found.name == "gpt2" and list(found.revisions()) == [("main", {"config.json"})]


def test_a_commit_behind_a_branch_is_no_revision_of_its_own() -> None:
    a, b = "a" * 40, "b" * 40
    (found,) = gather(
        [
            Exchange("/api/datasets/o/d/revision/main", 200),
            Exchange("/datasets/o/d/resolve/main/README.md", 200, a),
            Exchange(f"/datasets/o/d/resolve/{a}/x.csv", 200, a),
            Exchange(f"/datasets/o/d/resolve/{b}/y.csv", 200, b),
            Exchange("/datasets/o/d/resolve/v1/z.csv", 200, b),
        ]
    )
    assert list(found.revisions()) == [
        ("main", {"README.md", "x.csv"}),
        ("v1", {"y.csv", "z.csv"}),
    ]


WAITS = "# allow_code: true   # the script ran a.py: read it, then remove the first `#`"
EVERY = ["README.md", ".gitattributes", "a.json", "d[1].csv", "en/a.csv", "en/b.csv", "fr/a.csv"]


@pytest.mark.parametrize(
    ("read", "patterns"),
    [
        (["a.json", "en/a.csv", "en/b.csv"], ["a.json", "en/"]),
        (["d[1].csv", "fr/a.csv", "README.md"], ["d[[]1].csv", "fr/"]),
        (["en/b.csv"], ["en/b.csv"]),
        (EVERY[2:], ["*"]),
        (["README.md"], ["README.md"]),
        ([".gitattributes", "en/a.csv"], ["en/a.csv"]),
    ],
)
def test_the_shortest_patterns_match_what_was_read_and_nothing_else(
    read: list[str], patterns: list[str]
) -> None:
    assert _patterns(set(read), EVERY) == patterns


CODED, SUM = ("models", "acme/coded", True), ("spaces", "evaluate-metric/sum", True)


@pytest.mark.parametrize(
    ("asked", "name", "lines", "left"),
    [
        (Asked("models", "acme/gone"), "acme/gone", [], 0),
        (Asked("models", "acme/lost", True, {"main": None}), "acme/lost", [], 1),
        (Asked(*CODED, {"main": None}, {"main": {"a.py"}}), "acme/coded", [], 0),
        (
            Asked(*CODED, {"main": None}, {"main": {"pytorch_model.bin"}}),
            "acme/coded",
            ["model: acme/coded", "revision: main   # COMMIT", "include: [README.md]"],
            1,
        ),
        (
            Asked(*CODED, {"v1": None}, {"v1": {"a.py", "config.json", "pytorch_model.bin"}}),
            "acme/coded-v1",
            ["model: acme/coded", "revision: v1   # COMMIT", "include: [a.py, config.json]", WAITS],
            1,
        ),
        (Asked(*SUM, {"main": None}, {"main": {"app.py"}}), "evaluate-metric/sum", [], 0),
        (
            Asked(*SUM, {"main": None}, {"main": {"sum.py", "app.py"}}),
            "evaluate-metric/sum",
            ["metric: sum", "revision: main   # COMMIT", WAITS.replace("a.py", "sum.py")],
            0,
        ),
    ],
)
def test_each_kind_of_repository_has_its_entry_or_none(
    source: TestHub, asked: Asked, name: str, lines: list[str], left: int
) -> None:
    _, entry = entries_of(
        [Asked("models", "acme/gone"), asked], hub_at(source.endpoint), allow_code=False
    )
    found = [re.sub("[0-9a-f]{40}", "COMMIT", line) for line in entry.lines]
    assert (entry.name, found, len(entry.cannot_travel)) == (name, lines, left), entry


@obeys("stage/cli/serve.py", "{}, or trace again: -o and another name.")
def test_ctrl_c_in_the_middle_gives_a_manifest_that_fetches(
    source: TestHub, tmp_path: Path
) -> None:
    code = """
import os, signal, time
from huggingface_hub import hf_hub_download
hf_hub_download("acme/other", "config.json")
os.killpg(0, getattr(signal, os.environ["THE_SIGNAL"]))
time.sleep(60)
"""
    for number, name in enumerate(("SIGINT", "SIGTERM")):
        output = f"{number}.yaml"
        done = trace(
            tmp_path,
            source,
            *("env", f"THE_SIGNAL={name}", sys.executable, "-c", code),
            options=("-o", output),
            new_session=True,
        )
        assert done.returncode == (5 if name == "SIGINT" else 143), done.stderr
        assert "# It was interrupted" in (tmp_path / output).read_text()
        assert f"Interrupted: {output} has what was asked for until then." in done.stderr
        assert "Run the same command again" not in done.stderr and "next:" not in done.stdout
        fetch = shlex.split(in_it(done.stderr, r"(?<=-> stage )fetch [^,]* -o "))
        fetched = stage(tmp_path, source, *fetch, name, "--no-offline-check")
        assert fetched.returncode == 0, fetched.stderr


def test_a_traced_project_has_a_name_of_its_own_and_the_next_line_is_for_its_script(
    source: TestHub, tmp_path: Path
) -> None:
    """All were called `manifest`: a push of one replaced another, and advised --delete."""
    code = "from huggingface_hub import hf_hub_download as get; get('acme/other', 'config.json')"
    ids = {}
    for name in ("speech", "vision"):
        folder = tmp_path / name
        folder.mkdir()
        done = trace(folder, source, sys.executable, "-c", code, options=("-o", "manifest.yaml"))
        assert done.returncode == 0, done.stderr
        (folder / "clusters.yaml").write_text("there: {host: me@far, folder: work}\n")
        fetched = stage(folder, source, "fetch", "manifest.yaml", "-o", "b", "--no-offline-check")
        assert fetched.returncode == 0, fetched.stderr
        ids[name] = Manifest.load(folder / "manifest.yaml").name
        assert "runner init" not in fetched.stdout
        there = f"then there: runner exec --bundle b -- {shlex.join([sys.executable, '-c', code])}"
        assert "next: stage push b " in fetched.stdout and there in fetched.stdout
    assert ids == {"speech": "speech", "vision": "vision"}


def test_a_job_script_that_sets_the_hub_itself_is_recorded(source: TestHub, tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE=1, which centres advise, nothing was asked, and so nothing written."""
    (tmp_path / "job.sh").write_text(
        "export HF_HUB_OFFLINE=1 HF_ENDPOINT=http://127.0.0.1:9 all_proxy=socks://127.0.0.1:9\n"
        f'{sys.executable} -c "from huggingface_hub import hf_hub_download as get; '
        "get('acme/other', 'config.json')\"\n"
    )
    done = trace(tmp_path, source, "bash", "job.sh")
    assert done.returncode == 0, done.stderr
    assert "put back, because the Hub is served here: HF_ENDPOINT, HF_HUB_OFFLINE" in done.stderr
    assert "model: acme/other" in (tmp_path / "my.yaml").read_text()


def test_a_child_with_variables_of_its_own_is_recorded_or_named(
    source: TestHub, tmp_path: Path
) -> None:
    child = 'from huggingface_hub import hf_hub_download as h; h("acme/other", "model.safetensors")'
    code = f"""
import os, subprocess, sys
own = {{"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}}
subprocess.run([sys.executable, "-c", {child!r}], env=dict(own), check=True)
number = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass # stray"], own)
os.waitpid(number, 0)
"""
    done = trace(tmp_path, source, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    # A fetch wants the config of the weights, too.
    text = (tmp_path / "my.yaml").read_text()
    assert "include: [config.json, model.safetensors]" in text, text
    assert "warning: not recorded, it ran with variables of its own: " in done.stderr
    assert done.stderr.count("not recorded") == 1 and "# stray" in done.stderr
