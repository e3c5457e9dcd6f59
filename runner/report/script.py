"""The page's only script: the values under the pointer. Without it the page shows everything else.

It reads numbers of the page and writes text, never HTML. The page permits this script alone, by its
sha256.
"""

from __future__ import annotations

import base64
import hashlib

from runner.report.chart import LEFT, RIGHT, WIDTH

SCRIPT = """
(() => {
  const names = [...document.querySelectorAll('.legend .name')].map(n => n.textContent);
  const digits = v => v === undefined ? '' : String(Number(v.toPrecision(5)));
  const nearest = (points, step) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle; else high = middle;
    }
    const before = points[low], after = points[high];
    if (!before) return null;
    return Math.abs(before[0] - step) < Math.abs(after[0] - step) ? before : after;
  };
  for (const figure of document.querySelectorAll('figure[data-curves]')) {
    const curves = JSON.parse(figure.dataset.curves);
    const tip = document.createElement('div');
    tip.className = 'tip'; tip.hidden = true; figure.append(tip);
    for (const svg of figure.querySelectorAll('svg[data-first]')) {
      const first = Number(svg.dataset.first), last = Number(svg.dataset.last);
      const cursor = svg.querySelector('.cursor');
      const hide = () => { tip.hidden = true; svg.classList.remove('read'); };
      const show = event => {
        const box = svg.getBoundingClientRect();
        const x = (event.clientX - box.left) / box.width * @WIDTH@;
        const wanted = first + (x - @LEFT@) / (@WIDTH@ - @LEFT@ - @RIGHT@) * (last - first);
        const found = curves.map(c => [c, nearest(c.points, wanted)]).filter(f => f[1]);
        if (!found.length) return;
        const off = f => Math.abs(f[1][0] - wanted);
        const step = found.reduce((a, b) => off(b) < off(a) ? b : a)[1][0];
        const rows = found.map(([c, p]) => {
          const row = document.createElement('div'), mark = document.createElement('i');
          mark.className = 'c' + c.run % 8;
          const mean = c.smooth.length ? nearest(c.smooth, p[0]) : null;
          const name = names[c.run] ? names[c.run] + ': ' : '';
          const other = p[0] === step ? '' : ' at step ' + p[0];
          const average = mean ? ' (average ' + digits(mean[1]) + ')' : '';
          row.append(mark, name + digits(p[1]) + average + other);
          return row;
        });
        const head = document.createElement('div');
        head.textContent = 'step ' + step;
        tip.replaceChildren(head, ...rows);
        tip.hidden = false;
        const place = @LEFT@ + (@WIDTH@ - @LEFT@ - @RIGHT@) * (step - first) / (last - first);
        cursor.setAttribute('x1', place); cursor.setAttribute('x2', place);
        svg.classList.add('read');
        const frame = figure.getBoundingClientRect();
        const at = box.left - frame.left + place / @WIDTH@ * box.width;
        const left = at + tip.offsetWidth + 16 < frame.width ? at + 10 : at - tip.offsetWidth - 10;
        tip.style.left = Math.max(4, left) + 'px';
        tip.style.top = box.top - frame.top + 14 + 'px';
      };
      svg.addEventListener('pointermove', show);
      svg.addEventListener('pointerdown', show);
      svg.addEventListener('pointerleave', hide);
    }
  }
})();
"""
for _name, _value in (("@WIDTH@", WIDTH), ("@LEFT@", LEFT), ("@RIGHT@", RIGHT)):
    SCRIPT = SCRIPT.replace(_name, str(_value))

DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
"""What the page's Content-Security-Policy permits."""
