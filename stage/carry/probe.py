"""`stage env probe --to`: what a cluster is, asked over ssh, at once.

The login node answers in seconds. The GPU and its driver are seen inside a job only: a small one is
queued, and where it does not begin soon, the profile says which of its values are assumed. The
next command with `--to` then collects them (`collect`).
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from stage.carry.clusters import NAME, Cluster, files_of, find_cluster, note, users_file
from stage.carry.ssh import RemoteShell, connected
from stage.errors import IncompleteError, UsageError, as_shown, quoted
from stage.files import human_size, make_folder, read_file, sha256_of_bytes, write_atomically
from stage.installation import TEMPLATES
from stage.lock.yaml_lines import scalar

_ENV_PROBE = TEMPLATES / "env-probe.sh"
_CLUSTER_PROBE = TEMPLATES / "cluster-probe.sh"
_ANSWER_S = 180.0  # for a login node that is busy: `module load` alone can take a minute there
_WAIT_S = 60  # for the small job that asks a node: it starts at once, or waits for hours
_ASSUMED = {"cuda": "12.2", "compute_capability": "8.0"}
_WHY = "# assumed: the job that asks a node has not answered"
_NODE = "# the node's answer: "
_WRITTEN = "# by `stage env probe --to`, not edited since: "

Say = Callable[[str], None]


@dataclass(frozen=True)
class Room:
    """A folder there, and its room in bytes; None: it is not known."""

    folder: str
    why: str
    is_writable: bool
    free: int | None
    quota: int | None

    @property
    def left(self) -> int | None:
        """What can be written: no more than the disk has and the quota leaves."""
        known = [size for size in (self.free, self.quota) if size is not None]
        return min(known) if known else None

    def __str__(self) -> str:
        free = f"{human_size(self.free)} free" if self.free is not None else "room not known"
        quota = f", quota leaves {human_size(self.quota)}" if self.quota is not None else ""
        refused = "" if self.is_writable else ", NOT WRITABLE by you"
        return f"{self.folder}   ({self.why}: {free}{quota}{refused})"


@dataclass(frozen=True)
class LoginNode:
    """What a login node answered: KEY -> values, and its folders."""

    values: dict[str, str]
    tools: frozenset[str]
    rooms: tuple[Room, ...]

    @property
    def has_slurm(self) -> bool:
        return "sbatch" in self.tools or "slurm_folder" in self.values


def room_script(folder: str) -> str:
    """A script whose answer `rooms_of` reads: the room at one folder, which need not exist."""
    return f"only_room={quoted(folder)}\n{_CLUSTER_PROBE.read_text('utf-8')}"


def rooms_of(text: str) -> tuple[Room, ...]:
    """The folders in an answer of `cluster-probe.sh`, with their room. Pure."""
    found = []
    for line in text.splitlines():
        key, *words = line.split("\t")
        if key == "room" and len(words) == 5:
            writable, free, quota, folder, why = words
            sizes = [int(kib) * 1024 if kib.isdecimal() else None for kib in (free, quota)]
            found.append(Room(folder, why, writable == "yes", *sizes))
    return tuple(found)


def login_node_of(text: str) -> LoginNode:
    """Reads the answer of `cluster-probe.sh`. Pure."""
    pairs = [line.partition("\t")[::2] for line in text.splitlines()]
    tools = frozenset(value for key, value in pairs if key == "tool")
    return LoginNode(dict(pairs), tools, rooms_of(text))


def probe(to: str, say: Say) -> None:
    """Asks a cluster what it is; writes its profile, and its entry in `clusters.yaml`.

    Args:
        to: a name in `clusters.yaml`, a host, or HOST:FOLDER.
        say: prints a line for the user.

    Raises:
        UsageError: no such cluster; or a folder there that cannot be written.
        IncompleteError: no connection; or nothing that environments are made for.
    """
    cluster = _cluster_of(to)
    profile = cluster.profile or Path("envs/profiles", f"{cluster.name}.yml")
    with connected(cluster.target) as remote:
        node = _look(remote, to, _chosen(cluster), say)
        login = _of_login_node(remote, cluster)
        collected, answer, waits = collect(remote, cluster), "", ""
        if node.has_slurm and not collected:
            answer, waits = _ask_a_node(remote, cluster, node, login, say)
    text = profile_text(cluster.name, answer or login, node.has_slurm and not answer, waits)
    for line in [collected] if collected else _write_profile(profile, text):
        say(line)
    file = cluster.file or next(iter(files_of(Path.cwd())), users_file())
    is_new = cluster.file is None or cluster.name != to
    entry = _asked_for(cluster) if is_new else {}
    entry |= _found(cluster, node, login)
    if cluster.profile is None:
        entry["profile"] = str(_from(file.parent, profile))
    for line in [*note(file, cluster.name, entry), *_next_steps(cluster, profile, file)]:
        say(line)


def _cluster_of(to: str) -> Cluster:
    """What `--to` names; for a host that an entry has, that entry with the folder of `to`."""
    cluster = find_cluster(to, Path.cwd(), needs_folder=False)
    host = cluster.target.bare_host
    if cluster.target.host is None:
        raise UsageError(
            f"--to {to}: a folder here is not a cluster.", "stage env probe asks this machine."
        )
    if cluster.file is not None:
        return cluster
    known = find_cluster(_name_of(host), Path.cwd(), needs_folder=False)
    if known.host == host:
        return replace(known, target=cluster.target)
    return replace(cluster, name=_name_of(host))


def _chosen(cluster: Cluster) -> str:
    """The folder there that `--to` or the entry names; empty: none (`find_cluster` gives `.`)."""
    return "" if cluster.target.folder == "." else cluster.target.folder


def _look(remote: RemoteShell, to: str, folder: str, say: Say) -> LoginNode:
    """Asks the login node, and prints what it answers."""
    script = f"folder={quoted(folder)}\n{_CLUSTER_PROBE.read_text('utf-8')}"
    node = login_node_of(remote.run(script, f"{to}: cannot look there", _ANSWER_S))
    for line in login_node_lines(node, remote.greeting):
        say(line)
    if folder and not node.rooms[0].is_writable:
        raise UsageError(
            f"{remote.target}: not writable by you there.", "Choose another of these folders."
        )
    return node


def _asked_for(cluster: Cluster) -> dict[str, str]:
    """Keys of an entry for what `--to` names."""
    folder = _chosen(cluster)
    return {"host": cluster.target.bare_host, **({"folder": folder} if folder else {})}


def _found(cluster: Cluster, node: LoginNode, login: str) -> dict[str, str]:
    """Keys of an entry for what the login node answered."""
    found = {}
    partitions = _partitions(login)
    if partitions and not cluster.partition:
        found["partition"] = partitions[0][0]
    if "slurm_folder" in node.values:
        found["setup"] = f"export PATH=$PATH:{quoted(node.values['slurm_folder'])}"
    return found


def _next_steps(cluster: Cluster, profile: Path, file: Path) -> list[str]:
    if not _chosen(cluster):
        there = f"{cluster.target.host}:FOLDER/airlift"
        return [f"next: choose a folder: stage env probe --to {there}   (or `folder:` in {file})"]
    profile = _from(Path.cwd(), profile)
    return [
        f"next: stage init DATA MODEL --profile {quoted(profile)} -o manifests/my.yaml",
        f"      or, with a run file: runner submit RUN --to {quoted(cluster.name)}",
    ]


def _from(folder: Path, path: Path) -> Path:
    """A path relative to a folder, if it is inside it; else absolute."""
    whole, base = path.resolve(), folder.resolve()
    return whole.relative_to(base) if base in whole.parents else whole


def collect(remote: RemoteShell, cluster: Cluster) -> str | None:
    """Brings what the job of an earlier probe found since, into the profile.

    Returns:
        A line for the user; None: nothing was waited for.

    Raises:
        IncompleteError: no connection.
    """
    if cluster.profile is None or not cluster.profile.is_file():
        return None
    before = read_file(cluster.profile).decode("utf-8", "replace")
    waited = re.search(f"^{re.escape(_NODE)}(.+)$", before, re.MULTILINE)
    if waited is None:
        return None
    answer = _profile_in(remote.read(waited[1]).decode("utf-8", "replace"))
    if not answer:
        return (
            f"{cluster.profile}: some values are still assumed: the job of `stage env probe` has "
            f"not answered. To ask anew: rm {quoted(cluster.profile)}, then that command again"
        )
    said = _write_profile(cluster.profile, profile_text(cluster.name, answer))
    remote.ask(f"rm -f {remote.inside(waited[1])} {remote.inside(waited[1])}.log")
    return "; ".join(said)


def login_node_lines(node: LoginNode, greeting: str) -> list[str]:
    """What a person should know about a login node. Pure."""
    values = node.values
    shell = f"{values.get('host')}: shell {values.get('shell')}"
    if greeting:
        shell += f", which greets: {as_shown(' '.join(greeting.split()))[:120]!r} (it does no harm)"
    slurm = values.get("slurm") or (
        "Slurm" if node.has_slurm else "no Slurm: no sbatch in any shell"
    )
    if "slurm_folder" in values:
        slurm += f" (only login shells have it: {values['slurm_folder']})"
    missing = [
        tool for tool in ("rsync", "python3", "sha256sum", "setsid") if tool not in node.tools
    ]
    tools = f"not there: {', '.join(missing)}" if missing else "rsync, python3, sha256sum"
    modules = "modules" if "modules" in values else "no modules"
    return [
        shell,
        f"{slurm}; {modules}; {tools}",
        "folders that you may write there:",
        *(f"  {room}" for room in node.rooms),
    ]


def profile_text(name: str, answer: str, is_assumed: bool = False, waits: str = "") -> str:
    """A profile: what `env-probe.sh` printed, and what is assumed. Pure.

    Args:
        answer: of a node; or of the login node.
        is_assumed: the nodes may be others than the machine that answered.
        waits: the file there to which a job writes a node's answer; "": there is none.
    """
    dropped = ("#   partition", "# This node has no GPU")
    lines = [line for line in answer.splitlines() if not line.startswith(dropped)]
    lines = [f"name: {scalar(name)}" if line.startswith("name:") else line for line in lines]
    if is_assumed:
        mark = re.compile("(glibc|linux):")
        lines = [f"{line}   {_WHY}" if mark.match(line) else line for line in lines]
        partitions = _partitions(answer)
        if partitions and not any(line.startswith("cuda:") for line in lines):
            capability = partitions[0][1] or _ASSUMED["compute_capability"]
            assumed = _ASSUMED | {"compute_capability": capability}
            lines += [f'{key}: "{value}"   {_WHY}' for key, value in assumed.items()]
    if waits:
        lines.append(f"{_NODE}{waits}")
    text = "\n".join(lines) + "\n"
    return f"{text}{_WRITTEN}{sha256_of_bytes(text.encode())[:16]}\n"


def _partitions(login: str) -> list[tuple[str, str]]:
    """Partitions with GPUs, as the login node's `env-probe.sh` names them: (name, capability)."""
    return re.findall(
        r"^#   partition (\S+) \S+(?: \(compute capability (\S+)\))?$", login, re.MULTILINE
    )


