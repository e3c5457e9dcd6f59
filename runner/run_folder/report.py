"""Writes one HTML page about one or more runs: curves to zoom into, no network, no server.

`History` -> `curves` (what is drawn, thinned so that peaks stay) -> `page` (the document). Both are
pure; `write` reads and writes files.

`_text` escapes everything that comes from a run folder. In addition the page forbids itself the
network and every script but its own (Content-Security-Policy). Its curves are drawn by uPlot
(https://github.com/leeoniya/uPlot, MIT), which is in the page; without it the tables say the same.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import reprlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.from_stage import (
    UsageError,
    __version__,
    as_shown,
    human_count,
    human_size,
    write_atomically,
)
from runner.run_folder.curves import CURVES, with_curves
from runner.run_folder.history import Columns, History
from runner.run_folder.logs import last_lines, log_of, readable
from runner.run_folder.run_lock import GONE_AFTER_S, age_s
from runner.run_folder.status import format_duration, memory_of
from runner.tasks import TASKS

MOST_POINTS = 5000
"""Per line; a screen has fewer columns, and zooming in shows more."""

MOST_OTHERS, MOST_RESULTS, LAST_LINES = 24, 50, 40
"""Of a command's run: charts of measures by its own names, files, and lines of its log."""

FEWEST_SMOOTHED = 20
"""Lines with fewer points are drawn as they are."""


@dataclass(frozen=True)
class Line:
    """The values of one run.

    Attributes:
        run: the number of its run, from 0; gives the colour.
        steps: rising.
        values: one per step; None where the value was nan or inf.
    """

    run: int
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def finite(self) -> list[tuple[int, float]]:
        """(step, value) of all values that are numbers."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if value is not None]


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: above it.
        unit: of its values.
        lines: those of all runs.
        from_zero: whether the axis includes zero.
        dotted: drawn with its points, for rare measurements.
        window: how many logged steps the moving average covers; 0: there is none.
        log: it begins with a logarithmic axis, because on a linear one most values would be flat.
        folded: another chart says the same, or it says nothing.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    from_zero: bool
    dotted: bool
    window: int
    log: bool
    folded: bool


MEASURES = (
    # key, title, unit, from zero, smoothed, the measure that makes it redundant
    ("loss", "Training loss", "per predicted token", False, True, ""),
    ("validation_loss", "Validation loss", "", False, False, ""),
    ("validation_accuracy", "Validation accuracy", "", False, False, ""),
    ("lr", "Learning rate", "", True, False, ""),
    ("grad_norm", "Gradient norm, before clipping", "", False, True, ""),
    ("tokens_per_s", "Tokens per second, all ranks", "tokens/s", True, True, ""),
    ("validation_perplexity", "Validation perplexity", "", False, False, "validation_loss"),
    ("samples_per_s", "Samples per second, all ranks", "samples/s", True, True, "tokens_per_s"),
    ("mfu", "Model FLOPs utilization", "of the devices' peak", True, True, "tokens_per_s"),
    ("memory_gib", "Most memory of rank 0 since its last evaluation", "GB", True, False, ""),
    ("data_wait", "Waiting for data", "share of the step", True, True, ""),
)  # fmt: skip

GIB_IN_GB = 2**30 / 1e9
"""Metrics have GiB; people read decimal units everywhere, as on the Hub."""


def charts(runs: Sequence[History]) -> list[Chart]:
    """The charts for which any run has values; the redundant ones last."""
    drawn: dict[str, Chart] = {}
    of_tokens = all(_predicts_tokens(str(run.settings.get("task"))) for run in runs)
    for key, title, unit, from_zero, smoothed, twin in (*MEASURES, *_others(runs)):
        seldom = key.startswith("validation_")
        every = (run.validations if seldom else run.steps for run in runs)
        lines = tuple(
            found for index, of_run in enumerate(every) if (found := line_of(index, key, of_run))
        )
        if not lines:
            continue
        longest = max(len(line.steps) for line in lines)
        values = [value for line in lines for _, value in line.finite]
        drawn[key] = Chart(
            title=title,
            unit="" if key == "loss" and not of_tokens else unit,
            lines=lines,
            from_zero=from_zero,
            dotted=seldom,
            window=max(5, longest // 30) if smoothed and longest >= FEWEST_SMOOTHED else 0,
            log=not from_zero and len(values) > 1 and 0 < min(values) <= max(values) / 100,
            folded=twin in drawn or (key in ("memory_gib", "data_wait") and _says_nothing(values)),
        )
    return sorted(drawn.values(), key=lambda chart: chart.folded)


def _others(runs: Sequence[History]) -> list[tuple[str, str, str, bool, bool, str]]:
    """The measures of commands that `MEASURES` has not, as entries of it."""
    known = {"step", *(key for key, *_ in MEASURES)}
    names = dict.fromkeys(
        name
        for run in runs
        if run.is_command
        for name in (*run.validations.names, *run.steps.names)
        if name not in known
    )
    return [(name, name, "", False, True, "") for name in list(names)[:MOST_OTHERS]]


def _predicts_tokens(name: str) -> bool:
    """Whether the loss of a task is a mean over tokens; a later version may know more tasks."""
    task = TASKS.get(name)
    return task is not None and task.has_tokens and not task.has_classes


def line_of(run: int, key: str, lines: Columns) -> Line | None:
    """The line of one measure of a run, thinned; None where no entry has it."""
    scale = GIB_IN_GB if key == "memory_gib" else 1.0
    kept = thinned(lines.points(key))
    if not kept:
        return None
    values = tuple(None if value is None else _rounded(value * scale) for _, value in kept)
    return Line(run, tuple(step for step, _ in kept), values)


def _rounded(value: float) -> float:
    return value if abs(value) > 1e300 else float(f"{value:.6g}")


def _says_nothing(values: Sequence[float]) -> bool:
    """Whether memory or waiting is flat, or near zero."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return high / 2 - low / 2 <= 0.05 * max(abs(low), abs(high)) or 0 <= low <= high < 0.05


