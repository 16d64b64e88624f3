"""SDPA's masks, read as masks of keys."""

import math

import pytest
import torch

from wellcond.attention import find_attention, kernelized_attention, skyformer, skyformer_attention, softmax_attention
from wellcond.attention.checks import check_inputs
from wellcond.attention.masks import check_mask, key_mask, query_keep
from wellcond.numerics import gaussian

QUERY, KEY = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4)
WITH_LANDMARKS = [
    ("skyformer", {"num_landmarks": 10}),
    ("skyformer", {"num_landmarks": 10, "landmarks": "segment"}),
    ("skyformer", {"num_landmarks": 10, "kernel": "softmax"}),
    ("nystrom", {"num_landmarks": 5}),
]
LIKE_SOFTMAX = [
    ("skyformer", {"kernel": "softmax", "gamma": 0.0}),
    ("nystrom", {"num_landmarks": 8}),
    ("nystrom", {"num_landmarks": 20}),
]


# ---- what a mask says


@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 1, 1, 7), (2, 3, 1, 7), (1, 1, 7), (2, 1, 1, 1), (2, 3, 1, 1), ()])
def test_masks_of_keys(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.5
    found = key_mask(mask, QUERY, KEY)
    expected = mask.expand(2, 3, 5, 7)
    assert found.keep.shape[-1] == 7  # who counts the keys of an entry that stands for all of them finds them all
    assert found.keep.stride(-1) == 1
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


def test_relative_numbers_have_the_largest_zero_and_no_other_number_is_lost() -> None:
    numbers = torch.tensor([-110.0, -105, -1e4, -107, -110, -math.inf, -108])
    found = key_mask(numbers, QUERY, KEY, relative=True)
    assert found.keep.flatten().tolist() == [True, True, False, True, True, False, True]
    torch.testing.assert_close(found.weights.flatten(), (numbers + 105).exp())
    assert not key_mask(torch.full((7,), -math.inf), QUERY, KEY, relative=True).keep.any()


@pytest.mark.parametrize("relative", [False, True])
def test_a_nan_in_a_mask_is_not_hidden(relative: bool) -> None:
    found = key_mask(torch.tensor([0.0, math.nan, 0, 0, 0, 0, 0]), QUERY, KEY, relative=relative)
    assert found.keep[..., 1].all()
    assert found.weights[..., 1].isnan().all()


@pytest.mark.parametrize("shape", [(5,), (2, 1, 5), (3, 5), (2, 3, 5), (2, 1, 1, 5), (2, 1, 1), ()])
def test_masks_of_queries(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.5
    expected = (mask[:, 0] if len(shape) == 4 else mask).expand(2, 3, 5)
    assert torch.equal(query_keep(mask, QUERY).expand(2, 3, 5), expected)
    assert query_keep(mask, QUERY).shape[-1] == 5


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"mask\.any\(-2, keepdim=True\)"):
        key_mask(torch.ones(2, 1, 5, 7, dtype=torch.bool), QUERY, KEY)
    with pytest.raises(ValueError, match=r"mask\[:, None, None, :\]"):
        key_mask(torch.ones(2, 7, dtype=torch.bool), QUERY, KEY)
    with pytest.raises(ValueError, match="does not broadcast"):
        key_mask(torch.ones(6, dtype=torch.bool), QUERY, KEY)
    with pytest.raises(ValueError, match="boolean"):
        key_mask(torch.ones(7, dtype=torch.long), QUERY, KEY)
    with pytest.raises(ValueError, match=r"mask\.bool\(\)"):
        check_mask(torch.ones(5, 7, dtype=torch.long), QUERY, KEY)
    for wrong in (torch.ones(4, 7), torch.ones(3, 1, 1, 7), torch.ones(1, 2, 3, 5, 7)):
        with pytest.raises(ValueError, match="does not broadcast"):
            check_mask(wrong > 0, QUERY, KEY)
    with pytest.raises(ValueError, match=r"float32"):
        query_keep(torch.ones(2, 1, 5), QUERY)
    with pytest.raises(ValueError, match=r"mask\[:, None, :\]"):
        query_keep(torch.ones(2, 5) > 0, QUERY)
    for wrong in (torch.ones(2, 1, 4), torch.ones(2, 1, 6), torch.ones(2, 3, 5, 5), torch.ones(7)):
        with pytest.raises(ValueError, match=r"\(2, 3, 5\)"):
            query_keep(wrong > 0, QUERY)
    with pytest.raises(ValueError, match="same width"):
        check_inputs(QUERY, KEY[..., :3], KEY)
    with pytest.raises(ValueError, match="repeat_interleave"):
        check_inputs(QUERY, KEY[:, :1], KEY[:, :1])
    with pytest.raises(ValueError, match="floating-point"):
        check_inputs(QUERY.long(), KEY, KEY)


# ---- what attentions make of it


@pytest.mark.parametrize(("name", "settings"), WITH_LANDMARKS, ids=str)
def test_one_entry_for_all_keys_is_as_many_entries(name: str, settings: dict) -> None:
    q, k, v = (torch.randn(2, 3, 20, 4) for _ in range(3))
    attend = find_attention(name).function
    plain = attend(q, k, v, **settings)
    for mask in (torch.ones(2, 1, 1, 1, dtype=torch.bool), torch.zeros(2, 1, 1, 1), torch.tensor(True)):
        torch.testing.assert_close(attend(q, k, v, mask, **settings), plain)
    half = attend(q, k, v, torch.tensor([True, False])[:, None, None, None], **settings)
    torch.testing.assert_close(half[0], plain[0])
    assert (half[1] == 0).all()


@pytest.mark.parametrize(("name", "settings"), LIKE_SOFTMAX, ids=str)
@pytest.mark.parametrize("shift", [-200.0, -105.0, 95.0, 1e4])
def test_a_shift_of_all_numbers_changes_nothing(name: str, settings: dict, shift: float) -> None:
    q, k, v = (torch.randn(2, 2, 20, 4) for _ in range(3))
    numbers = torch.randint(-4, 1, (2, 1, 1, 20)).float()  # whole, so that the shift rounds nothing
    attend = find_attention(name).function
    expected = attend(q, k, v, numbers, **settings)
    torch.testing.assert_close(attend(q, k, v, numbers + shift, **settings), expected, rtol=1e-4, atol=1e-5)
    if settings.get("num_landmarks") != 8:
        torch.testing.assert_close(expected, softmax_attention(q, k, v, numbers), rtol=1e-3, atol=1e-3)


def test_large_keys_with_small_numbers_take_nothing_from_the_others() -> None:
    q, k, v = (torch.randn(1, 1, 6, 4, dtype=torch.float64) for _ in range(3))
    k[:, :, 0] *= 25  # exp(‖k‖²/4) of it is beyond all others', and its number takes it back
    numbers = torch.tensor([-100.0, 0, 0, -1, 0, 0])
    found = skyformer_attention(q.float(), k.float(), v.float(), numbers, kernel="softmax", gamma=0.0)
    exact = softmax_attention(q, k, v, numbers.double()[None])
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "settings"), [*WITH_LANDMARKS, ("kernelized", {})], ids=str)
def test_a_nan_in_a_mask_is_seen_in_the_output(name: str, settings: dict) -> None:
    x = torch.randn(2, 2, 20, 4)
    mask = torch.zeros(2, 1, 1, 20)
    mask[1, ..., 3] = math.nan
    out = find_attention(name).function(x, x, x, mask, **settings)
    assert out[0].isfinite().all()
    assert out[1].isnan().any(-1).all()


