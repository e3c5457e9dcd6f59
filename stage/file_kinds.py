"""Which kind of file this is: where another kind is wanted, the message names it, and its use.

It is known by the content, and a table by its name.
"""

from __future__ import annotations

import re
from pathlib import Path

from stage.errors import UsageError, quoted, suggest_path
from stage.files import read_start

MANIFEST = "a manifest"
RUN_FILE = "a run file"
LOCK = "a lock"
CONDA_LOCK = "a conda lock"
PROFILE = "a profile"
ENVIRONMENT = "an environment.yml"
DS_CONFIG = "a ds_config.json"
ACCELERATE = "a file of `accelerate config`"
REQUIREMENTS = "a list of requirements"
UV_LOCK = "a lock of uv"
POETRY_LOCK = "a lock of poetry"
PIXI_LOCK = "a lock of pixi"
PYLOCK = "a pylock.toml"
EXPLICIT = "conda's explicit list"
REPORT = "a verification report"
TABLE = "a table (CSV)"
JSON = "JSON data"
PARQUET = "a parquet file"
PYTHON = "a Python script"
SHELL = "a shell script"

MAX_START = 2**16  # bytes that are looked at: a file of data may be large
_DEEPSPEED = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
}
_KEY = re.compile(r"^[\"']?([A-Za-z_][\w.-]*)[\"']?[ \t]*:(?=\s|$)", re.MULTILINE)
_JSON = re.compile(r"\s*(\{(\s|//[^\n]*\n|#[^\n]*\n)*[\"}]|\[\s*[\[{\"\d])")
_TOKEN = re.compile(
    r'(?:(?P<key>"(?:\\.|[^"\\])*"|[A-Za-z_][\w.-]*)\s*:)|"(?:\\.|[^"\\])*"|(?P<mark>[\[\]{}])'
)
_IMPORT = re.compile(r"^(?:from [\w.]+ )?import [\w.(*]|\A#!.*\bpython", re.MULTILINE)
_TABLE = re.compile(r"^\[\[(packages?)\]\]|^\[", re.MULTILINE)
_TABLES = (".csv", ".tsv")
_SHELL = re.compile(r"#!.*sh\b")
_REQUIREMENT = re.compile(
    r"(-[\w-]+[= ].+)"  # an option; or a name, extras, and a version, an address or a marker
    r"|[A-Za-z0-9][\w.-]*\s*(?:\[[^\]]*\])?\s*((?:[=<>!~]=|[<>]|@ *\w+:|; *\w+ *[=<>!~ni]).*)?"
)

# What each kind is for. `{}`: the file; `{name}`: without its folder.
_USE = {
    MANIFEST: "Make its bundle: stage fetch {} -o BUNDLE.",
    RUN_FILE: "Train from a bundle with it: runner check {} --bundle BUNDLE.",
    LOCK: "It is beside its manifest, which may be edited.",
    CONDA_LOCK: "It belongs to an environment.yml, which a manifest names: `environment: X.yml`.",
    PROFILE: "An environment is locked for it: stage env lock ENVIRONMENT.yml --profile {}.",
    ENVIRONMENT: "Lock it: stage env lock {} --profile PROFILE.",
    DS_CONFIG: "A run file names it: engine: {{name: deepspeed, config: {name}}}.",
    ACCELERATE: "Its own launcher reads it: runner exec --bundle BUNDLE -- accelerate launch "
    "--config_file {} SCRIPT.py",
    REQUIREMENTS: "An environment.yml names it: "
    "dependencies: [python=3.11, pip, {{pip: [-r {name}]}}].",
    UV_LOCK: "In its folder: uv export --frozen --format requirements-txt --no-emit-project "
    "-o r.txt; an environment.yml names that: "
    "dependencies: [python=3.11, pip, {{pip: [-r r.txt]}}].",
    POETRY_LOCK: "In its folder: poetry export -o r.txt (of poetry-plugin-export); an "
    "environment.yml names that: dependencies: [python=3.11, pip, {{pip: [-r r.txt]}}].",
    PIXI_LOCK: "In its folder: pixi workspace export conda-environment environment.yml.",
    PYLOCK: "Install it and list that: uv venv v; uv pip sync --python v {}; "
    "uv pip freeze --python v > r.txt; an environment.yml names that: "
    "dependencies: [python=3.11, pip, {{pip: [-r r.txt]}}].",
    EXPLICIT: "Install it and export that: conda create -n x --file {}; "
    "conda env export -n x --no-builds > environment.yml.",
    REPORT: "A patch repairs what it lists: stage patch BUNDLE --report {} -o PATCH.",
    TABLE: "A manifest names it: stage init {}.",
    JSON: "A dataset of JSON lines is named in a manifest: stage init {}.",
    PARQUET: "A manifest names it: stage init {}.",
    PYTHON: "A run file starts it: `command: python {}`.",
    SHELL: "Slurm takes it: sbatch {0}; a shell: bash {0}.",
}
# How to get the file that was wanted.
_WANTED = {
    MANIFEST: "`stage init NAME...` writes a manifest.",
    RUN_FILE: "`runner init TASK --bundle BUNDLE` writes a run file; that of a program of yours "
    "has two lines: `format: 1` and `command: python train.py`.",
    LOCK: "`stage lock MANIFEST` writes a lock.",
    CONDA_LOCK: "`stage env lock ENVIRONMENT.yml --profile PROFILE` writes one.",
    PROFILE: "`stage env probe --to me@cluster:FOLDER` writes one; on the cluster itself, "
    "`stage env probe` prints one.",
    ENVIRONMENT: "It has `channels: [conda-forge]` and `dependencies: [python=3.11]`.",
    REPORT: "`stage verify BUNDLE --report FILE` writes one.",
}


