"""Checks that everything loads: at the end of `fetch`, and in `verify --deep` on the cluster.

A child process in the sandbox opens the files of a bundle: configs, safetensors headers against
their index and the files' sizes, tokenizers (with transformers, where that is installed), parquet
footers against the lock. It runs no code of the payload. A hostile file can harm only the child.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.bundle.bundle import Bundle
from stage.bundle.inspect import (
    TOKENIZER,
    WEIGHTS,
    ParquetFooter,
    index_problems,
    parquet_footer,
    safetensors_header,
)
from stage.bundle.verifier import Finding, VerificationReport
from stage.errors import DamageError, shortage
from stage.files import human_count
from stage.hub.model_files import PICKLE_SUFFIXES
from stage.lock.model import LockedAsset, Lockfile, read_lock
from stage.progress import Reporter
from stage.sandbox import ask_child, check_memory, close_network, last_words

_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAMES_ONE = re.compile(
    r"(?:tower|backbone|tokenizer|encoder|decoder|model|repo|checkpoint)(?:_id|_name|_path|_name_or_path)?$"
)
_CONFIG = re.compile(  # what `from_pretrained` reads; another .json of plain files can be anything
    r"(config|generation_config|adapter_config|model_index|preprocessor_config|processor_config"
    r"|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|.*\.index\.json"
)
_TIMEOUT_S = 3600.0  # a child that hangs is a finding, not a night


@dataclass(frozen=True)
class LoadReport:
    """The findings, and texts about what could not be tried."""

    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...]


def run_load_test(root: Path, lock: Lockfile) -> LoadReport:
    """Tries to load everything in a bundle, without network, in a process of its own.

    Raises:
        IncompleteError: there was not enough memory to find out.
    """
    if not any(_is_loaded(asset) for asset in lock.assets.values()):
        return LoadReport((), ())
    module, text = "stage.staging.load_test", lock.to_json().decode()
    try:
        answer, done = ask_child(module, text, str(root), timeout_s=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return LoadReport((_ended_early(f"no end after {_TIMEOUT_S:.0f} s"),), ())
    if answer is None:
        check_memory(done, f"{root}: whether it loads could not be found out")
        return LoadReport((_ended_early(last_words(done)),), ())
    findings = tuple(Finding(*values) for values in answer["findings"])
    return LoadReport(findings, tuple(answer["unchecked"]))


def _is_loaded(asset: LockedAsset) -> bool:
    """Among plain files, only a model, safetensors and parquet files can be checked."""
    return (
        asset.kind in ("tokenizer", "dataset")
        or _is_model(asset)
        or any(file.path.endswith((".safetensors", ".parquet")) for file in asset.files)
    )


def _is_model(asset: LockedAsset) -> bool:
    """Whether a run can train it: a folder of `path:` with a config.json can be trained too."""
    config = f"{asset.folder}/config.json"
    return asset.kind == "model" or (
        asset.kind == "files" and any(file.path == config for file in asset.files)
    )


def _ended_early(how: str) -> Finding:
    return Finding("data", "unloadable", "a check that comes to its end", how)


def check_loads(root: Path, lock: Lockfile, reporter: Reporter) -> None:
    """The last step of `fetch` before a bundle counts as finished.

    Raises:
        DamageError: something would not load; names all of it.
    """
    report = run_load_test(root, lock)
    for text in report.unchecked:
        reporter.note(f"not checked: {text}")
    if report.findings:
        listed = "\n  ".join(str(finding) for finding in report.findings[:20])
        more = f"\n  and {len(report.findings) - 20} more" if len(report.findings) > 20 else ""
        raise DamageError(
            f"{root}: what was fetched will not load ({len(report.findings)} found):\n"
            f"  {listed}{more}",
            f"{_way_out(lock, report)} To take it as it is: --no-offline-check",
        )
    absent = [text for asset in lock.assets.values() for text in lacking(asset)]
    for text in absent:
        reporter.warn(text)
    if any(_is_loaded(asset) for asset in lock.assets.values()):
        besides = "; see above for what is not there" if absent else ""
        reporter.note(f"{root}: everything that could be checked loads without network{besides}")


def _way_out(lock: Lockfile, report: LoadReport) -> str:
    """Another revision does not help if the manifest omits a file, or the files are local."""
    local = tuple(f"{a.folder}/" for a in lock.assets.values() if a.source.is_local)
    if all(f"{finding.path}/".startswith(local) for finding in report.findings):
        return "Correct the file at its source, then fetch again."
    left = {
        f"{asset.folder}/{left.path}": left.path
        for asset in lock.assets.values()
        for left in asset.left_out
    }
    missing = [f'"{left[finding.path]}"' for finding in report.findings if finding.path in left]
    if missing:
        return f"Add to `include` (or remove from `exclude`): {', '.join(missing[:4])}."
    with_exclude = [
        f"{asset.folder}/"
        for asset in lock.assets.values()
        if {"model", "path"} & asset.request.keys()
    ]
    may_exclude = any(finding.path.startswith(tuple(with_exclude)) for finding in report.findings)
    return "Try another revision" + (", or `exclude` what you do not need." if may_exclude else ".")


def verify_deep(report: VerificationReport, reporter: Reporter) -> VerificationReport:
    """`verify --deep`: loads the sound files, after every byte was compared.

    Args:
        reporter: gets notes on what could not be checked.

    Returns:
        The report with what does not load.
    """
    report = report._replace(level="deep")
    if not report.ok:
        reporter.note("not checked: loading: first repair the findings above")
        return report
    with reporter.at_work("load"):
        loaded = run_load_test(report.root, Bundle.open(report.root).lock)
    for text in loaded.unchecked:
        reporter.note(f"not checked: {text}")
    return report._replace(findings=tuple(sorted(loaded.findings)))


def lacking(asset: LockedAsset) -> list[str]:
    """What a training needs from a model and the asset lacks, by the names of its files. Pure."""
    if not _is_model(asset) or {"include", "exclude"} & asset.request.keys():
        return []  # a person who omits files by name knows that
    names = {file.path.removeprefix(f"{asset.folder}/") for file in asset.files}
    found = []
    if "config.json" in names and not any(name.endswith(".safetensors") for name in names):
        pickles = [name for name in sorted(names) if name.endswith(PICKLE_SUFFIXES)]
        why = f" ({pickles[0]} is a pickle, which is not read)" if pickles else ""
        found.append(
            f"{asset.name}: no weights, *.safetensors{why}: it can only be trained from scratch "
            "(`model.init: scratch` in the run file)"
        )
    others = {"preprocessor_config.json", "adapter_config.json", "model_index.json", "modules.json"}
    if not others & names and not any(TOKENIZER.fullmatch(name) for name in names):
        found.append(
            f"{asset.name}: no tokenizer (tokenizer.json and the like): each training on text "
            "needs it; put its files beside config.json, then fetch again"
        )
    return found


def named_repositories(settings: Any) -> list[tuple[str, str]]:
    """The repositories that a config.json names, as (key, name). Pure.

    `_name_or_path` only says where a config comes from.
    """
    if not isinstance(settings, dict):
        return []
    found = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found += named_repositories(value)
        elif (
            isinstance(value, str) and _NAMES_ONE.search(str(key)) and _REPOSITORY.fullmatch(value)
        ):
            found.append((str(key), value))
    return found


# ---- the child


def _main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment] # no tokenizer needs it; it is seconds and 200 MiB
    root = Path(sys.argv[1])
    lock = read_lock(sys.stdin.buffer.read(), "the lock")
    reason = close_network()
    out = os.dup(1)
    os.dup2(2, 1)  # libraries print; the answer goes where only we write
    said = [item for asset in lock.assets.values() for item in _check(root, asset, lock)]
    unchecked = [f"the network: this system has no sandbox for it ({reason})"] if reason else []
    answer = {
        "findings": [list(item) for item in said if isinstance(item, Finding)],
        "unchecked": unchecked + [item for item in said if isinstance(item, str)],
    }
    os.write(out, json.dumps(answer).encode() + b"\n")


def _unloadable(path: str, expected: str, found: str) -> Finding:
    return Finding(path, "unloadable", expected, found)


def _check(root: Path, asset: LockedAsset, lock: Lockfile) -> Iterator[Finding | str]:
    """What does not load of an asset; and, as texts, what could not be tried."""
    is_model = asset.kind == "tokenizer" or _is_model(asset)
    json_names = _CONFIG if asset.kind == "files" else re.compile(r".*\.json")
    contents: dict[str, Any] = {}
    broken = set()
    for file in asset.files:
        path = root / file.path
        try:
            if path.suffix == ".safetensors":
                contents[file.path] = safetensors_header(path)
            elif path.suffix == ".parquet":
                contents[file.path] = parquet_footer(path)
            elif is_model and json_names.fullmatch(path.name):
                contents[file.path] = _read_json(path)
        except DamageError as error:
            broken.add(file.path.rpartition("/")[0])
            what = "JSON" if path.suffix == ".json" else f"a {path.suffix[1:]} file"
            yield _unloadable(file.path, what, error.message)
    yield from _rows(asset, contents)
    if is_model:
        yield from _weights(asset, contents)
        yield from _others(asset, contents, lock)
        if asset.folder not in broken:  # else it is reported already
            yield from _tokenizer(root, asset)
    elif asset.kind != "dataset" and contents:
        yield f"{asset.name}: plain files: whether weights and parquet files are whole, and no more"


def _read_json(path: Path) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        what = f"something else: {error}" if path.stat().st_size else "an empty file"
        raise DamageError(what) from None
    if path.name == "config.json" and not isinstance(value, dict):
        raise DamageError(f"a {type(value).__name__}, not a mapping")
    return value


def _rows(asset: LockedAsset, footers: Mapping[str, ParquetFooter]) -> Iterator[Finding]:
    for config, splits in asset.configs.items():
        for name, split in splits.items():
            here = [footers[shard] for shard in split.shards if shard in footers]
            rows = sum(footer.rows for footer in here)
            if len(here) == len(split.shards) and rows != split.rows:
                yield _unloadable(
                    split.shards[0],
                    f"{human_count(split.rows or 0, 'row')} in {config}/{name}",
                    f"{rows}",
                )
            for shard in split.shards:
                if shard in footers and footers[shard].schema != split.schema:
                    yield _unloadable(shard, f"the columns locked for {config}/{name}", "others")


def _weights(asset: LockedAsset, contents: Mapping[str, Any]) -> Iterator[Finding]:
    """Compares shards with their index, and asks for a config beside weights."""
    paths = [file.path for file in asset.files]
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name.endswith(".safetensors.index.json") and path in contents:
            index = contents[path]
            headers = {
                other.rpartition("/")[2]: contents.get(other, {})
                for other in paths
                if other.rpartition("/")[0] == folder and other.endswith(".safetensors")
            }
            weight_map = index.get("weight_map") if isinstance(index, dict) else None
            for problem in index_problems(weight_map, headers):
                yield _unloadable(path, "an index of the shards here", f"one that {problem}")
    indices = {f"{m[1]}.safetensors.index.json" for m in map(_SHARD.fullmatch, paths) if m}
    for path in sorted(indices - set(paths)):
        yield _unloadable(path, "an index of the shards", "nothing")
    names = {path.removeprefix(f"{asset.folder}/") for path in paths}
    has_weights = any(WEIGHTS.fullmatch(name) for name in names)
    if has_weights and not {"config.json", "model_index.json", "modules.json"} & names:
        yield _unloadable(f"{asset.folder}/config.json", "a config beside the weights", "nothing")


def _others(
    asset: LockedAsset, contents: Mapping[str, Any], lock: Lockfile
) -> Iterator[Finding | str]:
    """Repositories that an asset names: the base of an adapter, and parts of a model."""
    models = [other for other in lock.assets.values() if other.kind == "model"]
    known = {name: other for other in models for name in other.names}
    adapter = contents.get(f"{asset.folder}/adapter_config.json")
    name = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
    base = known.get(name) if isinstance(name, str) else None
    if base is not None and not any(file.path.endswith(".safetensors") for file in base.files):
        yield f"{asset.name}: its base model {base.name} has no weights in this bundle"
    elif base is None and asset.base:
        yield _unloadable(asset.folder, f"its base model {name} in the bundle", "nothing")
    elif base is None and isinstance(name, str):
        yield f"{asset.name}: its base model {name} is not in this bundle"
    named = named_repositories(contents.get(f"{asset.folder}/config.json"))
    others = [f"{key}: {name}" for key, name in named if name not in known]
    if others:
        yield (
            f"{asset.name}: its config.json names other repositories ({', '.join(others[:4])}), "
            "which are not in this bundle: if its code loads them, add each to the manifest"
        )


def _tokenizer(root: Path, asset: LockedAsset) -> Iterator[Finding | str]:
    if not any(TOKENIZER.fullmatch(f.path.removeprefix(f"{asset.folder}/")) for f in asset.files):
        if asset.kind == "tokenizer":
            yield _unloadable(asset.folder, "a tokenizer's files", "none")
        return
    unchecked = f"{asset.name}: whether its tokenizer loads: "
    try:
        from transformers import AutoTokenizer
    except ImportError:
        yield f"{unchecked}transformers is not installed here"
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(root / asset.folder), local_files_only=True, trust_remote_code=False
        )
        if len(tokenizer) == 0 or not tokenizer("Will it load?")["input_ids"]:
            yield _unloadable(asset.folder, "a tokenizer", "one without a vocabulary")
        template = tokenizer.chat_template
        for text in template.values() if isinstance(template, dict) else [template or ""]:
            _compile_template(text)
    except Exception as error:
        if not isinstance(error, RecursionError) and shortage(error):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        if isinstance(error, ImportError):
            yield f"{unchecked}{said}"
        elif asset.code and "trust_remote_code" in str(error):
            yield f"{unchecked}it is made of code, which is not run here"
        elif re.search(
            r"(?i)unrecognized (model|configuration)|does not recognize this architecture",
            str(error),
        ):
            yield f"{unchecked}this transformers does not know it: {said}"
        else:
            yield _unloadable(asset.folder, "a tokenizer that transformers can load", said)


def _compile_template(text: str) -> None:
    """A chat template is a Jinja program; its syntax is checked, it is not run."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(
        re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", text)
    )


if __name__ == "__main__":
    _main()
