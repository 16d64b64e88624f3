"""Proposition 4.1 of Always Skip Attention: κ(X W_Q W_Kᵀ Xᵀ X W_V) ≤ C·κ(X)³ with C = κ(W_Q)κ(W_K)κ(W_V) close to one.

    bound_of(x, wq, wk, wv)                  # C·κ(X)³, one number per draw
    for case in cases(400, seed=0): …        # weights × n below, at and above d × linear and softmax × heads

The paper assumes that the entries of X and of the weights are independent with zero mean. The claim is therefore tested
with Gaussian and uniform entries and one head; orthogonal and trained weights, several heads and softmax lie beyond it.
The bound holds for one head of linear attention with n ≥ d and invertible weights: there the output is X times a square
matrix. For n < d the proof multiplies a wide XW_Q by a tall (XW_K)ᵀ, and with several heads a wide (XW_K)ᵀ by a tall
XW_V with another column space. With independent entries, failures of that step show only in small matrices and many
draws, since C is large.

The step is κ(AB) ≤ κ(A)κ(B), which every bound of the paper uses (`product_rule_applies`). κ is σmax over the smallest
non-zero singular value, ‖A‖‖A⁺‖. Let A be m × r and B r × k. If A has full column rank, no vector of B's image is lost:
‖ABx‖ ≥ σmin(A)·‖Bx‖ ≥ σmin(A)·σmin(B)·‖x‖ for x orthogonal to B's kernel, and the rule holds. If B has full row rank,
the same argument holds for (AB)ᵀ. If A is wide and B is tall, A may shrink exactly the directions of B's image: then
the rule fails, even if both factors are perfectly conditioned (`wide_times_tall`).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wellcond.theory.draws import (
    INDEPENDENT,
    WEIGHTS,
    generator,
    kappa,
    linear_attention,
    scores,
    softmax_attention,
    split_heads,
    tokens,
    weights,
)
from wellcond.theory.findings import Case, Example, Fact, Line, Lines, Statement, compare, median, rate, share
from wellcond.theory.trained import TrainedBlock

__all__ = [
    "STATEMENT", "bound_of", "cases", "chart", "constant", "examples", "mixing", "product_rule_applies", "summary",
    "turned", "wide_times_tall",
]  # fmt: skip

ID = "asa-prop41"
D, HEADS = 32, 4
LENGTHS = (16, 32, 64)  # below, at and above d
CLOSE = 2.0  # a generous reading of "close to unity"
WIDTHS = (4, 8, 16, 32, 64, 128)
SMALL = ((2, 3, 1), (3, 4, 1), (64, 4, HEADS))  # n, d, heads: violations are rare here, but do occur
MANY = 100  # times as many draws, for these
DEGREES = 89.0

STATEMENT = Statement(
    id=ID,
    title="Proposition 4.1: attention without its skip cubes the condition number",
    plain=(
        "The cube is an upper bound for one head of linear attention with at least as many tokens as dimensions. With "
        "fewer tokens, with several heads, or with softmax the proof multiplies matrices in an order in which "
        "condition numbers do not multiply, and the bound can be violated: with independent entries in a few draws of "
        "a thousand, where the matrices are small, and hardly ever in larger ones, where C makes the bound so large "
        "that it says little; with orthogonal weights, where C is 1, often. C is not near one for random weights: it "
        "grows with the cube of the width."
    ),
    claim="κ(X W_Q W_Kᵀ Xᵀ X W_V) ≤ C·κ(X)³ where X and the weights have independent entries of zero mean, with C = "
    "κ(W_Q)κ(W_K)κ(W_V) statistically close to unity.",
    instead=(
        Fact(
            key="cube",
            says="For n ≥ d, one head, X of full rank and invertible weights the inequality holds as it stands, and "
            "W_Q = W_K = W_V = I attains it.",
            proof="The output is XB with the invertible B = W_Q W_Kᵀ XᵀX W_V. X has full column rank, so that ‖XBv‖ ≥ "
            "σmin(X)σmin(B)‖v‖, and κ(XB) ≤ κ(X)κ(B). All factors of B are square and invertible: κ(B) ≤ C·κ(XᵀX) = "
            "C·κ(X)². With W = I the output is X XᵀX, whose singular values are those of X cubed.",
        ),
        Fact(
            key="no bound",
            says="For 2 ≤ n < d with one head, and for n ≥ d ≥ 3 with two heads or more, no function of the factors' "
            "condition numbers bounds κ of the output; and entries that are independent with a density positive "
            "everywhere violate Eq. 5 with positive probability.",
            proof="Let R turn two coordinates by an angle, and X hold the first n rows of I (the rows of I and zeros, "
            "if n > d), so that all condition numbers are 1. n < d: R = W_Q turns coordinates n and n + 1, W_K = W_V = "
            "I; the output is diag(1, …, 1, cos) and zero columns. Heads: R = W_V turns a coordinate of one head and "
            "one of another, W_Q = W_K = I; of W_V the output keeps the heads' blocks, diag(1, …, cos, …, cos). So κ = "
            "1/cos, as large as one likes. Both sides of Eq. 5 are continuous at these matrices: it is violated in "
            "a whole neighbourhood of them.",
        ),
        Fact(
            key="scores",
            says="For any n, one head with an invertible n × n attention matrix A, invertible W_V and X of full rank: "
            "κ(A X W_V) ≤ κ(A)κ(X)κ(W_V). This covers softmax; of linear attention, A = X W_Q W_Kᵀ Xᵀ, it says "
            "something where n ≤ d.",
            proof="A has full column rank and W_V full row rank; κ(AB) ≤ κ(A)κ(B) needs one of the two (proof under "
            "the first theorem, and for (AB)ᵀ), and may be used twice.",
        ),
        Fact(
            key="heads",
            says="With several heads, n ≥ d and X of full rank: κ(XM) ≤ κ(X)κ(M), M being the d × d matrix of the "
            "heads' W_Q W_Kᵀ XᵀX W_V side by side. κ(M) is not bounded by the weights' κ.",
            proof="X has full column rank, as in the first theorem; the second has the example.",
        ),
        Fact(
            key="undone",
            says="An upper bound alone does not make an output ill-conditioned: for n ≥ d, W_Q W_Kᵀ = (XᵀX)⁻¹ gives "
            "κ(X W_V), without any cube.",
            proof="X (XᵀX)⁻¹ XᵀX W_V = X W_V.",
        ),
        Fact(
            key="orthogonal",
            says="C is 1 if and only if all three weights are multiples of orthogonal matrices.",
            proof="κ ≥ 1, and κ(W) = 1 says that all singular values of the square W are one number c: W = c·UVᵀ.",
        ),
        Fact(
            says="C grows like d³ for independent entries; for one Gaussian matrix Edelman (1988) proved that log κ is "
            "log d + 1.537 in the mean, as d grows."
        ),
    ),
    tested=(
        f"d = {D} with n = {', '.join(map(str, LENGTHS))}, one head and {HEADS} heads, linear and softmax attention; n "
        f"= 2, d = 3 and n = 3, d = 4 with one head, and n = 64, d = 4 with {HEADS}, in {MANY} times as many draws; "
        f"Gaussian and uniform entries, and, beyond the claim, orthogonal weights; Gaussian tokens; C for d up to "
        f"{WIDTHS[-1]}; in float64."
    ),
    not_tested="Biases, the output projection, dropout, tokens with heavy tails, and d beyond the range above.",
)


def constant(wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """Return C = κ(W_Q)κ(W_K)κ(W_V) for each draw."""
    return kappa(wq) * kappa(wk) * kappa(wv)


def bound_of(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """The right side of Eq. 5."""
    return constant(wq, wk, wv) * kappa(x) ** 3


def cases(draws: int, seed: int, trained: Sequence[TrainedBlock] = ()) -> Iterator[Case]:
    for kind in WEIGHTS:
        for n in LENGTHS:
            source = generator(seed, ID, kind, n)
            x = tokens(draws, n, D, source)
            w = [weights(kind, draws, D, D, source) for _ in range(3)]
            for heads in (1, HEADS):
                yield from _linear(f"{kind}, n = {n}", x, *w, heads=heads, weights=kind)
                yield from _softmax(f"{kind}, n = {n}", x, *w, heads=heads, weights=kind)
    for kind in INDEPENDENT:
        for n, d, heads in SMALL:
            source, count = generator(seed, ID, "small", kind, n, d), MANY * draws
            x = tokens(count, n, d, source)
            w = [weights(kind, count, d, d, source) for _ in range(3)]
            yield from _linear(f"{kind}, n = {n}, d = {d}", x, *w, heads=heads, weights=kind)
    for block in trained:
        x, *w = block.attention()
        for heads in (1, block.heads):
            yield from _linear(f"trained {block.name}, n = {x.shape[1]}", x, *w, heads=heads, weights="trained")
            yield from _softmax(f"trained {block.name}, n = {x.shape[1]}", x, *w, heads=heads, weights="trained")
    for kind in WEIGHTS:
        for d in (WIDTHS[2], WIDTHS[-2]):
            c = _constants(kind, d, draws, seed)
            far = int((c > CLOSE).sum())
            independent = kind in INDEPENDENT
            yield rate(
                f"C ≤ {CLOSE:g} for {kind} weights, d = {d}", failures=far, draws=len(c), allowed=0.5,
                part="claim" if independent else "beyond", weights=kind, d=d, median_constant=median(c),
                **({} if independent else {"fact": "orthogonal"}),
            )  # fmt: skip
    yield from _constructed(draws, seed)


def _linear(name: str, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *, heads: int, **settings) -> Iterator[Case]:
    """Compare linear attention with Eq. 5 (the claim, for one head and independent entries), and with what is true."""
    n, d = x.shape[-2:]
    bound, measured = bound_of(x, wq, wk, wv), kappa(linear_attention(x, wq, wk, wv, heads=heads))
    settings |= _sizes(x, wq, wk, wv, heads)
    part = "claim" if heads == 1 and settings["weights"] in INDEPENDENT else "beyond"
    fact: dict[str, Any] = {"fact": "cube"} if heads == 1 and n >= d else {}
    yield compare(f"linear, {_heads(heads)}, {name}", bound, measured, part=part, **settings, **fact)
    if heads == 1 and n <= d:
        known = kappa(scores(x, wq, wk)[:, 0]) * kappa(x) * kappa(wv)
        yield compare(f"κ(A)κ(X)κ(W_V), linear, {name}", known, measured, part="instead", fact="scores", **settings)
    if heads > 1 and n >= d:
        known = kappa(x) * kappa(mixing(x, wq, wk, wv, heads=heads))
        name = f"κ(X)κ(M), linear, {_heads(heads)}, {name}"
        yield compare(name, known, measured, part="instead", fact="heads", **settings)


def _softmax(name: str, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *, heads: int, **settings) -> Iterator[Case]:
    """Do the same for softmax attention, which lies beyond the claim."""
    bound, measured = bound_of(x, wq, wk, wv), kappa(softmax_attention(x, wq, wk, wv, heads=heads))
    settings |= _sizes(x, wq, wk, wv, heads)
    yield compare(f"softmax, {_heads(heads)}, {name}", bound, measured, part="beyond", **settings)
    if heads == 1:
        a = (scores(x, wq, wk)[:, 0] * x.shape[-1] ** -0.5).softmax(-1)
        known = kappa(a) * kappa(x) * kappa(wv)
        yield compare(f"κ(A)κ(X)κ(W_V), softmax, {name}", known, measured, part="instead", fact="scores", **settings)


def _sizes(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, heads: int) -> dict[str, float]:
    medians = {"median_constant": median(constant(wq, wk, wv)), "median_kappa": median(kappa(x))}
    return {"n": x.shape[-2], "d": x.shape[-1], "heads": heads, **medians}


def _constructed(draws: int, seed: int) -> Iterator[Case]:
    """Check the matrices of the proofs: those without a bound, and the weights that undo X."""
    for n, d, heads in ((2, 3, 1), (5, 9, 1), (3, 3, 3), (9, 6, 2)):
        x, w = turned(n, d, heads=heads)
        measured, bound = kappa(linear_attention(x, *w, heads=heads)), bound_of(x, *w)
        name = f"50 × Eq. 5's bound ≤ κ, turned weights, {_heads(heads)}, n = {n}, d = {d}"
        yield compare(name, measured, 50 * bound, part="instead", fact="no bound", n=n, d=d, heads=heads)
    source = generator(seed, ID, "undone")
    x, wv = tokens(draws, 2 * D, D, source), weights("gaussian", draws, D, D, source)
    eye = torch.eye(D, dtype=x.dtype).expand(draws, -1, -1)
    measured = kappa(linear_attention(x, torch.linalg.inv(x.mT @ x), eye, wv))
    name = f"κ = κ(X W_V) where W_Q W_Kᵀ = (XᵀX)⁻¹, n = {2 * D}"
    away = (measured / kappa(x @ wv) - 1).abs()
    yield compare(name, torch.full_like(away, 1e-6), away, part="instead", fact="undone", n=2 * D, d=D, heads=1)


def turned(n: int, d: int, *, heads: int = 1, degrees: float = DEGREES) -> tuple[Tensor, list[Tensor]]:
    """Return X (1, n, d) and orthogonal W_Q, W_K, W_V (1, d, d), for which linear attention has κ = 1/cos and bound 1.

    One head, n < d: W_Q rotates coordinates n and n + 1. Several heads, n ≥ d ≥ 3: W_V rotates the last coordinate and
    one of another head.
    """
    assert 2 <= n < d if heads == 1 else n >= d >= 3
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    eye = torch.eye(d, dtype=torch.float64)
    x = torch.eye(n, d, dtype=torch.float64)
    i, j = (n - 1, n) if heads == 1 else (max(d // heads - 1, 1), d - 1)
    turn = eye.clone()
    turn[i, i], turn[i, j], turn[j, i], turn[j, j] = c, -s, s, c
    return x[None], [m[None] for m in ((turn, eye, eye) if heads == 1 else (eye, eye, turn))]


def mixing(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *, heads: int) -> Tensor:
    """Return M, (b, d, d), with XM the output of linear attention: each head's W_Q W_Kᵀ XᵀX W_V, side by side."""
    q, k, v = (split_heads(w, heads) for w in (wq, wk, wv))
    x = x[:, None]
    return (q @ ((x @ k).mT @ (x @ v))).movedim(-3, -2).flatten(-2)


