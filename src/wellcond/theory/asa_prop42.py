"""Proposition 4.2 of Always Skip Attention: κ(XM + X) ≪ κ(XM) for positive semi-definite M = W_Q W_Kᵀ XᵀX W_V.

    for case in cases(400, seed=0): …        # independent entries whose M is PSD; PSD by construction; not PSD; softmax
    with_skip_bound(x, m)                    # κ(X)(1 + λmax)/(1 + λmin): what PSD does guarantee

The paper assumes both independent entries of zero mean and a PSD M. But then a symmetric M has probability zero: M₁₂ −
M₂₁ is a polynomial in the entries, and not the zero polynomial. Read as vᵀMv ≥ 0 for every v, the assumption is met by
some draws, fewer the larger d is. These are the claim (`drawn_semi_definite`); for d = 2 and 3 there are enough of
them. An M that is symmetric by construction, with weights that depend on each other or on X, lies beyond it.

The proof compares two upper bounds, which says nothing about the two values. κ(M + I) ≤ κ(M) holds for symmetric
positive definite M; κ(X(M + I)) ≤ κ(XM) does not, since M may undo X. "≪" is read as: at least ten times smaller.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wellcond.theory.asa_prop41 import mixing
from wellcond.theory.draws import INDEPENDENT, WEIGHTS, generator, kappa, softmax_attention, tokens, weights
from wellcond.theory.findings import Case, Example, Fact, Line, Lines, Part, Statement, compare, median, share
from wellcond.theory.trained import TrainedBlock

__all__ = [
    "STATEMENT",
    "cases",
    "chart",
    "drawn_semi_definite",
    "examples",
    "semi_definite",
    "summary",
    "with_skip_bound",
]

ID = "asa-prop42"
D, HEADS = 32, 4
LENGTHS = (16, 32, 64)
MUCH = 10.0
EXACT = 1e-9  # relative
SMALL = ((2, 2), (4, 2), (64, 2), (64, 3))  # n, d: larger d give almost no PSD draws, and n < d gives none
SPREADS = ("1/√d", "0.02")  # standard deviation of the weights' entries; the second is timm's
MANY = 100  # times as many draws, since only a few are PSD
FAMILIES = ("tied", "independent", "whitening")
SIZES = tuple(10.0**e for e in (-3, -2, -1, -0.5, 0, 0.5, 1, 2, 3))

STATEMENT = Statement(
    id=ID,
    title="Proposition 4.2: the skip brings the condition number down",
    plain=(
        "The skip usually lowers the condition number, often by orders of magnitude, but not because M is positive "
        "semi-definite: there are such M for which the skip makes it worse, and M that are not for which it helps. "
        "What decides is how large the branch is beside the skip, and whether the branch already undoes the input's "
        "condition number. Independent entries, which the proposition assumes too, never give a symmetric M, and "
        "hardly ever one with vᵀMv ≥ 0; where they do, the skip mostly lowers κ, and mostly not tenfold."
    ),
    claim="κ(XM + X) ≪ κ(XM) where X, W_Q, W_K and W_V have independent entries of zero mean and M = W_Q W_Kᵀ XᵀX W_V "
    "is positive semi-definite.",
    instead=(
        Fact(
            key="semi-definite",
            says="For symmetric PSD M: κ(XM + X) ≤ κ(X)(1 + λmax)/(1 + λmin); and κ(M + I) = (1 + λmax)/(1 + λmin) ≤ "
            "κ(M) if M is positive definite.",
            proof="M + I is symmetric with the eigenvalues 1 + λ ≥ 1, so it is square and invertible, and κ(X(M + I)) "
            "≤ κ(X)κ(M + I). For 0 < a ≤ b: (1 + b)/(1 + a) ≤ b/a, since a(1 + b) ≤ b(1 + a).",
        ),
        Fact(
            key="aligned",
            says="If moreover M has the right singular vectors of X and its eigenvalues λ on X's row space are "
            "positive and grow with σ (M = c·XᵀX does), then κ(XM + X) ≤ κ(XM), smaller by the factor (1 + "
            "1/λmin)/(1 + 1/λmax), where λmin and λmax are the smallest and largest on the row space (for n < d, M "
            "has zeros outside it, which do not count). The factor is large only if λmin is far below 1: scale "
            "decides.",
            proof="With X = UΣVᵀ and MV = VΛ: XM = UΣΛVᵀ and XM + X = UΣ(Λ + I)Vᵀ. σλ and σ(λ + 1) grow with σ, so "
            "κ(XM) = κ(X)·λmax/λmin and κ(XM + X) = κ(X)(1 + λmax)/(1 + λmin); the quotient of the two is the factor.",
        ),
        Fact(
            key="small branch",
            says="For any M with ‖M‖ < 1: κ(XM + X) ≤ κ(X)(1 + ‖M‖)/(1 − ‖M‖). A skip protects as long as the branch "
            "is small.",
            proof="(1 − ‖M‖)‖v‖ ≤ ‖(M + I)v‖ ≤ (1 + ‖M‖)‖v‖, so M + I is invertible with κ(M + I) ≤ (1 + ‖M‖)/(1 − "
            "‖M‖), and κ(X(M + I)) ≤ κ(X)κ(M + I).",
        ),
        Fact(
            key="whitening",
            says="PSD is not sufficient: for M = c·(XᵀX)^(−1/2) on X's row space (0 elsewhere), c > 0, the skip "
            "makes κ worse, from 1 to (c + σmax)/(c + σmin), for every X with κ(X) > 1. Nor is it needed: X = I and "
            "M = diag(1/2, −1/1000) go from 500 to 1.5.",
            proof="With X = UΣVᵀ: XM = c·UVᵀ, whose singular values are all c, and XM + X = U(c + Σ)Vᵀ. The second is "
            "arithmetic: 1.5/0.999.",
        ),
        Fact(
            says="With independent entries, d = 32 and an M that is not PSD the skip lowered κ in every draw of linear "
            "attention, and in most of softmax attention."
        ),
    ),
    tested=(
        "Inside the claim: Gaussian and uniform entries, weights of spread 1/√d and 0.02, those of "
        f"{MANY} times as many draws for which vᵀMv ≥ 0, n × d = {', '.join(f'{n} × {d}' for n, d in SMALL)}. Beyond "
        f"it: d = {D}, n = {', '.join(map(str, LENGTHS))}, ‖M‖ = 1 (and 10⁻³ to 10³ in the chart), symmetric M of "
        "rank n at most in three ways: tied (W_V = W_K W_Qᵀ, so that M = A XᵀX Aᵀ), independent of X (a Wishart "
        "matrix), whitening ((XᵀX)^(−1/2)). Not PSD: independent Gaussian and uniform entries and orthogonal weights, "
        f"one head and {HEADS}; softmax with its skip. For trained blocks, M is divided by n√p."
    ),
    not_tested="Training itself: the proposition speaks of one map, not of what gradient descent makes of it.",
)  # fmt: skip


def drawn_semi_definite(
    kind: str, draws: int, n: int, d: int, source: torch.Generator, spread: float
) -> tuple[Tensor, Tensor]:
    """Return X and M of the draws with vᵀMv ≥ 0; entries are independent, `spread` the weights' standard deviation."""
    x = tokens(draws, n, d, source)
    w = [spread * d**0.5 * weights(kind, draws, d, d, source) for _ in range(3)]
    m = mixing(x, *w, heads=1)
    met = torch.linalg.eigvalsh(m + m.mT)[:, 0] >= 0
    return x[met], m[met]


