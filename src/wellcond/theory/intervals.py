"""How sure is a rate? The Clopper-Pearson interval: exact, never too narrow.

clopper_pearson(0, 400)      # (0.0, 0.0092): nothing seen in 400 draws still allows a rate of 0.9 %
clopper_pearson(3, 400)      # (0.0015, 0.0218)
"""

import math

__all__ = ["clopper_pearson"]


def clopper_pearson(failures: int, draws: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of rates under which `failures` of `draws` are not surprising, at `confidence`.

    Raises ValueError unless 0 ≤ failures ≤ draws, draws ≥ 1 and 0 < confidence < 1.
    """
    if not 0 <= failures <= draws or draws < 1:
        raise ValueError(f"{failures} failures of {draws} draws make no rate; draw at least once")
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence}")
    tail = (1 - confidence) / 2
    low = 0.0 if failures == 0 else _solve(lambda p: 1 - _at_most(failures - 1, draws, p) - tail)
    high = 1.0 if failures == draws else _solve(lambda p: tail - _at_most(failures, draws, p))
    return low, high


def _at_most(count: int, draws: int, p: float) -> float:
    """P(Binomial(draws, p) ≤ count)."""
    if p <= 0 or p >= 1:
        return 1.0 if p <= 0 or count >= draws else 0.0
    log_p, log_q = math.log(p), math.log1p(-p)
    whole = math.lgamma(draws + 1)
    logs = (
        whole - math.lgamma(k + 1) - math.lgamma(draws - k + 1) + k * log_p + (draws - k) * log_q
        for k in range(count + 1)
    )
    return min(1.0, math.fsum(math.exp(value) for value in logs))


def _solve(rising) -> float:
    """Where a rising function crosses zero in [0, 1]."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
