"""`wellcond bench kappa`: condition numbers of a batch of token matrices, against `torch.linalg.cond`.

The matrices have the shapes of a ViT-B's sites (197 × 768) and of three narrower ones, 64 of each, and known condition
numbers from 10 to 1e6; the truth is the float64 SVD.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellcond.bench.tables import destination, show, write
from wellcond.bench.timing import chosen_device, interleaved_ms
from wellcond.numerics.singular import condition_number

__all__ = ["run"]

SEED = 0
SHAPES = ((197, 768), (197, 192), (64, 192), (3136, 48))


def run(
    *, output: Path | None = None, device: str | None = None, batch_size: int | None = None, quick: bool = False
) -> Path:
    """Measure time and error of condition numbers on `device`, write JSON to `output` and return its path."""
    where = chosen_device(device)
    path = destination(output, f"kappa-{where.type}.json")
    batch = batch_size or (8 if quick else 64)
    rows: list[dict[str, Any]] = []
    for n, d in SHAPES[:1] if quick else SHAPES:
        for kappa in (1e1, 1e3, 1e5, 1e6):
            rows += _compare(matrices(batch, n, d, kappa).to(where), kappa, repeats=3 if quick else 5)
    show("condition numbers", rows, ("method", "matrices", "kappa", "ms", "times faster", "error"))
    write(path, {"benchmark": "kappa", "batch_size": batch, "quick": quick, "rows": rows}, seed=SEED)
    return path


def matrices(batch: int, n: int, d: int, kappa: float) -> Tensor:
    """Return random float32 matrices whose singular values fall geometrically from 1 to 1/kappa."""
    generator = torch.Generator().manual_seed(SEED)
    side = min(n, d)
    u = torch.linalg.qr(torch.randn(batch, n, side, dtype=torch.float64, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(batch, d, side, dtype=torch.float64, generator=generator))[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(kappa)).item(), side, dtype=torch.float64)
    return ((u * values) @ v.mT).float()


def _compare(x: Tensor, kappa: float, *, repeats: int) -> list[dict[str, Any]]:
    values = torch.linalg.svdvals(x.double().cpu())
    truth = values[:, 0] / values[:, -1]  # of the matrices as rounded to float32
    methods = {
        "torch.linalg.cond": lambda: torch.linalg.cond(x),
        "condition_number": lambda: condition_number(x),
        "condition_number, method='gram'": lambda: condition_number(x, method="gram"),
    }
    times = interleaved_ms(list(methods.values()), x.device, repeats=repeats, warmup=1)
    batch, n, d = x.shape
    return [
        {
            "method": name,
            "matrices": f"{batch}×{n}×{d}",
            "kappa": kappa,
            "ms": ms,
            "times faster": times[0] / ms,
            "error": float((function().double().cpu() / truth - 1).abs().max()),
        }
        for (name, function), ms in zip(methods.items(), times, strict=True)
    ]
