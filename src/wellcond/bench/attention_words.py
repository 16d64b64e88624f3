"""What the rows of `wellcond bench attention` mean to someone who chooses an attention, in sentences.

    choice(record)                # paragraphs of Markdown: at a ViT's length, at long ones, memory, noise
    advice(record)                # the shortest answer

Every number and every comparison in them is computed; a question that the rows do not answer is left out.
"""

import math

from wellcond.bench.attention_facts import (
    TORCH,
    Record,
    losses,
    rows_of,
    shapes_of,
    spread,
    times_of,
    unmoved,
    wins_from,
)

__all__ = ["OURS", "advice", "choice", "length_of", "named", "ratio_of", "three_digits", "times_sign"]

OURS = ("skyformer", "nystromformer", "kernelized", "linear")  # what a user can choose instead; the others are peers
PLACES = {  # what a shape is known for
    "16×2×4096×32": "LRA Text, Retrieval",
    "32×2×2048×32": "LRA ListOps",
    "128×2×1024×32": "LRA Pathfinder",
    "256×2×1024×32": "LRA Image",
    "64×3×197×64": "ViT-Ti, 64 images",
    "64×12×197×64": "ViT-B, 64 images",
    "8×12×4096×64": "ViT-B's heads, 4,096 tokens",
    "1×16×16384×64": "ViT-L's heads, 16,384 tokens",
}
VIT = 197  # tokens of 224 pixels in patches of 16, with the class token
LONG = 4096


def choice(record: Record) -> str:
    """What the numbers say to someone who chooses, a paragraph for each question."""
    parts = (_at_vit_length, _at_long_lengths, _in_memory, _kernelized, _noise)
    return "\n".join([f"**{advice(record)}**\n", *(f"- {text}" for part in parts if (text := part(record)))])


def advice(record: Record) -> str:
    """The shortest answer: up to where torch's attention, and what then."""
    starts = [(start, method) for method in OURS if (start := wins_from(record, method))]
    if not starts:
        return "Keep softmax, torch's own: nothing was faster from any measured length on."
    start, method = min(starts)
    shorter = any(row["n"] < start for row in rows_of(record, method))
    keep = f"Below {start:,} tokens keep softmax, torch's own; from there on" if shorter else "At every measured length"
    return f"{keep} {method} was faster each time."


def _at_vit_length(record: Record) -> str:
    said, won = [], set()
    for shape in shapes_of(record):
        rows = [row for method in OURS for row in rows_of(record, method, shape) if row.get("times faster")]
        if length_of(shape) != VIT or not rows:
            continue
        won |= {row["method"] for row in rows if row["times faster"] > 1}
        rows = sorted(rows, key=lambda row: -row["times faster"])
        costs = ", ".join(f"{row['method']} {times_sign(1 / row['times faster'])}" for row in rows)
        said.append(
            f" {named(shape)}: {three_digits(times_of(record, TORCH, shape)[0])} ms by torch's; {costs} that time"
        )
        said[-1] += f"; in MiB, {memory}." if (memory := _memories(record, shape)) else "."
    if not said:
        return ""
    verdict = f"{', '.join(sorted(won))} can be faster than" if won else "nothing is faster than"
    so = "" if won else " So change a ViT's attention for what it computes, not for speed."
    return f"**At {VIT} tokens {verdict} torch's attention.**{so}{''.join(said)}"


def _at_long_lengths(record: Record) -> str:
    said, never = [], []
    for method in (method for method in OURS if rows_of(record, method)):
        start, noise = wins_from(record, method), spread(record, method)
        if start is None:
            never.append(method)
            continue
        clear = wins_from(record, method, by=noise) if noise > 1 else start
        beyond = "never by more than" if clear is None else f"from {clear:,} by more than"
        last = max(rows_of(record, method), key=lambda row: row["n"])
        text = f"{method} from {start:,} tokens on"
        text += f", {beyond} its noise" if clear != start else ""
        said.append(f"{text} ({times_sign(last['times faster'])} at {last['n']:,})")
    text = f"**Faster than torch's attention in every measurement:** {'; '.join(said) or 'nothing'}."
    text += f" At no length: {', '.join(never)}." if never else ""
    lost = losses(record, "skyformer")
    if lost:
        worst, longest = min(lost, key=lambda row: row["times faster"]), max(row["n"] for row in lost)
        measured = [row for row in rows_of(record, "skyformer") if row.get("times faster")]
        text += (
            f" Skyformer was slower in {len(lost)} of {len(measured)} measurements, all at {longest:,} tokens or fewer"
        )
        text += f"; the worst was {times_sign(1 / worst['times faster'])} torch's time, {named(worst['shape'])}."
    return text


