"""The bill of materials: valid CycloneDX, the same text from the same lock."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from stage.bundle.bundle import Bundle
from stage.cli import main
from stage.installation import install_command
from stage.lock.bom import bom_text
from stage.lock.model import Ingredient, LockedAsset, LockedFile, Source
from stage.lock.write import Lockfile
from tests.stage.bundles import make_bundle
from tests.stage.locks import COMMIT, canonical, every_kind, fetched_and_made, locks
from tests.support.environment.laptop import EnvironmentLaptop
from tests.support.staging import Laptop


@pytest.fixture(scope="module")
def validator() -> Any:
    # Its grammars take seconds to make: not in each worker of a test run.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6)


@settings(max_examples=20)
@given(lock=locks())
def test_every_lock_has_a_valid_bill(lock: Lockfile, validator: Any) -> None:
    text = bom_text(lock)
    assert validator.validate_str(text) is None
    assert text == bom_text(canonical(lock))


def test_the_bill_names_licence_commit_and_weights_and_nothing_volatile() -> None:
    bill = json.loads(bom_text(every_kind()))
    model = next(c for c in bill["components"] if c["name"] == "bert")
    assert model["type"] == "machine-learning-model"
    assert model["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert model["purl"].startswith("pkg:huggingface/acme/bert-large@")
    assert [c["name"] for c in model["components"]] == ["data/models/bert/model.safetensors"]
    assert bill["metadata"]["component"]["version"] == every_kind().id
    assert "serialNumber" not in bill and "timestamp" not in bill["metadata"]


def test_the_bill_names_what_a_thing_was_made_from(validator: Any) -> None:
    """An archive or a pickle is not in the bundle; an auditor finds it in the bill."""
    archive = Ingredient("https://example.org/c.tar.gz", 3, "ab" * 32)
    images = tuple(Ingredient(f"images/{number}.png", 1, "cd" * 32) for number in range(101))
    source, files = (
        Source("url", archive.origin),
        (LockedFile("data/files/c/x", 1, "ef" * 32, None, "x", "unpack"),),
    )
    one = LockedAsset(
        "c",
        "files",
        {"url": archive.origin},
        source,
        files,
        made_from=(archive,),
        licence="mit, gpl-3.0",
    )
    many = replace(one, name="d", made_from=images)
    text = bom_text(Lockfile("made", {"c": one, "d": many}))
    assert validator.validate_str(text) is None
    first, second = json.loads(text)["components"]
    (ancestor,) = first["pedigree"]["ancestors"]
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert ancestor["externalReferences"] == [{"type": "distribution", "url": archive.origin}]
    assert [entry["license"] for entry in first["licenses"]] == [{"id": "GPL-3.0"}, {"id": "MIT"}]
    assert "pedigree" not in second
    assert {"name": "airlift:made-from", "value": "101 files, 101 bytes"} in second["properties"]


def test_the_bill_names_the_base_and_whose_code_runs() -> None:
    components = json.loads(bom_text(fetched_and_made()))["components"]
    facts = {c["name"]: {p["name"]: p["value"] for p in c["properties"]} for c in components}
    assert facts["lora"]["airlift:base"] == "acme/base"
    assert (
        facts["lora"]["airlift:code"] == f"acme/code@{COMMIT}"
        and "airlift:code" not in facts["base"]
    )


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


def without_cyclonedx(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_show_prints_it_and_nothing_else(
    tmp_path: Path, validator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle(tmp_path / "bundle", big=False)
    done = CliRunner().invoke(main, ["show", str(bundle.root), "--sbom"])
    assert done.exit_code == 0 and done.output == bom_text(bundle.lock) + "\n"
    assert validator.validate_str(done.output) is None
    both = CliRunner().invoke(main, ["show", str(bundle.root), "--sbom", "--json"])
    assert both.exit_code == 2 and "--sbom is a document of its own" in both.output
    monkeypatch.setattr(metadata, "version", without_cyclonedx)
    done = CliRunner().invoke(main, ["show", str(bundle.root), "--sbom"])
    assert done.exit_code == 2 and "cyclonedx-python-lib" in done.output
    assert install_command("sbom") in done.output


INCLUDE = """\
format: 1
name: tiny
assets:
  tiny-bert:
    model: acme/licensed
    include: ["config.json"]
{more}
"""
FILES = {
    "README.md": b"---\nlicense: llama3.1\n---\n# A model\n",
    "LICENSE.txt": b"terms",
    "USE_POLICY.md": b"policy",
    "config.json": b"{}",
    "README.py": b"print()",
    "docs/LICENSE": b"of the docs",
}


def test_card_and_licence_travel_with_include_patterns(laptop: Laptop) -> None:
    laptop.hub.commit("models", "acme/licensed", FILES)
    laptop.write(INCLUDE.format(more='    exclude: ["USE_*"]'))
    laptop.fetched()
    names = {path.name for path in (laptop.bundle / "data/models/tiny-bert").iterdir()}
    assert names == {"README.md", "LICENSE.txt", "config.json"}
    bill = json.loads(laptop.stage("show", "bundle", "--sbom").stdout)
    assert bill["components"][0]["licenses"] == [{"license": {"name": "llama3.1"}}]
    assert "licence  llama3.1" in laptop.stage("show", "bundle").stdout
