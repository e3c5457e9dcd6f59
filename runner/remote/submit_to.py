"""`runner submit RUN --to CLUSTER`: lock, fetch, push; there verify, environment, check, submit.

Each step is printed as the command that a person would type, and is skipped where it is done. So
the same command goes on where an earlier one stopped, whatever stopped it.

With `--to FOLDER` the same road goes by a disk that is carried. The disk gets the bundle, the run
file, the plan and `go.sh`, which takes them into the queue there: `sh go.sh FOLDER`. Every byte is
read back from the disk before it leaves.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from runner.config.command_config import CommandConfig
from runner.config.job_config import EnvironmentConfig
from runner.config.run_config import RunConfig
from runner.disks import disk_type, read_mounts
from runner.errors import say
from runner.from_stage import (
    DamageError,
    IncompleteError,
    StageError,
    UsageError,
    __version__,
    as_shown,
    human_count,
    human_size,
    print_line,
    quoted,
    silent,
    state_folder,
    write_atomically,
)
from runner.inputs import inputs_of_command, resolve
from runner.inputs.clusters import check_room
from runner.job.checks import command
from runner.job.command_run import CommandRun
from runner.job.findings import examine, raise_errors
from runner.job.own_code import JobPython
from runner.job.training_run import TrainingRun
from runner.remote.road import OUTPUT, Road, sha256_of
from runner.remote.there import End, There, plan_digest, sending, states_in, understood, walk
from runner.run_folder.layout import RunFolder
from runner.run_folder.missing import add_to_manifest, entries_in
from stage.bundle.bundle import Bundle
from stage.carry.probe import collect
from stage.carry.push import drop_from_memory, push, run_rsync
from stage.carry.ssh import PushTarget, RemoteShell, connected, log_out
from stage.progress import Reporter

_FAT = ("vfat", "msdos", "fuse.fusefat")
_MOST_ON_FAT = 2**32 - 1  # bytes of a file
_OF_WINDOWS = (*_FAT, "exfat", "fuse.exfat", "ntfs", "ntfs3", "fuseblk")
_NO_NAME = re.compile(
    r'.*[:?*"<>|\\\x00-\x1f].*|.*[. ]|(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?',
    re.IGNORECASE | re.DOTALL,
)
"""A name that such a disk cannot hold ("Naming Files, Paths, and Namespaces", Microsoft Learn)."""


def check_disk(disk: Path, bundle: Path) -> list[str]:
    """Refuses a disk that cannot take a bundle, touching nothing; lines on sizes."""
    if not disk.is_dir():
        raise UsageError(f"{disk}: is no folder here.", "Plug the disk in, and give its folder.")
    files = {file.path: file.size or 0 for file in Bundle.open(bundle).lock.files}
    path, size = max(files.items(), key=lambda file: file[1], default=("", 0))
    kind = disk_type(disk, read_mounts())
    twins = Counter(name.casefold() for name in files)  # there, A and a are one file
    odd = [
        name
        for name in files
        if any(map(_NO_NAME.fullmatch, name.split("/"))) or twins[name.casefold()] > 1
    ]
    if odd and kind in _OF_WINDOWS:
        raise UsageError(
            f"{disk}: a disk with {kind} cannot hold {human_count(len(odd), 'name')} of the "
            f"bundle, such as {as_shown(odd[0])}. Nothing was written.",
            f"Format the disk as ext4 (that erases it), or send by ssh: --to HOST:FOLDER. By hand, "
            f"in one file: tar -cf {quoted(disk / 'bundle.tar')} BUNDLE   (there: tar -xf)",
        )
    if size > _MOST_ON_FAT and kind in _FAT:
        parts = f"tar -c BUNDLE | split -b 3900M - {quoted(disk / 'bundle.tar.')}"
        raise UsageError(
            f"{disk}: is FAT32, where no file may have 4 GiB; {path} has {human_size(size)}. "
            "Nothing was written.",
            f"Format the disk as exFAT or ext4 (that erases it), or send by ssh: --to HOST:FOLDER. "
            f"By hand, in parts: {parts}   (there: cat bundle.tar.* | tar -x)",
        )
    there = {path: disk / "bundle" / path for path in files}
    kept = sum(path.stat().st_size for path in there.values() if path.is_file())
    needed, free = max(0, sum(files.values()) - kept), shutil.disk_usage(disk).free
    if needed > free:
        raise IncompleteError(
            f"{disk}: {human_size(needed)} are to be written, and {human_size(free)} are free.",
            "Free space there, or take a larger disk.",
        )
    return [f"to write: {human_size(needed)}; free on {disk}: {human_size(free)}"]


def write_to_disk(
    disk: Path, bundle: Path, files: Mapping[str, bytes], *, quiet: bool
) -> list[str]:
    """Writes all that the run needs to a disk, and reads it back; lines on what is next.

    `files`: path on the disk -> content: run files, a project, `go.sh` and `.airlift/plan`.
    """
    check_disk(disk, bundle)
    target = PushTarget(None, str(disk.absolute() / "bundle"))
    state = state_folder(os.environ)
    with Reporter(quiet=quiet) as bar:
        done = push(bundle, target, ssh="ssh", delete="all", reporter=bar, quiet=quiet, state=state)
    _check_read([f"bundle/{finding['path']}" for finding in done.report["findings"]], disk)
    sums = [f"{sha256_of(files[name])}  {name}\n" for name in (".airlift/plan", "go.sh")]
    # By this file, go.sh knows that it stands on the disk.
    written = {**files, ".airlift/carried": "".join(sums).encode()}
    before = _run_on(disk)
    for name, data in written.items():
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(disk / name, data)
    drop_from_memory(disk / name for name in written)
    _check_read([n for n, data in written.items() if (disk / n).read_bytes() != data], disk)
    is_other = before not in ("", _run_on(disk))
    return [
        *([f"note: go.sh there took {before}; now it takes this run alone"] if is_other else []),
        f"{disk}: bundle, {', '.join(files)}; every byte was read back",
        f"next: eject it; on the cluster: sh {quoted(disk)}/go.sh FOLDER",
        f"its results: there, sh FOLDER/go.sh --results {quoted(disk)}",
        f"      and here: runner pull RUN --to {quoted(disk)}/",
    ]


def _run_on(disk: Path) -> str:
    """The run folder in the plan on a disk; empty: there is no plan."""
    with suppress(OSError):
        text = (disk / ".airlift/plan").read_text("utf-8", "replace")
        return as_shown(text.partition("\nOUTPUT=")[2].partition("\n")[0])
    return ""


def _check_read(damaged: Sequence[str], disk: Path) -> None:
    """Raises DamageError if anything was read back otherwise than it was written."""
    if damaged:
        raise DamageError(
            f"{disk}: the copy on the disk differs from the original: {as_shown(damaged[0])}.",
            "Take another disk; this one loses bytes.",
        )


DAMAGED = ".airlift/damaged"


def start(
    run: Path,
    to: str,
    bundle: Path,
    manifest: Path | None,
    overrides: Sequence[str],
    axes: Sequence[str],
    *,
    add: bool,
    dry_run: bool,
    logout: bool,
    quiet: bool,
) -> int:
    """Walks the whole road, or shows it.

    With `add`, first what an earlier job missed comes into the manifest.
    """
    road = Road.of(run, to, bundle, manifest, overrides, axes, add=add)
    target = road.cluster.target
    if add:
        _add_missing(road)
        road = Road.of(run, to, bundle, manifest, overrides, axes)
    if dry_run:
        show_road(road)
        return 0
    try:
        with silent(if_=quiet):
            if target.host is None:
                return _to_disk(road, quiet)
            with connected(target) as remote:
                return _submit(remote, road, quiet)
    finally:
        if logout and target.host is not None:
            log_out(target)


def _add_missing(road: Road) -> None:
    """Writes into the manifest here what the job there asked for and its bundle does not have."""
    manifest = road.here.manifest.path
    with connected(road.cluster.target) as remote:
        into = f"cd {remote.inside(road.output)} 2>/dev/null"
        found = remote.ask(f"{into} && cat missing.yaml *=*/missing.yaml 2>/dev/null")
    missing = entries_in(as_shown(found.text))
    added = add_to_manifest(missing, manifest) if missing else []
    what = "the job there asked for nothing that the bundle does not have"
    if missing:
        what = f"added to {manifest}: {', '.join(added)}" if added else f"{manifest} has all of it"
    print_line(what)


def _to_disk(road: Road, quiet: bool) -> int:
    bundle_id = _fetch(road)
    _show(road, "push", False)
    texts = road.sent({"WALK": secrets.token_hex(8), **road.plan(bundle_id)})
    files = {name: text.encode() for name, text in texts.items()}
    if road.code is not None:
        _check_code(road)
        _show(road, "code", False)
        made = Path(road.code.packed.name).iterdir()
        files = {f"{road.code.folder}/{path.name}": path.read_bytes() for path in made} | files
    folder = Path(road.cluster.target.folder)
    print_line("\n".join(write_to_disk(folder, road.here.bundle, files, quiet=quiet)))
    if road.environment is None:
        _show(road, "environment", False)
    return 0


def show_road(road: Road) -> None:
    """Prints every step, and sizes. The cluster is asked only over a connection that is open."""
    target, there, seen = road.cluster.target, None, set[str]()
    try:
        if target.host is not None:
            with connected(target, log_in=False) as remote:
                there = There.look(remote, road)
                seen = _seen_there(remote, road, there)
    except StageError as error:
        print_line(f"{target}: not asked what it has: {error.message}", err=True)
    done = steps_done(road, there) | seen if road.here.is_locked else set[str]()
    for name in road.commands():
        _show(road, name, name in done)
    if "submit" in seen & done:
        _say_job(road, 0, "")
    elif "fetch" not in done:
        print_line("sizes are known when the bundle is here: stage fetch --dry-run shows its own")
    elif target.host is None:
        print_line("\n".join(check_disk(Path(target.folder), road.here.bundle)))
    else:
        print_line(describe(road, sizes(road), there))


def steps_done(road: Road, there: There | None) -> set[str]:
    """The steps that need not be done again."""
    found = {"lock"} if road.here.is_locked else set[str]()
    bundle_id = road.here.id
    if bundle_id is None:
        return found
    found |= {"fetch"}
    if there is not None and there.bundle_id == bundle_id:
        found |= {"push"} | ({"environment"} if there.airlift else set())
        found |= {"code"} if there.code else set()
        if there.job_of(road) and there.made and there.intact:
            found |= {"environment", "check", "submit"}
    return found


def _seen_there(remote: RemoteShell, road: Road, there: There) -> set[str]:
    """The steps that a slower look finds done: every byte is verified, or the run is finished."""
    bundle_id, go = road.here.id, f"sh {remote.inside('go.sh')}"
    if bundle_id is None or there.bundle_id != bundle_id:
        return set()
    status = f"{go} --runner status {quoted(road.output)} --json"
    answer = remote.ask(f"{go} --is-verified >/dev/null 2>&1 && echo verify; {status} 2>/dev/null")
    is_finished = answer.code == 0 and there.made != ""
    with understood(remote):
        is_finished = is_finished and states_in(answer.text) == {"finished"}
    is_verified = answer.text.startswith("verify\n")
    return {*_there(road)} if is_finished else {"verify"} if is_verified else set()


def _submit(remote: RemoteShell, road: Road, quiet: bool) -> int:
    if said := collect(remote, road.cluster):
        say(said)
        road.here.check_profile(road.cluster)
    there, before = There.look(remote, road), road.here.id
    _check_there(remote, road, there)
    bundle_id = _fetch(road)
    parts = sizes(road)  # before anything is sent: it finds names that the bundle does not have
    if bundle_id != before:  # a fetch can take hours
        there = There.look(remote, road)
    _say_version(there.airlift)
    _check_job(road, there)
    if not _show(road, "push", there.bundle_id == bundle_id):
        print_line(describe(road, parts, there))
        environment = 0 if there.airlift else parts["environment"]
        check_room(remote, _to_send(parts, there) + environment)
        _push(remote, road, bundle_id, quiet)
    if road.code and not _show(road, "code", there.code != ""):
        _send_code(remote, road, there.near, quiet)
    plan, done = road.plan(bundle_id), steps_done(road, there) | _seen_there(remote, road, there)
    for name in _there(road):
        _show(road, name, name in done)
    if done >= {*_there(road)}:
        return _say_job(road, *(there.job_of(road) or (0, "")))
    end = _walk(remote, road, plan)
    if end.code and not There.look(remote, road).bundle_id:
        say("what is damaged there is sent again")
        _push(remote, road, bundle_id, quiet)
        end = _walk(remote, road, plan)
    if end.code and road.code and not There.look(remote, road).code:
        say("the project came damaged, and is sent again")
        _send_code(remote, road, "", quiet)
        end = _walk(remote, road, plan)
    if road.environment and not there.airlift:
        _say_version(There.look(remote, road).airlift)
    return end.code or _say_job(road, end.job, "")


def _fetch(road: Road) -> str:
    """Locks and fetches what is not here yet; returns the bundle's id."""
    for name in ("lock", "fetch"):
        if _show(road, name, name in steps_done(road, None)):
            continue
        words = shlex.split(road.commands()[name])
        # Its words are on stderr. On stdout is what would be next, by hand.
        code = subprocess.run([sys.executable, "-m", *words], stdout=subprocess.DEVNULL).returncode
        if code:
            raise StageError(
                f"`{' '.join(words[:2])}` ended with {code}: see its output above.",
                "After that, run the same command again: it goes on here.",
                code if 0 < code < 6 else 5,
            )
    bundle_id = road.here.id
    if bundle_id is None:
        problem = f"{road.here.bundle}: not what {road.here.manifest.lock_path} has: one changed."
        raise IncompleteError(problem, "Run the same command again.")
    return bundle_id


