"""Reduces a dataset's card to the configs and splits in the bundle: pure text work.

`load_dataset` reads the YAML at the top of README.md: `configs` names the files of each split, and
`dataset_info` names the expected splits and features (github.com/huggingface/datasets,
`utils/metadata.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import yaml

from stage.lock.yaml_lines import split_card

CARD = "README.md"
Configs = Mapping[str, Mapping[str, list[str]]]


def card_of(original: str, configs: Configs, made: Collection[str] = ()) -> bytes:
    """The card to serve.

    Args:
        original: the published card; empty if there is none.
        configs: config -> split -> paths as they are served.
        made: the configs that `fetch` converted. The card's features describe the published files,
            so they are dropped: the parquet has its own.
    """
    metadata, text = split_card(original)
    published = {
        entry.get("config_name", "default"): entry for entry in _entries(metadata.get("configs"))
    }
    metadata["configs"] = [
        {
            **{
                k: v
                for k, v in published.get(config, {}).items()
                if k not in ("data_files", "data_dir")
            },
            "config_name": config,
            "data_files": [{"split": split, "path": files} for split, files in splits.items()],
        }
        for config, splits in configs.items()
    ]
    infos = [
        _only(info, configs[config], is_made=config in made)
        for info in _entries(metadata.pop("dataset_info", None))
        if (config := info.get("config_name", "default")) in configs
    ]
    if infos:
        metadata["dataset_info"] = infos
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n{text}".encode()
    )


def _entries(value: Any) -> list[dict[str, Any]]:
    several = value if isinstance(value, list) else [value]
    return [dict(entry) for entry in several if isinstance(entry, dict)]


def _only(
    info: dict[str, Any], splits: Mapping[str, list[str]], *, is_made: bool
) -> dict[str, Any]:
    if isinstance(info.get("splits"), list):
        info["splits"] = [
            s for s in info["splits"] if isinstance(s, dict) and s.get("name") in splits
        ]
    gone = ("download_size", "dataset_size", *(["features"] if is_made else []))
    return {key: value for key, value in info.items() if key not in gone}
