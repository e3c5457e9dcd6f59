"""One line of ours after the traceback of a user's own script, where we know what helps.

`runner exec` puts a copy of this file into a folder on PYTHONPATH, where each Python of the script
loads it (`stage.serve.children`). It imports nothing of airlift, and has the syntax of Python 3.6.
It changes `sys.excepthook`, which prints first what it printed before, and `socket.getaddrinfo`,
which answers as before.
"""

import os
import re
import sys
from types import TracebackType
from typing import Any, Optional, Tuple, Type

NAME = "airlift_last_words"
_NO_INTERNET = (
    "a compute node has no internet: stage the file (`url:` in the manifest; a folder such as "
    "nltk_data: `path:`), and read it from the bundle: $AIRLIFT_BUNDLE/data/files/NAME/FILE"
)
_OWN_ENDPOINT = (
    "the script sets HF_ENDPOINT itself, so it asks that address and not the bundle: take this "
    'line out of it (os.environ["HF_ENDPOINT"] = ...); a shell\'s own HF_ENDPOINT may stay'
)
_CHANGED = "the bundle changed since this script began: .* (is gone|has another size)"
_NOT_REACHED = ("gaierror", "NameResolutionError", "Network is unreachable", "Errno -2", "Errno -3")
# A part of the error's text (a regular expression) -> what helps. The first that is found counts.
# A short table: what needs no more than the library's own words is not here.
ADVICE = (
    (
        "mpi4py|expected, but not set|process group has not been initialized",
        "DeepSpeed looks for MPI only where RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
        "MASTER_PORT are not all set, and torch expects them: start the script with torchrun, "
        "inside runner exec",
    ),
    (
        "EADDRINUSE|ddress already in use|C10d store has failed",
        "another program on this node uses that port, or torchrun's ends do not find each other. "
        "On one node: torchrun --standalone, or export "
        "MASTER_PORT=$((20000 + ${SLURM_JOB_ID:-$$} % 10000)). On several: start it once on each "
        "(srun --ntasks-per-node=1 --ntasks=$SLURM_NNODES), all with the same --rdzv-endpoint of "
        "the first node",
    ),
    (
        "CUDA_HOME does not exist|does not match the version torch was compiled with"
        "|inja is required|ninja not being installed|ds_opt_adam|Error building extension"
        r"|Unable to JIT load|(\w+)/\1(_v\d+)?\.so: cannot open",
        "DeepSpeed compiles here and could not: the compiler's own error is the first error above. "
        "It needs `ninja` on PATH and the CUDA of your torch: `module load` the one of "
        "python -c 'import torch; print(torch.version.cuda)'. torch's own optimizer needs none",
    ),
    (
        "train_batch_size is not equal|input_value='auto'|for //: 'str' and 'int'"
        "|with a fractional part",
        'in ds_config.json write numbers, whole numbers also for *_bucket_size: "auto" is filled '
        "in by Trainer and accelerate alone, and batch = micro x accumulation x ranks",
    ),
    (
        "compiled using NumPy 1|numpy.dtype size changed|umpy is not available"
        "|module 'numpy' has no attribute",
        "a package, or the script, is older than this NumPy: ask for `numpy<2` in the environment; "
        "where it is np.float, np.int, np.bool or np.object: `numpy<1.24`",
    ),
    (
        "unexpected keyword argument '(evaluation_strategy|tokenizer)'"
        "|Feature type 'List' not found|does not recognize this architecture"
        "|is not currently imported",
        "the script, model or data is of another version than its package. evaluation_strategy is "
        "now eval_strategy, and tokenizer is processing_class (or ask for `transformers<5`); for "
        "newer models and data ask for a newer `transformers`, or `datasets>=4`",
    ),
    (
        "undefined symbol|cannot import name|partially initialized module",
        "two packages whose versions do not go together (`pip check`; pin both in the "
        "environment's list; flash-attn: the file whose name says this torch, CUDA and Python). Or "
        "a file or folder beside the script has the name of a package (torch.py): rename it",
    ),
    (
        "No CUDA GPUs are available|Found no NVIDIA driver|libcuda.so|invalid device ordinal",
        "no GPU here, or more processes than GPUs: ask for one (sbatch --gres=gpu:1), start a "
        "container with --nv, look at CUDA_VISIBLE_DEVICES; one process for each: "
        "--nproc_per_node=$(nvidia-smi -L | wc -l)",
    ),
    (
        "GLIBCXX_|cannot open shared object file",
        "a library is not on this node, or another one is found first: load its module before "
        "runner exec (libmpi: the site's MPI module), or unload gcc and cuda and export "
        "LD_LIBRARY_PATH=PREFIX/lib:$LD_LIBRARY_PATH with the PREFIX of the environment",
    ),
    (
        "No module named|requires `accelerate",
        "add that package to the environment's list, and stage it again; for a file of yours: "
        "start the script from its folder",
    ),
    (
        "CUDA out of memory",
        "a smaller batch per GPU with more gradient_accumulation_steps, or "
        "gradient_checkpointing=True",
    ),
    (
        "out of shared memory|insufficient shared memory|killed by signal: Killed"
        "|annot allocate memory",
        "the job's memory, or /dev/shm, is used up: ask for more (--mem), look at df -h /dev/shm, "
        "and use fewer DataLoader workers, or num_workers=0",
    ),
    (
        "ancdata|Too many open files|can't start new thread",
        "a limit of this node: `ulimit -n $(ulimit -Hn)` before runner exec for open files; "
        "`ulimit -u` shows that of threads: export OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1; "
        "for both: fewer workers",
    ),
    (
        "No locks available|unction not implemented|database is locked|disk I/O error"
        "|No usable temporary directory|AF_UNIX path too long|Read-only file system"
        "|No space left on device|Disk quota exceeded",
        "that disk is full (df -h, df -i, quota -s), cannot be written (the bundle never can), or "
        "has no file locks: give the script an output folder on another one; temporary files and "
        "databases go to $TMPDIR, and where that is the cause: export TMPDIR=/tmp",
    ),
    (
        "Repository id must be 'namespace/name'",
        "this version of the libraries takes no name without its owner: write the whole name in "
        'the script, as in the line `... is answered by OWNER/NAME` ("Salesforce/wikitext")',
    ),
    (
        "nothing is uploaded from here|Token is required|LocalTokenNotFound",
        "nothing is uploaded from a compute node, and no login is needed to read the bundle: take "
        "push_to_hub, create_repo and login() out of the script, save into a folder, and upload "
        "that from a machine with internet",
    ),
    (
        "RepositoryNotFound|not a valid model identifier|LocalEntryNotFound|DatasetNotFound"
        "|Repo id must|Incorrect path_or_model_id",
        "the bundle has nothing under that name: see the line `asked for, not here`, and `stage "
        "show BUNDLE`. A folder that is not on this node: give the name on the Hub, or copy it",
    ),
    (
        "trust_remote_code",
        "the model has code of its own: `allow_code: true` in the manifest brings it, and the "
        "script must pass trust_remote_code=True",
    ),
    (
        "padding token|TextEncodeInput must be",
        "in the script: tokenizer.pad_token = tokenizer.eos_token, and for the model "
        "model.config.pad_token_id = tokenizer.pad_token_id; and filter rows without a text (null)",
    ),
    (
        "does not require grad|unscale FP16 gradients",
        "LoRA with gradient checkpointing wants model.enable_input_require_grads(); fp16=True "
        "wants weights in float32: load the model with dtype=torch.float32, or use bf16",
    ),
    (
        "Unable to find address for",
        "GLOO_SOCKET_IFNAME names no interface of this node: unset it (`ip -br address` shows the "
        "names; gloo reads no `^` and no prefixes)",
    ),
    (
        "device-side assert",
        "often a token or a label beyond its table: on a CPU the same step names it "
        "(CUDA_VISIBLE_DEVICES= python ...)",
    ),
)


