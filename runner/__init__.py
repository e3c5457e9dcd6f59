"""runner: trains from a bundle. This is the public Python API (docs/reference/python-api.md).

Everything here is imported at first use (PEP 562), so `import runner` is fast and modules can move
without breaking user code. Modules below `runner` are internal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from runner.config.run_config import RunConfig
    from runner.inputs import Inputs
    from runner.inputs import resolve as resolve_inputs

__all__ = ["Inputs", "RunConfig", "load_run", "resolve_inputs"]

_PLACES = {
    "Inputs": ("runner.inputs", "Inputs"),
    "RunConfig": ("runner.config.run_config", "RunConfig"),
    "resolve_inputs": ("runner.inputs", "resolve"),
}


def load_run(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a run file.

    Args:
        path: the YAML file.
        overrides: `a.b=value` texts, as given with `--set`; each value is read as YAML.

    Raises:
        StageError: exit code 2, with file:line, for each mistake in the run file.
    """
    from pathlib import Path

    from runner.config.run_config import RunConfig

    return RunConfig.load(Path(path), overrides)


if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name at its first use."""
        from importlib import import_module

        if name not in _PLACES:
            raise AttributeError(f"module 'runner' has no attribute {name!r}")
        module, symbol = _PLACES[name]
        value = globals()[name] = getattr(import_module(module), symbol)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
