"""What the ledger did, as a table."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leangrad.ledger.record import Entry


def summarize(entries: list[Entry]) -> str:
    """Bytes kept, rebuilt and shared, by module and op; and the reason for what was kept."""
    if not entries:
        return "the ledger has recorded no step yet: run one forward pass"
    rows: dict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    totals: dict[str, int] = defaultdict(int)
    for e in entries:
        row = rows[e.module, e.op, e.outcome, e.why]
        row[0] += 1
        row[1] += e.nbytes
        totals[e.outcome] += e.nbytes
    lines = [f"{'module':<36} {'op':<28} {'':<10} {'n':>4} {'MB':>10}  why"]
    for (module, op, outcome, why), (count, nbytes) in rows.items():
        name = op.removesuffix("Backward0").removesuffix("Backward1")
        lines.append(f"{module:<36} {name:<28} {outcome:<10} {count:>4} {nbytes / 1e6:>10.3f}  {why}".rstrip())
    lines.append("")
    outcomes = ["kept", "rebuilt", "shared", *(["shape only"] if totals["shape only"] else [])]
    lines.append(", ".join(f"{what} {totals[what] / 1e6:.3f} MB" for what in outcomes))
    return "\n".join(lines)