def advice(error: Optional[BaseException]) -> str:
    """What helps against an error, or against one of its causes; empty: not known."""
    text, seen, of_web = "", 0, False
    while error is not None and seen < 20:
        text += "%s: %s\n" % (type(error).__name__, error)
        of_web = of_web or "http" in type(error).__module__  # httpx says no more than "Errno -3"
        error, seen = error.__cause__ or error.__context__, seen + 1
    # Ranks that do not reach each other must not be told about the internet.
    lost = any(words in text for words in _NOT_REACHED)
    if re.search("FileNotFoundError: http|NLTK Downloader", text) or (
        lost and (of_web or re.search("http|urlo", text, re.I))
    ):
        return _OWN_ENDPOINT if sets_endpoint() else _NO_INTERNET
    changed = re.search(_CHANGED, text)
    if changed:
        return changed.group() + ": start the script again, and push no bundle that a job reads"
    return next((line for words, line in ADVICE if re.search(words, text)), "")


def sets_endpoint() -> bool:
    """Whether the script asks another Hub than ours, which is always on loopback."""
    return "//127.0.0.1" not in os.environ.get("HF_ENDPOINT", "//127.0.0.1")


def install() -> None:
    """Adds the line to what an error prints that nobody catches; in the first rank alone."""
    before = sys.excepthook

    def hook(
        kind: Type[BaseException], error: BaseException, trace: Optional[TracebackType]
    ) -> None:
        before(kind, error, trace)
        try:
            line = advice(error)
        except Exception:
            return
        if line and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            sys.stderr.write("runner exec: %s\n" % line)
            sys.stderr.flush()

    sys.excepthook = hook


_WEB = (80, 443)
_asked: "set[str]" = set()


def watch(event: str, arguments: Tuple[Any, ...]) -> None:
    """Prints a line at the first connection to each address on the internet (PEP 578).

    Where a node has no internet, many sites drop such packets: the script waits for minutes
    without a word.
    """
    if event != "socket.connect" or len(arguments) < 2 or not isinstance(arguments[1], tuple):
        return
    host, port = arguments[1][:2]
    if port not in _WEB or host in _asked or len(_asked) >= 9:
        return
    _asked.add(host)
    try:
        import ipaddress

        if not ipaddress.ip_address(host).is_global:
            return
    except ValueError:
        return
    _tell("connects to %s, port %d, on the internet" % (host, port))


def _tell(what: str) -> None:
    way = _OWN_ENDPOINT if sets_endpoint() else "`stage trace` on the laptop names the file"
    sys.stderr.write(
        "runner exec: the script %s: on a node without internet it waits there, perhaps for "
        "minutes (%s)\n" % (what, way)
    )
    sys.stderr.flush()


def watch_names() -> None:
    """Prints a line at the first look-up of each host of the web that fails.

    Where no name resolves, which is the usual compute node, libraries try again for minutes, and
    catch the error each time: no traceback says it meanwhile. The audit event of a look-up (PEP
    578) comes before it and not after it, so this function alone sees that it fails.
    """
    import socket

    look_up = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *more: Any, **named: Any) -> Any:
        try:
            return look_up(host, port, *more, **named)
        except socket.gaierror:
            if port in (*_WEB, "http", "https") and host not in _asked and len(_asked) < 9:
                _asked.add(host)
                _tell("asks for %s, and this node finds no such host" % host)
            raise

    socket.getaddrinfo = getaddrinfo


if __name__ == NAME:
    install()
    if hasattr(sys, "addaudithook"):  # Python 3.8
        sys.addaudithook(watch)
    watch_names()
