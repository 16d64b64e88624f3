"""Equation 6 of Always Skip Attention: a linear MLP has κ(X W_up W_down) ≤ κ(W_up)κ(W_down)·κ(X).

    bound_of(x, up, down)                   # the right side, one number per draw
    for case in cases(400, seed=0): …       # expansion 4 (the paper's), 1 and 1/2; n below, at and above d

(The paper writes the weights to the left; tokens are rows here.) With the usual expansion, W_up is wide and W_down is
tall: the condition number of their d × d product is not bounded by those of the factors (see `asa_prop41.py`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu

from wellcond.theory.draws import WEIGHTS, generator, kappa, kappa_at_rank, tokens, weights
from wellcond.theory.findings import Case, Example, Fact, Line, Lines, Statement, compare, median, share
from wellcond.theory.trained import TrainedBlock

__all__ = ["STATEMENT", "bound_of", "cases", "chart", "examples", "summary"]

ID = "asa-eq6"
D = 32
LENGTHS = (16, 32, 64)
EXPANSIONS = (4.0, 1.0, 0.5)
PAPER = 4.0  # W_up is d × 4d in its §3
WIDTHS = (4, 8, 16, 32, 64, 128)

STATEMENT = Statement(
    id=ID,
    title="Equation 6: an MLP only multiplies the condition number",
    plain=(
        "With the usual fourfold expansion the bound is wrong: W_up is wide, W_down is tall, and two well-conditioned "
        "matrices of that kind can have an ill-conditioned product. With independent random weights and n ≥ d they "
        "mostly do. What the paper takes from it, that an MLP multiplies the condition number once and does not cube "
        "it, stays true with another constant."
    ),
    claim="κ(X W_up W_down) ≤ κ(W_up)κ(W_down)·κ(X) for an MLP with a linear activation, W_up of d × 4d.",
    instead=(
        Fact(
            key="product",
            says="κ(X W_up W_down) ≤ κ(W_up W_down)·κ(X), for every n, every expansion of at least 1 and X of full "
            "rank: the constant is the condition number of the product, and κ(X) stands to the first power, in "
            "contrast to attention's cube.",
            proof="G = W_up W_down is square. If it is singular, the right side is infinite. Otherwise it has full row "
            "rank: ‖GᵀXᵀu‖ ≥ σmin(G)‖Xᵀu‖ for every u, so the smallest singular value of XG that is not zero is at "
            "least σmin(G)σmin(X), and the largest at most σmax(G)σmax(X).",
        ),
        Fact(
            key="kept",
            says="κ(W_up W_down) ≤ κ(W_up)κ(W_down) where the inner dimension is kept: square weights, or W_down with "
            "the column space of W_upᵀ. There Eq. 6 holds.",
            proof="W_down v lies in the row space of W_up, on which ‖W_up y‖ ≥ σmin(W_up)‖y‖; so ‖W_up W_down v‖ ≥ "
            "σmin(W_up)σmin(W_down)‖v‖. Square weights of full rank have the whole space as their row space.",
        ),
        Fact(
            says="For independent weights with expansion 4, κ(W_up W_down) grows like d, while κ(W_up)κ(W_down) tends "
            "to 9 (of each factor the limit is known: (1 + ½)/(1 − ½) = 3)."
        ),
    ),
    tested=f"d = {D}, n = {', '.join(map(str, LENGTHS))}; expansions 4, 1 and 1/2; Gaussian, uniform and orthogonal "
    f"weights; GELU beside the linear activation; widths to {WIDTHS[-1]}.",
    not_tested="Biases and LayerNorm; convolutional or gated MLPs.",
)  # fmt: skip


def bound_of(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The right side of Eq. 6."""
    return kappa(up) * kappa(down) * kappa(x)


def cases(draws: int, seed: int, trained: Sequence[TrainedBlock] = ()) -> Iterator[Case]:
    for expansion in EXPANSIONS:
        for kind in WEIGHTS:
            for n in LENGTHS:
                source = generator(seed, ID, expansion, kind, n)
                x, hidden = tokens(draws, n, D, source), int(expansion * D)
                up, down = weights(kind, draws, D, hidden, source), weights(kind, draws, hidden, D, source)
                settings = {"expansion": expansion, "weights": kind, "n": n, "d": D}
                part = "claim" if expansion == PAPER else "beyond"
                yield from _judge(f"expansion {expansion:g}, {kind}, n = {n}", x, up, down, part=part, **settings)
                if expansion >= 1:
                    name = f"W_down in the row space of W_up, expansion {expansion:g}, {kind}, n = {n}"
                    kept = up.mT @ weights(kind, draws, D, D, source)
                    known, measured = bound_of(x, up, kept), kappa(x @ up @ kept)
                    yield compare(name, known, measured, part="instead", fact="kept", **settings)
    for block in trained:
        mlp = block.mlp()
        if mlp is not None:
            x, up, down = mlp
            settings = {
                "expansion": up.shape[-1] / up.shape[-2],
                "weights": "trained",
                "n": x.shape[1],
                "d": x.shape[2],
            }
            yield from _judge(f"trained {block.name}, n = {x.shape[1]}", x, up, down, part="claim", **settings)


