"""`wellcond bench attention`: time and peak memory of every attention over the length, forward and with its gradient.

65,536 tokens in all, two heads of 32, 128 landmarks, from 512 tokens a sequence to 131,072; then the shapes of the Long
Range Arena and of vision transformers. The peers: torch's own attention (flash), the order of operations that Skyformer
was published with, a Nyströmformer in plain torch, and FlexAttention for the exact Gaussian kernel. A method that
would need more memory than there is, or much more time than the others, is left out from there on, and the row says so.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellcond.attention import (
    kernelized_attention,
    linear_attention,
    nystrom_attention,
    skyformer_attention,
    softmax_attention,
)
from wellcond.attention.compat import skyformer_compat
from wellcond.bench.tables import destination, show, write
from wellcond.bench.timing import median_ms

__all__ = ["cost_exponent", "run"]

SEED = 0
TOKENS = 65_536
LANDMARKS = 128
TOO_SLOW_MS = 1500.0
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
LRA = ((16, 2, 4096, 32), (32, 2, 2048, 32), (128, 2, 1024, 32), (256, 2, 1024, 32))
OTHERS = ((8, 12, 4096, 64), (64, 3, 197, 64), (64, 12, 197, 64), (1, 16, 16_384, 64))
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    name: str
    function: Function
    dtype: torch.dtype


def run(
    *, output: Path | None = None, device: str | None = None, batch_size: int | None = None, quick: bool = False
) -> Path:
    """Times every attention on `device`; writes JSON to `output` and returns its path. `batch_size` is that of LRA."""
    del batch_size  # the shapes are the benchmark's
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    path = destination(output, f"attention-{where.type}.json")
    on_gpu = where.type == "cuda"
    tokens = TOKENS if on_gpu and not quick else 1024
    lengths = [n for n in LENGTHS if n <= 2 * tokens] if on_gpu and not quick else [256, 512]
    shapes = [("length", (max(1, tokens // n), 2, n, 32)) for n in lengths]
    if on_gpu and not quick:
        shapes += [("LRA", shape) for shape in LRA] + [("other", shape) for shape in OTHERS]
    peers = _peers(where, landmarks=LANDMARKS if on_gpu and not quick else 32)
    rows: list[dict[str, Any]] = []
    slow: set[tuple[str, str]] = set()
    for kind, shape in shapes:
        found = [_measured(peer, kind, shape, where, slow, quick) for peer in peers]
        for row in found:  # as the first of them, torch's own
            if row["both ms"] and found[0]["both ms"]:
                row["times faster"] = found[0]["both ms"] / row["both ms"]
        rows += found
        exponents = {peer.name: cost_exponent(rows, peer.name) for peer in peers}
        payload = {"benchmark": "attention", "tokens": tokens, "landmarks": LANDMARKS, "quick": quick}
        write(path, {**payload, "rows": rows, "exponents": exponents}, seed=SEED)
    columns = ("method", "shape", "dtype", "forward ms", "both ms", "memory MiB", "times faster", "note")
    show("attention, forward and with its gradient", rows, columns)
    return path


def cost_exponent(rows: list[dict[str, Any]], method: str) -> float:
    """The exponent of a sequence's cost in n: the slope of log time per token over log n, plus one."""
    lines = [row for row in rows if row["kind"] == "length" and row["method"] == method and row["both ms"]]
    points = [(math.log(row["n"]), math.log(row["both ms"] / row["tokens"])) for row in lines]
    points = [point for point in points if point[0] >= math.log(4096)] or points  # below it launches count, not work
    if len(points) < 2:
        return math.nan
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return 1 + sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def _peers(device: torch.device, *, landmarks: int) -> list[Peer]:
    half, full = torch.bfloat16 if device.type == "cuda" else torch.float32, torch.float32
    peers = [
        Peer("softmax (SDPA)", softmax_attention, half),
        Peer("skyformer", lambda q, k, v: skyformer_attention(q, k, v, num_landmarks=landmarks), half),
        Peer("skyformer, as published", lambda q, k, v: skyformer_compat(q, k, v, num_landmarks=landmarks), full),
        Peer("nystromformer", lambda q, k, v: nystrom_attention(q, k, v, num_landmarks=landmarks), half),
        Peer("kernelized", kernelized_attention, half),
        Peer("linear", linear_attention, half),
    ]
    if device.type == "cuda":
        peers.append(Peer("kernelized by FlexAttention", _flex_gaussian(), half))
    return peers


def _flex_gaussian() -> Function:
    """The exact Gaussian kernel from a softmax: a bias for each key, and the log-sum-exp to undo the normalisation."""
    from torch.nn.attention.flex_attention import flex_attention

    flex = torch.compile(flex_attention, dynamic=False)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1])
        half_k = 0.5 * scale * k.float().square().sum(-1)

        def bias(score: Tensor, b: Tensor, h: Tensor, _i: Tensor, j: Tensor) -> Tensor:
            return score - half_k[b, h, j]

        out, lse = flex(q, k, v, score_mod=bias, scale=scale, return_lse=True)
        half_q = 0.5 * scale * q.float().square().sum(-1)
        return (out.float() * (lse - half_q).exp()[..., None]).to(v.dtype)

    return attention


def _measured(
    peer: Peer,
    kind: str,
    shape: tuple[int, int, int, int],
    device: torch.device,
    slow: set[tuple[str, str]],
    quick: bool,
) -> dict[str, Any]:
    batch, heads, n, width = shape
    row: dict[str, Any] = {
        "kind": kind, "method": peer.name, "shape": "×".join(map(str, shape)), "batch": batch, "heads": heads, "n": n,
        "width": width, "tokens": batch * n, "dtype": str(peer.dtype).removeprefix("torch."),
        "forward ms": None, "both ms": None, "memory MiB": None, "note": "",
    }  # fmt: skip
    if (peer.name, kind) in slow:
        return {**row, "note": "left out: too slow or too large at a shorter length"}
    generator = torch.Generator(device).manual_seed(SEED)
    q, k, v, g = (torch.randn(shape, generator=generator, device=device).to(peer.dtype) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))

    def both() -> None:
        torch.autograd.grad(peer.function(q, k, v), (q, k, v), g)

    def forward() -> None:
        with torch.no_grad():
            peer.function(q, k, v)

    repeats = 2 if quick else 10
    try:
        row["memory MiB"] = _peak_mib(both, device)
        row["both ms"] = median_ms(both, device, repeats=repeats, warmup=2)
        row["forward ms"] = median_ms(forward, device, repeats=repeats, warmup=2)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        slow.add((peer.name, kind))
        return {**row, "note": f"failed: {str(error).splitlines()[0][:80]}"}
    if row["both ms"] > TOO_SLOW_MS and kind == "length":
        slow.add((peer.name, kind))
    return row


def _peak_mib(function: Callable[[], None], device: torch.device) -> float | None:
    if device.type != "cuda":
        function()
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
