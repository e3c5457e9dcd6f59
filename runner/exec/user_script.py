"""`runner exec`: a user's own script, unmodified and offline, with the Hub names that it uses.

Two things replace the Hub (docs/adr/0011). A cache of links into the bundle, in the layout of
huggingface_hub's `file_download.py` (`models--org--name/{refs/main, snapshots/<commit>/<file>}`):
`from_pretrained` and `snapshot_download` read it without a copy, and several ranks may write the
same cache at the same time. And `stage serve` on loopback, which answers what a cache cannot (the
list of files, the splits of a dataset).

Then this process *becomes* the script: exit code, signals and streams are the script's own. The
server was forked before (`serve_beside`), without a terminal and without a parent that waits for
it. It watches the script by its process number, and ends when the script ends for any reason.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from runner import offline
from runner.disks import (
    cache_variables,
    clear_builds,
    job_folder,
    local_folder,
    own_folder,
    read_mounts,
    user_variables,
)
from runner.exec import last_words
from runner.exec.by_hand import check_all_nodes, note_on_tasks
from runner.from_stage import (
    UsageError,
    WrongValueError,
    human_count,
    print_line,
    read_start,
    suggest,
    write_atomically,
)
from runner.inputs import (
    check_known_damage,
    check_names_and_sizes,
    check_site,
    running_tree,
)
from runner.inputs.hub import HUB_IN_CHILDREN, open_hub
from runner.isolation import isolate, note_for_script
from runner.job.commands import as_words, shell_script
from runner.launch.ranks import variables_between_nodes
from runner.processes import birth_time, is_alive
from stage.serve.catalogue import ENTRY_KEYS, ServedRepository
from stage.serve.children import with_hub


def write_hub_cache(repositories: Mapping[tuple[str, str], ServedRepository], folder: Path) -> None:
    """Writes the cache; existing files stay.

    Args:
        repositories: as in `Hub`.
        folder: the folder for HF_HUB_CACHE.
    """
    for (kind, name), repository in repositories.items():
        # `models--org--name`, as in huggingface_hub's `repo_folder_name`.
        root = folder / "--".join([kind, *name.split("/")])
        for version in repository.versions:
            for path, file in version.files.items():
                _put(file.content, root / "snapshots" / version.commit / path)
            for revision in version.revisions - {version.commit}:
                _put(version.commit.encode(), root / "refs" / revision)


def _put(content: Path | bytes, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        write_atomically(target, content)
        return
    # Renamed into place, which replaces the broken link of a bundle that was moved.
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.symlink_to(content)
    aside.replace(target)


def tell(text: str) -> None:
    """Prints a line about the script, on stderr."""
    print_line(f"runner exec: {text}", err=True)


LOOK_EVERY_S = 0.5  # one look is one stat of /proc
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def serve_beside(
    program: int,
    serve: Callable[[], None],
    afterwards: Callable[[], None],
    between: Callable[[], None] = lambda: None,
) -> None:
    """Starts a server that runs as long as a process, also after its `exec`.

    Args:
        program: the process: the calling one, or another.
        serve: serves until its process ends. What it prints to stderr comes to ours.
        afterwards: called in the server's process when the program has ended.
        between: called in the server's process between two looks at the program.
    """
    born = birth_time(program)  # a program keeps it when it becomes another
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    # If this child returned, it would run the caller's code a second time.
    try:
        # A new session: Ctrl-C is for the program, which may read a file while it cleans up.
        os.setsid()
        if not os.fork():
            _supervise(serve, lambda: is_alive(program, born), afterwards, between)
    finally:
        os._exit(0)


def _supervise(
    serve: Callable[[], None],
    runs: Callable[[], bool],
    afterwards: Callable[[], None],
    between: Callable[[], None],
) -> None:
    # Slurm signals each process of a step, and the program has minutes to save.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # A reader of the caller's stdout must not wait for this process.
    os.dup2(2, 1)
    os.chdir("/")
    threading.Thread(target=serve, daemon=True).start()
    while runs():
        between()
        time.sleep(LOOK_EVERY_S)
    afterwards()


LAST_WORDS = Path(last_words.__file__)


def run(command: Sequence[str], bundle: Path, environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by `command`, for which the bundle is the Hub. Does not return.

    Raises:
        UsageError: the program does not exist, the command would start processes on other nodes, or
            run on one of several; another user owns the folder of the caches; or the site's torch,
            on which this environment was made, is another one by now.
        DamageError: the bundle is known to be damaged, or its names or sizes are wrong.
    """
    before = f"runner exec --bundle {shlex.quote(str(bundle))} --"
    program = program_of(command, before, environ)
    check_site()
    script, text = shell_script(command)
    check_all_nodes(command, bundle, environ, text)
    lines = (note_on_tasks(command, environ, text), _note_on_line_ends(script, text))
    variables = serve_bundle(bundle, environ, program, lines)
    os.execve(program, list(command), variables)


