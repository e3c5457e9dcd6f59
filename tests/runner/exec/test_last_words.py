"""The line that `runner exec` adds to an error of a user's own script."""

from __future__ import annotations

import pytest

from runner.exec import last_words
from runner.exec.last_words import advice

# entry of docs/first-job-failures.md, or a name -> a library's words, a part of our line
ADVISED = {
    "X1": ("CUDA_HOME does not exist, unable to compile CUDA op(s)", "module load"),
    "X3": ("Installed CUDA version 12.1 does not match the version torch was compiled with 11.8",
           "torch.version.cuda"),
    "X5": ("Unable to JIT load the fused_adam op due to ninja not being installed", "`ninja`"),
    "X7": ("'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'", "first error above"),
    "X8": ("Error building extension 'fused_adam'", "the compiler's own error"),
    "another rank's build": ("/tmp/x/deepspeed_shm_comm/deepspeed_shm_comm.so: cannot open "
                             "shared object file: No such file or directory", "first error"),
    "L1": ("No module named 'mpi4py'", "torchrun"),
    "L5": ("port: 29500 ... EADDRINUSE", "MASTER_PORT"),
    "N8": ("The connection to the C10d store has failed", "--rdzv-endpoint"),
    "S6": ("[Errno 37] No locks available", "$TMPDIR"),
    "S7": ("[Errno 38] Function not implemented", "$TMPDIR"),
    "S8": ("DataLoader worker is killed by signal: Bus error. It is possible that dataloader's "
           "workers are out of shared memory", "num_workers=0"),
    "S9": ("Too many open files. Communication with the workers is no longer possible", "ulimit"),
    "S10": ("received 0 items of ancdata", "ulimit -n"),
    "T10": ("the tokenizer does not have a padding token", "pad_token"),
    "D9": ("Feature type 'List' not found", "datasets>=4"),
    "E13": ("libmpi.so.40: cannot open shared object file", "MPI module"),
    "a device of another": ("CUDA error: invalid device ordinal", "--nproc_per_node"),
    "no GPU": ("No CUDA GPUs are available", "--gres=gpu:1"),
    "old packages": ("numpy.dtype size changed, may indicate binary incompatibility", "numpy<2"),
    "code": ("Please pass the argument `trust_remote_code=True`", "allow_code: true"),
    "B9": ("Attempting to unscale FP16 gradients.", "dtype=torch.float32"),
    "a fraction": ("Input should be a valid integer, got a number with a fractional part",
                   "whole numbers"),
    "auto": ("Input should be a valid integer, unable to parse string as an integer "
            "[type=int_parsing, input_value='auto', input_type=str]", "write numbers"),
    "E14": ("Using the `Trainer` with `PyTorch` requires `accelerate>=1.1.0`",
            "environment's list"),
    "E15": ("__init__() got an unexpected keyword argument 'evaluation_strategy'", "eval_strategy"),
    "E16": ("module 'numpy' has no attribute 'float'.", "numpy<1.24"),
    "a package": ("No module named 'flash_attn'", "add that package"),
    "no memory": ("DataLoader worker (pid 12) is killed by signal: Killed.", "--mem"),
    "M5": ("element 0 of tensors does not require grad and does not have a grad_fn",
           "enable_input_require_grads"),
    "L13": ("Default process group has not been initialized", "torchrun"),
    "O13": ("Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/home/me/llama'",
            "not on this node"),
    "a short name": ("Repository id must be 'namespace/name', got 'wikitext'.", "whole name"),
    "S11": ("database is locked", "$TMPDIR"),
    "an interface": ("[enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to "
                     "find address for: ib0", "GLOO_SOCKET_IFNAME"),
    "no padding in the model": ("Cannot handle batch sizes > 1 if no padding token is defined.",
                                "model.config.pad_token_id"),
    "a file of that name": ("partially initialized module 'torch' has no attribute 'nn' (most "
                            "likely due to a circular import)", "rename it"),
    "no threads": ("can't start new thread", "ulimit -u"),
    "numpy 2": ("Numpy is not available", "numpy<2"),
    "a new model": ("but Transformers does not recognize this architecture.", "newer"),
    "a token too many": ("CUDA error: device-side assert triggered", "beyond its table"),
    "a full disk": ("[Errno 28] No space left on device: '/tmp/x'", "df -h"),
    "no memory for a worker": ("[Errno 12] Cannot allocate memory", "--mem"),
    "a library": ("libcudnn.so.8: cannot open shared object file: No such file", "its module"),
    "a pair": ("cannot import name 'Cache' from 'transformers.cache_utils'", "`pip check`"),
    "S12": ("No usable temporary directory found in ['/local/job7', '/tmp']", "TMPDIR=/tmp"),
    "S13": ("AF_UNIX path too long", "TMPDIR=/tmp"),
    "S14": ("[Errno 30] Read-only file system: '/data/x'", "output folder"),
}  # fmt: skip


@pytest.mark.parametrize("entry", ADVISED)
def test_a_librarys_words_are_followed_by_what_helps(entry: str) -> None:
    words, line = ADVISED[entry]
    assert line in advice(RuntimeError(words))


def test_ranks_that_do_not_meet_are_not_told_about_the_internet() -> None:
    lost = RuntimeError("[Gloo] connect: Network is unreachable, remote=[10.0.0.2]:29500")
    assert advice(lost) == ""
    download = OSError("<urlopen error [Errno -2] Name or service not known>")
    assert "no internet" in advice(download)
    # `load_dataset("json", data_files="https://...")` says no more than this.
    assert "`url:`" in advice(FileNotFoundError("https://example.com/rows.json"))
    assert advice(RuntimeError("out of resource: shared memory, Required: 1, limit: 0")) == ""
    outer = KeyError("x")
    outer.__cause__ = ModuleNotFoundError("No module named 'mpi4py'")
    assert "torchrun" in advice(outer)


def test_a_connection_that_would_wait_forever_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No packet is sent: the hook is called as Python calls it."""
    monkeypatch.setattr(last_words, "_asked", set())
    for address in (("9.9.9.9", 443), ("9.9.9.9", 443), ("127.0.0.1", 80), ("10.0.0.1", 443),
                    ("9.9.9.10", 29500), "/run/socket", ("a name", 443)):  # fmt: skip
        last_words.watch("socket.connect", (None, address))
    said = capsys.readouterr().err
    assert said.count("runner exec: ") == 1 and "connects to 9.9.9.9, port 443" in said
