"""Tables and a figure from the JSON of `wellcond bench attention`.

    python -m wellcond.bench.attention_page benchmarks/attention-h200.json docs/attention.md docs/benchmarks.md
    plot(Path("benchmarks/attention-h200.json"))      # → benchmarks/attention-h200.svg, where Altair is installed

A page marks where a table goes by `<!-- bench attention: lengths -->` … `<!-- end of lengths -->`. What stands between
the marks is replaced, and everything else is written by hand. `PARTS` names the tables.

Ratios compare a method with torch's attention in the same turn, forward and backward. There are several kinds of times,
as bench/attention.py explains: CALLED from Python, on the GPU alone (a CUDA graph), and SINGLE calls with a backward
pass each. Older records, and those of a CPU, lack some; tables of missing times have no rows.
"""

import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from wellcond.records import read_json, write_text
from wellcond.report.charts import Axis, Look, altair, looks_of, plain_lines, svg, titled
from wellcond.report.colors import CATEGORIES

__all__ = ["PARTS", "TORCH", "cost_exponent", "faster", "filled", "plot", "wins_from", "write_page"]

Record = dict[str, Any]
TORCH = "softmax (SDPA)"
CALLED, GPU, SINGLE, FORWARD = "both ms", "gpu ms", "alone ms", "forward ms"
TIMES = {CALLED: "as called", GPU: "GPU alone", SINGLE: "single call"}
NAMES = {  # the models that a shape comes from
    "16×2×4096×32": "LRA Text, Retrieval",
    "32×2×2048×32": "LRA ListOps",
    "128×2×1024×32": "LRA Pathfinder",
    "256×2×1024×32": "LRA Image",
    "64×3×197×64": "ViT-Ti, 64 images",
    "64×12×197×64": "ViT-B, 64 images",
    "8×12×4096×64": "ViT-B's heads, 4,096 tokens",
    "1×16×16384×64": "ViT-L's heads, 16,384 tokens",
}
FEW = ("64×12×197×64", "32×2×2048×32", "16×2×4096×32", "4×2×16384×32", "1×2×65536×32")  # for docs/benchmarks.md


def write_page(json_path: Path, page_path: Path) -> Path:
    """Rewrite the marked tables of the page from the benchmark's JSON, and return the page's path."""
    write_text(page_path, filled(json_path, page_path))
    return page_path


def filled(json_path: Path, page_path: Path) -> str:
    """Return the page as `write_page` would write it. Raises ValueError for another JSON file, or for wrong marks."""
    record = _read(json_path)
    text = Path(page_path).read_text(encoding="utf-8")
    found = re.findall(r"<!-- bench attention: (.*?) -->", text)
    if not found or not set(found) <= set(PARTS) or len(set(found)) < len(found):
        raise ValueError(
            f"{page_path} marks {', '.join(found) or 'no part'}; put `<!-- bench attention: NAME -->` and "
            f"`<!-- end of NAME -->`, each once, where NAME is one of {', '.join(PARTS)}"
        )
    for name in found:
        begin, end = f"<!-- bench attention: {name} -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        if rest.count(end) != 1:
            raise ValueError(f"{page_path} needs exactly one `{end}` after `{begin}`; put it where the table ends")
        text = f"{before}{begin}\n{PARTS[name](record)}\n{end}{rest.split(end)[1]}"
    return text


def _read(json_path: Path) -> Record:
    try:
        record = read_json(json_path)
    except ValueError as error:
        raise ValueError(f"{json_path} holds no JSON ({error}); give the file that `wellcond bench` wrote") from error
    if not isinstance(record, dict) or record.get("benchmark") != "attention":
        raise ValueError(f"{json_path} is not a record of `wellcond bench attention`; give the JSON that it wrote")
    return record


# ---- tables


