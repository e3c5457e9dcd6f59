"""The bill of materials: valid CycloneDX, the same text from the same lock."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stage.bundle.bundle import Bundle
from stage.cli import main
from stage.lock.bom import bom_text
from stage.lock.model import Lockfile
from tests.stage.bundles import make_bundle
from tests.stage.locks import canonical, every_kind, fetched_and_made
from tests.support.environment.laptop import EnvironmentLaptop


@pytest.fixture(scope="module")
def validator() -> Any:
    # Its grammars take seconds to make: not in each worker of a test run.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6)


@pytest.mark.parametrize("lock", [every_kind(), fetched_and_made()])
def test_every_lock_has_a_valid_bill(lock: Lockfile, validator: Any) -> None:
    text = bom_text(lock)
    assert validator.validate_str(text) is None
    assert text == bom_text(canonical(lock))


def test_show_prints_it_and_nothing_else(tmp_path: Path, validator: Any) -> None:
    bundle = make_bundle(tmp_path / "bundle", big=False)
    done = CliRunner().invoke(main, ["show", str(bundle.root), "--sbom"])
    assert done.exit_code == 0 and done.output == bom_text(bundle.lock) + "\n"
    assert validator.validate_str(done.output) is None
    both = CliRunner().invoke(main, ["show", str(bundle.root), "--sbom", "--json"])
    assert both.exit_code == 2 and "--sbom is a document of its own" in both.output


def test_the_bill_lists_the_packages_of_an_environment_by_what_was_published(
    environment_laptop: EnvironmentLaptop, validator: Any
) -> None:
    text = bom_text(Bundle.open(environment_laptop.bundle).lock)
    assert validator.validate_str(text) is None
    (environment,) = json.loads(text)["components"]
    packages = {c["name"]: c for c in environment["components"]}
    greeter = packages["greeter"]["purl"]
    assert (
        greeter
        == "pkg:conda/greeter@1.1?build=pyh0000000_0&channel=conda-channel&subdir=noarch&type=conda"
    )
    assert (
        packages["click"]["purl"].startswith("pkg:pypi/click@")
        and packages["click"]["type"] == "library"
    )
    sdist = environment_laptop.channel.parent / "made-1.0.tar.gz"
    assert packages["made"]["hashes"] == [
        {"alg": "SHA-256", "content": sha256(sdist.read_bytes()).hexdigest()}
    ]
    assert "pedigree" not in environment
    locked = json.loads((environment_laptop.bundle / "stage.lock").read_text())["assets"][
        "small-env"
    ]["environment"]
    assert sorted(packages) == sorted(package["name"] for package in locked["packages"])