def _in_memory(record: Record) -> str:
    rows = [row for row in rows_of(record, TORCH) if row["kind"] == "length" and row["memory MiB"]]
    same = [row for row in rows if row["tokens"] == record["tokens"]]
    if not same:
        return ""
    longest, own = max(same, key=lambda row: row["n"]), [row["memory MiB"] for row in same]
    text = f"**Memory, in MiB, for one sequence of {longest['n']:,}:** {_memories(record, longest['shape'])}."
    if len(own) > 1 and max(own) < 1.1 * min(own):
        text += f" Torch's attention takes as much for the same {record['tokens']:,} tokens in shorter sequences: "
        text += "its memory grows with n and not with n², so that memory alone is no reason to leave it."
    return text


def _kernelized(record: Record) -> str:
    said = []
    rows = [row for row in rows_of(record, "kernelized") if row.get("times faster")]
    for width in sorted({row["width"] for row in rows}):
        for where, long in ((f"from {LONG:,} tokens on", True), ("in shorter sequences", False)):
            costs = [1 / row["times faster"] for row in rows if row["width"] == width and (row["n"] >= LONG) is long]
            if costs:
                span = dict.fromkeys((times_sign(min(costs)), times_sign(max(costs))))
                said.append(f"{' to '.join(span)} with heads of {width} {where}")
    return f"**Exact kernelized attention takes torch's time** {'; '.join(said)}." if said else ""


def _noise(record: Record) -> str:
    said = []
    for shape in shapes_of(record):
        pairs = [(method, times_of(record, method, shape)) for method in (TORCH, *OURS)]
        pairs = [f"{method} {' and '.join(map(three_digits, times))}" for method, times in pairs if len(times) > 1]
        said += [f"{shape}: {', '.join(pairs)}"] if pairs else []
    text = f"**The noise.** Some shapes were measured twice, in ms: {'; '.join(said)}." if said else ""
    still = [(method, pair) for method in OURS if (pair := unmoved(record, method))]
    if still:
        short, long = still[0][1]
        listed = ", ".join(
            f"{method} {three_digits(a['both ms'])} and {three_digits(b['both ms'])}" for method, (a, b) in still
        )
        text += f" And {long['tokens']:,} tokens took hardly longer than {short['tokens']:,}, in ms: {listed}."
        text += " Such times are not the GPU's work but, most likely, the host's, which starts many short kernels:"
        text += " a faster host would make them smaller."
    return text.strip()


def _memories(record: Record, shape: str) -> str:
    found = [row for method in (TORCH, *OURS) for row in rows_of(record, method, shape)[:1] if row["memory MiB"]]
    return ", ".join(
        f"{row['method']} {three_digits(row['memory MiB'])}" for row in sorted(found, key=lambda row: row["memory MiB"])
    )


def length_of(shape: str) -> int:
    return int(shape.split("×")[2])


def named(shape: str) -> str:
    return f"{PLACES[shape]} ({shape})" if shape in PLACES else shape


def ratio_of(value: float) -> str:
    return digits_of(value, 3 if 0.95 < value < 1.05 else 2)  # which side of 1 it is on


def times_sign(value: float, digits: int = 2) -> str:
    return f"{digits_of(value, digits)} ×"


def three_digits(value: float) -> str:
    return digits_of(value, 3)


def digits_of(value: float, digits: int) -> str:
    """`value` to so many digits, without an exponent, and with all of those before its point."""
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"
