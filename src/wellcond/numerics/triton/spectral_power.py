"""U Σ^ε Vᵀ of many token matrices by products on tensor cores: the fused twin of `products` in `numerics.spectral`.

With G the float64 Gram matrix of the shorter side scaled to λmax = 1, one inverse folds its ten decades onto five from
both ends: K = t (G + t)⁻¹, R = 4K(I − K). The power is then D(R) + F(R)·K, where D and F are weighted sums of the
iterates of R ← R (α − ¼α² R), one product per iterate. From K on, matrices are pairs of float16 (22 bits), which is
what the theory requires there: three half-precision products replace one in single precision, and are faster.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from ..constants import kept_constants
from ..power_fit import FoldedFit
from .geometry import Geometry
from .gram import gram, largest_eigenvalue
from .spd_inverse import negative_inverse
from .spectral_power_kernels import SCALE, apply_kernel, fold_kernel, iterate_kernel, join_kernel, sum_kernel

__all__ = ["spectral_power_in_place_layout"]


@kept_constants(64)
def _weights(fit: FoldedFit, device: str) -> Tensor:
    return torch.tensor([fit.near_constant, *fit.near, fit.far_constant, *fit.far], dtype=torch.float32, device=device)


def spectral_power_in_place_layout(
    x: Tensor, n: int, d: int, geometry: Geometry, fit: FoldedFit, *, restore_scale: bool, chunk: int = 256
) -> Tensor:
    """Return U Σ^ε Vᵀ of every matrix of `x`, contiguous images or matrices laid out by `geometry`.

    Layout and dtype stay the same. Takes `chunk` matrices at a time: every iterate is kept until the sums are taken, 2
    MB for each 196 × 768 matrix. Half of the kernels wait for memory and half for a chain of steps, so that two halves
    of a batch fill each other's gaps.
    """
    out = torch.empty_like(x)
    for start in range(0, x.shape[0], chunk):
        count = 2 if x.is_cuda and min(n, d) > 128 and len(x) - start >= 64 else 1
        parts = zip(x[start : start + chunk].chunk(count), out[start : start + chunk].chunk(count), strict=True)
        _on_streams(
            x.device,
            [functools.partial(_gray_chunk, *part, n, d, geometry, fit, restore_scale) for part in parts],
        )
    return out


def _on_streams(device: torch.device, works: Sequence[Callable[[], object]]) -> None:
    """Call every function, each on its own stream: the first on the current one, where their inputs live.

    What they allocate belongs to their own streams, so they must free it themselves, by returning.
    """
    if len(works) == 1 or device.type != "cuda":
        for work in works:
            work()
        return
    here = torch.cuda.current_stream(device)
    lanes = [_lane(str(device), number) for number in range(len(works) - 1)]
    for lane in lanes:
        lane.wait_stream(here)
    for lane, work in zip([here, *lanes], works, strict=True):
        with torch.cuda.stream(lane):
            work()
    for lane in lanes:
        here.wait_stream(lane)


@functools.cache
def _lane(device: str, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _gray_chunk(
    x: Tensor, out: Tensor, n: int, d: int, geometry: Geometry, fit: FoldedFit, restore_scale: bool
) -> None:
    batch, m = x.shape[0], min(n, d)
    g = gram(x, n, d, geometry)
    largest, _ = largest_eigenvalue(g, m, shift=fit.shift)
    g, _ = negative_inverse(g)
    ld = -(-m // 16) * 16
    size = batch * ld * ld
    count = len(fit.alphas) + 1
    iterates = torch.empty(count, 2, batch, ld, ld, dtype=torch.float16, device=x.device)
    k, far = (torch.empty(2, batch, ld, ld, dtype=torch.float16, device=x.device) for _ in range(2))
    near = torch.empty(batch, ld, ld, dtype=torch.float32, device=x.device)

    def grid(block: int) -> tuple[int, int, int]:
        return triton.cdiv(ld, block), triton.cdiv(ld, block), batch

    # 196 tokens are three tiles of 64 and four more rows: a whole tile for those would be a third of the work.
    rest = ld % 64
    last = rest if rest in (16, 32) else 64
    fold_kernel[grid(64)](
        g,
        largest,
        k,
        iterates[0],
        m,
        g.shape[-1],
        ld,
        size,
        fit.shift,
        BLOCK=64,
        LAST=last,
        BLOCK_K=16,
        num_warps=4,
        num_stages=3,
    )
    product = {"BLOCK": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    unscale = 1.0 / (SCALE.value * SCALE.value)
    for step, alpha in enumerate(fit.alphas):
        iterate_kernel[grid(64)](
            iterates[step],
            iterates[step + 1],
            ld,
            size,
            unscale,
            alpha,
            -alpha * alpha / 4,
            LAST=last,
            CAREFUL=step < fit.careful,
            **product,
        )
    sum_kernel[grid(64)](
        iterates, _weights(fit, str(x.device)), near, far, ld, size, COUNT=count, BLOCK=64, num_warps=8
    )
    w = iterates[0]
    join_kernel[grid(64)](far, k, near, w, ld, size, unscale, **product)
    if n > d:
        tiles = {"BM": 64, "BN": max(16, min(64, triton.next_power_of_2(d))), "BK": 16, "num_warps": 4, "num_stages": 3}
    else:
        tiles = {"BM": 128, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 3}
    apply_kernel[(triton.cdiv(n, tiles["BM"]), triton.cdiv(d, tiles["BN"]), batch)](
        x, w, largest, out, n, d, x.stride(0), ld, size, *geometry, TALL=n > d, RESTORE=restore_scale, **tiles
    )
