"""Lets the children of a script ask the same Hub as the script, whatever variables it gives them.

`stage trace` and `runner exec` put a copy of this file as `sitecustomize.py` into a folder on
PYTHONPATH, so each Python of the script loads it (Library Reference, "site"). `subprocess.run(...,
env={...})` drops all variables but those named, ours too; an audit hook (PEP 578) adds them again.
It imports nothing of airlift and has the syntax of Python 3.6. A `sitecustomize` of the environment
is loaded as if this one were not there.
"""

import os
import sys
from typing import Any, Tuple

SHARED = (
    *("HF_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"),
    *("HF_EVALUATE_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE", "HF_HUB_DISABLE_XET"),
    *("HF_HUB_DISABLE_TELEMETRY", "HF_UPDATE_DOWNLOAD_COUNTS", "PYTHONPATH", "AIRLIFT_STRAYS"),
    "AIRLIFT_BUNDLE",
    *("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"),
)
"""Variables of a Hub's clients, as far as they are set."""
STRAYS = "AIRLIFT_STRAYS"
"""Names the file for commands whose variables cannot be changed, a line each."""

_ENVIRONMENTS = {"subprocess.Popen": 3, "os.exec": 2, "os.posix_spawn": 2, "os.spawn": 3}
"""Audit event -> the place of the new variables among its arguments; after the command's words."""


def share(event: str, arguments: Tuple[Any, ...]) -> None:
    """Adds the variables to those of a new process, or records that it runs without them."""
    at = _ENVIRONMENTS.get(event)
    if at is None or len(arguments) <= at:
        return
    given, words = arguments[at], arguments[at - 2 if event == "subprocess.Popen" else at - 1]
    if given is None or "HF_ENDPOINT" not in os.environ or "HF_ENDPOINT" in given:
        return
    # The other calls have read the variables when their event comes.
    if event == "subprocess.Popen" and isinstance(given, dict):
        for name in SHARED:
            if name in os.environ:
                given.setdefault(name, os.environ[name])
    elif b"HF_ENDPOINT" not in given and STRAYS in os.environ:
        with open(os.environ[STRAYS], "a", encoding="utf-8") as file:
            text = words if isinstance(words, str) else " ".join(map(os.fsdecode, words))
            file.write(" ".join(text.split()) + "\n")


def load_the_next() -> None:
    """Loads the `sitecustomize` that this file hides, if there is one."""
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.realpath(__file__))
    others = [path for path in sys.path if os.path.realpath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if hasattr(sys, "addaudithook"):  # Python 3.8
        sys.addaudithook(share)
    try:
        import airlift_last_words  # type: ignore[import-not-found] # noqa: F401 - of `runner exec`
    except ImportError:
        pass
    load_the_next()
