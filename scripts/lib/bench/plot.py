"""Draws the results: seconds by candidate, one plot per workload. The peers' Python runs it.

python plot.py results.json FOLDER
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "airlift", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    results, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, result in results.items():
        times = {
            one: [samples[one]["seconds"] for samples in result["rounds"]]
            for one in result["rounds"][0]
        }
        order = sorted(times, key=lambda one: -statistics.median(times[one]))
        medians = [statistics.median(times[one]) for one in order]
        reach = [
            [middle - min(times[one]) for one, middle in zip(order, medians, strict=True)],
            [max(times[one]) - middle for one, middle in zip(order, medians, strict=True)],
        ]
        figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.32 * len(order)))
        colours = ["#c2410c" if one.startswith("stage") else "#94a3b8" for one in order]
        axes.barh(order, medians, xerr=reach, color=colours, ecolor="#475569", capsize=2)
        axes.set_xlabel("seconds: median, least and most")
        axes.set_title(result["title"], loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main()
