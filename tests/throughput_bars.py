"""The table of docs/performance.md as bars: `python -m tests.throughput_bars > docs/throughput.svg`."""

import re
import sys
from pathlib import Path
from statistics import mean

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
COLOURS = ("#2563eb", "#9ca3af", "#d1d5db")
TEXT = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#374151"'
LEFT, WIDTH, BAR, GAP = 150, 640, 13, 14
"""Where bars begin, how long the longest is, how thick each is, and what is between two groups."""


def table(page: str) -> tuple[list[str], dict[str, list[float]]]:
    """The names of the servers, and their tokens/s by kind of work; of several figures the mean."""
    (header,) = re.findall(r"^\| \| (Lockstep.*) \| ratio \| aim \|$", page, re.MULTILINE)
    names = header.split(" | ")
    rows = re.findall(
        r"^\| ((?:prefill|decode), \d* ?\w[^|]*) \| ([\d, ]+) \| ([\d, ]+) \| ([\d, ]+) \|", page, re.MULTILINE
    )
    return names, {kind: [mean(map(float, cell.split(", "))) for cell in cells] for kind, *cells in rows}


def svg(names: list[str], rows: dict[str, list[float]]) -> str:
    most = max(max(figures) for figures in rows.values())
    group = len(names) * BAR + GAP
    height = 34 + len(rows) * group
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" {TEXT} role="img">',
        "<title>Tokens per second of Lockstep and of llama.cpp</title>",
        f'<rect width="860" height="{height}" rx="10" fill="#ffffff"/>',
    ]
    for place, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
        x = LEFT + 170 * place
        lines.append(f'<rect x="{x}" y="12" width="14" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 20}" y="22">{name}</text>')
    lines.append('<text x="14" y="22" font-weight="bold">tokens/s</text>')
    for place, (kind, figures) in enumerate(rows.items()):
        top = 40 + place * group
        middle = top + len(figures) * BAR / 2 + 4
        lines.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{kind}</text>')
        for line, (figure, colour) in enumerate(zip(figures, COLOURS, strict=True)):
            y, length = top + line * BAR, figure / most * WIDTH
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 1}" fill="{colour}"/>')
            lines.append(f'<text x="{LEFT + length + 5:.1f}" y="{y + BAR - 3}" font-size="11">{figure:.0f}</text>')
    return "\n".join([*lines, "</svg>", ""])


def picture() -> str:
    return svg(*table(PAGE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.stdout.write(picture())
