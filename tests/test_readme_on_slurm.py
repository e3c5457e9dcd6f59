"""The README's path from an empty folder to a finished job on a Slurm; then the road by hand.

The conda channel and the model are small ones on this machine; torch and its packages come from the
package index, once, and are kept below output/.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import yaml

from scripts.lib.conda.channel import index, package_from_wheel, write_package
from scripts.lib.conda.python import bundled_wheels, python_package
from scripts.lib.site import ssh_to
from stage.environment.image.image import own_requirements
from stage.environment.spec.environment_yml import SDISTS
from tests.site.conftest import USER, running_site
from tests.support.training.models import tiny_tokenizer
from tests.test_quickstart import README, ROOT, code

pytestmark = [pytest.mark.site, pytest.mark.slow, pytest.mark.timeout(3000)]

CLONE = "git clone ADDRESS airlift && cd airlift"
ACTIVATE = ". ~/airlift-venv/bin/activate"
INSTALL = (f"python3 -m venv ~/airlift-venv && {ACTIVATE}", "pip install '.[laptop]'")
SCRIPTS = ("scripts/demo", "scripts/test")  # tests/test_demo.py; what runs this test
OF_THE_PAGE = (
    ("bert-large-wikitext2", "my"),
    ("bert-large-deepspeed", "my"),
    ("me@", f"{USER}@"),
)
"""What the page on the road by hand names -> what is here."""


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


def small_bert(folder: Path) -> None:
    """Writes a model with few weights."""
    from transformers import BertConfig, BertForMaskedLM

    special = {f"{n}_token": f"[{n.upper()}]" for n in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = tiny_tokenizer(special, 1024, wordpiece=True)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=64, **size)
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_every_command_of_the_readme_from_a_table_to_results(tmp_path: Path) -> None:
    """All lines but two scripts, by a real sshd. Edited: what a stranger's conda channel gives.

    Then, for the same bundle, those of docs/howto/by-hand.md.
    """
    folder = tmp_path / "empty"
    programs, here = folder / "programs", folder / "own"
    programs.mkdir(parents=True)
    programs.joinpath("python3").symlink_to(sys.executable)
    environment = {
        "HOME": str(folder),
        "PATH": f"{programs}:/usr/bin:/bin",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        **{n: v for n, v in os.environ.items() if n.startswith(("PIP_", "UV_", "SSL_"))},
    }
    shell([CLONE.replace("ADDRESS", shlex.quote(str(ROOT)))], folder, environment)
    shell(list(INSTALL), folder / "airlift", environment)
    here.mkdir()
    rows = [f"{kind} {number} things,{kind}" for number in range(60) for kind in ("few", "many")]
    (here / "my.csv").write_text("\n".join(["text,label", *rows, ""]))
    small_bert(here / "my-model")
    lines = [command for command, _ in code(README) if command not in SCRIPTS]
    assert lines[:3] == [CLONE, *INSTALL]
    names = [" ".join(line.split()[:2]) for line in lines[3:]]
    assert names.index("runner submit") < 6, "commands from one's own data into the queue"
    with running_site() as cluster, ssh_to(cluster.folder) as keys:
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
        hand = "\n".join(command for command, _ in code(ROOT / "docs/howto/by-hand.md"))
        for example, own in OF_THE_PAGE:
            hand = hand.replace(example, own)
        laptop, there = hand.split("sh bundle/")
        shell([ACTIVATE, *re.findall("^(?:stage|rsync) .*", laptop, re.MULTILINE)], here, variables)
        last = shell([f"ssh cluster {shlex.quote(f'set -e; sh bundle/{there}')}"], here, variables)
        (number,) = re.findall(r"submitted job (\d+)", last)
        assert cluster.wait_for_end(number)["JobState"] == "COMPLETED", last
    (pulled,) = (here / "output").iterdir()
    from transformers import AutoModelForSequenceClassification

    assert AutoModelForSequenceClassification.from_pretrained(pulled / "model").num_labels == 2
    assert (pulled / "metrics.jsonl").exists() and (pulled / "report.html").exists()