def _write_profile(path: Path, text: str) -> list[str]:
    """Writes a profile; one that a person edited stays, and the new one is put beside it."""
    before = read_file(path).decode("utf-8", "replace") if path.exists() else ""
    body, _, digest = before.rpartition(_WRITTEN)
    if before == text:
        return [f"{path}: as before"]
    if before and digest.strip() != sha256_of_bytes(body.encode())[:16]:
        beside = path.with_name(f"{path.stem}.new{path.suffix}")
        write_atomically(beside, text.encode())
        return [f"{path}: yours, kept; what was found now: diff {quoted(path)} {quoted(beside)}"]
    make_folder(path.parent)
    write_atomically(path, text.encode())
    assumed = re.findall(rf"^(\w+):.*{re.escape(_WHY)}", text, re.MULTILINE)
    more = f"; assumed until a node answers: {', '.join(assumed)}" if assumed else ""
    return [f"{path}: written{more}"]


def _name_of(host: str) -> str:
    """A name for a host: the first part of it that names more than a login node."""
    parts = host.rpartition("@")[2].split(".")
    if all(part.isdecimal() for part in parts) or ":" in host:
        return host.rpartition("@")[2]
    return next((part for part in parts if not re.fullmatch(r"(login|ssh|l)-?\d*", part)), parts[0])