def _show(road: Road, name: str, is_done: bool) -> bool:
    """Prints a step; returns whether it is done."""
    print_line(f"{name:<12} {road.commands()[name]}{'   # done' if is_done else ''}")
    sys.stdout.flush()
    return is_done


def _check_there(remote: RemoteShell, road: Road, there: There) -> None:
    """Refuses a cluster where no job could be submitted, before anything is fetched or sent."""
    if not there.slurm:
        raise UsageError(
            f"{remote.target}: sbatch was not found there, not even in a login shell.",
            "Give the cluster's login node as host.",
        )
    _check_job(road, there)
    if road.environment is not None:
        return
    lines = quoted("\n".join(("set -e", *road.surroundings, "runner --version")))
    said = as_shown(remote.ask(f"bash -lc {lines} </dev/null 2>&1 | tail -n 20").text)
    found = re.search(r"^runner, version (\S+)", said, re.MULTILINE)
    if found is None:
        shown = said.strip()[-300:] or "nothing is printed"
        ours, theirs = road.config.slurm.setup, road.cluster.setup
        where, remedy = "`setup` lines", "setup:, modules: in clusters.yaml."
        if "slurm.setup" in road.config.given and not {*theirs} <= {*ours}:
            where = "lines of `slurm.setup`, which replace `setup:` of clusters.yaml"
            remedy = f"slurm.setup: {json.dumps([*theirs, *ours], ensure_ascii=False)}"
        raise UsageError(
            f"{remote.target}: {road.here.manifest.path} has no environment asset, and `runner` "
            f"does not start there after the {where}: {shown}",
            "Let the manifest bring one (stage init --profile FILE writes the entry), or name the "
            f"lines that bring it: {remedy}",
        )
    _say_version(found[1])


