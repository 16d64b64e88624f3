"""What the rows of `wellcond bench attention` mean to someone who chooses an attention, in sentences.

    choice(record)                # paragraphs of Markdown: at a ViT's length, at long ones, memory, noise
    advice(record)                # the shortest answer

Every number and every comparison in them is computed; a question that the rows do not answer is left out. Rows that
have the GPU's time without the host, too, are asked each question twice.
"""

import math
from collections.abc import Sequence

from wellcond.bench.attention_facts import (
    ALONE,
    CALLED,
    GPU,
    KEPT,
    PEAK,
    TORCH,
    Record,
    faster,
    losses,
    rows_of,
    shapes_of,
    spread,
    taken,
    times_of,
    unmoved,
    wins_from,
)

__all__ = ["OURS", "advice", "choice", "length_of", "named", "ratio_of", "three_digits", "times_sign"]

OURS = ("skyformer", "nystrom", "kernelized", "linear")  # what a user can choose instead; the others are peers
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
    first = (_at_long_lengths, _at_long_lengths_alone, _which_time)
    then = (_at_vit_length, _in_one_call, _in_memory, _kernelized, _noise)
    lists = ["\n".join(f"- {text}" for part in parts if (text := part(record))) for parts in (first, then)]
    more = f"<details><summary>At 197 tokens, in memory, and how noisy it was</summary>\n\n{lists[1]}\n\n</details>"
    return "\n\n".join([f"**{advice(record)}**", lists[0], *([more] if lists[1] else [])])


def advice(record: Record) -> str:
    """The shortest answer: up to where torch's attention, and what then."""
    called = _advice(record, CALLED)
    if not taken(record):
        return called[0].upper() + called[1:]
    alone = _advice(record, GPU)
    if alone == called:
        return f"As called from Python and on the GPU alone: {called}"
    return f"As called from Python: {called} On the GPU alone: {alone}"


def _advice(record: Record, time: str) -> str:
    winners: dict[int, list[str]] = {}
    for method in OURS:
        if start := wins_from(record, method, time=time):
            winners.setdefault(start, []).append(method)
    if not winners:
        return "keep softmax, torch's own: nothing was faster from any measured length on."
    (start, first), *later = sorted(winners.items())
    shorter = any(row["n"] < start for row in rows_of(record, first[0]))
    text = f"below {start:,} tokens keep softmax, torch's own; from there on" if shorter else "at every measured length"
    text += f" {_listed(first)} {'was' if len(first) == 1 else 'were'} faster each time"
    return "".join([text, *(f", from {start:,} on {_listed(methods)} too" for start, methods in later)]) + "."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _which_time(record: Record) -> str:
    if not taken(record):
        return ""
    return (
        "**Which of the two times is yours.** As called from Python counts where attention is called eagerly and the "
        "GPU waits for the host, which starts its kernels one by one. On the GPU alone counts where a larger model "
        "keeps the GPU busy while the host runs ahead, and where the model is captured with CUDA graphs: that time was "
        "taken of a graph."
    )


def _at_vit_length(record: Record) -> str:
    times = [CALLED, GPU] if taken(record) else [CALLED]
    said, won = [], {time: set() for time in times}
    for shape in (shape for shape in shapes_of(record) if length_of(shape) == VIT):
        costs = [cost for time in times if (cost := _costs(record, shape, time))]
        if not costs:
            continue
        for time in times:
            won[time] |= {row["method"] for row in _compared(record, shape, time) if row["ratio"] > 1}
        said.append(f" {named(shape)}: {'; on the GPU alone '.join(costs)}")
        said[-1] += f"; in MiB at the peak, {memory}" if (memory := _memories(record, shape)) else ""
        said[-1] += f"; kept until the backward pass, {memory}" if (memory := _memories(record, shape, KEPT)) else ""
        said[-1] += "."
    if not said:
        return ""
    verdicts = [f"{', '.join(sorted(won[time]))} can be" if won[time] else "nothing is" for time in times]
    if len(set(verdicts)) == 1:
        verdict = f"At {VIT} tokens {verdicts[0]} faster than torch's attention"
        verdict += ", as called or on the GPU alone" if len(times) > 1 else ""
    else:
        verdict = (
            f"At {VIT} tokens {verdicts[0]} faster than torch's attention as called; {verdicts[1]} on the GPU alone"
        )
    so = "" if any(won.values()) else " So change a ViT's attention for what it computes, not for speed."
    return f"**{verdict}.**{so}{''.join(said)}"


def _costs(record: Record, shape: str, time: str) -> str:
    """Torch's time at a shape, and how many times that the others took; "" where there is nothing to compare."""
    rows = sorted(_compared(record, shape, time), key=lambda row: -row["ratio"])
    if not rows:
        return ""
    costs = ", ".join(f"{row['method']} {times_sign(1 / row['ratio'])}" for row in rows)
    return f"{three_digits(times_of(record, TORCH, shape, time=time)[0])} ms by torch's; {costs} that time"


def _compared(record: Record, shape: str | None, time: str, methods: Sequence[str] = OURS) -> list[Record]:
    """The rows of methods that have a ratio to torch's time, with it."""
    rows = [row for method in methods for row in rows_of(record, method, shape)]
    return [{**row, "ratio": ratio} for row in rows if (ratio := faster(record, row, time=time))]


def _at_long_lengths(record: Record) -> str:
    return _long(record, CALLED, "Faster than torch's attention in every measurement")


def _at_long_lengths_alone(record: Record) -> str:
    return _long(record, GPU, "The same on the GPU alone") if taken(record) else ""