def _heads(h: int) -> str:
    return "1 head" if h == 1 else f"{h} heads"


def _constants(kind: str, d: int, draws: int, seed: int) -> Tensor:
    source = generator(seed, ID, "C", kind, d)
    count = max(40, int(draws * min(1.0, (32 / d) ** 2)))  # a median over decades needs few, and wide ones are slow
    return constant(*(weights(kind, count, d, d, source) for _ in range(3)))


def examples() -> list[Example]:
    eye = torch.eye(3, dtype=torch.float64)
    short, short_w = turned(2, 3)
    heads, heads_w = turned(3, 3, heads=3)
    small = 1e-3 * eye
    soft = softmax_attention(eye[None], small[None], small[None], eye[None])[0]
    return [
        wide_times_tall(DEGREES),
        Example(
            title="Two tokens, three wide (n < d): orthogonal weights, C = 1, and no bound",
            text=(
                f"X keeps two coordinates and W_Q is a rotation by {DEGREES:g}° of the last two; W_K = W_V = I. All "
                "condition numbers are 1, so that Eq. 5 says κ ≤ 1. The attention matrix X W_Q Xᵀ is diag(1, cos), "
                "and so is the output."
            ),
            matrices={"X": short[0].tolist(), "W_Q": short_w[0][0].tolist()},
            bound=float(bound_of(short, *short_w)),
            measured=float(kappa(linear_attention(short, *short_w))),
        ),
        Example(
            title="Three heads of width one (n = d): orthogonal weights, and no bound",
            text=(
                f"X = W_Q = W_K = I and W_V a rotation by {DEGREES:g}°: head i multiplies token i by ⟨k_i, v_i⟩, "
                "which is 1, cos and cos. With one head the output would be W_V itself, κ = 1: splitting into heads "
                "is what breaks the bound."
            ),
            matrices={"X": heads[0].tolist(), "W_V": heads_w[2][0].tolist()},
            bound=float(bound_of(heads, *heads_w)),
            measured=float(kappa(linear_attention(heads, *heads_w, heads=3))),
        ),
        Example(
            title="Softmax of small scores: nearly the same average for every token",
            text=(
                "X = W_V = I and W_Q = W_K = I/1000. κ of every factor is 1, whatever the scale of the weights; "
                "softmax feels the scale: with small scores all its rows are nearly 1/n, and all outputs nearly equal."
            ),
            matrices={"X": eye.tolist(), "W_Q": small.tolist()},
            bound=float(bound_of(eye, small, small, eye)),
            measured=float(kappa(soft)),
        ),
    ]  # fmt: skip


