"""One line of ours after the traceback of a user's own script, where we know what helps.

`runner exec` puts a copy of this file into a folder on PYTHONPATH, where each Python of the script
loads it (`stage.serve.children`). It imports nothing of airlift, and has the syntax of Python 3.6.
It changes nothing but `sys.excepthook`, which prints first what it printed before.
"""

import os
import sys
from types import TracebackType
from typing import Any, Optional, Tuple, Type

NAME = "airlift_last_words"
_NO_INTERNET = "a compute node has no internet: "
_STAGE_IT = (
    "stage the file (`url:` in the manifest), and read it from the bundle: "
    "$AIRLIFT_BUNDLE/data/files/NAME/FILE"
)
_NOT_REACHED = ("gaierror", "NameResolutionError", "Network is unreachable", "Errno -2", "Errno -3")
_SHM = "/dev/shm is full (df -h /dev/shm): fewer DataLoader workers, or num_workers=0"
_NO_GPU = (
    "no GPU can be used here: ask for one (sbatch --gres=gpu:1), start a container with --nv, and "
    "look at CUDA_VISIBLE_DEVICES"
)
_NO_FOLDER = (
    "the script names a folder that is not on this node: give the name on the Hub, which the "
    "bundle answers, or copy the folder"
)
_NOT_HERE = "the bundle has nothing under that name: see the line `asked for, not here`"
# A part of the error's text -> what helps. The first that is found counts.
ADVICE = (
    (
        "No module named 'mpi4py'",
        "DeepSpeed looks for MPI only where RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
        "MASTER_PORT are not all set: start the script with torchrun, inside runner exec",
    ),
    ("libmpi.so", "load the site's MPI module before runner exec, or leave mpi4py out"),
    (
        "EADDRINUSE",
        "another program on this node uses that port: torchrun --standalone, or a port of your "
        "own: export MASTER_PORT=$((20000 + ${SLURM_JOB_ID:-$$} % 10000))",
    ),
    ("ddress already in use", "another program on this node uses that port: take another one"),
    (
        "expected, but not set",
        "the script expects the variables of a launcher: start it with torchrun, inside runner "
        "exec",
    ),
    (
        "CUDA_HOME does not exist",
        "DeepSpeed compiles here and finds no CUDA toolkit: `module load` the CUDA of your torch "
        "(python -c 'import torch; print(torch.version.cuda)'), or use torch's own optimizer",
    ),
    (
        "does not match the version torch was compiled with",
        "load the module of the CUDA that torch has: python -c 'import torch; "
        "print(torch.version.cuda)'",
    ),
    (
        "inja is required",
        "`ninja` is not on PATH: activate the environment that has it, before runner exec",
    ),
    ("ninja not being installed", "`ninja` is not on PATH: activate the environment that has it"),
    (
        "ds_opt_adam",
        "DeepSpeed's CPU Adam was not compiled: the cause is the first error above; torch's own "
        "AdamW needs no compiler",
    ),
    (
        "Error building extension",
        "compiling failed: the compiler's own error is above; torch's own optimizer needs none",
    ),
    (
        "Unable to JIT load",
        "DeepSpeed cannot compile this here: `ds_report` says what is missing; torch's own "
        "optimizer needs none",
    ),
    (
        "train_batch_size is not equal",
        'the ds_config.json is for another number of ranks: write "auto", or batch = micro x '
        "accumulation x ranks",
    ),
    (
        "Feature type 'List' not found",
        "the data was written by datasets 4: ask for `datasets>=4` in the environment",
    ),
    (
        "does not have a padding token",
        "set one in the script: tokenizer.pad_token = tokenizer.eos_token",
    ),
    (
        "requires Ampere",
        "this GPU is older: leave out tf32 and bf16, and use fp16",
    ),
    (
        "ancdata",
        "too many open files: `ulimit -n $(ulimit -Hn)` before runner exec, or fewer workers",
    ),
    (
        "Too many open files",
        "`ulimit -n $(ulimit -Hn)` before runner exec, or fewer workers",
    ),
    ("workers are out of shared memory", _SHM),
    ("insufficient shared memory", _SHM),
    (
        "No locks available",
        "that folder's disk has no file locks: use one on the node's own disk, such as $TMPDIR",
    ),
    (
        "unction not implemented",
        "if it is about a lock: that folder's disk has none; use one on the node's own disk, such "
        "as $TMPDIR",
    ),
    (
        "C10d store has failed",
        "torchrun's ends do not find each other: start it once on each node (srun "
        "--ntasks-per-node=1), all with the same --rdzv-endpoint of the first node; on one node: "
        "torchrun --standalone",
    ),
    (
        "invalid device ordinal",
        "more processes than GPUs: --nproc_per_node=$(nvidia-smi -L | wc -l)",
    ),
    ("No CUDA GPUs are available", _NO_GPU),
    ("Found no NVIDIA driver", _NO_GPU),
    ("libcuda.so", _NO_GPU),
    (
        "GLIBCXX_",
        "another C++ library is found first: export LD_LIBRARY_PATH=PREFIX/lib:$LD_LIBRARY_PATH "
        "with the PREFIX of the environment, or unload the gcc or cuda module",
    ),
    (
        "FlashAttention2 has been toggled on",
        'flash-attn is not usable here: attn_implementation="sdpa" in the script needs none',
    ),
    (
        "undefined symbol",
        "two packages were compiled for different versions, as flash-attn for another torch: "
        "install the one whose file name says this torch, CUDA and Python",
    ),
    ("compiled using NumPy 1", "a package is older than NumPy 2: ask for `numpy<2`"),
    ("numpy.dtype size changed", "a package is older than NumPy 2: ask for `numpy<2`"),
    (
        "Disk quota exceeded",
        "your quota is used up: `quota -s` (Lustre: `lfs quota -h -u $USER .`); write elsewhere",
    ),
    (
        "trust_remote_code",
        "the model has code of its own: `allow_code: true` in the manifest brings it, and the "
        "script must pass trust_remote_code=True",
    ),
    (
        "NLTK Downloader",
        _NO_INTERNET + "stage nltk_data with `path:`, and export NLTK_DATA=BUNDLE/data/files/ASSET",
    ),
    ("RepositoryNotFound", _NOT_HERE),
    ("not a valid model identifier", _NOT_HERE),
    ("LocalEntryNotFound", "that file is not in the bundle: see `stage show BUNDLE`"),
    ("DatasetNotFound", _NOT_HERE),
    (
        "Weights only load failed",
        "torch 2.6 and newer load only tensors from a pickle: weights_only=False in the script for "
        "a file that you trust, or safetensors",
    ),
    (
        "unscale FP16 gradients",
        "the weights are in float16 and fp16=True wants float32: load the model with "
        "dtype=torch.float32, or use bf16",
    ),
    (
        "requires `accelerate",
        "`accelerate` is not in the environment: add it to its list of packages",
    ),
    (
        "unexpected keyword argument 'evaluation_strategy'",
        "newer transformers call it eval_strategy: change it in the script, or ask for "
        "`transformers<4.46` in the environment",
    ),
    (
        "unexpected keyword argument 'tokenizer'",
        "newer transformers call it processing_class: change it in the script, or ask for "
        "`transformers<5` in the environment",
    ),
    (
        "module 'numpy' has no attribute",
        "NumPy has no longer that name: ask for `numpy<1.24` in the environment (np.float, np.int, "
        "np.bool, np.object), or change it in the script",
    ),
    (
        "killed by signal: Killed",
        "the job ran out of memory: ask for more (--mem), or use fewer DataLoader workers",
    ),
    ("Repo id must", _NO_FOLDER),
    ("Incorrect path_or_model_id", _NO_FOLDER),
    (
        "database is locked",
        "a network disk locks no SQLite file: let the script write it to $TMPDIR",
    ),
    (
        "disk I/O error",
        "a network disk locks no SQLite file: let the script write it to $TMPDIR",
    ),
    (
        "Expected to have finished reduction",
        "a part of the model takes no part in the loss: find_unused_parameters=True for DDP "
        "(ddp_find_unused_parameters in TrainingArguments)",
    ),
    (
        "does not require grad",
        "with LoRA and gradient checkpointing: model.enable_input_require_grads(), or "
        'gradient_checkpointing_kwargs={"use_reentrant": False}',
    ),
    (
        "input_value='auto'",
        '"auto" in a ds_config.json is filled in by Trainer and accelerate alone: write numbers',
    ),
    (
        "got a number with a fractional part",
        "DeepSpeed wants whole numbers in ds_config.json, also for *_bucket_size",
    ),
    (
        "different device than the one you",
        'device_map={"": int(os.environ["LOCAL_RANK"])} in the script: one GPU for each process',
    ),
    (
        "Cannot copy out of meta tensor",
        'leave device_map="auto" and low_cpu_mem_usage out where several processes train',
    ),
    (
        "process group has not been initialized",
        "start the script with torchrun, inside runner exec; it must call init_process_group",
    ),
    (
        "CUDA out of memory",
        "a smaller batch per GPU with more gradient_accumulation_steps, or "
        "gradient_checkpointing=True",
    ),
    (
        "TextEncodeInput must be",
        "a row has no text (null, or a number): filter such rows before the tokenizer",
    ),
    (
        "onversation roles must alternate",
        "the chat template takes user and assistant in turns: join or drop the other messages",
    ),
    (
        "is not currently imported",
        "tokenizer_config.json names a class of another transformers: "
        "PreTrainedTokenizerFast.from_pretrained reads tokenizer.json",
    ),
    (
        "No usable temporary directory",
        "TMPDIR names no folder that can be written here: export TMPDIR=/tmp",
    ),
    (
        "Unable to find address for",
        "GLOO_SOCKET_IFNAME names no interface of this node: unset it (`ip -br address` shows the "
        "names; gloo reads no `^` and no prefixes)",
    ),
    (
        "batch sizes > 1 if no padding token",
        "the model must know the token, too: model.config.pad_token_id = tokenizer.pad_token_id",
    ),
    (
        "partially initialized module",
        "a file or folder beside the script has the name of a package (such as torch.py, "
        "datasets/): rename it",
    ),
    (
        "can't start new thread",
        "the limit of processes is reached: `ulimit -u`; export OMP_NUM_THREADS=1 and "
        "OPENBLAS_NUM_THREADS=1, and fewer workers",
    ),
    ("AF_UNIX path too long", "the path in TMPDIR is too long for a socket: export TMPDIR=/tmp"),
    (
        "Read-only file system",
        "that folder cannot be written on this node (the bundle never can): give the script an "
        "output folder on a disk that can",
    ),
    ("umpy is not available", "torch is older than NumPy 2: ask for `numpy<2`"),
    (
        "does not recognize this architecture",
        "the model is newer than transformers: ask for a newer `transformers` in the environment",
    ),
    (
        "device-side assert",
        "often a token or a label beyond its table: on a CPU the same step names it "
        "(CUDA_VISIBLE_DEVICES= python ...)",
    ),
    (
        "No space left on device",
        "that disk is full: df -h and df -i of the folder above; temporary files go to $TMPDIR",
    ),
    (
        "annot allocate memory",
        "the job's memory is used up: ask for more (--mem), or use fewer DataLoader workers",
    ),
    (
        "nable to create tensor",
        "texts of different lengths in a batch: truncation=True and padding=True for the tokenizer",
    ),
    ("unhandled system error", "NCCL names the cause with: export NCCL_DEBUG=INFO"),
    (
        "cannot open shared object file",
        "that library is not on this node: load its module before runner exec, or add a package "
        "that brings it to the environment",
    ),
    (
        "cannot import name",
        "two packages whose versions do not go together: `pip check`; pin both in the "
        "environment's list",
    ),
    ("ChildFailedError", "the script's own error is the first traceback above"),
    (
        "No module named",
        "add that package to the environment's list, and stage it again; for a file of yours: "
        "start the script from its folder",
    ),
)


def advice(error: Optional[BaseException]) -> str:
    """What helps against an error, or against one of its causes; empty: not known."""
    text, seen = "", 0
    while error is not None and seen < 20:
        text += "%s: %s\n" % (type(error).__name__, error)
        error, seen = error.__cause__ or error.__context__, seen + 1
    # Ranks that do not reach each other must not be told about the internet.
    if any(words in text for words in _NOT_REACHED) and ("http" in text.lower() or "urlo" in text):
        return _NO_INTERNET + _STAGE_IT
    if "FileNotFoundError: http" in text:
        return _NO_INTERNET + _STAGE_IT
    return next((line for words, line in ADVICE if words in text), "")


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
    sys.stderr.write(
        "runner exec: the script connects to %s, port %d, on the internet: on a node without "
        "internet it waits there, perhaps for minutes (`stage trace` on the laptop names the "
        "file)\n" % (host, port)
    )
    sys.stderr.flush()


if __name__ == NAME:
    install()
    if hasattr(sys, "addaudithook"):  # Python 3.8
        sys.addaudithook(watch)
