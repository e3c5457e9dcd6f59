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
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--rule); } .axis { stroke: var(--dim); } .tick { fill: var(--dim); font-size: 11px; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
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
@media print { :root { --bg: #fff; --card: #fff; --fg: #000; --dim: #444; --rule: #bbb; --hit: #eee; } figure { break-inside: avoid; } }
"""
