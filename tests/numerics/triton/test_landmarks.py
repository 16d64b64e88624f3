"""The inverse of landmarks' weights against float64."""

import pytest
import torch

from wellcond.numerics.gaussian import gaussian_weights
from wellcond.numerics.triton.landmarks import landmark_inverse


@pytest.mark.parametrize(("d", "p"), [(1, 4), (7, 8), (32, 16), (50, 32), (64, 24), (128, 32)])
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_the_inverse(d, p, spread, device):
    rows = (torch.randn(2, 1, d, p, generator=torch.Generator().manual_seed(0)) * spread).to(device)
    gamma = 0.125  # in float32 as in float64
    inverse, weights = landmark_inverse(rows, scale=p**-0.5, gamma=gamma)
    want = gaussian_weights(rows.double(), rows.double(), scale=p**-0.5)
    assert (weights.double() - want).abs().max() < 1e-5
    truth = torch.linalg.inv(weights.double() + gamma * torch.eye(d, dtype=torch.float64, device=device))
    assert (inverse - truth).norm() < 1e-12 * (d + gamma) / gamma * truth.norm()  # of the weights as they are


def test_equal_landmarks_do_no_harm(device):
    rows = torch.randn(1, 2, 1, 16).expand(1, 2, 40, 16).to(device)
    inverse, weights = landmark_inverse(rows, scale=0.25, gamma=0.1)
    torch.testing.assert_close(weights, torch.ones_like(weights), rtol=1e-6, atol=0)
    u = torch.ones(40, 1, device=device, dtype=torch.float64)
    torch.testing.assert_close(inverse @ u, u.expand(1, 2, 40, 1) / 40.1, rtol=1e-5, atol=0)


def test_any_strides_and_no_batch_mates(device):
    rows = torch.randn(3, 2, 20, 8).to(device)
    whole = landmark_inverse(rows, scale=0.3, gamma=0.1)[0]
    assert torch.equal(landmark_inverse(rows[1:2], scale=0.3, gamma=0.1)[0], whole[1:2])
    turned = rows.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(landmark_inverse(turned, scale=0.3, gamma=0.1)[0], whole)
