"""`wellcond bench attention`: time and peak memory of every attention by sequence length, forward and backward.

On a GPU: 65,536 tokens in total, two heads of 32, 128 landmarks, sequences of 512 to 131,072 tokens; then the shapes of
the Long Range Arena and of vision transformers. On a CPU: 4,096 tokens, sequences of up to 8,192, and a small ViT's
shape. `sizes` in the JSON and the first line of output say which. It measures all registered attentions
(`wellcond.register_attention`), torch's own (flash) first, and three references: Skyformer and Nyströmformer in the
order of operations their authors published, and, on a GPU, FlexAttention for the exact Gaussian kernel. At each shape
they take turns. A method that runs out of memory or takes too long is skipped at longer lengths, and its row says so;
one that fails marks only its own row. A figure is drawn beside the JSON (attention_page.py).

Forward and backward are timed in three ways. `both ms` is as called from Python in a model: several calls, like those
of its layers (`calls` says how many), share one backward pass. `alone ms` is one call with its own backward pass,
including the time torch's autograd engine takes to start its thread. `gpu ms` is a CUDA graph, without the host's time:
it applies where a model keeps the GPU busy, or is captured as a whole. A CPU has only the first, for single calls.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from wellcond.attention import ATTENTIONS, kernelized_attention
from wellcond.attention.compat import skyformer_compat
from wellcond.attention.landmarks import segment_means
from wellcond.bench.attention_page import TORCH, cost_exponent, plot
from wellcond.bench.tables import destination, show
from wellcond.bench.timing import chosen_device, graphed_ms, median_ms, peak_mib, sustained_ms
from wellcond.progress import steps
from wellcond.records import write_record
from wellcond.report.charts import can_draw

__all__ = ["Peer", "flex_gaussian", "nystromformer", "peers_on", "run"]

SEED = 0
TOO_SLOW_MS = 1500.0
CALLS, CALLS_MS = 6, 10.0  # calls per backward pass; fewer if they take longer than this
AGREE = 0.05  # relative error of outputs and gradients: about ten times bfloat16's rounding
LRA = ((16, 2, 4096, 32), (32, 2, 2048, 32), (128, 2, 1024, 32), (256, 2, 1024, 32))
OTHERS = ((8, 12, 4096, 64), (64, 3, 197, 64), (64, 12, 197, 64), (1, 16, 16_384, 64))
COMPILED_AT = (1024, 4096, 16_384, 65_536)  # few, as compiling for each shape takes longer than running
Shape = tuple[int, int, int, int]
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    """One method to measure."""

    name: str
    function: Function
    dtype: torch.dtype
    twin: Function | None = None
    """Another implementation of the same; the row notes if output or gradients disagree with it."""
    lengths: tuple[int, ...] | None = None
    """The lengths at which it is measured; None for all shapes."""
    compiled: bool = False

    def at(self, kind: str, n: int) -> bool:
        return self.lengths is None or (kind == "length" and n in self.lengths)


class Sizes(NamedTuple):
    """The sizes to measure."""

    name: str
    tokens: int
    lengths: tuple[int, ...]
    landmarks: int
    repeats: int
    others: tuple[tuple[str, tuple[Shape, ...]], ...] = ()

    def shapes(self) -> list[tuple[str, Shape]]:
        """Return (kind, (batch, heads, tokens, width)) of each shape."""
        found = [("length", (max(1, self.tokens // n), 2, n, 32)) for n in self.lengths]
        return found + [(kind, shape) for kind, shapes in self.others for shape in shapes]


ON_GPU = Sizes(
    "gpu", 65_536, (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072), 128, 11,
    (("LRA", LRA), ("other", OTHERS)),
)  # fmt: skip
ON_CPU = Sizes("cpu", 4096, (256, 512, 1024, 2048, 4096, 8192), 128, 5, (("other", ((4, 3, 197, 64),)),))
QUICK = Sizes("quick", 1024, (256, 512), 32, 2)


def run(*, output: Path | None = None, device: str | None = None, quick: bool = False) -> Path:
    """Time every attention on `device`, write JSON to `output` and a figure beside it, and return the JSON's path."""
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
    groups = _groups(peers, shapes)
    with steps(len(groups)) as begin:
        for group in groups:
            begin(f"{len(group)} attentions at {'×'.join(map(str, shapes[group[0][0]][1]))}")
            torch.compiler.reset()  # after a few shapes, compiled functions would silently run uncompiled
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
        said = (
            f"wrote {plot(path)}" if can_draw() else "no figure: there is no Altair here (attention_page.plot draws it)"
        )
        Console().print(said, soft_wrap=True)
    return path


