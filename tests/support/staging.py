"""A laptop for tests: a manifest, two small repositories on a Hub, and `stage` as users run it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest import mock

from click.testing import CliRunner, Result

from stage.cli import main
from tests.support.servers.hubs import TestHub

MODEL, DATASET = "acme/tiny-bert", "acme/lines"
MANIFEST = f"""\
format: 1
name: tiny
assets:
  tiny-bert:
    model: {MODEL}
  lines:
    dataset: {DATASET}
    config: plain
"""
# Path on the Hub -> path in the bundle
LANDING = {
    **{
        f"models/{MODEL}/{name}": f"data/models/tiny-bert/{name}"
        for name in ("README.md", "config.json", "model.safetensors", "tokenizer.json", "vocab.txt")
    },
    **{
        f"datasets/{DATASET}/plain/{name}.parquet": f"data/datasets/lines/plain/{name}.parquet"
        for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001")
    },
    f"datasets/{DATASET}/README.md": "data/datasets/lines/CARD.md",
}


def safetensors(size: int) -> bytes:
    """A safetensors file with one tensor of `size` pseudo-random bytes."""
    header = json.dumps(
        {"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + random.Random(size).randbytes(size)


@cache
def model_files(weights: int = 3_000_000) -> dict[str, bytes]:
    """A model repository: files that travel, and files that a fetch leaves out."""
    return {
        "README.md": b"---\nlicense: apache-2.0\n---\n# Tiny BERT\n",
        "config.json": b'{"model_type": "bert", "vocab_size": 5, "hidden_size": 4}\n',
        "model.safetensors": safetensors(weights),
        "onnx/model.onnx": b"onnx" * 100,
        "pytorch_model.bin": b"pickle" * 100,
        "tokenizer.json": b'{"version": "1.0"}\n' * 2000,
        "vocab.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n",
    }


@cache
def dataset_files() -> dict[str, bytes]:
    """A dataset repository: parquet files, and a card that declares a config."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = {
        "README.md": b"---\nlicense: cc0-1.0\nconfigs:\n- config_name: plain\n  data_files:\n"
        b"  - split: train\n    path: plain/train-*\n"
        b"  - split: validation\n    path: plain/validation-*\n---\n"
    }
    for number, name in enumerate(
        ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001")
    ):
        noise = random.Random(number)
        table = pa.table({"text": [noise.randbytes(40).hex() for _ in range(2000)]})
        sink = io.BytesIO()
        pq.write_table(table, sink)
        files[f"plain/{name}.parquet"] = sink.getvalue()
    return files


def laptop_python() -> str:
    """The Python that fetches bundles: that of the tests, or another one (scripts/lowest).

    The oldest transformers of the cluster needs an older huggingface_hub than `stage fetch` needs.
    """
    return os.environ.get("AIRLIFT_LAPTOP_PYTHON", sys.executable)


def fetch_bundle(laptop: Path, name: str, endpoint: str, *options: str) -> Path:
    """Runs `stage fetch NAME.yaml -o bundle` in a folder, as a user does."""
    command = [laptop_python(), "-m", "stage", "fetch", f"{name}.yaml", "-o", "bundle", *options]
    done = subprocess.run(
        [*command, "--endpoint", endpoint], cwd=laptop, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return laptop / "bundle"


@dataclass
class Laptop:
    """A folder with `tiny.yaml` in it, and a Hub that has the repositories of that manifest.

    `stage` runs in the process of the tests, because the imports for a Hub take longer than most
    fetches here. It gets its own environment, folder and exit code, as in a process. Tests compare
    the bundle with `undisturbed_id`, which comes from a real process.

    Attributes:
        settings: additional environment variables.
        own_process: starts `stage` as from a shell, for settings that a process reads once
            (proxies, certificates, a token).
    """

    folder: Path
    hub: TestHub
    settings: dict[str, str] = field(default_factory=dict)
    own_process: bool = False

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    def publish(self, weights: int = 3_000_000) -> None:
        self.hub.commit("models", MODEL, model_files(weights))
        self.hub.commit("datasets", DATASET, dataset_files())

    def write(self, manifest: str) -> None:
        (self.folder / "tiny.yaml").write_text(manifest)

    def environment(self, **more: str) -> dict[str, str]:
        """A user's environment: no token, an empty cache, short timeouts for a silent server."""
        kept = {
            name: os.environ[name]
            for name in (
                "PATH",
                "PYTHONPATH",
                "LANG",
                "LC_ALL",
                "COVERAGE_PROCESS_START",
                "AIRLIFT_STORE",
            )
            if name in os.environ
        }
        home = {
            "HOME": str(self.folder),
            "HF_HOME": str(self.folder / "hf"),
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
        }
        return {**kept, **home, "HF_ENDPOINT": self.hub.endpoint, **self.settings, **more}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "stage", *arguments]

    def stage(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        if not self.own_process:
            return run_as(arguments, self.folder, self.environment(**environment))
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def fetch(
        self, bundle: str = "bundle", *options: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs `stage fetch`, without its load test (which has its own tests) unless asked for."""
        return self.stage(
            "fetch", "tiny.yaml", "-o", bundle, "-v", "--no-offline-check", *options, **environment
        )

    def fetched(self, bundle: str = "bundle", *options: str, **environment: str) -> str:
        """Fetches, which must succeed; returns the bundle id."""
        done = self.fetch(bundle, *options, **environment)
        assert done.returncode == 0, done.stderr
        return bundle_id(self.folder / bundle)

    def refused(self, code: int, *options: str, **environment: str) -> str:
        """Fetches. It must fail with `code` and no finished bundle. Returns the message."""
        done = self.fetch("bundle", *options, **environment)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr + done.stdout
        assert not (self.bundle / "tagmanifest-sha256.txt").exists()
        return done.stderr


def bundle_id(bundle: Path) -> str:
    """sha256 of the lock in a finished bundle."""
    assert (bundle / "tagmanifest-sha256.txt").is_file()
    return hashlib.sha256((bundle / "stage.lock").read_bytes()).hexdigest()


def payload(bundle: Path) -> dict[str, int]:
    """Path -> size of every payload file, unfinished ones included."""
    return {
        path.relative_to(bundle).as_posix(): path.stat().st_size
        for path in (bundle / "data").rglob("*")
        if path.is_file()
    }


def run_here(*arguments: object, code: int = 0) -> Result:
    """Runs `stage` in this process. Fails on any traceback."""
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output and (
        done.exception is None or isinstance(done.exception, SystemExit)
    )
    return done


def run_as(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs `stage` in this process, as if in its own, with that folder and only that environment.

    Raises:
        Exception: any error that a shell would show as a traceback.
    """
    with _moved(folder, environment):
        done = CliRunner().invoke(main, list(arguments), prog_name="stage")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(
        ["stage", *arguments], done.exit_code, done.stdout, done.stderr
    )


@contextmanager
def _moved(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Changes folder and environment, and hides the token of the user who runs the tests."""
    from huggingface_hub import constants

    before = Path.cwd()
    home = environment.get("HF_HOME") or str(folder / "no-home")
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(constants, "HF_TOKEN_PATH", str(Path(home) / "token")),
    ):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
