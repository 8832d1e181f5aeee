"""What a grid of decode measurements is cut by and shown as: budgets of time, cells, a markdown table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Cell = dict[str, Any]

LINES = (
    ("mlx_lm_ms", "mlx-lm BatchGenerator, ms"),
    ("headrace_ms", "Headrace, ms"),
    ("torch_ms", "PyTorch, one CUDA graph, ms"),
    ("floor_ms", "floor, ms"),
    ("ratio", "× mlx-lm"),
    ("vs_torch", "× PyTorch"),
)


@dataclass(frozen=True, slots=True)
class Budget:
    """A span of time to work in; ``seconds`` may be infinite."""

    began_s: float
    seconds: float

    @classmethod
    def starting_now(cls, seconds: float) -> Budget:
        return cls(time.monotonic(), seconds)

    @property
    def is_limited(self) -> bool:
        return self.seconds != float("inf")

    @property
    def used_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def left_s(self) -> float:
        return self.seconds - self.used_s

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def part(self, parts: int) -> Budget:
        """One of so many equal parts of what is left, beginning now."""
        return Budget.starting_now(self.left_s / parts)


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers of rows and contexts that every model is measured at."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def parse(cls, rows: str, contexts: str) -> Grid:
        return cls(tuple(map(int, rows.split(","))), tuple(map(int, contexts.split(","))))

    def cells(self, budget: Budget) -> Iterator[tuple[int, int]]:
        """(rows, context) in order, as long as another one fits that takes as long as the longest so far."""
        longest_s = 0.0
        for context in self.contexts:
            for rows in self.rows:
                if budget.left_s < longest_s or budget.is_over:
                    return
                began_s = time.monotonic()
                yield rows, context
                longest_s = max(longest_s, time.monotonic() - began_s)


def markdown_table(cells: Sequence[Cell], grid: Grid) -> str:
    """One block of lines per shape, packing and context; a column per number of rows."""
    lines = [
        f"| shape, bits, context | | {' | '.join(f'{rows} rows' for rows in grid.rows)} |",
        "|---" * (2 + len(grid.rows)) + "|",
    ]
    blocks: dict[tuple[str, int, int], dict[int, Cell]] = {}
    for cell in cells:
        blocks.setdefault((cell["shape"], cell["bits"], cell["context"]), {})[cell["rows"]] = cell
    for (shape, bits, context), by_rows in blocks.items():
        title = f"{shape}, {bits}, {context}"
        for key, label in LINES:
            values = [_shown(by_rows.get(rows, {}), key) for rows in grid.rows]
            if any(value != "–" for value in values):
                lines.append(f"| {title} | {label} | {' | '.join(values)} |")
                title = ""
    return "\n".join(lines)


def _shown(cell: Cell, key: str) -> str:
    if key in cell:
        return f"{cell[key]:.2f}"
    engine = key.removesuffix("_ms")
    if f"{engine}_bytes" in cell:
        return f"needs {cell[f'{engine}_bytes'] / (1 << 30):.0f} GiB"
    return "error" if f"{engine}_error" in cell else "–"
