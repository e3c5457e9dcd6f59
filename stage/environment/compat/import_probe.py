"""Imports packages one after another, and writes what happens, one JSON object per line.

    python import_probe.py ANSWERS PACKAGE...

The Python of an environment runs this file, on the laptop or in a job's own shell. So it imports
nothing of airlift, and it has the syntax of Python 3.6. An import can kill the process or never
end: therefore each line is written before the next import begins. PACKAGE may be `module:name`,
for libraries that import their parts at the first use.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
from typing import Any, Dict, List, Optional


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
    """The GPUs that this torch has code for, and whether it works with the numpy that is here."""
    facts = {}  # type: Dict[str, Any]
    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    if flags is not None and torch.version.cuda:
        facts["architectures"] = (flags() or "").split()
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        facts["numpy"] = numpy.__version__
        try:
            torch.zeros(1).numpy()
        except RuntimeError as error:
            facts["numpy_fault"] = str(error)
    return facts


def cuda_libraries(package: Any) -> List[str]:
    """The CUDA versions that bitsandbytes has a library for: `121` is 12.1."""
    names = os.listdir(os.path.dirname(package.__file__))
    found = (re.match(r"libbitsandbytes_cuda(\d+)(_\w+)?\.so$", name) for name in names)
    return sorted({match.group(1) for match in found if match})


def try_import(name: str) -> Any:
    """Imports `module` or `module:name`; returns the module."""
    module, _, attribute = name.partition(":")
    imported = importlib.import_module(module)
    if attribute:
        getattr(imported, attribute)
    return imported


def main(path: str, names: List[str]) -> None:
    """Imports all of `names`; a failure does not end it."""
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
    for name in names:
        package = name.partition(":")[0]
        write(path, begin=package)
        try:
            imported = try_import(name)
            version = str(getattr(imported, "__version__", ""))
            facts = {"version": version}  # type: Dict[str, Any]
            if package == "torch":
                facts.update(torch_facts(imported))
                os.environ.setdefault(  # deepspeed looks for a GPU at its import
                    "DS_ACCELERATOR", "cuda" if imported.cuda.is_available() else "cpu"
                )
            if package == "bitsandbytes":
                facts["libraries"] = cuda_libraries(imported)
            write(path, imported=package, facts=facts)
        except Exception as error:
            missing = getattr(error, "name", None) if isinstance(error, ImportError) else None
            write(path, failed=package, kind=type(error).__name__, text=str(error), missing=missing)
    write(path, done=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
