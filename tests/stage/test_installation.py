"""A remedy never names the package `airlift` of the public index: it is another program."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from stage import installation
from stage.installation import install_command

ROOT = Path(installation.__file__).parents[1]
METADATA = """\
Metadata-Version: 2.1
Name: airlift-hpc
Version: 0.2.0
Requires-Dist: click>=8.0
Requires-Dist: torch<2.14,>=2.6; extra == "train"
Requires-Dist: bitsandbytes>=0.50; sys_platform == "linux" and extra == "train"
Requires-Dist: uv>=0.13; extra == "laptop"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real dist-info folder, first on the path, of a copy that runs from no checkout."""
    folder = tmp_path / "site" / "airlift_hpc-0.2.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "site/stage/installation.py"))
    assert Path(str(metadata.distribution("airlift-hpc").locate_file(""))) == folder.parent
    yield folder


def record(folder: Path, **facts: object) -> None:
    (folder / "direct_url.json").write_text(json.dumps(facts))


def test_this_copy_is_installed_from_its_checkout() -> None:
    assert install_command("laptop") == f"pip install -e '{ROOT}[laptop]'"


def test_a_checkout_is_named_by_its_folder(installed: Path, tmp_path: Path) -> None:
    record(installed, url=tmp_path.as_uri(), dir_info={"editable": True})
    assert install_command("laptop") == f"pip install -e '{tmp_path}[laptop]'"
    record(installed, url=tmp_path.as_uri(), dir_info={})
    assert install_command("train") == f"pip install '{tmp_path}[train]'"
    assert install_command() == f"pip install '{tmp_path}'"


def test_a_wheel_is_named_by_its_file(installed: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "my wheels" / "airlift_hpc-0.2.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    record(installed, url=wheel.as_uri(), archive_info={})
    assert install_command("laptop") == f"pip install '{wheel}[laptop]'"


def test_a_repository_is_named_with_its_commit(installed: Path) -> None:
    record(installed, url="https://x.org/a.git", vcs_info={"vcs": "git", "commit_id": "ab12"})
    assert (
        install_command("laptop")
        == "pip install 'airlift-hpc[laptop] @ git+https://x.org/a.git@ab12'"
    )


@pytest.mark.parametrize("recorded", [None, "{", "[]", '{"url": "file:///gone.whl"}'])
def test_without_a_source_the_requirements_are_named(installed: Path, recorded: str | None) -> None:
    if recorded is not None:
        (installed / "direct_url.json").write_text(recorded)
    assert install_command("laptop") == "pip install 'uv>=0.13'"
    said = install_command("train")
    assert said == (
        "pip install 'torch<2.14,>=2.6' 'bitsandbytes>=0.50 ; sys_platform == \"linux\"'"
    )


def test_in_an_environment_of_a_bundle_its_environment_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".airlift").mkdir()
    (tmp_path / ".airlift/env.json").write_text("{}")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    said = install_command("laptop")
    assert str(tmp_path) in said and "stage env lock" in said and "pip" not in said


def test_no_message_installs_airlift_by_its_name() -> None:
    named = re.compile(r"pip install (--upgrade )?['\"]?airlift")
    sources = [*ROOT.glob("stage/**/*"), *ROOT.glob("runner/**/*"), *ROOT.glob("docs/**/*.md")]
    texts = [path for path in sources if path.suffix in (".py", ".sh", ".md")]
    found = [path for path in texts if named.search(path.read_text(encoding="utf-8"))]
    assert found in ([], [ROOT / "docs/CHANGELOG.md"])
