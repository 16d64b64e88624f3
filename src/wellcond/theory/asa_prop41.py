"""Proposition 4.1 of Always Skip Attention: κ(X W_Q W_Kᵀ Xᵀ X W_V) ≤ C·κ(X)³ with C = κ(W_Q)κ(W_K)κ(W_V) close to one.

    bound_of(x, wq, wk, wv)                  # C·κ(X)³, one number per draw
    for case in cases(400, seed=0): …        # weights × n below, at and above d × linear and softmax × heads

True for one head of linear attention with n ≥ d and invertible weights: there the output is X times a square matrix.
For n < d the proof multiplies a wide XW_Q by a tall (XW_K)ᵀ, and with several heads a wide (XW_K)ᵀ by a tall XW_V of
another column space: `products.py` says why that step fails.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wellcond.theory.draws import (
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
from wellcond.theory.findings import Case, Example, Line, Lines, compare, rate
from wellcond.theory.products import wide_times_tall
from wellcond.theory.statement import Statement, median, share
from wellcond.theory.trained import TrainedBlock

__all__ = ["STATEMENT", "bound_of", "cases", "chart", "constant", "examples", "summary"]

ID = "asa-prop41"
D, HEADS = 32, 4
LENGTHS = (16, 32, 64)  # below, at and above d
CLOSE = 2.0  # a generous reading of "close to unity"
WIDTHS = (4, 8, 16, 32, 64, 128)

STATEMENT = Statement(
    id=ID,
    title="Proposition 4.1: attention without its skip cubes the condition number",
    plain=(
        "The cube is an upper bound for one head of linear attention with at least as many tokens as dimensions. With "
        "fewer tokens, with several heads, or with softmax the proof multiplies matrices in an order in which "
        "condition numbers do not multiply, and the bound is violated. The constant in front is not near one for "
        "random weights: it grows with the cube of the width."
    ),
    claim="κ(X W_Q W_Kᵀ Xᵀ X W_V) ≤ C·κ(X)³, with C = κ(W_Q)κ(W_K)κ(W_V) statistically close to unity.",
    instead=(
        "For n ≥ d, one head and invertible weights the inequality holds as it stands, and W = I attains it. C is 1 "
        "where the weights are multiples of orthogonal matrices, and grows like d³ for independent entries. For any n "
        "and one head with an n × n attention matrix A: κ(A X W_V) ≤ κ(A)κ(X)κ(W_V), which covers softmax (for linear "
        "attention, A = X W_Q W_Kᵀ Xᵀ, it says something where n ≤ d). With several heads and n ≥ d: κ(XM) ≤ "
        "κ(X)κ(M), M being the d × d matrix of the heads' W_Q W_Kᵀ XᵀX W_V side by side; κ(M) is not bounded by the "
        "weights' κ. An upper bound alone does not make an output ill-conditioned: W_Q W_Kᵀ = (XᵀX)⁻¹ gives back κ(X "
        "W_V)."
    ),
    tested=(
        f"d = {D} with n = {', '.join(map(str, LENGTHS))}; Gaussian, uniform and orthogonal weights; Gaussian tokens; "
        f"one head and {HEADS} heads; linear and softmax attention; C for d up to {WIDTHS[-1]}; in float64."
    ),
    not_tested="Biases, the output projection, dropout, tokens with heavy tails, and d beyond the range above.",
)


def constant(wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """C = κ(W_Q)κ(W_K)κ(W_V) of each draw."""
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
            yield from _judge(f"{kind}, n = {n}", x, *w, heads=HEADS, weights=kind, n=n, d=D)
    for block in trained:
        x, *w = block.attention()
        name = f"trained {block.name}, n = {x.shape[1]}"
        yield from _judge(name, x, *w, heads=block.heads, weights="trained", n=x.shape[1], d=x.shape[2])
    for kind in WEIGHTS:
        for d in (WIDTHS[2], WIDTHS[-2]):
            c = _constants(kind, d, draws, seed)
            far = int((c > CLOSE).sum())
            yield rate(
                f"C ≤ {CLOSE:g} for {kind} weights, d = {d}", failures=far, draws=len(c), allowed=0.5, part="claim",
                weights=kind, d=d, median_constant=median(c),
            )  # fmt: skip


def _judge(name: str, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *, heads: int, **settings) -> Iterator[Case]:
    """One head inside the claim; heads and softmax beyond it; and what is true instead."""
    n, d = x.shape[-2:]
    bound, x_kappa = bound_of(x, wq, wk, wv), kappa(x)
    settings |= {"median_constant": median(constant(wq, wk, wv)), "median_kappa": median(x_kappa)}
    for h in (1, heads):
        linear = kappa(linear_attention(x, wq, wk, wv, heads=h))
        soft = kappa(softmax_attention(x, wq, wk, wv, heads=h))
        part = "claim" if h == 1 else "beyond"
        yield compare(f"linear, {_heads(h)}, {name}", bound, linear, part=part, heads=h, **settings)
        yield compare(f"softmax, {_heads(h)}, {name}", bound, soft, part="beyond", heads=h, **settings)
        if h == 1:
            a = scores(x, wq, wk)[:, 0]
            with_values = x_kappa * kappa(wv)
            if n <= d:
                known = kappa(a) * with_values
                yield compare(f"κ(A)κ(X)κ(W_V), linear, {name}", known, linear, part="instead", heads=1, **settings)
            known = kappa((a * d**-0.5).softmax(-1)) * with_values
            yield compare(f"κ(A)κ(X)κ(W_V), softmax, {name}", known, soft, part="instead", heads=1, **settings)
        elif n >= d:
            known = x_kappa * kappa(mixing(x, wq, wk, wv, heads=h))
            yield compare(f"κ(X)κ(M), linear, {_heads(h)}, {name}", known, linear, part="instead", heads=h, **settings)


def mixing(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *, heads: int) -> Tensor:
    """M with XM the output of linear attention: each head's W_Q W_Kᵀ XᵀX W_V, side by side, (b, d, d)."""
    q, k, v = (split_heads(w, heads) for w in (wq, wk, wv))
    x = x[:, None]
    return (q @ ((x @ k).mT @ (x @ v))).movedim(-3, -2).flatten(-2)


