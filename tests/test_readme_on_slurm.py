"""The README's path, and the road by hand, from an empty folder to a finished job, on a Slurm.

What a stranger chooses is chosen here: the profile (of this machine), the `slurm:` part, and one
epoch. The Hub, the conda channel and the models are small ones on this machine; torch and its
packages come from the package index, once, and are kept below output/.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.lib.conda.channel import index, package_from_wheel, write_package
from scripts.lib.conda.python import bundled_wheels, python_package
from scripts.lib.site import ssh_to
from stage.environment.image.own_wheel import own_requirements
from stage.environment.spec.pip_section import SDISTS
from tests.site.conftest import USER, Site, running_site
from tests.support.servers.hubs import TestHub
from tests.test_quickstart import BY_HAND, README, ROOT, code, small_bert, wikitext

pytestmark = [pytest.mark.site, pytest.mark.slow, pytest.mark.timeout(3000)]

CLONE = "git clone ADDRESS airlift && cd airlift"
ACTIVATE = ". ~/airlift-venv/bin/activate"
INSTALL = (f"python3 -m venv ~/airlift-venv && {ACTIVATE}", "pip install '.[laptop]'")
SCRIPTS = ("scripts/demo", "scripts/test")  # tests/test_demo.py; what runs this test
FETCH = "stage fetch manifests/bert-large-wikitext2.yaml -o bundle"
PUSH = ("stage push bundle me@cluster:bundle", "rsync -a runs me@cluster:")
BOOTSTRAP = "sh bundle/data/envs/train-env/bootstrap.sh ~/envs/train"
FEW = ("sh", "tar", "gzip", "sha256sum")
"""All that a cluster must have for the first command there."""


def lines_from(first: str, last: str) -> list[str]:
    """The commands by hand from the one that begins so to the one that begins so."""
    commands = [command for command, _ in code(BY_HAND)]
    begin = next(n for n, command in enumerate(commands) if command.startswith(first))
    end = max(n for n, command in enumerate(commands) if command.startswith(last))
    return commands[begin : end + 1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Site]:
    with running_site() as site:
        yield site


@pytest.fixture(scope="module")
def laptop(
    cluster: Site, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, str]]]:
    """An empty folder, and the variables of a shell there."""
    folder = tmp_path_factory.mktemp("empty")
    programs = tmp_path_factory.mktemp("programs")
    programs.joinpath("python3").symlink_to(sys.executable)
    # The way to the login node: `ssh me@cluster COMMAND`, without a server.
    ssh = programs / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do case $1 in -[oplSFi]) shift;; esac; shift; done\n'
        f"shift; cd {shlex.quote(str(cluster.home))}\n"
        f"SLURM_SITE={shlex.quote(str(cluster.folder))} exec {ROOT}/scripts/slurm-site exec "
        f'-u {USER} sh -c "cd {cluster.home}; $*"\n'
    )
    ssh.chmod(0o755)
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        model = small_bert(tmp_path_factory.mktemp("model"))
        hub.commit("models", "google-bert/bert-large-uncased", model)
        hub.commit("datasets", "Salesforce/wikitext", wikitext())
        yield (
            folder,
            {
                "HOME": str(folder),
                "PATH": f"{programs}:/usr/bin:/bin",
                "HF_ENDPOINT": hub.endpoint,
                **{n: v for n, v in os.environ.items() if n.startswith(("PIP_", "UV_", "SSL_"))},
            },
        )


def shell(lines: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Runs lines in one shell, which ends at the first that fails."""
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def environment_yml(channel: Path) -> str:
    """Python from a channel that is made, and the pip half of envs/demo-cpu.yml from the index."""
    dependencies = yaml.safe_load((ROOT / "envs/demo-cpu.yml").read_text())["dependencies"]
    section = next(entry["pip"] for entry in dependencies if isinstance(entry, dict))
    wanted = [*(line for line in section if not line.startswith("-")), *own_requirements()]
    wheels = ROOT / "output" / "readme-wheels"
    command = [sys.executable, "-m", "pip", "download", "-qq", "--dest", str(wheels)]
    command += ["--only-binary", ":all:", "--no-binary", ",".join(SDISTS)]
    command += ["--constraint", str(ROOT / "envs/constraints.txt")]
    subprocess.run([*command, *wanted], check=True)
    for package in (python_package(), *map(package_from_wheel, bundled_wheels())):
        write_package(channel, package)
    index(channel)
    pip = ["--no-index", f"--find-links {wheels}", *wanted]
    dependencies = [f"python={sysconfig.get_python_version()}", "pip", {"pip": pip}]
    document = {"name": "demo", "channels": [channel.as_uri()], "dependencies": dependencies}
    return yaml.safe_dump(document, sort_keys=False, width=1000)


@pytest.fixture(scope="module")
def checkout(laptop: tuple[Path, dict[str, str]]) -> Path:
    """A clone that is installed by the README's lines."""
    folder, environment = laptop
    shell([CLONE.replace("ADDRESS", shlex.quote(str(ROOT)))], folder, environment)
    shell(list(INSTALL), folder / "airlift", environment)
    return folder / "airlift"


