"""Draw the figures of the tutorials into pictures/idea-*.svg.

python docs/render_ideas.py
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path

from paceline.pipeline.orders import make_schedule
from paceline.pipeline.schedule import ActionKind
from paceline.pipeline.simulate import simulate

FOLDER = Path(__file__).parent / "pictures"
RESIDUALS = Path(__file__).parents[1] / "benchmarks" / "plan" / "residuals.csv"
BLUE, GREEN, ORANGE, RED, GREY = "#7fb3e6", "#8fcf9b", "#f3b562", "#e88080", "#dddddd"
RANKS = 4


class Figure:
    """Rectangles, words and arrows on white, which stays readable on a dark page."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, words: str = "") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="#333"/>'
        )
        if words:
            self.words(x + width / 2, y + height / 2 + 4, words, "middle")

    def words(self, x: float, y: float, words: str, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="#333" marker-end="url(#end)"/>'
        )

    def dot(self, x: float, y: float, fill: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{fill}" fill-opacity="0.6"/>')

    def write(self, name: str) -> None:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="sans-serif" font-size="13" role="img">'
            f"<title>{self.title}</title>"
            '<defs><marker id="end" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L10 5L0 10z" fill="#333"/></marker></defs>'
            f'<rect width="{self.width}" height="{self.height}" rx="6" fill="#fff"/>'
        )
        text = "\n".join([head, *self.parts, "</svg>", ""])
        (FOLDER / f"idea-{name}.svg").write_text(text, encoding="utf-8")


def draw_hub_and_ring() -> None:
    figure = Figure(640, 200, "Threads send everything through device 0; ranks pass parts around a ring")
    figure.words(140, 22, "threads: all through device 0", "middle")
    figure.box(105, 35, 70, 30, RED, "device 0")
    for turn in range(1, RANKS):
        x = 75 * turn - 45
        figure.box(x, 130, 70, 30, BLUE, f"device {turn}")
        figure.arrow(125 + 10 * (turn - 1), 65, x + 30, 128)
        figure.arrow(x + 42, 130, 140 + 10 * (turn - 1), 67)
    figure.words(140, 188, "device 0 sends 2(n - 1) S", "middle")
    figure.words(480, 22, "ranks: around a ring", "middle")
    places = [(390, 40), (505, 40), (505, 130), (390, 130)]
    for rank, (x, y) in enumerate(places):
        figure.box(x, y, 65, 30, GREEN, f"rank {rank}")
    for line in ((455, 55, 503, 55), (537, 70, 537, 128), (505, 145, 457, 145), (422, 130, 422, 72)):
        figure.arrow(*line)
    figure.words(480, 188, "each sends 2(n - 1)/n S", "middle")
    figure.write("hub-and-ring")


def draw_ring() -> None:
    """Draw how many ranks' values are in each chunk, turn by turn, for the loop in the tutorial."""
    figure = Figure(
        700, 290, "An all-reduce in a ring of four ranks: partial sums in three turns, copies in three"
    )
    counts = [[1] * RANKS for _ in range(RANKS)]
    for turn in range(2 * RANKS - 1):
        if turn:
            before = [list(row) for row in counts]
            for rank in range(RANKS):
                added = turn < RANKS
                chunk = (rank - (turn - 1) if added else rank + 1 - (turn - RANKS)) % RANKS
                right = (rank + 1) % RANKS
                counts[right][chunk] = before[rank][chunk] + (before[right][chunk] if added else 0)
        x = 60 + 90 * turn
        figure.words(x + 40, 20, f"turn {turn}" if turn else "before", "middle")
        for rank in range(RANKS):
            for chunk in range(RANKS):
                count = counts[rank][chunk]
                figure.box(
                    x + 20 * chunk, 32 + 58 * rank, 20, 34, (GREY, BLUE, BLUE, GREEN)[count - 1], str(count)
                )
    for rank in range(RANKS):
        figure.words(8, 54 + 58 * rank, f"rank {rank}")
    figure.words(8, 280, "Numbers: how many ranks' values are in a chunk. Green is complete.")
    assert counts == [[RANKS] * RANKS] * RANKS
    figure.write("ring")


