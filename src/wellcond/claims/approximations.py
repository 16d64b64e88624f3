"""Five approximations of softmax attention with one budget, and how far each is from it (Skyformer's Figure 1).

    errors = approximation_errors(query, key, value, budgets=(16, 32, 64, 128, 256))
    errors["performer", 64]                    # (draws, …): ‖approximate − exact output‖ of every matrix
    approximate_output("skyformer", query, key, value, budget=64)      # (…, n, c), float64

The budget d is the number of landmarks (Skyformer, Nyströmformer), of projected keys and values (Linformer), of random
features (Performer) or of queries that attend (Informer). Everything is computed in float64 and without masks, so pass
only tokens that count. The error is the spectral norm of the difference of the outputs, not divided by anything, as in
the paper; divide it by `norm_of(exact_output(…))` to make it relative.

Each is the method of its paper as an approximation: no weights are trained for it. Random parts are drawn anew at each
call and for every matrix; only Skyformer's landmarks are shared by the heads of a sample. Notation: n queries and keys,
p the width of a head, d the budget.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wellcond.attention import nystrom_attention, skyformer_attention

__all__ = [
    "APPROXIMATIONS",
    "approximate_output",
    "approximation_errors",
    "exact_output",
    "informer",
    "linformer",
    "norm_of",
    "nystromformer",
    "performer",
    "positive_features",
    "skyformer",
]

Draws = torch.Generator | None


def approximation_errors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    budgets: Sequence[int],
    draws: int = 1,
    generator: Draws = None,
) -> dict[tuple[str, int], Tensor]:
    """Return the errors by method and budget, (draws, …) each: one per draw and matrix of (…, n, p).

    Nyströmformer draws nothing, so it is computed once and repeated. An error is NaN if the approximation has no value.
    """
    exact = exact_output(query, key, value)
    found = {}
    for name in APPROXIMATIONS:
        for budget in budgets:
            times = 1 if name == "nystromformer" else draws
            outputs = (approximate_output(name, query, key, value, budget=budget, generator=generator) - exact
                       for _ in range(times))  # fmt: skip
            errors = torch.stack([norm_of(difference) for difference in outputs])
            found[name, budget] = errors.expand(draws, *errors.shape[1:]).clone()
    return found


def approximate_output(
    name: str, query: Tensor, key: Tensor, value: Tensor, *, budget: int, generator: Draws = None
) -> Tensor:
    """Return the output of one method, in float64. Raises ValueError, which lists the methods, for an unknown one."""
    if name not in APPROXIMATIONS:
        raise ValueError(f"there is no approximation {name!r}; there are {', '.join(APPROXIMATIONS)}")
    if budget < 1:
        raise ValueError(f"a budget of {budget} leaves nothing to attend with; give at least 1")
    return APPROXIMATIONS[name](query.double(), key.double(), value.double(), budget, generator)


def exact_output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return softmax(QKᵀ/√p) V, computed in float64, one matrix at a time."""
    return _one_by_one(lambda q, k, v: _logits(q, k).softmax(-1) @ v, query.double(), key.double(), value.double())


def norm_of(x: Tensor) -> Tensor:
    """Return the spectral norm of each matrix (…, n, c), from its Gram matrix: (…). NaN if the matrix is not finite."""
    short = x.mT @ x if x.shape[-1] <= x.shape[-2] else x @ x.mT
    finite = short.isfinite().all(-1).all(-1)
    largest = torch.linalg.eigvalsh(torch.where(finite[..., None, None], short, 0.0))[..., -1]
    return largest.clamp_min(0).sqrt().masked_fill(~finite, torch.nan)


# ---- The methods


def skyformer(q: Tensor, k: Tensor, v: Tensor, d: int, draws: Draws = None) -> Tensor:
    """Skyformer's Nyström method on softmax's own kernel (Chen, Zeng, Ji and Yang, NeurIPS 2021, §4.1 and Figure 1).

    SM(x, y) = exp(x·y/√p) of all queries and keys together is positive semi-definite. Its Nyström approximation with d
    landmarks drawn among them, half queries and half keys, gives Ã ≈ exp(QKᵀ/√p), and the output is Ã V divided by the
    row sums of Ã. The pseudo-inverse is exact, as in the theorem: nothing is added to the diagonal. Row sums of Ã may
    be zero or negative; if one is lost in rounding, the whole matrix is NaN.
    """
    settings = {"num_landmarks": d, "gamma": 0.0, "landmarks": "random", "kernel": "softmax", "generator": draws}
    try:
        return skyformer_attention(q, k, v, **settings)
    except ValueError:  # some matrix lost a row sum: find out which
        return _one_by_one(lambda *parts: _or_nan(*parts, **settings), q, k, v)


def nystromformer(q: Tensor, k: Tensor, v: Tensor, d: int, draws: Draws = None) -> Tensor:
    """Nyströmformer (Xiong, Zeng, Chakraborty, Tan, Fung, Li and Singh, AAAI 2021).

    softmax(QK̃ᵀ) softmax(Q̃K̃ᵀ)⁺ softmax(Q̃Kᵀ) V with the means Q̃, K̃ of d consecutive segments and six steps of the paper's
    iteration for the pseudo-inverse, without the paper's convolution. It is exact with as many segments as tokens.
    """
    return nystrom_attention(q, k, v, num_landmarks=d)