def chart(draws: int, seed: int) -> Lines:
    """C as a function of d."""
    lines = [
        Line(name=kind, x=list(WIDTHS), y=[median(_constants(kind, d, draws, seed)) for d in WIDTHS])
        for kind in WEIGHTS
    ]
    # Edelman 1988: the mean of log κ of a square Gaussian matrix tends to log d + 1.537.
    lines.append(
        Line(name="(4.65 d)³", x=list(WIDTHS), y=[math.exp(3 * (math.log(d) + 1.537)) for d in WIDTHS], dashed=True)
    )
    return Lines(
        title="The constant C of Proposition 4.1",
        x="d, width of the square weights", y="C", log_x=True, log_y=True, lines=lines,
        caption="Median of κ(W_Q)κ(W_K)κ(W_V) over draws. Dashed: what theory says of Gaussian matrices (Edelman "
        "1988).",
    )  # fmt: skip


def summary(cases: Sequence[Case], lines: Lines) -> list[str]:
    def pick(start: str, test, *kinds: str) -> list[Case]:
        return [
            c for c in cases
            if c.name.startswith(start) and c.settings.get("weights") in kinds and test(c.settings)
        ]  # fmt: skip

    def rates(n: int, d: int, heads: int) -> str:
        found = [pick("linear", lambda s: (s["n"], s["d"], s["heads"]) == (n, d, heads), k) for k in INDEPENDENT]
        return " and ".join(f"{share(one)} ({kind})" for one, kind in zip(found, INDEPENDENT, strict=True))

    enough = pick("linear", lambda s: s["n"] >= s["d"] and s["heads"] == 1, *WEIGHTS)
    short = pick("linear", lambda s: s["n"] < s["d"] == D and s["heads"] == 1, *INDEPENDENT)
    (few, more, many) = SMALL
    turned_ = pick("linear", lambda s: s["n"] < s["d"] and s["heads"] == 1, "orthogonal")
    heads = pick("linear", lambda s: s["n"] >= s["d"] and s["heads"] > 1, "orthogonal")
    soft = pick("softmax", lambda s: True, "orthogonal")
    gaussian = next(line for line in lines.lines if line.name == "gaussian")
    slope = math.log(gaussian.y[-1] / gaussian.y[0]) / math.log(gaussian.x[-1] / gaussian.x[0])
    found = [
        f"n ≥ d, one head, linear: {share(enough)} draws violate the bound.",
        f"n < d, one head, linear, independent entries: at n = {few[0]}, d = {few[1]} the bound is violated in "
        f"{rates(*few)} draws, at n = {more[0]}, d = {more[1]} in {rates(*more)}; at d = {D}, n = {LENGTHS[0]} in "
        f"{share(short)}, where C makes it so large (median {max(c.bound for c in short):.2g}) that it says little.",
        f"{HEADS} heads, linear, n = {many[0]}, d = {many[1]}, independent entries: {rates(*many)} draws violate it.",
        f"Orthogonal weights, which are beyond the assumptions and have C = 1: for n < d {share(turned_)} draws "
        f"violate it; with {HEADS} heads and n ≥ d {share(heads)}; softmax {share(soft)}.",
        f"C is not close to one: its median for Gaussian weights is {gaussian.y[0]:.3g} at d = {gaussian.x[0]} and "
        f"{gaussian.y[-1]:.3g} at d = {gaussian.x[-1]}, growing like d^{slope:.1f}. It is 1 for orthogonal weights.",
    ]
    trained = [c for c in cases if c.settings.get("weights") == "trained" and c.part != "instead"]
    if trained:
        blind, seen = sum(c.undecided for c in trained), sum(c.draws for c in trained)
        found.append(
            f"Trained blocks: {sum(c.failures for c in trained)} violations in {seen} tests (images × heads × softmax "
            f"or not); {blind} cannot be decided in float64, since both sides exceed 10¹⁰. κ(X) is "
            f"{_range(trained, 'median_kappa')} (medians), C {_range(trained, 'median_constant')}: the bound says "
            "nothing."
        )
    return found