def _summary(record: Record) -> str:
    """From which length on each method is faster than torch's attention, and how often it was slower."""
    times, at_end = _times(record, *TIMES), _times(record, CALLED, GPU)
    cells = []
    for method in _methods(record)[1:]:
        ratios = [ratio for row in rows_of(record, method) if (ratio := faster(record, row))]
        lost = [ratio for ratio in ratios if ratio <= 1]
        longest = max(rows_of(record, method), key=lambda row: row["n"])
        at_longest = [faster(record, longest, time=time) for time in at_end]
        cells.append([
            method,
            *(_start(record, method, time) for time in times),
            *(f"{_ratio(ratio)} × at {longest['n']:,}" if ratio else "" for ratio in at_longest),
            f"{len(lost)} of {len(ratios)}",
            f"{_digits(1 / min(ratios), 2)} ×" if ratios else "",
        ])  # fmt: skip
    columns = [f"faster from, {TIMES[time]}" for time in times]
    columns += [f"ratio at its longest, {TIMES[time]}" for time in at_end]
    return _table(["method", *columns, "slower in, as called", "worst, in torch's time"], cells)


def _noise(record: Record) -> str:
    """How far the times can be trusted, and how they grow with the length."""
    times = _times(record, CALLED, GPU)
    dtypes = {row["method"]: row["dtype"] for row in record["rows"]}
    cells = []
    for method in _methods(record):
        spreads = [spread(record, method, time=time) for time in times]
        beyond = [
            _start(record, method, time, by=noise) if method != TORCH and noise > 0 else ""
            for time, noise in zip(times, spreads, strict=True)
        ]
        powers = [cost_exponent(record["rows"], method, time) for time in times]
        powers[0] = record["exponents"].get(method, math.nan)
        cells.append([
            method,
            *("" if math.isnan(noise) else f"{_digits(noise, 3)} ×" for noise in spreads),
            *beyond,
            *("" if math.isnan(power) else f"{power:.2f}" for power in powers),
            dtypes[method],
        ])  # fmt: skip
    columns = [f"{what}, {TIMES[time]}" for what in ("noise", "faster by more from", "exponent") for time in times]
    return _table(["method", *columns, "dtype"], cells)


def _timed(record: Record, *, kinds: Sequence[str] = (), time: str = CALLED) -> str:
    """Milliseconds at each shape, with the ratio to torch's."""
    methods = _methods(record)
    shapes = [shape for shape in _shapes(record, *kinds) if any(row.get(time) for row in rows_of(record, None, shape))]
    cells = [[_named(shape), *(_time(record, method, shape, time) for method in methods)] for shape in shapes]
    return _table(["batch×heads×n×width", *methods], cells)


def _memory(record: Record, *, column: str) -> str:
    methods, cells = _methods(record), []
    for shape in _shapes(record):
        found = [[row[column] for row in rows_of(record, m, shape) if row.get(column)] for m in methods]
        if any(found):
            cells.append([_named(shape), *(_digits(max(values), 3) if values else "–" for values in found)])
    return _table(["batch×heads×n×width", *methods], cells)


def _speed(record: Record) -> str:
    """A few shapes and only the registered attentions, as called and on the GPU alone."""
    from wellcond.attention import ATTENTIONS  # imports torch, which no other table needs

    methods = [method for method in _methods(record) if method == TORCH or method in ATTENTIONS]
    cells = []
    for shape in (shape for shape in FEW if rows_of(record, TORCH, shape)):
        for time in _times(record, CALLED, GPU):
            name = f"{_length(shape):,} ({shape})" if time == CALLED else "on the GPU alone"
            cells.append([name, *(_time(record, method, shape, time) for method in methods)])
    return _table([f"n, with {record['landmarks']} landmarks", *methods], cells)


def _notes(record: Record) -> str:
    """What is missing or doubtful, according to the rows' own notes."""
    return _table(
        ["method", "shape", "note"],
        [[row["method"], row["shape"], row["note"]] for row in record["rows"] if row["note"]],
    )


def _made(record: Record) -> str:
    where = record["environment"]
    device = where["device"] if where["device"] != "cpu" else where["cpu"]["name"]
    versions = [f"{name} {where['versions'][name]}" for name in ("torch", "triton") if name in where["versions"]]
    commit = (where["commit"] or "unknown")[:12] + (" with changes" if where["dirty"] else "")
    calls = max(row.get("calls") or 1 for row in record["rows"])
    facts = {"command": f"`{where['command']}`", "device": device, "versions": ", ".join(versions), "commit": commit}
    facts |= {"date": where["date"][:10], "landmarks": record["landmarks"], "calls that share a backward pass": calls}
    return _table(["made by", ""], [[name, str(value)] for name, value in facts.items()])


