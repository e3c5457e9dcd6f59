"""`--to`, where nothing may be fetched or sent: by a real sshd on a login node without Slurm."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from stage.staging.working_folder import alone_in
from tests.remedies.obeyed import in_it, obeys
from tests.runner.remote.conftest import Laptop

TO = ("--to", "far")


def slurm(programs: Path) -> list[Path]:
    """An sbatch that no test here reaches; and a queue that is empty."""
    for name in ("sbatch", "squeue"):
        (programs / name).write_text("#!/bin/sh\nexit 0\n")
        (programs / name).chmod(0o755)
    return [programs / "sbatch", programs / "squeue"]


def test_a_cluster_without_slurm_and_one_without_a_runner(laptop: Laptop, programs: Path) -> None:
    said = laptop.runner("submit", "runs/my.yaml", *TO, code=2)
    assert "sbatch was not found there" in said and "lock  " not in said
    made = slurm(programs)
    laptop.clusters("  setup: [cd /nowhere]\n")
    said = laptop.runner("submit", "runs/my.yaml", *TO, code=2)
    assert "has no environment asset" in said and "/nowhere" in said and "lock  " not in said
    assert not laptop.there.exists() and laptop.sshd.logins == 1
    for path in made:
        path.unlink()
    shown = laptop.runner("submit", "runs/my.yaml", *TO, "--dry-run")
    for line in ("lock         stage lock manifests/small.yaml", "stage fetch ", "stage push "):
        assert line in shown
    assert re.search(r"runner submit runs-\w+/my.yaml --bundle bundle", shown)
    assert "runs-DIGEST" not in shown and not laptop.there.exists()


@obeys("runner/remote/submit_to.py", "Give this one a folder of its own: {}")
@obeys(
    "runner/remote/submit_to.py",
    "Let it end, or: ssh {} scancel {}. For a run beside it, give this",
)
def test_a_bundle_of_another_name_there_is_left_alone(laptop: Laptop, programs: Path) -> None:
    made, lock = slurm(programs), laptop.there / "bundle/stage.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text('{\n "name": "other"\n}\n')
    said = laptop.runner("submit", "runs/my.yaml", *TO, code=2)
    assert "another bundle is there: other; manifests/small.yaml makes made" in said, said
    assert "lock  " not in said and f"ssh cluster rm -r {lock.parent}" in said
    file = laptop.folder / "runs/clusters.yaml"
    own = file.read_text().replace("far:", "far2:")
    own = re.sub("folder: .*", in_it(said, "(?<=`)folder: [^`]*"), own)
    file.write_text(file.read_text() + own)
    assert "another bundle" not in laptop.runner("submit", "runs/my.yaml", "--to", "far2", code=2)
    lock.write_text('{\n "name": "made"\n}\n')  # with other data
    said = laptop.runner("submit", "runs/my.yaml", *TO, "--dry-run")
    assert re.search(r"to send: at most \d+ kB; ", said), said
    script = laptop.there / "output/my/submit.sbatch"
    script.parent.mkdir(parents=True)
    script.write_text("runner train runs-0/my.yaml\n")
    made[1].write_text(f"#!/bin/sh\necho 'job=24|PENDING|{script}'\n")
    said = laptop.runner("submit", "runs/my.yaml", *TO, code=2)
    assert "jobs that wait or run read it: 24" in said and "let them end" in said, said
    made[1].write_text("#!/bin/sh\nexit 1\n")
    said = laptop.runner("submit", "runs/my.yaml", *TO, code=5)
    assert "squeue does not answer there" in said and "no second job is made" in said, said
    made[1].write_text(f"#!/bin/sh\necho 'job=24|PENDING|{script}'\n")
    shutil.copy(laptop.folder / "manifests/small.lock", lock)
    said = laptop.runner("submit", "runs/my.yaml", *TO, code=2)
    assert "job 24 (pending) writes output/my there. It was submitted with another text" in said
    beside = in_it(said, "--set name=NAME").replace("NAME", "b").split()
    said = laptop.runner("submit", "runs/my.yaml", *TO, *beside, code=2)
    assert "job 24" not in said and "has no environment asset" in said  # it goes on
    for path in made:
        path.unlink()


@obeys("runner/inputs/staged.py", "Give it a folder of its own. The same command with: --bundle {}")
def test_a_bundle_of_another_manifest_here_is_left_alone(laptop: Laptop) -> None:
    other = laptop.folder / "manifests/other.yaml"
    other.write_text(
        (other.with_name("small.yaml")).read_text().replace("name: made", "name: other")
    )
    words = ("submit", "runs/my.yaml", *TO, "--manifest", "manifests/other.yaml")
    said = laptop.runner(*words, code=2)
    assert "another bundle is here: made; manifests/other.yaml makes other" in said, said
    said = laptop.runner(*words, *in_it(said, "--bundle .*").split(), code=2)
    assert "sbatch was not found there" in said


def test_an_interrupted_fetch_goes_on_and_one_at_work_is_said(
    laptop: Laptop, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    words = ("submit", "runs/my.yaml", "--to", f"{tmp_path}/disk/")
    shown = laptop.runner(*words, "--dry-run")
    assert re.findall("^(.*?) .*# done$", shown, re.MULTILINE) == ["lock", "fetch"]
    (laptop.folder / "bundle/tagmanifest-sha256.txt").unlink()
    with alone_in(laptop.folder / "bundle"):
        said = laptop.runner(*words, code=5)
    assert re.findall("^(.*?) .*# done$", said, re.MULTILINE) == ["lock"]
    assert "another `stage fetch` or `stage apply` is running in this folder" in said, said
    in_it(said, "After that, run the same command again")


def test_after_a_step_that_is_not_done_none_is(laptop: Laptop) -> None:
    manifest = laptop.folder / "manifests/small.yaml"
    text = manifest.read_text()
    less = text.replace("  bert: {model: acme/bert}\n", "")  # would be sent all the same
    for changed in (f"{text}  more: {{model: acme/more}}\n", less):
        manifest.write_text(changed)
        shown = laptop.runner("submit", "runs/my.yaml", *TO, "--dry-run")
        assert "# done" not in shown and "to send" not in shown, shown


def test_what_does_not_go_with_to_is_refused_with_what_does(laptop: Laptop) -> None:
    script = laptop.folder / "runs/train.py"
    script.write_text("import torch\n\nmodel: int\n")
    use = "not a run file.\n  -> A run file starts it: `command: python runs/train.py`."
    for words, said in (
        (("submit", "runs/train.py", *TO), use),
        (("pull", "runs/train.py", *TO), use),
        (("submit", "runs/my.yaml", *TO, "--output", "x"), "set name=NAME"),
        (("submit", "runs/my.yaml", "--bundle", "bundle", "--logout"), "go with --to"),
        (("exec", *TO, "--bundle", "bundle", "--", "python", "x.py"), "srun runner exec"),
        (("submit", "runs/my.yaml", "--to", "fat"), "far"),
        (("status", "--to", f"{laptop.folder}/"), "a folder on this machine has no queue to ask"),
        (("pull", "..", *TO), "..: no run file, and no name of a run"),
        (("status", *TO), "nothing was submitted there yet"),
        (("logs", "runs/my.yaml", *TO), "nothing was submitted there yet"),
    ):
        assert said in laptop.runner(*words, code=2), words


@obeys("runner/remote/submit_to.py", "Let the manifest bring one")
def test_setup_of_a_run_file_that_replaces_the_clusters_is_said(
    laptop: Laptop, programs: Path, tmp_path: Path
) -> None:
    made = slurm(programs)
    (tmp_path / "runner").write_text("#!/bin/sh\necho runner, version 0.1.0\n")
    (tmp_path / "runner").chmod(0o755)
    laptop.clusters(f"  setup: ['PATH={tmp_path}:$PATH']\n")
    words = ("submit", "runs/my.yaml", *TO, "--set")
    said = laptop.runner(*words, "slurm.setup=['export A=1']", code=2)
    assert "`slurm.setup`, which replace `setup:` of clusters.yaml" in said
    said = laptop.runner(*words, in_it(said, "slurm.setup: .*").replace(": ", "=", 1), code=2)
    assert "airlift 0.1.0 runs there" in said, said
    for path in made:
        path.unlink()
