// Draws the charts of the page with uPlot. It writes text, never HTML.
(() => {
  const page = JSON.parse(document.getElementById("charts").textContent);
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const digits = (_, value) => value == null ? "" : String(Number(value.toPrecision(5)));
  const short = value => value == null ? "" : value && Math.abs(value) < 0.001
    ? value.toExponential(1).replace(".0e", "e")
    : value.toLocaleString("en", { maximumSignificantDigits: 4 });
  const dashes = [[], [6, 3], [2, 2], [8, 3, 2, 3]];

  // The mean of the averages from both sides: it does not lag behind the values.
  const averages = (values, window) => {
    const share = 2 / (window + 1);
    let total = 0, weight = 0;
    return values.map(value => {
      if (value == null) return value;
      total = total * (1 - share) + value * share;
      weight = weight * (1 - share) + share;
      return total / weight;
    });
  };
  const smooth = (values, window) => {
    const before = averages(values, window);
    const after = averages([...values].reverse(), window).reverse();
    return before.map((value, index) => value == null ? value : value / 2 + after[index] / 2);
  };

  const control = (figure, text, checked, change) => {
    const label = document.createElement("label"), box = document.createElement("input");
    box.type = "checkbox"; box.checked = checked;
    box.addEventListener("change", change);
    label.append(box, ` ${text}`);
    figure.querySelector("figcaption").append(label);
    return box;
  };

  const draw = figure => {
    const chart = page.charts[figure.dataset.chart];
    const place = figure.querySelector(".plot");
    const lines = chart.lines;
    const values = lines.flatMap(line => line.values.filter(value => value != null));
    const positive = values.length > 1 && Math.min(...values) > 0;
    let plot = null;
    const log = positive && control(figure, "log axis", chart.log, () => show());
    const mean = chart.window && control(figure, "smooth", true, () => show());

    const series = (line, run, faint) => ({
      label: page.names[run] + (faint === false ? " (average)" : ""),
      stroke: colour(`--c${run % 8}`) + (faint ? "59" : ""),
      width: faint ? 1 : 1.8,
      dash: dashes[Math.floor(run / 8) % 4],
      points: { show: chart.dotted || line.steps.length === 1 },
      value: digits,
    });

    const show = () => {
      if (plot) plot.destroy();
      const averaged = mean && mean.checked;
      const tables = [], all = [{ label: "step" }];
      for (const line of lines) {
        tables.push([line.steps, line.values]);
        all.push(series(line, line.run, averaged ? true : undefined));
        if (averaged) {
          tables.push([line.steps, smooth(line.values, chart.window)]);
          all.push(series(line, line.run, false));
        }
      }
      const axis = {
        stroke: colour("--dim"), grid: { stroke: colour("--rule"), width: 1 },
        ticks: { show: false }, font: "12px system-ui, sans-serif",
      };
      const range = chart.from_zero && !(log && log.checked)
        ? (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.1 : 1] : undefined;
      plot = new uPlot({
        width: place.clientWidth, height: 240, series: all,
        scales: { x: { time: false }, y: { distr: log && log.checked ? 3 : 1, range } },
        axes: [
          { ...axis, size: 30 },
          { ...axis, size: 62, values: (_, splits) => splits.map(short) },
        ],
        cursor: { sync: { key: "step" }, points: { size: 6 } },
      }, tables.length > 1 ? uPlot.join(tables) : tables[0], place);
    };
    show();
    new ResizeObserver(() => {
      if (place.clientWidth && plot.width !== place.clientWidth) {
        plot.setSize({ width: place.clientWidth, height: 240 });
      }
    }).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
  };
  document.querySelectorAll("figure[data-chart]").forEach(draw);
})();