def draw_overlap() -> None:
    figure = Figure(640, 190, "Buckets are reduced while backward goes on; only the last one is exposed")
    figure.words(8, 45, "compute")
    figure.words(8, 95, "network")
    figure.box(80, 25, 130, 32, GREY, "forward")
    for bucket in range(4):
        figure.box(210 + 75 * bucket, 25, 75, 32, BLUE, f"backward {4 - bucket}")
        figure.box(285 + 75 * bucket, 75, 60, 32, ORANGE if bucket < 3 else RED, f"bucket {bucket + 1}")
        figure.arrow(285 + 75 * bucket, 57, 285 + 75 * bucket, 73)
    figure.box(572, 25, 56, 32, GREEN, "step")
    figure.words(80, 140, "Orange is hidden behind backward, red is exposed: the step waits for it.")
    figure.words(80, 162, "Larger buckets: fewer messages, a later start. Smaller ones: more latency.")
    figure.write("overlap")


def draw_tree() -> None:
    figure = Figure(640, 230, "Microbatches are summed in one tree, however many ranks compute them")
    for number in range(8):
        x = 20 + 76 * number
        figure.box(
            x, 30, 62, 28, BLUE if number < 3 else (GREEN if number < 6 else ORANGE), f"micro {number}"
        )
    width, y = 8, 58
    while width > 1:
        span = 608 / width
        for pair in range(width // 2):
            left, right = 20 + span * (2 * pair + 0.5) - 7, 20 + span * (2 * pair + 1.5) - 7
            middle = (left + right) / 2
            figure.arrow(left, y, middle - 8, y + 29)
            figure.arrow(right, y, middle + 8, y + 29)
            figure.box(middle - 16, y + 30, 32, 22, GREY, "+")
        width, y = width // 2, y + 52
    figure.words(20, 20, "blue: rank 0, green: rank 1, orange: rank 2")
    figure.write("tree")


def draw_shards() -> None:
    figure = Figure(640, 230, "Memory per rank for 7 billion parameters on four ranks")
    sizes = {"weights 2": (2.0, BLUE), "gradients 2": (2.0, ORANGE), "optimizer 12": (12.0, GREEN)}
    rows = {"dp_replicate": (1, 1, 1), "zero = 1": (1, 1, 4), "zero = 2": (1, 4, 4), "zero = 3": (4, 4, 4)}
    for row, (name, parts) in enumerate(rows.items()):
        y, x, total = 20 + 42 * row, 110.0, 0.0
        figure.words(8, y + 20, name)
        for (_, (size, fill)), parts_of in zip(sizes.items(), parts, strict=True):
            width = 24 * size / parts_of
            figure.box(x, y, width, 28, fill)
            x, total = x + width, total + 7 * size / parts_of
        figure.words(x + 8, y + 19, f"{total:g} GB")
    figure.words(110, 212, "bytes per parameter: blue weights 2, orange gradients 2, green optimizer 12")
    figure.write("shards")


def draw_columns_and_rows() -> None:
    figure = Figure(
        640, 210, "The first matrix is split by columns, the second by rows; one all-reduce adds the halves"
    )
    for rank, fill in enumerate((BLUE, GREEN)):
        y = 20 + 95 * rank
        figure.words(8, y + 38, f"rank {rank}")
        figure.box(60, y, 40, 70, GREY, "x")
        figure.arrow(102, y + 35, 138, y + 35)
        figure.box(140 + 45 * rank, y, 45, 70, fill, "A" + "₁₂"[rank])
        figure.box(140 + 45 * (1 - rank), y, 45, 70, "#fff")
        figure.arrow(232, y + 35, 288, y + 35)
        figure.words(260, y + 28, "gelu", "middle")
        figure.box(290, y + 35 * rank, 90, 35, fill, "B" + "₁₂"[rank])
        figure.box(290, y + 35 * (1 - rank), 90, 35, "#fff")
        figure.arrow(382, y + 35, 438, 105)
    figure.box(440, 88, 90, 34, ORANGE, "all-reduce")
    figure.arrow(532, 105, 568, 105)
    figure.box(570, 70, 40, 70, GREY, "y")
    figure.write("columns-and-rows")


def draw_pipeline() -> None:
    figure = Figure(700, 330, "Four stages and eight microbatches under gpipe and 1f1b; white is waiting")
    for place, name in enumerate(("gpipe", "1f1b")):
        simulation = simulate(make_schedule(name, RANKS, 8))
        end = simulation.total
        figure.words(8, 20 + 160 * place, f"{name}: {simulation.idle_share:.0%} of the time is waiting")
        for rank, spans in enumerate(simulation.spans):
            y = 30 + 160 * place + 28 * rank
            figure.words(8, y + 18, f"rank {rank}")
            figure.box(60, y, 630, 26, "#fff")
            for span in spans:
                fill = BLUE if span.action.kind is ActionKind.FORWARD else ORANGE
                left, width = 60 + 630 * span.start / end, 630 * (span.end - span.start) / end
                figure.box(left, y, width, 26, fill, str(span.action.microbatch))
    figure.write("pipeline")


def draw_kill() -> None:
    figure = Figure(
        640, 170, "A killed run goes on from its newest valid checkpoint and ends with the same bits"
    )
    figure.words(8, 45, "3 ranks")
    figure.box(70, 25, 240, 32, BLUE, "steps 1 to 47")
    figure.words(322, 46, "✗ killed")
    for place in (130, 190, 250):
        figure.arrow(place, 57, place, 78)
        figure.box(place - 22, 80, 44, 24, GREEN, str((place - 70) // 6))
    figure.words(8, 97, "saved")
    figure.words(8, 140, "2 ranks")
    figure.arrow(262, 104, 262, 118)
    figure.box(250, 120, 330, 32, BLUE, "resumed at 30: steps 31 to 80")
    figure.words(590, 141, "same")
    figure.write("kill")


def draw_staleness() -> None:
    figure = Figure(640, 200, "Waiting for the slow rank, or stale gradients from it")
    for column, title in enumerate(("synchronous", "asynchronous")):
        x = 20 + 315 * column
        figure.words(x + 60, 20, title)
        for rank in range(2):
            figure.words(x, 58 + 60 * rank, f"rank {rank}")
    for turn in range(2):
        figure.box(70 + 115 * turn, 40, 45, 28, BLUE, f"{turn}")
        figure.box(115 + 115 * turn, 40, 70, 28, "#fff", "waits")
        figure.box(70 + 115 * turn, 100, 115, 28, ORANGE, f"{turn}")
    for turn in range(5):
        figure.box(385 + 46 * turn, 40, 46, 28, BLUE, f"{turn}")
    for turn in range(2):
        figure.box(385 + 115 * turn, 100, 115, 28, ORANGE, f"of weights {2 * turn}")
    figure.words(385, 152, "Rank 1's gradient is of weights that")
    figure.words(385, 170, "two updates have replaced.")
    figure.words(70, 152, "Each step takes as long as the slowest.")
    figure.write("staleness")


KINDS = {
    "step": ("published step times, each publication predicted without its own rows", BLUE),
    "memory": ("published peaks of memory, nothing fitted", GREEN),
    "storages": ("storages of small models on CPU ranks, nothing fitted", ORANGE),
    "machine": ("step times of small models on two CPU cores, from a probe", RED),
}


def draw_residuals() -> None:
    """Draw a dot for each plan that was compared with a measurement: predicted over measured."""
    rows: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in KINDS}
    with RESIDUALS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows[row["kind"]][row["group"]].append(float(row["predicted_over_measured"]))
    shown = {kind: groups for kind, groups in rows.items() if groups}
    height = 60 + sum(34 + 20 * len(groups) for groups in shown.values())
    figure = Figure(740, height, "Predicted over measured, a dot for each plan")

    def place(ratio: float) -> float:
        return 450 + 150 * math.log2(min(4.0, max(0.25, ratio))) * 0.9

    y, lines = 18, len(figure.parts)
    for kind, groups in shown.items():
        words, fill = KINDS[kind]
        figure.words(10, y + 14, words)
        y += 30
        for group, ratios in sorted(groups.items()):
            figure.words(170, y + 4, f"{group} ({len(ratios)})", "end")
            for number, ratio in enumerate(ratios):
                figure.dot(place(ratio), y + 5 * math.sin(2.4 * number), fill)
            y += 20
        y += 4
    for ratio in (0.25, 0.5, 0.8, 1, 1.25, 2, 4):
        grey = "#333" if ratio == 1 else GREY
        x = place(ratio)
        figure.parts.insert(
            lines, f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="{y}" stroke="{grey}" stroke-width="1"/>'
        )
        figure.words(x, y + 18, f"{ratio:g}", "middle")
    figure.write("residuals")


def main() -> None:
    """Write all figures."""
    for draw in (
        draw_hub_and_ring,
        draw_ring,
        draw_overlap,
        draw_tree,
        draw_shards,
        draw_columns_and_rows,
        draw_pipeline,
        draw_kill,
        draw_staleness,
        draw_residuals,
    ):
        draw()


if __name__ == "__main__":
    main()
