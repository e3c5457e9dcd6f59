"""What the names of a run file stand for in a bundle: folders, files, digests. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from runner.config.data import DatasetConfig
from runner.config.held_out import Part


@dataclass(frozen=True)
class ModelInput:
    """A model's folder, loadable with `from_pretrained`.

    Attributes:
        source: a repository of the Hub, a path or an address.
        commit: the commit of the repository, or None.
        digests: file name -> sha256, for each file in the folder.
        settings: its config.json.
        preprocessing: its preprocessor_config.json, which models of images have; else empty.
        licence: as its source states it.
        new_tokens, new_special_tokens: what the run adds to the vocabulary.
    """

    asset: str
    path: Path
    source: str
    commit: str | None
    digests: Mapping[str, str]
    settings: Mapping[str, Any]
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    licence: str | None = None
    new_tokens: tuple[str, ...] = ()
    new_special_tokens: tuple[str, ...] = ()

    @property
    def tokenizer_digests(self) -> dict[str, str]:
        """File name -> sha256 of all files but weights: a tokenizer can depend on each of them.

        Tokens that the run adds count as a file.
        """
        found = {name: d for name, d in self.digests.items() if not name.endswith(".safetensors")}
        if self.new_tokens or self.new_special_tokens:
            text = json.dumps([self.new_tokens, self.new_special_tokens])
            found["tokens of the run file"] = sha256(text.encode()).hexdigest()
        return found


@dataclass(frozen=True)
class SplitInput:
    """The parquet files of one split, in order.

    Attributes:
        rows: that are read.
        columns: name -> Arrow type.
        part: which rows of the files are read; None: all.
    """

    name: str
    files: tuple[Path, ...]
    digests: tuple[str, ...]
    rows: int
    columns: Mapping[str, str]
    part: Part | None = None

    @property
    def share(self) -> float:
        """Of the rows of its files, how many are read."""
        return self.rows / max(1, self.part.of) if self.part else 1.0


@dataclass(frozen=True)
class DatasetInput:
    """One dataset of a run.

    Attributes:
        settings: its settings in the run file.
        source: a repository of the Hub, a path or an address.
        commit: the commit of the repository, or None.
        licence: as its source states it.
    """

    asset: str
    config: str
    train: SplitInput
    validation: SplitInput | None
    settings: DatasetConfig
    source: str
    commit: str | None
    licence: str | None


@dataclass(frozen=True)
class EnvironmentInput:
    """An environment's folder in the bundle: its image and the scripts that unpack it.

    Attributes:
        tree: the digest of all its files, the same in every prefix.
        size: bytes on disk when unpacked.
        files: the number of files when unpacked.
        packages: their names, as the lock has them; empty: not known.
    """

    asset: str
    path: Path
    tree: str
    size: int
    files: int
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """The resolved inputs of a run; `environment` is None if it has none."""

    bundle: Path
    bundle_id: str
    model: ModelInput
    datasets: tuple[DatasetInput, ...]
    environment: EnvironmentInput | None = None
