"""The report of `PackedGradients`: how every parameter's gradient arrived, and why."""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One parameter: how its latest gradient arrived, and how often it arrived in each way.

    `how` is "written" (by the op, into the buffer), "added" (by autograd, with one in-place add or copy), "copied" (a
    tensor that other code had assigned to `.grad` was moved in), "plain" (it lies outside the buffer), or "none".
    """

    name: str
    bytes: int
    how: str
    why: str
    counts: dict[str, int]


@dataclass(frozen=True)
class Report:
    """One row for each trainable parameter, in parameter order. `print(report)` shows it as a table."""

    rows: tuple[Row, ...]
    ranges: int
    bytes: int  # of all ranges
    standing_bytes: int  # of the ranges that are allocated now

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no trainable parameter is called {name!r}")

    def __str__(self) -> str:
        ways = Counter(row.how for row in self.rows)
        head = ", ".join(f"{count} {how}" for how, count in sorted(ways.items()))
        width = max(len(row.name) for row in self.rows)
        lines = [
            f"{len(self.rows)} parameters: {head}",
            f"{self.ranges} ranges, {self.bytes:,} bytes when all stand, {self.standing_bytes:,} now",
        ]
        lines += [f"{row.name:<{width}}  {row.how:<7}  {row.bytes:>14,}  {row.why}" for row in self.rows]
        return "\n".join(lines)
