"""A user's command: its words, the launcher of ranks in it, and the shell script that it runs.

A launcher is known by the command's own words: behind `env`, `nohup` or `python -m`, too. Of a
shell script the text is read, where a launcher stands like any command. Nothing is started here.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from runner.from_stage import UsageError, WrongValueError, nearest_name, read_start


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launcher of ranks.

    Attributes:
        options: its names; `=` takes a value, `|` separates names of one option, `*` is any text.
            A test compares them with the installed parsers. Names of older versions are here, too.
        ours: the options that say how nodes meet.
        count: the option with the number of ranks.
        words: what it is given to meet the launchers of the other nodes.
        each: what it is given for the ranks of its node, where their number is known.
    """

    options: str = ""
    ours: str = ""
    count: str = ""
    words: str = ""
    each: str = ""


_TORCHRUN = Launcher(
    options="""h|help nnodes= nproc-per-node= rdzv-backend= rdzv-endpoint= rdzv-id= rdzv-conf=
    standalone max-restarts= monitor-interval= start-method= event-log-handler= role= m|module
    no-python run-path log-dir= r|redirects= t|tee= local-ranks-filter= duplicate-stdout-filters=
    duplicate-stderr-filters= node-rank= master-addr= master-port= local-addr= logs-specs=
    numa-binding= signals-to-handle= shutdown-timeout= virtual-local-rank use-env""",
    ours="""nnodes node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id rdzv-conf
    standalone local-addr""",
    count="nproc-per-node",
    words="--nnodes={nodes} --node_rank={number} --master_addr={master} --master_port={port}",
    each="--nproc_per_node={processes}",
)
_ACCELERATE = Launcher(
    options="""h|help config-file= q|quiet cpu multi-gpu tpu mixed-precision= num-processes=
    num-machines= num-cpu-threads-per-process= enable-cpu-affinity dynamo-use-* dynamo-*=
    use-deepspeed use-fsdp use-parallelism-config use-megatron-lm gpu-ids= same-network
    machine-rank= main-process-ip= main-process-port= t|tee= log-dir= role= rdzv-backend=
    rdzv-conf= max-restarts= monitor-interval= m|module no-python tpu-cluster no-tpu-cluster
    tpu-use-sudo vm= env= main-training-function= downcast-bf16 deepspeed-*= zero-stage=
    offload-*= gradient-accumulation-steps= gradient-clipping= zero3-*= fsdp-*= megatron-lm-*=
    fp8-use-autocast-during-eval fp8-*= aws-*= debug mpirun-hostfile= parallelism-config-*=
    use-mps-device mps ipex use-xpu mpirun-ccl=""",
    ours="""num-machines machine-rank main-process-ip main-process-port multi-gpu
    same-network rdzv-backend rdzv-conf gpu-ids deepspeed-multinode-launcher deepspeed-hostfile
    mpirun-hostfile""",
    count="num-processes",
    # `standard`: else it starts DeepSpeed's own launcher, which wants a hostfile and ssh.
    words="""--num_machines={nodes} --machine_rank={number} --main_process_ip={master}
    --main_process_port={port} --rdzv_backend=static --deepspeed_multinode_launcher=standard""",
    each="--num_processes={ranks}",
)
_DEEPSPEED = Launcher(
    options="""h|help hostfile|H= include|i= exclude|e= num-nodes= num-gpus|num-accelerators=
    master-port= master-addr= node-rank= launcher= launcher-args= module no-python no-local-rank
    no-ssh no-ssh-check force-multi save-pid enable-each-rank-log= autotuning=
    bind-cores-to-rank bind-core-list= ssh-port= venv-script= log-level= q|quiet
    elastic-training min-elastic-nodes= max-elastic-nodes= detect-nvlink-pairs""",
    ours="""hostfile num-nodes master-port master-addr node-rank launcher launcher-args no-ssh
    no-ssh-check force-multi ssh-port venv-script elastic-training min-elastic-nodes
    max-elastic-nodes include exclude save-pid""",
    count="num-gpus",
    words="--node_rank={number} --master_addr={master} --master_port={port}",
)
_FABRIC = Launcher(
    options="""help accelerator= strategy= devices= num-nodes= node-rank= main-address=
    main-port= precision=""",
    ours="num-nodes node-rank main-address main-port",
    count="devices",
    words="""--num-nodes={nodes} --node-rank={number} --main-address={master}
    --main-port={port}""",
    each="--devices={processes}",
)
BY_VARIABLES = Launcher()  # it reads NNODES, NODE_RANK, NPROC_PER_NODE and starts torchrun
LAUNCHERS = {
    "torchrun": _TORCHRUN,
    "accelerate": _ACCELERATE,
    "deepspeed": _DEEPSPEED,
    "fabric": _FABRIC,
    "trl": _ACCELERATE,  # it gives `accelerate launch` the options that its scripts do not know
    "llamafactory": BY_VARIABLES,
    "swift": BY_VARIABLES,
}
_FACTORY = "train sft dpo rm"  # the last three with USE_V1
PROGRAMS = {
    "torchrun": ("torchrun", ""),
    "torch.distributed.run": ("torchrun", ""),
    "torch.distributed.launch": ("torchrun", ""),
    "accelerate": ("accelerate", "launch"),
    "accelerate-launch": ("accelerate", ""),
    "accelerate.commands.launch": ("accelerate", ""),
    "accelerate.commands.accelerate_cli": ("accelerate", "launch"),
    "deepspeed": ("deepspeed", ""),
    "ds": ("deepspeed", ""),
    "deepspeed.launcher.runner": ("deepspeed", ""),
    "fabric": ("fabric", "run"),
    "lightning": ("fabric", "run"),
    "lightning.fabric.cli": ("fabric", "run"),
    "llamafactory-cli": ("llamafactory", _FACTORY),
    "lmf": ("llamafactory", _FACTORY),
    "llamafactory.cli": ("llamafactory", _FACTORY),
    "swift": ("swift", "pt sft rlhf"),
    "swift.cli.main": ("swift", "pt sft rlhf"),
    "megatron": ("swift", "pt sft rlhf export"),
    "trl": (
        "trl",
        "sft dpo grpo kto reward rloo distillation bco cpo gkd nash_md online_dpo orpo ppo prm xpo",
    ),
}
"""A program, or a module of `python -m` -> its launcher, and the subcommands that start ranks."""