def _groups(peers: list[Peer], shapes: list[tuple[str, Shape]]) -> list[list[tuple[int, int]]]:
    """Return groups of (shape index, peer index) in measuring order: by shape, with compiled peers last.

    Compilers leave processes running that slow down the host.
    """
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
        return f"quick: {said}; these times only show that it runs"
    if sizes is ON_CPU:
        return f"on a CPU: {said}; a GPU is given {ON_GPU.tokens:,} tokens, and sequences up to {ON_GPU.lengths[-1]:,}"
    return said


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines below the table: dtypes, and what was skipped or failed."""
    dtypes = {row["method"]: row["dtype"] for row in rows}
    said = [
        f"{dtype}: {', '.join(m for m in dtypes if dtypes[m] == dtype)}" for dtype in dict.fromkeys(dtypes.values())
    ]
    return said + [f"{row['method']}, {row['shape']}: {row['note']}" for row in rows if row["note"]]


class _Trial:
    """One peer at one shape: its row, and the functions to time."""

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
        """Give each layer its own inputs with the same values, so that gradients are not accumulated."""
        q, k, v = self.inputs
        more = [(q.detach(), k.detach(), v.detach()) for _ in range(calls - 1)]
        self.layers = [self.inputs, *((a.requires_grad_(), b.requires_grad_(), c.requires_grad_()) for a, b, c in more)]
        self.row["calls"] = calls

    def forward(self) -> None:
        with torch.no_grad():
            self.peer.function(*self.inputs)

    def keep(self) -> None:
        """Record the GPU memory held between the two passes: the output, and what is saved for backward."""
        before = torch.cuda.memory_allocated(self.device)
        out = self.peer.function(*self.inputs)
        self.row["kept memory MiB"] = (torch.cuda.memory_allocated(self.device) - before) / 2**20
        del out

    def guarded(self, function: Callable[[], None]) -> Callable[[], None]:
        """Wrap `function` to catch and note its errors: whatever one peer raises, the others are still measured."""

        def run() -> None:
            if self.failed:
                return
            try:
                function()
            except Exception as error:  # compilers can raise anything; not stored, as its frames would hold memory
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
        """Whether longer sequences are skipped."""
        return self.out_of_memory or (self.row["both ms"] or 0) > TOO_SLOW_MS


def _measure(trials: list[_Trial], slow: set[str], device: torch.device, repeats: int) -> None:
    """Fill the rows of one shape. The peers take turns, so that a slow moment of the host affects all of them."""
    for trial in trials:
        if trial.kind == "length" and trial.peer.name in slow:
            trial.row["note"] = "left out: too slow or too large at a shorter length"
        else:
            trial.guarded(trial.alone)()  # warm-up: memory that libraries reserve is not counted
            memory = peak_mib(trial.guarded(trial.alone), device)
            forward = peak_mib(trial.guarded(trial.forward), device)
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
    """Return which of output and gradients differ by more than rounding between the two functions; "" if none."""
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
    """Whether memory ran out; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__} {(str(error).strip().splitlines() or [''])[0]}"[:80].strip()


# ---- what is measured


def peers_on(device: torch.device, *, landmarks: int) -> list[Peer]:
    """Return all registered attentions and the references. Torch's own comes first: the others are compared with it.

    `num_landmarks` is set where an attention has such a setting; all other settings are the function's defaults.
    """
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    peers = []
    for name in sorted(ATTENTIONS, key=lambda name: name != "softmax"):
        kind = ATTENTIONS[name]
        few = {"num_landmarks": landmarks} if "num_landmarks" in kind.core.defaults else {}
        peers.append(Peer(TORCH if name == "softmax" else name, functools.partial(kind.function, **few), half))
        if name in PUBLISHED:
            function, dtype = PUBLISHED[name]
            peers.append(Peer(f"{name}, as published", functools.partial(function, **few), dtype or half))
    if device.type == "cuda":
        flex = flex_gaussian()
        peers.append(Peer("kernelized by FlexAttention", flex, half, kernelized_attention, COMPILED_AT, compiled=True))
    return peers


def nystromformer(q: Tensor, k: Tensor, v: Tensor, *, num_landmarks: int, num_iterations: int = 6) -> Tensor:
    """Compute Nyströmformer in plain operations: three softmaxes, two of them with a row or column for each token, and
    a pseudo-inverse whose starting point is scaled by one number for the whole batch.

    The published code needs a length divisible by the number of segments; for others, segments differ by one, as ours.
    """
    scale = q.shape[-1] ** -0.25
    q, k = q * scale, k * scale
    of_queries, of_keys = (segment_means(t, num_landmarks)[0] for t in (q, k))
    left, right = (q @ of_keys.mT).softmax(-1), (of_queries @ k.mT).softmax(-1)
    middle = (of_queries @ of_keys.mT).softmax(-1)
    z = middle.mT / (middle.sum(-1).amax() * middle.sum(-2).amax())
    identity = torch.eye(middle.shape[-1], dtype=q.dtype, device=q.device)
    for _ in range(num_iterations):
        az = middle @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return (left @ z) @ (right @ v)


PUBLISHED: dict[str, tuple[Callable[..., Tensor], torch.dtype | None]] = {
    "skyformer": (functools.partial(skyformer_compat, order="published"), torch.float32),
    "nystrom": (nystromformer, None),
}
"""The order of operations that the authors published, in plain torch; and its dtype, if not the benchmark's."""


def flex_gaussian(*, compiled: bool = True) -> Function:
    """Build the exact Gaussian kernel from FlexAttention: a bias per key, and the log-sum-exp to undo normalisation.

    The bias depends on the keys, so FlexAttention has to propagate gradients to a tensor that its score_mod captures.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    flex: Any = flex_attention
    if compiled:
        flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1])
        half_k = 0.5 * scale * k.float().square().sum(-1)

        def bias(score: Tensor, b: Tensor, h: Tensor, _i: Tensor, j: Tensor) -> Tensor:
            return score - half_k[b, h, j]

        out, aux = flex(q, k, v, score_mod=bias, scale=scale, return_aux=AuxRequest(lse=True))
        half_q = 0.5 * scale * q.float().square().sum(-1)
        return (out.float() * (aux.lse - half_q).exp()[..., None]).to(v.dtype)

    return attention
