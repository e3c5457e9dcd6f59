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


def test_no_reader_takes_a_version_or_a_digest_for_a_number() -> None:
    text = lock(package(version="1.10")).to_yaml().decode()
    assert "version: '1.10'" in text and f"sha256: '{DIGEST}'" in text
    entry = yaml.safe_load(text)["package"][0]
    assert (entry["version"], entry["hash"]["sha256"]) == ("1.10", DIGEST)
