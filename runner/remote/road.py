"""What a submit to a cluster is: a run file, its manifest and bundle here, and a folder there.

RUN, clusters.yaml -> `Road` -> the words for `go.sh` (`.airlift/plan`), and the steps as a
person would type them; the cluster is not asked. The project of a command is packed here, as
`submit` packs it into a run folder, and unpacked there for `check`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runner.config.command_config import CommandConfig, has_command, names_a_bundle
from runner.config.job_config import JobConfig
from runner.config.run_config import RunConfig
from runner.errors import say
from runner.from_stage import (
    RUN_FILE,
    UsageError,
    __version__,
    quoted,
    reading_yaml,
    suggest_path,
)
from runner.inputs.staged import Here
from runner.job.devices import check_precision_on
from runner.run_folder.layout import WORK, RunFolder
from runner.run_folder.project import Project, find_root, list_project, pack
from stage.bundle.bundle import holds_bundle
from stage.bundle.verifier import VERIFIER
from stage.carry.clusters import Cluster, find_cluster
from stage.lock.manifest import Manifest

ENVS, OUTPUT, CODE = "envs", "output", "code"
"""Folders in a cluster's folder; what `go.sh` keeps is in `.airlift`."""
_GO = Path(__file__).with_name("go.sh")
NO_RUNNER = "runner --version   # must work there: no environment asset or slurm.setup brings it"
_OF_CLUSTER = {
    "slurm.partition": "partition",
    "slurm.options.account": "account",
    "slurm.time": "time",
    "slurm.modules": "modules",
    "slurm.setup": "setup",
}
"""Key of a run file -> what clusters.yaml has for it, where the run file is silent."""