_NAMED = re.compile(rb"^\s+deepspeed_config_file:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)
_ONLY_IN_LOCKS = r'"(origin|left_out)":|"assets":\s*\{\s*\}'


def kinds_of(start: bytes) -> list[str]:
    """The kinds of file that a content can be; empty where none is known.

    Args:
        start: the content, or its beginning.
    """
    text = _text(start)
    if text.startswith("PAR1"):
        return [PARQUET]
    if _SHELL.match(text):
        return [SHELL]
    if _IMPORT.search(text):
        return [PYTHON]
    if kind := _lock_of_another_tool(text):
        return [kind]
    is_json = _JSON.match(text) is not None
    keys = _top_keys(text)
    found = {
        # Each asset of a lock says which kind it is; each of a manifest, what is asked for.
        LOCK: is_json and "assets" in keys and re.search(_ONLY_IN_LOCKS, text),
        MANIFEST: "assets" in keys,
        RUN_FILE: "task" in keys or {"format", "command"} <= keys,
        PIXI_LOCK: {"version", "environments"} <= keys,
        CONDA_LOCK: {"package", "metadata"} <= keys or {"package", "version"} <= keys,
        PROFILE: "glibc" in keys,
        ENVIRONMENT: "dependencies" in keys,
        REPORT: is_json and {"findings", "bundle_id"} <= keys,
        ACCELERATE: {"distributed_type", "compute_environment"} & keys,
        DS_CONFIG: is_json and _DEEPSPEED & keys,
    }
    kinds = [kind for kind, is_it in found.items() if is_it]
    if LOCK in kinds:
        kinds.remove(MANIFEST)
    if kinds or keys & {"format", "model", "dataset"}:
        return kinds
    if is_json:
        return [JSON]
    return [REQUIREMENTS] if _is_requirements(text) else []


def check_kind(path: Path | str, start: bytes, wanted: str) -> None:
    """Raises for a file of another kind than the wanted one. One of no known kind passes.

    Args:
        path: the file, for the remedy.
        start: its content, or the beginning of it.
        wanted: one of the kinds.

    Raises:
        UsageError: it is another kind of file: which, what it is for, and how to get the wanted.
    """
    kinds = _kinds_of_file(Path(path), start)
    # Names alone are a table's column or a text as well, but nothing in place of an environment.yml
    # (nor is a .txt, whatever mistakes its lines have).
    is_list = Path(path).suffix == ".txt" or _is_requirements(_text(start), names_alone=True)
    if not kinds and wanted == ENVIRONMENT and is_list:
        kinds = [REQUIREMENTS]
    if _is_other(kinds, wanted):
        if (wanted, kinds[0]) == (DS_CONFIG, ACCELERATE) and (named := _NAMED.search(start)):
            named_file = named[1].decode(errors="replace")
            raise UsageError(
                f"this is {kinds[0]}, not {wanted}; it names one.",
                f"Write engine: {{name: deepspeed, config: {named_file}}} (relative to the run "
                "file).",
            )
        use = _USE[kinds[0]].format(quoted(path), name=Path(path).name)
        raise UsageError(
            f"this is {kinds[0]}, not {wanted}.",
            f"{use} {_WANTED.get(wanted, '')}".strip(),
        )


def how_to_get(wanted: str) -> str:
    """How to get a file of a kind, for remedies; empty where nothing makes it."""
    return _WANTED.get(wanted, "")


def suggest_file(path: Path, wanted: str, remedy: str = "") -> str:
    """A remedy for a file that does not exist: the nearest one that can be of the wanted kind."""

    def fits(near: Path) -> bool:
        try:
            return not _is_other(_kinds_of_file(near, read_start(near, MAX_START)), wanted)
        except OSError:  # a folder
            return True

    return suggest_path(path, remedy or _WANTED.get(wanted, "Check the path."), fits)


def _kinds_of_file(path: Path, start: bytes) -> list[str]:
    return kinds_of(start) or ([TABLE] if path.suffix in _TABLES else [])


def _is_other(kinds: list[str], wanted: str) -> bool:
    return bool(kinds) and wanted not in kinds and (wanted, kinds) != (DS_CONFIG, [JSON])


def _top_keys(text: str) -> set[str]:
    """The keys of a YAML or JSON mapping; none for JSON lines."""
    if not text.lstrip().startswith("{"):
        return set(_KEY.findall(text))
    keys, depth = set[str](), 0
    for token in _TOKEN.finditer(text):
        if token["mark"]:
            depth += 1 if token["mark"] in "[{" else -1
        if depth == 0:
            return set() if text[token.end() :].strip() else keys
        if token["key"] and depth == 1:
            keys.add(token["key"].strip('"'))
    return keys


def _text(start: bytes) -> str:
    return start[:MAX_START].removeprefix(b"\xef\xbb\xbf").decode("utf-8", "ignore")


def _lock_of_another_tool(text: str) -> str | None:
    """Which lock in TOML, or of conda, it is: by what is before its first table; None: no such."""
    if re.search(r"^@EXPLICIT\s*$", text, re.MULTILINE):
        return EXPLICIT
    table = _TABLE.search(text)
    if table is None or not table[1]:
        return None
    keys = set(re.findall(r"^([\w-]+)\s*=", text[: table.start()], re.MULTILINE))
    if table[1] == "packages":
        return PYLOCK if "lock-version" in keys else None
    return UV_LOCK if {"version", "requires-python"} <= keys else None if keys else POETRY_LOCK


def _is_requirements(text: str, *, names_alone: bool = False) -> bool:
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    found = [_REQUIREMENT.fullmatch(line) for line in lines if line and line[0] != "#"]
    return all(found) and any(match and (names_alone or match[1] or match[2]) for match in found)