def test_every_command_of_the_readme_from_a_table_to_results(
    laptop: tuple[Path, dict[str, str]], checkout: Path, cluster: Site, tmp_path: Path
) -> None:
    """All lines but two scripts, by a real sshd. Edited: what a stranger's conda channel gives."""
    folder, environment = laptop
    here = folder / "own"
    here.mkdir()
    rows = [f"{kind} {number} things,{kind}" for number in range(60) for kind in ("few", "many")]
    (here / "my.csv").write_text("\n".join(["text,label", *rows, ""]))
    (here / "my-model").mkdir()
    for name, content in small_bert(here / "my-model").items():
        (here / "my-model" / name).write_bytes(content)
    lines = [command for command, _ in code(README) if command not in SCRIPTS]
    assert lines[:3] == [CLONE, *INSTALL]
    names = [" ".join(line.split()[:2]) for line in lines[3:]]
    assert names.index("runner submit") < 6, "commands from one's own data into the queue"
    with ssh_to(cluster.folder) as keys:
        variables = environment | {
            "PATH": f"{keys}/bin:{environment['PATH']}",
            "XDG_RUNTIME_DIR": str(keys),
        }
        said = {}
        for name, line in zip(names, lines[3:], strict=True):
            line = line.replace("me@cluster:/scratch/me", f"{USER}@cluster:{cluster.home}")
            began = time.monotonic()
            said[name] = shell([ACTIVATE, line], here, variables)
            print(f"{time.monotonic() - began:5.0f} s  {line}")
            if name == "stage init":
                text = environment_yml(tmp_path / "channel")
                (here / "manifests/environment.yml").write_text(text)
        assert (keys / "log").read_text().count("Accepted publickey") == 1
    job = cluster.job_number(said["runner submit"])
    assert f"{job}" in said["runner status"]
    assert cluster.wait_for_end(job)["JobState"] == "COMPLETED", said["runner logs"]
    (pulled,) = (here / "output").iterdir()
    from transformers import AutoModelForSequenceClassification

    assert AutoModelForSequenceClassification.from_pretrained(pulled / "model").num_labels == 2
    assert (pulled / "metrics.jsonl").exists() and (pulled / "report.html").exists()


def choose_environment(checkout: Path, materials: Path, cluster: Site) -> None:
    """What the README says of an environment asset, with a channel of this machine."""
    probe = [sys.executable, "-m", "stage", "env", "probe", "--script"]
    script = subprocess.run(probe, capture_output=True, text=True, check=True).stdout
    profile = cluster.run("srun", "sh", "-c", script).stdout
    (checkout / "envs/profiles/v100.yml").write_text(profile)
    text = environment_yml(materials / "channel")
    (checkout / "envs" / "bert-large.yml").write_text(text)
    added = lines_from("train-env:", "profile:")
    manifest = checkout / "manifests/bert-large-wikitext2.yaml"
    indents = (2, 4, 4)
    entry = [" " * indent + line for indent, line in zip(indents, added, strict=True)]
    manifest.write_text("\n".join([manifest.read_text(), *entry, ""]))


def choose_slurm(run_file: Path) -> None:
    """The `slurm:` part for the site, and less training."""
    document: dict[str, Any] = yaml.safe_load(run_file.read_text())
    setup = ["export OMP_NUM_THREADS=1"]
    document["slurm"] = {"nodes": 2, "tasks_per_node": 1, "time": "00:20:00", "setup": setup}
    document |= {"epochs": 1, "batch": {"global": 16, "micro": "auto"}, "sequence_length": 64}
    run_file.write_text(yaml.safe_dump(document, sort_keys=False))


def test_from_an_empty_folder_to_a_finished_job_with_the_lines_by_hand(
    laptop: tuple[Path, dict[str, str]], checkout: Path, cluster: Site, tmp_path: Path
) -> None:
    _, environment = laptop
    fetching = lines_from(INSTALL[0], FETCH)
    assert len(fetching) <= 4 and fetching[:2] == [*INSTALL]
    choose_environment(checkout, tmp_path, cluster)
    choose_slurm(checkout / "runs/bert-large-deepspeed.yaml")
    shell([ACTIVATE, *fetching[2:], "stage verify bundle", *PUSH], checkout, environment)
    commands = lines_from(BOOTSTRAP, "runner submit")
    assert len(commands) <= 6
    assert commands[0] == BOOTSTRAP
    few = cluster.home / "few"
    few.mkdir(mode=0o755)
    for name in FEW:
        few.joinpath(name).symlink_to(shutil.which(name) or name)
    said = cluster.run("sh", "-ec", "\n".join([f"(PATH=$HOME/few; {BOOTSTRAP})", *commands[1:]]))
    job = cluster.wait_for_end(cluster.job_number(said.stdout + said.stderr), seconds=1200)
    output = cluster.home / "output/bert-large-mlm"
    logs = "".join(path.read_text() for path in (output / "logs").glob("slurm-*.out"))
    assert (job["JobState"], job["NumNodes"]) == ("COMPLETED", "2"), logs
    assert json.loads((output / "model/config.json").read_text())["model_type"] == "bert"
    assert cluster.leaks() == ""
