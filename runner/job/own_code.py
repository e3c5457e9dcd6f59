"""What a person's own code asks for and the job has not: found by reading it.

The files that the command reaches (`runner.job.reached_code`), its words and its configs are
compared with what the job has: the Python that runs it, the files that travel, what the bundle
serves, the variables of a rank. An error is what ends the command for sure; where the code may
take another way, it is a warning, or nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from runner.from_stage import quoted, scalar, suggest
from runner.job.findings import Finding, note, usage_error, warning
from runner.job.installed import PIP_NAMES
from runner.job.reached_code import MAX_FILES, OwnCode, Reached, reach, values
from runner.job.source_code import OF_LAPTOP, REPOSITORY, Said, kind_of_key
from stage.serve.catalogue import OWN, Catalogue
from stage.serve.hub_api import why_missing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHILD_S = 60.0  # for a Python on a slow disk, or in a container
MAX_CONFIG = 2**20  # bytes; a larger JSON is data
_CODE = (".py", ".sh")
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_DATA = (".txt", ".csv", ".tsv", ".jsonl", ".parquet")
_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".npy", ".npz", ".pkl", ".h5", ".gguf")
_FOLDERS = (
    *("data", "dataset", "datasets", "out", "output", "outputs", "model", "models", "ckpt"),
    *("ckpts", "checkpoint", "checkpoints", "config", "configs", "logs", "results", "runs"),
    *("exp", "save", "saves", "saved", "saved_models", "pretrained", "weights", "experiments"),
    *("cache", "tmp", "path", "..", "."),
)
"""Names of folders; a value that begins with one is no repository of a Hub."""
_WRITTEN = re.compile(
    r"out|save|log|dump|cache|result|export|write|dest|resume|checkpoint|ckpt|work|run|exp|name$"
)
"""Options that name what the command writes, or wrote in an earlier start."""
_READ = re.compile(r"^c$|conf|cfg|file$|deepspeed|data|input|train|valid|test|recipe|prompt")
_CONFIG = re.compile(r"^c$|conf|cfg|deepspeed|recipe")
"""Options that name what the command reads; the second: what it cannot start without."""
_ELSEWHERE = re.compile(r"[$*{,~\s]|://|^/")
"""Signs of a value that is no path in the project, or that only a shell knows."""
_TRUE = ("1", "true", "yes", "on")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
_PIP_NAMES = {
    **PIP_NAMES,
    "cv2": "opencv-python",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "bs4": "beautifulsoup4",
    "dateutil": "python-dateutil",
    "hydra": "hydra-core",
    "absl": "absl-py",
    "dotenv": "python-dotenv",
    "attr": "attrs",
    "faiss": "faiss-cpu",
    "git": "gitpython",
    "pkg_resources": "setuptools",
    "mpl_toolkits": "matplotlib",
    "google": "protobuf",
    "Levenshtein": "levenshtein",
    "pytorch_lightning": "pytorch-lightning",
    "lm_eval": "lm-eval",
    "cpuinfo": "py-cpuinfo",
}
"""Import name -> the package that pip installs."""
_LOGGERS = {
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "mlflow": ("mlflow",),
    "comet_ml": ("comet_ml",),
    "swanlab": ("swanlab",),
}
"""Value of `report_to` -> the modules, one of which it needs."""
_ASK = """
import importlib.util, json, sys
del sys.path[0]
asked, faults, missing = json.load(sys.stdin), {}, []
for path in asked["files"]:
    try:
        with open(path, "rb") as file:
            compile(file.read(), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        faults[path] = [getattr(error, "lineno", 1) or 1, getattr(error, "msg", str(error))]
    except Exception:
        pass
for name in asked["names"]:
    try:
        if importlib.util.find_spec(name) is None:
            missing.append(name)
    except Exception:
        pass
print("\\n" + json.dumps({"version": sys.version.split()[0], "faults": faults, "missing": missing}))
"""
"""For the Python of the job, from 3.6 on. It imports nothing, and writes no __pycache__."""


_OF_SYSTEM = ("/usr/", "/bin/", "/dev/", "/etc/", "/lib", "/opt/", "/proc/", "/sys/")


@dataclass(frozen=True)
class JobPython:
    """The Python that runs the command.

    Attributes:
        name: for messages: "the environment `train-env` of the bundle".
        words: that start it here; None: it is not on this machine.
        packages: their names, where it is not on this machine; empty: not known.
        remedy: how it gets a package, with `{}` for the package's name.
    """

    name: str
    words: tuple[str, ...] | None = (sys.executable,)
    packages: tuple[str, ...] = ()
    remedy: str = "Correct the name, or bring the package to that Python: pip install {}"


@dataclass(frozen=True)
class CommandJob:
    """What the command has in its job.

    Attributes:
        served: what the bundle serves as a Hub.
        gpus: on each node; None: not known.
        is_here: whether this machine has the disks of the job: a login node.
    """

    python: JobPython
    served: Catalogue
    gpus: int | None = None
    is_here: bool = False


@dataclass(frozen=True)
class _Answers:
    """What the Python of the job says.

    Attributes:
        faults: path of a file that it cannot read -> line and message.
        missing: modules that it has not.
        version: of it; empty: it was not asked, and what is missing is known by names alone.
    """

    faults: Mapping[str, tuple[int, str]]
    missing: frozenset[str]
    version: str = ""


def findings(code: OwnCode, job: CommandJob) -> Iterator[Finding]:
    """What the code, its words and its configs ask for, and the job has not.

    The files of the project are read, and the Python of the job is started once, to compile them.
    """
    reached = reach(code)
    said = list(_everything_said(code, reached))
    loggers = {name for one in said for name in _LOGGERS.get(one.text, ())}
    answers = _ask(code.root, job.python, reached, {*map(_top, reached.outside), *loggers})
    yield from _paths(code, reached)
    yield from _syntax(reached, answers)
    yield from _imports(code, reached, answers, job.python)
    # The first place of each; the command's words come before its configs, and these before code.
    for one in {(one.what, one.text): one for one in reversed(said)}.values():
        yield from _asks_for(one, code, job, answers)
    yield from _flags(reached)
    if len(reached.sources) >= MAX_FILES:
        yield note(f"more than {MAX_FILES} files of Python: the others are not read")


def names_on_the_hub(code: OwnCode) -> list[Said]:
    """The repositories that the code, its words and its configs name; each once, by its place."""
    said = _everything_said(code, reach(code))
    of_hub = [one for one in said if one.what in ("models", "datasets", "spaces")]
    named = {(one.what, one.text): one for one in reversed(of_hub) if not _is_path(code, one.text)}
    return list(named.values())[::-1]


def _paths(code: OwnCode, reached: Reached) -> Iterator[Finding]:
    """Files that the command names, and that do not travel."""
    for script in reached.scripts:
        if script not in code.paths and not _ELSEWHERE.search(script):
            scripts = [path for path in code.paths if path.endswith(".py")]
            yield _error_if(True, _absent(code, script, scripts))
    for option, value in values(code.words):
        path = code.path(value)
        is_dotted = re.match(r"\.\.?/", value) is not None
        is_text = PurePosixPath(path).suffix in (*_CODE, *_CONFIGS)
        is_file = is_text or PurePosixPath(path).suffix in _DATA
        if _ELSEWHERE.search(value) or _WRITTEN.search(option):
            continue
        travels = any(f"/{one}/".startswith(f"/{path}/") for one in code.paths)
        if travels or path in ("", *reached.scripts):
            continue
        is_read = is_dotted or (is_file and (_READ.search(option) if option else is_text))
        # A script may look for it in a folder of its own, as yolov5 does in `data`.
        is_elsewhere = any(p.endswith(f"/{value}") for p in code.paths)
        is_named = is_dotted or is_file or (option and "/" in value)
        if path.startswith(".."):
            yield _outside(code, value, path)
        elif (is_named and (code.root / path).exists()) or (is_read and not is_elsewhere):
            is_sure = is_text and _CONFIG.search(option or "conf")
            yield _error_if(bool(is_sure), _absent(code, path, sorted(code.paths)))


def _outside(code: OwnCode, value: str, path: str) -> Finding:
    """A path that leads out of the project."""
    name = _name_of_asset(PurePosixPath(path).stem)
    return warning(
        f"the command names {value}, which is outside the project {code.root}: it does not travel.",
        "Copy it into the project. Or write a larger `code:` in the run file. Or, of data or a "
        f"model: below `assets:` of the manifest, {name}: {{path: FOLDER}}.",
    )


def _absent(code: OwnCode, path: str, known: Sequence[str]) -> Finding:
    if (code.root / path).exists():
        return warning(
            f"the command names {path}, which does not travel: git ignores it, or it is outside.",
            f"In the run file, write include: [{scalar(path)}]; what is large is an asset "
            "(`path:` in the manifest).",
        )
    if (code.root.parent / path).exists():
        return warning(
            f"the command names {path}, which is beside the project {code.root.name}/, not in it.",
            "Write in the run file: code: ..",
        )
    return warning(
        f"the command names {path}, and the project has no such file.",
        suggest(path, known, "Check the path: it begins at the project's folder."),
    )


def _error_if(is_sure: bool, found: Finding) -> Finding:
    """What is found; an error, if it ends the command for sure."""
    return usage_error(found.message, found.remedy) if is_sure else found


# What the Python of the job says.


def _ask(root: Path, python: JobPython, reached: Reached, names: Collection[str]) -> _Answers:
    """Compiles files and looks for modules in the Python of the job.

    Where it is not on this machine, this Python and the names of the packages answer.
    """
    files = {str(root / path): path for path in reached.sources}
    try:
        if python.words is not None:
            done = subprocess.run(
                [*python.words, "-B", "-W", "ignore", "-c", _ASK],
                input=json.dumps({"files": list(files), "names": sorted(names)}),
                capture_output=True,
                text=True,
                cwd="/",  # a file of the project is no module of the question
                timeout=CHILD_S,
                check=True,
            )
            answer = json.loads(done.stdout.splitlines()[-1])
            faults = {files[path]: tuple(fault) for path, fault in answer["faults"].items()}
            return _Answers(faults, frozenset(answer["missing"]), answer["version"])
    except (OSError, ValueError, LookupError, subprocess.SubprocessError):
        pass  # it does not start here: another check says so
    own = {path: source.problem for path, source in reached.sources.items() if source.problem}
    have = {_plain(name) for name in python.packages}
    have |= {"torch"} if "pytorch" in have else set()
    # `opencv-python-headless` and `faiss-gpu` have the modules of their namesakes.
    stems = {
        name: (_plain(name), _plain(_pip_name(name)).removesuffix("-python")) for name in names
    }
    missing = {name for name in names if not any(p.startswith(stems[name]) for p in have)}
    return _Answers(own, frozenset(missing - sys.stdlib_module_names if have else ()))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip_name(module: str) -> str:
    """The package that brings a module."""
    return _PIP_NAMES.get(module, module)


def _top(said: Said) -> str:
    """The package that an import names."""
    return said.text.partition(".")[0]


def _syntax(reached: Reached, answers: _Answers) -> Iterator[Finding]:
    """Files that the Python of the job cannot read."""
    for path, (line, message) in answers.faults.items():
        version = answers.version or sys.version.split()[0]
        remedy = "Correct this line: no Python that is known here can read it."
        if answers.version and reached.sources[path].problem is None:
            newer = ".".join(sys.version.split(".")[:2])
            remedy = f"It is for a newer Python: ask for python={newer} in the environment."
        found = warning(f"{path}:{line}: Python {version} cannot read it: {message}.", remedy)
        yield _error_if(reached.sure[path] == 2, found)


def _imports(
    code: OwnCode, reached: Reached, answers: _Answers, python: JobPython
) -> Iterator[Finding]:
    """Modules that neither the project nor the Python of the job has."""
    for said in _surest(reached, reached.lost, lambda said: said.more[0]):
        path = said.more[0]
        if any(one.startswith(f"{path}.") for one in code.paths):
            continue  # a compiled part, or the source of one
        where = f"{said.place}: imports `{path.replace('/', '.')}`"
        remedy = "Correct the name, or add the file to the project."
        yield _left_behind(code, where, [PurePosixPath(path)]) or usage_error(
            f"{where}, and the project has no such module.", remedy
        )
    for said in _surest(reached, reached.outside, _top):
        name = _top(said)
        if name not in answers.missing:
            continue
        where = f"{said.place}: imports `{name}`"
        folder = _folder_of(name, code.paths)
        found = warning(
            f"{where}, and {python.name} does not have it.", python.remedy.format(_pip_name(name))
        )
        if folder:
            found = warning(
                f"{where}, which is in the folder `{folder}`, where Python does not look.",
                f"Begin the command with PYTHONPATH={folder}; or stage it as a wheel.",
            )
        left = _left_behind(code, where, [PurePosixPath(f, name) for f in reached.folders])
        yield left or _error_if(bool(answers.version) and said.sure == 2, found)


def _surest(reached: Reached, said: Iterable[Said], key: Callable[[Said], str]) -> list[Said]:
    """Of each module the import that runs most surely, without those that may never run."""
    run = [one for one in said if one.sure and one.owner in ("", *reached.calls)]
    best = {key(one): one for one in sorted(run, key=lambda one: (one.sure, -one.line))}
    return [*best.values()]


def _left_behind(code: OwnCode, where: str, modules: Iterable[PurePosixPath]) -> Finding | None:
    """The error of a module that is on this machine and does not travel; None: it is not here."""
    for path in (one for module in modules for one in (module.with_suffix(".py"), module)):
        if (code.root / path).is_file() or any((code.root / path).glob("*.py")):
            return usage_error(
                f"{where}, and {path} does not travel: git ignores it.",
                f"In the run file, write include: [{scalar(str(path))}]; or: git add -f "
                f"{quoted(path)}",
            )
    return None


def _folder_of(name: str, paths: frozenset[str]) -> str:
    """The folder of the project that has a module of this name; empty: there is none."""
    ends = (f"/{name}/__init__.py", f"/{name}.py")
    found = [
        f"/{path}".removesuffix(end) for path in paths for end in ends if f"/{path}".endswith(end)
    ]
    return min((folder[1:] or "." for folder in found), key=len, default="")


# What the command, its configs and its code say.


def _everything_said(code: OwnCode, reached: Reached) -> Iterator[Said]:
    """All that is said; without the defaults that the command or a config replaces."""
    yield from (Said("sets", name, more=(value,)) for name, value in code.variables.items())
    calls, given = reached.calls, set[str]()
    for option, value in (*values(code.words), *values(reached.shell)):
        given.add(option)
        yield from _of_value(Said(option, value), calls)
        path = code.path(value)
        if path in code.paths and PurePosixPath(path).suffix in _CONFIGS:
            for key, inner, line in _config(code.root / path):
                given.add(key)
                yield from _of_value(Said(key, str(inner), path, line), calls)
    for path, source in reached.sources.items():
        for said in source.said:
            is_used = path in reached.scripts or said.owner in ("", *calls)
            if reached.sure[path] and is_used and (said.option or None) not in given:
                yield said


def _of_value(said: Said, calls: Collection[str]) -> Iterator[Said]:
    """What an option, or a key of a config, says with its value.

    Args:
        calls: what the code calls. Without `load_dataset`, a name is one of its own datasets.
    """
    key, text = said.what, said.text
    is_bare = key.endswith("name_or_path") or (key == "dataset_name" and "load_dataset" in calls)
    if (kind := kind_of_key(key)) and (is_bare or REPOSITORY.fullmatch(text)):
        yield said._replace(what=kind)
    # Anything else that is here, such as /tmp/rows.csv, is not there either.
    is_absolute = text.startswith("/") and not text.startswith(_OF_SYSTEM)
    is_here = is_absolute and os.path.exists(text)  # noqa: PTH110 - a text may be too long for Path
    if OF_LAPTOP.fullmatch(text) or text.startswith("~/") or is_here:
        yield said._replace(what="path")
    if key == "report_to":
        yield said
    if key == "push_to_hub" and text.lower() in ("", "true", "1"):
        yield said._replace(what="needs_hub", text="push_to_hub")


def _config(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Keys, values and lines of a YAML, JSON or TOML file; nothing of one that cannot be read."""
    try:
        text = path.read_text("utf-8") if path.stat().st_size <= MAX_CONFIG else ""
        tree = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
        known = list(_walk("", tree))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return
    for key, value in known:
        yield key, value, text.count("\n", 0, max(text.find(str(value)), 0)) + 1


def _walk(key: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, list):
        for one in tree:
            yield from _walk(key, one)
    elif isinstance(tree, dict):
        for name, value in tree.items():
            if REPOSITORY.fullmatch(str(name)):  # `dataset_mixer: {org/name: 0.5}`
                yield key, name
            own = f"{key}_{name}" if name in ("id", "path", "name") else str(name)
            yield from _walk(own, value)
    else:
        yield key, tree


def _asks_for(one: Said, code: OwnCode, job: CommandJob, answers: _Answers) -> Iterator[Finding]:
    """What is said, if the job has it not."""
    text, value = one.text, "".join(one.more)
    match one.what:
        case "models" | "datasets" | "spaces" if not _is_path(code, text):
            if job.served.find(one.what, text) is None:
                yield _not_served(one, job.served)
        case "path":
            yield from _of_laptop(one, job)
        case "sets" if not one.more:
            return
        # Before the program, these do no harm: `exec` sets its own in each Python.
        case "sets" if text == "HF_ENDPOINT" and one.path and "127.0.0.1" not in value:
            yield warning(
                f"{one.place}: sets HF_ENDPOINT, so the script does not ask the bundle.",
                "Take this line out of the script; a shell's own HF_ENDPOINT may stay.",
            )
        case "sets" if text in _OFFLINE and one.path and value.lower() in _TRUE:
            yield warning(
                f"{one.place}: sets {text}, so `load_dataset` does not ask the bundle.",
                "Take this line out of the script: the job has no other Hub than the bundle.",
            )
        case "sets" if text == "CUDA_VISIBLE_DEVICES" and (job.gpus or 0) > len(
            [*filter(None, value.split(","))]
        ):
            yield warning(
                f"{one.place}: sets {text} to {value!r}, and the job has {job.gpus} GPUs per node.",
                "Take it out: Slurm and the launcher set it.",
            )
        case "report_to" if text in _LOGGERS and answers.missing >= {*_LOGGERS[text]}:
            yield warning(
                f"{one.place}: reports to {text}, and {job.python.name} does not have it.",
                f"{job.python.remedy.format(text)}; or without it: --report_to none",
            )
        case "needs_hub":
            yield warning(
                f"{one.place}: {text} needs the Hub itself, which a compute node does not reach.",
                "Take it out, save into a folder, and upload that from a machine with internet.",
            )


def _is_path(code: OwnCode, name: str) -> bool:
    """Whether a value is a folder or file of the project, and not the name of a repository."""
    first = name.partition("/")[0]
    is_file = name.endswith((*_CODE, *_CONFIGS, *_DATA, *_WEIGHTS))
    is_folder = first.lower() in _FOLDERS or (code.root / code.path(first)).exists()
    return is_file or is_folder or re.fullmatch(r"[\w.-]+(/[\w.-]{3,})?", name) is None


def _not_served(one: Said, served: Catalogue) -> Finding:
    """A repository that the bundle does not serve, or an asset of its own by a wrong name."""
    missing, _, remedy = why_missing(served, one.what, one.text).partition("; ")
    if one.text.startswith(f"{OWN}/"):  # an asset that came from no Hub
        remedy = suggest(one.text, served.own_names, "See stage show BUNDLE.")
    return warning(f"{one.place}: asks for the {missing}.", remedy or "See stage show BUNDLE.")


def _of_laptop(one: Said, job: CommandJob) -> Iterator[Finding]:
    """A path of one person's machine."""
    exists = Path(one.text).expanduser().exists()
    # Typed on a laptop, a path in /home that is not there may be one of the cluster.
    may_be_right = not job.is_here and not one.path and one.text.startswith(("/home/", "~"))
    if exists and not job.is_here:
        name = _name_of_asset(Path(one.text).stem)
        yield warning(
            f"{one.place}: names {one.text}, a path of this machine.",
            f"In the manifest, below `assets:`, write {name}: {{path: {scalar(one.text)}}}, and "
            f"read it from $AIRLIFT_BUNDLE/data/files/{name}; or copy it into the project.",
        )
    elif not exists and not may_be_right:
        yield warning(
            f"{one.place}: names {one.text}, which is not on this machine.",
            "Give a path that begins at the project's folder, or one of the cluster.",
        )


def _name_of_asset(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-") or "asset"


def _flags(reached: Reached) -> Iterator[Finding]:
    """Options of the command that its script does not know."""
    script = reached.scripts[0] if len(reached.scripts) == 1 else ""
    known = reached.sources[script].flags if script in reached.sources else ()
    for word in reached.arguments if known else ():
        flag = word.partition("=")[0]
        # argparse takes the beginning of an option's name, too.
        is_known = any(name.startswith(flag) for name in (*known, "--help"))
        if re.match(r"--\w", flag) and not is_known:
            yield usage_error(
                f"the command gives {flag}, and {script} has no such option.",
                suggest(flag, known, "The script lists its options with --help."),
            )
