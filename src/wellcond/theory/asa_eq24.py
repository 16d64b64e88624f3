"""Equation 24 of Always Skip Attention: a depthwise convolution has κ(W_CD X) ≤ κ(W_CD)·κ(X).

    t = convolution_matrices(kernels, side=6)     # (b, h, n, n): each channel's kernel as a matrix on n = side² places
    depthwise(x, t)                               # (b, n, h): column j multiplied by its own matrix
    for case in cases(400, seed=0): …

The equation writes the convolution as one matrix to the left of X. A depthwise convolution has a different matrix for
each column of X: W_CD is block-diagonal on the flattened X, and its condition number says how much ‖X‖_F changes, not
how the columns end up relative to each other. If all channels share one kernel, it is one matrix, and the equation is
right. Padding does not matter: on two places in a row, the zero-padded kernel (1, 0, 1) swaps them, as a circular shift
does.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wellcond.theory.draws import generator, kappa, tokens, weights
from wellcond.theory.findings import Case, Example, Fact, Line, Lines, Statement, compare, median, share
from wellcond.theory.trained import TrainedBlock

__all__ = [
    "STATEMENT",
    "all_pass_matrices",
    "bound_of",
    "cases",
    "chart",
    "convolution_matrices",
    "depthwise",
    "examples",
    "summary",
    "swapping_kernels",
]

ID = "asa-eq24"
SIDE, KERNEL = 6, 3
CHANNELS = (72, 36, 18)  # n = 36 places: below, at and above the number of channels
SHARE = 0.15  # fraction of the draws, since each decomposes a matrix per channel
SMALL = (2, 4)  # channels on 2 × 2 places: few enough for random kernels to violate the bound
MANY = 25  # times as many draws, there
SPREADS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

STATEMENT = Statement(
    id=ID,
    title="Equation 24: a depthwise convolution only multiplies the condition number",
    plain=(
        "The equation treats the convolution as one matrix, which it is only if all channels share a kernel. With a "
        "kernel per channel, columns that were orthogonal may end up equal, however well-conditioned each kernel is, "
        "with circular and with zero padding. Random kernels violate it on the smallest grid; on larger ones they do "
        "not, since the bound is then far too large."
    ),
    claim="κ(W_CD X) ≤ κ(W_CD)·κ(X) for a depthwise convolution W_CD.",
    instead=(
        Fact(
            key="shared",
            says="κ(TX) ≤ κ(T)·κ(X) where all channels share one kernel, and X has full rank.",
            proof="T is then one square matrix to the left of X. If it is singular, the right side is infinite; "
            "otherwise it has full column rank: ‖TXv‖ ≥ σmin(T)‖Xv‖ for every v, and ‖TXv‖ ≤ σmax(T)‖Xv‖.",
        ),
        Fact(
            key="no bound",
            says="With a kernel per channel no function of κ(W_CD) and κ(X) bounds κ(output), whatever the padding.",
            proof="On a grid with rows of two places the kernel that is 1 left and right of its centre and 0 "
            "elsewhere swaps the two places of a row, zero-padded as it is: an orthogonal matrix. With X = (e₁, e₂), "
            "the first channel left as it is and the second swapped, κ(W_CD) = κ(X) = 1 and both columns of the "
            "output are e₁. Add t to the second kernel's centre: κ(W_CD) = (1 + t)/(1 "
            "− t) stays near 1, and κ(output), the columns being e₁ and e₁ + t·e₂, is finite and grows without bound "
            "as t → 0.",
        ),
        Fact(
            key="near",
            says="Kernels that differ little from a common one, T, do little harm: with e = max_j‖T_j − T‖·‖X‖_F < "
            "σmin(T)σmin(X), κ(output) ≤ (σmax(T)σmax(X) + e)/(σmin(T)σmin(X) − e).",
            proof="Column j of the output differs from that of TX by (T_j − T)x_j, so the two matrices differ by e "
            "at most in the Frobenius norm, and no singular value moves further (Weyl). Those of TX lie between "
            "σmin(T)σmin(X) and σmax(T)σmax(X).",
        ),
    ),
    tested=f"{SIDE} × {SIDE} places with {', '.join(map(str, CHANNELS))} channels; {KERNEL} × {KERNEL} kernels, "
    f"Gaussian and uniform, zero padding; 2 × 2 places with 2 and 4 channels in {MANY} times as many draws, and "
    "zero-padded kernels that swap places there; all-pass circular kernels (orthogonal matrices); one shared "
    "kernel; Gaussian and orthonormal X.",
    not_tested="Batch normalisation and the activation, which the equation leaves out; the kernels of a trained "
    "ConvMixer.",
)  # fmt: skip


def convolution_matrices(kernels: Tensor, side: int) -> Tensor:
    """Return kernels (…, k, k), k odd, as matrices (…, side², side²), zero-padded as in a layer."""
    k, n = kernels.shape[-1], side * side
    matrices = kernels.new_zeros(*kernels.shape[:-2], n, n)
    for row in range(side):
        for column in range(side):
            for a in range(k):
                for b in range(k):
                    r, c = row + a - k // 2, column + b - k // 2
                    if 0 <= r < side and 0 <= c < side:
                        matrices[..., row * side + column, r * side + c] = kernels[..., a, b]
    return matrices


def all_pass_matrices(draws: int, channels: int, n: int, source: torch.Generator, spread: float = 1.0) -> Tensor:
    """Circular convolutions that only shift phases: orthogonal matrices (b, h, n, n), the identity for spread 0."""
    half = (n - 1) // 2
    phases = (torch.rand(draws, channels, half, dtype=torch.float64, generator=source) * 2 - 1) * math.pi * spread
    spectrum = torch.ones(draws, channels, n // 2 + 1, dtype=torch.complex128)
    spectrum[..., 1 : half + 1] = torch.polar(torch.ones_like(phases), phases)
    kernel = torch.fft.irfft(spectrum, n=n)
    index = (torch.arange(n)[:, None] - torch.arange(n)) % n
    return kernel[..., index]


def swapping_kernels(draws: int, channels: int, source: torch.Generator) -> Tensor:
    """Draw kernels (b, h, 3, 3): each keeps the places of a 2 × 2 grid, or swaps its columns, its rows or both."""
    choices = torch.zeros(4, 3, 3, dtype=torch.float64)
    choices[0, 1, 1] = 1
    choices[1, 1, 0] = choices[1, 1, 2] = 1
    choices[2, 0, 1] = choices[2, 2, 1] = 1
    choices[3, ::2, ::2] = 1
    return choices[torch.randint(0, 4, (draws, channels), generator=source)]


def depthwise(x: Tensor, t: Tensor) -> Tensor:
    """Multiply each column j of X (b, n, h) by its matrix T_j, of T (b, h, n, n)."""
    return torch.einsum("bhij,bjh->bih", t, x)


def bound_of(x: Tensor, t: Tensor) -> Tensor:
    """κ(W_CD)·κ(X): W_CD is block-diagonal, so its extreme singular values are those of the blocks."""
    s = torch.linalg.svdvals(t)
    return s[..., 0].amax(-1) / s[..., -1].amin(-1) * kappa(x)


def cases(draws: int, seed: int, trained: Sequence[TrainedBlock] = ()) -> Iterator[Case]:
    n, count = SIDE * SIDE, max(10, int(draws * SHARE))
    for h in CHANNELS:
        for kind in ("gaussian", "uniform"):
            source = generator(seed, ID, kind, h)
            x = tokens(count, n, h, source)
            kernels = weights(kind, count * h, KERNEL, KERNEL, source).unflatten(0, (count, h))
            t = convolution_matrices(kernels, SIDE)
            settings = {"kernels": kind, "n": n, "channels": h}
            yield compare(
                f"{kind} kernels, {h} channels", bound_of(x, t), kappa(depthwise(x, t)), part="claim", **settings
            )
            one = t[:, :1].expand(-1, h, -1, -1)
            yield compare(
                f"one {kind} kernel, {h} channels", kappa(t[:, 0]) * kappa(x), kappa(depthwise(x, one)),
                part="instead", fact="shared", **settings,
            )  # fmt: skip
        for tokens_, make in (("Gaussian", tokens), ("orthonormal", lambda *a: weights("orthogonal", *a))):
            source = generator(seed, ID, "all-pass", tokens_, h)
            x, t = make(count, n, h, source), all_pass_matrices(count, h, n, source)
            settings = {"kernels": "all-pass", "tokens": tokens_, "n": n, "channels": h}
            yield compare(
                f"all-pass kernels, {tokens_} X, {h} channels", kappa(x), kappa(depthwise(x, t)), part="claim",
                **settings,
            )  # fmt: skip
            near = all_pass_matrices(count, h, n, source, spread=0.002)
            known, usable = _near_bound(x, near)
            if bool(usable.any()):
                yield compare(
                    f"kernels close to one, {tokens_} X, {h} channels", known[usable],
                    kappa(depthwise(x, near))[usable], part="instead", fact="near", **settings,
                )  # fmt: skip
    yield from _smallest(draws, seed)


def _smallest(draws: int, seed: int) -> Iterator[Case]:
    """2 × 2 places, zero padding."""
    for h in SMALL:
        for kind in ("gaussian", "uniform"):
            source, many = generator(seed, ID, "small", kind, h), MANY * draws
            x = tokens(many, 4, h, source)
            t = convolution_matrices(weights(kind, many * h, KERNEL, KERNEL, source).unflatten(0, (many, h)), 2)
            name = f"{kind} kernels, 2 × 2 places, {h} channels"
            settings = {"kernels": kind, "n": 4, "channels": h}
            yield compare(name, bound_of(x, t), kappa(depthwise(x, t)), part="claim", **settings)
        source = generator(seed, ID, "swapping", h)
        x = weights("orthogonal", draws, 4, h, source)
        t = convolution_matrices(swapping_kernels(draws, h, source), 2)
        name = f"zero-padded swaps, 2 × 2 places, orthonormal X, {h} channels"
        settings = {"kernels": "swaps", "n": 4, "channels": h}
        yield compare(name, bound_of(x, t), kappa(depthwise(x, t)), part="claim", **settings)
    for t in (1e-2, 1e-4):
        x, matrices = _nearly_equal(t)
        name = f"κ(W_CD)κ(X)/t ≤ κ(output), zero-padded, t = {t:g}"
        known = bound_of(x, matrices) / t
        yield compare(name, kappa(depthwise(x, matrices)), known, part="instead", fact="no bound", n=4, channels=2)


def _nearly_equal(t: float) -> tuple[Tensor, Tensor]:
    """X = (e₁, e₂) on 2 × 2 places, (1, 4, 2), and zero-padded convolutions that keep e₁ and turn e₂ into e₁ + t·e₂."""
    kernels = torch.zeros(1, 2, 3, 3, dtype=torch.float64)
    kernels[0, 0, 1, 1] = 1
    kernels[0, 1, 1] = torch.tensor([1, t, 1])
    return torch.eye(4, 2, dtype=torch.float64)[None], convolution_matrices(kernels, 2)


def _near_bound(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bound for kernels near the identity, and the mask of the draws to which it applies."""
    away = torch.linalg.matrix_norm(t - torch.eye(t.shape[-1], dtype=t.dtype), ord=2).amax(-1)
    e = away * torch.linalg.matrix_norm(x)
    s = torch.linalg.svdvals(x)
    return (s[..., 0] + e) / (s[..., -1] - e), s[..., -1] > e


