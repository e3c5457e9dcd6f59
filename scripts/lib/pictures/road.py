"""Draws the road at one look: laptop, gap, cluster. It works on a light and on a dark page."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 900, 250
BOXES = (
    # x, width, heading, lines
    (10, 270, "Laptop", "with internet",
     ("stage fetch", "models, datasets, environment,", "your files: one folder")),
    (345, 210, "Gap", "no network", ("stage push, rsync,", "a disk, volumes:", "any way will do")),
    (620, 270, "Cluster", "without internet",
     ("stage verify: every byte", "bootstrap.sh: Python, torch", "runner submit: Slurm trains")),
)  # fmt: skip


def drawn() -> str:
    """The diagram as SVG. Pure."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui,sans-serif">',
        "<title>Laptop: stage fetch makes a bundle. Gap: any transfer. "
        "Cluster: stage verify, bootstrap.sh, runner submit.</title>",
        "<style>.b{fill:#fff;stroke:#5d6672}.g{stroke-dasharray:7 5}.h{font-size:22px;"
        "font-weight:700;fill:#1d2126}.s{font-size:14px;fill:#5d6672}.t{font-size:16px;"
        "fill:#1d2126}.a{stroke:#1f6feb;stroke-width:3;fill:none}.k{fill:#1f6feb;font-size:14px;"
        "font-weight:600}@media(prefers-color-scheme:dark){.b{fill:#1c2025;stroke:#9aa4b0}"
        ".h,.t{fill:#e4e7eb}.s{fill:#9aa4b0}.a{stroke:#6ea8fe}.k{fill:#6ea8fe}}</style>",
    ]
    for x, width, heading, sub, lines in BOXES:
        dashed = " g" if heading == "Gap" else ""
        middle = x + width / 2
        parts.append(
            f'<rect class="b{dashed}" x="{x}" y="20" width="{width}" height="165" rx="12"/>'
        )
        parts.append(f'<text class="h" x="{middle}" y="54" text-anchor="middle">{heading}</text>')
        parts.append(f'<text class="s" x="{middle}" y="75" text-anchor="middle">{sub}</text>')
        parts += [
            f'<text class="t" x="{middle}" y="{107 + 24 * row}" text-anchor="middle">'
            f"{escape(line)}</text>"
            for row, line in enumerate(lines)
        ]
    for x in (285, 560):
        parts.append(f'<path class="a" d="M{x} 103h50m-12 -9l12 9l-12 9"/>')
    parts.append('<path class="a" d="M750 190v30H145v-26m-9 12l9 -12l9 12"/>')
    parts.append(
        '<text class="k" x="450" y="243" text-anchor="middle">'
        "damaged? a report goes back, only the bad blocks come again</text>"
    )
    return "\n".join([*parts, "</svg>\n"])
