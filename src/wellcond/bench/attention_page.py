"""What a page says of `wellcond bench attention`, made from its JSON: tables, and the sentences that hold numbers.

    python -m wellcond.bench.attention_page benchmarks/attention-h200.json docs/attention.md README.md
    write_page(Path("benchmarks/attention-h200.json"), Path("docs/attention.md"))      # the same for one page

A page marks where they go, `<!-- bench attention: choice -->` … `<!-- end of choice -->`, and what stands between is
replaced; the rest of the page is its author's. The parts are `choice` (sentences), `numbers` (all tables) and `speed`
(a few rows).
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from wellcond.bench.attention_facts import (
    CALLED,
    FORWARD,
    GPU,
    KEPT,
    PEAK,
    PEAK_FORWARD,
    TORCH,
    Record,
    exponent,
    faster,
    methods_of,
    rows_of,
    shapes_of,
    spread,
    taken,
    times_of,
    wins_from,
)
from wellcond.bench.attention_words import OURS, advice, choice, length_of, named, ratio_of, three_digits, times_sign
from wellcond.records import read_json, write_text

__all__ = ["filled", "write_page"]

MEMORIES = {
    PEAK: "Peak memory above the inputs, forward and backward",
    KEPT: "What lies there between the two passes, the result and what its gradient needs: a model has "
    "that of all layers at once",
    PEAK_FORWARD: "Peak memory above the inputs, forward without a gradient",
}
FEW = ("64×12×197×64", "32×2×2048×32", "16×2×4096×32", "4×2×16384×32", "1×2×65536×32")  # for the README


def write_page(json_path: Path, page_path: Path) -> Path:
    """Writes the marked parts of the page anew from the benchmark's JSON, and returns the page's path."""
    write_text(page_path, filled(json_path, page_path))
    return page_path


def filled(json_path: Path, page_path: Path) -> str:
    """The page as `write_page` would leave it. ValueError for another file, or a page whose marks do not fit."""
    try:
        record = read_json(json_path)
    except ValueError as error:
        raise ValueError(f"{json_path} holds no JSON ({error}); give the file that `wellcond bench` wrote") from error
    if not isinstance(record, dict) or record.get("benchmark") != "attention":
        raise ValueError(f"{json_path} is not a record of `wellcond bench attention`; give the JSON that it wrote")
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
            raise ValueError(f"{page_path} has no single `{end}` after `{begin}`; put one where the part ends")
        text = f"{before}{begin}\n{PARTS[name](record)}\n{end}{rest.split(end)[1]}"
    return text


# ---- tables


def _numbers(record: Record) -> str:
    """All tables, and what has to be said beside them."""
    methods, lengths, others = methods_of(record), shapes_of(record, "length"), shapes_of(record, "LRA", "other")
    every = list(dict.fromkeys([*lengths, *others]))
    rows = [f"{length_of(shape):,} ({shape})" for shape in lengths]
    parts = [
        f"Milliseconds forward and backward{_layered(record)}; in brackets how many times faster than torch's "
        f"attention (bold: faster), with {record['landmarks']} landmarks. Two numbers are two measurements of one "
        "shape.",
        _table("n (batch×heads×n×width)", rows, methods, _timed(record, lengths, methods)),
    ]
    if others:
        parts += ["The shapes of the Long Range Arena, of ViTs and of longer sequences:"]
        parts += [_table("shape", [named(shape) for shape in others], methods, _timed(record, others, methods))]
    if taken(record):
        parts += [
            "On the GPU alone, the same in milliseconds: forward and backward captured as a CUDA graph, which the host "
            "starts as one, so that its own time for each kernel is not in it:",
            _table("shape", every, methods, _timed(record, every, methods, time=GPU)),
        ]
    if taken(record, time=FORWARD):
        parts += [
            "Forward alone, without a gradient, in milliseconds:",
            _table("shape", every, methods, _timed(record, every, methods, time=FORWARD)),
        ]
    for column, what in MEMORIES.items():
        if any(row.get(column) for row in record["rows"]):
            cells = [[_memory(record, method, shape, column) for method in methods] for shape in every]
            parts += [f"{what}, in MiB:", _table("shape", every, methods, cells)]
    also = "; `GPU` is on the GPU alone" if taken(record) else ""
    parts += [
        "From which n on each wins every measurement; by more than two measurements of its own were apart; how far "
        f"that is; and how the cost of a sequence grows, as an exponent of n (1: linear, 2: quadratic){also}:",
        _table("method", methods, *_verdicts(record, methods)),
    ]
    return "\n\n".join([*parts, *_remarks(record), _made(record)])


def _layered(record: Record) -> str:
    """That a call is one of several, in the words that follow "forward and backward"."""
    calls = max(row.get("calls") or 1 for row in record["rows"])
    return f", of one call where up to {calls} share a backward pass" if calls > 1 else ""


def _verdicts(record: Record, methods: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The columns, each by the GPU's time right of that as called, and their cells."""
    times = {CALLED: "", GPU: ", GPU"} if taken(record) else {CALLED: ""}
    columns = [
        f"{name}{suffix}"
        for name in ("wins from", "beyond its noise", "noise", "exponent")
        for suffix in times.values()
    ]
    cells = []
    for method in methods:
        by_time = [_verdict(record, method, time) for time in times]
        cells.append([cell for group in zip(*by_time, strict=True) for cell in group])
    return columns, cells


