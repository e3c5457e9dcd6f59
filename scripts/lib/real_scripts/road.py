"""One script, from its source to two ranks without a network: trace, stage, exec."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.lib.hub.loopback_hub import LoopbackHub
from scripts.lib.real_scripts.scripts import Script, Scripts
from scripts.lib.real_scripts.sources import Sources
from scripts.lib.real_scripts.twins import make_twins

NO_NETWORK = ("unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "AIRLIFT_STORE")
LIMIT_S = 900


class Road:
    """A working folder for one script, and the commands of its journey.

    Args:
        folder: empty.
        python: of the scripts' environment.
    """

    def __init__(self, script: Script, found: Scripts, folder: Path, python: Path) -> None:
        self.script, self.found, self.folder, self.python = script, found, folder, python

    def walk(self, sources: Sources) -> str:
        """Runs the script on this laptop, stages what it asked for, runs it on two ranks.

        Returns:
            What `runner exec` and the script printed.

        Raises:
            NoSource: the script cannot be had here.
            AssertionError: a step failed; has its last words.
        """
        script = self.script
        for place in ("laptop", "node"):
            sources.export(script.repository, script.commit, script.folder, self.folder / place)
        with LoopbackHub(self.folder / "hub") as hub:
            make_twins(hub.repositories, script.models, script.datasets)
            self._add_metrics(hub, sources)
            to_hub = ("--endpoint", hub.endpoint)
            traced = ("trace", "-o", "../m.yaml", "--allow-code", *to_hub, "--")
            self._stage(*traced, *script.argv(self.python, 1))
            self._stage("fetch", "../m.yaml", "-o", "../bundle", *to_hub)
        words = self._exec()
        if script.leaves:
            assert list((self.folder / "node").glob(script.leaves)), f"no {script.leaves}\n{words}"
        return words

    def _add_metrics(self, hub: LoopbackHub, sources: Sources) -> None:
        found = self.found
        for metric in self.script.metrics:
            files = sources.export(
                *(found.metrics_repository, found.metrics_commit, f"metrics/{metric}"),
                self.folder / "metrics" / metric,
            )
            hub.repositories.commit("spaces", f"evaluate-metric/{metric}", files)

    def _stage(self, *arguments: str) -> str:
        argv = [str(self.python), "-m", "stage", *arguments]
        return self._run(argv, self.folder / "laptop")

    def _exec(self) -> str:
        local = self.folder / "local"
        local.mkdir()
        argv = [*NO_NETWORK, str(self.python), "-m", "runner", "exec", "--bundle", "../bundle"]
        argv += ["--", *self.script.argv(self.python, 2)]
        return self._run(argv, self.folder / "node", TMPDIR=str(local))

    def _run(self, argv: list[str], folder: Path, **more: str) -> str:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        folders = (str(self.python.parent), str(Path(sys.executable).parent), kept.get("PATH", ""))
        environ = {
            **kept,
            "HOME": str(folder.parent / "home"),
            "PATH": os.pathsep.join(folders),
            "OMP_NUM_THREADS": "1",
            # Without it accelerate starts no process group where there is no GPU.
            "ACCELERATE_USE_CPU": "true",
            **more,
        }
        done = subprocess.run(
            argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S
        )
        words = done.stdout + done.stderr
        last = "\n".join(words.splitlines()[-25:])
        assert not done.returncode, f"{' '.join(argv)}: exit code {done.returncode}\n{last}"
        return words