def _say_version(there: str) -> None:
    if there not in ("", __version__):
        say(f"note: airlift {there} runs there, and {__version__} here")


def _check_job(road: Road, there: There) -> None:
    """Refuses to change what a job in the queue reads, or a bundle of another name."""
    ours, here, target = f"{there.folder}/", road.here, road.cluster.target
    queued = [(job, state, script.removeprefix(ours)) for job, state, script in there.jobs]
    jobs = ", ".join(str(job) for job, _, script in queued if script.startswith(f"{OUTPUT}/"))
    what = "another bundle is there"
    own = f"Give this one a folder of its own: {road.cluster.beside()}"
    if is_other := there.name not in ("", here.manifest.name):
        what += f": {there.name}; {here.manifest.path} makes {here.manifest.name}"
    if is_other or (jobs and there.lock_id not in ("", here.id or there.lock_id)):
        rm = f"ssh {target.bare_host} rm -r {quoted(f'{target.folder}/bundle')}"
        own += "; or let them end" if jobs else f". If nobody needs that one: {rm}"
        what += f"; jobs that wait or run read it: {jobs}" if jobs else ""
        raise UsageError(f"{target}: {what}. Nothing was sent.", own)
    if (job := there.job_of(road)) and here.is_locked and not there.made:
        raise UsageError(
            f"{road.config.path}: job {job[0]} ({job[1].lower()}) writes {road.output} there. It "
            "was submitted with another text of this file, with other options or data, or from "
            "another project: a file that was added or changed since is enough.",
            f"Let it end, or: ssh {target.bare_host} scancel {job[0]}. For a run beside it, give "
            "this one another name: --set name=NAME",
        )