def examples() -> list[Example]:
    x = torch.eye(2, dtype=torch.float64)
    shift = torch.tensor([[0, 1], [1, 0]], dtype=torch.float64)
    t = torch.stack([x, shift])[None]
    out = depthwise(x[None], t)[0]
    nearly = torch.tensor([[1.0, 1.0], [0.0, 1e-3]], dtype=torch.float64)
    padded, kernels = _nearly_equal(0.0)
    equal = depthwise(padded, kernels)[0]
    close = float(kappa(depthwise(*_nearly_equal(1e-3))[0]))
    return [
        Example(
            title="Two places, two channels: one kernel waits, the other shifts, and both channels become the same",
            text=(
                "X = I. Channel 1 is convolved with the identity, channel 2 with a circular shift by one. Both are "
                "orthogonal, so that κ(W_CD) = 1, and the output has the same column twice (its κ is "
                f"{float(kappa(nearly)):.3g} when the second column is off by a thousandth)."
            ),
            matrices={"X": x.tolist(), "T_1": x.tolist(), "T_2": shift.tolist(), "output": out.tolist()},
            bound=float(bound_of(x[None], t)[0]),
            measured=float(kappa(out)),
        ),
        Example(
            title="The same with zero padding, as a ConvMixer has it: 2 × 2 places, 3 × 3 kernels",
            text=(
                "The first kernel is 1 at its centre; the second is 1 left and right of it, and swaps the two places "
                "of each row: on two places what the padding adds is nothing. T_1 and T_2 are orthogonal, κ(W_CD) = 1, "
                "and channels that held places 1 and 2 both hold place 1 (with 0.001 at the second kernel's centre, κ "
                f"is {close:.3g}, against a bound of {float(bound_of(*_nearly_equal(1e-3))[0]):.4g})."
            ),
            matrices={
                "X": padded[0].tolist(), "T_1": kernels[0, 0].tolist(), "T_2": kernels[0, 1].tolist(),
                "output": equal.tolist(),
            },
            bound=float(bound_of(padded, kernels)[0]),
            measured=float(kappa(equal)),
        ),
    ]  # fmt: skip


