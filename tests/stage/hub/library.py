"""What the `datasets` library makes of a repository, by the names of its files and its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(autouse=True)
def offline_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants  # noqa: F401 - reads the variable once: tests that come later are not offline

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def library(
    folder: Path, paths: list[str], configs: Any = None
) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """Config -> the library's module, and its layout, for these (empty) files and this card."""
    import datasets
    from datasets.data_files import EmptyDatasetError

    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    if configs is not None:
        (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    modules: dict[str, str] = {}
    layout: dict[str, dict[str, list[str]]] = {}
    for name in [None] if configs is None else datasets.get_dataset_config_names(str(folder)):
        try:
            builder = datasets.load_dataset_builder(str(folder), name)
        except EmptyDatasetError:
            continue
        modules[builder.config.name] = builder.__module__.rpartition(".")[2]
        layout[builder.config.name] = {
            str(split): [Path(str(file)).relative_to(folder.resolve()).as_posix() for file in files]
            for split, files in builder.config.data_files.items()
        }
    return modules, layout
