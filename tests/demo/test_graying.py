import numpy as np
import pytest
import torch

from wellcond.demo import graying as demo

PHOTOGRAPHS = demo.load_photographs()


def test_photographs_are_what_a_model_gets():
    for photo in PHOTOGRAPHS:
        assert photo.pixels.shape == (3, 224, 224)
        assert 0 <= photo.pixels.min() < photo.pixels.max() <= 1
        # one row per patch, its values channel by channel, as a convolution reads them
        patch = ((photo.pixels - demo.MEAN) / demo.STD)[:, 16:32, 48:64]
        assert torch.equal(photo.tokens[14 + 3], patch.flatten())


@pytest.mark.parametrize("photo", PHOTOGRAPHS, ids=lambda photo: photo.name)
def test_measurements_agree_with_float64(photo):
    x = photo.tokens.double().numpy()
    u, s, v = np.linalg.svd(x, full_matrices=False)
    for epsilon in (0.95, 0.5):
        found = demo.measure(photo, "svd", epsilon)
        truth = s[0] * (s / s[0]) ** epsilon
        np.testing.assert_allclose(found.spectrum, truth, rtol=1e-4)
        assert found.kappa == pytest.approx((s[0] / s[-1]) ** epsilon, rel=1e-4)
        assert found.log_kappa == pytest.approx(np.log(found.kappa), rel=1e-6)
        assert found.change == pytest.approx(np.linalg.norm((u * truth) @ v - x) / np.linalg.norm(x), rel=1e-3)
        assert found.status == "ok"


def test_no_graying_changes_nothing():
    photo = PHOTOGRAPHS[0]
    found = demo.measure(photo, "none", 1.0)
    assert found.change == 0
    np.testing.assert_allclose(found.pixels, photo.pixels.permute(1, 2, 0), atol=1e-5)