PARTS: dict[str, Callable[[Record], str]] = {
    "summary": _summary,
    "speed": _speed,
    "lengths": partial(_timed, kinds=("length",)),
    "shapes": partial(_timed, kinds=("LRA", "other")),
    "gpu": partial(_timed, time=GPU),
    "forward": partial(_timed, time=FORWARD),
    "memory": partial(_memory, column="memory MiB"),
    "kept memory": partial(_memory, column="kept memory MiB"),
    "forward memory": partial(_memory, column="forward memory MiB"),
    "noise": _noise,
    "notes": _notes,
    "made": _made,
}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def _time(record: Record, method: str, shape: str, time: str) -> str:
    """The times of a method at a shape, with their ratios to torch's; bold where it is faster."""
    rows = [row for row in rows_of(record, method, shape) if row.get(time)]
    times = ", ".join(_digits(row[time], 3) for row in rows) or "–"
    ratios = [ratio for row in rows if method != TORCH and (ratio := faster(record, row, time=time))]
    said = ", ".join(f"**{_ratio(ratio)}**" if ratio > 1 else _ratio(ratio) for ratio in ratios)
    return f"{times} ({said})" if said else times


def _start(record: Record, method: str, time: str, *, by: float = 1.0) -> str:
    if not any(row.get(time) for row in rows_of(record, method)):
        return ""
    start = wins_from(record, method, by=max(1.0, by), time=time)
    return "never" if start is None else f"{start:,}"


def _named(shape: str) -> str:
    return f"{NAMES[shape]} ({shape})" if shape in NAMES else shape


def _length(shape: str) -> int:
    return int(shape.split("×")[2])


def _ratio(value: float) -> str:
    return _digits(value, 3 if 0.95 < value < 1.05 else 2)  # enough to see which side of 1 it is on


def _digits(value: float, digits: int) -> str:
    """Format `value` with so many significant digits, without an exponent."""
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


# ---- what the rows say


def rows_of(record: Record, method: str | None, shape: str | None = None) -> list[Record]:
    """Return the rows of one method, or of all (None); at one shape, or at all (None)."""
    return [row for row in record["rows"] if method in (None, row["method"]) and shape in (None, row["shape"])]


def faster(record: Record, row: Record, *, time: str = CALLED) -> float | None:
    """Return how many times faster than torch's attention it was in the same turn; None if either time is missing."""
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
    """Return the smallest measured n from which on `method` beats torch at every shape, by more than the factor `by`.

    None if there is none. A measurement that failed, was left out or could not be captured is not a win.
    """
    shortest = None
    for n in sorted({row["n"] for row in rows_of(record, method)}, reverse=True):
        if not all((faster(record, row, time=time) or 0) > by for row in rows_of(record, method) if row["n"] == n):
            break
        shortest = n
    return shortest


def spread(record: Record, method: str, *, time: str = CALLED) -> float:
    """Return the largest ratio between two measurements of one shape; NaN if none was measured twice."""
    measured = [[row[time] for row in rows_of(record, method, shape) if row.get(time)] for shape in _shapes(record)]
    return max((max(times) / min(times) for times in measured if len(times) > 1), default=math.nan)


def cost_exponent(rows: Sequence[Record], method: str, time: str = CALLED) -> float:
    """Return the exponent of a sequence's cost in n: the slope of log time per token over log n, plus one.

    Only lengths from 4,096 tokens on are used, if there are any: below, launches dominate. NaN if it is not known.
    """
    known = [row for row in rows if row["kind"] == "length" and row["method"] == method and row.get(time)]
    known = [row for row in known if row["n"] >= 4096] or known
    if len({row["n"] for row in known}) < 2:
        return math.nan
    x = [math.log(row["n"]) for row in known]
    return 1 + statistics.linear_regression(x, [math.log(row[time] / row["tokens"]) for row in known]).slope


def _times(record: Record, *among: str) -> list[str]:
    """Return which of these times were taken; CALLED is always among them."""
    return [time for time in among if time == CALLED or any(row.get(time) for row in record["rows"])]


def _methods(record: Record) -> list[str]:
    """Return the methods: torch's first, the others in the file's order."""
    return list(dict.fromkeys([TORCH, *(row["method"] for row in record["rows"])]))