def serve_bundle(
    bundle: Path,
    environ: Mapping[str, str],
    program: str,
    lines: Sequence[str] = (),
    say: Callable[[str], None] = tell,
    process: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Serves the bundle as the Hub of a process, beside it and as long as it lives.

    Args:
        environ: the variables of that process.
        program: the file that it runs.
        lines: notes on its command.
        say: prints what the server says, such as what is asked for and not here.
        process: its number; None: this one, which becomes it.
        between: called in the server's process between two looks at that process.

    Returns:
        The variables with which it finds the Hub.

    Raises:
        UsageError: another user owns the folder of the caches.
        DamageError: the bundle is known to be damaged, or its names or sizes are wrong.
    """
    _check_bundle(bundle.resolve(), environ)
    of_script = [*sys.path]
    isolate(dict(environ), lambda line: None)  # the server takes nothing from PYTHONPATH
    hub = open_hub(bundle, say)
    base = own_folder(job_folder(environ))
    compiled, avoided = local_folder(environ, read_mounts())
    own_folder(compiled)
    lock = _in_use(base)
    folder = base / "exec" / hub.bundle_id[:12]
    serve_beside(process or os.getpid(), hub.serve, _cleaner(base, lock, environ), between)
    sys.path[:] = of_script
    clear_builds(compiled)  # the server, which ends later than the script, does not use it
    write_hub_cache(hub.repositories, folder / "hub")
    of_nodes, notes = variables_between_nodes(environ)
    variables = environment(environ, hub.address, folder, compiled) | of_nodes
    variables["AIRLIFT_BUNDLE"] = str(bundle.resolve())
    python = folder / "python"
    python.mkdir(parents=True, exist_ok=True)
    for source, name in ((HUB_IN_CHILDREN, "sitecustomize"), (LAST_WORDS, last_words.NAME)):
        write_atomically(python / f"{name}.py", source.read_bytes())
    in_prefix = Path(program).resolve().is_relative_to(Path(sys.prefix).resolve())
    if in_prefix and running_tree() is not None:
        # An environment from a bundle contains all packages that it needs.
        variables.setdefault("PYTHONNOUSERSITE", "1")
    # A repository has several names.
    served = {
        (kind, tuple(v.commit for v in one.versions)) for (kind, _), one in hub.repositories.items()
    }
    counts = Counter(ENTRY_KEYS[kind] for kind, _ in sorted(served))
    parts = [human_count(number, kind) for kind, number in counts.items()]
    about = (
        f"bundle {hub.bundle_id[:12]} is the Hub at {hub.address} ({', '.join(parts)}); "
        f"caches: {folder}"
    )
    if environ.get("SLURM_PROCID", "0") == "0":
        own = {name: variables[name] for name in ("PYTHONNOUSERSITE",) if name in variables}
        said = (
            note_for_script({**environ, **own}),
            about,
            avoided,
            _note_on_loggers(environ),
            *lines,
            *notes,
        )
        for note in filter(None, said):
            tell(note)
    return variables


def environment(
    environ: Mapping[str, str], address: str, folder: Path, compiled: Path
) -> dict[str, str]:
    """The script's variables: ours, the bundle as the Hub, and caches on this node's disk. Pure.

    Args:
        address: the URL of the server.
        folder: the folder of this bundle's caches, and of `runner.exec.last_words`. If
            HF_DATASETS_CACHE is set, the datasets cache is a folder in that instead: Arrow copies
            are as large as the data, and a node's own disk may be small.
        compiled: the folder of compiler caches.
    """
    of_hub = {
        "HF_ENDPOINT": address,
        "HF_HUB_CACHE": str(folder / "hub"),
        "HUGGINGFACE_HUB_CACHE": str(folder / "hub"),  # its name before huggingface_hub 0.17
    }
    variables = with_hub(environ, of_hub)
    variables |= {**cache_variables(variables, compiled), **user_variables(variables)}
    theirs = environ.get("HF_DATASETS_CACHE")
    datasets = Path(theirs) / f"airlift-{folder.name}" if theirs else folder / "datasets"
    quiet = {
        name: value for name, value in offline.VARIABLES.items() if not name.endswith("_OFFLINE")
    }
    return {
        **variables,
        **quiet,
        "HF_DATASETS_CACHE": str(datasets),
        "HF_EVALUATE_CACHE": environ.get("HF_EVALUATE_CACHE") or str(folder / "evaluate"),
        "HF_MODULES_CACHE": environ.get("HF_MODULES_CACHE") or str(folder / "modules"),
        "HF_HUB_DISABLE_XET": "1",
        "WANDB_MODE": environ.get("WANDB_MODE") or "offline",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(folder / "python"), environ.get("PYTHONPATH")))
        ),
        # Otherwise `load_dataset("csv", ...)` first connects to a host on the internet.
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    }


def _note_on_loggers(environ: Mapping[str, str]) -> str:
    """One line where wandb is installed, and would otherwise wait for its server for hours."""
    if environ.get("WANDB_MODE") or importlib.util.find_spec("wandb") is None:
        return ""
    return (
        "WANDB_MODE=offline, because a compute node has no internet: `wandb sync` uploads the run "
        "later (to change it: export WANDB_MODE=online)"
    )


def _note_on_line_ends(script: str, start: bytes) -> str:
    """One line on a shell script with the line ends of Windows, in which commands end in `\\r`."""
    if not script or b"\r\n" not in start:
        return ""
    return f"{script} has the line ends of Windows: sed -i 's/\\r$//' {shlex.quote(script)}"


def program_of(command: Sequence[str], before: str, environ: Mapping[str, str]) -> str:
    """The file of a command's program.

    Args:
        before: what stands before the command where it is typed.

    Raises:
        UsageError: it is not there, or no kernel starts it.
    """
    first = command[0]
    found = shutil.which(first, path=environ.get("PATH"))
    if found is not None:
        _check_can_start(Path(found))
    elif "/" in first and Path(first).is_file() and not first.endswith(".py"):
        raise UsageError(
            f"{first} is there, and may not be executed.",
            f"chmod +x {shlex.quote(first)}; or name what reads it: -- bash {first}",
        )
    if found is None:
        known = ("python", "python3", "torchrun", "accelerate", "deepspeed", "bash")
        raise UsageError(
            f"{first}: no such program on PATH.",
            suggest(first, {*known} - {first}, f"{before} {_what_was_meant(command)}"),
        )
    return found


def _what_was_meant(command: Sequence[str]) -> str:
    """The command that a shell would have read in these words."""
    first, *rest = command
    try:
        words = [*as_words(first), *rest]
    except WrongValueError:  # a quote that does not end
        words = [*command]
    if words[0].endswith(".py"):
        words.insert(0, "python")
    return shlex.join(words) if len(words) > len(command) else "python their_script.py ..."


def _check_can_start(program: Path) -> None:
    """Refuses a script that no kernel starts. Its own error is "No such file or directory".

    Raises:
        UsageError: the line ends of Windows, an interpreter that is not here, or no first line.
    """
    try:
        start = read_start(program, 256)
    except OSError:  # it may be executed, and not read
        return
    first = start.partition(b"\n")[0]
    if b"\0" in start or not start:  # a program of the machine
        return
    if not start.startswith(b"#!"):
        raise UsageError(
            f"{program} does not say what reads it: it does not begin with `#!`.",
            f"-- bash {program}",
        )
    if first.endswith(b"\r"):
        raise UsageError(
            f"{program} has the line ends of Windows, so the system looks for a program "
            f"`{first[2:].strip().decode(errors='replace')}\\r`.",
            f"sed -i 's/\\r$//' {shlex.quote(str(program))}",
        )
    words = first[2:].split()
    if words and not Path(os.fsdecode(words[0])).exists():
        raise UsageError(
            f"{program} asks for {os.fsdecode(words[0])} in its first line, which is not here.",
            f"Name what reads it: -- python {program}, or -- bash {program}",
        )


def _check_bundle(bundle: Path, environ: Mapping[str, str]) -> None:
    """Checks that the bundle is not damaged, as far as names and sizes show it.

    In a Slurm step one task compares names and sizes for all, because that is many `stat` calls.

    Raises:
        DamageError: it is damaged; names the damaged files.
    """
    check_known_damage(bundle, environ)
    if environ.get("SLURM_PROCID", "0") == "0":
        check_names_and_sizes(bundle)


def _in_use(base: Path) -> int:
    """Marks the caches as used, as long as the returned descriptor is open in any process.

    On a disk without locks (Lustre mounted without flock, NFS without lockd) it is unknown who uses
    them; then `_cleaner` gets no lock either, and they are never removed.
    """
    descriptor = os.open(base / "exec.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        tell(
            f"{base} takes no locks ({error.strerror}), so its caches stay there after the job; "
            "with TMPDIR on the node's own disk they are removed"
        )
    return descriptor


def _cleaner(base: Path, lock: int, environ: Mapping[str, str]) -> Callable[[], None]:
    """Returns the cleanup: the last script of a job on this node removes the job's caches.

    Outside a job the caches stay for the next script.
    """

    def clean() -> None:
        if "SLURM_JOB_ID" not in environ:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another script of this job uses them, or that is not known
            return
        shutil.rmtree(base / "exec", ignore_errors=True)

    return clean
