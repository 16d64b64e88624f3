"""Every attention refuses what it cannot mean, and says what was meant to be given."""

import numpy as np
import pytest
import torch

from wellcond.attention import (
    kernelized_attention,
    linear_attention,
    nystrom_attention,
    skyformer_attention,
    softmax_attention,
)
from wellcond.attention.nystrom import NystromCore
from wellcond.attention.skyformer import SkyformerCore

ATTENTIONS = [softmax_attention, linear_attention, kernelized_attention, skyformer_attention, nystrom_attention]
EVERY = pytest.mark.parametrize("attention", ATTENTIONS)
X = torch.randn(2, 3, 80, 4, generator=torch.Generator().manual_seed(0))


@EVERY
def test_tensors_of_floating_point_are_wanted(attention):
    with pytest.raises(TypeError, match=r"got Tensor, ndarray, Tensor.*torch\.from_numpy"):
        attention(X, X.numpy(), X)
    with pytest.raises(TypeError, match="NoneType"):
        attention(X, X, None)
    with pytest.raises(ValueError, match=r"got torch\.int64, torch\.float32"):
        attention(X.long(), X, X)
    with pytest.raises(ValueError, match="tokens, width"):
        attention(X[0, 0, 0], X, X)


@EVERY
def test_a_scale_is_a_finite_number(attention):
    """One that learns would get a gradient in some paths and none in others."""
    with pytest.raises(TypeError, match="square root"):
        attention(X, X, X, scale=torch.tensor(0.3, requires_grad=True))
    for wrong in ("0.3", True):
        with pytest.raises(TypeError, match="must be a number"):
            attention(X, X, X, scale=wrong)
    for wrong in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="must be finite"):
            attention(X, X, X, scale=wrong)
    for right in (np.float32(0.5), np.float64(0.5), 1):
        torch.testing.assert_close(attention(X, X, X, scale=right), attention(X, X, X, scale=float(right)))


@pytest.mark.parametrize("attention", [kernelized_attention, skyformer_attention])
def test_a_negative_scale_of_distances_is_refused(attention):
    with pytest.raises(ValueError, match="not negative: it multiplies squared distances"):
        attention(X, X, X, scale=-1.0)


@EVERY
def test_dropout_is_a_probability(attention):
    for wrong in (-0.5, 1.5):
        with pytest.raises(ValueError, match="from 0 to 1"):
            attention(X, X, X, dropout_p=wrong)


@EVERY
def test_masks_are_tensors_that_fit(attention):
    keep = torch.ones(2, 80, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"attn_mask is a tensor, not ndarray: torch\.as_tensor"):
        attention(X, X, X, keep.numpy())
    with pytest.raises(ValueError, match=r"mask\[:, None, None, :\]"):
        attention(X, X, X, keep)
    with pytest.raises(ValueError, match=r"mask\.bool\(\)"):
        attention(X, X, X, keep[:, None, None].long())
    for larger in ((5, 1, 80, 80), (1, 2, 3, 80, 80)):
        with pytest.raises(ValueError, match="does not broadcast"):
            attention(X[:1], X[:1], X[:1], torch.ones(larger, dtype=torch.bool))
    one_for_all = torch.arange(80) < 50
    wanted = attention(X, X, X, one_for_all.expand(2, 1, 1, 80))
    torch.testing.assert_close(attention(X, X, X, one_for_all), wanted)


