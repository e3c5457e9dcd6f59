"""Draws the road at one look: laptop, gap, cluster. It works on a light and on a dark page."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 660, 240
BOXES = (
    # x, heading, below it, lines
    (5, "Laptop", "with internet", ("stage fetch:", "models, data, Python", "in one folder")),
    (235, "Gap", "no network", ("stage push, rsync,", "a disk, a portal:", "any way will do")),
    (465, "Cluster", "without internet", ("stage verify", "bootstrap.sh", "runner submit")),
)
BOX = 190


def drawn() -> str:
    """The diagram as SVG. Pure."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui,sans-serif">',
        "<title>Laptop: stage fetch makes a bundle. Gap: any transfer. "
        "Cluster: stage verify, bootstrap.sh, runner submit.</title>",
        "<style>.b{fill:#fff;stroke:#5d6672}.g{stroke-dasharray:7 5}.h{font-size:22px;"
        "font-weight:700;fill:#1d2126}.s{font-size:15px;fill:#5d6672}.t{font-size:17px;"
        "fill:#1d2126}.a{stroke:#1f6feb;stroke-width:3;fill:none}.k{fill:#1f6feb;font-size:15px;"
        "font-weight:600}@media(prefers-color-scheme:dark){.b{fill:#1c2025;stroke:#9aa4b0}"
        ".h,.t{fill:#e4e7eb}.s{fill:#9aa4b0}.a{stroke:#6ea8fe}.k{fill:#6ea8fe}}</style>",
    ]
    for x, heading, sub, lines in BOXES:
        dashed = " g" if heading == "Gap" else ""
        middle = x + BOX // 2
        parts.append(f'<rect class="b{dashed}" x="{x}" y="20" width="{BOX}" height="165" rx="12"/>')
        parts.append(f'<text class="h" x="{middle}" y="54" text-anchor="middle">{heading}</text>')
        parts.append(f'<text class="s" x="{middle}" y="75" text-anchor="middle">{sub}</text>')
        parts += [
            f'<text class="t" x="{middle}" y="{107 + 24 * row}" text-anchor="middle">'
            f"{escape(line)}</text>"
            for row, line in enumerate(lines)
        ]
    for x in (197, 427):
        parts.append(f'<path class="a" d="M{x} 103h34m-10 -8l10 8l-10 8"/>')
    parts.append('<path class="a" d="M560 188v24H100v-22m-9 12l9 -12l9 12"/>')
    parts.append(
        '<text class="k" x="330" y="233" text-anchor="middle">'
        "damaged? only the bad files come again</text>"
    )
    return "\n".join([*parts, "</svg>\n"])
