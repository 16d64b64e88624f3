"""The fixed positions: what they say about where a patch is."""

import math

import pytest
import torch

from wellcond.models.mae import PixelDecoder, sincos_positions


def test_positions_are_the_waves_they_claim_to_be() -> None:
    table = sincos_positions((3, 5), 12)
    assert table.shape == (15, 12)
    assert table.dtype == torch.float64
    for row in range(3):
        for column in range(5):
            waves = [1.0, 10_000 ** (-1 / 3), 10_000 ** (-2 / 3)]
            expected = [f(at * wave) for at in (row, column) for f in (math.sin, math.cos) for wave in waves]
            torch.testing.assert_close(table[5 * row + column], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("grid", [(1, 1), (1, 9), (7, 4), (6, 6)])
def test_products_depend_on_the_offset_alone(grid: tuple[int, int]) -> None:
    rows, columns = grid
    table = sincos_positions(grid, 64)
    products = (table @ table.T).reshape(rows, columns, rows, columns)
    torch.testing.assert_close(table.square().sum(1), torch.full((rows * columns,), 32.0, dtype=torch.float64))
    seen: dict[tuple[int, int], float] = {}
    for r, c, s, t in torch.cartesian_prod(*(torch.arange(n) for n in (rows, columns, rows, columns))).tolist():
        value = products[r, c, s, t].item()
        assert math.isclose(seen.setdefault((abs(r - s), abs(c - t)), value), value, abs_tol=1e-9)
        assert (value < 32 - 1e-3) == ((r, c) != (s, t))  # no two places look alike


def test_rows_and_columns_trade_places() -> None:
    table = sincos_positions((4, 6), 16).reshape(4, 6, 2, 8)
    turned = sincos_positions((6, 4), 16).reshape(6, 4, 2, 8)
    assert torch.equal(table, turned.transpose(0, 1).flip(2))


@pytest.mark.parametrize("dim", [0, 2, 6, 10])
def test_a_width_that_four_does_not_divide_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="4 divides"):
        sincos_positions((2, 2), dim)


@pytest.mark.parametrize("depth", [0, 2])
def test_shapes(depth: int) -> None:
    decoder = PixelDecoder(encoder_dim=24, dim=16, depth=depth, heads=2, grid_size=(3, 5), values=48)
    assert decoder(torch.randn(2, 6, 24), torch.tensor([[0, 3, 4, 9]]).expand(2, -1)).shape == (2, 15, 48)
    assert "positions" not in decoder.state_dict()
