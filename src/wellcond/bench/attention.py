"""`wellcond bench attention`: time and peak memory of every attention over the length, forward and with its gradient.

On a GPU 65,536 tokens in all, two heads of 32, 128 landmarks, from 512 tokens a sequence to 131,072; then the shapes of
the Long Range Arena and of vision transformers. A CPU is given 4,096 tokens, up to 8,192 in a sequence, and a small
ViT's shape; `sizes` in the JSON, and the output's first line, say which of these it was. The peers: torch's own
attention (flash), the orders of operations that Skyformer and Nyströmformer were published with, and FlexAttention for
the exact Gaussian kernel (attention_peers.py); at each shape they take turns. A method that would need more memory than
there is, or much more time than the others, is left out from there on, and the row says so; one that fails marks its
own row. The JSON is drawn beside it (attention_plot.py).

Forward and backward have three times. `both ms` is as called from Python in a model: several calls, as of its layers
(`calls` says how many), and one backward pass through all. `alone ms` is one call with a backward pass of its own, for
which torch's engine wakes a thread and waits for it. `gpu ms` is without the host, as a CUDA graph: what counts where a
model keeps its GPU busy, and where it is captured as a whole. A CPU has the first only, of single calls.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from wellcond.bench.attention_facts import cost_exponent
from wellcond.bench.attention_peers import Function, Peer, peers_on
from wellcond.bench.attention_plot import plot
from wellcond.bench.tables import destination, show
from wellcond.bench.timing import chosen_device, graphed_ms, median_ms, sustained_ms
from wellcond.records import write_record

__all__ = ["run"]

SEED = 0
TOO_SLOW_MS = 1500.0
CALLS, CALLS_MS = 6, 10.0  # in one backward pass; fewer, where they take longer than this
AGREE = 0.05  # relative, of outputs and gradients: some ten times what rounding to bfloat16 leaves
LRA = ((16, 2, 4096, 32), (32, 2, 2048, 32), (128, 2, 1024, 32), (256, 2, 1024, 32))
OTHERS = ((8, 12, 4096, 64), (64, 3, 197, 64), (64, 12, 197, 64), (1, 16, 16_384, 64))
Shape = tuple[int, int, int, int]


class Sizes(NamedTuple):
    """What is measured."""

    name: str
    tokens: int
    lengths: tuple[int, ...]
    landmarks: int
    repeats: int
    others: tuple[tuple[str, tuple[Shape, ...]], ...] = ()

    def shapes(self) -> list[tuple[str, Shape]]:
        """(kind, (batch, heads, tokens, width))."""
        found = [("length", (max(1, self.tokens // n), 2, n, 32)) for n in self.lengths]
        return found + [(kind, shape) for kind, shapes in self.others for shape in shapes]


ON_GPU = Sizes(
    "gpu", 65_536, (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072), 128, 11,
    (("LRA", LRA), ("other", OTHERS)),
)  # fmt: skip
ON_CPU = Sizes("cpu", 4096, (256, 512, 1024, 2048, 4096, 8192), 128, 5, (("other", ((4, 3, 197, 64),)),))
QUICK = Sizes("quick", 1024, (256, 512), 32, 2)


def run(
    *, output: Path | None = None, device: str | None = None, batch_size: int | None = None, quick: bool = False
) -> Path:
    """Times every attention on `device`; writes JSON to `output`, draws it beside it, and returns the JSON's path."""
    del batch_size  # the shapes are the benchmark's
    where = chosen_device(device)
    path = destination(output, f"attention-{where.type}.json")
    sizes = QUICK if quick else ON_GPU if where.type == "cuda" else ON_CPU
    Console().print(_in_words(sizes), soft_wrap=True)
    Console().print(f"{path} is written after each shape, and complete at the end", soft_wrap=True)
    peers = peers_on(where, landmarks=sizes.landmarks)
    shapes = sizes.shapes()
    measured: dict[tuple[int, int], dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    slow: set[str] = set()
    for group in _groups(peers, shapes):
        torch.compiler.reset()  # beyond a few shapes compiled functions would silently run uncompiled
        trials = {(place, rank): _Trial(peers[rank], *shapes[place], where) for place, rank in group}
        _measure(list(trials.values()), slow, where, sizes.repeats)
        measured |= {at: trial.row for at, trial in trials.items()}
        for place, rank in group:
            row, first = measured[place, rank], measured[place, 0]["both ms"]  # torch's own
            if row["both ms"] and first:
                row["times faster"] = first / row["both ms"]
        rows = [measured[at] for at in sorted(measured)]
        exponents = {peer.name: cost_exponent(rows, peer.name) for peer in peers}
        payload = {"benchmark": "attention", "on": where.type, "sizes": sizes.name, "quick": quick}
        payload |= {"tokens": sizes.tokens, "landmarks": sizes.landmarks}
        write_record(path, {**payload, "rows": rows, "exponents": exponents}, seed=SEED)
    columns = ("method", "shape", "forward ms", "both ms", "gpu ms", "memory MiB", "times faster")
    show("attention, forward and with its gradient", rows, columns)
    for note in _notes(rows):
        Console().print(note, soft_wrap=True, highlight=False)
    Console().print(f"wrote {path}", soft_wrap=True)
    if any(row["both ms"] for row in rows):
        Console().print(f"wrote {plot(path)}", soft_wrap=True)
    return path


def _groups(peers: list[Peer], shapes: list[tuple[str, Shape]]) -> list[list[tuple[int, int]]]:
    """Which shape and peer, by their places, in the order of measurement: by shapes, and what is compiled at the end,
    since compilers leave processes behind that slow the host down."""
    groups = [
        [(place, rank) for rank, peer in enumerate(peers) if peer.at(kind, shape[2]) and peer.compiled == compiled]
        for compiled in (False, True)
        for place, (kind, shape) in enumerate(shapes)
    ]
    return [group for group in groups if group]


def _in_words(sizes: Sizes) -> str:
    said = f"{sizes.tokens:,} tokens in all, sequences of {sizes.lengths[0]:,} to {sizes.lengths[-1]:,}, "
    said += f"{sizes.landmarks} landmarks"
    if sizes is QUICK:
        return f"quick: {said}; such times say that it runs, and nothing else"
    if sizes is ON_CPU:
        return f"on a CPU: {said}; a GPU is given {ON_GPU.tokens:,} tokens, and sequences up to {ON_GPU.lengths[-1]:,}"
    return said


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    """What would need a wide column for a few rows: dtypes, and what was left out or failed."""
    dtypes = {row["method"]: row["dtype"] for row in rows}
    said = [
        f"{dtype}: {', '.join(m for m in dtypes if dtypes[m] == dtype)}" for dtype in dict.fromkeys(dtypes.values())
    ]
    return said + [f"{row['method']}, {row['shape']}: {row['note']}" for row in rows if row["note"]]


class _Trial:
    """A peer at a shape: its row, and what is timed."""

    def __init__(self, peer: Peer, kind: str, shape: Shape, device: torch.device):
        batch, heads, n, width = shape
        self.peer, self.kind, self.device = peer, kind, device
        self.row: dict[str, Any] = {
            "kind": kind, "method": peer.name, "shape": "×".join(map(str, shape)), "batch": batch, "heads": heads,
            "n": n, "width": width, "tokens": batch * n, "dtype": str(peer.dtype).removeprefix("torch."),
            "forward ms": None, "both ms": None, "alone ms": None, "gpu ms": None, "calls": 1, "memory MiB": None,
            "forward memory MiB": None, "kept memory MiB": None, "note": "",
        }  # fmt: skip
        generator = torch.Generator(device).manual_seed(SEED)
        q, k, v, self.grad = (torch.randn(shape, generator=generator, device=device).to(peer.dtype) for _ in range(4))
        self.inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        self.layers = [self.inputs]
        self.failed = self.out_of_memory = False

    def alone(self) -> None:
        torch.autograd.grad(self.peer.function(*self.inputs), self.inputs, self.grad)

    def layered(self) -> None:
        outs = [self.peer.function(*inputs) for inputs in self.layers]
        every = [t for inputs in self.layers for t in inputs]
        torch.autograd.grad(outs, every, [self.grad] * len(outs))

    def repeat(self, calls: int) -> None:
        """Each layer with inputs of its own, so that no gradients are added up, though of the same numbers."""
        q, k, v = self.inputs
        more = [(q.detach(), k.detach(), v.detach()) for _ in range(calls - 1)]
        self.layers = [self.inputs, *((a.requires_grad_(), b.requires_grad_(), c.requires_grad_()) for a, b, c in more)]
        self.row["calls"] = calls

    def forward(self) -> None:
        with torch.no_grad():
            self.peer.function(*self.inputs)

    def keep(self) -> None:
        """Notes what lies in a GPU's memory between the two passes: the result, and what its gradient needs."""
        before = torch.cuda.memory_allocated(self.device)
        out = self.peer.function(*self.inputs)
        self.row["kept memory MiB"] = (torch.cuda.memory_allocated(self.device) - before) / 2**20
        del out

    def guarded(self, function: Callable[[], None]) -> Callable[[], None]:
        """`function`, which fails at most once: whatever one peer raises, the others are measured."""

        def run() -> None:
            if self.failed:
                return
            try:
                function()
            except Exception as error:  # compilers raise all kinds; it is not kept, or its frames would keep memory
                self._fail(error)
            if self.failed and self.device.type == "cuda":
                torch.cuda.empty_cache()

        return run

    def _fail(self, error: Exception) -> None:
        self.failed, self.out_of_memory = True, _is_out_of_memory(error)
        self.row |= dict.fromkeys(("forward ms", "both ms", "alone ms", "calls"))
        self.row |= dict.fromkeys(("memory MiB", "forward memory MiB", "kept memory MiB"))
        self.row["note"] = f"failed: {_in_short(error)}"

    @property
    def too_much(self) -> bool:
        """Whether longer sequences need not be tried."""
        return self.out_of_memory or (self.row["both ms"] or 0) > TOO_SLOW_MS


def _measure(trials: list[_Trial], slow: set[str], device: torch.device, repeats: int) -> None:
    """Fills the rows of one shape. The peers take turns: what slows the host for a while hits none of them alone."""
    for trial in trials:
        if trial.kind == "length" and trial.peer.name in slow:
            trial.row["note"] = "left out: too slow or too large at a shorter length"
        else:
            trial.guarded(trial.alone)()  # once before: what libraries set aside for themselves is not counted
            memory = _peak_mib(trial.guarded(trial.alone), device)
            forward = _peak_mib(trial.guarded(trial.forward), device)
            if not trial.failed:
                trial.row |= {"memory MiB": memory, "forward memory MiB": forward}
            if device.type == "cuda":
                trial.guarded(trial.keep)()
    running = [trial for trial in trials if not trial.failed and not trial.row["note"]]
    for trial in running if device.type == "cuda" else []:
        once = median_ms(trial.guarded(trial.alone), device, repeats=3, warmup=1)
        if not trial.failed:
            trial.repeat(max(1, min(CALLS, int(CALLS_MS / max(once, 1e-3)))))
    kinds = {"both ms": _Trial.layered, "forward ms": _Trial.forward}
    kinds |= {"alone ms": _Trial.alone} if device.type == "cuda" else {}
    for column, kind in kinds.items():
        functions = [trial.guarded(functools.partial(kind, trial)) for trial in running]
        times = sustained_ms(functions, device, repeats=repeats, warmup=1)
        for trial, time in zip(running, times, strict=True):
            if not trial.failed:
                trial.row[column] = time / len(trial.layers) if kind is _Trial.layered else time
    slow |= {trial.peer.name for trial in trials if trial.kind == "length" and trial.too_much}
    for trial in (trial for trial in running if not trial.failed):
        notes = []
        if trial.peer.twin is not None:
            notes.append(_disagreement(trial.peer.function, trial.peer.twin, trial.inputs, trial.grad))
        if device.type == "cuda":
            try:
                trial.row["gpu ms"] = graphed_ms(trial.alone, device, repeats=5)
            except Exception as error:  # not everything can be captured
                notes.append(f"no graph: {_in_short(error)}")
        trial.row["note"] = ", ".join(filter(None, notes))


def _disagreement(function: Function, twin: Function, inputs: tuple[Tensor, Tensor, Tensor], g: Tensor) -> str:
    """Where `function` and `twin` differ in the output or a gradient by more than rounding, in words; "" if nowhere."""
    try:
        ours, theirs = (
            [out.detach(), *torch.autograd.grad(out, inputs, g, allow_unused=True, materialize_grads=True)]
            for out in (function(*inputs), twin(*inputs))
        )
    except Exception as error:
        return f"not compared: {_in_short(error)}"
    names = ("output", "gradient of query", "gradient of key", "gradient of value")
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(ours, theirs, strict=True)]
    wrong = [f"{name} off by {error:.0%}" for name, error in zip(names, errors, strict=True) if not error <= AGREE]
    return ", ".join(wrong)


def _is_out_of_memory(error: Exception) -> bool:
    """A CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__} {(str(error).strip().splitlines() or [''])[0]}"[:80].strip()


def _peak_mib(function: Callable[[], None], device: torch.device) -> float | None:
    if device.type != "cuda":
        function()
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