@pytest.mark.parametrize("attention", [softmax_attention, linear_attention, kernelized_attention])
def test_a_mask_and_the_causal_flag_are_one_too_many(attention):
    mask = torch.ones(80, 80, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask & causal; of numbers to be added, mask\.masked_fill"):
        attention(X, X, X, mask, is_causal=True)


@pytest.mark.parametrize("attention", [skyformer_attention, nystrom_attention])
@pytest.mark.parametrize("numbers", [False, True])
def test_a_mask_of_pairs_that_hides_padding_can_be_reduced_as_advised(attention, numbers):
    """Also where the padding comes first, so that the first row of the mask hides everything."""
    keep = torch.arange(80) >= 30
    pairs = keep[:, None] & keep[None, :]
    mask = torch.zeros(80, 80).masked_fill(~pairs, torch.finfo(torch.float32).min) if numbers else pairs
    with pytest.raises(ValueError, match=r"pass mask\.(any|amax)\(-2, keepdim=True\)"):
        attention(X, X, X, mask)
    reduced = mask.amax(-2, keepdim=True) if numbers else mask.any(-2, keepdim=True)
    alone = attention(X[:, :, 30:], X[:, :, 30:], X[:, :, 30:])
    torch.testing.assert_close(attention(X, X, X, reduced)[:, :, 30:], alone, rtol=1e-4, atol=1e-4)


@EVERY
def test_torch_func_differentiates_it_forwards_and_twice(attention):
    x = X[:1, :, :20].double()  # few enough for Nyström to be softmax
    _, found = torch.func.jvp(lambda t: attention(t, x, x), (x,), (x,))
    step = 1e-6
    wanted = (attention((1 + step) * x, x, x) - attention((1 - step) * x, x, x)) / (2 * step)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    twice = torch.func.hessian(lambda s: attention(s * x, x, x).sum())(torch.tensor(1.0, dtype=x.dtype))
    assert twice.isfinite()


@pytest.mark.parametrize("wrong", ["0.1", None, True, torch.tensor(0.1)])
def test_gamma_is_a_number(wrong):
    with pytest.raises(TypeError, match=r"gamma=.* must be a number"):
        skyformer_attention(X, X, X, gamma=wrong)


def test_settings_are_of_their_kind():
    for wrong in (True, 2.5, "8", 0):
        with pytest.raises(ValueError, match="whole number"):
            NystromCore(num_landmarks=wrong)
    with pytest.raises(TypeError, match="compat='yes'"):
        SkyformerCore(compat="yes")
    with pytest.raises(TypeError, match="modules take landmarks by name"):
        SkyformerCore(landmarks=X)
    for core in (SkyformerCore(num_landmarks=np.int64(8)), NystromCore(num_landmarks=np.int64(8))):
        assert type(core.settings["num_landmarks"]) is int


def test_a_convolution_of_nystrom_has_weights():
    with pytest.raises(TypeError, match=r"its size alone is for the module"):
        nystrom_attention(X, X, X, conv_kernel=33)
    for shape in ((3,), (3, 1, 3), (3, 4), (2, 3)):
        with pytest.raises(ValueError, match="does not fit"):
            nystrom_attention(X, X, X, conv_kernel=torch.ones(shape))


@pytest.mark.parametrize("n", [10, 80])
def test_nystrom_takes_mixed_dtypes_at_any_length(n):
    x = X[:, :, :n]
    found = nystrom_attention(x.bfloat16(), x, x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, nystrom_attention(x.bfloat16().float(), x, x), rtol=1e-4, atol=1e-5)


@EVERY
def test_tokens_without_width_are_all_alike(attention):
    out = attention(X[..., :0], X[..., :0], X)
    assert out.shape == X.shape
    assert out.isfinite().all()


def test_landmarks_are_tokens_and_a_generator_is_one():
    with pytest.raises(ValueError, match=r"landmarks are tokens.*not torch\.int64.*key\[\.\.\., positions, :\]"):
        skyformer_attention(X, X, X, landmarks=torch.arange(8).reshape(2, 4))
    for landmarks in ("spread", "random"):
        with pytest.raises(TypeError, match=r"generator=3 must be a torch\.Generator"):
            skyformer_attention(X, X, X, landmarks=landmarks, generator=3)


@pytest.mark.parametrize("attention", [skyformer_attention, nystrom_attention])
def test_a_mask_of_queries_is_told_its_place(attention):
    mask = torch.ones(2, 1, 80, 1, dtype=torch.bool)
    mask[1, :, 50:] = False
    with pytest.raises(ValueError, match=r"says which queries count: pass query_mask=mask\.mT"):
        attention(X, X, X, mask)
    attention(X, X, X, query_mask=mask.mT)
