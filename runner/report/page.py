"""The HTML document: summary, curves, settings, provenance, warnings. Pure.

`_text` escapes everything that comes from a run folder. In addition the page forbids itself scripts
and network (Content-Security-Policy).
"""

from __future__ import annotations

import html
import reprlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.errors import __version__, as_shown, human_count
from runner.report.chart import DASHES, NUM_COLOURS, svg
from runner.report.curves import Chart, charts
from runner.report.style import CSS
from runner.run_folder.history import History, number

LONGEST_VALUE = 600
MOST_KEYS = 500
PROVENANCE = (
    ("bundle_id", "Bundle"),
    ("model", "Model"),
    ("environment_tree", "Environment"),
    ("git_commit", "Commit of the folder it was started in"),
    ("device", "Device"),
    ("device_memory_gib", "Memory of a device, GiB"),
    ("world_size", "Ranks"),
    ("precision", "Precision"),
    ("batch", "Batch"),
    ("seed", "Seed"),
    ("host", "Host of rank 0"),
    ("platform", "System"),
    ("python", "Python"),
    ("versions", "Packages"),
    ("slurm", "Slurm"),
    ("command", "Command"),
    ("written", "Started"),
)


def page(runs: Sequence[History]) -> str:
    """The whole document."""
    names = _names(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs compared"
    body = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="sub">{_text(_folders(runs))}</p>',
        *_warnings(runs, names),
        "<h2>In short</h2>",
        _summary(runs, names),
        "<h2>Curves</h2>",
        _charts(charts(runs), names),
        "<h2>Settings</h2>",
        _settings(runs, names),
        "<h2>Where it comes from</h2>",
        _table(
            names,
            [(label, _values(runs, key)) for key, label in PROVENANCE if any(_values(runs, key))],
        ),
        f'<p class="sub">Written by runner report, airlift {_text(__version__)}.</p>',
    ]
    return "\n".join([
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{CSS}</style></head><body>",
        *body,
        "</body></html>\n",
    ])  # fmt: skip


def _names(runs: Sequence[History]) -> list[str]:
    """The name of each run on the page, with its folder where two have the same name."""
    names = [run.name for run in runs]
    return [
        f"{n} ({run.folder.root})" if names.count(n) > 1 else n
        for n, run in zip(names, runs, strict=True)
    ]


def _folders(runs: Sequence[History]) -> str:
    return ", ".join(str(run.folder.root) for run in runs)


def _warnings(runs: Sequence[History], names: Sequence[str]) -> list[str]:
    said = [
        f'<li class="warning">{_text(f"{name}: {warning}" if len(runs) > 1 else warning)}</li>'
        for run, name in zip(runs, names, strict=True)
        for warning in (*run.warnings, *_findings(run))
    ]
    return ["<h2>Warnings</h2>", "<ul>", *said, "</ul>"] if said else []


def _findings(run: History) -> Iterable[str]:
    """Warnings that follow from the metrics."""
    broken = [line["step"] for line in run.steps if "loss" in line and number(line, "loss") is None]
    if broken:
        yield f"the loss was not finite (nan or inf) at step {', '.join(map(str, broken[:5]))}" + (
            f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        )
    if not run.steps:
        yield "no step was logged"
    elif run.num_steps is not None and run.steps[-1]["step"] < run.num_steps:
        yield f"unfinished: step {run.steps[-1]['step']} of {run.num_steps}"
    waits = [wait for line in run.steps[1:] if (wait := number(line, "data_wait")) is not None]
    if waits and statistics.median(waits) > 0.2:
        yield f"{statistics.median(waits):.0%} of a step is spent waiting for data"


def _summary(runs: Sequence[History], names: Sequence[str]) -> str:
    rows = [
        ("Steps", [_steps(run) for run in runs]),
        ("Last training loss", [_last(run.steps, "loss", "{:.4f}") for run in runs]),
        ("Best validation loss", [_best(run, "validation_loss", min) for run in runs]),
        ("Best validation accuracy", [_best(run, "validation_accuracy", max) for run in runs]),
        ("Tokens per second, median", [_median(run, "tokens_per_s", "{:,.0f}") for run in runs]),
        ("Samples per second, median", [_median(run, "samples_per_s", "{:,.1f}") for run in runs]),
        ("MFU, median", [_median(run, "mfu", "{:.1%}") for run in runs]),
        ("Seconds per step, median", [_median(run, "step_s", "{:.3g}") for run in runs]),
        (
            "Seconds until the first step was done",
            [_first(run, "first_step_s", "{:.0f}") for run in runs],
        ),
        ("Most memory of rank 0, GiB", [_last(run.steps, "memory_gib", "{:.2f}") for run in runs]),
        (
            "Checkpoints",
            [", ".join(f"step-{step}" for step in run.checkpoints[-5:]) for run in runs],
        ),
    ]
    return _table(names, [(label, values) for label, values in rows if any(values)], keys=True)