def semi_definite(family: str, x: Tensor, source: torch.Generator) -> Tensor:
    """Return a symmetric PSD M of norm 1 for each X, (b, d, d). Each has the form W_Q W_Kᵀ XᵀX W_V for some weights.

    Any M of rank at most n has that form: with X = UΣVᵀ and M = PQᵀ, P and Q being d × n, take W_Q W_Kᵀ = PΣ⁻¹Vᵀ and
    W_V = VΣ⁻¹Qᵀ.

    Raises ValueError for an unknown family.
    """
    draws, n, d = x.shape
    if family == "tied":
        a = weights("gaussian", draws, d, d, source) @ weights("gaussian", draws, d, d, source).mT
        half = x @ a.mT
    elif family == "independent":
        half = weights("gaussian", draws, n, d, source)
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
    for n, d in SMALL:
        for kind in INDEPENDENT:
            for spread in SPREADS:
                source, count = generator(seed, ID, "drawn", kind, n, d), MANY * draws
                x, m = drawn_semi_definite(
                    kind, count, n, d, source, d**-0.5 if spread == SPREADS[0] else float(spread)
                )
                settings = {"weights": kind, "spread": spread, "n": n, "d": d, "drawn": count, "met": len(x)}
                if len(x):
                    name = f"{kind} entries, spread {spread}, n = {n}, d = {d}"
                    yield from _smaller(name, x @ m, x, part="claim", **settings)
    for n in LENGTHS:
        for family in FAMILIES:
            yield from _constructed(family, n, draws, seed)
        x = tokens(draws, n, D, generator(seed, ID, "aligned", n))
        yield _aligned(f"M = c·XᵀX, n = {n}", x, _scaled(x.mT @ x, 1.0))
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
                fact="small branch", weights=kind, n=n, d=D,
            )  # fmt: skip
            branch = softmax_attention(x, *w, heads=HEADS)
            name = f"softmax, {kind}, {HEADS} heads, n = {n}"
            yield from _smaller(name, branch, x, part="beyond", weights=kind, heads=HEADS, n=n, d=D)
    eye, m = torch.eye(2, dtype=torch.float64)[None], torch.diag(torch.tensor([0.5, -1e-3], dtype=torch.float64))[None]
    yield compare(
        "300 κ(XM + X) ≤ κ(XM), M = diag(1/2, −1/1000)", kappa(m), 300 * kappa(m + eye), part="instead",
        fact="whitening", n=2, d=2,
    )  # fmt: skip
    for block in trained:
        x, *w = block.attention()
        m = mixing(x, *w, heads=block.heads) * (x.shape[-1] / block.heads) ** -0.5 / x.shape[1]
        settings = {"weights": "trained", "heads": block.heads, "n": x.shape[1], "d": x.shape[2]}
        yield from _smaller(f"linear, trained {block.name}", x @ m, x, part="beyond", **settings)
        branch = softmax_attention(x, *w, heads=block.heads)
        yield from _smaller(f"softmax, trained {block.name}", branch, x, part="beyond", **settings)


