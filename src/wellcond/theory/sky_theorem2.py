"""Theorem 2 of Skyformer: with d ≥ (56/3)(d_stat/β)·ln(4n/δ) uniform landmarks, ‖C̃ − C‖ ≤ ε‖C‖ with probability 1 − δ.

    instance = Instance.of("clusters", q, k, epsilon=0.3)
    instance.enough(delta=0.1), instance.tokens          # the theorem's d, and 2n: it says something only below 2n
    instance.errors(d=100, draws=400, source=source)     # ‖C̃ − C‖/λ and ‖C̃̄ − C̄‖/λ, one pair per draw

Errors are computed in the r dimensions whose eigenvalues exceed τ = 1e-4·λ. With C̄' = BBᵀ the part of C̄ there (B is
2n × r) and B_S the sampled rows of B, C̄ ⪯ C̄' + τI, and Nyström's error is monotone in the matrix:
‖C̄ − C̃̄‖ ≤ ‖Bτ(τ + B_SᵀB_S)⁻¹Bᵀ‖ + τ. So a failure reported here may not be one, but no failure is missed. ‖C − C̃‖ is
computed from the same matrix, and is the more accurate the smaller τ is.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from wellcond.theory.draws import generator
from wellcond.theory.findings import Case, Example, Fact, Line, Lines, Statement, compare, rate, share
from wellcond.theory.leverage import completion, leverage
from wellcond.theory.sky_lemma_c2 import sample_counts
from wellcond.theory.trained import TrainedBlock

__all__ = ["STATEMENT", "Instance", "cases", "chart", "examples", "instances", "summary"]

ID = "sky-theorem2"
DELTA = 0.1
SMALL = 1e-4  # τ as a fraction of λ
SHARE = 0.5  # fraction of the draws, since each takes two decompositions

STATEMENT = Statement(
    id=ID,
    title="Theorem 2: Skyformer's approximation of kernelized attention",
    plain=(
        "The theorem holds with the constant of its proof, and its bound can be halved. For it to say something, an "
        "input must have very few directions: for short sequences, those of trained blocks too, it asks for more "
        "landmarks than there are tokens, where far fewer do in practice."
    ),
    claim="With d ≥ (56/3)(d_stat/β)·ln(4n/δ) uniformly sampled landmarks, C̃̄ ⪯ C̄ ⪯ C̃̄ + λI, and ‖C̃ − C‖ ≤ λ = "
    "ε‖C‖, with probability 1 − δ.",
    instead=(
        Fact(
            key="half",
            says="It can be sharpened: ‖C̃ − C‖ ≤ ½‖C̃̄ − C̄‖ ≤ λ/2, half of the theorem's bound.",
            proof="E = C̄ − C̃̄ is positive semi-definite, and C − C̃ its upper right block E₁₂. For unit vectors u, "
            "v both (u, ±v)ᵀE(u, ±v) lie in [0, 2‖E‖], and their difference is 4uᵀE₁₂v; so ‖E₁₂‖ ≤ ½‖E‖.",
        ),
        Fact(
            says="The theorem's d exceeds 2n for short or spread-out inputs, where it says nothing. Where the "
            "spectrum decays smoothly, about twice d_stat landmarks were enough; where tokens lie in separate "
            "clusters, each must be hit, and it takes several times more. `wellcond.statistical_dimension(q, k, "
            "epsilon)` computes d_stat."
        ),
    ),
    tested=(
        "Inputs for which the theorem's d is below 2n (clustered tokens, tokens of small norm, a slowly moving "
        "sequence) and others for which it is not; ε = 0.1 to 0.5, δ = 0.1; queries and keys of trained blocks (first "
        "image, first head); the exact pseudo-inverse (γ = 0), as the theorem has it."
    ),
    not_tested=(
        "The γ = 0.1 and the six iterations of the implementation, stratified sampling, other δ, and n beyond 512."
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One input (q, k) with what the theorem needs to know about it."""

    name: str
    epsilon: float
    tokens: int
    """2n."""
    lam: float
    dimension: float
    over_beta: float
    """d_stat/β = 2n·max ℓ."""
    rows: Tensor
    """B, (2n, r)."""
    halves: tuple[Tensor, Tensor]
    """Triangular factors of B's query rows and key rows, which are enough for the norms of blocks."""

    @classmethod
    def of(cls, name: str, q: Tensor, k: Tensor, *, epsilon: float) -> "Instance":
        found = leverage(q.double(), k.double(), epsilon)
        values, vectors = torch.linalg.eigh(completion(q, k))
        keep = values > SMALL * found.lam
        rows = vectors[:, keep] * values[keep].sqrt()
        halves = tuple(torch.linalg.qr(part, mode="r").R for part in (rows[: len(q)], rows[len(q) :]))
        return cls(
            name=name,
            epsilon=epsilon,
            tokens=len(rows),
            lam=float(found.lam),
            dimension=float(found.dimension),
            over_beta=float(len(rows) * found.scores.max()),
            rows=rows,
            halves=(halves[0], halves[1]),
        )

    def enough(self, delta: float) -> int:
        """Return the theorem's number of landmarks; its 4n is twice `tokens`."""
        return math.ceil(56 / 3 * self.over_beta * math.log(2 * self.tokens / delta))

    def errors(self, d: int, draws: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return ‖C̃ − C‖/λ and ‖C̃̄ − C̄‖/λ for `draws` samples of d landmarks."""
        outer, inner = [], []
        tau = SMALL * self.lam
        spread = self.rows.square().sum(0).sqrt()  # B's columns are orthogonal: BᵀB = diag(spread²)
        for part in sample_counts(draws, self.tokens, d, source).split(50):
            gram = (self.rows.mT * (part > 0).double()[:, None, :]) @ self.rows
            gram.diagonal(dim1=-2, dim2=-1).add_(tau)
            left = tau * torch.cholesky_inverse(torch.linalg.cholesky(gram))
            outer.append(torch.linalg.eigvalsh(spread[:, None] * left * spread)[:, -1] + tau)
            block = self.halves[0] @ left @ self.halves[1].mT
            inner.append(torch.linalg.eigvalsh(block @ block.mT)[:, -1].clamp_min(0).sqrt())
        return torch.cat(inner) / self.lam, torch.cat(outer) / self.lam


@lru_cache(maxsize=2)
def instances(seed: int) -> tuple[Instance, ...]:
    """Return inputs with few directions, for which the theorem says something, and one with many."""
    source, p = generator(seed, ID, "inputs"), 16

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=source)

    found = []
    centres = 3 * normal(3, p)
    which = torch.arange(512) % 3
    groups = [centres[which] + 0.05 * normal(512, p) for _ in range(2)]
    found.append(Instance.of("clusters, n = 512", *groups, epsilon=0.3))
    small = 0.2 * normal(256, p), 0.2 * normal(256, p)
    found += [Instance.of(f"small norms, n = 256, ε = {e:g}", *small, epsilon=e) for e in (0.5, 0.1)]
    time = torch.linspace(0, math.pi, 384, dtype=torch.float64)[:, None]
    path = 1.2 * torch.cat([time.cos(), time.sin(), torch.zeros(384, p - 2, dtype=torch.float64)], 1)
    found.append(
        Instance.of("moving sequence, n = 384", path + 0.02 * normal(384, p), path + 0.02 * normal(384, p), epsilon=0.5)
    )
    found.append(Instance.of("spread out, n = 64", normal(64, p), normal(64, p), epsilon=0.3))
    return tuple(found)


def _trained(blocks: Sequence[TrainedBlock]) -> list[Instance]:
    found = []
    for block in blocks:
        q, k = block.queries_and_keys()
        found.append(Instance.of(f"trained {block.name}, n = {q.shape[-2]}", q[0, 0], k[0, 0], epsilon=0.3))
    return found


def cases(draws: int, seed: int, trained: Sequence[TrainedBlock] = ()) -> Iterator[Case]:
    draws = max(40, int(draws * SHARE))
    for instance in [*instances(seed), *_trained(trained)]:
        d = instance.enough(DELTA)
        says_something = d < instance.tokens
        settings = {
            "tokens": instance.tokens, "epsilon": instance.epsilon, "delta": DELTA, "landmarks": d,
            "statistical_dimension": instance.dimension, "beta": instance.dimension / instance.over_beta,
            "says_something": says_something,
        }  # fmt: skip
        inner, outer = instance.errors(d, draws, generator(seed, ID, instance.name))
        failures = int((outer > 1).sum())  # the Loewner order; it implies the other
        yield rate(
            f"theorem's d = {d}, {instance.name}", failures=failures, draws=draws, allowed=DELTA, part="claim",
            **settings, worst_error=float(inner.max()), worst_completion_error=float(outer.max()),
        )  # fmt: skip
        for times in (1, 2):
            few = max(1, math.ceil(times * instance.dimension))
            inner, outer = instance.errors(few, draws, generator(seed, ID, instance.name, times))
            yield rate(
                f"{times} × d_stat = {few}, {instance.name}", failures=int((inner > 1).sum()), draws=draws,
                allowed=DELTA, part="beyond", **{**settings, "landmarks": few}, worst_error=float(inner.max()),
                worst_completion_error=float(outer.max()),
            )  # fmt: skip
            name = f"‖C̃ − C‖ ≤ ½‖C̃̄ − C̄‖, {times} × d_stat = {few}, {instance.name}"
            settings_ = {**settings, "landmarks": few}
            yield compare(name, outer / 2, inner, part="instead", fact="half", **settings_)


def examples() -> list[Example]:
    return []


def chart(draws: int, seed: int) -> Lines:
    """The worst error, relative to what is allowed, against the number of landmarks."""
    count, lines = max(40, draws // 4), []
    for instance in [instances(seed)[i] for i in (0, 2, 3)]:
        top = instance.enough(DELTA)
        numbers = sorted({max(1, round(top * 2.0**-e)) for e in range(9)})
        worst = [
            float(instance.errors(m, count, generator(seed, ID, "chart", instance.name, m))[0].max()) for m in numbers
        ]
        lines.append(Line(name=instance.name.split(",")[0], x=[m / instance.dimension for m in numbers], y=worst))
    low, high = min(line.x[0] for line in lines), max(line.x[-1] for line in lines)
    lines.append(Line(name="allowed", x=[low, high], y=[1.0, 1.0], dashed=True))
    return Lines(
        title="Theorem 2: landmarks and error",
        x="landmarks / d_stat", y="worst ‖C̃ − C‖ / λ", log_x=True, log_y=True, lines=lines,
        caption=f"The worst of {count} draws. Each line ends at the number of landmarks that the theorem asks for.",
    )  # fmt: skip


def summary(cases: Sequence[Case], lines: Lines) -> list[str]:
    proved = [c for c in cases if c.part == "claim"]
    real = [c for c in proved if c.settings["says_something"]]
    found = [
        f"{c.name}: below 2n = {c.settings['tokens']}, so that the theorem says something; d_stat = "
        f"{c.settings['statistical_dimension']:.2f}, β = {c.settings['beta']:.2f}; {c.failures} of {c.draws} draws "
        f"failed, worst error {c.settings['worst_error']:.2g} λ."
        for c in real
    ]  # fmt: skip
    empty = [c for c in proved if not c.settings["says_something"]]
    found += [
        f"{c.name}: more than 2n = {c.settings['tokens']}, so that the theorem says nothing (d_stat = "
        f"{c.settings['statistical_dimension']:.1f})."
        for c in empty
    ]
    halves = [c for c in cases if c.part == "instead"]
    found.append(f"‖C̃ − C‖ above half of ‖C̃̄ − C̄‖: {share(halves)} draws.")
    for times in (1, 2):
        some = [c for c in cases if c.name.startswith(f"{times} × ")]
        rates = "; ".join(f"{c.name.split(', ', 1)[1]} {c.measured:.0%}" for c in some)
        found.append(f"With {times} × d_stat landmarks, the share of draws with an error above λ: {rates}.")
    return found