STARTS_NODES = frozenset(
    "srun mpirun mpiexec mpiexec.hydra orterun prun horovodrun sbatch salloc pdsh clush".split()  # noqa: SIM905
)
"""Programs that start processes on the nodes of a job, which is what the job itself does."""
ENVIRONMENTS = frozenset(
    ["uv", "poetry", "conda", "mamba", "micromamba", "pipenv", "pdm", "hatch", "pixi", "rye"]
)
"""Programs whose `run` starts a command in an environment of this machine."""
_AROUND = frozenset(("time", "nohup", "exec", "command"))
_SHELLS = frozenset(("bash", "sh", "dash", "zsh"))
MEETING = frozenset(
    ["NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"]
)
VISIBLE = "CUDA_VISIBLE_DEVICES"

_QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\""""
_ARITHMETIC = r"\$\(\([^()]*\)\)"
_WORD = re.compile(rf"(?:{_QUOTED}|{_ARITHMETIC}|\$\{{[^}}]*\}}|[^\s'\"\\])+", re.DOTALL)
_OPERATOR = re.compile(r"[|&;<>()`\n]|(?:^|\s)#")
_EXPANDED = re.compile(r"\$[\w{@*#?]|[*?]|(?:^|[\s=])~(?=[/\s]|$)")
_AT = (
    r"(?:^|[;&|{\n]|(?<!\$)\(|\b(?:exec|then|do|else|if|time|nohup)\s|\b\w+=[^\s(]*\s)\s*(?:\S*/)?"
)
"""Where a command stands in a shell script; not in `$(...)`, which asks for a name.

Only words at these places count: `echo torchrun` starts nothing.
"""
_LAUNCHER_IN_SHELL = re.compile(
    rf"{_AT}((?:python[\d.]*\s+-m\s+torch\.distributed\.(?:run|launch)|torchrun|deepspeed|"
    r"accelerate\s+launch|(?:llamafactory-cli|lmf)\s+train|trl\s+(?:sft|dpo|grpo|kto|reward|rloo)|"
    r"(?:swift|megatron)\s+(?:pt|sft|rlhf)|fabric\s+run)\s[^\n;|&<>]*?)(?=\s*\d?[\n;|&<>]|\s*$)"
)
_NODES_IN_SHELL = re.compile(
    rf"(?:{_AT}|\b\w+=[\"'])(srun|(?:mpi|orte|p)run|mpiexec(?:\.hydra)?|pdsh|clush)\s"
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """The parts of a command.

    Attributes:
        is_line: the words are of a line for a shell, in their quotes.
        front: `env` and its words.
        launcher: a key of `LAUNCHERS`; empty: none.
        own: the words that start the launcher, such as `accelerate launch`, or the program alone.
        rest: what follows.
    """

    is_line: bool
    front: tuple[str, ...]
    launcher: str
    own: tuple[str, ...]
    rest: tuple[str, ...]

    def variable(self, name: str) -> str | None:
        """What the command sets a variable to; None: it does not."""
        typed = [word for word in self.front if word.startswith(f"{name}=")]
        return typed[-1].partition("=")[2].strip("'\"") if typed else None

    def argv(self, words: Sequence[str], without: frozenset[str]) -> list[str]:
        """The words to execute, after `front` without some variables."""
        front = [word for word in self.front if word.partition("=")[0] not in without]
        if front == ["env"]:
            front = []
        if self.is_line:
            return ["bash", "-c", " ".join(["exec", *front, *words])]
        return [*front, *words]


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a launcher: its first name in `Launcher.options`, its value, its words."""

    name: str
    value: str
    words: tuple[str, ...]