def _judge(name: str, x: Tensor, up: Tensor, down: Tensor, *, part, **settings) -> Iterator[Case]:
    bound, hidden = bound_of(x, up, down), up.shape[-1]
    rank = min(*x.shape[-2:], hidden)  # κ = ‖A‖‖A⁺‖: the zero singular values of a bottleneck do not count
    measured = kappa_at_rank(x @ up @ down, rank)
    yield compare(f"linear, {name}", bound, measured, part=part, **settings)
    if hidden >= x.shape[-1]:
        known = kappa(x) * kappa(up @ down)
        yield compare(f"κ(X)κ(W_up W_down), {name}", known, measured, part="instead", fact="product", **settings)
    yield compare(f"GELU, {name}", bound, kappa_at_rank(gelu(x @ up) @ down, rank), part="beyond", **settings)


def examples() -> list[Example]:
    x = torch.eye(2, dtype=torch.float64)
    up = torch.tensor([[1, 0, 0], [0, 1, 0]], dtype=torch.float64)
    down = torch.tensor([[1, 0], [0, 0.01], [0, (1 - 0.01**2) ** 0.5]], dtype=torch.float64)
    return [
        Example(
            title="Two tokens, two wide, three hidden units: perfectly conditioned weights, ill-conditioned output",
            text=(
                "X = I. W_up has orthonormal rows, W_down orthonormal columns, and the third hidden unit, from which "
                "W_down reads most of its second output, is never written by W_up. The output is diag(1, 0.01)."
            ),
            matrices={"X": x.tolist(), "W_up": up.tolist(), "W_down": down.tolist()},
            bound=float(bound_of(x, up, down)),
            measured=float(kappa(x @ up @ down)),
        )
    ]  # fmt: skip


def chart(draws: int, seed: int) -> Lines:
    """κ of the product and product of the κ, against the width."""
    lines = []
    for expansion in (4, 1):
        product, factors = [], []
        for d in WIDTHS:
            source, count = generator(seed, ID, "chart", expansion, d), max(40, int(draws * min(1.0, (32 / d) ** 2)))
            up = weights("gaussian", count, d, expansion * d, source)
            down = weights("gaussian", count, expansion * d, d, source)
            product.append(median(kappa(up @ down)))
            factors.append(median(kappa(up) * kappa(down)))
        lines.append(Line(name=f"κ(W_up W_down), expansion {expansion}", x=list(WIDTHS), y=product))
        lines.append(Line(name=f"κ(W_up)κ(W_down), expansion {expansion}", x=list(WIDTHS), y=factors, dashed=True))
    return Lines(
        title="The constant of Equation 6", x="d", y="κ", log_x=True, log_y=True, lines=lines,
        caption="Median over Gaussian weights. Where the solid line is above its dashed one, the bound is wrong.",
    )  # fmt: skip


def summary(cases: Sequence[Case], lines: Lines) -> list[str]:
    def pick(start: str, **wanted) -> list[Case]:
        return [c for c in cases if c.name.startswith(start) and wanted.items() <= c.settings.items()]

    product, factors = (
        next(line for line in lines.lines if line.name.startswith(s))
        for s in ("κ(W_up W_down), expansion 4", "κ(W_up)κ(W_down), expansion 4")
    )
    usual = pick("linear", expansion=4.0)
    orthogonal = [c for c in usual if c.settings["weights"] == "orthogonal"]
    independent = [c for c in usual if c.settings["weights"] in ("gaussian", "uniform")]
    tall = [c for c in independent if c.settings["n"] >= D]
    wide = [c for c in independent if c.settings["n"] < D]
    gelus = [c for c in pick("GELU", expansion=4.0) if c.settings["weights"] != "trained"]
    narrow = pick("linear", expansion=0.5)
    found = [
        f"Expansion 4, Gaussian and uniform weights: {share(tall)} draws violate the bound for n ≥ d, {share(wide)} "
        f"for n < d; orthogonal weights, any n: {share(orthogonal)}.",
        f"Square weights: {share(pick('linear', expansion=1.0))} violate it. A bottleneck (expansion 1/2): "
        f"{share([c for c in narrow if c.settings['n'] >= D])} for n ≥ d, "
        f"{share([c for c in narrow if c.settings['n'] < D])} for n < d.",
        f"At d = {product.x[-1]} and expansion 4 the median κ(W_up W_down) is {product.y[-1]:.3g}, and "
        f"κ(W_up)κ(W_down) {factors.y[-1]:.3g}.",
        f"With GELU in between: {share(gelus)} draws violate it at expansion 4.",
    ]
    trained = pick("linear", weights="trained")
    if trained:
        found.append(
            f"Trained MLPs: {share(trained)} images violate it without activation, "
            f"{share(pick('GELU', weights='trained'))} with GELU."
        )
    return found
