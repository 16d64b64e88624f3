"""Matrices for properties: a shape, a condition number and a seed."""

import math

import pytest
import torch


def _matrix(rows: int, columns: int, log_kappa: float, seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    side = min(rows, columns)
    u, v = (torch.linalg.qr(torch.randn(n, side, dtype=torch.float64, generator=source))[0] for n in (rows, columns))
    s = torch.logspace(0, -log_kappa / math.log(10) if side > 1 else 0, side, dtype=torch.float64)
    return (u * s) @ v.mT


@pytest.fixture(scope="session")
def matrix():
    """matrix(rows, columns, log_kappa, seed): float64, κ = exp(log_kappa), random singular vectors."""
    return _matrix
