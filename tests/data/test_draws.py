import random

import numpy as np
import torch

from wellcond.data.draws import STEP, WORD, _scramble, draw_normal, draw_order, draw_uniform, make_key

ROWS = torch.tensor([0, 1, 17, 49_999, 2**40])


def test_the_draws_are_the_hash_of_whole_numbers() -> None:
    """Against Python's integers, which do not overflow."""
    drawn = draw_uniform(seed=3, epoch=5, rows=ROWS, count=4, stream=1)
    key = make_key(3, 5, 1)
    for row, numbers in zip(ROWS.tolist(), drawn.tolist(), strict=True):
        per_row = _scramble((row * STEP + key) & WORD)
        assert numbers == [(_scramble((per_row + which * STEP) & WORD) >> 40) / 2**24 for which in range(1, 5)]


def test_uniform_numbers_fill_their_range_evenly() -> None:
    drawn = draw_uniform(seed=0, epoch=0, rows=torch.arange(20_000), count=10).double()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.histc(drawn, bins=100, min=0, max=1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 160  # χ² with 99 degrees of freedom: 1 in 10,000 is above 161
    together = torch.corrcoef(drawn.T) - torch.eye(10)
    assert together.abs().max() < 0.03  # four deviations
    neighbours = torch.corrcoef(torch.stack([drawn[1:, 0], drawn[:-1, 0]]))[0, 1]
    assert neighbours.abs() < 0.03


def test_normal_numbers_have_the_moments_of_their_law() -> None:
    drawn = draw_normal(seed=0, epoch=0, rows=torch.arange(2000), count=101).double()
    assert drawn.shape == (2000, 101)
    assert drawn.mean().abs() < 0.01
    assert (drawn.var() - 1).abs() < 0.02
    assert (drawn**4).mean().sub(3).abs() < 0.1
    assert torch.corrcoef(torch.stack([drawn[:, 0], drawn[:, 51]]))[0, 1].abs() < 0.09  # of one word: cosine and sine


def test_seed_epoch_row_and_stream_each_matter() -> None:
    first = draw_uniform(seed=0, epoch=0, rows=ROWS, count=3)
    assert len(set(first.flatten().tolist())) == first.numel()
    for other in ({"seed": 1}, {"epoch": 1}, {"stream": 1}):
        assert not (draw_uniform(**{"seed": 0, "epoch": 0, "rows": ROWS, "count": 3, **other}) == first).any()  # pyright: ignore[reportArgumentType]
    assert make_key(1, 2) != make_key(2, 1)


def test_an_order_is_a_permutation_of_its_own() -> None:
    order = draw_order(seed=0, epoch=3, count=1000)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert torch.equal(order, draw_order(seed=0, epoch=3, count=1000))
    assert not torch.equal(order, draw_order(seed=0, epoch=4, count=1000))
    assert not torch.equal(order, draw_order(seed=1, epoch=3, count=1000))


def test_the_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    draw_order(seed=0, epoch=0, count=10)
    draw_normal(seed=0, epoch=0, rows=ROWS, count=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002
