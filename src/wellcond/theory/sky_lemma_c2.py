"""Lemma C.2 of Skyformer: with d ≥ (28/3)(s/β)·ln(2n/δ) uniform columns, P(‖HΠΠᵀHᵀ − HHᵀ‖ > ½‖H‖²) < δ.

    enough_columns(h, delta=0.1)                       # the explicit d of the proof
    sampling_errors(h, d, draws=400, source=source)    # ‖HΠΠᵀHᵀ − HHᵀ‖/‖H‖², one per draw

s = ‖H‖_F²/‖H‖² is H's stable rank, β the largest number with β ≤ ‖H‖_F²/(n‖h_i‖²) for every column h_i. The lemma
requires a diagonal HHᵀ, but the proof does not need it: n·h_i h_iᵀ − HHᵀ is a difference of two positive semi-definite
matrices, so its norm is at most the larger one's.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wellcond.theory.draws import generator, weights
from wellcond.theory.findings import Case, Example, Fact, Line, Lines, Statement, rate, share
from wellcond.theory.trained import TrainedBlock

__all__ = ["STATEMENT", "cases", "chart", "enough_columns", "examples", "sample_counts", "sampling_errors", "summary"]

ID = "sky-lemmaC2"
DELTAS = (0.4, 0.1, 0.05)
SIZES = (16, 48)
PARTS = (1, 2, 4, 8, 16, 32, 64, 128)

STATEMENT = Statement(
    id=ID,
    title="Lemma C.2: how many columns keep a Gram matrix",
    plain=(
        "The lemma holds with the constant of its proof, and its assumption that HHᵀ is diagonal is not needed."
    ),
    claim="If HHᵀ is diagonal and d ≥ (28/3)(s/β)·ln(2n/δ), then P(‖HΠΠᵀHᵀ − HHᵀ‖ > ½‖H‖²) < δ.",
    instead=(
        Fact(
            key="any",
            says="The same holds without a diagonal HHᵀ.",
            proof="X_k = (n·h_i h_iᵀ − HHᵀ)/d is a difference of two PSD matrices, so its norm is at most the larger "
            "of their norms: ‖X_k‖ ≤ R = ‖H‖_F²/(dβ). E X_k² ⪯ Σ_i n‖h_i‖²·h_i h_iᵀ/d² ⪯ (‖H‖_F²/β)·HHᵀ/d², so σ² = "
            "‖H‖_F²‖H‖²/(dβ) for d summands. Lemma C.1 with t = ½‖H‖² gives 2n·exp(−3dβ/(28s)), which is δ at most.",
        ),
        Fact(
            says="How much room the constant leaves depends on H: little for a flat spectrum, much for one that decays."
        ),
    ),
    tested=f"n = {', '.join(map(str, SIZES))}; flat, decaying and spiky spectra with diagonal HHᵀ, and Gaussian H, "
    f"whose HHᵀ is not; δ = {', '.join(map(str, DELTAS))}; the constant of the proof.",
    not_tested="n beyond these; δ below 0.05, which would take more draws.",
)  # fmt: skip


def enough_columns(h: Tensor, delta: float) -> int:
    """Return (28/3)(s/β)·ln(2n/δ), rounded up, with the best (largest) β."""
    if not 0 < delta < 0.5:
        raise ValueError(f"the lemma needs 0 < δ < 1/2, got {delta}")
    n = h.shape[-1]
    columns = h.square().sum(-2)
    stable_rank = float(columns.sum() / torch.linalg.matrix_norm(h, ord=2) ** 2)
    beta = float(columns.sum() / (n * columns.max()))
    return math.ceil(28 / 3 * stable_rank / beta * math.log(2 * n / delta))


def sample_counts(draws: int, n: int, d: int, source: torch.Generator) -> Tensor:
    """Return how often each of n columns occurs in d uniform draws with replacement: (b, n)."""
    counts = torch.zeros(draws, n, dtype=torch.float64)
    for start in range(0, d, 4096):
        chosen = torch.randint(0, n, (draws, min(4096, d - start)), generator=source)
        counts.scatter_add_(1, chosen, torch.ones(1, dtype=torch.float64).expand_as(chosen))
    return counts


def sampling_errors(h: Tensor, d: int, draws: int, source: torch.Generator) -> Tensor:
    """‖HΠΠᵀHᵀ − HHᵀ‖/‖H‖² for `draws` independent Π of d columns."""
    n = h.shape[-1]
    weight = sample_counts(draws, n, d, source) * (n / d) - 1
    error = torch.linalg.eigvalsh((h * weight[:, None, :]) @ h.mT).abs().amax(-1)
    return error / torch.linalg.matrix_norm(h, ord=2) ** 2


def _matrices(seed: int) -> list[tuple[str, Tensor, bool]]:
    """(name, H, whether HHᵀ is diagonal)."""
    found = []
    for n in SIZES:
        source = generator(seed, ID, "H", n)
        q = weights("orthogonal", 1, n, n, source)[0]
        decay = 0.8 ** torch.arange(n, dtype=torch.float64)
        spiky = torch.diag(decay)
        found += [
            (f"flat, n = {n}", q, True),
            (f"decaying, n = {n}", decay[:, None] * q, True),
            (f"spiky, n = {n}", spiky, True),
            (f"Gaussian, n = {n}", weights("gaussian", 1, n, n, source)[0], False),
        ]
    return found


def cases(draws: int, seed: int, trained: Sequence[TrainedBlock] = ()) -> Iterator[Case]:
    for name, h, diagonal in _matrices(seed):
        for delta in DELTAS:
            d = enough_columns(h, delta)
            errors = sampling_errors(h, d, draws, generator(seed, ID, name, delta))
            yield rate(
                f"{name}, δ = {delta:g}", failures=int((errors > 0.5).sum()), draws=draws, allowed=delta,
                part="claim" if diagonal else "instead", fact="any", delta=delta, n=h.shape[-1], columns=d,
                largest_error=float(errors.max()),
            )  # fmt: skip


def examples() -> list[Example]:
    return []


def chart(draws: int, seed: int) -> Lines:
    """The failure rate as d shrinks below what the lemma requires."""
    lines = []
    for name, h, _ in _matrices(seed)[4:]:
        d, rates, parts = enough_columns(h, 0.1), [], []
        for part in PARTS:
            columns = max(1, d // part)
            errors = sampling_errors(h, columns, draws, generator(seed, ID, "chart", name, part))
            parts.append(1 / part)
            rates.append(float((errors > 0.5).double().mean()))
        lines.append(Line(name=name.split(",")[0], x=parts, y=rates))
    lines.append(Line(name="δ = 0.1", x=[1 / PARTS[-1], 1.0], y=[0.1, 0.1], dashed=True))
    return Lines(
        title="Lemma C.2: failures with fewer columns",
        x="part of the d that the lemma asks for", y="failure rate", log_x=True, lines=lines,
        caption=f"n = {SIZES[-1]}, {draws} draws for each point; a failure is an error above half of ‖H‖².",
    )  # fmt: skip


def summary(cases: Sequence[Case], lines: Lines) -> list[str]:
    inside = [c for c in cases if c.part == "claim"]
    least = []
    for line in lines.lines[:-1]:
        good = [x for x, y in zip(line.x, line.y, strict=True) if y <= 0.1]
        least.append(f"1/{1 / min(good):.0f} ({line.name})" if good else f"nothing ({line.name})")
    return [
        *(f"δ = {delta:g}: {share(_of(inside, delta))} draws failed." for delta in DELTAS),
        f"The largest error at the lemma's d was {max(c.settings['largest_error'] for c in inside):.2f}·‖H‖²; the "
        "lemma allows 0.5.",
        f"HHᵀ not diagonal: {share([c for c in cases if c.part == 'instead'])} draws failed; the assumption is not "
        "needed.",
        f"Failures stay below δ = 0.1 down to {', '.join(least)} of the lemma's d.",
    ]  # fmt: skip


def _of(cases: Sequence[Case], delta: float) -> list[Case]:
    return [case for case in cases if case.settings["delta"] == delta]
