"""The golden case of the specification, and a float64 truth for each attention, written out."""

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def golden() -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of the specification: 8 tokens of width 4, float64."""
    i, j = torch.arange(8, dtype=torch.float64)[:, None], torch.arange(4, dtype=torch.float64)[None]
    return torch.sin(0.7 * i + 1.3 * j), torch.cos(0.5 * i - 0.9 * j), torch.sin(0.3 * i * j + 0.2)


@pytest.fixture(scope="session")
def golden_landmarks(golden: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    query, key, _ = golden
    return torch.cat([query[[0, 3, 5]], key[[1, 4, 6]]])


def assert_golden(out: Tensor, row: list[float], total: float, norm: float) -> None:
    torch.testing.assert_close(out[0], torch.tensor(row, dtype=out.dtype), rtol=0, atol=1e-5)
    assert float(out.sum()) == pytest.approx(total, abs=1e-5)
    assert float(out.norm()) == pytest.approx(norm, abs=1e-5)


@pytest.fixture(scope="session", name="assert_golden")
def _assert_golden():
    return assert_golden


@pytest.fixture(scope="session")
def kernel():
    """exp(−scale/2 ‖x − y‖²) in float64, by differences."""

    def weights(x: Tensor, y: Tensor, scale: float | None = None) -> Tensor:
        scale = x.shape[-1] ** -0.5 if scale is None else scale
        squares = (x.double()[..., :, None, :] - y.double()[..., None, :, :]).square().sum(-1)
        return (-scale / 2 * squares).exp()

    return weights
