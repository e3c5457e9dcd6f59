"""`stage init --profile`: the environment asset, and the environment.yml to start from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.environment.spec.profile import Profile, starter
from stage.lock.manifest import Manifest
from stage.lock.requests import EnvironmentRequest
from tests.support.staging import run_here

ROOT = Path(__file__).parents[4]
PROFILES = sorted((ROOT / "envs/profiles").glob("*.yml"))


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_it_can_be_locked_for_each_kind_of_node(profile: Path, tmp_path: Path) -> None:
    text = starter(Profile.load(profile))
    (tmp_path / "environment.yml").write_text(text)
    spec = EnvironmentSpec.load(tmp_path / "environment.yml")
    assert {dependency.name for dependency in spec.conda} == {"python", "pip"}
    indexes = re.findall(r"whl/(\w+)", text)
    cuda = Profile.load(profile).cuda
    assert indexes == (["cpu"] if cuda is None else ["cu118"] if cuda < "12" else [])


def test_init_writes_the_asset_and_keeps_an_environment_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    (tmp_path / "manifests").mkdir()
    options = ("rows.csv", "--profile", str(PROFILES[0]))
    said = run_here("init", *options, "-o", "manifests/a.yaml").output
    assert "manifests/environment.yml: written" in said
    request = Manifest.load(tmp_path / "manifests/a.yaml").requests["train-env"]
    assert isinstance(request, EnvironmentRequest) and request.environment == "environment.yml"
    assert (tmp_path / "manifests" / str(request.profile)).samefile(PROFILES[0])
    (tmp_path / "manifests/environment.yml").write_text("name: mine\n")
    assert "the one that is there" in run_here("init", *options, "-o", "manifests/b.yaml").output
    assert (tmp_path / "manifests/environment.yml").read_text() == "name: mine\n"
