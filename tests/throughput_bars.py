"""The tables of docs/performance.md as bars: `python -m tests.throughput_bars > docs/throughput.svg`."""

import re
import sys
from pathlib import Path
from statistics import mean
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
COLOURS = ("#2563eb", "#9ca3af", "#d1d5db")
TEXT = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#374151"'
LEFT, WIDTH, BAR, GAP = 150, 640, 13, 14
"""Where bars begin, how long the longest is, how thick each is, and what is between two groups."""
TOP, TITLE = 40, 22
"""What stands above the first table, and its title."""


_HEADER = re.compile(r"^\| \| (Lockstep.*) \| ratio \| aim \|$", re.MULTILINE)
_ROW = re.compile(r"^\| ((?:prefill|decode), \d* ?\w[^|]*) \| ([\d, ]+) \| ([\d, ]+) \| ([\d, ]+) \|", re.MULTILINE)


class Table(NamedTuple):
    """One table of the page: what CPU it is of, the servers' names, and their tokens/s by kind of work."""

    cpu: str
    names: list[str]
    rows: dict[str, list[float]]


def tables(page: str) -> list[Table]:
    """The page's tables, in order; of several figures in a cell the mean."""
    found = []
    for section in page.split("\n### ")[1:]:
        for header in _HEADER.findall(section):
            rows = {
                kind: [mean(map(float, cell.split(", "))) for cell in cells] for kind, *cells in _ROW.findall(section)
            }
            found.append(Table(section.splitlines()[0], header.split(" | "), rows))
    return found


def svg(drawn: list[Table]) -> str:
    most = max(max(figures) for table in drawn for figures in table.rows.values())
    heights = [TITLE + len(table.rows) * (len(table.names) * BAR + GAP) for table in drawn]
    height = TOP + sum(heights)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" {TEXT} role="img">',
        "<title>Tokens per second of Lockstep and of llama.cpp</title>",
        f'<rect width="860" height="{height}" rx="10" fill="#ffffff"/>',
    ]
    for place, (name, colour) in enumerate(zip(drawn[0].names, COLOURS, strict=True)):
        x = LEFT + 170 * place
        lines.append(f'<rect x="{x}" y="12" width="14" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 20}" y="22">{name}</text>')
    lines.append('<text x="14" y="22" font-weight="bold">tokens/s</text>')
    for place, table in enumerate(drawn):
        lines += bars(table, TOP + sum(heights[:place]), WIDTH / most)
    return "\n".join([*lines, "</svg>", ""])


def bars(table: Table, top: int, scale: float) -> list[str]:
    lines = [f'<text x="14" y="{top + 12}" font-weight="bold">{table.cpu}</text>']
    for place, (kind, figures) in enumerate(table.rows.items()):
        first = top + TITLE + place * (len(figures) * BAR + GAP)
        middle = first + len(figures) * BAR / 2 + 4
        lines.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{kind}</text>')
        for line, (figure, colour) in enumerate(zip(figures, COLOURS, strict=True)):
            y, length = first + line * BAR, figure * scale
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 1}" fill="{colour}"/>')
            lines.append(f'<text x="{LEFT + length + 5:.1f}" y="{y + BAR - 3}" font-size="11">{figure:.0f}</text>')
    return lines


def picture() -> str:
    return svg(tables(PAGE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.stdout.write(picture())