def _in_its_shell(cluster: Cluster, command: str) -> str:
    """A command behind the cluster's modules and setup, in a login shell as a job has it."""
    lines = [*(f"module load {quoted(name)}" for name in cluster.modules), *cluster.setup]
    return f"bash -l -c {quoted(chr(10).join([*lines, command]))}"


def _with_probe(command: str) -> str:
    """A command that reads `env-probe.sh` from its standard input."""
    return f"{command} <<'END_OF_PROBE'\n{_ENV_PROBE.read_text('utf-8')}\nEND_OF_PROBE"


def _profile_in(text: str) -> str:
    """The profile in what a shell printed; "": it is not there to its end."""
    return text[text.find("# Profile of ") :] if "\nglibc: " in text else ""


def _of_login_node(remote: RemoteShell, cluster: Cluster) -> str:
    script = _with_probe(_in_its_shell(cluster, "exec sh -s 2>/dev/null"))
    found = _profile_in(remote.ask(script, _ANSWER_S).text)
    if not found:
        raise IncompleteError(
            f"{remote.target.host}: env-probe.sh found nothing there that environments are made "
            "for, or a line of `modules` or `setup` failed: see above.",
            f"Look: stage env probe --script | {remote.by_hand}sh -s",
        )
    return found


def _ask_a_node(
    remote: RemoteShell, cluster: Cluster, node: LoginNode, login: str, say: Say
) -> tuple[str, str]:
    """Queues the job that asks a node: (its answer, "") or ("", the file that will have it)."""
    own = [room for room in node.rooms if room.is_writable]
    place = next((room.folder for room in own if room.why != "home"), node.values["home"])
    if not place.startswith("/"):
        place = f"{node.values['home']}/{place}"
    file = f"{place}/.airlift-probe-{secrets.token_hex(4)}"
    partitions = _partitions(login)
    partition = cluster.partition or (partitions[0][0] if partitions else None)
    words = ["sbatch", "--parsable", "--job-name=airlift-probe", "--time=2", "--nodes=1"]
    words += ["--ntasks=1", f"--output={file}.log"]
    if partitions:
        words.append("--gres=gpu:1")
    if partition:
        words.append(f"--partition={partition}")
    if cluster.account:
        words.append(f"--account={cluster.account}")
    words += cluster.sbatch_words({})
    path = f"PATH=$PATH:{quoted(node.values.get('slurm_folder', '/usr/bin'))}"
    job = f"{_in_its_shell(cluster, 'exec sh -s')} >{quoted(file)}.part"
    script = (
        f"{path}; mkdir -p {quoted(place)} && {shlex.join(words)} 2>&1 <<'END_OF_JOB'\n"
        f"#!/bin/bash\n{_with_probe(job)}\nmv {quoted(file)}.part {quoted(file)}\n"
        "END_OF_JOB"
    )
    done = remote.ask(script, _ANSWER_S)
    number = re.search(r"^(\d+)(;\S+)?$", done.text, re.MULTILINE)
    if done.code != 0 or number is None:
        said = as_shown(" ".join(done.text.split())[-300:])
        say(f"warning: sbatch took no job, so no node was asked: {said}")
        say(f"  -> `account:`, `partition:` or `options:` in {NAME}, then the same command again")
        return "", ""
    say(f"job {number[1]} asks a node; waiting {_WAIT_S} s at most")
    wait = (
        f"{path}; n=0; while [ $n -lt {_WAIT_S} ]; do [ ! -e {quoted(file)} ] || exit 0; "
        f'[ $((n % 5)) -ne 4 ] || [ -n "$(squeue -h -j {number[1]} -o %T 2>&1)" ] || break; '
        f"sleep 1; n=$((n + 1)); done; [ -e {quoted(file)} ]"
    )
    if remote.ask(wait, _WAIT_S + _ANSWER_S).code != 0:
        say(f"job {number[1]} has not answered: it waits, or {file}.log there says why")
        return "", file
    answer = _profile_in(remote.read(file).decode("utf-8", "replace"))
    remote.ask(f"rm -f {quoted(file)} {quoted(file)}.log")
    return answer, "" if answer else file