@dataclass(frozen=True)
class Road:
    """One run on its way to one cluster.

    Attributes:
        overrides: the `--set` texts of the user.
        axes: the `--array` texts.
        files: name there -> the text of it: the run file first, then what it names.
        code: the project of a command; None: a training.
        kept: the folder with the bundle of a command that needs none.
    """

    config: JobConfig
    cluster: Cluster
    here: Here
    overrides: tuple[str, ...]
    axes: tuple[str, ...]
    files: dict[str, str]
    code: Code | None
    kept: TemporaryDirectory[str] | None = None

    @staticmethod
    def of(
        run: Path,
        to: str,
        bundle: Path,
        manifest: Path | None = None,
        overrides: Sequence[str] = (),
        axes: Sequence[str] = (),
        *,
        add: bool = False,
    ) -> Road:
        """Reads what a submit needs of this machine.

        With `add` it has a manifest, to which more is added.
        """
        cluster = find_cluster(to, run.parent)
        config = load_run(run, overrides)
        kept = None
        needs_none = _needs_no_bundle(config) and not holds_bundle(bundle) and not add
        if manifest is None and needs_none:
            kept = TemporaryDirectory(prefix="airlift-")
            say("no manifest: the command gets nothing of a Hub")
            here = Here.of_nothing(Path(kept.name))
        elif manifest is None and config.manifest is None:
            raise UsageError(
                f"{run}: it names no manifest, so it is not known what to send.",
                "Write into it: manifest: ../manifests/YOURS.yaml   (relative to the run file); "
                "or give --manifest FILE.",
            )
        else:
            path = manifest or _near(run.parent / str(config.manifest))
            if not path.is_file():
                where = "--manifest" if manifest else config.place("manifest")
                raise UsageError(f"{where}: {path}: no such file.", suggest_path(path))
            here = Here(Manifest.load(path), bundle)
            here.check_fits(cluster)
        files, code = {config.path.name: config.path.read_text("utf-8")}, None
        if isinstance(config, RunConfig):
            check_precision_on(config, [cluster.profile] if cluster.profile else [])
            files |= _ds_config(config)
        if isinstance(config, CommandConfig):
            # Not what this road writes: then the second submit would be of another project.
            ours = (Path(OUTPUT), bundle, *here.made, cluster.file, cluster.profile)
            code = Code.of(config, [path for path in ours if path is not None])
        return Road(config, cluster, here, tuple(overrides), tuple(axes), files, code, kept)

    @property
    def output(self) -> str:
        """The run folder there, relative to the cluster's folder."""
        return f"{OUTPUT}/{self.config.name}"

    @property
    def named(self) -> str:
        """RUN for `status`, `logs` and `pull`: the run file, unless `--set` gave another name."""
        is_set = any(text.startswith("name=") for text in self.overrides)
        return quoted(self.config.name if is_set else self.config.path)

    @cached_property
    def environment(self) -> str | None:
        """The environment asset that everything there runs in; None: `setup` lines bring it."""
        if self.config.environment is not None:
            return self.config.environment.asset
        return next(iter(self.here.environments()), None)

    @property
    def surroundings(self) -> tuple[str, ...]:
        """The lines that the job's shell runs first."""
        modules = (f"module load {shlex.quote(name)}" for name in self._chosen("slurm.modules"))
        return (*modules, *self._chosen("slurm.setup"))

    def _chosen(self, key: str) -> Any:
        """Of the run file, if it has the key, be it `[]`; else of the cluster."""
        name, slurm = _OF_CLUSTER[key], self.config.slurm
        if key not in self.config.given:
            return getattr(self.cluster, name)
        return getattr(slurm, name, slurm.options.get(name))

    @property
    def options(self) -> list[str]:
        """The options of `runner check` and `runner submit` there."""
        texts = list(self.overrides)
        for key, name in _OF_CLUSTER.items():
            value = getattr(self.cluster, name)
            if value and key not in self.config.given:
                texts.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
        for name, value in self.cluster.options.items():
            if (key := f"slurm.options.{name}") not in self.config.given:
                texts.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
        if self.code is not None:
            texts.append(f"code=../{self.code.folder}/{WORK}")  # relative to the run file there
        return [word for text in texts for word in ("--set", text)]

    @property
    def for_submit(self) -> list[str]:
        """The options of `runner submit` alone."""
        return [word for axis in self.axes for word in ("--array", axis)]

    @property
    def env_facts(self) -> dict[str, Any]:
        """Of the environment in the bundle here: `tree`, `size`; empty: none, or not fetched."""
        return self.here.env_facts(self.environment) if self.environment else {}

    @property
    def env_folder(self) -> str:
        """The folder of the environment there; empty: `setup` lines bring it."""
        if self.environment is None:
            return ""
        return f"{ENVS}/{self.environment}-{str(self.env_facts.get('tree', 'DIGEST'))[:16]}"

    def plan(self, bundle_id: str) -> dict[str, str]:
        """The plan for `go.sh`, without its walk.

        RUNS is the folder of `files` there. It has a digest of all that makes the job in its name:
        so no other submit writes to it, and the script of a job says which plan made it.
        """
        slurm = self.config.slurm
        job = {
            "RUN": self.config.path.name,
            "OUTPUT": self.output,
            "BUNDLE_ID": bundle_id,
            "ENVIRONMENT": self.environment or "",
            "SETUP": "\n".join(self.surroundings),
            "OPTIONS": shlex.join(self.options),
            "SUBMIT": shlex.join(self.for_submit),
            "INPUTS": self.inputs,
            "CODE": self.code.folder if self.code else "",
        }
        return {
            **job,
            "RUNS": f"runs-{sha256_of(json.dumps(job))[:16]}",
            "ENV_DIGEST": str(self.env_facts.get("tree", "")),
            "VERIFY": self.cluster.verify,
            "AIRLIFT": __version__,
            "PARTITION": self._chosen("slurm.partition") or "",
            "ACCOUNT": str(self._chosen("slurm.options.account") or ""),
            "TIME": self._chosen("slurm.time") or "",
            "SBATCH": shlex.join(self.cluster.sbatch_words(slurm.options)),
            "GPUS": f"gpu:{slurm.gpus_per_node}" if slurm.gpus_per_node else "",
        }

    @property
    def inputs(self) -> str:
        """`files`, as sha256sum lists them."""
        return "\n".join(f"{sha256_of(text)}  {name}" for name, text in self.files.items())

    @property
    def runs(self) -> str:
        """The folder of `files` there."""
        locked = self.here.locked_id
        return self.plan(locked)["RUNS"] if locked else "runs-DIGEST"

    def sent(self, plan: Mapping[str, str]) -> dict[str, str]:
        """What `go.sh` needs there besides the bundle: path -> text, the plan at the end."""
        files = {f"{plan['RUNS']}/{name}": text for name, text in self.files.items()}
        return {**files, "go.sh": _GO.read_text("utf-8"), ".airlift/plan": plan_text(plan)}

    def commands(self) -> dict[str, str]:
        """Step -> the command that a person would type for it: here, then there."""
        target, manifest = self.cluster.target, quoted(self.here.manifest.path)
        bundle, run = quoted(self.here.bundle), quoted(f"{self.runs}/{self.config.path.name}")
        folder, (first, *others) = self.env_folder, "\n".join(self.surroundings).split("\n")
        asset = f"sh bundle/data/envs/{self.environment}/bootstrap.sh {folder}"
        by_lines = f"{first or NO_RUNNER}{' ...' if others else ''}"
        active = f". {folder}/activate && " if folder else ""
        check = f"{run} --bundle bundle {shlex.join(self.options)}".rstrip()
        code = {}
        if self.code is not None:
            to = shlex.quote(f"{target}/{self.code.folder}/{WORK}/")
            code = {"code": f"rsync -a {quoted(self.code.project.root)}/ {to}"}
        return {
            "lock": f"stage lock {manifest}",
            "fetch": f"stage fetch {manifest} -o {bundle}",
            "push": f"stage push {bundle} {shlex.quote(f'{target}/bundle')}",
            **code,
            "verify": f"python3 -I bundle/{VERIFIER} bundle",
            "environment": asset if folder else by_lines,
            "check": f"{active}runner check {check}",
            "submit": f"{active}runner submit {check} {shlex.join(self.for_submit)}".rstrip(),
        }


