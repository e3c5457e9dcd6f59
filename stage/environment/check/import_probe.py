"""Imports packages one after another, and writes what happens, one JSON object per line.

    python import_probe.py [--keep FOLDER] ANSWERS PACKAGE...

The Python of an environment runs this file, on the laptop or in a job's own shell. So it imports
nothing of airlift, and it has the syntax of Python 3.6. An import can kill the process or never
end: therefore each line is written before the next import begins. PACKAGE may be `module:name`,
for libraries that import their parts at the first use.

These imports take seconds. With `--keep`, answers without a failure are kept in FOLDER, and
given again for the rest of the day while nothing changes that decides what an import does.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import time
from typing import Any, Dict, List, Optional

# Variables that differ from shell to shell and decide nothing about an import.
OF_A_SHELL = re.compile(
    r"_$|SHLVL$|(OLD)?PWD$|TERM|COLUMNS$|LINES$|SSH_|XDG_SESSION|TMUX|STY$|WINDOW|LS_COLORS$|TMPDIR$"
)


def write(path: str, **answer: Any) -> None:
    """Appends one line; it is in the file when this returns."""
    with open(path, "a") as file:
        file.write(json.dumps(answer) + "\n")


def torch_on_disk() -> Dict[str, Optional[str]]:
    """What torch/version.py says, without an import: `cuda` is None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return {}
    path = os.path.join(os.path.dirname(spec.origin), "version.py")
    with open(path) as file:
        text = file.read()
    found = re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *(None|'[^']*'|\"[^\"]*\")", text, re.M)
    return {name.strip("_"): None if value == "None" else value[1:-1] for name, value in found}


def torch_facts(torch: Any) -> Dict[str, Any]:
    """The GPUs that this torch has code for."""
    # `torch.cuda.get_arch_list()` is empty where there is no driver, as on a login node.
    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    if flags is None or not torch.version.cuda:
        return {}
    return {"architectures": (flags() or "").split()}


def check_partners(package: str, imported: Any) -> None:
    """Raises what a package raises only where it is used, for a partner of another version."""
    if package == "torch" and importlib.util.find_spec("numpy") is not None:
        imported.zeros(1).numpy()
    if package == "bitsandbytes":
        names = os.listdir(os.path.dirname(imported.__file__))
        found = (re.match(r"libbitsandbytes_cuda(\d+)(\d)(_\w+)?\.so$", name) for name in names)
        have = sorted({match.group(1, 2) for match in found if match})
        cuda = torch_on_disk().get("cuda")
        if have and cuda and cuda.partition(".")[0] not in [major for major, _ in have]:
            listed = ", ".join(map(".".join, have))
            raise RuntimeError("it has libraries for CUDA %s, and torch has %s" % (listed, cuda))


def try_import(name: str) -> Any:
    """Imports `module` or `module:name`; returns the module."""
    module, _, attribute = name.partition(":")
    imported = importlib.import_module(module)
    if attribute:
        getattr(imported, attribute)
    return imported


def changed(path: str) -> List[Any]:
    """When a file or the list of a folder changed last."""
    try:
        found = os.stat(path)
        return [path, found.st_mtime, found.st_size]
    except OSError:
        return [path]


def folders_of(name: str) -> List[str]:
    """Paths that change with a package; none: it is not found. Nothing is imported."""
    try:
        spec = importlib.util.find_spec(name.partition(":")[0])
        origin = (spec.origin if spec is not None else None) or ""
    except Exception:
        return []
    folder = os.path.dirname(origin)
    return [origin, folder, os.path.join(folder, "lib")]


def kept_at(folder: str, names: List[str]) -> str:
    """The file for the answers about packages: its name is a digest of all that decides them.

    These are the day, this Python, its variables, and when the files and folders changed that
    decide what is imported.
    """
    paths = [sys.executable, __file__, "/etc/ld.so.cache"]
    paths += sys.path + os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for name in names:
        paths += folders_of(name)
    variables = sorted(item for item in os.environ.items() if not OF_A_SHELL.match(item[0]))
    basis = [names, sys.version, os.uname().nodename, int(time.time() // 86400), variables]
    text = json.dumps([basis, [changed(path) for path in paths]])
    return os.path.join(folder, hashlib.sha256(text.encode()).hexdigest()[:32])


def read_kept(path: str) -> str:
    """The answers that were kept; empty: none."""
    try:
        with open(path) as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def keep(path: str, answers: str) -> None:
    """Keeps the answers about packages, if none of them failed."""
    with open(answers) as file:
        lines = file.readlines()
    if any(line.startswith('{"failed"') for line in lines):
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        whole = "%s.%d" % (path, os.getpid())
        with open(whole, "w") as file:
            file.writelines(li for li in lines if li.startswith(('{"imported"', '{"done"')))
        os.replace(whole, path)
    except OSError:
        pass  # it saves time, no more


def main(path: str, names: List[str], kept: str = "") -> None:
    """Imports all of `names`; a failure does not end it.

    Args:
        path: of the file for the answers; lines are appended.
        names: the packages.
        kept: the folder in which answers are kept; empty: none.
    """
    write(
        path,
        python=sys.executable,
        version=".".join(map(str, sys.version_info[:3])),
        prefix=sys.prefix,
        library_path=os.environ.get("LD_LIBRARY_PATH", ""),
        devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    try:
        write(path, torch=torch_on_disk())
    except Exception as error:
        write(path, torch={}, unread=str(error))
    lines = read_kept(kept_at(kept, names)) if kept else ""
    if lines:
        write(path, kept=True)
        with open(path, "a") as file:
            file.write(lines)
        return
    import_all(path, names)
    if kept:
        # Only now: the first import of a package changes its folder, by a `__pycache__` in it.
        keep(kept_at(kept, names), path)


def import_all(path: str, names: List[str]) -> None:
    """Imports one package after another, and writes what happens."""
    for name in names:
        package = name.partition(":")[0]
        write(path, begin=package)
        try:
            imported = try_import(name)
            facts = {"version": str(getattr(imported, "__version__", ""))}  # type: Dict[str, Any]
            if package == "torch":
                facts.update(torch_facts(imported))
                os.environ.setdefault(  # deepspeed looks for a GPU at its import
                    "DS_ACCELERATOR", "cuda" if imported.cuda.is_available() else "cpu"
                )
            write(path, imported=package, facts=facts)
            check_partners(package, imported)
        except Exception as error:
            missing = getattr(error, "name", None) if isinstance(error, ImportError) else None
            write(path, failed=package, kind=type(error).__name__, text=str(error), missing=missing)
    write(path, done=True)


if __name__ == "__main__":
    if sys.argv[1] == "--keep":
        main(sys.argv[3], sys.argv[4:], kept=sys.argv[2])
    else:
        main(sys.argv[1], sys.argv[2:])
