"""One figure of the page: the chart on both axes, its values for the script, and in words. Pure."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from runner.errors import as_shown
from runner.report.chart import svg
from runner.report.curves import Chart, Curve


def figure(chart: Chart, number: int, names: Sequence[str], span: tuple[int, int]) -> str:
    """A `<figure>`.

    Args:
        number: of the chart on the page; makes its ids.
        names: of all runs.
        span: the first and the last step on the page.
    """
    table = f"chart-{number}"
    average = f"; bold: moving average of {chart.window} steps" if chart.window else ""
    caption = f"{_text(chart.title)} <span>{_text(chart.unit + average).removeprefix('; ')}</span>"
    if chart.has_log_axis:
        checked = " checked" if chart.begins_with_log_axis else ""
        plots = (
            f'<input type="checkbox" id="{table}-log"{checked}>'
            f'<label for="{table}-log">log axis</label>'
            f'<div class="linear">{svg(chart, span, described_by=table)}</div>'
            f'<div class="log">{svg(chart, span, log=True, described_by=table)}</div>'
        )
    else:
        plots = svg(chart, span, described_by=table)
    data = json.dumps([_data(curve) for curve in chart.curves], separators=(",", ":"))
    return (
        f'<figure data-curves="{html.escape(data)}"><figcaption>{caption}</figcaption>{plots}'
        f"<details><summary>In numbers</summary>{_in_numbers(chart, names, table)}</details>"
        "</figure>"
    )


def _data(curve: Curve) -> dict[str, object]:
    """The values of a curve, for the script."""
    return {
        "run": curve.run,
        "points": [[step, _rounded(value)] for step, value in curve.points],
        "smooth": [[step, _rounded(value)] for step, value in curve.smooth],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e300 else value


def _in_numbers(chart: Chart, names: Sequence[str], table: str) -> str:
    """What the chart shows, as a table: the text alternative."""
    rows = []
    for curve in chart.curves:
        cells = [_text(names[curve.run])] if len(names) > 1 else []
        if curve.points:
            by_value = sorted(curve.points, key=lambda point: point[1])
            places = (curve.points[0], curve.points[-1], by_value[0], by_value[-1])
            cells += [f"{value:.5g} <small>step {step}</small>" for step, value in places]
        else:
            cells += ["no number"] * 4
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    headings = [*(["Run"] if len(names) > 1 else []), "First", "Last", "Lowest", "Highest"]
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return (
        f'<div class="scroll"><table id="{table}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _text(text: str) -> str:
    return html.escape(as_shown(text))
