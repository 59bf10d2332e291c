"""The picture of the floors, from what the code imports: `python tests/floor_picture.py > docs/images/floors.svg`.

A box is a floor's folder with its rooms; its sentence is that of the table in docs/architecture.md. An arrow is an
import; arrows that follow from others are left out.
"""

from __future__ import annotations

import re
import textwrap
from html import escape

from test_architecture import FLOORS, FOLDERS, SOURCE, _graph

WIDTH, MARGIN, GAP, ROW_GAP = 1000, 40, 24, 44
LINE, PADDING = 15, 10
STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #3b4252 }"
    " .name { font-weight: 700; font-size: 14px; fill: #1b1f27 }"
    " .rooms { fill: #7a3b10 } .floor { font-size: 13px; fill: #8a93a3 } rect { fill: #f4f6f8; stroke: #c3cad3 }"
    " path { fill: none; stroke: #8a93a3; stroke-width: 1.3 } marker path { fill: #8a93a3; stroke: none }"
    " .far { stroke-dasharray: 4 3 }"
)


def arrows() -> list[tuple[str, str]]:
    """Pairs of floors of which the first imports from the second, and not only by way of a third."""
    pairs = set()
    for module, imported in _graph().items():
        for other in imported:
            above, below = (name.split(".")[1] for name in (f"{module}.", f"{other}."))
            if above != below and above in FLOORS and below in FLOORS:
                pairs.add((above, below))

    def reached(start: str, without: tuple[str, str]) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            name = waiting.pop()
            following = {below for above, below in pairs - {without} if above == name} - found
            found |= following
            waiting += following
        return found

    return sorted(pair for pair in pairs if pair[1] not in reached(pair[0], pair))


def text_of(name: str, width: float) -> tuple[list[str], list[str]]:
    """What a floor's folder is for, and its rooms, in lines of a box."""
    letters = int((width - 2 * PADDING) / 6.3)
    rooms = sorted(path.name for path in FOLDERS if path.parent == SOURCE / name)
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    jobs = re.findall(rf"^\| {FLOORS[name]} \| `{name}(?:/|\.py)` \| (.*) \|$", page, re.MULTILINE)
    assert len(jobs) == 1, f"the table in docs/architecture.md needs one row for {name}, floor {FLOORS[name]}"
    job = jobs[0].replace("`", "")
    return textwrap.wrap(job, letters), textwrap.wrap(" · ".join(rooms), letters)


def picture() -> str:
    """The SVG."""
    boxes: dict[str, tuple[float, float, float, float]] = {}
    drawn: list[str] = []
    top = 10.0
    for floor in sorted(set(FLOORS.values()), reverse=True):
        names = [name for name, number in FLOORS.items() if number == floor]
        width = (WIDTH - 2 * MARGIN - GAP * (len(names) - 1)) / len(names)
        texts = {name: text_of(name, width) for name in names}
        height = 2 * PADDING + LINE * (1 + max(len(job) + len(rooms) for job, rooms in texts.values()))
        drawn.append(f'<text class="floor" x="12" y="{top + 20:.0f}">{floor}</text>')
        for place, name in enumerate(names):
            left = MARGIN + place * (width + GAP)
            boxes[name] = (left, top, width, height)
            drawn.append(f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6"/>')
            job, rooms = texts[name]
            lines = [("name", name), *(("job", line) for line in job), *(("rooms", line) for line in rooms)]
            for number, (kind, line) in enumerate(lines, 1):
                position = f'x="{left + PADDING:.0f}" y="{top + PADDING + number * LINE - 3:.0f}"'
                drawn.append(f'<text class="{kind}" {position}>{escape(line)}</text>')
        top += height + ROW_GAP
    lines = [_arrow(boxes[above], boxes[below]) for above, below in arrows()]
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - ROW_GAP + 10:.0f}" role="img">',
            f"<title>Floors of frameworm and what they import</title><style>{STYLE}</style>",
            f'<defs>{head}<path d="M0 0 8 4 0 8z"/></marker></defs>',
            '<rect width="100%" height="100%" style="fill: #fff; stroke: none"/>',
            *lines,
            *drawn,
            "</svg>\n",
        ]
    )


def _arrow(above: tuple[float, float, float, float], below: tuple[float, float, float, float]) -> str:
    """A line from the lower edge of one box to the upper edge of another; dashed where it passes behind a floor."""
    high, low = above[1] + above[3], below[1]
    passes = low - high > ROW_GAP * 2
    left, right = max(above[0], below[0]), min(above[0] + above[2], below[0] + below[2])
    if right > left:
        start = end = (left + right) / 2 + (right - left) * (0.3 if passes else 0)
    else:
        inwards = 0.8 if below[0] > above[0] else 0.2
        start, end = above[0] + inwards * above[2], below[0] + (1 - inwards) * below[2]
    bend = min(ROW_GAP * 0.8, (low - high) / 2)
    curve = f"M{start:.0f} {high:.0f}C{start:.0f} {high + bend:.0f} {end:.0f} {low - bend:.0f} {end:.0f} {low:.0f}"
    far = ' class="far"' if passes else ""
    return f'<path{far} d="{curve}" marker-end="url(#head)"/>'


if __name__ == "__main__":
    print(picture(), end="")