def thinned(
    points: Sequence[tuple[int, float | None]], most: int = MOST_POINTS
) -> list[tuple[int, float | None]]:
    """At most `most` points: the lowest and the highest of each stretch, so each peak stays."""
    if len(points) <= most:
        return list(points)
    kept = []
    stretches = most // 2
    for index in range(stretches):
        part = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        finite = [(value, step) for step, value in part if value is not None]
        extremes = {min(finite), max(finite)} if finite else {(None, part[0][0])}
        kept += sorted((step, value) for value, step in extremes)
    return kept


LONGEST_VALUE = 600  # characters of a setting on the page
MOST_KEYS = 500
NUM_COLOURS = 8  # in page.css
DASHES = ("", "6 3", "2 2", "8 3 2 3")
"""From the ninth run on colours repeat, and the dashes differ."""

_ASSETS = Path(__file__).with_name("assets")
PROVENANCE = (
    (CURVES, "Curves are from"),
    ("bundle_id", "Bundle"),
    ("model", "Model"),
    ("environment_tree", "Environment"),
    ("git_commit", "Commit of the folder it was started in"),
    ("device", "Device"),
    ("device_memory_gib", "Memory of a device"),
    ("world_size", "Ranks"),
    ("precision", "Precision"),
    ("batch", "Batch"),
    ("seed", "Seed"),
    ("exported_weights_step", "The exported weights are of step"),
    ("host", "Host of rank 0"),
    ("platform", "System"),
    ("python", "Python"),
    ("versions", "Packages"),
    ("slurm", "Slurm"),
    ("command", "Command"),
    ("written", "Started"),
)