def sizes(road: Road) -> dict[str, int]:
    """Bytes of what the folder there holds at its fullest, by part."""
    parts = {"bundle": road.here.size, "environment": int(road.env_facts.get("size", 0))}
    if isinstance(road.config, RunConfig):
        inputs = resolve(road.config, road.here.bundle)
        run = TrainingRun(road.config, inputs, RunFolder(Path()), road.here.bundle, ())
        return {**parts, "checkpoints": run.disk_needed}
    if road.code is not None:
        _check_code(road)
        # As it is sent, unpacked for `check`, and unpacked for the job.
        parts["project"] = 3 * sum(road.code.project.files.values())
    return parts


def _check_code(road: Road) -> None:
    """Reads the project for what would end the command there; prints what may, and what stays.

    Raises:
        StageError: what `runner check` would find there, and is known here.
    """
    assert isinstance(road.config, CommandConfig) and road.code is not None
    config = road.config
    if road.environment is not None:
        config = replace(config, environment=EnvironmentConfig(asset=road.environment))
    inputs = inputs_of_command(config, road.here.bundle)
    run = CommandRun(config, inputs, RunFolder(Path(OUTPUT) / config.name), road.here.bundle, ())
    run = run.given(CommandRun.project, road.code.project)
    if road.environment is None:
        run = run.given(
            CommandRun.job_python, JobPython(f"the Python of {road.cluster.name}", None)
        )
    found = examine(run, (command.project, command.own_code, command.launch))
    raise_errors(found)
    for finding in found:
        if not finding.is_line:
            print_line(str(finding), err=True)