def chart(draws: int, seed: int) -> Lines:
    """κ of the output as the kernels move apart; every κ on the right side is 1."""
    n, h, count = SIDE * SIDE, CHANNELS[-1], max(40, draws // 4)
    source = generator(seed, ID, "chart")
    x = weights("orthogonal", count, n, h, source)
    y = [median(kappa(depthwise(x, all_pass_matrices(count, h, n, source, spread)))) for spread in SPREADS]
    square = weights("orthogonal", count, n, n, source)
    y2 = [median(kappa(depthwise(square, all_pass_matrices(count, n, n, source, spread)))) for spread in SPREADS]
    return Lines(
        title="Depthwise convolution of orthonormal columns",
        x="spread of the kernels' phases (1: independent)", y="κ(output)", log_y=True,
        lines=[
            Line(name=f"{h} channels", x=list(SPREADS), y=y),
            Line(name=f"{n} channels", x=list(SPREADS), y=y2),
            Line(name="Eq. 24", x=list(SPREADS), y=[1.0] * len(SPREADS), dashed=True),
        ],
        caption=f"{n} places; every channel's matrix is orthogonal and κ(X) = 1, so that Eq. 24 says κ = 1. Median "
        "over draws.",
    )  # fmt: skip


def summary(cases: Sequence[Case], lines: Lines) -> list[str]:
    def pick(**wanted) -> list[Case]:
        return [c for c in cases if c.part == "claim" and wanted.items() <= c.settings.items()]

    free = [c for c in (*pick(kernels="gaussian"), *pick(kernels="uniform")) if c.settings["n"] > 4]
    small = [[*pick(kernels="gaussian", n=4, channels=h), *pick(kernels="uniform", n=4, channels=h)] for h in SMALL]
    rates = " and ".join(f"{share(some)} with {h} channels" for some, h in zip(small, SMALL, strict=True))
    shared = [c for c in cases if c.name.startswith("one ")]
    square = lines.lines[1]
    return [
        "All-pass kernels and orthonormal X, where the bound is 1: "
        f"{share(pick(kernels='all-pass', tokens='orthonormal'))} draws violate it; with Gaussian X "
        f"{share(pick(kernels='all-pass', tokens='Gaussian'))}.",
        "Zero-padded kernels that swap places of a 2 × 2 grid, where the bound is 1 too: "
        f"{share(pick(kernels='swaps'))}. Random {KERNEL} × {KERNEL} kernels there: {rates}.",
        f"Random {KERNEL} × {KERNEL} kernels on {SIDE} × {SIDE} places: {share(free)} violate it, since κ(W_CD) of "
        f"random kernels is large (median bound {max(c.bound for c in free):.3g} against a measured "
        f"{max(c.measured for c in free):.3g} at most): nothing is violated, and little is said.",
        f"One kernel for all channels: {share(shared)} violate it.",
        f"As kernels move apart, κ of {square.name} goes from {square.y[0]:.3g} to {square.y[-1]:.3g} (median), "
        "while every condition number in the bound stays 1.",
    ]  # fmt: skip
