"""What the rows of `wellcond bench attention` say: where a method wins, and how far its times can be trusted.

    record = read_json("benchmarks/attention-h200.json")
    wins_from(record, "skyformer")                 # the length from which it is faster than torch's, every time
    spread(record, "skyformer")                    # how far two measurements of one shape were apart, as a ratio

A method wins a row where it is faster, forward and backward, than torch's attention at the same shape and time. A shape
that was measured twice counts twice.
"""

import math
from typing import Any

__all__ = [
    "Record",
    "TORCH",
    "losses",
    "methods_of",
    "rows_of",
    "shapes_of",
    "spread",
    "times_of",
    "unmoved",
    "wins_from",
]

Record = dict[str, Any]
TORCH = "softmax (SDPA)"


def wins_from(record: Record, method: str, *, by: float = 1.0) -> int | None:
    """The smallest measured n from which `method` wins every measurement, of any shape, `by` more than this factor.

    None if there is none. Where a method failed or was left out it has not won.
    """
    shortest = None
    for n in sorted({row["n"] for row in rows_of(record, method)}, reverse=True):
        if not all(row.get("times faster", 0) > by for row in rows_of(record, method) if row["n"] == n):
            break
        shortest = n
    return shortest


def losses(record: Record, method: str) -> list[Record]:
    """The rows in which `method` was slower than torch's attention, or no faster, in the file's order."""
    return [row for row in rows_of(record, method) if row.get("times faster", math.inf) <= 1]


def spread(record: Record, method: str) -> float:
    """The largest ratio between two measurements of one shape; NaN where none was measured twice."""
    twice = [times for shape in shapes_of(record) if len(times := times_of(record, method, shape)) > 1]
    return max((max(times) / min(times) for times in twice), default=math.nan)


def unmoved(record: Record, method: str) -> tuple[Record, Record] | None:
    """The longest two rows of single sequences, if twice the tokens or more took less than 1.2 times as long."""
    single = [
        row for row in rows_of(record, method) if row["kind"] == "length" and row["batch"] == 1 and row["both ms"]
    ]
    if len(single) < 2:
        return None
    short, long = sorted(single, key=lambda row: row["n"])[-2:]
    moved = long["tokens"] < 2 * short["tokens"] or long["both ms"] >= 1.2 * short["both ms"]
    return None if moved else (short, long)


def rows_of(record: Record, method: str, shape: str | None = None) -> list[Record]:
    """The rows of a method, at one shape or at all."""
    return [row for row in record["rows"] if row["method"] == method and shape in (None, row["shape"])]


def times_of(record: Record, method: str, shape: str) -> list[float]:
    """What was measured, forward and backward, in milliseconds."""
    return [row["both ms"] for row in rows_of(record, method, shape) if row["both ms"]]


def methods_of(record: Record) -> list[str]:
    """Methods in the file's order."""
    return list(dict.fromkeys(row["method"] for row in record["rows"]))


def shapes_of(record: Record, *kinds: str) -> list[str]:
    """Shapes in the file's order, of these kinds or of all."""
    return list(dict.fromkeys(row["shape"] for row in record["rows"] if not kinds or row["kind"] in kinds))
