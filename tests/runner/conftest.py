"""A bundle with small real models and real English, made once; `runner` as a user runs it."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Some tests call the launcher in this process. It would make later imports do without torch.
import torch  # noqa: F401

from runner.config.run_config import RunConfig
from runner.inputs import resolve
from scripts.lib.demo.repositories import DATASET, dataset_files
from scripts.lib.hub.loopback_hub import LoopbackHub
from tests.support.once import once
from tests.support.staging import fetch_bundle
from tests.support.training.models import tiny_model_files
from tests.support.training.twins import stage_twins
from tests.support.warm import warm_python

MODELS = {
    "bert": "tiny-bert",
    "gpt2": "tiny-gpt2",
    "headless": "headless-bert",
    "steady": "steady-bert",
}
MANIFEST = f"""\
format: 1
name: tiny
assets:
  tiny-bert: {{model: acme/tiny-bert}}
  tiny-gpt2: {{model: acme/tiny-gpt2}}
  steady-bert: {{model: acme/steady-bert}}
  headless-bert: {{model: acme/headless-bert}}
  reference: {{dataset: {DATASET}, config: chapters}}
  numbers: {{dataset: acme/numbers}}
  notes: {{path: notes.txt}}
"""


def _numbers() -> dict[str, bytes]:
    """A dataset with a column that is not text, and rows that are empty or null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = {}
    for split in ("train", "test"):
        texts = ["", None, "  \n", *(f"sentence number {n} is not a long one" for n in range(40))]
        sink = io.BytesIO()
        pq.write_table(pa.table({"text": texts, "label": list(range(len(texts)))}), sink)
        files[f"data/{split}-00000-of-00001.parquet"] = sink.getvalue()
    return files


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Staged from a Hub on loopback, as a user does. Treat it as read-only."""
    return once(tmp_path_factory, "tiny-bundle", _stage_bundle) / "bundle"


def _stage_bundle(laptop: Path) -> None:
    (laptop / "tiny.yaml").write_text(MANIFEST)
    (laptop / "notes.txt").write_text("nothing to train\n")
    with LoopbackHub(laptop / "hub") as hub:
        for kind, name in MODELS.items():
            hub.repositories.commit(
                "models", f"acme/{name}", tiny_model_files(laptop / f"model-{kind}", kind)
            )
        hub.repositories.commit("datasets", DATASET, dataset_files())
        hub.repositories.commit("datasets", "acme/numbers", _numbers())
        fetch_bundle(laptop, "tiny", hub.endpoint)


RUN = {
    "format": 1,
    "name": "tiny",
    "task": "masked-lm",
    "model": {"asset": "tiny-bert"},
    "dataset": {"asset": "reference", "limit": {"train": 300, "validation": 60}},
    "sequence_length": 32,
    "steps": 8,
    "batch": {"global": 8, "micro": 2},
    "optimizer": {
        "lr": 0.003,
        "weight_decay": 1.0,
    },  # large, so that decay of the wrong weights would show
    "precision": "fp32",
    "checkpoint": {"every": 2, "keep": 2},
}


@pytest.fixture(scope="session")
def twins_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tutorials' models and data, tiny (tests.support.training.twins). Read-only for tests."""
    return once(tmp_path_factory, "twins-bundle", stage_twins) / "bundle"


