"""Imports the code of a task of one's own: only with permission, only as it was staged."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from runner.data.own.look import METHODS, check_allowed
from runner.data.tokenizing import load_tokenizer
from runner.errors import StageError, UsageError, shortage
from runner.inputs import unreadable
from runner.resolved import CodeInput, ModelInput


def own_task(code: CodeInput, model: ModelInput, length: int) -> Any:
    """Makes the task of a run file whose `task` is a class of one's own.

    Args:
        code: where the class is.
        model: whose tokenizer the class gets; None if it has none.
        length: tokens per sequence.

    Raises:
        PolicyError: the run file does not allow the code to run.
        UsageError: a method is missing.
        DamageError: a file is not as it was staged.
        StageError: the code failed.
    """
    check_allowed(code)
    finder = _Finder(code)
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)
    has_tokenizer = any(name.startswith(("tokenizer", "vocab")) for name in model.digests)
    tokenizer = load_tokenizer(model) if has_tokenizer else None
    with their_code(code, "the start"):
        made = getattr(import_module(code.module), code.name)(tokenizer, length)
    if missing := [name for name in METHODS if not callable(getattr(made, name, None))]:
        raise UsageError(
            f"{code.path / code.file}: the task `{code.name}` has no "
            f"{', '.join(f'`{name}{METHODS[name]}`' for name in missing)}.",
            "A task has five methods; docs/howto/training/own-task.md has an example.",
        )
    return made


@contextmanager
def their_code(code: CodeInput, where: str) -> Iterator[None]:
    """Says which line of the user's file raised an error.

    Args:
        code: the task's.
        where: what was done, for the message.

    Raises:
        StageError: whatever the code raised, in one paragraph.
    """
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        mine = [frame for frame in frames if Path(frame.filename).is_relative_to(code.path)]
        if shortage(error) or not mine:
            raise
        last = mine[-1]
        raise StageError(
            f"{last.filename}:{last.lineno}: {type(error).__name__}: {error} "
            f"(in `{last.name}`, at {where})",
            "Correct that line, stage the file again, and run the same command.",
            exit_code=1,
        ) from None


class _Finder(MetaPathFinder, Loader):
    """Finds modules in an asset, and runs the bytes whose digest is in the lock."""

    def __init__(self, code: CodeInput) -> None:
        self._code = code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Finder) and other._code == self._code

    def __hash__(self) -> int:
        return hash(self._code.path)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of that name, if the asset has it."""
        stem = name.replace(".", "/")
        files = (f"{stem}.py", f"{stem}/__init__.py")
        file = next((file for file in files if file in self._code.digests), None)
        if file is None:
            return None
        origin = str(self._code.path / file)
        return spec_from_loader(name, self, origin=origin, is_package=file.endswith("/__init__.py"))

    def exec_module(self, module: ModuleType) -> None:
        """Runs a module, if its bytes are those that were staged."""
        path = Path(str(module.__spec__.origin if module.__spec__ else ""))
        module.__file__ = str(path)
        exec(compile(self._source(path), str(path), "exec"), module.__dict__)

    def get_source(self, name: str) -> str:
        """The text of a module, for tracebacks."""
        spec = self.find_spec(name)
        return self._source(Path(str(spec.origin))).decode() if spec else ""

    def _source(self, path: Path) -> bytes:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from None
        if sha256(data).hexdigest() != self._code.digests[str(path.relative_to(self._code.path))]:
            raise unreadable(path, "its bytes are not those that were fetched")
        return data