def _heads(h: int) -> str:
    return "1 head" if h == 1 else f"{h} heads"


def _constants(kind: str, d: int, draws: int, seed: int) -> Tensor:
    source = generator(seed, ID, "C", kind, d)
    count = max(40, int(draws * min(1.0, (32 / d) ** 2)))  # a median over decades needs few, and wide ones take long
    return constant(*(weights(kind, count, d, d, source) for _ in range(3)))


def examples() -> list[Example]:
    degrees = 89.0
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    eye = torch.eye(3, dtype=torch.float64)
    turn = torch.tensor([[1, 0, 0], [0, c, -s], [0, s, c]], dtype=torch.float64)
    x = eye[:2]
    one = linear_attention(x[None], turn[None], eye[None], eye[None])[0]
    three = linear_attention(eye[None], eye[None], eye[None], turn[None], heads=3)[0]
    small = 1e-3 * eye
    soft = softmax_attention(eye[None], small[None], small[None], eye[None])[0]
    return [
        wide_times_tall(degrees),
        Example(
            title="Two tokens, three wide (n < d): orthogonal weights, C = 1, and no bound",
            text=(
                f"X keeps two coordinates and W_Q is a rotation by {degrees:g}° of the last two; W_K = W_V = I. All "
                "condition numbers are 1, so that Eq. 5 says κ ≤ 1. The attention matrix X W_Q Xᵀ is diag(1, cos), "
                "and so is the output."
            ),
            matrices={"X": x.tolist(), "W_Q": turn.tolist()},
            bound=float(bound_of(x, turn, eye, eye)),
            measured=float(kappa(one)),
        ),
        Example(
            title="Three heads of width one (n = d): orthogonal weights, and no bound",
            text=(
                f"X = W_Q = W_K = I and W_V a rotation by {degrees:g}°: head i multiplies token i by ⟨k_i, v_i⟩, "
                "which is 1, cos and cos. With one head the output would be W_V itself, κ = 1: splitting into heads "
                "is what breaks the bound."
            ),
            matrices={"X": eye.tolist(), "W_V": turn.tolist()},
            bound=float(bound_of(eye, eye, eye, turn)),
            measured=float(kappa(three)),
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
    def pick(start: str, part: str, test) -> list[Case]:
        return [c for c in cases if c.name.startswith(start) and c.part == part and test(c.settings)]

    short = pick("linear", "claim", lambda s: s["n"] < s["d"] and s["weights"] == "orthogonal")
    enough = pick("linear", "claim", lambda s: s["n"] >= s["d"] and s["weights"] != "trained")
    heads = pick("linear", "beyond", lambda s: s["n"] >= s["d"] and s["weights"] == "orthogonal")
    soft = pick("softmax", "beyond", lambda s: s["weights"] == "orthogonal")
    gaussian = next(line for line in lines.lines if line.name == "gaussian")
    slope = math.log(gaussian.y[-1] / gaussian.y[0]) / math.log(gaussian.x[-1] / gaussian.x[0])
    loose = pick("linear", "claim", lambda s: s["n"] < s["d"] and s["weights"] != "orthogonal")
    found = [
        f"n ≥ d, one head, linear: {share(enough)} draws violate the bound.",
        f"n < d, one head, linear, orthogonal weights: {share(short)} draws violate it; Gaussian and uniform "
        f"weights: {share(loose)}, where C makes the bound so large (median {max(c.bound for c in loose):.2g}) that "
        "it says little.",
        f"{HEADS} heads, linear, n ≥ d, orthogonal weights: {share(heads)} draws violate it; softmax, orthogonal "
        f"weights: {share(soft)}.",
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
