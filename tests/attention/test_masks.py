"""SDPA's masks, read as masks of keys."""

import pytest
import torch

from wellcond.attention.masks import check_inputs, key_mask

QUERY, KEY = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4)


@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 1, 1, 7), (2, 3, 1, 7), (1, 1, 7)])
def test_masks_of_keys(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.5
    found = key_mask(mask, QUERY, KEY)
    expected = mask.expand(2, 3, 5, 7)
    assert torch.equal(found.keep.expand(2, 3, 7), expected[:, :, 0])
    assert found.weights is None
    numbers = torch.randn(shape).masked_fill(~mask, -torch.inf)
    found = key_mask(numbers, QUERY, KEY)
    assert torch.equal(found.keep.expand(2, 3, 7), expected[:, :, 0])
    assert torch.equal(found.weights.expand(2, 3, 7), numbers.exp().expand(2, 3, 5, 7)[:, :, 0])


def test_an_expanded_row_is_still_one() -> None:
    mask = (torch.rand(2, 1, 1, 7) > 0.5).expand(2, 1, 5, 7)
    assert torch.equal(key_mask(mask, QUERY, KEY).keep, mask[:, :, 0])


@pytest.mark.parametrize("lowest", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_very_negative_numbers_take_a_key_out(lowest: float) -> None:
    found = key_mask(torch.tensor([0.0, lowest, -3.0, 0, 0, 0, 0]), QUERY, KEY)
    assert found.keep.flatten().tolist() == [True, False, *[True] * 5]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"mask\[\.\.\., :1, :\]"):
        key_mask(torch.ones(2, 1, 5, 7, dtype=torch.bool), QUERY, KEY)
    with pytest.raises(ValueError, match=r"mask\[:, None, None, :\]"):
        key_mask(torch.ones(2, 7, dtype=torch.bool), QUERY, KEY)
    with pytest.raises(ValueError, match="does not broadcast"):
        key_mask(torch.ones(6, dtype=torch.bool), QUERY, KEY)
    with pytest.raises(ValueError, match="boolean"):
        key_mask(torch.ones(7, dtype=torch.long), QUERY, KEY)
    with pytest.raises(ValueError, match="same width"):
        check_inputs(QUERY, KEY[..., :3], KEY)
    with pytest.raises(ValueError, match="repeat_interleave"):
        check_inputs(QUERY, KEY[:, :1], KEY[:, :1])
    with pytest.raises(ValueError, match="floating-point"):
        check_inputs(QUERY.long(), KEY, KEY)
