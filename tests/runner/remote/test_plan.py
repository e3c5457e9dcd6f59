"""What `--to` makes of a run file, a manifest and clusters.yaml, before anything is asked."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.from_stage import UsageError, __version__
from runner.inputs.staged import Here
from runner.remote import submit_to
from runner.remote.road import Road
from runner.remote.there import There
from tests.remedies.obeyed import in_it, obeys
from tests.runner.remote.conftest import RUN

PROFILE = 'format: 1\nplatform: linux-64\nglibc: "2.28"\n'
ENVIRONMENT = "  env: {environment: environment.yml, profile: profile.yml}\n"
MANIFEST = "format: 1\nname: small\nassets:\n  bert: {model: acme/bert}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("runs", "manifests"):
        (tmp_path / name).mkdir()
    (tmp_path / "runs/my.yaml").write_text(RUN)
    (tmp_path / "manifests/small.yaml").write_text(MANIFEST)
    return tmp_path


def road(folder: Path, cluster: str = "", **more: object) -> Road:
    text = f"far:\n  host: login\n  folder: work\n{cluster}"
    (folder / "runs/clusters.yaml").write_text(text)
    return Road.of(folder / "runs/my.yaml", "far", folder / "bundle", **more)  # type: ignore[arg-type]


def test_the_clusters_values_are_defaults_that_the_run_file_wins_over(folder: Path) -> None:
    cluster = "  partition: gpu\n  account: abc\n  time: 01:00:00\n  modules: [cuda]\n"
    found = road(folder, cluster).options
    assert found[1::2] == [
        'slurm.partition="gpu"',
        'slurm.options.account="abc"',
        'slurm.time="01:00:00"',
        'slurm.modules=["cuda"]',
    ]
    run = folder / "runs/my.yaml"
    run.write_text(f"{RUN}slurm: {{partition: long, modules: [], options: {{account: me}}}}\n")
    changed = road(folder, cluster, overrides=["slurm.time='2'"])
    assert changed.options[1::2] == ["slurm.time='2'"]
    plan = changed.plan("0" * 64)  # of `go.sh`: the shell of each step there, and the job's
    assert (plan["SETUP"], plan["PARTITION"], plan["ACCOUNT"], plan["TIME"]) == (
        "", "long", "me", "2",
    )  # fmt: skip


def test_options_of_a_cluster_are_for_every_job_there(folder: Path) -> None:
    cluster = "  options: {qos: long, constraint: 'a800&ib', exclusive: true, mem: 64G}\n"
    run = folder / "runs/my.yaml"
    run.write_text(f"{RUN}slurm: {{gpus_per_node: 4, options: {{qos: mine, nice: 5}}}}\n")
    found = road(folder, cluster)
    assert found.options[1::2] == [
        'slurm.options.constraint="a800&ib"',
        "slurm.options.exclusive=true",
        'slurm.options.mem="64G"',
    ]
    plan = found.plan("0" * 64)
    assert shlex.split(plan["SBATCH"]) == [
        "--qos=mine", "--constraint=a800&ib", "--exclusive", "--mem=64G",
    ]  # fmt: skip
    assert plan["GPUS"] == "gpu:4"


def test_the_plan_is_read_by_a_shell_as_it_was_meant(folder: Path) -> None:
    found = road(folder, "  setup: ['. ~/x y', 'export A=\"1 2\"']\n", axes=["seed=1,2"])
    plan = found.plan("0" * 64)
    setup = r"""'slurm.setup=[". ~/x y", "export A=\"1 2\""]'"""
    assert shlex.split(plan["OPTIONS"]) == found.options
    assert plan == {
        **dict.fromkeys(("ACCOUNT", "ENVIRONMENT", "ENV_DIGEST", "PARTITION", "TIME"), ""),
        "AIRLIFT": __version__,
        "BUNDLE_ID": "0" * 64,
        "INPUTS": f"{hashlib.sha256(RUN.encode()).hexdigest()}  my.yaml",
        "OPTIONS": f"--set {setup}",
        "OUTPUT": "output/my",
        "RUN": "my.yaml",
        "RUNS": plan["RUNS"],
        "SETUP": '. ~/x y\nexport A="1 2"',
        "SUBMIT": "--array seed=1,2",
        "VERIFY": "login",
        "CODE": "",
        "GPUS": "",
        "SBATCH": "",
    }
    assert found.named == str(folder / "runs/my.yaml")
    assert road(folder, overrides=["name=b"], axes=["seed=1,2"]).named == "b"
    there = f"runs-DIGEST/my.yaml --bundle bundle --set {setup}"
    assert found.commands() == {
        "lock": f"stage lock {folder}/manifests/small.yaml",
        "fetch": f"stage fetch {folder}/manifests/small.yaml -o {folder}/bundle",
        "push": f"stage push {folder}/bundle login:work/bundle",
        "verify": "python3 -I bundle/stage-verify.py bundle",
        "environment": ". ~/x y ...",
        "check": f"runner check {there}",
        "submit": f"runner submit {there} --array seed=1,2",
    }


@obeys("runner/inputs/staged.py", "Write the cluster's profile into the manifest: profile: {}")
def test_an_environment_for_other_nodes_is_refused_with_both_lines(folder: Path) -> None:
    (folder / "manifests/small.yaml").write_text(MANIFEST + ENVIRONMENT)
    (folder / "manifests/profile.yml").write_text(PROFILE)
    (folder / "runs/node.yml").write_text(PROFILE.replace("2.28", "2.17"))
    with pytest.raises(UsageError) as error:
        road(folder, "  profile: node.yml\n")
    assert "small.yaml:5: profile: profile.yml" in error.value.message
    assert "clusters.yaml:4: profile: " in error.value.message
    line = in_it(error.value.remedy, r"profile: \S+")
    assert line == "profile: ../runs/node.yml"
    manifest = MANIFEST + ENVIRONMENT.replace("profile: profile.yml", line)
    (folder / "manifests/small.yaml").write_text(manifest)
    assert road(folder, "  profile: node.yml\n").plan("0" * 64)["ENVIRONMENT"] == "env"


@obeys("runner/remote/road.py", "Move it beside the run file: engine: {config: {}}")
def test_the_ds_config_travels_if_it_is_beside_the_run_file(folder: Path) -> None:
    run = folder / "runs/my.yaml"
    (folder / "runs/ds.json").write_text("{}")
    (folder / "ds.json").write_text("{}")
    run.write_text(RUN + "engine: {config: ds.json}\n")
    assert [*road(folder).files] == ["my.yaml", "ds.json"]
    run.write_text(RUN + "engine: {config: ../ds.json}\n")
    with pytest.raises(UsageError, match=r"my\.yaml:\d+: engine\.config") as error:
        road(folder)
    assert "engine: {config: ds.json}" in error.value.remedy


@pytest.mark.parametrize(
    ("manifest", "said"),
    [("", "it names no manifest"), ("manifest: ../none.yaml\n", "none.yaml: no such file")],
)
def test_a_run_without_its_manifest_is_refused(folder: Path, manifest: str, said: str) -> None:
    text = RUN.replace("manifest: ../manifests/small.yaml\n", manifest)
    (folder / "runs/my.yaml").write_text(text)
    with pytest.raises(UsageError, match=said):
        road(folder)


def test_what_makes_another_job_has_another_folder(folder: Path) -> None:
    plan = road(folder).plan("0" * 64)
    others = [road(folder, overrides=["seed=2"]), road(folder, axes=["seed=1,2"])]
    (folder / "runs/my.yaml").write_text(RUN.replace("steps: 4", "steps: 777"))
    found = [plan, *(other.plan("0" * 64) for other in (*others, road(folder)))]
    found.append(road(folder).plan("1" * 64))
    assert len({plan["RUNS"] for plan in found}) == len(found)
    moved = replace(road(folder).cluster, verify="job")
    assert replace(road(folder), cluster=moved).plan("1" * 64)["RUNS"] == found[-1]["RUNS"]


SENT = {"lock", "fetch", "push", "environment"}


@pytest.mark.parametrize(
    ("change", "done"),
    [
        ({}, SENT | {"check", "submit"}),
        ({"made": ""}, SENT),
        ({"intact": ""}, SENT),
        ({"jobs": ((17, "PENDING", "/far/output/other/submit.sbatch"),)}, SENT),
        ({"airlift": "", "made": ""}, SENT - {"environment"}),
        ({"bundle_id": "1" * 64}, {"lock", "fetch"}),
    ],
)
def test_a_step_is_done_where_bundle_plan_and_job_are_those_of_this_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], done: set[str]
) -> None:
    monkeypatch.setattr(Here, "id", "0" * 64)
    monkeypatch.setattr(Here, "is_locked", True)
    found = road(folder)
    there = There(
        ((17, "PENDING", "/far/output/my/submit.sbatch"),), "/far", "0" * 64,
        made="yes", intact="yes", airlift="0.2.0",
    )  # fmt: skip
    assert submit_to.steps_done(found, replace(there, **change)) == done


def test_first_weights_that_another_run_exported_are_looked_for_there(folder: Path) -> None:
    run = folder / "runs/my.yaml"
    run.write_text(RUN.replace("init: scratch", "init: ../output/first/model"))
    assert "../output/first/model" in road(folder).files["my.yaml"]


def test_what_the_road_writes_into_a_project_is_no_part_of_it(folder: Path) -> None:
    """Else the second submit would be that of another project, and be refused."""
    run = folder / "runs/my.yaml"
    run.write_text(
        "format: 1\nmanifest: ../manifests/small.yaml\ncode: ..\ncommand: python train.py\n"
    )
    (folder / "train.py").write_text("print(1)\n")
    (folder / "manifests/small.yaml").write_text(MANIFEST + ENVIRONMENT)
    for name, text in (("profile.yml", PROFILE), ("environment.yml", "dependencies: [python]\n")):
        (folder / "manifests" / name).write_text(text)
    first = road(folder, "  profile: ../manifests/profile.yml\n")
    assert first.code is not None
    names = {"train.py", "runs/my.yaml", "manifests/small.yaml", "manifests/environment.yml"}
    assert first.code.project.files.keys() == names
    for name in ("small.lock", "conda-lock.yml", "profile.yml"):
        with (folder / "manifests" / name).open("a") as file:
            file.write("# written by the road\n")
    for name in ("bundle/data", "output/my"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").touch()
    with (folder / "runs/clusters.yaml").open("a") as file:
        file.write("# more\n")
    again = road(folder, "  profile: ../manifests/profile.yml\n")
    assert again.code is not None and again.code.digest == first.code.digest
