"""`wellcond bench kappa`: condition numbers of a batch of token matrices, against `torch.linalg.cond`.

Two kinds of matrices, 64 of each: the tokens of photographs, and what the first and the last attention (`sa`) of a
ViT-B with random weights make of them; and random ones in the shapes of a ViT-B's sites (197 × 768) and of three
narrower ones, with known condition numbers from 10 to 1e6. The truth is the float64 SVD; `kappa` is the median. Of
matrices beyond what float32 can resolve, ours says so instead of giving a number: they are counted (`beyond`), and no
method is judged on them.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellcond.bench.photographs import photographs
from wellcond.bench.tables import destination, show, write
from wellcond.bench.timing import chosen_device, interleaved_ms
from wellcond.models.build import create_model
from wellcond.numerics.fused import tokens_of
from wellcond.numerics.singular import condition_number
from wellcond.progress import steps

__all__ = ["run"]

SEED = 0
SHAPES = ((197, 768), (197, 192), (64, 192), (3136, 48))
KAPPAS = (1e1, 1e3, 1e5, 1e6)
MODEL = "vit_base_patch16_224"


def run(
    *, output: Path | None = None, device: str | None = None, batch_size: int | None = None, quick: bool = False
) -> Path:
    """Measure time and error of condition numbers on `device`, write JSON to `output` and return its path."""
    where = chosen_device(device)
    path = destination(output, f"kappa-{where.type}.json")
    batch = batch_size or (8 if quick else 64)
    rows: list[dict[str, Any]] = []
    shapes, settings = (SHAPES[:1], {"depth": 1}) if quick else (SHAPES, {})
    with steps(len(KAPPAS) * len(shapes) + 2 + (not quick)) as begin:
        for name, found in chain(_real(batch, settings), _random(batch, shapes)):
            begin(f"{name}, {'×'.join(map(str, found.shape))}")
            rows += _compare(name, found.to(where), repeats=3 if quick else 5)
    show("condition numbers", rows, ("method", "of", "matrices", "kappa", "ms", "times faster", "error", "beyond"))
    write(path, {"benchmark": "kappa", "batch_size": batch, "quick": quick, "rows": rows}, seed=SEED)
    return path


@torch.no_grad()
def _real(batch: int, settings: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and matrices: the tokens of photographs, and outputs of the first and the last attention."""
    images = photographs(batch, seed=SEED)
    yield "tokens", tokens_of(images, 16, 16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = create_model(MODEL, settings).eval()
    outputs: list[Tensor] = []
    blocks: Any = model.blocks
    for block in blocks:
        block.attn.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    model(images)
    for number in sorted({0, len(outputs) - 1}):
        yield f"sa {number + 1}", outputs[number]


def _random(batch: int, shapes: Sequence[tuple[int, int]]) -> Iterator[tuple[str, Tensor]]:
    for n, d in shapes:
        for kappa in KAPPAS:
            yield "random", matrices(batch, n, d, kappa)


def matrices(batch: int, n: int, d: int, kappa: float) -> Tensor:
    """Return random float32 matrices whose singular values fall geometrically from 1 to 1/kappa."""
    generator = torch.Generator().manual_seed(SEED)
    side = min(n, d)
    u = torch.linalg.qr(torch.randn(batch, n, side, dtype=torch.float64, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(batch, d, side, dtype=torch.float64, generator=generator))[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(kappa)).item(), side, dtype=torch.float64)
    return ((u * values) @ v.mT).float()


def _compare(of: str, x: Tensor, *, repeats: int) -> list[dict[str, Any]]:
    values = torch.linalg.svdvals(x.double().cpu())
    truth = values[:, 0] / values[:, -1]  # of the matrices as rounded to float32
    methods = {
        "torch.linalg.cond": lambda: torch.linalg.cond(x),
        "condition_number": lambda: condition_number(x),
    }
    times = interleaved_ms(list(methods.values()), x.device, repeats=repeats, warmup=1)
    batch, n, d = x.shape
    seen = condition_number(x).isfinite().cpu()
    rows = []
    for (name, function), ms in zip(methods.items(), times, strict=True):
        errors = (function().double().cpu() / truth - 1)[seen].abs()
        row = {"method": name, "of": of, "matrices": f"{batch}×{n}×{d}", "kappa": float(truth.median())}
        row |= {"ms": ms, "times faster": times[0] / ms, "error": float(errors.max()) if len(errors) else None}
        rows.append({**row, "beyond": int((~seen).sum())})
    return rows
