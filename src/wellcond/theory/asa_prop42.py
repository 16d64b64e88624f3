"""Proposition 4.2 of Always Skip Attention: κ(XM + X) ≪ κ(XM) for positive semi-definite M = W_Q W_Kᵀ XᵀX W_V.

    for case in cases(400, seed=0): …        # M tied to X, independent of X, whitening X; not PSD; heads; softmax
    with_skip_bound(x, m)                    # κ(X)(1 + λmax)/(1 + λmin): what PSD does give

The proof compares two upper bounds, which says nothing about the two values. κ(M + I) ≤ κ(M) is right for PSD M;
κ(X(M + I)) ≤ κ(XM) is not, for M may undo X. And a PSD M is a rare thing: independent weights never give one.
"≪" is read as: at least ten times smaller.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wellcond.theory.asa_prop41 import mixing
from wellcond.theory.draws import WEIGHTS, generator, kappa, softmax_attention, tokens, weights
from wellcond.theory.findings import Case, Example, Line, Lines, compare
from wellcond.theory.statement import Statement, median, share
from wellcond.theory.trained import TrainedBlock

__all__ = ["STATEMENT", "cases", "chart", "examples", "semi_definite", "summary", "with_skip_bound"]

ID = "asa-prop42"
D, HEADS = 32, 4
LENGTHS = (16, 32, 64)
MUCH = 10.0
FAMILIES = ("tied", "independent", "whitening")
SIZES = tuple(10.0**e for e in (-3, -2, -1, -0.5, 0, 0.5, 1, 2, 3))

STATEMENT = Statement(
    id=ID,
    title="Proposition 4.2: the skip brings the condition number down",
    plain=(
        "The skip usually lowers the condition number, often by orders of magnitude, but not because M is positive "
        "semi-definite: there are such M for which the skip makes it worse, and M that are not for which it helps. "
        "What decides is how large the branch is beside the skip, and whether the branch already undoes the input's "
        "condition number."
    ),
    claim="κ(XM + X) ≪ κ(XM) where M = W_Q W_Kᵀ XᵀX W_V is positive semi-definite.",
    instead=(
        "For symmetric PSD M: κ(M + I) = (1 + λmax)/(1 + λmin) ≤ κ(M), hence κ(XM + X) ≤ κ(X)(1 + λmax)/(1 + λmin). "
        "If moreover M has the right singular vectors of X and its eigenvalues grow with σ (M = c·XᵀX does), then "
        "κ(XM + X) ≤ κ(XM), smaller by the factor (1 + 1/λmin)/(1 + 1/λmax), which is large only if λmin is far below "
        "1: scale decides. For any M with ‖M‖ < 1: κ(XM + X) ≤ κ(X)(1 + ‖M‖)/(1 − ‖M‖): a skip protects as long as "
        "the branch is small. PSD is neither sufficient nor needed."
    ),
    tested=(
        f"d = {D}, n = {', '.join(map(str, LENGTHS))}, ‖M‖ = 1 (and 10⁻³ to 10³ in the chart). PSD M three ways: tied "
        "(W_V = W_K W_Qᵀ, so that M = A XᵀX Aᵀ), independent of X (a Wishart matrix), whitening ((XᵀX)^(−1/2)). Not "
        f"PSD: independent Gaussian, uniform and orthogonal weights, one head and {HEADS}; softmax with its skip. For "
        "trained blocks, M is divided by n√p."
    ),
    not_tested="Training itself: the proposition speaks of one map, not of what gradient descent makes of it.",
)  # fmt: skip


def semi_definite(family: str, x: Tensor, source: torch.Generator, kind: str = "gaussian") -> Tensor:
    """A symmetric PSD M of norm 1 for each X, (b, d, d). Each has the form W_Q W_Kᵀ XᵀX W_V for some weights.

    Raises ValueError for an unknown family.
    """
    draws, n, d = x.shape
    if family == "tied":
        a = weights(kind, draws, d, d, source) @ weights(kind, draws, d, d, source).mT
        half = x @ a.mT
    elif family == "independent":
        half = weights("gaussian", draws, max(n, d), d, source)
    elif family == "whitening":
        _, s, vt = torch.linalg.svd(x, full_matrices=False)
        half = s.rsqrt()[..., None] * vt
    else:
        raise ValueError(f"unknown family {family!r}; there are {', '.join(FAMILIES)}")
    m = half.mT @ half
    return _scaled(m, 1.0)


def _scaled(m: Tensor, norm: float) -> Tensor:
    return m * (norm / torch.linalg.matrix_norm(m, ord=2))[:, None, None]


def with_skip_bound(x: Tensor, m: Tensor) -> Tensor:
    """κ(X)(1 + λmax)/(1 + λmin) for symmetric PSD M."""
    values = torch.linalg.eigvalsh(m).clamp_min(0)
    return kappa(x) * (1 + values[..., -1]) / (1 + values[..., 0])


def cases(draws: int, seed: int, trained: Sequence[TrainedBlock] = ()) -> Iterator[Case]:
    for n in LENGTHS:
        for family in FAMILIES:
            source = generator(seed, ID, family, n)
            x = tokens(draws, n, D, source)
            m = semi_definite(family, x, source)
            settings = {"family": family, "n": n, "d": D}
            name = f"{family} M, n = {n}"
            yield from _smaller(name, x @ m, x, part="claim", **settings)
            skip = kappa(x @ m + x)
            yield compare(f"κ(X)(1 + λmax)/(1 + λmin), {name}", with_skip_bound(x, m), skip, part="instead", **settings)
            if family != "tied" or n >= D:  # else κ(M) is infinite and there is nothing to compare
                plus = m + torch.eye(D, dtype=m.dtype)
                yield compare(f"κ(M + I) ≤ κ(M), {name}", kappa(m), kappa(plus), part="instead", **settings)
        x = tokens(draws, n, D, generator(seed, ID, "aligned", n))
        m = _scaled(x.mT @ x, 1.0)
        name = f"M = c·XᵀX, n = {n}"
        yield compare(
            f"κ(XM + X) ≤ κ(XM), {name}", kappa(x @ m), kappa(x @ m + x), part="instead", family="aligned", n=n, d=D
        )
        for kind in WEIGHTS:
            source = generator(seed, ID, kind, n)
            x = tokens(draws, n, D, source)
            w = [weights(kind, draws, D, D, source) for _ in range(3)]
            for heads in (1, HEADS):
                m = _scaled(mixing(x, *w, heads=heads), 1.0)
                name = f"not PSD, {kind}, {heads} head{'s' * (heads > 1)}, n = {n}"
                yield from _smaller(name, x @ m, x, part="beyond", weights=kind, heads=heads, n=n, d=D)
            small = _scaled(m, 0.5)
            yield compare(
                f"κ(X)(1 + ‖M‖)/(1 − ‖M‖), {name}", kappa(x) * 3, kappa(x @ small + x), part="instead",
                weights=kind, n=n, d=D,
            )  # fmt: skip
            branch = softmax_attention(x, *w, heads=HEADS)
            name = f"softmax, {kind}, {HEADS} heads, n = {n}"
            yield from _smaller(name, branch, x, part="beyond", weights=kind, heads=HEADS, n=n, d=D)
    for block in trained:
        x, *w = block.attention()
        m = mixing(x, *w, heads=block.heads) * (x.shape[-1] / block.heads) ** -0.5 / x.shape[1]
        settings = {"weights": "trained", "heads": block.heads, "n": x.shape[1], "d": x.shape[2]}
        yield from _smaller(f"linear, trained {block.name}", x @ m, x, part="beyond", **settings)
        branch = softmax_attention(x, *w, heads=block.heads)
        yield from _smaller(f"softmax, trained {block.name}", branch, x, part="beyond", **settings)


def _smaller(name: str, branch: Tensor, x: Tensor, *, part, **settings) -> Iterator[Case]:
    """Is κ with the skip smaller, and is it much smaller?"""
    without, skip = kappa(branch), kappa(branch + x)
    yield compare(f"smaller: {name}", without, skip, part=part, strict=True, **settings)
    yield compare(f"ten times smaller: {name}", without / MUCH, skip, part=part, **settings)


def examples() -> list[Example]:
    a = 100.0
    x = torch.diag(torch.tensor([a, 1.0], dtype=torch.float64))
    m = torch.diag(torch.tensor([1 / a, 1.0], dtype=torch.float64))
    eye = torch.eye(2, dtype=torch.float64)
    minus = torch.diag(torch.tensor([-0.99, 1.0], dtype=torch.float64))
    scale = 1e4
    wide = torch.diag(torch.tensor([10.0, 0.1], dtype=torch.float64))
    large = scale * wide.mT @ wide
    paper = (10.0**2 + 1) / (0.1**2 + 1)
    return [
        Example(
            title="A PSD M for which the skip makes it fifty times worse",
            text=(
                f"X = diag({a:g}, 1) and M = diag(1/{a:g}, 1), which is W_Q XᵀX with W_Q = diag({a:g}⁻³, 1): the "
                "attention whitens X, XM = I. Adding X back brings its condition number back. Both upper bounds of "
                "the proof are in order; the values are not."
            ),
            matrices={"X": x.tolist(), "M": m.tolist()},
            bound=float(kappa(x @ m)),
            measured=float(kappa(x @ m + x)),
        ),
        Example(
            title="An M that is not PSD: the skip cancels",
            text="X = I and M = diag(−0.99, 1): XM is nearly perfectly conditioned, XM + X = diag(0.01, 2) is not.",
            matrices={"X": eye.tolist(), "M": minus.tolist()},
            bound=float(kappa(eye @ minus)),
            measured=float(kappa(eye @ minus + eye)),
        ),
        Example(
            title="Eq. 17 of the proof depends on a scale that C cannot see",
            text=(
                "Eq. 17 says κ(M + I) ≤ (C·σmax² + 1)/(σmin² + 1). With X = diag(10, 0.1) and weights that are "
                f"multiples of I, C = 1 and M = c·XᵀX; for c = {scale:g} the identity is too small to matter, and κ(M "
                "+ I) is far above the bound."
            ),
            matrices={"X": wide.tolist(), "M": large.tolist()},
            bound=paper,
            measured=float(kappa(large + eye)),
        ),
    ]  # fmt: skip


def chart(draws: int, seed: int) -> Lines:
    """κ(XM + X)/κ(XM) against the size of M."""
    count, n = max(40, draws // 4), LENGTHS[-1]
    source = generator(seed, ID, "chart")
    x = tokens(count, n, D, source)
    w = [weights("gaussian", count, D, D, source) for _ in range(3)]
    families = {
        "PSD, tied": semi_definite("tied", x, source),
        "PSD, M = c·XᵀX": _scaled(x.mT @ x, 1.0),
        "PSD, whitening": semi_definite("whitening", x, source),
        "not PSD": _scaled(mixing(x, *w, heads=1), 1.0),
    }
    lines = [
        Line(name=name, x=list(SIZES), y=[median(kappa(x @ (c * m) + x) / kappa(x @ m)) for c in SIZES])
        for name, m in families.items()
    ]
    lines.append(Line(name="no change", x=[SIZES[0], SIZES[-1]], y=[1.0, 1.0], dashed=True))
    return Lines(
        title="What the skip does to the condition number",
        x="‖M‖", y="κ(XM + X) / κ(XM)", log_x=True, log_y=True, lines=lines,
        caption=f"Median over draws, n = {n}, d = {D}. Below 1 the skip helps. Where M is large the skip is too "
        "small to matter.",
    )  # fmt: skip


def summary(cases: Sequence[Case], lines: Lines) -> list[str]:
    def pick(start: str, **wanted) -> list[Case]:
        return [c for c in cases if c.name.startswith(start) and wanted.items() <= c.settings.items()]

    found = []
    for family in FAMILIES:
        smaller, much = pick("smaller", family=family), pick("ten times", family=family)
        found.append(
            f"PSD, {family}: the skip does not lower κ in {share(smaller)} draws, and not tenfold in {share(much)}."
        )
    loose = [c for c in cases if "not PSD" in c.name]
    found.append(
        f"Independent weights, M not PSD: not lower in {share([c for c in loose if c.name.startswith('smaller')])} "
        f"draws, not tenfold in {share([c for c in loose if c.name.startswith('ten')])}; softmax: not lower in "
        f"{share(pick('smaller: softmax, '))}."
    )
    ends = {line.name: (line.y[0], line.y[-1]) for line in lines.lines}
    found.append(
        f"Scale decides: with M = c·XᵀX the median ratio goes from {ends['PSD, M = c·XᵀX'][0]:.2g} at ‖M‖ = 0.001 to "
        f"{ends['PSD, M = c·XᵀX'][1]:.2g} at ‖M‖ = 1000."
    )
    trained = pick("smaller", weights="trained")
    if trained:
        much = pick("ten times", weights="trained")
        found.append(f"Trained blocks: not lower for {share(trained)} images, not tenfold for {share(much)}.")
    return found