def _shapes(record: Record, *kinds: str) -> list[str]:
    """Return the shapes of these kinds, or of all, in the file's order."""
    return list(dict.fromkeys(row["shape"] for row in record["rows"] if not kinds or row["kind"] in kinds))


# ---- the figure

# Colours by method; a dashed line is another implementation of what the solid line of its colour shows.
LOOKS = {
    TORCH: Look(CATEGORIES[0]),
    "skyformer": Look(CATEGORIES[1]),
    "skyformer, as published": Look(CATEGORIES[1], dashed=True),
    "nystrom": Look(CATEGORIES[2]),
    "nystrom, as published": Look(CATEGORIES[2], dashed=True),
    "kernelized": Look(CATEGORIES[3]),
    "kernelized by FlexAttention": Look(CATEGORIES[3], dashed=True),
    "linear": Look(CATEGORIES[4]),
}


def plot(json_path: Path) -> Path:
    """Draw the benchmark at `json_path` as an SVG beside it: time and peak memory by length, one line per method.

    All lengths have the same total number of tokens; a single sequence with more tokens is scaled to that number. The
    reasons for missing points stand above the plot. Returns the path of the SVG.

    Raises ValueError if the file is not a record of this benchmark, or holds no times.
    """
    json_path = Path(json_path)
    record = _read(json_path)
    rows = [row for row in record["rows"] if row["kind"] == "length"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    tokens = record["tokens"]
    columns = {
        "forward + backward, ms": "both ms",
        "the same on the GPU alone, ms": "gpu ms",
        "peak memory, MiB": "memory MiB",
    }
    if not any(row["both ms"] for row in rows):
        raise ValueError(f"{json_path} holds no time to draw: every method failed, and its rows say why")
    looks = {method: LOOKS.get(method, look) for method, look in looks_of(methods).items()}
    x = Axis("n", "tokens in a sequence, n", log=True, base=2)
    panels = [
        plain_lines(points, x=x, y=Axis("value", label, log=True), by="method", looks=looks, width=340, height=260)
        for label, column in columns.items()
        if (points := [point for method in methods for point in _points(rows, method, column, tokens)])
    ]
    drawing = titled(
        altair().hconcat(*panels).resolve_scale(color="shared", strokeDash="shared"),
        "Attention over the length",
        *_captions(record, rows),
    )
    path = json_path.with_suffix(".svg")
    write_text(path, svg(drawing) + "\n")
    return path


def _points(rows: Sequence[dict[str, Any]], method: str, column: str, tokens: int) -> list[dict[str, Any]]:
    """Return what was measured of a method, scaled to `tokens` tokens."""
    found = sorted((row["n"], row[column] * tokens / row["tokens"]) for row in rows if _is(row, method, column))
    return [{"method": method, "n": n, "value": value} for n, value in found]


def _is(row: dict[str, Any], method: str, column: str) -> bool:
    return row["method"] == method and row.get(column) is not None


def _captions(record: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what was measured and where, and the notes of the rows, each once with its lengths."""
    where, tokens = record["environment"], record["tokens"]
    device = where["cpu"]["name"] if record["on"] == "cpu" else where["device"]
    shape = f"{tokens:,} tokens in all, {rows[0]['heads']} heads of {rows[0]['width']}"
    notes = [f"{shape}, {record['landmarks']} landmarks; torch {where['versions']['torch']}, {device}."]
    if any(row.get("gpu ms") for row in rows):
        notes.append(
            "On the GPU alone: captured as a CUDA graph, without the time of the host that starts its kernels."
        )
    longer = sorted({row["n"] for row in rows if row["tokens"] != tokens})
    notes += [f"n = {n:,} is one sequence, shown per {tokens:,} tokens too." for n in longer]
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["note"]:
            said.setdefault((row["method"], row["note"]), []).append(f"{row['n']:,}")
    return notes + [f"{method} at n = {'; '.join(ns)}: {note}" for (method, note), ns in said.items()]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python -m wellcond.bench.attention_page JSON PAGE [PAGE …]")
    try:
        for _page in sys.argv[2:]:
            print(f"wrote {write_page(Path(sys.argv[1]), Path(_page))}")
    except (OSError, ValueError) as _error:
        sys.exit(f"error: {_error}")
