#!/usr/bin/env python3
"""Draws results of bench_engine.py or bench_images.py as an SVG picture: `plot.py docs/benchmarks/bench-engine.json`.

For each case and each combination of model file and settings, a bar shows the median of the ratios to the peer, and a
line spans the ratios of all rounds.
"""

from __future__ import annotations

import html
import json
import pathlib
import statistics
import sys

COLORS = ("#4f46e5", "#0f766e", "#9a3412")
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 860, 290, 60, 76, 18, 14


def draw(record: dict) -> str:
    """Returns the picture of a record that bench_engine.py or bench_images.py wrote."""
    cases, titles = record["cases"], record["titles"]
    ratios = {
        (case, form): [each[form]["figure"] / each["peer"]["figure"] for each in record["measured"][case]]
        for case in cases
        for form in titles
    }
    scale = (WIDTH - LEFT - RIGHT) / max(1.0, max(map(max, ratios.values())))
    description = "; ".join(
        f"{cases[case]}, {titles[form]}: {statistics.median(each):.2f}" for (case, form), each in ratios.items()
    )
    height = TOP + len(cases) * (len(titles) * BAR + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        "aria-labelledby=\"title description\" font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif\" "
        'font-size="13" fill="#0f172a">',
        '<title id="title">Tokens per second relative to openvino_genai</title>',
        f'<desc id="description">{html.escape(description)}</desc>',
        f'<rect width="{WIDTH}" height="{height}" rx="14" fill="#f8fafc" stroke="#cbd5e1"/>',
        '<text x="24" y="30" font-size="15" font-weight="600">Tokens per second relative to openvino_genai</text>',
    ]
    for index, title in enumerate(titles.values()):
        x = 24 + index * 280
        parts.append(f'<rect x="{x}" y="44" width="12" height="12" fill="{COLORS[index]}"/>')
        parts.append(f'<text x="{x + 18}" y="55">{html.escape(title)}</text>')
    y = TOP
    for case, title in cases.items():
        middle = y + len(titles) * BAR / 2 + 4
        parts.append(f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{html.escape(title)}</text>')
        for index, form in enumerate(titles):
            each = ratios[case, form]
            median, low, high = (LEFT + scale * ratio for ratio in (statistics.median(each), min(each), max(each)))
            center = y + BAR / 2
            bar = f'x="{LEFT}" y="{y + 2}" width="{median - LEFT:.1f}" height="{BAR - 4}"'
            parts.append(f'<rect {bar} fill="{COLORS[index]}"/>')
            parts.append(f'<path d="M{low:.1f} {center}H{high:.1f}" stroke="#0f172a" stroke-width="2"/>')
            parts.append(f'<text x="{high + 6:.1f}" y="{center + 4:.0f}">{statistics.median(each):.2f}</text>')
            y += BAR
        y += GAP
    one = LEFT + scale
    parts.append(f'<path d="M{one:.1f} {TOP - 6}V{y}" stroke="#64748b" stroke-dasharray="4 4"/>')
    parts.append(f'<text x="{one:.1f}" y="{y + 14}" text-anchor="middle" fill="#475569">1: as fast</text>')
    return "\n".join([*parts, "</svg>", ""])


def write(record: pathlib.Path) -> None:
    """Writes the picture next to the record."""
    record.with_suffix(".svg").write_text(draw(json.loads(record.read_text())))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write(pathlib.Path(argument))
