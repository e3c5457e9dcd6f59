"""Lets the children of a script ask the same Hub as the script, whatever variables it gives them.

`stage trace` and `runner exec` put a copy of this file as `sitecustomize.py` into a folder on
PYTHONPATH, so each Python of the script loads it (Library Reference, "site"). `subprocess.run(...,
env={...})` drops all variables but those named, ours too; an audit hook (PEP 578) adds them again.
A shell script that sets such variables itself comes after us, too: they are put back.
It imports nothing of airlift and has the syntax of Python 3.6. A `sitecustomize` of the environment
is loaded as if this one were not there.
"""

import os
import sys
from typing import Any, Dict, Mapping, Tuple

SHARED = (
    *("HF_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"),
    *("HF_EVALUATE_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE", "HF_HUB_DISABLE_XET"),
    *("HF_HUB_DISABLE_TELEMETRY", "HF_UPDATE_DOWNLOAD_COUNTS", "PYTHONPATH", "AIRLIFT_UNRECORDED"),
    *("AIRLIFT_BUNDLE", "AIRLIFT_HUB"),
    *("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"),
)
"""Variables of a Hub's clients, as far as they are set."""
UNRECORDED = "AIRLIFT_UNRECORDED"
"""Names the file for commands whose variables cannot be changed, one per line."""

HUB = "AIRLIFT_HUB"
"""Has the variables of the Hub that is served here, as JSON."""
REMOVED = (
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"),
    "TRANSFORMERS_CACHE",
)
"""Variables that stop libraries from asking a Hub, or old libraries from using the cache."""

_ENVIRONMENTS = {"subprocess.Popen": 3, "os.exec": 2, "os.posix_spawn": 2, "os.spawn": 3}
"""Audit event -> the place of the new variables among its arguments; after the command's words."""


def share(event: str, arguments: Tuple[Any, ...]) -> None:
    """Adds the variables to those of a new process, or records that it runs without them."""
    if event == "socket.getaddrinfo":
        refuse_names_below_loopback(arguments[0])
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
    elif b"HF_ENDPOINT" not in given and UNRECORDED in os.environ:
        with open(os.environ[UNRECORDED], "a", encoding="utf-8") as file:
            text = words if isinstance(words, str) else " ".join(map(os.fsdecode, words))
            file.write(" ".join(text.split()) + "\n")


def refuse_names_below_loopback(host: object) -> None:
    """Refuses `datasets-server.127.0.0.1`, which datasets makes of HF_ENDPOINT and does without.

    On a node without internet a name server may keep each rank waiting for half a minute.
    """
    if isinstance(host, str) and host.endswith(".127.0.0.1"):
        import socket

        raise socket.gaierror(socket.EAI_NONAME, "airlift: there is no %s" % host)


def is_in_the_way(name: str, value: str) -> bool:
    """Whether a variable keeps a script from a Hub on loopback: huggingface_hub reads no socks."""
    is_off = name in REMOVED and value not in ("", "0")
    return is_off or (name.lower().endswith("_proxy") and value.startswith("socks"))


def with_hub(environ: Mapping[str, str], ours: Dict[str, str]) -> Dict[str, str]:
    """The variables of a script whose Hub is served here.

    Args:
        ours: those that name this Hub, and its caches.
    """
    import json

    kept = {name: value for name, value in environ.items() if not is_in_the_way(name, value)}
    proxies = {name: with_loopback(kept.get(name, "")) for name in ("no_proxy", "NO_PROXY")}
    return {**kept, **proxies, **ours, HUB: json.dumps(ours)}


def with_loopback(hosts: str) -> str:
    """Adds loopback to a no_proxy list: else a proxy would be asked for what is served here."""
    have = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join([*have, *(host for host in ("127.0.0.1", "localhost") if host not in have)])


def put_back() -> None:
    """Undoes what a shell script set after the start, such as HF_ENDPOINT, and prints it."""
    import json

    before = dict(os.environ)
    ours = json.loads(before[HUB])
    after = with_hub(before, ours)
    changed = sorted(n for n in before if n not in after or (n in ours and before[n] != ours[n]))
    changed += [name for name in ours if name not in before]
    for name in before.keys() - after.keys():
        del os.environ[name]
    os.environ.update(after)
    if changed and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        sys.stderr.write(
            "airlift: set anew since the start, and put back, because the Hub is served here: %s\n"
            % ", ".join(changed)
        )
        sys.stderr.flush()


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
    if HUB in os.environ:
        put_back()
    if hasattr(sys, "addaudithook"):  # Python 3.8
        sys.addaudithook(share)
    try:
        import airlift_last_words  # type: ignore[import-not-found] # noqa: F401 - of `runner exec`
    except ImportError:
        pass
    load_the_next()
