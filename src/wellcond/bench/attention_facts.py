"""What the rows of `wellcond bench attention` say: where a method wins, and how far its times can be trusted.

    record = read_json("benchmarks/attention-h200.json")
    wins_from(record, "skyformer")                 # the length from which it is faster than torch's, every time
    wins_from(record, "skyformer", time=GPU)       # the same by the GPU's work alone
    spread(record, "skyformer")                    # how far two measurements of one shape were apart, as a ratio

A method wins a row where it is faster, forward and backward, than torch's attention there; at each shape they took
turns, but for what is compiled, which came last. A shape that was measured twice counts twice. There are several times:
`CALLED`, as called from Python; in later records `GPU`, the same work captured as a CUDA graph, which the host starts
as one; and in the latest `ALONE`, one call with a backward pass of its own, where `CALLED` is one of several calls in a
backward pass, as a model has them.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

__all__ = [
    "ALONE",
    "CALLED",
    "FORWARD",
    "GPU",
    "KEPT",
    "PEAK",
    "PEAK_FORWARD",
    "Record",
    "TORCH",
    "cost_exponent",
    "exponent",
    "faster",
    "losses",
    "methods_of",
    "rows_of",
    "shapes_of",
    "spread",
    "taken",
    "times_of",
    "unmoved",
    "wins_from",
]

Record = dict[str, Any]
TORCH = "softmax (SDPA)"
CALLED, GPU, ALONE, FORWARD = "both ms", "gpu ms", "alone ms", "forward ms"
PEAK, KEPT, PEAK_FORWARD = "memory MiB", "kept memory MiB", "forward memory MiB"


def taken(record: Record, method: str | None = None, *, time: str = GPU) -> bool:
    """Whether any row, or any of a method, has this time."""
    return any(row.get(time) for row in record["rows"] if method in (None, row["method"]))


def faster(record: Record, row: Record, *, time: str = CALLED) -> float | None:
    """How many times faster than torch's attention in the same turn; None where either time is missing."""
    if time == CALLED:
        return row.get("times faster")
    torchs = None
    for other in record["rows"]:
        if (other["method"], other["kind"], other["shape"]) == (TORCH, row["kind"], row["shape"]):
            torchs = other.get(time)  # each turn begins with torch's row
        if other is row:
            break
    return torchs / row[time] if torchs and row.get(time) else None


def wins_from(record: Record, method: str, *, by: float = 1.0, time: str = CALLED) -> int | None:
    """The smallest measured n from which `method` wins every measurement, of any shape, `by` more than this factor.

    None if there is none. Where a method failed, was left out or could not be captured, it has not won.
    """
    shortest = None
    for n in sorted({row["n"] for row in rows_of(record, method)}, reverse=True):
        if not all((faster(record, row, time=time) or 0) > by for row in rows_of(record, method) if row["n"] == n):
            break
        shortest = n
    return shortest


def losses(record: Record, method: str, *, time: str = CALLED) -> list[Record]:
    """The rows in which `method` was slower than torch's attention, or no faster, in the file's order."""
    return [row for row in rows_of(record, method) if (faster(record, row, time=time) or math.inf) <= 1]


def spread(record: Record, method: str, *, time: str = CALLED) -> float:
    """The largest ratio between two measurements of one shape; NaN where none was measured twice."""
    twice = [times for shape in shapes_of(record) if len(times := times_of(record, method, shape, time=time)) > 1]
    return max((max(times) / min(times) for times in twice), default=math.nan)


def exponent(record: Record, method: str, *, time: str = CALLED) -> float:
    """The exponent of a sequence's cost in n, from 4,096 tokens on; NaN where it is not known.

    What the benchmark says of its times as called; the same slope of others.
    """
    return record["exponents"].get(method, math.nan) if time == CALLED else cost_exponent(record["rows"], method, time)


def cost_exponent(rows: Sequence[Record], method: str, time: str = CALLED) -> float:
    """The slope of log time per token over log n, plus one; below 4,096 tokens launches count, not work."""
    known = [row for row in rows if row["kind"] == "length" and row["method"] == method and row.get(time)]
    known = [row for row in known if row["n"] >= 4096] or known
    if len({row["n"] for row in known}) < 2:
        return math.nan
    x = [math.log(row["n"]) for row in known]
    return 1 + statistics.linear_regression(x, [math.log(row[time] / row["tokens"]) for row in known]).slope


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


def times_of(record: Record, method: str, shape: str, *, time: str = CALLED) -> list[float]:
    """What was measured, forward and backward, in milliseconds."""
    return [row[time] for row in rows_of(record, method, shape) if row.get(time)]


def methods_of(record: Record) -> list[str]:
    """Methods in the file's order."""
    return list(dict.fromkeys(row["method"] for row in record["rows"]))


def shapes_of(record: Record, *kinds: str) -> list[str]:
    """Shapes in the file's order, of these kinds or of all."""
    return list(dict.fromkeys(row["shape"] for row in record["rows"] if not kinds or row["kind"] in kinds))
