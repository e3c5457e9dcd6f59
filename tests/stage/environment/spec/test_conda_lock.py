"""`conda-lock.yml`, written and read: the same bytes, and no package without a digest."""

from __future__ import annotations

import string
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stage.environment.spec.conda_lock import EnvironmentLock, Package
from stage.errors import PolicyError, UsageError

DIGEST = "0e" + "1" * 62  # a number to YAML 1.2, text to us


def package(name: str = "a", manager: str = "conda", **more: object) -> Package:
    version = more.get("version", "1.10")
    file = f"{name}-{version}-0.conda" if manager == "conda" else f"{name}-{version}.tar.gz"
    fields = {"version": version, "platform": "linux-64",
              "url": f"https://h.example/noarch/{quote(str(file))}",
              "sha256": DIGEST, "md5": "1e" + "1" * 30,
              "dependencies": {"python": ">=3.9"}}  # fmt: skip
    return Package(name=name, manager=manager, **{**fields, **more})  # type: ignore[arg-type]


def lock(*packages: Package) -> EnvironmentLock:
    """A lock of these and a Python."""
    return EnvironmentLock(
        platform="linux-64", content_hash="0" * 64, channels=("conda-forge",),
        sources=("environment.yml",),
        packages=(*packages, package("python")),
    )  # fmt: skip


def load(folder: Path, text: bytes | str) -> EnvironmentLock:
    path = folder / "conda-lock.yml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return EnvironmentLock.load(path)


texts = st.text(string.ascii_letters + string.digits + "._+-!=<>*~ 'é:#", min_size=1).filter(
    lambda t: t.strip() == t
)
packages = st.builds(
    package,
    name=st.text(string.ascii_lowercase, min_size=1).filter(lambda name: name != "python"),
    version=st.text(string.ascii_letters + string.digits + "._+!", min_size=1),
    sha256=st.text("0123456789e", min_size=64, max_size=64),
    md5=st.none() | st.text("0123456789e", min_size=32, max_size=32),
    dependencies=st.dictionaries(texts, texts | st.just(""), max_size=3),
)


@given(st.lists(packages, min_size=1, max_size=4, unique_by=lambda p: p.name))
def test_whatever_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, found: list[Package]
) -> None:
    written = lock(*found)
    again = load(tmp_path_factory.getbasetemp(), written.to_yaml())
    assert again.of("conda") == lock(*found).of("conda")
    assert again.to_yaml() == written.to_yaml()


def test_the_order_of_packages_does_not_matter() -> None:
    first, second = package("a"), package("b", "pip", dependencies={})
    assert lock(first, second).to_yaml() == lock(second, first).to_yaml()


def test_no_reader_takes_a_version_or_a_digest_for_a_number() -> None:
    text = lock(package(version="1.10")).to_yaml().decode()
    assert "version: '1.10'" in text and f"sha256: '{DIGEST}'" in text
    entry = yaml.safe_load(text)["package"][0]
    assert (entry["version"], entry["hash"]["sha256"]) == ("1.10", DIGEST)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("version: 1\n", "version: 2\n"),
            "schema version 2; this version of airlift reads version 1",
        ),
        ((f"sha256: '{DIGEST}'", "sha256: null"), "`a`: `package[0]` has no sha256"),
        ((f"    sha256: '{DIGEST}'\n", ""), "`a`: `package[0]` has no sha256"),
        (
            ("  platforms:\n  - linux-64\n", "  platforms:\n  - linux-64\n  - osx-64\n"),
            "locked for `linux-64`, `osx-64`: which of",
        ),
        (("manager: conda", "manager: npm"), "manager` should be one of conda, pip, found 'npm'"),
        (("https://h.example/noarch/a-1.10-0.conda", "nothing"), "is no https, http, file address"),
        (("noarch/a-1.10-0.conda", "noarch/"), "names no file"),
        (("package:", "packages:"), "lists no packages"),
        (("version: 1\n", "version: [\n"), "it is not YAML"),
    ],
)
def test_a_lock_that_cannot_be_used_says_why(
    tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    text = lock(package()).to_yaml().decode()
    assert change[0] in text
    with pytest.raises((UsageError, PolicyError)) as refused:
        load(tmp_path, text.replace(*change, 1))
    assert words in str(refused.value) and "stage env lock" in refused.value.remedy


def test_one_package_in_two_categories_is_one_package(tmp_path: Path) -> None:
    """conda-lock writes an entry for each category."""
    document = yaml.safe_load(lock(package()).to_yaml())
    document["package"].append({**document["package"][0], "category": "dev", "optional": True})
    assert len(load(tmp_path, yaml.safe_dump(document)).packages) == 2
