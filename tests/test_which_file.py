"""A file that is given in place of another is known by its content."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stage.errors import UsageError
from stage.file_kinds import MANIFEST, check_kind, kinds_of


@pytest.mark.parametrize(
    ("content", "kinds"),
    [
        ("", []),
        ("a word\nand others, too\n", []),
        ("format: 1\nmodel: {asset: a, init: scratch}\nepochs: 1, 2\n", []),
        ("id,text\n1,a\n2,b\n", []),
        ("{format: 1, assets: {a: {model: o/n}}}", ["a manifest"]),
        ('{"format": 1, "assets": {"a": {"url": "https://x", "sha256": "0"}}}', ["a manifest"]),
        ("[1, 2]", ["JSON data"]),
        ('{"text": "unfinished', ["JSON data"]),
        ("torch==2.6 --hash=sha256:00\n", ["a list of requirements"]),
        ("x @ https://example.org/x.whl\ny; python_version < '3'\n", ["a list of requirements"]),
        ("PAR1 and more", ["a parquet file"]),
        ('"""Trains."""\nfrom torch import nn\n\nmodel: nn.Module\n', ["a Python script"]),
        ("#!/bin/bash -l\n#SBATCH --time=1\ntask: x\n", ["a shell script"]),
        ("#!/usr/bin/env bash\necho\n", ["a shell script"]),
        ("\ufefftask: masked-lm\n", ["a run file"]),
        ('{"format": 1, "assets": {"a": {"left_out": []}}}', ["a lock"]),
        ('{"format": 1, "assets": {}}', ["a lock"]),
        ("assets: {}\n", ["a manifest"]),
        ("package: []\nmetadata: {}\n", ["a conda lock"]),
        ("package: []\nversion: 1\n", ["a conda lock"]),
        ("package: []\n", []),
        ('glibc: "2.28"\n', ["a profile"]),
        ("dependencies: [a]\n", ["an environment.yml"]),
        ('{"findings": [], "bundle_id": null}', ["a verification report"]),
        ("findings: []\nbundle_id: x\n", []),
        ('{"findings": []}', ["JSON data"]),
        ('{"zero_optimization": {}}', ["a ds_config.json"]),
        ("zero_optimization: {}\n", []),
        ('{"a": {"task": 1}}', ["JSON data"]),
        ("a:\n  task: x\n", []),
        ("a,b\n", []),
        ("a,b\n1,2,3\n", []),
        ("- a, b\n- c, d\n", []),
        ("key: a, b\nother: c, d\n", []),
        ("# only\n\n", []),
        ("numpy\n", []),
        ("numpy>=1 # why\n-r more.txt\n", ["a list of requirements"]),
        ("x = 1\n", []),
    ],
)
def test_the_kind_is_known_by_the_content(content: str, kinds: list[str]) -> None:
    assert kinds_of(content.encode()) == kinds


@pytest.mark.parametrize(
    ("name", "content", "kind", "use"),
    [
        ("a.csv", "id;text\n1;a\n", "a table (CSV)", "stage init a.csv"),
        ("a.tsv", "text\tlabel\nhello: you\t1\n", "a table (CSV)", "stage init a.tsv"),
        ("job.sh", "#!/bin/bash\n#SBATCH -N 1\n", "a shell script", "sbatch job.sh; a shell: bash"),
    ],
)
def test_what_is_no_manifest_is_named_with_its_use(
    name: str, content: str, kind: str, use: str
) -> None:
    with pytest.raises(UsageError, match=f"this is {re.escape(kind)}, not a manifest") as error:
        check_kind(Path(name), content.encode(), MANIFEST)
    assert use in error.value.remedy