def _steps(run: History) -> str:
    done = run.steps[-1]["step"] if run.steps else 0
    return f"{done} of {run.num_steps}" if run.num_steps else str(done)


def _last(lines: Sequence[Mapping[str, Any]], key: str, form: str) -> str:
    found = [value for line in lines if (value := number(line, key)) is not None]
    return form.format(found[-1]) if found else ""


def _first(run: History, key: str, form: str) -> str:
    return next(
        (form.format(value) for line in run.steps if (value := number(line, key)) is not None), ""
    )


def _median(run: History, key: str, form: str) -> str:
    # The first step includes compilation and warm-up.
    found = [value for line in run.steps[1:] if (value := number(line, key)) is not None]
    return form.format(statistics.median(found)) if found else ""


def _best(run: History, key: str, choose: Any) -> str:
    found = [
        (value, line["step"])
        for line in run.validations
        if (value := number(line, key)) is not None
    ]
    if not found:
        return ""
    value, step = choose(found, key=lambda pair: pair[0])
    return f"{value:.4f} at step {step}"


def _charts(drawn: Sequence[Chart], names: Sequence[str]) -> str:
    if not drawn:
        return "<p>Nothing was measured yet.</p>"
    legend = ""
    if len(names) > 1:
        legend = (
            "<p>"
            + " &nbsp; ".join(f"{_key(index)}{_text(name)}" for index, name in enumerate(names))
            + "</p>"
        )
    figures = "".join(
        f"<figure><figcaption>{_text(chart.title)} <span>{_text(chart.unit)}</span></figcaption>"
        f"{svg(chart)}</figure>"
        for chart in drawn
    )
    return f'{legend}<div class="charts">{figures}</div>'


def _key(run: int) -> str:
    dash = DASHES[run // NUM_COLOURS % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    line = f'<line class="c{run % NUM_COLOURS}" x1="0" x2="24" y1="5" y2="5"{dashed}/>'
    return f'<svg class="key" viewBox="0 0 24 10" aria-hidden="true">{line}</svg>'


def _settings(runs: Sequence[History], names: Sequence[str]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))[:MOST_KEYS]
    if not keys:
        return "<p>No config.yaml has them.</p>"
    rows = [
        (key, [_value(run.settings[key]) if key in run.settings else "" for run in runs])
        for key in keys
    ]
    if len(runs) == 1:
        return _table(names, rows)
    differing = [row for row in rows if len(set(row[1])) > 1 and row[0] != "name"]
    same = [row for row in rows if row not in differing]
    shown = (
        _table(names, differing, differs=True) if differing else "<p>All settings are the same.</p>"
    )
    return (
        f"{shown}<details><summary>{human_count(len(same), 'other setting')}</summary>"
        f"{_table(names, same)}</details>"
    )


def _table(
    names: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    *,
    differs: bool = False,
    keys: bool = False,
) -> str:
    """A table with one column per run. For one run it has no heading."""
    heading = "".join(
        f"<th>{_key(i) if keys else ''}{_text(name)}</th>" for i, name in enumerate(names)
    )
    head = f"<thead><tr><th></th>{heading}</tr></thead>" if len(names) > 1 else ""
    kind = ' class="differs"' if differs else ""
    body = "".join(
        f"<tr{kind}><th>{_text(label)}</th>"
        f"{''.join(f'<td>{_text(value)}</td>' for value in values)}</tr>"
        for label, values in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _values(runs: Sequence[History], key: str) -> list[str]:
    return [_value(run.facts[key]) if run.facts.get(key) is not None else "" for run in runs]


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxstring, _REPR.maxother = (
    4,
    30,
    30,
    LONGEST_VALUE,
    LONGEST_VALUE,
)


def _value(value: Any) -> str:
    """A value of a file as text, cut where it is too long."""
    if isinstance(value, dict):
        inside = list(value.items())[:MOST_KEYS]
        return ", ".join(
            f"{key} {_REPR.repr(item) if isinstance(item, dict) else _value(item)}"
            for key, item in inside
        )
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)[:LONGEST_VALUE]
    if isinstance(value, str):
        return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}..."
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "a number too large to show"
    if value is None:
        return "none"
    return str(value) if isinstance(value, (int, float)) else _REPR.repr(value)


def _text(text: str) -> str:
    """Escapes for HTML, and shows control characters."""
    return html.escape(as_shown(text))