def describe(road: Road, parts: Mapping[str, int], there: There | None) -> str:
    """A line on what is sent, and what the folder there holds at most."""
    send, most = f"about {human_size(_to_send(parts, there))}", human_size(sum(parts.values()))
    if there and there.lock_id not in ("", road.here.id):  # which of its files differ?
        send = f"at most {human_size(parts['bundle'])}"
    listed = ", ".join(f"{name} {human_size(size)}" for name, size in parts.items() if size)
    what = (
        "what the command writes" if road.code else "checkpoints of a size that is not known here"
    )
    unknown = "" if parts.get("checkpoints") else f", and {what}"
    return f"to send: {send}; there at most {most}: {listed}{unknown}"


def _to_send(parts: Mapping[str, int], there: There | None) -> int:
    return max(0, parts["bundle"] - int(there.kib if there and there.kib else 0) * 1024)


def _push(remote: RemoteShell, road: Road, bundle_id: str, quiet: bool) -> None:
    """Sends the bundle. Another machine that sends it is waited for."""
    with sending(remote):
        if There.look(remote, road).bundle_id == bundle_id:
            return
        damaged = set(remote.read(DAMAGED).decode("utf-8", "replace").splitlines())
        folder = f"{road.cluster.target.folder}/bundle"
        road.here.send(remote, folder, road.cluster.copy, damaged, quiet)
        remote.run(f"rm -f {remote.inside(DAMAGED)}", f"{remote.target}: cannot be written")


