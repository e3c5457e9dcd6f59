"""A remedy never names the package `airlift` of the public index: it is another program."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from stage.installation import install_command

METADATA = """\
Metadata-Version: 2.1
Name: airlift-hpc
Version: 0.2.0
Requires-Dist: click>=8.0
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real dist-info folder, first on the path."""
    folder = tmp_path / "site" / "airlift_hpc-0.2.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(folder.parent))
    assert Path(str(metadata.distribution("airlift-hpc").locate_file(""))) == folder.parent
    yield folder


WITHOUT_A_SOURCE = {
    "laptop": "pip install '.[laptop]', in the checkout of airlift",
    "": "pip install '.', in the checkout of airlift",
}
RECORDED: dict[str, tuple[str | dict[str, object] | None, dict[str, str]]] = {
    # what pip wrote of the source (HERE: a folder that is there) -> extra -> the command
    "an editable checkout": (
        {"url": "HERE", "dir_info": {"editable": True}},
        {"laptop": "pip install -e 'HERE[laptop]'"},
    ),
    "a checkout": (
        {"url": "HERE", "dir_info": {}},
        {"train": "pip install 'HERE[train]'", "": "pip install 'HERE'"},
    ),
    "a wheel": (
        {"url": "HERE/my%20wheels/airlift_hpc-0.2.0-py3-none-any.whl", "archive_info": {}},
        {"laptop": "pip install 'HERE/my wheels/airlift_hpc-0.2.0-py3-none-any.whl[laptop]'"},
    ),
    "a repository": (
        {"url": "https://x.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
        {"laptop": "pip install 'airlift-hpc[laptop] @ git+https://x.org/a.git@ab12'"},
    ),
    "nothing": (None, WITHOUT_A_SOURCE),
    "what is no JSON": ("{", WITHOUT_A_SOURCE),
    "a list": ("[]", WITHOUT_A_SOURCE),
    "a wheel that is gone": ({"url": "file:///gone.whl"}, WITHOUT_A_SOURCE),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_command_names_the_source_that_this_copy_came_from(
    installed: Path, tmp_path: Path, name: str
) -> None:
    recorded, commands = RECORDED[name]
    (tmp_path / "my wheels").mkdir()
    (tmp_path / "my wheels/airlift_hpc-0.2.0-py3-none-any.whl").touch()
    if recorded is not None:
        text = recorded if isinstance(recorded, str) else json.dumps(recorded)
        (installed / "direct_url.json").write_text(text.replace("HERE", tmp_path.as_uri()))
    for extra, command in commands.items():
        assert install_command(*filter(None, [extra])) == command.replace("HERE", str(tmp_path))