@dataclass
class Cluster:
    """A folder with run files, in which `runner` runs."""

    folder: Path
    bundle: Path

    def write(self, name: str = "tiny", /, **changes: Any) -> Path:
        """A run file: `RUN` with top-level keys replaced (None: left out)."""
        path = self.folder / f"{name}.yaml"
        settings = {
            key: value
            for key, value in {**RUN, "name": name, **changes}.items()
            if value is not None
        }
        path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
        return path

    def output(self, name: str = "tiny") -> Path:
        return self.folder / "output" / name

    def take(self, run_folder: Path) -> Path:
        """Copies a run from elsewhere, and its prepared data, as if it had run here."""
        name = run_folder.name
        self.write(name, engine={"zero": int(name.removeprefix("zero"))})
        self.take_data(run_folder)
        return Path(shutil.copytree(run_folder, self.output(name)))

    def take_data(self, run_folder: Path) -> None:
        """Copies the prepared data of a run from elsewhere, for tests that only train."""
        shutil.copytree(run_folder.parent / ".stores", self.folder / "output" / ".stores")

    def prepare(self, *run_files: Path) -> None:
        """Runs `runner prepare` in this process, which is faster than the command."""
        from runner.data.prepare import prepare
        from runner.data.recipe import recipes

        for path in run_files:
            config = RunConfig.load(path)
            for several in recipes(
                config,
                resolve(config, self.bundle),
                config.sequence_length or 0,  # type: ignore[arg-type]  # "auto" of images alone
            ).values():
                for recipe in several:
                    prepare(recipe, self.folder / "output" / ".stores", print)

    def environment(self, **more: str) -> dict[str, str]:
        """A user's environment on a login node: no Slurm, no offline variables."""
        dropped = ("SLURM_", "HF_", "TRANSFORMERS_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return {**kept, "OMP_NUM_THREADS": "1", **more}

    def command(self, *arguments: str) -> list[str]:
        bundle = () if arguments[0] == "rank" else ("--bundle", str(self.bundle))
        return [sys.executable, "-m", "runner", *arguments, *bundle]

    def start(
        self, *arguments: str, python: str = sys.executable, **environment: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [python, *self.command(*arguments)[1:]],
            cwd=self.folder,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command from start to end. Its ranks start warm (tests.support.warm)."""
        process = self.start(*arguments, python=warm_python(), **environment)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def refused(self, *arguments: str, code: int = 2) -> str:
        """Runs a command that must be refused; returns the message."""
        done = self.run(*arguments)
        assert done.returncode == code, (done.stdout, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr
        assert done.stderr.startswith("error: ")
        return done.stderr

    def trained(
        self, name: str = "tiny", *options: str, processes: int = 2, **environment: str
    ) -> Path:
        """Trains, which must succeed; returns the run folder."""
        done = self.run(
            "train", f"{name}.yaml", "--processes", str(processes), *options, **environment
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(self.output(name))}"
        return self.output(name)


def in_ranks(cluster: Cluster, ranks: int, *runs: Path) -> str:
    """Trains these run files, one after the other, on `ranks` ranks; all must succeed.

    Returns:
        The output of the ranks.
    """
    module = "tests.support.training.in_ranks"
    command = [warm_python(), "-m", module, str(ranks), str(cluster.bundle), *map(str, runs)]
    root = Path(__file__).parents[2]
    environment = cluster.environment(DS_ACCELERATOR="cpu")
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    names = {path.stem.partition(".")[0] for path in runs}
    assert done.returncode == 0, done.stderr[-3000:] + "".join(
        logs(cluster.output(n))[-3000:] for n in names
    )
    return done.stdout


def logs(run_folder: Path) -> str:
    """The logs of all ranks."""
    return "\n".join(
        f"--- {path.name}\n{path.read_text()}"
        for path in sorted((run_folder / "logs").glob("*.log"))
    )


def metrics(run_folder: Path, key: str = "loss") -> list[tuple[int, float]]:
    """(step, value) of each line of metrics.jsonl that has `key`."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in lines if key in line]


def rank_pids(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher started, rank 0 first."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            environ = dict(
                pair.partition("=")[::2] for pair in (entry / "environ").read_text().split("\0")
            )
        except OSError:
            continue
        if parent == launcher and "RANK" in environ:
            found[int(environ["RANK"])] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def assert_same_story(folder: Path, expected: Path) -> None:
    """Asserts that every step is there once, bit for bit as in the undisturbed run."""
    for key in ("loss", "lr", "grad_norm", "validation_loss"):
        assert metrics(folder, key) == metrics(expected, key), key
    model = "model/model.safetensors"
    assert (folder / model).read_bytes() == (expected / model).read_bytes()


@pytest.fixture
def cluster(tmp_path: Path, bundle: Path) -> Cluster:
    """A user's folder on the cluster."""
    return Cluster(tmp_path, bundle)


BY_COMMAND = 2


@pytest.fixture(scope="session")
def trained_at(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Callable[[int], Path]:
    """The run folder of `RUN` at a ZeRO stage, trained without interruption. Read-only for tests.

    Stage 2 by the command, as a user does; the others one after the other in the same ranks, on the
    same data.
    """

    def by_command(folder: Path) -> None:
        cluster = Cluster(folder, bundle)
        cluster.write(f"zero{BY_COMMAND}", engine={"zero": BY_COMMAND})
        cluster.trained(f"zero{BY_COMMAND}")

    def in_the_same_ranks(folder: Path) -> None:
        cluster = Cluster(folder, bundle)
        cluster.take_data(run_folder(BY_COMMAND))
        in_ranks(
            cluster,
            2,
            *(cluster.write(f"zero{stage}", engine={"zero": stage}) for stage in (0, 1, 3)),
        )

    def run_folder(stage: int) -> Path:
        name, make = (
            (f"zero{stage}", by_command)
            if stage == BY_COMMAND
            else ("zero-others", in_the_same_ranks)
        )
        return once(tmp_path_factory, name, make) / "output" / f"zero{stage}"

    return run_folder


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Cluster:
    """One cluster for all tests of a module: a test trains, another reads the result."""
    return Cluster(tmp_path_factory.mktemp("cluster"), bundle)


@pytest.fixture(scope="session")
def run_python(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """Runs Python code in its own process, for effects that cannot be undone."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )

    yield run