def _verdict(record: Record, method: str, time: str) -> list[str]:
    noise, power = spread(record, method, time=time), exponent(record, method, time=time)
    starts = ["", ""]
    if method != TORCH and (time == CALLED or taken(record, method, time=time)):
        clear = wins_from(record, method, by=max(1.0, noise), time=time) if noise > 0 else math.nan
        wins = (wins_from(record, method, time=time), clear)
        starts = ["never" if n is None else "" if math.isnan(n) else f"{n:,}" for n in wins]
    return [*starts, "" if math.isnan(noise) else times_sign(noise, 3), "" if math.isnan(power) else f"{power:.2f}"]


def _remarks(record: Record) -> list[str]:
    said = []
    below = [method for method in record["exponents"] if exponent(record, method) < 0.99]
    below += [
        f"{method} on the GPU alone" for method in methods_of(record) if exponent(record, method, time=GPU) < 0.99
    ]
    if below:
        why = "says that the time was not that of the arithmetic"
        said.append(f"No attention costs less than its tokens: an exponent below 1 ({'; '.join(below)}) {why}.")
    dtypes = {row["method"]: row["dtype"] for row in record["rows"]}
    odd = [f"{method} ({dtype})" for method, dtype in dtypes.items() if dtype != dtypes[TORCH]]
    if odd:
        said.append(f"All in {dtypes[TORCH]}, except {'; '.join(odd)}.")
    notes = [f"{row['method']} at {row['shape']}: {row['note']}" for row in record["rows"] if row["note"]]
    return said + ([f"Missing or doubtful: {'; '.join(notes)}."] if notes else [])


def _made(record: Record) -> str:
    where = record["environment"]
    device = where["device"] if where["device"] != "cpu" else where["cpu"]["name"]
    versions = ", ".join(
        f"{name} {where['versions'][name]}" for name in ("torch", "triton") if name in where["versions"]
    )
    commit = (where["commit"] or "unknown")[:12] + (" with changes" if where["dirty"] else "")
    return f"Made by `{where['command']}` on {device}, {versions}, commit {commit}, {where['date'][:10]}."


def _speed(record: Record) -> str:
    """The length of a ViT, those around the break-even, and long ones."""
    shapes = [shape for shape in FEW if times_of(record, TORCH, shape)]
    methods = [method for method in (TORCH, *OURS) if rows_of(record, method)]
    names = [f"{length_of(shape):,} ({shape})" for shape in shapes]
    cells = _timed(record, shapes, methods)
    said = [advice(record)]
    if taken(record):  # a line of its own below each: with ratios and repeats a cell has no room for both
        names = [text for name in names for text in (name, "on the GPU alone")]
        alone = _timed(record, shapes, methods, time=GPU)
        cells = [line for pair in zip(cells, alone, strict=True) for line in pair]
        said.append(
            "On the GPU alone is a CUDA graph's time, without the host: what counts where a larger model keeps the GPU "
            "busy, or is captured with CUDA graphs."
        )
    return "\n\n".join([_table("n", names, methods, cells), " ".join(said)])


PARTS: dict[str, Callable[[Record], str]] = {"choice": choice, "numbers": _numbers, "speed": _speed}


def _table(corner: str, names: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join([corner, *columns])} |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {' | '.join([name, *row])} |" for name, row in zip(names, cells, strict=True)]
    return "\n".join(lines)


def _timed(record: Record, shapes: Sequence[str], methods: Sequence[str], *, time: str = CALLED) -> list[list[str]]:
    return [[_time(record, method, shape, time) for method in methods] for shape in shapes]


def _time(record: Record, method: str, shape: str, time: str) -> str:
    """The times of a method at a shape, with their ratios to torch's."""
    rows = [row for row in rows_of(record, method, shape) if row.get(time)]
    times = ", ".join(three_digits(row[time]) for row in rows) or "–"
    ratios = [ratio for row in rows if method != TORCH and (ratio := faster(record, row, time=time))]
    bold = ", ".join(f"**{ratio_of(ratio)}**" if ratio > 1 else ratio_of(ratio) for ratio in ratios)
    return f"{times} ({bold})" if bold else times


def _memory(record: Record, method: str, shape: str, column: str) -> str:
    found = [row[column] for row in rows_of(record, method, shape) if row.get(column)]
    return three_digits(max(found)) if found else "–"


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python -m wellcond.bench.attention_page JSON PAGE [PAGE …]")
    try:
        for target in sys.argv[2:]:
            print(f"wrote {write_page(Path(sys.argv[1]), Path(target))}")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
