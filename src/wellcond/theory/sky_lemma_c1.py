"""Lemma C.1 of Skyformer, the matrix Bernstein inequality: P(‖ΣX_k‖ ≥ t) ≤ 2n·exp(−(t²/2)/(σ² + Rt/3)).

family = families(0)[0]                            # independent, self-adjoint, centred, ‖X_k‖ ≤ R, ‖ΣE X_k²‖ ≤ σ²
t = threshold(family, delta=0.1)                   # where the right side is δ
(family.norms(400, source) >= t).double().mean()   # the left side
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.theory.draws import generator
from wellcond.theory.findings import Case, Example, Fact, Line, Lines, Statement, rate, share
from wellcond.theory.trained import TrainedBlock

__all__ = ["STATEMENT", "Family", "bernstein", "cases", "chart", "examples", "families", "summary", "threshold"]

ID = "sky-lemmaC1"
DELTAS = (0.4, 0.1, 0.05)
SUMMANDS = 64

STATEMENT = Statement(
    id=ID,
    title="Lemma C.1: the matrix Bernstein inequality",
    plain=(
        "A known theorem, and nothing here contradicts it: the failure rates stay far below the bound."
    ),
    claim="P(‖ΣX_k‖ ≥ t) ≤ 2n·exp(−(t²/2)/(σ² + Rt/3)) for independent centred self-adjoint n × n matrices, ‖X_k‖ ≤ "
    "R, σ² ≥ ‖ΣE X_k²‖.",
    instead=(
        Fact(
            key="bernstein",
            says="Nothing needs replacing: the bound holds as it is printed (Tropp 2012).",
            proof="Let 0 < θ < 3/R and g = (θ²/2)/(1 − Rθ/3). For |x| ≤ R, e^(θx) ≤ 1 + θx + g·x² (compare the "
            "series: (k + 2)! ≥ 2·3^k), so that E e^(θX_k) ⪯ I + g·E X_k² ⪯ exp(g·E X_k²). By Lieb's theorem E tr "
            "exp(θΣX_k) ≤ tr exp(g·ΣE X_k²) ≤ n·exp(gσ²), and Markov's inequality with θ = t/(σ² + Rt/3) gives "
            "P(λmax ≥ t) ≤ n·exp(−(t²/2)/(σ² + Rt/3)). −ΣX_k gives the other end, and the factor 2.",
        ),
        Fact(says="The bound leaves room: the norm reached the t of a δ far less often than in a share δ of the "
        "draws."),
    ),
    tested=f"{SUMMANDS} summands of size 4 and 16: random signs before fixed matrices, before fixed projections, "
    "before fixed diagonal matrices; rare events (probability 0.1); the sub-sampling of Lemma C.2. R and σ² are "
    "exact, not estimated.",
    not_tested="Unbounded or dependent summands, which the lemma excludes; sizes beyond 16.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """A random sum: how to draw its norm, and its exact R and σ²."""

    name: str
    n: int
    r: float
    variance: float
    norms: Callable[[int, torch.Generator], Tensor]


def bernstein(t: float, family: Family) -> float:
    """Return the right side, at most 1."""
    return min(1.0, 2 * family.n * math.exp(-(t**2) / 2 / (family.variance + family.r * t / 3)))


def threshold(family: Family, delta: float) -> float:
    """Return the t at which the right side is δ."""
    log = math.log(2 * family.n / delta)
    linear = log * family.r / 3
    return linear + math.sqrt(linear**2 + 2 * log * family.variance)


def families(seed: int) -> list[Family]:
    found = []
    for n in (4, 16):
        source = generator(seed, ID, "fixed", n)
        g = torch.randn(SUMMANDS, n, n, dtype=torch.float64, generator=source)
        v = torch.nn.functional.normalize(torch.randn(SUMMANDS, n, dtype=torch.float64, generator=source), dim=-1)
        fixed = {
            "signs × fixed matrices": (g + g.mT) / (2 * n**0.5),
            "signs × projections": v[:, :, None] * v[:, None, :],
            "signs × diagonal": torch.diag_embed(torch.rand(SUMMANDS, n, dtype=torch.float64, generator=source)),
        }
        found += [_signed(f"{name}, n = {n}", a) for name, a in fixed.items()]
        found.append(_rare(f"rare projections, n = {n}", fixed["signs × projections"], 0.1))
        found.append(_sampling(f"sub-sampling, n = {n}", g[0] / n**0.5))
    return found


def _norm(sums: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(sums).abs().amax(-1)


def _signed(name: str, a: Tensor) -> Family:
    """Σ ±A_k with fair signs: X_k² = A_k²."""

    def norms(draws: int, source: torch.Generator) -> Tensor:
        signs = torch.randint(0, 2, (draws, len(a)), generator=source).double() * 2 - 1
        return _norm(torch.einsum("bk,kij->bij", signs, a))

    return Family(name=name, n=a.shape[-1], r=float(_norm(a).max()), variance=float(_norm((a @ a).sum(0))), norms=norms)


def _rare(name: str, a: Tensor, p: float) -> Family:
    """Σ (b_k − p)A_k with b_k = 1 with probability p, else 0: E X_k² = p(1 − p)A_k²."""

    def norms(draws: int, source: torch.Generator) -> Tensor:
        hits = (torch.rand(draws, len(a), dtype=torch.float64, generator=source) < p).double()
        return _norm(torch.einsum("bk,kij->bij", hits - p, a))

    variance = p * (1 - p) * float(_norm((a @ a).sum(0)))
    return Family(name=name, n=a.shape[-1], r=max(p, 1 - p) * float(_norm(a).max()), variance=variance, norms=norms)


def _sampling(name: str, h: Tensor) -> Family:
    """HΠΠᵀHᵀ − HHᵀ with uniform columns: X_k is each of the n values (n·h_i h_iᵀ − HHᵀ)/d with probability 1/n."""
    n, d = h.shape[-1], SUMMANDS
    values = (n * h.mT[:, :, None] * h.mT[:, None, :] - h @ h.mT) / d

    def norms(draws: int, source: torch.Generator) -> Tensor:
        chosen = torch.randint(0, n, (draws, d), generator=source)
        counts = torch.zeros(draws, n, dtype=torch.float64).scatter_add_(
            1, chosen, torch.ones(1, dtype=torch.float64).expand_as(chosen)
        )
        return _norm(torch.einsum("bk,kij->bij", counts, values))

    variance = d * float(_norm((values @ values).mean(0)))
    return Family(name=name, n=n, r=float(_norm(values).max()), variance=variance, norms=norms)


def cases(draws: int, seed: int, trained: Sequence[TrainedBlock] = ()) -> Iterator[Case]:
    for family in families(seed):
        norms = family.norms(draws, generator(seed, ID, family.name))
        for delta in DELTAS:
            t = threshold(family, delta)
            yield rate(
                f"{family.name}, δ = {delta:g}", failures=int((norms >= t).sum()), draws=draws, allowed=delta,
                part="claim", fact="bernstein", n=family.n, delta=delta, t=t, largest=float(norms.max()),
            )  # fmt: skip


def examples() -> list[Example]:
    return []


def chart(draws: int, seed: int) -> Lines:
    """Both sides against t, for one family."""
    family = families(seed)[3]
    norms = family.norms(draws, generator(seed, ID, family.name))
    scale = math.sqrt(family.variance)
    steps = [i / 4 for i in range(1, 33)]
    return Lines(
        title="Matrix Bernstein: rare projections, n = 4",
        x="t / σ", y="P(‖ΣX_k‖ ≥ t)", log_y=True,
        lines=[
            Line(name="measured", x=steps, y=[float((norms >= s * scale).double().mean()) for s in steps]),
            Line(name="bound", x=steps, y=[bernstein(s * scale, family) for s in steps], dashed=True),
        ],
        caption=f"{draws} draws; rates of zero have no place on a logarithmic axis.",
    )  # fmt: skip


def summary(cases: Sequence[Case], lines: Lines) -> list[str]:
    near = max(
        cases, key=lambda c: c.settings["largest"] / c.settings["t"] if c.settings["delta"] == DELTAS[0] else 0.0
    )
    return [
        *(f"δ = {delta:g}: the norm reached t in {share(_of(cases, delta))} draws." for delta in DELTAS),
        f"The largest norm seen came to {near.settings['largest'] / near.settings['t']:.0%} of the t for δ = "
        f"{DELTAS[0]:g} ({near.name}).",
    ]  # fmt: skip


def _of(cases: Sequence[Case], delta: float) -> list[Case]:
    return [case for case in cases if case.settings["delta"] == delta]
