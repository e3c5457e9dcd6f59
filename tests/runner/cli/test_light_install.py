"""Installations without torch, `pip install .` and `'.[laptop]'`: what works, typical mistakes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from runner.job.installed import how_to_install
from tests.first_job.harness import programs
from tests.runner.conftest import RUN
from tests.support.light import ROOT, closure, declared, make_light
from tests.support.once import once


class Said(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `python`, `stage` and `runner` of a light installation."""
    return once(tmp_path_factory, "light", make_light) / "bin"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Path:
    """A user's folder with the files that the commands below name."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "bundle").symlink_to(bundle)
    (folder / "empty").mkdir()
    data = {"asset": "reference", "messages": "text"}
    runs: dict[str, dict[str, object]] = {
        "run": {},
        "lora": {"lora": {"rank": 4}},
        "fsdp": {"engine": {"name": "fsdp", "wrap": {"layer": "BertLayer"}}},
        "chat": {"task": "instruction", "model": {"asset": "tiny-gpt2"}, "dataset": data},
    }
    for name, changes in runs.items():
        settings = {**RUN, **changes}
        text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
        (folder / f"{name}.yaml").write_text(text)
    files = {
        "broken.yaml": b"a: [1\nb: {",
        "list.yaml": b"- 1\n",
        "blob.bin": b"\x00\xff\xfe",
        "wanted.yaml": b"format: 1\nname: g\nassets:\n  m: {model: acme/tiny}\n",
        "typo.yaml": b"format: 1\nname: g\nassets:\n  m: {modle: acme/tiny}\n",
        "env.yml": b"name: e\nchannels: [conda-forge]\ndependencies: [python=3.11]\n",
        "env.yaml": b"format: 1\nname: g\nassets:\n"
        b"  e: {environment: env.yml, profile: v100.yml}\n",
        "v100.yml": (ROOT / "envs/profiles/v100.yml").read_bytes(),
        "broken.json": b'{"a": ',
        "ds.json": b'{\n // mine: "a"\n "zero_optimization": {"stage": 2,}, # two\n'
        b' "train_batch_size": "auto", /* x\n */\n}',
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def environment(state: Path, **more: str) -> dict[str, str]:
    """A login node's variables; the package folders of the tests are not among them."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {**kept, "XDG_STATE_HOME": str(state), "AIRLIFT_STORE": "none", **more}


def run_all(light: Path, home: Path, commands: list[str]) -> dict[str, Said]:
    """Runs commands, four at a time, each in a process of its own."""

    def run(command: str) -> Said:
        program, *words = shlex.split(command)
        done = subprocess.run(
            [light / program, *words], cwd=home, env=environment(home.parent / "state"),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        return Said(done.returncode, done.stdout, done.stderr)

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(commands, pool.map(run, commands), strict=True))


RUN_IT = "run.yaml --bundle bundle"
CHECK = f"runner check {RUN_IT}"
MISTAKES = {
    "stage verfy bundle": "stage verify",
    "stage verify": "BUNDLE",
    "stage verify nowhere": "no such folder",
    "stage verify run.yaml": "this is a run file, not a bundle",
    "stage verify empty": "not a bundle",
    "stage show bundle --jsn": "--json",
    "stage fetch run.yaml -o out": "this is a run file, not a manifest",
    "stage fetch broken.yaml -o out": "broken.yaml:2",
    "stage fetch list.yaml -o out": "list.yaml",
    "stage fetch blob.bin -o out": "UTF-8",
    "stage fetch wanted.yaml": "--output",
    "stage fetch typo.yaml -o out": "`model`",
    "stage init": "NAME",
    "stage patch bundle --since run.yaml -o p": "not a lock",
    "stage apply bundle nowhere": "patch.json",
    "stage push bundle": "HOST:DIR",
    "stage sign bundle --key nokey": "ssh-keygen",
    "stage serve bundle --port abc": "abc",
    "stage env lok": "stage env lock",
    "stage env create bundle tiny-bert prefix": "not an environment",
    "stage trace -- no-such-command": "no such program",
    "runner check wanted.yaml --bundle bundle": "this is a manifest, not a run file",
    "runner check broken.yaml --bundle bundle": "broken.yaml:2",
    f"{CHECK} --set optimizer.lrr=1": "`lr`",
    f"{CHECK} --set model.asset=tiny-brt": "`tiny-bert`",
    f"{CHECK} --set batch.global=9 --processes 2": "does not divide",
    f"{CHECK} --set engine.config=broken.json": "broken.json:1",
    f"{CHECK} --output bundle/out": "inside the bundle",
    "runner check chat.yaml --bundle bundle": "chat",
    f"runner prepare {RUN_IT}": "preparing data needs numpy and transformers",
    f"runner train {RUN_IT}": "needs torch, transformers, tensorboard, numpy and deepspeed",
    "runner train lora.yaml --bundle bundle": "deepspeed and peft",
    f"runner bench {RUN_IT}": "[train]'",
    f"runner rehearse {RUN_IT}": "[train]'",
    f"runner submit {RUN_IT} --set slurm.time=soon --print": "soon",
    f"runner submit {RUN_IT} --set slurm.srun=[--x] --print": "which cannot train",
    "runner exec --bundle bundle -- no-such-command": "no-such-command",
    "runner init maskd-lm": "`masked-lm`",
    "runner status": "no run is below",
    "runner logs empty": "not a run folder",
}


