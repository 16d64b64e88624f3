"""Lemma 3 of Skyformer: N = D^(−½)(M + γI)D^(−½), D = diag((M + γI)1), has singular values in (0, 1), ‖I − N‖ < 1.

    n = normalized(kernel_of_landmarks, gamma=0.1)
    torch.linalg.eigvalsh(n)                          # the last is 1, not below it

Corrected: the largest eigenvalue is exactly 1, with the eigenvector D^½1, since N D^½1 = D^(−½)(M + γI)1 = D^½1. The
spectrum lies in [γ/max D, 1], and ‖I − N‖ = 1 − λmin < 1, which the iteration needs, remains true. The proof also needs
M without negative entries, which holds for the Gaussian kernel, but not for every positive semi-definite one.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wellcond.numerics.inverse import invert_by_iteration, transposed_start
from wellcond.theory.draws import generator
from wellcond.theory.findings import Case, Example, Fact, Line, Lines, Statement, compare, share
from wellcond.theory.leverage import completion
from wellcond.theory.trained import TrainedBlock

__all__ = ["STATEMENT", "cases", "chart", "examples", "normalized", "sampled_kernel", "summary"]

ID = "sky-lemma3"
EXACT = 1e-12
LANDMARKS = (4, 16, 64)
GAMMAS = (1e-3, 0.1, 1.0)
SPREADS = (0.1, 0.5, 2.0)
N, P = 64, 16

STATEMENT = Statement(
    id=ID,
    title="Lemma 3: the matrix that the iteration inverts",
    plain=(
        "The largest singular value is 1, always, not below 1. What an iteration that starts from I needs, ‖I − N‖ < "
        "1, is true. It needs γ > 0 and a kernel without negative values."
    ),
    claim="All singular values of N = D_M^(−1/2)(M + γI)D_M^(−1/2), M = SᵀC̄S, lie in (0, 1), and ‖I − N‖ < 1.",
    instead=(
        Fact(
            key="spectrum",
            says="For γ > 0 and M ≥ 0 entry by entry, the spectrum of N lies in [γ/max D_M, 1] and its largest "
            "eigenvalue is exactly 1, with the eigenvector D_M^(1/2)1; so ‖I − N‖ = 1 − λmin < 1.",
            proof="With W = M + γI: N D_M^(1/2)1 = D_M^(−1/2)W1 = D_M^(1/2)1. No entry of W is negative, so xᵀ(D_M − "
            "W)x = ½ΣW_ij(x_i − x_j)² ≥ 0, and N ⪯ I. M is PSD, so N ⪰ γD_M⁻¹ ⪰ (γ/max D_M)·I.",
        ),
        Fact(
            key="start",
            says="Where N is singular (γ = 0 and a landmark drawn twice), it depends on its start whether the "
            "iteration Z ← ¼Z(13I − NZ(15I − NZ(7I − NZ))) converges: from Z = I it diverges; from Z = Nᵀ/c, the "
            "start of the authors' code, it converges to the pseudo-inverse, in exact arithmetic.",
            proof="Both starts are polynomials in the symmetric N, and so is every Z: an eigenvector of N with "
            "eigenvalue 0 keeps NZ at 0, and its eigenvalue of Z is multiplied by 13/4 at each step. From I it is "
            "(13/4)^t; from N/c it is 0 and stays 0, while x = λ²/c ∈ (0, 1] of every other eigenvector goes to 1, "
            "since 1 − x becomes (1 − x)³(4 − x)/4.",
        ),
    ),
    tested=f"{', '.join(map(str, LANDMARKS))} landmarks drawn with replacement from {N} queries and {N} keys of {P} "
    f"dimensions, of spread {', '.join(map(str, SPREADS))}; γ = {', '.join(map(str, GAMMAS))}; S scaled as "
    "Definition 1 has it; float64.",
    not_tested="Low precision, where λmin below the rounding decides whether the iteration converges.",
)  # fmt: skip


def normalized(m: Tensor, gamma: float) -> Tensor:
    """D^(−1/2)(M + γI)D^(−1/2) of M (…, d, d)."""
    w = m + gamma * torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    root = w.sum(-1).rsqrt()
    return root[..., :, None] * w * root[..., None, :]


def sampled_kernel(draws: int, landmarks: int, spread: float, source: torch.Generator) -> Tensor:
    """Return SᵀC̄S for new queries, keys and landmarks in each draw, with the factor 1/d of Definition 1."""
    x = spread * torch.randn(draws, 2 * N, P, dtype=torch.float64, generator=source)
    chosen = torch.randint(0, 2 * N, (draws, landmarks), generator=source)
    rows = x.gather(1, chosen[..., None].expand(-1, -1, P))
    kernel = completion(rows, rows)[..., :landmarks, :landmarks].clone()
    kernel[chosen[:, :, None] == chosen[:, None, :]] = 1.0  # a landmark drawn twice is bitwise the same point
    return kernel / landmarks


def cases(draws: int, seed: int, trained: Sequence[TrainedBlock] = ()) -> Iterator[Case]:
    for d in LANDMARKS:
        for spread in SPREADS:
            m = sampled_kernel(draws, d, spread, generator(seed, ID, d, spread))
            for gamma in GAMMAS:
                name = f"{d} landmarks, spread {spread:g}, γ = {gamma:g}"
                yield from _judge(name, m, gamma, landmarks=d, spread=spread)
    for block in trained:
        q, k = block.queries_and_keys()
        d = 16
        rows = torch.cat([q, k], -2).flatten(0, 1)
        chosen = torch.randint(0, rows.shape[1], (len(rows), d), generator=generator(seed, ID, block.name))
        rows = rows.gather(1, chosen[..., None].expand(-1, -1, rows.shape[-1]))
        m = completion(rows, rows)[..., :d, :d] / d
        yield from _judge(f"{d} landmarks, trained {block.name}, γ = 0.1", m, 0.1, landmarks=d, trained=True)

    yield from _starts(seed)


def _starts(seed: int) -> Iterator[Case]:
    """Check γ = 0 with every landmark twice: six steps from I, and from Nᵀ/c."""
    rows = 0.7 * torch.randn(20, 4, P, dtype=torch.float64, generator=generator(seed, ID, "twice"))
    n = normalized(completion(rows, rows), 0.0)  # queries and keys are the same points: each landmark appears twice
    inverse = torch.linalg.pinv(n, rtol=1e-9, hermitian=True)
    # In exact arithmetic the singular directions stay zero; here they start as rounding errors and reach 1e-13 at most.
    settled = invert_by_iteration(n, num_iterations=6, start=transposed_start(n))
    away = torch.linalg.matrix_norm(settled - inverse, ord=2) / torch.linalg.matrix_norm(inverse, ord=2)
    name = "‖Z − N⁺‖ ≤ 10⁻⁶‖N⁺‖ after six steps from Nᵀ/c, landmarks drawn twice, γ = 0"
    yield compare(name, torch.full_like(away, 1e-6), away, part="instead", fact="start", gamma=0.0)
    norms = torch.linalg.matrix_norm(invert_by_iteration(n, num_iterations=6), ord=2)
    name = "(13/4)⁶ ≤ ‖Z‖ after six steps from I, landmarks drawn twice, γ = 0"
    yield compare(name, norms, torch.full_like(norms, 3.25**6), part="instead", fact="start", gamma=0.0)


def _judge(name: str, m: Tensor, gamma: float, **settings) -> Iterator[Case]:
    settings["gamma"] = gamma
    values = torch.linalg.eigvalsh(normalized(m, gamma))
    low, high = values[..., 0], values[..., -1]
    one = torch.ones_like(high)
    # Rounding hides whether an interval is open or closed; 1 − 1e-12 is below 1 by thousands of rounding errors.
    yield compare(f"λmax < 1, {name}", one - EXACT, high, part="claim", slack=0.0, **settings)
    yield compare(f"‖I − N‖ < 1, {name}", one, (1 - values).abs().amax(-1), part="claim", strict=True, **settings)
    yield compare(f"λmax = 1, {name}", one * EXACT, (high - 1).abs(), part="instead", fact="spectrum", **settings)
    floor = gamma / (m.sum(-1).amax(-1) + gamma)
    yield compare(f"γ/max D ≤ λmin, {name}", low, floor, part="instead", fact="spectrum", **settings)


def examples() -> list[Example]:
    ones = torch.ones(2, 2, dtype=torch.float64)
    negative = torch.tensor([[1, -0.9], [-0.9, 1]], dtype=torch.float64)
    top = [float(torch.linalg.eigvalsh(normalized(m, gamma))[-1]) for m, gamma in ((ones, 0.5), (negative, 0.1))]
    zero = float((1 - torch.linalg.eigvalsh(normalized(ones, 0.0))).abs().amax())
    return [
        Example(
            title="Two equal landmarks: the largest eigenvalue is 1, not below",
            text="M is all ones and γ = 0.5: D = 2.5·I and N = (M + γI)/2.5, with eigenvalues 0.2 and 1. The bound "
            "shown is the open interval's end.",
            matrices={"M": ones.tolist()},
            bound=1.0,
            measured=top[0],
        ),
        Example(
            title="γ = 0 with a landmark drawn twice: ‖I − N‖ is 1, and from I the iteration does not converge",
            text="The same M without γ: N has the eigenvalues 0 and 1. Started from I, the iteration multiplies the "
            "part of Z that belongs to 0 by 13/4 at each step; started from Nᵀ/c it has no such part, and converges "
            "to the pseudo-inverse. Sampling with replacement draws doubles as soon as there are a few landmarks.",
            matrices={"M": ones.tolist()},
            bound=1.0,
            measured=zero,
        ),
        Example(
            title="A positive semi-definite M with a negative entry",
            text="M = [[1, −0.9], [−0.9, 1]] is positive definite, its row sums are 0.1, and with γ = 0.1 the "
            "eigenvalues of N are 1 and 10: the lemma needs a kernel without negative values, which 'PSD kernel' "
            "does not say.",
            matrices={"M": negative.tolist()},
            bound=1.0,
            measured=top[1],
        ),
    ]  # fmt: skip


def chart(draws: int, seed: int) -> Lines:
    """The ends of the spectrum against γ."""
    gammas = [10.0**e for e in (-4, -3, -2, -1, 0, 1)]
    m = sampled_kernel(max(40, draws // 2), 64, 0.5, generator(seed, ID, "chart"))
    values = [torch.linalg.eigvalsh(normalized(m, gamma)) for gamma in gammas]
    floors = [float((gamma / (m.sum(-1).amax(-1) + gamma)).min()) for gamma in gammas]
    return Lines(
        title="Lemma 3: the spectrum of N",
        x="γ", y="eigenvalue", log_x=True, log_y=True,
        lines=[
            Line(name="λmax", x=gammas, y=[float(v[..., -1].max()) for v in values]),
            Line(name="λmin", x=gammas, y=[float(v[..., 0].min()) for v in values]),
            Line(name="γ / max D", x=gammas, y=floors, dashed=True),
        ],
        caption="64 landmarks, spread 0.5; the largest λmax and the smallest λmin of all draws, and the lower bound.",
    )  # fmt: skip


def summary(cases: Sequence[Case], lines: Lines) -> list[str]:
    def pick(start: str) -> list[Case]:
        return [c for c in cases if c.name.startswith(start)]

    exact, norm = pick("λmax = 1"), pick("‖I − N‖")
    return [
        f"Singular values below 1: refuted in {share(pick('λmax < 1'))} draws. λmax differed from 1 by more than "
        f"{EXACT:g} in {share(exact)}.",
        f"‖I − N‖ < 1: violated in {share(norm)} draws; the least margin was {min(c.margin for c in norm) - 1:.2g}.",
        f"λmin ≥ γ/max D: violated in {share(pick('γ/max D'))} draws.",
    ]
