"""κ(AB) ≤ κ(A)κ(B): the step that every bound of the first paper takes, and when it may be taken.

    product_rule_applies(a, b)      # True: A has full column rank, or B has full row rank
    wide_times_tall()               # the smallest example where neither holds, and the rule fails

κ is σmax over the smallest singular value that is not zero, ‖A‖‖A⁺‖. Let A be m × r and B r × k. If A has full column
rank, no vector of B's image is lost: ‖ABx‖ ≥ σmin(A)·‖Bx‖ ≥ σmin(A)·σmin(B)·‖x‖ for x outside B's kernel, and the rule
holds. If B has full row rank, the same argument holds for (AB)ᵀ. If A is wide and B is tall, A may shrink just the
directions that B has: the rule is wrong, and both factors may be perfectly conditioned.
"""

import math

import torch
from torch import Tensor

from wellcond.theory.draws import kappa
from wellcond.theory.findings import Example

__all__ = ["product_rule_applies", "wide_times_tall"]


def product_rule_applies(a: Tensor, b: Tensor) -> bool:
    """Whether the inner dimension is kept: A (m × r) has full column rank or B (r × k) has full row rank."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"A {tuple(a.shape)} and B {tuple(b.shape)} have no product; pass m × r and r × k")
    inner = a.shape[1]
    ranks = (int(torch.linalg.matrix_rank(matrix.double())) for matrix in (a, b))
    return any(rank == inner for rank in ranks)


def wide_times_tall(degrees: float = 89.0) -> Example:
    """A keeps two of three coordinates, B turns one of them away: κ(A) = κ(B) = 1, and κ(AB) = 1/cos."""
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