def test_kernelized_refuses_numbers_that_are_no_logits_and_shapes_that_do_not_fit() -> None:
    x = torch.randn(2, 3, 6, 4)
    with pytest.raises(ValueError, match="int64"):
        kernelized_attention(x, x, x, torch.ones(6, 6, dtype=torch.long).tril())
    with pytest.raises(ValueError, match="does not broadcast"):
        kernelized_attention(x[:1], x[:1], x[:1], torch.ones(5, 1, 6, 6, dtype=torch.bool))
    torch.testing.assert_close(kernelized_attention(x, x, x, torch.tensor(True)), kernelized_attention(x, x, x))


# ---- kernels read masks that are dense along the last dimension


def masks_of_any_strides(device: str) -> dict[str, torch.Tensor]:
    by_token = torch.rand(40, 2, device=device) > 0.4
    return {
        "transposed": by_token.T[:, None, None, :],
        "every other": (torch.rand(2, 1, 1, 80, device=device) > 0.4)[..., ::2],
        "one entry": torch.ones(2, 1, 1, 1, dtype=torch.bool, device=device),
    }


@pytest.mark.parametrize("which", ["transposed", "every other", "one entry"])
def test_fused_skyformer_reads_any_strides(which: str, device: str, monkeypatch) -> None:
    q, k, v = (torch.randn(2, 2, 40, 16, device=device) for _ in range(3))
    mask = masks_of_any_strides(device)[which]
    exact = skyformer_attention(q.double(), k.double(), v.double(), mask, num_landmarks=12)
    calls = []
    fused = skyformer.fused_skyformer
    monkeypatch.setattr(skyformer, "can_fuse", lambda *_, **__: True)
    monkeypatch.setattr(skyformer, "fused_skyformer", lambda *a, **s: calls.append(1) or fused(*a, **s))
    found = skyformer_attention(q, k, v, mask, num_landmarks=12, query_mask=mask)
    assert calls  # else nothing of this was asked
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("which", ["transposed", "every other", "one entry"])
def test_streaming_kernels_read_any_strides(which: str, device: str, monkeypatch) -> None:
    q, k, v = (torch.randn(2, 2, 40, 16, device=device) for _ in range(3))
    mask = masks_of_any_strides(device)[which]
    exact = kernelized_attention(q.double(), k.double(), v.double(), mask)
    numbers = torch.zeros(mask.shape, device=device).masked_fill(~mask, -math.inf)
    monkeypatch.setattr(gaussian, "fused_kernels", lambda _: True)
    for given in (mask, numbers.mT.contiguous().mT):
        torch.testing.assert_close(kernelized_attention(q, k, v, given).double(), exact, rtol=1e-3, atol=1e-3)
