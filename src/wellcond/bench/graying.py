"""`wellcond bench graying`: what graying adds to a training step, and the error of each path against float64.

The tokens are those of photographs with patch size 16 (196 × 768, ViT-B) and 4 (3136 × 48, Swin-S). Each has three
tables: each path against what it replaces; a training step of the model, grayed and then compiled, against a step
without graying (on a GPU; with `quick` of a shallow model, not compiled); and errors by path and precision. The models
of a table of steps have the same weights and take turns; `from` and `to` are the range of the ratio over the rounds.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.bench.photographs import photographs
from wellcond.bench.tables import destination, show, write
from wellcond.bench.timing import chosen_device, interleaved_times, median_ms
from wellcond.graying import TokenGraying, explain_graying
from wellcond.models import gray
from wellcond.models.build import create_model
from wellcond.numerics.autocast import tf32
from wellcond.numerics.dct import coefficient_floor, dct2, dct_basis, dct_power, dct_power_in, idct2
from wellcond.numerics.fastpaths import plain_twins
from wellcond.numerics.fused import tokens_of, untokens
from wellcond.numerics.spectral import power_floor, spectral_power
from wellcond.progress import steps

__all__ = ["Changed", "dct_errors", "grayed_copies", "published_grayings", "run", "step_times"]

EPSILONS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97)
MODELS = {16: "vit_base_patch16_224", 4: "swin_small_patch4_window7_224"}
SHALLOW: dict[int, dict[str, Any]] = {16: {"depth": 1}, 4: {"depths": (1, 1, 1, 1)}}
GRAYINGS = {"dct": (0.95, 0.8), "svd": (0.95, 0.5)}
SEED = 0
STEPS = 8


def run(
    *, output: Path | None = None, device: str | None = None, batch_size: int | None = None, quick: bool = False
) -> Path:
    """Measure time and error of graying on `device`, write JSON to `output` and return its path."""
    where = chosen_device(device)
    on_gpu = where.type == "cuda"
    batch = batch_size or (1 if quick and not on_gpu else 256 if on_gpu and not quick else 8)
    images = photographs(batch, seed=SEED).to(where)
    torch.manual_seed(SEED)
    path = destination(output, f"graying-{where.type}.json")
    rows: list[dict[str, Any]] = []

    def keep(more: list[dict[str, Any]], title: str, columns: tuple[str, ...]) -> None:
        """Show a table and write all rows so far: compiling takes minutes, and an interrupted run keeps its rows."""
        rows.extend(more)
        show(title, more, columns)
        write(path, {"benchmark": "graying", "batch_size": batch, "quick": quick, "rows": rows}, seed=SEED)

    with steps(len(MODELS) * 3) as begin:
        for patch, model in MODELS.items():
            begin(f"graying, patch {patch}")
            columns = ("path", "tokens", "epsilon", "ms", "times faster")
            keep(_times(images, patch, quick), f"graying, patch {patch}", columns)
            begin(f"training steps of {model}")
            if on_gpu or quick:
                columns = ("path", "epsilon", "ms", "ratio", "from", "to")
                keep(_steps(images, patch, quick), f"training step of {model}", columns)
            begin(f"errors, patch {patch}")
            keep(_errors(images[:8], patch), f"error against float64, patch {patch}",
                 ("path", "tokens", "epsilon", "frobenius", "singular values", "kappa"))  # fmt: skip
    return path


def _times(images: Tensor, patch: int, quick: bool) -> list[dict[str, Any]]:
    device, tokens = images.device, tokens_of(images, patch, patch)
    n, d = tokens.shape[-2:]

    def naive_eigh() -> Tensor:
        gram = tokens @ tokens.mT if n <= d else tokens.mT @ tokens
        values, vectors = torch.linalg.eigh(gram)
        w = (vectors * (values / values[:, -1:]).clamp_min(1e-12)[:, None, :] ** -0.025) @ vectors.mT
        return w @ tokens if n <= d else tokens @ w

    def plain(method: str) -> Callable[[], Tensor]:
        module = TokenGraying(method, 0.95, patch)

        def call() -> Tensor:
            with plain_twins():
                return module(images)

        return call

    svd = {
        "torch.linalg.svd": lambda: naive_svd(tokens, 0.95),
        "torch.linalg.eigh of the Gram matrix": naive_eigh,
        "svd, plain twin": plain("svd"),
    }
    svd["svd"] = lambda: TokenGraying("svd", 0.95, patch)(images)
    dct = {"FFT DCT": lambda: _fft_gray(tokens, 0.95), "dct, plain twin": plain("dct")}
    dct["dct"] = lambda: TokenGraying("dct", 0.95, patch)(images)
    rows = []
    for group in (svd, dct):
        first = None
        for name, function in group.items():
            slow = "torch.linalg" in name and device.type == "cuda"
            ms = median_ms(function, device, repeats=1 if slow else 3 if quick else 15, warmup=0 if slow else 2)
            first = first or ms
            rows.append(
                {
                    "kind": "time",
                    "path": name,
                    "tokens": f"{n}×{d}",
                    "epsilon": 0.95,
                    "ms": ms,
                    "times faster": first / ms,
                }
            )
    return rows


def naive_svd(tokens: Tensor, epsilon: float) -> Tensor:
    """SVD graying as the paper's algorithm is written, but with the scale restored."""
    u, s, vh = torch.linalg.svd(tokens, full_matrices=False)
    return (u * (s[:, :1] * (s / s[:, :1]) ** epsilon)[:, None, :]) @ vh