def _there(road: Road) -> list[str]:
    """The steps that `go.sh` does."""
    return [name for name in road.commands() if name not in ("lock", "fetch", "push", "code")]


def _send_code(remote: RemoteShell, road: Road, near: str, quiet: bool) -> None:
    """Sends the project: of its archive, what an earlier one there does not have."""
    assert road.code is not None
    folder = f"{road.cluster.target.folder}/{road.code.folder}"
    made = RunFolder(Path(road.code.packed.name))
    target = PushTarget(road.cluster.copy or remote.target.host, folder)
    with sending(remote), connected(target) if road.cluster.copy else nullcontext(remote) as there:
        problem, its = f"{remote.target}: cannot be written", road.code.folder
        remote.run(f"mkdir -p {remote.inside(its)}", problem)
        # By its bytes: what is damaged there can have the size and the time of the sound one.
        options = ["--checksum", "--compress", *([f"--copy-dest=../{near}"] if near else [])]
        run_rsync(replace(there, target=target), made.root, *options, quiet=quiet)
        remote.run(f": >{remote.inside(f'{its}/sent')}", problem)


def _walk(remote: RemoteShell, road: Road, plan: Mapping[str, str]) -> End:
    """Lets `go.sh` do its steps, or joins one that is at work."""
    lost = 0
    while True:
        try:
            with understood(remote):
                begun, end = walk(remote, road, plan, _show_log)
        except IncompleteError as error:
            raise IncompleteError(
                f"{error.message} What go.sh has begun there goes on.",
                f"{error.remedy} Run the same command again: it follows the work, or starts it.",
            ) from None
        except KeyboardInterrupt:
            host = quoted(road.cluster.target.bare_host)
            raise IncompleteError(
                f"{remote.target}: go.sh goes on there, and submits the job at its end.",
                "Run the same command again: it follows the work. To stop it: "
                f"ssh {host} sh {remote.inside('go.sh')} --stop   "
                f"(a job that is queued: ssh {host} scancel NUMBER)",
            ) from None
        if end is not None and (end.walk == begun or end.plan == plan_digest(plan)):
            return end
        if end is not None:
            _check_job(road, There.look(remote, road))  # which that other walk may have made
        lost += end is None
        if lost == 2:
            raise IncompleteError(
                f"{remote.target}: go.sh ended there twice without a result: it was killed (a "
                "limit of the login node?), or the node went down.",
                "Run the same command again: it goes on. Where login nodes end long work: "
                "verify: job in clusters.yaml.",
            )


def _show_log(text: str) -> None:
    sys.stdout.write(as_shown(re.sub(r"^== \w+ (\w+)$", r"-- \1", text, flags=re.MULTILINE)))
    sys.stdout.flush()


def _say_job(road: Road, job: int, state: str) -> int:
    to, run = shlex.quote(road.cluster.name), road.named
    what = f"job {job}{f' ({state.lower()})' if state else ''}: {road.output} in {to}"
    next_ = f"runner status --to {to}"
    if not road.axes:  # each run of a sweep has a log of its own
        next_ += f"; runner logs {run} --to {to} -f"
    if not job:
        what = f"{road.output} in {to} is finished: nothing was submitted"
        next_ = f"runner pull {run} --to {to}"
    print_line(f"{what}\nnext: {next_}")
    return 0