def as_words(command: str | Sequence[str]) -> tuple[str, ...]:
    r"""The words of a command, as a shell reads them.

    What only a shell can do (`|`, `&&`, `$NAME`, `*.txt`) becomes `bash -c`. Variables before the
    program become `env`. A backslash at a line's end joins lines, also where YAML joined them.

    Raises:
        WrongValueError: there is no word, or a quote is not closed.
    """
    if isinstance(command, str):
        text = re.sub(r"(?:(?<=\s)|^)\\(?=\s)", "", command.replace("\\\n", "")).strip()
        text = re.sub(r"(?<![&>])\s*&$", "", text)  # else the job ends as soon as it has begun
        bare = _bare(text)
        if re.search("['\"]", bare):
            raise WrongValueError("has a quote that is not closed", "Close it, or omit it.")
        if _OPERATOR.search(bare) or _EXPANDED.search(bare):
            return ("bash", "-c", text)
        words = tuple(shlex.split(text))
    else:
        words = tuple(command)
    if not words:
        raise WrongValueError("is empty", "Write what you type on the laptop.")
    return ("env", *words) if re.match(r"[A-Za-z_]\w*=", words[0]) else words


def _bare(text: str) -> str:
    """The text without what its quotes protect from the shell; `$NAME` acts in double quotes."""

    def left(quoted: re.Match[str]) -> str:
        inside = re.sub(r"\\.", "", quoted[0]) if quoted[0].startswith('"') else ""
        acts = re.search(r"`|\$\((?!\()|\$[\w{(@*#?]", inside)
        return acts[0] if acts else "_"

    return re.sub(_ARITHMETIC, "$_", re.sub(_QUOTED, left, text, flags=re.DOTALL))


def read_command(words: Sequence[str]) -> Command:
    """Finds the launcher in a command, behind `env`, `nohup`, `time` and `python -m`.

    Raises:
        UsageError: there is no program in it.
    """
    is_line = len(words) == 3 and [*words[:2]] == ["bash", "-c"]
    is_line = is_line and not _OPERATOR.search(_bare(words[2]))
    rest = [word[0] for word in _WORD.finditer(words[2])] if is_line else [*words]
    if rest and re.match(r"[A-Za-z_]\w*=", rest[0]):
        rest.insert(0, "env")
    front: list[str] = []
    while rest and (rest[0] in _AROUND or Path(rest[0]).name == "env"):
        end = 1
        while rest[0] not in _AROUND and re.match(r"-|\w+=", "".join(rest[end : end + 1])):
            end += 2 if rest[end] in ("-u", "-C") else 1
        front += rest[:end] if end > 1 else []
        rest = rest[end:]
    if not rest:
        raise UsageError(f"`{shlex.join(words)}` starts nothing.", "Name a program after it.")
    end = 1
    if re.fullmatch(r"python[\d.]*", Path(rest[0]).name):
        while end < len(rest) and rest[end].startswith("-") and rest[end] != "-m":
            end += 1
        end = end + 2 if rest[end : end + 1] == ["-m"] and rest[end + 1 :] else 1
    launcher, subcommands = PROGRAMS.get(Path(rest[end - 1]).name, ("", ""))
    if subcommands:
        launcher = launcher if "".join(rest[end : end + 1]) in subcommands.split() else ""
        end += 2 if rest[end : end + 2] == ["run", "model"] else 1  # its name before lightning 2.3
    end = end if launcher else 1
    return Command(
        is_line=is_line,
        front=tuple(front),
        launcher=launcher,
        own=tuple(rest[:end]),
        rest=tuple(rest[end:]),
    )


