"""conda-lock.yml is not trusted: a file is the package that its name says, or it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stage.environment.spec.conda_lock import EnvironmentLock, made_by_stage
from stage.errors import PolicyError, StageError, UsageError
from stage.paths import problem_with_path

SHA = "0123456789abcdef" * 4
FORGE = "https://conda.anaconda.org/conda-forge"
PYTHON: dict[str, Any] = {
    "name": "python",
    "version": "3.10.13",
    "manager": "conda",
    "platform": "linux-64",
    "url": f"{FORGE}/linux-64/python-3.10.13-hd12c33a_1.conda",
    "hash": {"md5": "0" * 32, "sha256": SHA},
}


def conda(url: str, **fields: Any) -> dict[str, Any]:
    """An entry whose name and version are those of its file."""
    name, version, _ = url.rsplit("/", 1)[1].rsplit("-", 2)
    return {**PYTHON, "name": name, "version": version.replace("%21", "!"), "url": url, **fields}


def pip(url: str, name: str, version: str, **fields: Any) -> dict[str, Any]:
    return {**PYTHON, "manager": "pip", "name": name, "version": version, "url": url, **fields}


def lock(*entries: Any, version: Any = 1) -> bytes:
    return yaml.safe_dump(
        {"version": version, "metadata": {}, "package": [PYTHON, *entries]}
    ).encode()


def files(*entries: Any) -> list[str]:
    found = EnvironmentLock.parse(lock(*entries), "conda-lock.yml")
    return [package.file_name for package in found.packages]


def refusal(kind: type[StageError], data: bytes, platform: str | None = None) -> str:
    with pytest.raises(kind) as refused:
        EnvironmentLock.parse(data, "conda-lock.yml", platform)
    assert refused.value.message.startswith("conda-lock.yml: ")
    assert refused.value.remedy
    return refused.value.message


def test_epochs_and_local_versions_lose_their_quotes() -> None:
    assert files(
        conda(f"{FORGE}/linux-64/x264-1%21164.3095-h166bdaf_2.tar.bz2"),
        conda(f"{FORGE}/noarch/tzdata-2024a-h0c530f3_0.conda"),
        pip("https://files.example/ab/click-8.1.7-py3-none-any.whl#sha256=00", "click", "8.1.7"),
        pip(
            "https://dl.example/cu126/torch-2.8.0%2Bcu126-cp310-cp310-linux_x86_64.whl",
            "torch",
            "2.8.0+cu126",
        ),
    )[1:] == [
        "x264-1!164.3095-h166bdaf_2.tar.bz2",
        "tzdata-2024a-h0c530f3_0.conda",
        "click-8.1.7-py3-none-any.whl",
        "torch-2.8.0+cu126-cp310-cp310-linux_x86_64.whl",
    ]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({**PYTHON, "name": "zlib"}, "which is another package"),
        ({**PYTHON, "name": "zlib", "version": None}, "`zlib`: `package[1].version` is missing"),
        ({**PYTHON, "name": "zlib", "hash": {"sha256": "abc"}}, "64 lowercase hex digits"),
        ({**PYTHON, "name": "zlib", "hash": {"sha256": 7}}, "64 lowercase hex digits"),
        (
            pip("https://x.example/a/zlib-1.0-py3-none-any.whl", "zlib", "1.1"),
            "which is another package",
        ),
        (pip("https://x.example/a/zlib.exe", "zlib", "1.1"), "another package, or none"),
        (pip("https://[::1/zlib-1.1-py3-none-any.whl", "zlib", "1.1"), "is not an address"),
        ({**PYTHON, "name": "zlib", "manager": "npm"}, "must be `conda` | `pip`, found `npm`"),
        (conda(f"{FORGE}/win-64/zlib-1.3.1-0.conda"), "is for the platform `win-64`"),
        (
            {**PYTHON, "url": PYTHON["url"].replace(FORGE, "https://mirror.example")},
            "is listed twice, with two addresses",
        ),
        ("text", "must be a mapping"),
    ],
)
def test_an_entry_that_is_not_what_it_says_is_refused(entry: Any, words: str) -> None:
    assert words in refusal(UsageError, lock(entry))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({**PYTHON, "name": "zlib", "hash": {"md5": "0" * 32}}, "no sha256"),
        (
            conda("https://me:secret@x.example/chan/linux-64/zlib-1.3.1-0.conda"),
            "password or token",
        ),
        (
            conda("https://conda.anaconda.org/t/ab-123/chan/linux-64/zlib-1.3.1-0.conda"),
            "password or token",
        ),
        (
            conda("https://x.example/chan/linux-64/zlib-1.3.1-0.conda?key=secret"),
            "password or token",
        ),
        (conda("ftp://x.example/chan/linux-64/zlib-1.3.1-0.conda"), "is no https"),
        ({**PYTHON, "name": "zlib", "url": f"{FORGE}/noarch/"}, "names no file"),
        (conda("https://x.example/linux-64/zl%00ib-1.3.1-0.conda"), "may not be in a bundle"),
        (conda("https://x.example/linux-64/zl%25ib-1.3.1-0.conda"), "has a `%`"),
    ],
)
def test_an_address_that_would_leave_or_tell_secrets_is_refused(entry: Any, words: str) -> None:
    message = refusal(PolicyError, lock(entry))
    assert words in message
    assert "secret" not in message.replace("secret in", "") and "ab-123" not in message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version: 1\npackage: [", "it is not YAML"),
        (b"\xff\xfe\x00", "not a lock"),
        (b"a: 1\n", "has no `version`"),
        (lock(version=2), "schema version 2"),
        (lock(version=True), "schema version True"),
        (b"version: 1\npackage: []\n", "lists no packages"),
        (yaml.safe_dump({"version": 1, "package": [
            pip("https://x/a/b-1-py3-none-any.whl", "b", "1")]}).encode(),
         "no conda package `python`"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_such_lock_is_refused(data: bytes, words: str) -> None:
    assert words in refusal(UsageError, data)


def test_one_package_in_two_categories_is_one_package() -> None:
    """conda-lock writes an entry for each category."""
    assert len(files({**PYTHON, "category": "dev", "optional": True})) == 1


def test_one_distribution_under_two_spellings_is_refused() -> None:
    one, other = (
        pip(f"https://x/{n}-1.0-py3-none-any.whl", n, "1.0") for n in ("My.Lib", "my_lib")
    )
    assert "is listed twice" in refusal(UsageError, lock(one, other))


def test_of_several_platforms_the_profiles_is_taken_and_no_remedy_overwrites_the_lock(
    tmp_path: Path,
) -> None:
    """`stage env lock` over a colleague's lock for three platforms would leave one."""
    arm = {
        **PYTHON,
        "platform": "linux-aarch64",
        "url": PYTHON["url"].replace("linux-64", "linux-aarch64"),
    }
    both = lock(arm)
    for platform, words, remedy in (
        (None, "which of them?", "Name the cluster's `profile:` in the manifest"),
        ("osx-64", "the profile's platform is osx-64", "conda-lock lock --platform osx-64"),
    ):
        with pytest.raises(UsageError, match=re.escape(words)) as refused:
            EnvironmentLock.parse(both, "conda-lock.yml", platform)
        assert remedy in refused.value.remedy
        assert "Make the lock again: stage env lock" not in refused.value.remedy
    (package,) = EnvironmentLock.parse(both, "conda-lock.yml", "linux-aarch64").packages
    assert "/linux-aarch64/" in package.url
    (tmp_path / "conda-lock.yml").write_bytes(both)
    assert not made_by_stage(tmp_path / "conda-lock.yml")


@pytest.mark.parametrize("platform", ["osx-64", "linux-ppc64le", "win-64"])
def test_a_lock_for_no_machine_of_a_cluster_is_refused_before_a_download(platform: str) -> None:
    """Without a profile; `make_environment` would end in a KeyError after the download."""
    url = PYTHON["url"].replace("linux-64", platform)
    entry = {**PYTHON, "platform": platform, "url": url}
    text = yaml.safe_dump({"version": 1, "metadata": {}, "package": [entry]}).encode()
    assert f"locked for `{platform}`; a cluster's nodes are linux-64 or" in refusal(
        UsageError, text
    )


@given(st.text(max_size=40), st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_whatever_a_lock_says_no_path_leaves_the_asset(url: str, name: str, version: str) -> None:
    for manager in ("conda", "pip"):
        entry = {
            **PYTHON,
            "manager": manager,
            "name": name,
            "version": version,
            "url": f"https://x/{url}/{name}",
        }
        try:
            found = EnvironmentLock.parse(lock(entry), "conda-lock.yml")
        except StageError:
            continue
        assert all(problem_with_path(p.file_name) is None for p in found.packages)
