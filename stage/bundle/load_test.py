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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stage.bundle.bundle import Bundle
from stage.bundle.inspect import (
    TOKENIZER,
    WEIGHTS,
    index_problems,
    parquet_footer,
    safetensors_header,
)
from stage.bundle.report import Finding, VerificationReport
from stage.errors import DamageError, shortage
from stage.files import human_count
from stage.hub.model_files import PICKLE_SUFFIXES
from stage.lock.model import LockedAsset
from stage.lock.read import read_lock
from stage.lock.write import Lockfile
from stage.progress import Reporter
from stage.sandbox import check_memory, child, close_network

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAMES_ONE = re.compile(
    r"(?:tower|backbone|tokenizer|encoder|decoder|model|repo|checkpoint)(?:_id|_name|_path|_name_or_path)?$"
)
_LOADED = ("model", "tokenizer", "dataset")
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
    command, environment = child("stage.bundle.load_test")
    try:
        done = subprocess.run(
            [*command, str(root)],
            input=lock.to_json(),
            capture_output=True,
            env=environment,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return LoadReport((_ended_early(f"no end after {_TIMEOUT_S:.0f} s"),), ())
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        return LoadReport(
            tuple(Finding(*f) for f in answer["findings"]), tuple(answer["unchecked"])
        )
    except (ValueError, IndexError, KeyError, TypeError):
        text = done.stderr.decode("utf-8", "replace").strip()
        said = text.splitlines() or [f"exit status {done.returncode}"]
        check_memory(done.returncode, text, f"{root}: whether it loads could not be found out")
        return LoadReport((_ended_early(said[-1]),), ())


def _is_loaded(asset: LockedAsset) -> bool:
    """Of plain files only a model, safetensors and parquet files can be checked."""
    return (
        asset.kind in _LOADED
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
    local = [f"{a.folder}/" for a in lock.assets.values() if a.source.type == "path"]
    if all(f"{finding.path}/".startswith(tuple(local)) for finding in report.findings):
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


def verify_deep(report: VerificationReport) -> tuple[VerificationReport, tuple[str, ...]]:
    """`verify --deep`: loads the sound files, after every byte was compared.

    Returns:
        The report with what does not load, and what could not be checked.
    """
    report = replace(report, level="deep")
    if not report.ok:
        return report, ("loading: first repair the findings above",)
    loaded = run_load_test(report.root, Bundle.open(report.root).lock)
    return replace(report, findings=tuple(sorted(loaded.findings))), loaded.unchecked


# ---- the child


def _main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment] # no tokenizer needs it; it is seconds and 200 MiB
    root = Path(sys.argv[1])
    lock = read_lock(sys.stdin.buffer.read(), "the lock")
    reason = close_network()
    unchecked = [f"the network: no wall could be built ({reason})"] if reason else []
    out = os.dup(1)
    os.dup2(2, 1)  # libraries print; the answer goes where only we write
    findings: list[Finding] = []
    for asset in lock.assets.values():
        if asset.kind == "dataset":
            findings += _dataset(root, asset)
        elif asset.kind == "tokenizer" or _is_model(asset):
            findings += _model(root, asset, lock, unchecked)
        elif _is_loaded(asset):
            findings += _plain_files(root, asset)
            unchecked.append(
                f"{asset.name}: plain files: whether weights and parquet files are whole, "
                "and no more"
            )
    answer = {
        "findings": [(f.path, f.problem, f.expected, f.found) for f in findings],
        "unchecked": unchecked,
    }
    os.write(out, json.dumps(answer).encode() + b"\n")


def _unloadable(path: str, expected: str, found: str) -> Finding:
    return Finding(path, "unloadable", expected, found)


def _dataset(root: Path, asset: LockedAsset) -> Iterator[Finding]:
    for config, splits in asset.configs.items():
        for name, split in splits.items():
            rows = 0
            for shard in split.shards:
                try:
                    footer = parquet_footer(root / shard)
                except DamageError as error:
                    yield _unloadable(shard, "a parquet file", error.message)
                    continue
                rows += footer.rows
                if footer.schema != split.schema:
                    yield _unloadable(shard, f"the columns locked for {config}/{name}", "others")
            if rows != split.rows:
                yield _unloadable(
                    split.shards[0],
                    f"{human_count(split.rows or 0, 'row')} in {config}/{name}",
                    f"{rows}",
                )


def _model(
    root: Path, asset: LockedAsset, lock: Lockfile, unchecked: list[str]
) -> Iterator[Finding]:
    folders: dict[str, list[str]] = {}
    for file in asset.files:
        folder, _, name = file.path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    texts: dict[str, Any] = {}
    is_broken = False
    for folder, names in sorted(folders.items()):
        for name in sorted(n for n in names if n.endswith(".json")):
            if asset.kind == "files" and not _CONFIG.fullmatch(name):
                continue
            path = f"{folder}/{name}"
            try:
                texts[path] = json.loads((root / path).read_text(encoding="utf-8"))
            except (ValueError, RecursionError) as error:
                is_broken = is_broken or folder == asset.folder
                size = (root / path).stat().st_size
                found = f"something else: {error}" if size else "an empty file"
                yield _unloadable(path, "JSON", found)
            if name == "config.json" and not isinstance(texts.get(path, {}), dict):
                yield _unloadable(path, "a mapping", type(texts[path]).__name__)
        yield from _weights(root, folder, names, texts)
    top = folders.get(asset.folder, [])
    yield from _top(asset, top, texts, lock, unchecked)
    if any(TOKENIZER.fullmatch(name) for name in top):
        if not is_broken:  # else it is reported already
            yield from _tokenizer(root, asset, unchecked)
    elif asset.kind == "tokenizer":
        yield _unloadable(asset.folder, "a tokenizer's files", "none")


def _plain_files(root: Path, asset: LockedAsset) -> Iterator[Finding]:
    for file in asset.files:
        try:
            if file.path.endswith(".safetensors"):
                safetensors_header(root / file.path)
            elif file.path.endswith(".parquet"):
                parquet_footer(root / file.path)
        except DamageError as error:
            yield _unloadable(file.path, "a sound file", error.message)


def _weights(
    root: Path, folder: str, names: list[str], texts: Mapping[str, Any]
) -> Iterator[Finding]:
    headers: dict[str, Mapping[str, Any]] = {}
    shards: dict[tuple[str, int], set[int]] = {}
    for name in sorted(n for n in names if n.endswith(".safetensors")):
        if match := _SHARD.fullmatch(name):
            shards.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
        headers[name] = {}
        try:
            headers[name] = safetensors_header(root / folder / name)
        except DamageError as error:
            yield _unloadable(f"{folder}/{name}", "a safetensors file", error.message)
    for name in sorted(n for n in names if n.endswith(".safetensors.index.json")):
        index = texts.get(f"{folder}/{name}")
        if index is not None:
            problems = index_problems(
                index.get("weight_map") if isinstance(index, dict) else None, headers
            )
            for problem in problems:
                yield _unloadable(
                    f"{folder}/{name}", "an index of the shards here", f"one that {problem}"
                )
    for (stem, total), found in shards.items():
        missing = [n for n in range(1, min(total, 100_000) + 1) if n not in found]
        if missing:
            name = f"{folder}/{stem}-{missing[0]:05d}-of-{total:05d}.safetensors"
            yield _unloadable(name, f"all {total} shards", f"{len(missing)} missing")
        if f"{stem}.safetensors.index.json" not in names:
            yield _unloadable(
                f"{folder}/{stem}.safetensors.index.json", "an index of the shards", "nothing"
            )


def _top(
    asset: LockedAsset,
    names: list[str],
    texts: Mapping[str, Any],
    lock: Lockfile,
    unchecked: list[str],
) -> Iterator[Finding]:
    has_weights = any(WEIGHTS.fullmatch(name) for name in names)
    if has_weights and not {"config.json", "model_index.json", "modules.json"} & set(names):
        yield _unloadable(f"{asset.folder}/config.json", "a config beside the weights", "nothing")
    yield from _base(asset, texts.get(f"{asset.folder}/adapter_config.json"), lock, unchecked)
    known = {name for other in lock.assets.values() for name in other.names}
    others = [
        f"{key}: {name}"
        for key, name in named_repositories(texts.get(f"{asset.folder}/config.json"))
        if name not in known
    ]
    if others:
        unchecked.append(
            f"{asset.name}: its config.json names other repositories ({', '.join(others[:4])}), "
            "which are not in this bundle: if its code loads them, add each to the manifest"
        )


def lacking(asset: LockedAsset) -> list[str]:
    """What a training needs of a model and the asset has not, by the names of its files. Pure."""
    if not _is_model(asset) or {"include", "exclude"} & asset.request.keys():
        return []  # who leaves files out by name knows it
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


def _base(
    asset: LockedAsset, adapter: Any, lock: Lockfile, unchecked: list[str]
) -> Iterator[Finding]:
    """An adapter is nothing without its base: a model of that name, with weights."""
    name = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
    if not isinstance(name, str):
        return
    base = next(
        (
            a
            for a in lock.assets.values()
            if a.kind == "model" and name in a.names and a is not asset
        ),
        None,
    )
    if base is None:
        if asset.base:
            yield _unloadable(asset.folder, f"its base model {name} in the bundle", "nothing")
        else:
            unchecked.append(f"{asset.name}: its base model {name} is not in this bundle")
    elif not any(file.path.endswith(".safetensors") for file in base.files):
        unchecked.append(f"{asset.name}: its base model {base.name} has no weights in this bundle")


def _tokenizer(root: Path, asset: LockedAsset, unchecked: list[str]) -> Iterator[Finding]:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        unchecked.append(
            f"{asset.name}: whether its tokenizer loads: transformers is not installed here"
        )
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(root / asset.folder), local_files_only=True, trust_remote_code=False
        )
        if len(tokenizer) == 0 or not tokenizer("Will it load?")["input_ids"]:
            yield _unloadable(asset.folder, "a tokenizer", "one without a vocabulary")
        for name in tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else ():
            _compile_template(tokenizer.chat_template[name])
        if isinstance(tokenizer.chat_template, str):
            _compile_template(tokenizer.chat_template)
    except ImportError as error:
        unchecked.append(f"{asset.name}: whether its tokenizer loads: {_first_line(error)}")
    except Exception as error:
        if not isinstance(error, RecursionError) and shortage(error):
            raise
        text = _first_line(error)
        if asset.code and "trust_remote_code" in str(error):
            unchecked.append(
                f"{asset.name}: whether its tokenizer loads: it is made of code, "
                "which is not run here"
            )
        elif re.search(
            r"(?i)unrecognized (model|configuration)|does not recognize this architecture",
            str(error),
        ):
            unchecked.append(
                f"{asset.name}: whether its tokenizer loads: this transformers "
                f"does not know it: {text}"
            )
        else:
            yield _unloadable(asset.folder, "a tokenizer that transformers can load", text)


def _compile_template(text: str) -> None:
    """A chat template is a Jinja program; its syntax is checked, it is not run."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(
        re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", text)
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


if __name__ == "__main__":
    _main()
