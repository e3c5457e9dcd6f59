"""One script, from its source to two ranks without a network: trace, stage, exec."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.hub.loopback_hub import LoopbackHub
from scripts.lib.real_scripts.scripts import Script, Scripts
from scripts.lib.real_scripts.sources import Sources
from scripts.lib.real_scripts.twins import make_data, make_twins

NO_NETWORK = ("unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "AIRLIFT_STORE")
LIMIT_S = 900


@dataclass(frozen=True)
class Result:
    """How far a script came: the last step, its exit code, and what it printed."""

    script: Script
    step: str
    status: int
    words: str
    asked_for_more: str = ""

    @property
    def works(self) -> bool:
        return self.step == "done"

    @property
    def is_as_listed(self) -> bool:
        """Whether it works, or ends at the line that the list names."""
        if self.script.in_the_way:
            return not self.works and self.script.ends_with in self.words
        return self.works

    @property
    def last_words(self) -> str:
        return "\n".join(self.words.splitlines()[-25:])


class Road:
    """A working folder for one script, and the commands of its journey.

    Args:
        folder: empty.
        python: of the scripts' environment.
    """

    def __init__(self, script: Script, found: Scripts, folder: Path, python: Path) -> None:
        self.script, self.found, self.folder, self.python = script, found, folder, python

    def walk(self, sources: Sources) -> Result:
        """Runs the script on this laptop, stages what it asked for, runs it on two ranks.

        Raises:
            NoSource: the script cannot be had here.
        """
        script = self.script
        for place in ("laptop", "node"):
            sources.export(script.repository, script.commit, script.folder, self.folder / place)
            if script.data:
                make_data(script.data, self.folder / place / "data")
        with ExitStack() as stack:
            hub = stack.enter_context(LoopbackHub(self.folder / "hub"))
            make_twins(hub.repositories, script.models, script.datasets, self.python)
            self._add_metrics(hub, sources)
            traced = self._stage(
                *("trace", "-o", "../m.yaml", "--allow-code", "--endpoint", hub.endpoint, "--"),
                *script.argv(self.python, 1),
            )
            if traced.returncode:
                return self._result("trace", traced)
            fetched = self._stage(
                *("fetch", "../m.yaml", "-o", "../bundle", "--endpoint", hub.endpoint)
            )
            if fetched.returncode:
                return self._result("fetch", fetched)
        done = self._exec()
        if done.returncode:
            return self._result("exec", done)
        if script.leaves and not list((self.folder / "node").glob(script.leaves)):
            return self._result(f"exec: no {script.leaves}", done)
        return self._result("done", done)

    def _add_metrics(self, hub: LoopbackHub, sources: Sources) -> None:
        found = self.found
        for metric in self.script.metrics:
            files = sources.export(
                *(found.metrics_repository, found.metrics_commit, f"metrics/{metric}"),
                self.folder / "metrics" / metric,
            )
            hub.repositories.commit("spaces", f"evaluate-metric/{metric}", files)

    def _stage(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [str(self.python), "-m", "stage", *arguments]
        return self._run(argv, self.folder / "laptop")

    def _exec(self) -> subprocess.CompletedProcess[str]:
        local = self.folder / "local"
        local.mkdir()
        argv = [*NO_NETWORK, str(self.python), "-m", "runner", "exec", "--bundle", "../bundle"]
        argv += ["--", *self.script.argv(self.python, 2)]
        return self._run(argv, self.folder / "node", TMPDIR=str(local))

    def _run(self, argv: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        environ = {
            **kept,
            "HOME": str(folder.parent / "home"),
            "PATH": f"{self.python.parent}{os.pathsep}{Path(sys.executable).parent}"
            f"{os.pathsep}{kept.get('PATH', '')}",
            "OMP_NUM_THREADS": "1",
            # Without it accelerate starts no process group where there is no GPU.
            "ACCELERATE_USE_CPU": "true",
            **(self.script.environ or {}),
            **more,
        }
        try:
            return subprocess.run(
                argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(argv, 124, "", f"no end after {LIMIT_S} s")

    def _result(self, step: str, done: subprocess.CompletedProcess[str]) -> Result:
        asked = [line for line in done.stderr.splitlines() if "not in this bundle" in line]
        name = step.split(":")[0]
        (self.folder / f"{name}.out").write_text(done.stdout)
        (self.folder / f"{name}.err").write_text(done.stderr)
        words = done.stdout + done.stderr
        return Result(self.script, step, done.returncode, words, "\n".join(dict.fromkeys(asked)))
