"""Losses over steps as lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

TRAINED, HELD_BACK = "·", "o"
"""Marks of the loss of steps, and of the held-back part."""


def plot(losses: Sequence[float], held_back: Sequence[tuple[int, float]], *, width: int = 72, height: int = 12) -> list[str]:
    """The mean loss of each column's steps, and (step, loss) of evaluations, between the least and the largest; steps to the right."""
    columns = min(width, max(len(losses), 1))
    means = []
    for column in range(columns):
        part = losses[column * len(losses) // columns : (column + 1) * len(losses) // columns]
        means.append(sum(part) / len(part) if part else None)
    values = [m for m in means if m is not None] + [loss for _, loss in held_back]
    if not values:
        return []
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    cells = [[" "] * columns for _ in range(height)]

    def put(column: int, value: float, mark: str) -> None:
        cells[round((high - value) / span * (height - 1))][column] = mark

    for column, mean in enumerate(means):
        if mean is not None:
            put(column, mean, TRAINED)
    for step, loss in held_back:
        put(min(columns - 1, step * columns // max(len(losses), 1)), loss, HELD_BACK)
    lines = []
    for row, marks in enumerate(cells):
        label = f"{high - span * row / (height - 1):8.3f} " if row in (0, height // 2, height - 1) else " " * 9
        lines.append(f"{label}|{''.join(marks)}".rstrip())
    axis = [f"{'':9}+{'-' * columns}", f"{'':10}0 {f'{len(losses)} steps':>{max(columns - 2, 0)}}"]
    return [*lines, *axis, f"{'':10}{TRAINED} steps   {HELD_BACK} held back"]
