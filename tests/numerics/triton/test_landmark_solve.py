"""What happens between landmarks, against float64; the whole of it is in tests/attention/test_skyformer_fused.py."""

import pytest
import torch

from wellcond.numerics.gaussian import gaussian_weights
from wellcond.numerics.triton.landmark_sides import landmark_sums
from wellcond.numerics.triton.landmark_solve import landmark_solve

GAMMA = 0.125  # in float32 as in float64


def solved(rows, scale):
    """The landmarks and sums for rows alone, (b, h, d, p): −Z and Z κ(L, L) L."""
    landmarks, parts = landmark_sums(rows, rows, rows, None, 0, None, None, scale=scale)
    return (*landmark_solve(landmarks, parts, scale=scale, gamma=GAMMA), parts)


@pytest.mark.parametrize(("d", "p"), [(1, 4), (7, 8), (32, 16), (50, 32), (64, 24), (128, 32)])
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_the_inverse_and_what_is_solved(d, p, spread, device):
    rows = (torch.randn(2, 1, d, p, generator=torch.Generator().manual_seed(0)) * spread).to(device)
    negative, y, parts = solved(rows, p**-0.5)
    weights = gaussian_weights(rows.double(), rows.double(), scale=p**-0.5)[:, 0]
    matrix = weights + GAMMA * torch.eye(d, dtype=torch.float64, device=device)
    eye = torch.eye(d, dtype=torch.float64, device=device)
    assert (-negative[:, :d, :d] @ matrix - eye).norm() < 1e-5 * (d + GAMMA) / GAMMA  # of weights in float32
    sums = parts.sum(0).double()[:, :d]
    truth = torch.linalg.solve(matrix, sums)
    assert (y[:, :d] - truth).norm() < 1e-4 * truth.norm()
    assert not y[:, d:].any()


def test_equal_landmarks_do_no_harm(device):
    rows = torch.randn(1, 2, 1, 16).expand(1, 2, 40, 16).contiguous().to(device)
    negative, _, _ = solved(rows, 0.25)
    u = torch.ones(40, 1, device=device, dtype=torch.float64)
    torch.testing.assert_close(-negative[:, :40, :40] @ u, u.expand(2, 40, 1) / (40 + GAMMA), rtol=1e-5, atol=0)


def test_many_shares_are_added_up(device):
    """More parts than are added at once."""
    rows = torch.randn(1, 1, 6, 4, device=device)
    landmarks, _ = landmark_sums(rows, rows, rows, None, 0, None, None, scale=0.5)
    parts = torch.randn(11, 1, 32, 16, device=device)
    negative, y = landmark_solve(landmarks, parts, scale=0.5, gamma=GAMMA)
    torch.testing.assert_close(y.double(), -negative @ parts.sum(0).double(), rtol=1e-4, atol=1e-4)