def _range(cases: Sequence[Case], key: str) -> str:
    values = [case.settings[key] for case in cases]
    return f"{min(values):.2g} to {max(values):.2g}"


def product_rule_applies(a: Tensor, b: Tensor) -> bool:
    """Whether the inner dimension is kept: A (m × r) has full column rank or B (r × k) has full row rank."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"A {tuple(a.shape)} and B {tuple(b.shape)} have no product; pass m × r and r × k")
    inner = a.shape[1]
    ranks = (int(torch.linalg.matrix_rank(matrix.double())) for matrix in (a, b))
    return any(rank == inner for rank in ranks)


def wide_times_tall(degrees: float = 89.0) -> Example:
    """Return an example: A keeps two of three coordinates, B rotates one away; κ(A) = κ(B) = 1, and κ(AB) = 1/cos."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    a = torch.tensor([[1, 0, 0], [0, 1, 0]], dtype=torch.float64)
    b = torch.tensor([[1, 0], [0, c], [0, s]], dtype=torch.float64)
    return Example(
        title="κ(AB) ≤ κ(A)κ(B) fails for a wide A and a tall B",
        text=(
            f"A and B have singular values 1 and 1 each. AB = diag(1, cos {degrees:g}°): what B turns into the third "
            "coordinate, A drops. The rule needs the inner dimension kept: A of full column rank or B of full row "
            "rank."
        ),
        matrices={"A": a.tolist(), "B": b.tolist()},
        bound=float(kappa(a) * kappa(b)),
        measured=float(kappa(a @ b)),
    )