def linformer(q: Tensor, k: Tensor, v: Tensor, d: int, draws: Draws = None) -> Tensor:
    """Linformer (Wang, Li, Khabsa, Fang and Ma, 2020): softmax(Q(EK)ᵀ/√p) EV with E of d × n.

    The paper trains E, and proves that good ones exist by drawing entries from N(0, 1/d), for which E[EᵀE] = I. E is
    drawn in this way, one for keys and values. It does not become exact with d = n, because the softmax of mixed keys
    is not a mixture of softmaxes.
    """
    *lead, n, _ = k.shape
    e = torch.randn(*lead, d, n, generator=draws, dtype=k.dtype, device=k.device) / math.sqrt(d)
    return _logits(q, e @ k).softmax(-1) @ (e @ v)


def performer(q: Tensor, k: Tensor, v: Tensor, d: int, draws: Draws = None) -> Tensor:
    """Performer (Choromanski et al., ICLR 2021): FAVOR+, positive orthogonal random features of softmax's kernel.

    φ(x) = exp(ωᵢ·x − ‖x‖²/2)/√d with x = q/p^¼ or k/p^¼ and ω of N(0, I), orthogonal within each group of p, so that
    E[φ(q)·φ(k)] = exp(q·k/√p); the output is φ(Q)(φ(K)ᵀV) divided by φ(Q)(φ(K)ᵀ1). Inputs are scaled by p^¼ once;
    features are drawn anew at each call, and no constant is added to them.
    """
    directions = _orthogonal(q, d, draws)
    of_queries, of_keys = (positive_features(x, directions) for x in (q, k))
    # A factor of one query, or of all keys together, cancels: shift the largest exponents to 0.
    left = (of_queries - of_queries.amax(-1, keepdim=True)).exp()
    right = (of_keys - of_keys.amax((-2, -1), keepdim=True)).exp()
    return left @ (right.mT @ v) / (left @ right.sum(-2)[..., None])


def informer(q: Tensor, k: Tensor, v: Tensor, d: int, draws: Draws = None) -> Tensor:
    """Informer's ProbSparse attention (Zhou, Zhang, Peng, Zhang, Li, Xiong and Zhang, AAAI 2021).

    The d queries with the largest maxⱼ s − meanⱼ s attend exactly; s are a query's scores with d keys drawn for it (as
    many as in the published code, with replacement). All others get the mean of the values.
    """
    return _one_by_one(lambda q, k, v: _prob_sparse(q, k, v, d, draws), q, k, v)


APPROXIMATIONS: dict[str, Callable[..., Tensor]] = {
    "skyformer": skyformer,
    "nystromformer": nystromformer,
    "linformer": linformer,
    "performer": performer,
    "informer": informer,
}


# ---- Their parts


def positive_features(x: Tensor, directions: Tensor) -> Tensor:
    """Return log φ(x) of FAVOR+ without the factor 1/√d: ω·x/p^¼ − ‖x‖²/(2√p), (…, n, d), for directions (…, d, p)."""
    x = x / x.shape[-1] ** 0.25
    return x @ directions.mT - 0.5 * x.square().sum(-1, keepdim=True)


def _orthogonal(like: Tensor, d: int, draws: Draws) -> Tensor:
    """Return d rows, (…, d, p): each by itself is distributed as N(0, I), and those in a group of p are orthogonal."""
    lead, p = like.shape[:-2], like.shape[-1]
    groups = -(-d // p)
    normal = torch.randn(*lead, groups, p, p, generator=draws, dtype=like.dtype, device=like.device)
    q, r = torch.linalg.qr(normal)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()  # these make the rotation uniform
    lengths = torch.randn(*lead, groups, p, p, generator=draws, dtype=like.dtype, device=like.device).norm(dim=-1)
    rows = (q * signs[..., None, :]).mT * lengths[..., None]
    return rows.flatten(-3, -2)[..., :d, :]


def _prob_sparse(q: Tensor, k: Tensor, v: Tensor, d: int, draws: Draws) -> Tensor:
    n, m = q.shape[-2], k.shape[-2]
    scores = _logits(q, k)
    sampled = scores.gather(-1, torch.randint(m, (n, min(d, m)), generator=draws, device=q.device))
    active = (sampled.amax(-1) - sampled.mean(-1)).topk(min(d, n)).indices
    return v.mean(-2, keepdim=True).expand(n, -1).index_copy(0, active, scores[active].softmax(-1) @ v)


def _logits(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def _or_nan(q: Tensor, k: Tensor, v: Tensor, **settings: object) -> Tensor:
    try:
        return skyformer_attention(q, k, v, **settings)  # pyright: ignore[reportArgumentType]
    except ValueError:
        return torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=v.dtype, device=v.device)


def _one_by_one(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with one matrix at a time, for methods that need memory for n² numbers."""
    lead = q.shape[:-2]
    flat = zip(*(t.reshape(-1, *t.shape[-2:]) for t in (q, k, v)), strict=True)
    return torch.stack([attend(*parts) for parts in flat]).reshape(*lead, q.shape[-2], v.shape[-1])