def _in_one_call(record: Record) -> str:
    """Where a backward pass is that of one attention, whose times hold what torch's engine takes to start it."""
    if not taken(record, time=ALONE):
        return ""
    starts = [(method, wins_from(record, method, time=ALONE)) for method in OURS if rows_of(record, method)]
    said = [f"{method} from {start:,} tokens on" for method, start in starts if start]
    calls = max(row.get("calls") or 1 for row in record["rows"])
    return (
        f"**One call with a backward pass of its own** pays alone for torch's engine, which wakes a thread for it and "
        f"is waited for; as called above, up to {calls} calls share one pass, as a model's layers do. Faster than "
        f"torch's attention in every such measurement: {'; '.join(said) or 'nothing'}."
    )


def _long(record: Record, time: str, question: str) -> str:
    said, never, unknown = [], [], []
    for method in (method for method in OURS if rows_of(record, method)):
        start, noise = wins_from(record, method, time=time), spread(record, method, time=time)
        if start is None:
            (never if time == CALLED or taken(record, method, time=time) else unknown).append(method)
            continue
        clear = wins_from(record, method, by=noise, time=time) if noise > 1 else start
        beyond = "never by more than" if clear is None else f"from {clear:,} by more than"
        last = max(_compared(record, None, time, [method]), key=lambda row: row["n"])
        text = f"{method} from {start:,} tokens on"
        text += f", {beyond} its noise" if clear != start else ""
        said.append(f"{text} ({ratio_of(last['ratio'])} × at {last['n']:,})")
    text = f"**{question}:** {'; '.join(said) or 'nothing'}."
    text += f" At no length: {', '.join(never)}." if never else ""
    text += f" Not measured: {', '.join(unknown)}." if unknown else ""
    measured = _compared(record, None, time, ["skyformer"])
    lost = losses(record, "skyformer", time=time)
    if lost:
        worst, longest = min(measured, key=lambda row: row["ratio"]), max(row["n"] for row in lost)
        text += (
            f" Skyformer was slower in {len(lost)} of {len(measured)} measurements, all at {longest:,} tokens or fewer"
        )
        text += f"; the worst was {times_sign(1 / worst['ratio'])} torch's time, {named(worst['shape'])}."
    return text


def _in_memory(record: Record) -> str:
    rows = [row for row in rows_of(record, TORCH) if row["kind"] == "length" and row[PEAK]]
    same = [row for row in rows if row["tokens"] == record["tokens"]]
    if not same:
        return ""
    longest, own = max(same, key=lambda row: row["n"]), [row[PEAK] for row in same]
    text = f"**Memory, in MiB, for one sequence of {longest['n']:,}:** {_memories(record, longest['shape'])}."
    if len(own) > 1 and max(own) < 1.1 * min(own):
        text += f" Torch's attention takes as much for the same {record['tokens']:,} tokens in shorter sequences: "
        text += "its memory grows with n and not with n², so that memory alone is no reason to leave it."
    return text


def _kernelized(record: Record) -> str:
    called, alone = (_kernelized_costs(record, time) for time in (CALLED, GPU))
    text = f"**Exact kernelized attention takes torch's time** {called}." if called else ""
    return text + (f" On the GPU alone {alone}." if text and alone else "")


def _kernelized_costs(record: Record, time: str) -> str:
    said = []
    rows = _compared(record, None, time, ["kernelized"])
    for width in sorted({row["width"] for row in rows}):
        for where, long in ((f"from {LONG:,} tokens on", True), ("in shorter sequences", False)):
            costs = [1 / row["ratio"] for row in rows if row["width"] == width and (row["n"] >= LONG) is long]
            if costs:
                span = dict.fromkeys((times_sign(min(costs)), times_sign(max(costs))))
                said.append(f"{' to '.join(span)} with heads of {width} {where}")
    return "; ".join(said)


def _noise(record: Record) -> str:
    called, alone = _twice(record, CALLED), _twice(record, GPU)
    text = f"**The noise.** Some shapes were measured twice, in ms: {called}." if called else ""
    text += f" On the GPU alone: {alone}." if called and alone else ""
    still = [(method, pair) for method in OURS if (pair := unmoved(record, method))]
    if still:
        short, long = still[0][1]
        text += f" And {long['tokens']:,} tokens took hardly longer than {short['tokens']:,}, in ms: "
        text += f"{_pairs(still, CALLED)}."
        known = [(method, pair) for method, pair in still if all(row.get(GPU) for row in pair)]
        text += f" On the GPU alone {_pairs(known, GPU)}." if known else ""
        hosts = [method for method, pair in known if any(row[GPU] < 0.8 * row[CALLED] for row in pair)]
        if not known:
            text += " Such times are not the GPU's work but, most likely, the host's, which starts many short kernels:"
            text += " a faster host would make them smaller."
        elif hosts:
            text += f" What is more as called is the host's ({', '.join(hosts)}), which starts many short kernels:"
            text += " a faster host would make it smaller."
    return text.strip()


def _twice(record: Record, time: str) -> str:
    said = []
    for shape in shapes_of(record):
        pairs = [(method, times_of(record, method, shape, time=time)) for method in (TORCH, *OURS)]
        pairs = [f"{method} {' and '.join(map(three_digits, times))}" for method, times in pairs if len(times) > 1]
        said += [f"{shape}: {', '.join(pairs)}"] if pairs else []
    return "; ".join(said)


def _pairs(found: Sequence[tuple[str, tuple[Record, Record]]], time: str) -> str:
    return ", ".join(f"{method} {three_digits(a[time])} and {three_digits(b[time])}" for method, (a, b) in found)


def _memories(record: Record, shape: str, column: str = PEAK) -> str:
    found = [row for method in (TORCH, *OURS) for row in rows_of(record, method, shape)[:1] if row.get(column)]
    found.sort(key=lambda row: row[column])
    return ", ".join(f"{row['method']} {three_digits(row[column])}" for row in found)


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