def naive_dct(tokens: Tensor, epsilon: float, left: Tensor, right: Tensor) -> Tensor:
    """DCT graying as the paper's algorithm is written, given the bases of the patches and of a patch's values."""
    coefficients = left @ tokens @ right.mT
    peak = coefficients.abs().amax(dim=(-2, -1), keepdim=True)
    grown = coefficients.sign() * peak * (coefficients.abs() / peak) ** epsilon
    return left.mT @ grown @ right


def published_grayings(
    shape: Sequence[int], patch: int, epsilon: float, device: torch.device, *, compiled: bool
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return ways to gray images of this shape, by name: none, and the paper's algorithms as they are written."""
    sides = (shape[2] // patch) * (shape[3] // patch), shape[1] * patch**2
    left, right = (dct_basis(side, dtype=torch.float32, device=device) for side in sides)

    def on_tokens(gray: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda images: untokens(gray(tokens_of(images, patch, patch)), images.shape, patch, patch)

    def made(function: Any) -> Callable[[Tensor], Tensor]:
        return torch.compile(function, fullgraph=True) if compiled else function

    by_products = on_tokens(lambda tokens: naive_dct(tokens, epsilon, left, right))
    products = made(by_products)

    def in_tf32(images: Tensor) -> Tensor:
        with tf32():
            return products(images)

    return {
        "plain": lambda images: images,
        "svd": on_tokens(lambda tokens: naive_svd(tokens, epsilon)),
        "dct": in_tf32,
        "dct float32": made(by_products),
    }


def grayed_copies(model: nn.Module, grayings: Sequence[tuple[str, float]]) -> list[nn.Module]:
    """Return a copy of the model for each (method, epsilon), grayed."""
    return [gray(copy.deepcopy(model), method, epsilon=epsilon) for method, epsilon in grayings]


class Changed(nn.Module):
    """A model on images that a function has changed."""

    def __init__(self, change: Callable[[Tensor], Tensor], model: nn.Module):
        super().__init__()
        self.change: Callable[[Tensor], Tensor] = change
        self.model: nn.Module = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(self.change(images))


def _steps(images: Tensor, patch: int, quick: bool) -> list[dict[str, Any]]:
    """Time a training step of the grayed model, relative to the plain one's."""
    torch.compiler.reset()  # after a few models, compiled ones would silently run uncompiled
    name, settings = MODELS[patch], SHALLOW[patch] if quick else {}
    model = create_model(name, {"num_classes": 1000, **settings}).to(images.device).train()
    grayings = [(method, epsilon) for method, epsilons in GRAYINGS.items() for epsilon in epsilons]
    models = [model, *grayed_copies(model, grayings)]  # all before the first is compiled: `gray` forgets compiled code
    arms: list[Any] = models if quick else [torch.compile(one) for one in models]
    found = step_times(images, arms, repeats=2 if quick else 7, steps=1 if quick else STEPS)
    rows = []
    for (path, epsilon), times in zip([("plain", None), *grayings], found, strict=True):
        ratios = [ms / plain for ms, plain in zip(times, found[0], strict=True)]
        spread = {"from": min(ratios), "to": max(ratios)} if epsilon else {}
        rows.append({"kind": "step", "path": path, "model": name, "epsilon": epsilon, "ms": median(times),
                     "ratio": median(ratios), **spread})  # fmt: skip
    return rows


def step_times(
    images: Tensor, arms: Sequence[nn.Module], *, repeats: int, steps: int = STEPS
) -> list[list[float]]:  # fmt: skip
    """Return milliseconds of a bfloat16 training step, by arm and repeat.

    A repeat runs `steps` steps without synchronising in between, as in training; the arms take turns. Arms may share
    their weights. They have 1,000 classes.
    """
    labels = torch.randint(1000, (len(images),), device=images.device)

    def train_with(arm: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(arm.parameters(), lr=1e-4, fused=images.is_cuda)

        def train() -> None:
            for _ in range(steps):
                with torch.autocast(images.device.type, dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(arm(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return train

    times = interleaved_times([train_with(arm) for arm in arms], images.device, repeats=repeats, warmup=1)
    return [[ms / steps for ms in one] for one in times]


def _errors(images: Tensor, patch: int) -> list[dict[str, Any]]:
    """Return the largest error over the images for every path, against the same map in float64."""
    rows = []
    tokens = tokens_of(images, patch, patch)
    n, d = tokens.shape[-2:]
    exact = tokens.double().cpu()
    u, s, vh = torch.linalg.svd(exact, full_matrices=False)
    share = s / s[:, :1]
    floor = power_floor(torch.float32, n, d)
    for epsilon in EPSILONS:
        grown = torch.where(share > floor, share**epsilon, share * floor ** (epsilon - 1)) * s[:, :1]
        truth = (u * grown[:, None, :]) @ vh
        fast = TokenGraying("svd", epsilon, patch)
        paths = {
            f"svd ({explain_graying('svd', (n, d), images.dtype, images.device, epsilon)[0]})": tokens_of(
                fast(images), patch, patch
            ),
            "svd (products, plain twin)": _plain_products(tokens, epsilon),
        }
        for path, grayed in paths.items():
            rows.append({"kind": "error", "path": path, "tokens": f"{n}×{d}", "epsilon": epsilon,
                         **_spectral_error(grayed, truth, share, s, epsilon)})  # fmt: skip
        for path, error in dct_errors(images, patch, epsilon).items():
            rows.append({"kind": "error", "path": path, "tokens": f"{n}×{d}", "epsilon": epsilon, "frobenius": error})
    return rows


def dct_errors(images: Tensor, patch: int, epsilon: float) -> dict[str, float]:
    """Return the largest relative error of DCT graying over the images, against float64, by path and precision."""
    tokens = tokens_of(images, patch, patch)
    truth = _exact_dct(tokens.double().cpu(), epsilon)
    ours = explain_graying("dct", (tokens.shape[-2], tokens.shape[-1]), images.dtype, images.device, epsilon)[0]
    found = {
        f"dct ({ours})": tokens_of(TokenGraying("dct", epsilon, patch)(images), patch, patch),
        **_precisions(tokens, epsilon),
    }
    return {path: _frobenius(grayed, truth) for path, grayed in found.items()}


def _plain_products(tokens: Tensor, epsilon: float) -> Tensor:
    with plain_twins():
        return spectral_power(tokens, epsilon, method="products")


def _precisions(tokens: Tensor, epsilon: float) -> dict[str, Tensor]:
    """DCT graying in other precisions, as autocast or TF32 would compute it."""
    found = {"dct (plain twin)": dct_power(tokens, epsilon)}
    if tokens.is_cuda:
        with tf32():
            found["dct (TF32 products)"] = dct_power(tokens, epsilon)
    for dtype in (torch.bfloat16, torch.float16):
        found[f"dct (all in {str(dtype).removeprefix('torch.')})"] = dct_power_in(tokens, epsilon, dtype)
    return found


def _exact_dct(tokens: Tensor, epsilon: float) -> Tensor:
    coefficients = dct2(tokens)
    peak = coefficients.abs().amax(dim=(-2, -1), keepdim=True)
    floor = coefficient_floor(torch.float32)
    return idct2(coefficients * (coefficients.abs() / peak).clamp_min(floor) ** (epsilon - 1))


def _frobenius(grayed: Tensor, truth: Tensor) -> float:
    difference = torch.linalg.matrix_norm(grayed.double().cpu() - truth) / torch.linalg.matrix_norm(truth)
    return float(difference.max())


def _spectral_error(grayed: Tensor, truth: Tensor, share: Tensor, s: Tensor, epsilon: float) -> dict[str, float]:
    """Return errors: Frobenius, of singular values above 1e-5 of the largest, and of κ against κ^ε where κ < 1e5."""
    values = torch.linalg.svdvals(grayed.double().cpu())
    seen = share > 1e-5
    relative = (values / (s[:, :1] * share.clamp_min(1e-5) ** epsilon) - 1).abs()
    kappa = (values[:, 0] / values[:, -1]) / (1 / share[:, -1].clamp_min(1e-5)) ** epsilon
    whole = seen.all(-1)
    return {
        "frobenius": _frobenius(grayed, truth),
        "singular values": float(relative[seen].max()),
        "kappa": float((kappa[whole] - 1).abs().max()) if bool(whole.any()) else float("nan"),
    }


def _fft_gray(tokens: Tensor, epsilon: float) -> Tensor:
    """DCT graying by FFT, as DCT packages do it (Makhoul's reordering), for comparison."""
    coefficients = _fft_dct(_fft_dct(tokens).mT).mT
    peak = coefficients.abs().amax(dim=(-2, -1), keepdim=True)
    grown = coefficients.sign() * peak * (coefficients.abs() / peak) ** epsilon
    return _fft_idct(_fft_idct(grown.mT).mT)


def _twiddle(length: int, device: torch.device) -> Tensor:
    angle = torch.arange(length, device=device) * (-torch.pi / (2 * length))
    return torch.complex(torch.cos(angle), torch.sin(angle))


def _fft_dct(x: Tensor) -> Tensor:
    length = x.shape[-1]
    ordered = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], dim=-1)
    out = (torch.fft.fft(ordered) * _twiddle(length, x.device)).real * (2 / length) ** 0.5
    out[..., 0] /= 2**0.5
    return out


def _fft_idct(x: Tensor) -> Tensor:
    length = x.shape[-1]
    scaled = x * (2 / length) ** -0.5
    scaled = torch.cat([scaled[..., :1] * 2**0.5, scaled[..., 1:]], dim=-1)
    mirrored = torch.cat([torch.zeros_like(scaled[..., :1]), scaled[..., 1:].flip(-1)], dim=-1)
    ordered = torch.fft.ifft(torch.complex(scaled, -mirrored) * _twiddle(length, x.device).conj()).real
    out = torch.empty_like(x)
    half = (length + 1) // 2
    out[..., ::2], out[..., 1::2] = ordered[..., :half], ordered[..., half:].flip(-1)
    return out
