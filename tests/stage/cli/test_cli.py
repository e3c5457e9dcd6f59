"""The command line: quick to start, exact exit codes, short and clear errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stage.bundle.bundle import finish_bundle
from stage.lock.model import Column, LeftOut
from tests.stage.bundles import make_bundle
from tests.support.staging import run_as

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {
    "torch",
    "transformers",
    "datasets",
    "pyarrow",
    "huggingface_hub",
    "deepspeed",
    "numpy",
    "yaml",
}
NETWORK = {"urllib3", "httpx2", "http.client", "requests", "ssl"}
MANIFEST = "format: 1\nassets:\n  notes:\n    path: notes.txt\n"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("made") / "bundle", big=False).root


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """A folder with a manifest that asks for one local file: no Hub is needed."""
    (tmp_path / "m.yaml").write_text(MANIFEST)
    (tmp_path / "notes.txt").write_text("a note\n")
    return tmp_path


def environment_of(folder: Path) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HOME": str(folder)}


def stage(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """As a person starts it."""
    return subprocess.run(
        [sys.executable, "-m", "stage", *map(str, arguments)],
        cwd=cwd,
        env=environment_of(cwd),
        capture_output=True,
        text=True,
        timeout=120,
    )


def stage_here(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `stage` in this process, for many cases; another test starts one as a process."""
    return run_as([str(argument) for argument in arguments], cwd, environment_of(cwd))


IMPORTS = (
    "import json, sys\nfrom stage.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
    + ("    print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n")
)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["verify", "--help"], ["fetch", "--help"], ["verify"], ["show"]],
    ids=" ".join,
)
def test_help_show_and_verify_import_nothing_heavy_and_no_network(
    bundle: Path, arguments: list[str]
) -> None:
    if arguments in (["verify"], ["show"]):
        arguments = [*arguments, str(bundle)]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stderr.splitlines()[-1]))
    assert "stage.cli" in imported and imported & (HEAVY | NETWORK) == set()


@pytest.mark.parametrize(
    ("arguments", "said", "way_out"),
    [
        (["vrify", "x"], "No such command 'vrify'", "--help"),
        (["verify"], "Missing argument 'BUNDLE'", "verify --help"),
        (["verify", "a", "b"], "unexpected extra argument (b)", "verify --help"),
        (["verify", "x", "--jobs", "0"], "Invalid value for '--jobs'", "verify --help"),
        (["verify", "x", "--fats"], "No such option", "verify --help"),
        (["verify", "x", "--report"], "requires an argument", "verify --help"),
        (["fetch", "m.yaml"], "Missing option '-o'", "fetch --help"),
        (
            ["fetch", "no.yaml", "-o", "b"],
            "no.yaml: no such file",
            "`stage init NAME...` writes a manifest.",
        ),
        (["fetch", "m.yaml", "-o", "m.yaml"], "is a file; a bundle is a folder", "another -o"),
        (
            ["fetch", "m.yaml", "-o", "b", "--locked"],
            "--locked, but m.lock is not there",
            "stage lock m.yaml",
        ),
        (["fetch", "m.yaml", "-o", "b", "--locked", "--update=notes"], "contradict", "one of them"),
        (["fetch", "--update", "m.yaml", "-o", "b", "--locked"], "contradict", "one of them"),
        (["fetch", "-o", "b", "--", "--update", "m.yaml"], "extra argument", "fetch --help"),
        (["fetch", "m.yaml", "-o", "b", "--update", "nots"], "has no such asset", "notes"),
        (["lock", "m.yaml", "--endpoint", "huggingface.co"], "is not an address", "https://"),
        (["init"], "Give NAME..., or --example NAME", "stage init --help"),
        (
            ["init", "--example", "bert-large-wikitext2", "--profile", "p.yml"],
            "do not go together",
            "Write the example",
        ),
        (["trace", "--", "no-such-program"], "no such program on PATH", "stage trace --"),
        (["show", "."], "not a bundle", "stage fetch -o"),
        (["init", "notes.txt", "-o", "/proc/no/m.yaml"], "no folder can be made", "on a disk"),
        (["verify", "gone"], "gone: no such folder", "Check the path"),
    ],
)
def test_wrong_usage_is_one_short_paragraph_and_ends_with_2(
    laptop: Path, arguments: list[str], said: str, way_out: str
) -> None:
    done = stage_here(*arguments, cwd=laptop)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .+\n  -> .+\n", done.stderr), done.stderr
    assert said in done.stderr and way_out in done.stderr
    assert not (laptop / "b").exists() and not (laptop / "m.lock").exists()


def test_lock_writes_the_lock_and_nothing_else(laptop: Path) -> None:
    done = stage("lock", "m.yaml", cwd=laptop)
    assert (done.returncode, done.stdout) == (0, "") and "m.lock: written" in done.stderr
    assert sorted(path.name for path in laptop.iterdir()) == ["m.lock", "m.yaml", "notes.txt"]
    before = (laptop / "m.lock").read_bytes()
    assert "m.lock: unchanged" in stage_here("lock", "m.yaml", cwd=laptop).stderr
    assert (laptop / "m.lock").read_bytes() == before


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("verify nowhere --json", 2, "no such folder"),
        ("show b --json", 2, "no such folder"),
    ],
)
def test_an_error_under_json_is_one_document_with_the_exit_code(
    laptop: Path, command: str, code: int, said: str
) -> None:
    done = stage_here(*command.split(), cwd=laptop)
    assert done.returncode == code and done.stderr.startswith("error: ")
    document = json.loads(done.stdout)
    assert document["exit_code"] == code and said in document["error"]["message"]
    assert set(document["error"]) == {"message", "remedy"}


def test_show_tells_programs_the_same(bundle: Path) -> None:
    document = json.loads(stage("show", bundle, "--json").stdout)
    assert document["assets"]["lines"]["configs"] == {
        "plain": {"train": {"rows": 7, "columns": {"text": "string"}}}
    }
    assert document["assets"]["bert"]["path"] == "data/models/bert" and document["files"] == 8
    assert stage("show", bundle).stdout.splitlines()[1] == f"bundle id {document['bundle_id']}"


def test_what_a_lock_holds_cannot_rewrite_the_terminal(tmp_path: Path) -> None:
    """Names come from a Hub, where anybody may write what he likes."""
    made = make_bundle(tmp_path / "bundle", big=False)
    lines = made.lock.assets["lines"]
    split = replace(
        lines.configs["plain"]["train"],
        schema=(Column("\x1b[2J\x1b]0;owned\x07", "str\x9b31ming"),),
    )
    hostile = replace(
        lines,
        licence="mit\x1b[8m",
        configs={"plain\x1b[1m": {"train": split}},
        aliases=("a/\x1b[2Jl", "b/l"),
        source=replace(lines.source, parquet_commit="c" * 40),
        left_out=(LeftOut("x", 1500, "y"),),
    )
    finish_bundle(made.root, made.lock.with_asset(hostile), b"format: 1\n", [])
    done = stage("show", made.root)
    assert done.returncode == 0 and "owned" in done.stdout
    for words in ("also     a/\\x1b[2Jl, b/l", f"parquet  {'c' * 40} (", "left out 1 file, 1.5 kB"):
        assert f"\n  {words}" in done.stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", done.stdout)


def test_folders_without_files_are_no_findings(tmp_path: Path) -> None:
    """BagIt lists files. rsync and unzip leave empty folders, which hide nothing."""
    bundle = make_bundle(tmp_path / "bundle", big=False).root
    (bundle / "data/models/empty/er").mkdir(parents=True)
    assert stage("verify", str(bundle)).returncode == 0
