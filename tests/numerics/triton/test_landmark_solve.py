"""What happens between landmarks, against float64; the whole of it is in tests/attention/test_skyformer_fused.py."""

import pytest
import torch

from wellcond.numerics.gaussian_weights import gaussian_weights
from wellcond.numerics.triton.landmark_plan import plan_for

GAMMA = 0.125  # in float32 as in float64


def solved(rows, tokens, scale):
    """−Z (b · h, d, d), and Z κ(L, tokens) tokens, of landmarks (b, h, d, p)."""
    d, p = rows.shape[2:]
    plan = plan_for(tokens, tokens, tokens, rows, None, 0, None, None)
    _, space, work = plan.forward(tokens, tokens, tokens, rows, None, None, None, scale, GAMMA)
    y = space[plan.kept["solved"] : plan.kept["end"]].view(plan.matrices, plan.side, plan.values)
    assert not y[:, d:].any()
    return work[:, :d, :d], y[:, :d, :p]


@pytest.mark.parametrize(("d", "p"), [(1, 4), (7, 8), (32, 16), (50, 32), (64, 24), (128, 32)])
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_the_inverse_and_what_is_solved(d, p, spread, device):
    rows = (torch.randn(2, 1, d, p, generator=torch.Generator().manual_seed(0)) * spread).to(device)
    negative, y = solved(rows, rows, p**-0.5)
    weights = gaussian_weights(rows.double(), rows.double(), scale=p**-0.5)[:, 0]
    eye = torch.eye(d, dtype=torch.float64, device=device)
    matrix = weights + GAMMA * eye
    assert (-negative @ matrix - eye).norm() < 1e-5 * (d + GAMMA) / GAMMA  # of weights in float32
    truth = torch.linalg.solve(matrix, weights @ rows[:, 0].double())
    assert (y - truth).norm() < 1e-4 * truth.norm()


def test_equal_landmarks_do_no_harm(device):
    rows = torch.randn(1, 2, 1, 16).expand(1, 2, 40, 16).contiguous().to(device)
    negative, _ = solved(rows, rows, 0.25)
    u = torch.ones(40, 1, device=device, dtype=torch.float64)
    torch.testing.assert_close(-negative @ u, u.expand(2, 40, 1) / (40 + GAMMA), rtol=1e-5, atol=0)


def test_many_shares_are_added_up(device):
    """More of them than are added at once."""
    rows, tokens = torch.randn(1, 1, 6, 4, device=device), torch.randn(1, 1, 3400, 4, device=device)
    assert plan_for(tokens, tokens, tokens, rows, None, 0, None, None).key_shares > 5
    negative, y = solved(rows, tokens, 0.5)
    sums = gaussian_weights(rows.double(), tokens.double(), scale=0.5) @ tokens.double()
    torch.testing.assert_close(y.double(), -negative @ sums[0], rtol=1e-4, atol=1e-4)
