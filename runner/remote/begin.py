"""`runner submit --to CLUSTER -- COMMAND`: writes the run file and the manifest of a command.

The project is the git checkout around the working folder, else that folder. The names of the
manifest are read in the code, its configs and the words of the command. What a script computes
shows in the job, and comes by `--add`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from runner.config.command_config import CommandConfig
from runner.from_stage import UsageError, print_line, quoted, write_atomically
from runner.job.commands import LAUNCHERS, as_words, options_of, read_command
from runner.job.own_code import names_on_the_hub
from runner.job.reached_code import OwnCode
from runner.run_folder.project import find_root, list_project
from stage.carry.clusters import Cluster, find_cluster
from stage.environment.spec.profile import Profile
from stage.lock.yaml_lines import scalar
from stage.serve.hub_api import entry

_HEAD = ("# Written by `runner submit --to`; it is yours now.", "format: 1")
RUNS, MANIFESTS = "runs", "manifests"
_SPECS = ("environment.yml", "environment.yaml", "conda.yml", "conda.yaml")


def run_file_of(words: Sequence[str]) -> Path:
    """Where the run file of a command is: `runs/NAME.yaml` of the project, by its script's name."""
    files = [Path(word) for word in words]
    named = [path.stem for path in files if path.suffix in (".py", ".sh")]
    # `python -m package.train`; a config, as of llamafactory-cli; else the program itself
    named += [word.rpartition(".")[2] for before, word in pairwise(words) if before == "-m"]
    named += [path.stem for path in files if path.suffix in (".yaml", ".yml", ".json")]
    name = re.sub(r"[^\w.+-]+", "-", [*named, Path(words[0]).name][0]).strip("-.") or "run"
    root = find_root(None, Path("run.yaml"))
    return Path(os.path.relpath(root / RUNS / f"{name}.yaml"))


def begin(words: Sequence[str], run: Path, to: str, *, dry_run: bool) -> bool:
    """Writes the run file and the manifest of a command that has none; prints them.

    Args:
        run: of `run_file_of`.

    Returns:
        Whether they are there.

    Raises:
        UsageError: the run file is of another command; as for `list_project`.
    """
    if run.exists():
        there = as_words(CommandConfig.load(run).command)
        if list(there) != _from_root(words, run)[1]:
            raise UsageError(
                f"{run}: it is the run file of another command: {shlex.join(there)}",
                f"To submit that: runner submit {quoted(run)} --to {quoted(to)}. To begin anew: "
                f"rm {quoted(run)}",
            )
        return True
    cluster = find_cluster(to, run)
    command, _ = _from_root(words, run)
    manifest = run.parent.parent / MANIFESTS / run.name
    assets = [*_environment(manifest, cluster), *_names(words, run)]
    lines = [*_HEAD]
    files = {}
    if assets or manifest.exists():
        lines.append(f"manifest: {os.path.relpath(manifest, run.parent)}")
    if assets and not manifest.exists():
        files[manifest] = "\n".join([*_HEAD, "assets:", *assets, ""])
    gpus = _gpus(words, cluster)
    files[run] = "\n".join(
        [*lines, f"command: {scalar(command)}", "code: ..", f"slurm: {{gpus_per_node: {gpus}}}", ""]
    )
    for path, text in files.items():
        print_line(
            f"{'would write' if dry_run else 'wrote'} {path}:\n  " + text.replace("\n", "\n  ")
        )
        if not dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
    return not dry_run


def _from_root(words: Sequence[str], run: Path) -> tuple[str, list[str]]:
    """The command as it is typed at the top of the project, and its words there."""
    below = os.path.relpath(Path.cwd(), run.parent.parent.resolve())
    line = shlex.join(words)
    line = line if below == "." else f"cd {quoted(below)} && {line}"
    return line, list(as_words(line))


def _names(words: Sequence[str], run: Path) -> list[str]:
    """The repositories that the project names, as lines below `assets:`, each with its place."""
    root = run.parent.parent.resolve()
    project = list_project(root, (), (Path("output"), Path("bundle")))
    below = os.path.relpath(Path.cwd(), root)
    code = OwnCode(root, frozenset(project.files), tuple(words), "" if below == "." else below)
    lines, taken = list[str](), set[str]()
    for said in names_on_the_hub(code):
        text = entry(said.what, said.text, taken=taken).partition(":\n")[2]
        if text:
            lines += [f"  # {said.place}", *text.splitlines()]
            taken.add(text.partition(":")[0].strip())
    return lines


def _environment(manifest: Path, cluster: Cluster) -> list[str]:
    """The environment's entry; nothing where lines of the cluster bring one, or no file says it."""
    root = manifest.parent.parent
    if cluster.setup or cluster.modules:
        print_line("environment: the lines of clusters.yaml bring it (modules, setup)")
        return []
    found = [root / name for name in _SPECS if (root / name).is_file()]
    if found and cluster.profile:
        spec, profile = (
            os.path.relpath(path, manifest.parent) for path in (found[0], cluster.profile)
        )
        return [f"  env: {{environment: {scalar(spec)}, profile: {scalar(profile)}}}"]
    what = "no profile of the cluster is known" if found else f"the project has no {_SPECS[0]}"
    print_line(f"environment: {what}, so the cluster's own Python runs the command")
    return []


def _gpus(words: Sequence[str], cluster: Cluster) -> int:
    """GPUs of each node: one for each rank of the launcher, else one where the cluster has some."""
    command = read_command(words)
    count = LAUNCHERS[command.launcher].count if command.launcher else ""
    typed = [one.value for one in options_of(command)[0] if one.name == count] if count else []
    if typed and (typed[-1] or "").isdecimal():
        return int(typed[-1] or 0)
    has_gpus = cluster.profile is None or Profile.load(cluster.profile).compute_capability
    return 1 if has_gpus else 0