def page(runs: Sequence[History], running: Sequence[bool] = ()) -> str:
    """The whole document.

    Args:
        running: whether each run is training now; empty: none is.
    """
    names, drawn = short_names(runs), charts(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs compared"
    folder = f'<p class="sub">{_text(str(runs[0].folder.root))}</p>' if len(runs) == 1 else ""
    body = [
        f"<h1>{_text(title)}</h1>",
        folder,
        _summary(runs, names, running or [False] * len(runs)),
        *_warnings(runs, names),
        "<h2>Curves</h2>",
        _charts(drawn, names),
        *_of_commands(runs, names),
        "<h2>Settings</h2>",
        _settings(runs, names),
        "<h2>Where it comes from</h2>",
        _provenance(runs, names),
        f'<p class="sub">Written by runner report, airlift {_text(__version__)}.</p>',
    ]
    css = _asset("uplot.css") + _asset("page.css")
    scripts = [_asset("uplot.js"), _asset("page.js")]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return "\n".join([
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="'
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{css}</style></head><body>",
        *body,
        f'<script type="application/json" id="charts">{_data(drawn, names)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>\n",
    ])  # fmt: skip


def _of_commands(runs: Sequence[History], names: Sequence[str]) -> Iterable[str]:
    """What commands measured without steps, what they wrote, and what they said last."""
    measures = list(dict.fromkeys(name for run in runs for name in run.table))
    if measures:
        values = [[_value(run.table.get(name, "")) for run in runs] for name in measures]
        yield "<h2>Measures at the end</h2>"
        yield _table(names, list(zip(measures, values, strict=True)))
    for run, name in zip(runs, names, strict=True):
        of_run = f" of {_text(name)}" if len(runs) > 1 else ""
        if run.results:
            rows = [(r.path, [human_size(r.size)]) for r in reversed(run.results[-MOST_RESULTS:])]
            older = len(run.results) - len(rows)
            yield f"<h2>Results{of_run}</h2>" + _table([name], rows)
            yield f'<p class="sub">and {human_count(older, "older file")}</p>' if older else ""
        if run.is_command and not run.done:
            with suppress(UsageError, OSError):
                lines, _ = last_lines(log_of(run.folder.root, None), LAST_LINES)
                log = "\n".join(_text(readable(line)) for line in lines)
                yield f"<h2>The end of the log{of_run}</h2><pre>{log}</pre>"


def short_names(runs: Sequence[History]) -> list[str]:
    """The name of each run on the page: `demo`; of several such ones `demo · lr=2e-4`.

    What tells them apart is the last part of their folders that no other run has; that of a run of
    a sweep is named by its settings.
    """
    names = [run.name for run in runs]
    parts = [run.folder.root.parts for run in runs]
    told = []
    for name, own in zip(names, parts, strict=True):
        tails = (own[-count:] for count in range(1, len(own)))
        alone = (tail for tail in tails if [p[-len(tail) :] for p in parts].count(tail) == 1)
        folder = "/".join(next(alone, own))
        told.append(name if names.count(name) == 1 else f"{name} · {folder}")
    return told


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """What the page's Content-Security-Policy permits."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _data(drawn: Sequence[Chart], names: Sequence[str]) -> str:
    """The charts for the script; `<` is escaped, so that no name ends the element."""
    document = {
        "names": [as_shown(name) for name in names],
        "charts": [asdict(chart) for chart in drawn],
    }
    return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")


def _provenance(runs: Sequence[History], names: Sequence[str]) -> str:
    rows = [(label, _values(runs, key)) for key, label in PROVENANCE if any(_values(runs, key))]
    folders = [("Folder", [str(run.folder.root) for run in runs])] if len(runs) > 1 else []
    return _table(names, [*folders, *rows])


def _warnings(runs: Sequence[History], names: Sequence[str]) -> list[str]:
    said = [
        f'<li class="warning">{_text(f"{name}: {warning}" if len(runs) > 1 else warning)}</li>'
        for run, name in zip(runs, names, strict=True)
        for warning in (*run.warnings, *_findings(run))
    ]
    return ["<h2>Warnings</h2>", "<ul>", *said, "</ul>"] if said else []


def _findings(run: History) -> Iterable[str]:
    """Warnings that follow from the metrics."""
    broken = [step for step, value in run.steps.points("loss") if value is None]
    if broken:
        yield f"the loss was not finite (nan or inf) at step {', '.join(map(str, broken[:5]))}" + (
            f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        )
    if not run.done and not run.is_command:
        yield "no step was logged"
    elif run.num_steps is not None and run.done < run.num_steps:
        yield f"unfinished: step {run.done} of {run.num_steps}"
    waits = run.steps.numbers("data_wait")[1:]
    if waits and statistics.median(waits) > 0.2:
        yield f"{statistics.median(waits):.0%} of a step is spent waiting for data"


def _summary(runs: Sequence[History], names: Sequence[str], running: Sequence[bool]) -> str:
    seconds = [_seconds_in_steps(run) for run in runs]
    losses = [run.steps.numbers("loss")[-1:] for run in runs]
    rows = [
        ("Status", ["running" if n else _at_rest(r) for n, r in zip(running, runs, strict=True)]),
        ("Steps", [f"{r.done} of {r.num_steps}" if r.num_steps else str(r.done) for r in runs]),
        ("Time in steps", ["" if s is None else format_duration(s) for s in seconds]),
        ("GPU-hours", [_device_hours(run, s) for run, s in zip(runs, seconds, strict=True)]),
        ("Last loss", ["".join(f"{value:.4g}" for value in last) for last in losses]),
        ("Best validation loss", [_best(run.validations, "validation_loss", min) for run in runs]),
        (
            "Best validation accuracy",
            [_best(run.validations, "validation_accuracy", max) for run in runs],
        ),
        ("Tokens per second, median", [_median(run, "tokens_per_s", "{:,.0f}") for run in runs]),
        ("Samples per second, median", [_median(run, "samples_per_s", "{:,.1f}") for run in runs]),
        ("MFU, median", [_median(run, "mfu", "{:.1%}") for run in runs]),
        ("Seconds per step, median", [_median(run, "step_s", "{:.3g}") for run in runs]),
        (
            "Seconds until the first step was done",
            ["".join(f"{s:.0f}" for s in run.steps.numbers("first_step_s")[:1]) for run in runs],
        ),
        *(
            (f"Most memory of a rank, {where}", [memory_of(run).get(where, "") for run in runs])
            for where in ("device", "host")
        ),
        (
            "Checkpoints",
            [", ".join(f"step-{step}" for step in run.checkpoints[-5:]) for run in runs],
        ),
    ]
    return _table(names, [(label, values) for label, values in rows if any(values)], keys=True)


def _at_rest(run: History) -> str:
    """One word or two on where a run stands that does not run."""
    if run.is_command:
        kind = str(run.starts[-1].get("kind") if run.starts else "never began")
        return {"done": "finished", "None": "ended from outside"}.get(kind, kind.replace("_", " "))
    if not run.done:
        return "no step yet"
    if run.num_steps is None:
        return "unknown"
    if run.done < run.num_steps:
        return "stopped"
    return "finished" if run.is_exported else "stopped before its export"


def _seconds_in_steps(run: History) -> float | None:
    """The time of all steps, without starts, evaluations and checkpoints; None if unknown."""
    total, before = None, 0
    for step, seconds in run.steps.points("step_s"):
        if seconds is not None and seconds >= 0:
            total = (total or 0.0) + seconds * max(step - before, 1)
        before = step
    return total if total is not None and total < 1e10 else None


def _device_hours(run: History, seconds: float | None) -> str:
    """The GPU-hours of all steps; `none (CPU)` on CPUs, empty where they are unknown."""
    ranks, device = run.facts.get("world_size"), run.facts.get("device")
    if seconds is None or not isinstance(device, str) or type(ranks) is not int:
        return ""
    if not 0 < ranks < 10**7:
        return ""
    return "none (CPU)" if device == "CPU" else f"{seconds * ranks / 3600:,.3g}"


def _median(run: History, key: str, form: str) -> str:
    # The first step includes compilation and warm-up.
    found = run.steps.numbers(key)[1:]
    return form.format(statistics.median(found)) if found else ""


def _best(lines: Columns, key: str, choose: Callable[[list[float]], float]) -> str:
    found = {value: step for step, value in reversed(lines.points(key)) if value is not None}
    if not found:
        return ""
    value = choose(list(found))
    return f"{value:.4f} at step {found[value]}"


def _charts(drawn: Sequence[Chart], names: Sequence[str]) -> str:
    if not drawn:
        return "<p>Nothing was measured yet.</p>"
    legend = ""
    if len(names) > 1:
        entries = " ".join(
            f'<b>{_key(index)}<span class="name">{_text(name)}</span></b>'
            for index, name in enumerate(names)
        )
        legend = f'<p class="legend">{entries}</p>'
    figures = [(chart.folded, _figure(chart, i, names)) for i, chart in enumerate(drawn)]
    shown = "".join(text for folded, text in figures if not folded)
    folded = "".join(text for folded, text in figures if folded)
    more = (
        '<details class="more"><summary>More charts: they say the same in another unit, or are flat'
        f'</summary><div class="charts">{folded}</div></details>'
        if folded
        else ""
    )
    how = '<p class="sub">Drag over a chart to zoom in; double-click to see all of it again.</p>'
    return f'{legend}{how}<div class="charts">{shown}</div>{more}'


def _figure(chart: Chart, number: int, names: Sequence[str]) -> str:
    """A chart: a place where the script draws it, and its numbers in a table."""
    average = f"; bold: moving average of {chart.window} steps" if chart.window else ""
    caption = f"{_text(chart.title)} <span>{_text(chart.unit + average).removeprefix('; ')}</span>"
    table = _table(["First", "Last", "Lowest", "Highest"], [_numbers(line, names) for line in
                   chart.lines])  # fmt: skip
    return (
        f'<figure data-chart="{number}"><figcaption>{caption}</figcaption>'
        f'<div class="plot" role="img" aria-label="{_text(chart.title)}"></div>'
        f"<details><summary>In numbers</summary>{table}</details></figure>"
    )


def _numbers(line: Line, names: Sequence[str]) -> tuple[str, list[str]]:
    """A row: the run, and its first, last, lowest and highest value."""
    name, points = names[line.run] if len(names) > 1 else "", line.finite
    if not points:
        return name, ["no number"] * 4
    ends = points[0], points[-1], *(choose(points, key=lambda p: p[1]) for choose in (min, max))
    return name, [f"{value:.5g} (step {step})" for step, value in ends]


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
    wraps = "" if len(names) > 1 else " one"
    return f'<div class="scroll{wraps}"><table>{head}<tbody>{body}</tbody></table></div>'


def _values(runs: Sequence[History], key: str) -> list[str]:
    values: list[Any] = [run.facts.get(key) for run in runs]
    if key.endswith("_gib"):
        values = [human_size(v * 2**30) if _is_size(v) else v for v in values]
    return [_value(value) if value is not None else "" for value in values]


def _is_size(value: Any) -> bool:
    """Whether it can be a number of GiB; a file may hold anything."""
    return type(value) in (int, float) and 0 <= value < 2**40


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 4, 30, 30


def _value(value: Any) -> str:
    """A value of a file as text, cut where it is too long."""
    if isinstance(value, dict) and value:
        inside = list(value.items())[:MOST_KEYS]
        return ", ".join(
            f"{key} {_REPR.repr(item) if isinstance(item, dict) else _value(item)}"
            for key, item in inside
        )
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = " ".join(value)
    if isinstance(value, str):
        return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}..."
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "a number too large to show"
    return "none" if value is None else _REPR.repr(value)


def _text(text: str) -> str:
    """Escapes for HTML, and shows control characters."""
    return html.escape(as_shown(text))


def write_report(folders: Sequence[Path], output: Path | None) -> Path:
    """Reads the runs and writes their page.

    Args:
        folders: the run folders.
        output: the page; None: `report.html` in the run folder, or in the current folder for
            several runs.

    Returns:
        The path of the page.

    Raises:
        UsageError: a folder is not a run folder.
    """
    read = [History.read(folder.absolute(), whole=True) for folder in folders]
    runs = [*map(with_curves, read)]
    target = output or (
        runs[0].folder.root / "report.html" if len(runs) == 1 else Path("report.html")
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    # A launcher touched its lock a short time ago; neither Slurm nor a process is asked.
    text = page(runs, [age_s(run.folder.holder) < GONE_AFTER_S for run in runs])
    write_atomically(target, text.encode("utf-8", "backslashreplace"))
    return target
