"""Children that look at the model and the texts by the ranks' Python, while other checks are done.

An answer without errors is kept for the next command.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner import kept
from runner.child import Child
from runner.config.run_config import RunConfig
from runner.data.recipe import Recipe
from runner.errors import StageError, UsageError
from runner.inputs import Inputs, ModelInput
from runner.job import with_torch, without_torch
from runner.job.findings import Finding, errors_of, warning


@dataclass(frozen=True)
class LookResult:
    """What a child has found.

    Attributes:
        findings: what it found.
        numbers: what it counted; an item is None where that failed; empty: nothing is known.
    """

    findings: tuple[Finding, ...]
    numbers: tuple[int | None, ...] = ()

    @property
    def has_errors(self) -> bool:
        """Whether something that it found would end the run."""
        return any(finding.level == "error" for finding in self.findings)


class Look:
    """What a child looks at.

    Args:
        kind: what it looks at, for messages.
        basis: all that its answer follows from, beside the Python.
        work: what the child does; returns findings and numbers.
        arguments: of `work`.
        python: the words that start its Python; empty: this one.
    """

    def __init__(
        self,
        kind: str,
        basis: Sequence[object],
        work: Callable[..., tuple[list[Finding], Sequence[int | None]]],
        arguments: tuple[object, ...],
        python: tuple[str, ...],
    ) -> None:
        self._kind, self._python = kind, python
        images = [_as_it_is(Path(word)) for word in python if Path(word).is_file()]
        self._path = kept.path_of(kind, *basis, [*images, *python])
        self._child = None if kept.read(self._path) else Child(work, arguments, python)

    def answer(self) -> LookResult:
        """Waits for the answer."""
        if self._child is None:
            known = kept.read(self._path)
            findings = tuple(Finding(**finding) for finding in known["findings"])
            return LookResult(findings, tuple(known["numbers"]))
        remedy = "Run it where there is more memory."
        if self._python:
            remedy = f"To see why: {shlex.join([*self._python, '-c', 'import runner, torch'])}"
        try:
            found, numbers = self._child.answer(f"the check of the {self._kind}", remedy)
        except UsageError as error:
            return LookResult(tuple(errors_of(error)))
        except StageError as error:
            return LookResult((warning(f"not checked: {error.message}", error.remedy),))
        answer = LookResult(tuple(found), tuple(numbers))
        if not answer.has_errors:
            plain = [finding.to_json() for finding in found]
            kept.keep(self._path, {"findings": plain, "numbers": numbers})
        return answer


def look_at_model(config: RunConfig, model: ModelInput, python: tuple[str, ...]) -> Look:
    """Whether transformers builds the model and finds its weights; it counts its parameters."""
    folder = config.model.folder or model.path
    sums = sorted(model.digests.items())
    if config.model.folder is not None:
        sums = [(path.name, _as_it_is(path)) for path in sorted(folder.iterdir())]
    engine = [config.engine.name, config.engine.wrap]
    versions = kept.versions("torch", "transformers", "deepspeed")
    theirs = (dict(config.deepspeed), config.precision, config.engine.zero, config.half)
    basis = ("findings", versions, sums, config.task, config.model.init, engine, theirs)
    return Look("model", basis, with_torch.look, (config, model.asset, folder), python)


def look_at_texts(
    config: RunConfig,
    inputs: Inputs,
    rows: tuple[int, str],
    train: Sequence[Recipe],
    counted: Sequence[Recipe],
    python: tuple[str, ...],
) -> Look:
    """What transformers says without torch: of the tokenizer, of first rows, of small datasets.

    Args:
        rows: of the embedding (0: not known), and where that is written.
        train: what is trained on, where its first rows are written as samples.
        counted: splits whose sequences are counted.
    """
    basis = (
        "findings",
        kept.versions("transformers", "tokenizers"),
        sorted(inputs.model.tokenizer_digests.items()),
        [config.task, config.whole_words, rows],
        [recipe.key for recipe in (*train, *counted)],
    )
    arguments = (config, inputs, rows, train, counted)
    return Look("tokenizer", basis, without_torch.look, arguments, python)


def _as_it_is(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"
