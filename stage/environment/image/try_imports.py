"""Imports the large packages of a finished environment once, on the laptop, in a sandbox.

The sandbox (`stage.sandbox`) has no network.

A lock can be solvable and still hold two packages that do not go together: numpy 2 with an older
torch, flash-attn or torchvision for another torch, a transformers that wants another tokenizers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from stage.environment.check.imports import PROBE, Answers, faults, importable, read_answers
from stage.environment.spec.profile import MACHINES
from stage.errors import UsageError
from stage.progress import Reporter
from stage.sandbox import OFFLINE, close_network

WANTED = (
    "numpy", "torch", "torchvision", "torchaudio", "flash_attn", "xformers",
    "transformers:PreTrainedModel", "deepspeed", "peft", "accelerate", "bitsandbytes", "datasets",
)  # fmt: skip
"""Packages whose versions depend on each other; those that an environment has are imported."""
TIMEOUT_S = 600.0  # a first import compiles nothing (-B), but reads gigabytes from a slow disk


def check_imports(
    asset: str, root: Path, names: Sequence[str], platform: str, reporter: Reporter
) -> None:
    """Imports packages by the Python of an environment, and reports what cannot work.

    Args:
        asset: its name.
        root: its files, which are not changed.
        names: of its packages, as in the lock.
        platform: such as `linux-64`.

    Raises:
        UsageError: an import fails, for a reason that is the same on each machine.
    """
    wanted = importable(names, WANTED)
    if not wanted:
        return
    shown = ", ".join(name.partition(":")[0] for name in wanted)
    machine = os.uname().machine
    if not sys.platform.startswith("linux") or MACHINES[platform] != machine:
        reporter.note(
            f"{asset}: not tried whether {shown} can be imported together: it is for {platform}, "
            f"and this machine is {sys.platform} {machine}"
        )
        return
    answers, code, last_line = try_imports(root.absolute(), wanted)
    found = faults(answers, code)
    unknown = [fault.message for fault in found if not fault.known_here]
    if not answers.python:
        unknown = [f"its Python does not start here: {last_line or code}"]
    elif code is None:
        unknown.append(f"`import {answers.unfinished}` took more than {TIMEOUT_S:.0f} s")
    for text in unknown:
        reporter.note(f"{asset}: not known here: {text}")
    if refused := [fault for fault in found if fault.known_here]:
        listed = "\n".join(f"  {fault.message}\n    {fault.remedy}" for fault in refused)
        raise UsageError(
            f"{asset}: packages of this environment do not go together:\n{listed}",
            "Change the environment file, then fetch again. To take it as it is: "
            "--no-offline-check",
        )
    if not unknown:
        reporter.note(f"{asset}: {shown} can be imported, without network")


def try_imports(
    root: Path, wanted: Sequence[str], site: Mapping[str, str] = MappingProxyType({})
) -> tuple[Answers, int | None, str]:
    """The answers, the exit code (None: out of time), and the last line that was printed.

    Args:
        site: variables that the site's own torch may need.
    """
    with tempfile.TemporaryDirectory(prefix="airlift-imports-") as folder:
        path, printed = Path(folder, "answers"), Path(folder, "printed")
        path.touch()
        environ = {
            **site,
            **OFFLINE,
            "PATH": f"{root / 'bin'}:{site.get('PATH', '/usr/bin:/bin')}",
            "HOME": folder,
            "LANG": "C.UTF-8",
        }
        # -B: compiled files would become part of the environment. -I: nothing of this user.
        command = [str(root / "bin/python"), "-I", "-B", str(PROBE), str(path), *wanted]
        code: int | None = None
        with printed.open("wb") as output:
            try:
                code = subprocess.run(
                    command,
                    env=environ,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=TIMEOUT_S,
                    preexec_fn=close_network,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                pass
            except OSError as error:  # such as a musl Python here
                return Answers(), None, error.strerror or ""
        lines = printed.read_text(encoding="utf-8", errors="replace").split("\n")
        last_line = next((line for line in reversed(lines) if line.strip()), "")
        return read_answers(path.read_text(encoding="utf-8")), code, last_line
