"""The README: short, and the same in Chinese and Russian; its steps by hand, walked."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.servers.hubs import TestHub

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BY_HAND = ROOT / "docs/howto/by-hand.md"
TRANSLATIONS = [ROOT / "docs" / f"README.{name}.md" for name in ("zh-CN", "ru")]
PAGES = [README, *TRANSLATIONS]

RUNS = "runs/bert-large-deepspeed.yaml --bundle bundle"
LAPTOP = (
    "stage fetch manifests/bert-large-wikitext2.yaml -o bundle --dry-run",
    "stage fetch manifests/bert-large-wikitext2.yaml -o bundle",
)
CLUSTER = ("stage verify bundle", f"runner check {RUNS}")
CLUSTER_TEST = "tests/test_readme_on_slurm.py"
ELSEWHERE = {
    # A command of the README, or by hand -> the test that runs it, or the script that is run.
    # CLUSTER_TEST runs all lines of the README but the two scripts, as they stand there.
    "git clone ADDRESS airlift && cd airlift": CLUSTER_TEST,
    "scripts/demo": "tests/test_demo.py",
    "scripts/test": ".ci/run",
    "python3 -m venv ~/airlift-venv && . ~/airlift-venv/bin/activate": CLUSTER_TEST,
    "pip install '.[laptop]'": CLUSTER_TEST,
    "stage env probe --to me@cluster:/scratch/me/work": CLUSTER_TEST,
    "stage init my.csv my-model/ --profile envs/profiles/cluster.yml -o manifests/my.yaml": (
        CLUSTER_TEST
    ),
    "stage fetch manifests/my.yaml -o bundle": CLUSTER_TEST,
    "runner init text-classification --bundle bundle -o runs/my.yaml": CLUSTER_TEST,
    "runner submit runs/my.yaml --to cluster": CLUSTER_TEST,
    "runner status --to cluster": CLUSTER_TEST,
    "runner logs runs/my.yaml --to cluster -f": CLUSTER_TEST,
    "runner pull runs/my.yaml --to cluster": CLUSTER_TEST,
    "train-env:": "tests/stage/environment/test_environment_fetch.py",
    "environment: ../envs/bert-large.yml": "tests/stage/environment/solve/test_examples.py",
    "profile: ../envs/profiles/v100.yml": "tests/stage/environment/solve/test_examples.py",
    "stage push bundle me@cluster:bundle": "tests/stage/carry/test_push.py",
    "rsync -a runs me@cluster:": "tests/stage/carry/test_push.py",
    "sh bundle/data/envs/train-env/bootstrap.sh ~/envs/train": CLUSTER_TEST,
    ". ~/envs/train/activate": "tests/stage/environment/test_environment_fetch.py",
    f"runner rehearse {RUNS}": "tests/runner/rehearse",
    f"runner submit {RUNS}": "tests/site/test_submit_to_slurm.py",
}


def code(page: Path) -> list[tuple[str, str]]:
    """(command, comment) of each line of the page's code blocks."""
    lines = re.findall(r"^    (\S.*|  \S.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    parts = [line.strip().partition("  #") for line in lines]
    return [(command.strip(), comment.strip()) for command, _, comment in parts]


def headings(page: Path) -> list[int]:
    """The level of each heading."""
    return [len(m) for m in re.findall(r"^(#+) ", page.read_text(encoding="utf-8"), re.MULTILINE)]


def links(page: Path) -> list[str]:
    """Where the links and pictures of the page lead, from the root of the checkout."""
    found = []
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        place = link if "://" in link else os.path.relpath(page.parent / link, ROOT)
        found.append(place)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    found = links(page)
    assert len(found) > 15
    assert [link for link in found if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_a_translation_is_the_whole_readme(page: Path) -> None:
    assert headings(page) == headings(README)
    assert [command for command, _ in code(page)] == [command for command, _ in code(README)]
    assert links(page)[2:] == links(README)[2:]  # the first two are the other languages
    spans = re.compile(r"`([^`]+)`")
    theirs, ours = (spans.findall(p.read_text(encoding="utf-8")) for p in (page, README))
    assert sorted(theirs) == sorted(ours)
    rows = re.compile(r"^\|", re.MULTILINE)
    theirs, ours = (rows.findall(p.read_text(encoding="utf-8")) for p in (page, README))
    assert len(theirs) == len(ours)


def test_every_command_of_the_readme_is_run_here_or_elsewhere() -> None:
    commands = [command for page in (README, BY_HAND) for command, _ in code(page)]
    assert [c for c in commands if c not in (*LAPTOP, *CLUSTER, *ELSEWHERE)] == []
    assert [c for c in (*LAPTOP, *CLUSTER, *ELSEWHERE) if c not in commands] == []
    assert [test for test in ELSEWHERE.values() if not (ROOT / test).exists()] == []


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A stranger's folder: the files of the checkout, and a Hub with the README's repositories."""
    folder = tmp_path_factory.mktemp("stranger")
    for name in ("manifests", "runs", "envs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.lock"))
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        model = small_bert(tmp_path_factory.mktemp("model"))
        hub.commit("models", "google-bert/bert-large-uncased", model)
        hub.commit("datasets", "Salesforce/wikitext", wikitext())
        kept = {name: os.environ[name] for name in ("PATH", "XDG_STATE_HOME", "AIRLIFT_STORE")}
        home = {"HOME": str(folder), "HF_HOME": str(folder / "hf")}
        yield folder, {**kept, **home, "HF_ENDPOINT": hub.endpoint}


def small_bert(folder: Path) -> dict[str, bytes]:
    """A model repository with the files of BERT-large, and few weights."""
    from transformers import BertConfig, BertForMaskedLM

    from tests.support.training.models import tiny_tokenizer

    names = ("pad", "unk", "cls", "sep", "mask")
    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    tokenizer = tiny_tokenizer(special, 1024, wordpiece=True)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=64, **size)
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def wikitext() -> dict[str, bytes]:
    """A dataset repository with the layout of Salesforce/wikitext."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from scripts.lib.demo.repositories import paragraphs

    config = "wikitext-2-raw-v1"
    splits = ("test", "train", "validation")
    card = "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in splits)
    head = f"---\nlicense: cc-by-sa-3.0\nconfigs:\n- config_name: {config}\n  data_files:\n"
    files = {"README.md": f"{head}{card}---\n".encode()}
    for split in splits:
        sink = io.BytesIO()
        texts = [text for _, text in paragraphs()["train"]]
        pq.write_table(pa.table({"text": texts}), sink)
        files[f"{config}/{split}-00000-of-00001.parquet"] = sink.getvalue()
    return files


def test_the_road_by_hand_works_line_by_line(stranger: tuple[Path, dict[str, str]]) -> None:
    laptop, environment = stranger
    cluster = laptop / "cluster"
    cluster.mkdir()
    commands = [command for command, _ in code(BY_HAND)]
    for line in [command for command in commands if command in (*LAPTOP, *CLUSTER)]:
        if line == CLUSTER[0]:
            for name in ("bundle", "runs"):
                shutil.move(laptop / name, cluster / name)
        name, *words = line.split()
        done = subprocess.run(
            [sys.executable, "-m", name, *words],
            cwd=laptop if line in LAPTOP else cluster,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert (laptop / "bundle").exists() == (line == LAPTOP[1])
