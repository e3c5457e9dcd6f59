"""How the page looks: light and dark by the reader's own setting, on paper in light."""

CSS = """
:root { color-scheme: light dark; --bg: #fdfdfc; --card: #fff; --fg: #1d2126; --dim: #5d6672; --rule: #dfe3e8;
  --hit: #fff4d6; --bad: #b3261e;
  --c0: #1f6feb; --c1: #d9480f; --c2: #2b8a3e; --c3: #9c36b5; --c4: #0b7285; --c5: #a61e4d; --c6: #846358; --c7: #5f5f00; }
@media (prefers-color-scheme: dark) { :root { --bg: #15181c; --card: #1c2025; --fg: #e4e7eb; --dim: #9aa4b0; --rule: #343b44;
  --hit: #3a3216; --bad: #ff8a80;
  --c0: #6ea8fe; --c1: #ff9f5a; --c2: #69c77b; --c3: #d79ae8; --c4: #5fc9dc; --c5: #ff86ae; --c6: #c9ab9d; --c7: #cccc55; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 1.5rem 1rem 4rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
h1, td, th, li, summary, p { overflow-wrap: anywhere; }
p.sub { color: var(--dim); margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .7rem .7rem .3rem; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
figcaption { font-weight: 600; } figcaption span { color: var(--dim); font-weight: 400; }
figure { position: relative; } figure details { margin: .2rem 0; } figure summary { margin: .2rem 0; font-size: .85em; }
figure table { font-size: .9em; } small { color: var(--dim); }
svg { width: 100%; height: auto; display: block; touch-action: pan-y; }
.grid { stroke: var(--rule); } .axis { stroke: var(--dim); } .tick { fill: var(--dim); font-size: 12px; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .raw { stroke-width: 1; opacity: .35; }
.cursor { stroke: var(--dim); stroke-dasharray: 3 3; visibility: hidden; } .read .cursor { visibility: visible; }
input:checked ~ .linear, input:not(:checked) ~ .log { display: none; }
figure input { margin: 0 .3em 0 0; vertical-align: middle; } figure label { color: var(--dim); font-size: .85em; cursor: pointer; }
.tip { position: absolute; z-index: 1; max-width: 90%; padding: .3rem .5rem; font-size: .85em; pointer-events: none;
  background: var(--bg); border: 1px solid var(--dim); border-radius: 6px; font-variant-numeric: tabular-nums; }
.tip i { display: inline-block; width: .7em; height: .7em; margin-right: .4em; border-radius: 50%; background: currentcolor; }
i.c0 { color: var(--c0); } i.c1 { color: var(--c1); } i.c2 { color: var(--c2); } i.c3 { color: var(--c3); }
i.c4 { color: var(--c4); } i.c5 { color: var(--c5); } i.c6 { color: var(--c6); } i.c7 { color: var(--c7); }
.overview { margin: 1rem 0 0; } .overview td { font-weight: 600; white-space: nowrap; } .overview th { min-width: 5em; }
.legend span { margin-right: 1rem; } .legend label, .legend b { white-space: nowrap; font-weight: 400; }
.legend { position: sticky; top: 0; z-index: 2; margin: 0; padding: .4rem 0; background: var(--bg); }
.more { margin-top: 1rem; }
.broken { stroke: var(--bad); stroke-width: 2; fill: none; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
.c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); } .c6 { stroke: var(--c6); } .c7 { stroke: var(--c7); }
.dot { fill: var(--card); stroke-width: 2; }
.key { display: inline-block; width: 1.6em; height: .7em; vertical-align: baseline; margin-right: .4em; }
.key line { stroke-width: 3; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .28rem .7rem .28rem 0; border-bottom: 1px solid var(--rule); min-width: 6em; }
thead th { color: var(--dim); font-weight: 600; } tbody th { font-weight: 400; color: var(--dim); }
tr.differs td { background: var(--hit); padding-left: .4rem; }
.warning { color: var(--bad); }
summary { cursor: pointer; color: var(--dim); margin: .8rem 0; }
@media (max-width: 640px) { .tick { font-size: 17px; } .line { stroke-width: 2.4; } .raw { stroke-width: 1.4; }
  body { padding: 1rem .6rem 3rem; } figure { padding: .5rem .4rem .3rem; } .scroll table { width: max-content; min-width: 100%; } .scroll td { max-width: 60vw; }
  .scroll.one table { width: 100%; } .scroll.one th { width: 45%; }
  .scroll.overview table, .overview tbody { display: block; width: 100%; } .scroll.overview td { max-width: none; }
  .overview thead { display: none; } .overview tr { display: flex; flex-wrap: wrap; gap: 0 1.2rem; padding: .4rem 0; border-bottom: 1px solid var(--rule); }
  .overview td { border: 0; padding: .1rem 0; } .overview td:not([data-heading=Run])::before { content: attr(data-heading) ": "; font-weight: 400; color: var(--dim); }
  .overview td[data-heading=Run] { width: 100%; white-space: normal; } }
@media print { :root { --bg: #fff; --card: #fff; --fg: #000; --dim: #444; --rule: #bbb; --hit: #eee; } figure { break-inside: avoid; } }
"""