def _constructed(family: str, n: int, draws: int, seed: int) -> Iterator[Case]:
    """Check an M that is PSD by construction: what the skip does, and what PSD does guarantee."""
    source = generator(seed, ID, family, n)
    x = tokens(draws, n, D, source)
    m = semi_definite(family, x, source)
    settings = {"family": family, "n": n, "d": D}
    name = f"{family} M, n = {n}"
    yield from _smaller(name, x @ m, x, part="beyond", **settings)
    skip = kappa(x @ m + x)
    known = with_skip_bound(x, m)
    name_of_bound = f"κ(X)(1 + λmax)/(1 + λmin), {name}"
    yield compare(name_of_bound, known, skip, part="instead", fact="semi-definite", **settings)
    if n >= D:  # otherwise M is singular, κ(M) infinite, and there is nothing to compare
        plus = m + torch.eye(D, dtype=m.dtype)
        name_of_bound = f"κ(M + I) ≤ κ(M), {name}"
        yield compare(name_of_bound, kappa(m), kappa(plus), part="instead", fact="semi-definite", **settings)
    if family == "whitening":
        s = torch.linalg.svdvals(x)
        c = s[:, -1]  # ‖M‖ = 1 = c/σmin
        away = (skip / ((c + s[:, 0]) / (c + s[:, -1])) - 1).abs() + (kappa(x @ m) - 1).abs()
        name = f"1 becomes (c + σmax)/(c + σmin), {name}"
        yield compare(
            name,
            EXACT + 64 * torch.finfo(torch.float64).eps * kappa(x),
            away,
            part="instead",
            fact="whitening",
            **settings,
        )


def _aligned(name: str, x: Tensor, m: Tensor) -> Case:
    """Compare κ(XM)/κ(XM + X) with (1 + 1/λmin)/(1 + 1/λmax), the eigenvalues being those on X's row space."""
    known, without = aligned_factor(x, m), kappa(x @ m)
    away = (without / kappa(x @ m + x) / known - 1).abs()
    room = EXACT + 64 * torch.finfo(torch.float64).eps * without
    return compare(
        f"κ(XM)/κ(XM + X) = (1 + 1/λmin)/(1 + 1/λmax), {name}", room, away, part="instead",
        fact="aligned", family="aligned", n=x.shape[-2], d=x.shape[-1], median_factor=median(known),
    )  # fmt: skip


def aligned_factor(x: Tensor, m: Tensor) -> Tensor:
    """(1 + 1/λmin)/(1 + 1/λmax) of a symmetric M with X's right singular vectors, over X's row space."""
    values = torch.linalg.eigvalsh(m)[..., -min(x.shape[-2:]) :]
    return (1 + 1 / values[..., 0]) / (1 + 1 / values[..., -1])


def _smaller(name: str, branch: Tensor, x: Tensor, *, part: Part, **settings) -> Iterator[Case]:
    """Check whether κ is smaller with the skip, and whether it is ten times smaller."""
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
    for n, d in SMALL:
        smaller, much = ([c for c in pick(start, n=n, d=d) if c.part == "claim"] for start in ("smaller", "ten times"))
        if smaller:
            met, drawn = (sum(c.settings[key] for c in smaller) for key in ("met", "drawn"))
            found.append(
                f"Independent entries, n = {n}, d = {d}: M is PSD (vᵀMv ≥ 0) in {100 * met / drawn:.2g} % of the "
                f"draws; in these the skip does not lower κ in {share(smaller)}, and not tenfold in {share(much)}."
            )
    for family in FAMILIES:
        smaller, much = pick("smaller", family=family), pick("ten times", family=family)
        found.append(
            f"PSD by construction, {family}: the skip does not lower κ in {share(smaller)} draws, and not tenfold in "
            f"{share(much)}."
        )
    loose = [c for c in cases if "not PSD" in c.name]
    soft = [c for c in pick("smaller: softmax, ") if c.settings["weights"] != "trained"]
    found.append(
        "M not PSD (independent entries, or orthogonal weights): not lower in "
        f"{share([c for c in loose if c.name.startswith('smaller')])} draws, not tenfold in "
        f"{share([c for c in loose if c.name.startswith('ten')])}; softmax: not lower in "
        f"{share(soft)}."
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
