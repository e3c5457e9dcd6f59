"""A bundle to damage many times. A repair costs as much as the damage, not as the whole bundle."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

State = tuple[int, ...]


class Workbench:
    """A copy of a sound bundle, `root`, in its own folder. Damages may add files there, too."""

    def __init__(self, sound: Path, folder: Path) -> None:
        self.root = folder / "bundle"
        self._sound = sound
        subprocess.run(["cp", "-r", "--sparse=always", sound, self.root], check=True)
        self._states = self._look()

    def _look(self) -> dict[str, State]:
        """Path -> values that change with any change of the file; of folders only the path."""
        states: dict[str, State] = {}
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            for entry in os.scandir(self.root.parent / folder):
                path, status = f"{folder}{entry.name}", entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(f"{path}/")
                    states[path] = (status.st_mode,)
                else:
                    change = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                    states[path] = (status.st_mode, *change)
        return states

    def undo(self) -> None:
        """Restores the sound bundle: removes new files, copies missing and changed ones."""
        found = self._look()
        parent = self.root.parent
        different = [path for path in found if found[path] != self._states.get(path)]
        for path in sorted(different, reverse=True):
            if (parent / path).is_dir() and not (parent / path).is_symlink():
                shutil.rmtree(parent / path)
            else:
                (parent / path).unlink(missing_ok=True)
        for path in sorted(self._states):
            if not os.path.lexists(parent / path):
                original = self._sound / Path(path).relative_to(self.root.name)
                if stat.S_ISDIR(self._states[path][0]):
                    (parent / path).mkdir()
                elif original.stat().st_size < 2**20:
                    shutil.copyfile(original, parent / path)
                else:
                    subprocess.run(["cp", "--sparse=always", original, parent / path], check=True)
        self._states = self._look()