@dataclass(frozen=True)
class Code:
    """The project of a command, packed on this machine for as long as this process lives.

    Attributes:
        project: what travels.
        packed: the folder with `project.tar` and `project.json`.
        digest: of what is in them.
    """

    project: Project
    packed: TemporaryDirectory[str]
    digest: str

    @staticmethod
    def of(config: CommandConfig, leave: Sequence[Path]) -> Code:
        """Packs the project of a run file, without the folders and files of `leave`.

        Raises:
            UsageError, IncompleteError: as `find_root`, `list_project` and `pack`.
        """
        root = find_root(config.project, config.path)
        project = list_project(root, config.include, leave)
        packed = TemporaryDirectory(prefix="airlift-")
        made = RunFolder(Path(packed.name))
        return Code(project, packed, pack(project, made.project, made.packed))

    @property
    def folder(self) -> str:
        """The folder there, relative to the cluster's: runs of one project share it."""
        return f"{CODE}/{self.digest[:16]}"


def _needs_no_bundle(config: JobConfig) -> bool:
    """Whether a run file has a command, and names nothing of a bundle."""
    return isinstance(config, CommandConfig) and not names_a_bundle(config.given)


def plan_text(plan: Mapping[str, str]) -> str:
    """Assignments of sh, as `go.sh` reads them."""
    return "".join(f"{key}={shlex.quote(value)}\n" for key, value in plan.items())


def sha256_of(text: str | bytes) -> str:
    """The digest of a text, as it is written there."""
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()


def load_run(path: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads a run file whose other files are on the cluster."""
    if has_command(path, overrides):
        return CommandConfig.load(path, overrides)
    with reading_yaml(path, RUN_FILE) as (data, _):
        model = data.get("model")
        init = model.get("init") if isinstance(model, dict) else None
    # A folder with weights is there, where an earlier run exported it: `runner check` looks there.
    is_there = isinstance(init, str) and init not in ("pretrained", "scratch")
    is_there |= any(text.startswith("model.init=") for text in overrides)
    if not is_there:
        return RunConfig.load(path, overrides)
    config = RunConfig.load(path, (*overrides, "model.init=scratch"))
    return replace(config, given=config.given - {"model.init"})


def find_run(to: str, run: str) -> tuple[Cluster, str]:
    """What `--to` means, and the name of a run: that of a run file, else as it was given."""
    path = Path(run)
    if path.is_file():
        return find_cluster(to, path), load_run(path).name
    return find_cluster(to, Path()), run


def _near(path: Path) -> Path:
    """The same file by a shorter path: without `x/..`, unless `x` is a link."""
    short = Path(os.path.normpath(path))
    return short if short.exists() and short.resolve() == path.resolve() else path


def _ds_config(config: RunConfig) -> dict[str, str]:
    """The ds_config.json that a run file names: its name there, and its text."""
    if config.engine.config is None:
        return {}
    path, folder = Path(config.engine.config), config.path.parent.resolve()
    if not path.is_relative_to(folder):
        raise UsageError(
            f"{config.place('engine.config')}: engine.config: {path} is not in {folder}, "
            "which alone is sent.",
            f"Move it beside the run file: engine: {{config: {path.name}}}",
        )
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8")}