def options_of(command: Command) -> tuple[list[Option], list[str]]:
    """The options of a command's launcher, and the script with its own words.

    Raises:
        UsageError: the launcher has no such option.
    """
    options: list[Option] = []
    script: list[str] = []
    left = [*command.rest]
    while left and LAUNCHERS[command.launcher].options:
        option = _option(command.launcher, left)
        if option is not None:
            options.append(option)
            del left[: len(option.words)]
        elif command.launcher == "trl":  # its options may stand after those of its script
            script.append(left.pop(0))
        else:
            break
    return options, script + left


def _option(name: str, words: Sequence[str]) -> Option | None:
    """The option that the first words are; None: they are the script, or its words."""
    launcher, word = LAUNCHERS[name], words[0]
    if not word.startswith("-") or word in ("-", "--"):
        return None
    typed, equals, value = word.partition("=")
    key = typed.lstrip("-").replace("_", "-")
    if name == "trl" and key not in (launcher.count, *launcher.ours.split()):
        return None
    if not typed.startswith("--") and len(key) > 1 and not equals:  # such as -r3
        key, equals, value = key[0], "=", key[1:]
    rows = {row: row.rstrip("=").split("|") for row in launcher.options.split()}
    found = [row for row, names in rows.items() if any(fnmatchcase(key, one) for one in names)]
    if not found and name != "accelerate":  # argparse takes the beginning of a name for it
        found = [row for row, names in rows.items() if any(one.startswith(key) for one in names)]
        found = found if len(found) == 1 else []
    if not found:
        known = [f"--{one}" for names in rows.values() for one in names if "*" not in one]
        near = nearest_name(typed.replace("_", "-"), known) or ""
        question = f"Did you mean `{near.replace('-', '_').replace('__', '--', 1)}`? "
        raise UsageError(
            f"`{name}` has no option `{typed}`.",
            f"{question if near else ''}Options of the script come after its name. If your version "
            "has this option: `launch: node`, and the command says itself how the nodes meet.",
        )
    takes_next = found[0].endswith("=") and not equals
    first = rows[found[0]][0]
    return Option(
        name=key if "*" in first else first,
        value=(" ".join(words[1:2]) if takes_next else value).strip("'\""),
        words=tuple(words[: 2 if takes_next else 1]),
    )


def inner_command(words: Sequence[str]) -> list[str]:
    """The command that another program starts: from the first word that is a program's."""
    for n, word in enumerate(words[1:], 1):
        name = Path(word).name
        if re.search(r"\.py$|\.sh$", name):
            return ["python" if name.endswith(".py") else "bash", *words[n:]]
        if re.fullmatch(r"python[\d.]*", name) or name in PROGRAMS or name in _SHELLS:
            return [*words[n:]]
    for n, word in enumerate(words[1:], 1):  # not an option, nor a short option's value
        if re.match(r"[^-\d]", word) and not re.fullmatch(r"-\w", words[n - 1]):
            return [*words[n:]]
    return [*words[-1:]]


def shell_script(words: Sequence[str], folder: Path = Path()) -> tuple[str, bytes]:
    """What bash or sh would read: its name, and the beginning of its text; empty: no script.

    Args:
        words: a command without `env`.
        folder: that a relative path starts from.
    """
    name = Path(words[0]).name
    if name not in _SHELLS:
        start = _beginning(folder / words[0])
        # pip writes a line for sh into a Python program whose path is long.
        is_shell = re.match(rb"#!.*\b(ba|da|z)?sh\b", start) and b"\n'''exec" not in start
        return (words[0], start) if is_shell else ("", b"")
    n = 1
    while n < len(words) and words[n].startswith("-"):
        if re.fullmatch("-[a-z]*c", words[n]):
            return name, os.fsencode("".join(words[n + 1 : n + 2]))
        n += 2 if words[n] in ("-o", "-O") else 1
    script = "".join(words[n : n + 1])
    return script or name, _beginning(folder / script)


def _beginning(path: Path) -> bytes:
    try:
        return read_start(path, 2**16)
    except OSError:  # also a pipe, as in `bash <(...)`: what we read, bash would not
        return b""


def shell_code(script: bytes) -> str:
    """The text of a shell script without its comments."""
    return re.sub(r"(?m)(^|\s)#.*", r"\1", script.decode(errors="replace"))


def launcher_in(code: str) -> str:
    """The line in a shell script that starts a launcher of ranks; empty: there is none."""
    found = _LAUNCHER_IN_SHELL.search(code.replace("\\\n", " ") + " ")
    return " ".join(found[1].split()) if found else ""


def starter_in(code: str) -> re.Match[str] | None:
    """The program in a shell script that starts processes on other nodes, as group 1."""
    return _NODES_IN_SHELL.search(code)
