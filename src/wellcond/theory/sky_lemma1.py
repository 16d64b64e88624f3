"""Lemma 1 of Skyformer: SM(q, k) = exp(q·k/√p) is a positive semi-definite kernel, since SM(Q, Q) = D^½ κ(Q, Q) D^½.

    a = softmax_kernel(q, k)                  # exp(QKᵀ/√p), (…, n, m): softmax attention before its rows are normalised
    gaussian_kernel(q, k), sizes(q)           # κ, exp(−‖q_i − k_j‖²/(2√p)), and D's diagonal, exp(‖q_i‖²/√p)

This is why Skyformer's approximation can be used for softmax attention too: SM over queries and keys together is
positive semi-definite, and SM(Q, K) is a block of it. SM(Q, K) itself is not, nor is it symmetric.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wellcond.theory.draws import generator, kappa
from wellcond.theory.findings import Case, Example, Fact, Line, Lines, Statement, compare, median, share
from wellcond.theory.leverage import completion
from wellcond.theory.trained import TrainedBlock

__all__ = [
    "STATEMENT",
    "cases",
    "chart",
    "examples",
    "gaussian_kernel",
    "sizes",
    "softmax_kernel",
    "summary",
]

ID = "sky-lemma1"
EXACT = 1e-9
SHAPES = ((8, 2), (32, 16), (32, 64))  # n queries, as many keys, and p
SPREADS = (0.3, 1.0, 2.0)
CHART_SPREADS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)

STATEMENT = Statement(
    id=ID,
    title="Lemma 1: softmax's scores are a positive semi-definite kernel",
    plain=(
        "True, and simple: the scores before normalisation are a Gaussian kernel between two diagonal matrices. For "
        "different tokens it is positive definite. It speaks of one set of tokens, or of queries and keys together; "
        "the matrix of queries against keys need not be positive semi-definite. And those diagonal matrices are what "
        "makes softmax's scores ill-conditioned where the tokens' norms differ."
    ),
    claim="SM(q, k) = exp(q·k/√p) is a positive semi-definite kernel: SM(Q, Q) = D^(1/2) κ(Q/p^(1/4), Q/p^(1/4)) "
    "D^(1/2) with D = diag(exp(‖q_i‖²/√p)) and the Gaussian kernel κ(x, y) = exp(−‖x − y‖²/2).",
    instead=(
        Fact(
            key="kernel",
            says="The lemma holds as it stands; and SM(Q, Q) is positive definite if and only if all tokens differ.",
            proof="q·k = ½(‖q‖² + ‖k‖² − ‖q − k‖²) gives the identity. Σ_ij c_i c_j exp(q_i·q_j/√p) = Σ_m ‖Σ_i c_i "
            "q_i^(⊗m)‖²/(m!·p^(m/2)) ≥ 0, by the series of exp. If it is 0, Σ_i c_i f(q_i) = 0 for every polynomial "
            "f, and a polynomial that is 1 at one token and 0 at the others gives c = 0. Two equal tokens are two "
            "equal rows.",
        ),
        Fact(
            key="constants",
            says="With explicit constants: every eigenvalue of SM(Q, Q) is that of κ(Q, Q) times a number between "
            "min D and max D; so κ₂(SM) ≤ exp((max‖q‖² − min‖q‖²)/√p)·κ₂(κ(Q, Q)), κ₂ being the condition number.",
            proof="This is Ostrowski's theorem for D^(1/2)KD^(1/2): by Courant and Fischer the i-th largest "
            "eigenvalue is the maximum over i-dimensional subspaces of the minimum of vᵀD^(1/2)KD^(1/2)v/vᵀv; put w "
            "= D^(1/2)v, and vᵀv = wᵀD⁻¹w lies between wᵀw/max D and wᵀw/min D.",
        ),
        Fact(
            key="block",
            says="SM(Q, K) is the upper right block of SM over queries and keys together, which is positive "
            "semi-definite; by itself it need not be.",
            proof="The first is the definition. For the second: p = 1, Q = (1, −1)ᵀ, K = −Q gives [[1/e, e], [e, "
            "1/e]], whose determinant is negative.",
        ),
        Fact(says="κ₂ of softmax's scores exceeds that of the Gaussian kernel, the more the larger the tokens."),
    ),
    tested=(
        f"n × p = {', '.join(f'{n} × {p}' for n, p in SHAPES)}, as many keys as queries, Gaussian tokens of spread "
        f"{', '.join(map(str, SPREADS))}; queries and keys of trained blocks; float64. Semi-definite means here: no "
        f"eigenvalue of the scores, scaled to a diagonal of ones, below −{EXACT:g}; the sign of an eigenvalue does not "
        "change by such a scaling."
    ),
    not_tested="Scores beyond exp(700), which float64 does not hold; low precision.",
)  # fmt: skip


def softmax_kernel(q: Tensor, k: Tensor) -> Tensor:
    """exp(QKᵀ/√p) of (…, n, p) and (…, m, p)."""
    return torch.exp(q @ k.mT * q.shape[-1] ** -0.5)


def gaussian_kernel(q: Tensor, k: Tensor) -> Tensor:
    """exp(−‖q_i − k_j‖²/(2√p)) of (…, n, p) and (…, m, p)."""
    return completion(q, k)[..., : q.shape[-2], q.shape[-2] :]


def sizes(q: Tensor) -> Tensor:
    """exp(‖q_i‖²/√p), (…, n): the diagonal of D."""
    return torch.exp(q.square().sum(-1) * q.shape[-1] ** -0.5)


def cases(draws: int, seed: int, trained: Sequence[TrainedBlock] = ()) -> Iterator[Case]:
    for n, p in SHAPES:
        for spread in SPREADS:
            source = generator(seed, ID, n, p, spread)
            q, k = (spread * torch.randn(draws, n, p, dtype=torch.float64, generator=source) for _ in range(2))
            yield from _judge(f"{n} × {p}, spread {spread:g}", q, k, n=n, p=p, spread=spread)
    for block in trained:
        q, k = (part.flatten(0, 1) for part in block.queries_and_keys())
        yield from _judge(f"trained {block.name}", q, k, n=q.shape[-2], p=q.shape[-1])


def _judge(name: str, q: Tensor, k: Tensor, **settings) -> Iterator[Case]:
    both = torch.cat([q, k], -2)
    scores, d = softmax_kernel(both, both), sizes(both)
    root = scores.diagonal(dim1=-2, dim2=-1).rsqrt()
    scaled = root[..., :, None] * scores * root[..., None, :]  # from SM alone; its diagonal is 1
    one = torch.ones(len(q), dtype=torch.float64)
    low = torch.linalg.eigvalsh((scaled + scaled.mT) / 2)[..., 0]
    yield compare(f"1 − λmin ≤ 1, {name}", one, 1 - low, part="claim", slack=EXACT, fact="kernel", **settings)
    gaussian = completion(q, k)
    rebuilt = d.sqrt()[..., :, None] * gaussian * d.sqrt()[..., None, :]
    away = (scores / rebuilt - 1).abs().flatten(-2).amax(-1)
    yield compare(f"SM = D^½ κ D^½, {name}", one * EXACT, away, part="claim", fact="kernel", **settings)
    top, bottom = d.amax(-1)[:, None], d.amin(-1)[:, None]
    values, known = torch.linalg.eigvalsh(scores), torch.linalg.eigvalsh(gaussian)
    largest, known_largest = values[..., -1:], known[..., -1:]
    # Relative to the largest: rounding moves an eigenvalue by eps times that, and nothing below it can be compared.
    noise = 1e-13 * values.shape[-1]
    upper, lower = top * known_largest / largest, bottom * known_largest / largest
    values, known = values / largest, known / known_largest
    above = (values.clamp_min(0) / (upper * (known + noise) + noise)).amax(-1)
    below = (lower * known.clamp_min(0) / (values + (1 + lower) * noise)).amax(-1)
    yield compare(f"λ_i(SM) ≤ max D·λ_i(κ), {name}", one, above, part="instead", fact="constants", **settings)
    yield compare(f"min D·λ_i(κ) ≤ λ_i(SM), {name}", one, below, part="instead", fact="constants", **settings)
    apart = softmax_kernel(q, k)
    block = (scores[..., : q.shape[-2], q.shape[-2] :] / apart - 1).abs().flatten(-2).amax(-1)
    yield compare(f"SM(Q, K) is a block, {name}", one * EXACT, block, part="instead", fact="block", **settings)
    root_q, root_k = sizes(q).rsqrt(), sizes(k).rsqrt()
    balanced = root_q[..., :, None] * apart * root_k[..., None, :]
    least = torch.linalg.eigvalsh((balanced + balanced.mT) / 2)[..., 0]
    yield compare(f"SM(Q, K) alone: 1 − λmin ≤ 1, {name}", one, 1 - least, part="beyond", slack=EXACT, **settings)


def examples() -> list[Example]:
    q = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    apart = softmax_kernel(q, -q)
    return [
        Example(
            title="Queries against keys: not positive semi-definite",
            text="p = 1, Q = (1, −1)ᵀ, K = −Q: the lemma speaks of SM(Q, Q), and SM(Q, K) has the eigenvalue 1/e − "
            "e. Shown is the smallest eigenvalue, against 0.",
            matrices={"Q": q.tolist(), "K": (-q).tolist(), "SM(Q, K)": apart.tolist()},
            bound=0.0,
            measured=float(torch.linalg.eigvalsh(apart)[0]),
        )
    ]  # fmt: skip


def chart(draws: int, seed: int) -> Lines:
    """Condition numbers against the tokens' spread."""
    count, (n, p) = max(40, draws // 4), SHAPES[-1]
    soft, gaussian, bound = [], [], []
    for spread in CHART_SPREADS:
        source = generator(seed, ID, "chart", spread)
        q = spread * torch.randn(count, n, p, dtype=torch.float64, generator=source)
        d, of_gaussian = sizes(q), kappa(gaussian_kernel(q, q))
        soft.append(median(kappa(softmax_kernel(q, q))))
        gaussian.append(median(of_gaussian))
        bound.append(median(d.amax(-1) / d.amin(-1) * of_gaussian))
    spreads = list(CHART_SPREADS)
    return Lines(
        title="Lemma 1: the scores of softmax, and the Gaussian kernel inside",
        x="spread of the tokens", y="condition number", log_y=True,
        lines=[
            Line(name="SM(Q, Q)", x=spreads, y=soft),
            Line(name="κ(Q, Q)", x=spreads, y=gaussian),
            Line(name="max D/min D · κ(Q, Q)", x=spreads, y=bound, dashed=True),
        ],
        caption=f"Median over {count} draws, n = {n}, p = {p}. The larger the tokens, the better the Gaussian kernel's "
        "condition, and the worse that of softmax's scores.",
    )  # fmt: skip


def summary(cases: Sequence[Case], lines: Lines) -> list[str]:
    def pick(start: str) -> list[Case]:
        return [c for c in cases if c.name.startswith(start)]

    soft, gaussian, bound = lines.lines
    return [
        f"An eigenvalue below 0 (beyond rounding): {share(pick('1 − λmin'))} draws; the identity violated: "
        f"{share(pick('SM = D'))}.",
        f"Eigenvalues outside min D to max D times those of the Gaussian kernel: {share(pick('λ_i(SM)'))} and "
        f"{share(pick('min D'))} draws.",
        f"SM(Q, K) alone, its rows and columns scaled as kernelized attention scales them, has a negative direction in "
        f"{share(pick('SM(Q, K) alone'))} draws.",
        f"At spread {soft.x[-1]:g} the median condition number of SM(Q, Q) is {soft.y[-1]:.3g}, that of the Gaussian "
        f"kernel {gaussian.y[-1]:.3g} (bound {bound.y[-1]:.3g}); at {soft.x[0]:g} it is {soft.y[0]:.3g} and "
        f"{gaussian.y[0]:.3g}.",
    ]