def test_no_mistake_in_the_light_install_shows_a_traceback(light: Path, home: Path) -> None:
    for command, said in run_all(light, home, list(MISTAKES)).items():
        assert "Traceback" not in said.out + said.err, (command, said)
        assert said.code == 2, (command, said)
        assert "error: " in [line[:7] for line in said.err.splitlines()], (command, said)
        assert MISTAKES[command] in said.err, (command, said)
    assert not (home / "output").exists()


def test_the_light_install_checks_and_says_what_it_leaves_to_the_ranks(
    light: Path, home: Path
) -> None:
    """Also with LoRA (a table of peft), FSDP, ds.json (hjson)."""
    fsdp = "runner check fsdp.yaml --bundle bundle --processes 2"
    lora = "runner check lora.yaml --bundle bundle"
    ds = f"{CHECK} --set engine.config=ds.json"
    printed = f"runner submit {RUN_IT} --print"
    setup = f"{printed} --set 'slurm.setup=[\". /envs/train/activate\"]'"
    said = run_all(light, home, [CHECK, fsdp, lora, ds, printed, setup, "stage verify bundle"])
    for command, (code, out, err) in said.items():
        assert (code, err) == (0, ""), (command, out, err)
    for command in (CHECK, fsdp, lora, ds):
        out = said[command].out
        left = [line for line in out.splitlines() if line.startswith("warning: not checked here")]
        assert len(left) == 1 and "whether its tokenizer loads" in left[0], out
        assert "nothing found that would fail in what was checked, except 2 warnings above" in out
        assert "next: runner train" not in out, "which ends with 2"
        assert "\nnext: " in out and "pip install" in out.rpartition("\nnext: ")[2]
        assert "model tiny-bert: bert, " in out and "300 rows to train on" in out
    assert f"exec {light / 'python'} {light / 'runner'} train " in said[printed].out
    assert "\n. /envs/train/activate\n" in said[setup].out
    assert "\nexec runner train " in said[setup].out


NEEDS_LAPTOP = (
    "stage init acme/tiny",
    "stage lock wanted.yaml",
    "stage fetch wanted.yaml -o out",
    "stage trace -- true",
    "stage env lock env.yml --profile v100.yml",
    "stage verify bundle --deep",
    CHECK,
    f"runner submit {RUN_IT}",
)


def test_the_core_verifies_shows_and_prints_and_names_the_extra_for_the_rest(
    tmp_path_factory: pytest.TempPathFactory, home: Path
) -> None:
    """`pip install .`: click, PyYAML and tqdm alone."""
    core = once(tmp_path_factory, "core", lambda folder: make_light(folder, "")) / "bin"
    works = {
        "stage verify bundle": "sound: ",
        "stage verify bundle --fast": "sound: ",
        "stage show bundle": "bundle id ",
        "stage show bundle --json": '"bundle_id"',
        "runner submit run.yaml --bundle bundle --print": "#SBATCH",
        "runner exec --bundle bundle -- true": "",
        "runner init masked-lm --bundle bundle": "runner check",
    }
    said = run_all(core, home, [*works, *NEEDS_LAPTOP, "runner status"])
    for command, words in works.items():
        assert said[command].code == 0 and words in said[command].out, said[command]
    assert said["runner status"].code == 2 and "no run is below" in said["runner status"].err
    for command in NEEDS_LAPTOP:
        code, out, err = said[command]
        assert code == 2 and "[laptop]'" in err, (command, out, err)
        assert "Traceback" not in err


def test_the_core_is_at_most_nine_distributions() -> None:
    assert len(closure(declared())) + 1 <= 9


def test_the_light_install_submits(light: Path, home: Path, tmp_path: Path) -> None:
    """sbatch is a program that accepts the script; the real one is in tests/site."""
    path = programs(tmp_path / "bin", sbatch="echo 42", squeue="exit 0")
    done = subprocess.run(
        [light / "runner", *shlex.split(f"submit {RUN_IT} --output {tmp_path / 'out'}")],
        env=environment(tmp_path, PATH=path),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    follow = f"submitted job 42; follow it: runner logs -f {tmp_path / 'out'}\n"
    assert follow in done.stdout
    assert f"warning: the job runs {light / 'python'}, which lacks torch" in done.stdout
    assert (tmp_path / "out" / "submit.sbatch").is_file()


def test_the_light_install_checks_a_command(light: Path, home: Path) -> None:
    """A command needs no package of a training; its launcher is not here, not mistyped."""
    (home / "own").mkdir()
    for name, command in (("plain", "python -c pass"), ("ranks", "llamafactory-cli train x")):
        (home / "own" / f"{name}.yaml").write_text(f"format: 1\ncommand: {command}\n")
    plain, ranks = (f"runner check own/{name}.yaml --bundle bundle" for name in ("plain", "ranks"))
    said = run_all(light, home, [plain, ranks])
    assert said[plain].code == 0 and "lacks" not in said[plain].out, said[plain]
    assert "`llamafactory-cli`, and there is no such program" in said[ranks].err, said[ranks]
    assert "Did you mean" not in said[ranks].err, said[ranks]
    brought = f"{ranks} --set 'slurm.setup=[\". /envs/train/activate\"]'"
    (done,) = run_all(light, home, [brought]).values()
    assert "not checked here: what the code imports" in done.out, done


def test_a_bundle_with_an_environment_is_the_first_remedy() -> None:
    said = how_to_install([Path("/b/data/envs/train-env")])
    assert said.index("sh /b/data/envs/train-env/bootstrap.sh") < said.index("pip install")
