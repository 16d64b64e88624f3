"""Softmax attention is torch's own, or the same by kernels of ours where weights are dropped or keys are masked."""

import pytest
import torch
from torch.nn import functional as F

from wellcond.attention import softmax, softmax_attention
from wellcond.attention.softmax_fused import can_fuse, fused_softmax
from wellcond.numerics.fastpaths import plain_twins


def test_golden_numbers(golden, assert_golden) -> None:
    out = softmax_attention(*golden)
    assert_golden(out, [0.198669, 0.680297, 0.472863, 0.234946], 8.964867, 2.417019)


def test_it_is_sdpa_to_the_bit() -> None:
    q, k, v = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 5)
    mask = torch.rand(2, 1, 7, 9) > 0.5
    mask[..., 0] = True
    assert torch.equal(softmax_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    bias = torch.randn(2, 1, 1, 9)
    assert torch.equal(softmax_attention(q, k, v, bias), F.scaled_dot_product_attention(q, k, v, bias))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert torch.equal(softmax_attention(q, k, v, is_causal=True, scale=0.3), expected)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_query_without_keys_gets_zeros_and_gives_no_gradient(numbers: bool) -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[2] = False
    mask = torch.zeros(5, 5).masked_fill(~keep, -torch.inf) if numbers else keep
    out = softmax_attention(q, k, v, mask)
    assert (out[:, :, 2] == 0).all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert (q.grad[:, :, 2] == 0).all()


def test_kernels_of_ours_are_for_dropout_and_masks_of_keys(monkeypatch) -> None:
    """Each case that is theirs takes them, with the mask as they have it; the others go to torch."""
    taken = []
    monkeypatch.setattr(softmax, "fused_kernels", lambda _: True)
    monkeypatch.setattr(softmax, "can_fuse", lambda *_, **__: True)
    monkeypatch.setattr(softmax, "fused_softmax", lambda q, k, v, keep, p, scale: taken.append((keep, p, q.dtype)) or v)
    x = torch.randn(2, 3, 7, 4)
    keep = torch.rand(2, 1, 1, 7) > 0.5
    softmax_attention(x, x, x, None, 0.1)
    softmax_attention(x, x, x, keep)
    softmax_attention(x, x, x, keep.expand(2, 3, 7, 7), 0.2)
    softmax_attention(x, x, x, keep[0, 0, 0])
    assert [p for _, p, _ in taken] == [0.1, 0.0, 0.2, 0.0]
    assert taken[0][0] is None
    assert [tuple(mask.shape) for mask, *_ in taken[1:]] == [(2, 1, 7), (2, 3, 7), (1, 1, 7)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        softmax_attention(x, x, x, keep)
    assert taken.pop()[2] == torch.bfloat16
    softmax_attention(x, x, x)
    softmax_attention(x, x, x, torch.ones(7, 7, dtype=torch.bool), 0.1)
    softmax_attention(x, x, x, torch.zeros(2, 1, 1, 7), 0.1)
    softmax_attention(x, x, x, None, 0.1, is_causal=True)
    assert len(taken) == 4
    with pytest.raises(ValueError, match="does not broadcast"):
        softmax_attention(x, x, x, torch.ones(2, 7, dtype=torch.bool))


def gpu_tokens(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]


def lengths_mask(b: int, m: int) -> torch.Tensor:
    """Of padded samples, with holes; the last sample has no key at all."""
    lengths = torch.linspace(m, 0, b, device="cuda").long()
    keep = (torch.arange(m, device="cuda") < lengths[:, None]) & (torch.rand(b, m, device="cuda") > 0.2)
    return keep[:, None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 2, 1024, 32), (3, 2, 777, 32), (2, 3, 65, 20)])
def test_masks_of_keys_on_a_gpu(dtype, shape) -> None:
    tensors, keep = gpu_tokens(*shape, dtype=dtype), lengths_mask(shape[0], shape[2])
    assert can_fuse(*tensors)
    out = softmax_attention(*tensors, keep)
    g = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, tensors, g))
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = softmax_attention(*wide, keep)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for one, other in zip(found, (want, *torch.autograd.grad(want, wide, g.double())), strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()
        assert (one[-1] == 0).all()


@pytest.mark.gpu
def test_dropped_weights_on_a_gpu() -> None:
    """Against torch's: the same on average, and none with the switch off."""
    q, k, v = (t.detach() for t in gpu_tokens(64, 2, 256, 32))
    with torch.no_grad():
        mean = torch.stack([softmax_attention(q, k, v, None, 0.3).float() for _ in range(200)]).mean(0)
    want = softmax_attention(q, k, v).float()
    assert (mean - want).norm() < 0.1 * want.norm()
    with plain_twins():
        assert not can_fuse(q, k, v)
        torch.manual_seed(0)
        plain = softmax_attention(q, k, v, None, 0.3)
    torch.manual_seed(0)
    assert torch.equal(plain, F.scaled_dot_product_attention(q, k, v, None, 0.3))


@pytest.mark.gpu
def test_compiled_is_the_same() -> None:
    tensors, keep = gpu_tokens(3, 2, 300, 32), lengths_mask(3, 300)
    seed = torch.randint(2**62, (1,), device="cuda")

    def attend(q, k, v):
        return fused_softmax(q, k, v, keep[:, :, 0], 0.1, seed=seed)

    found = []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        out = function(*tensors)
        found.append((out, *torch.autograd.grad(out, tensors, torch.ones_like(out))))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    compiled = torch.compile(lambda q, k, v: softmax_attention(q, k, v, keep, 0.1), fullgraph=True)
    torch.manual_seed(1)
    once, then = compiled(*tensors), compiled(*tensors)
    torch.manual_seed(1)
    assert torch.equal(compiled(*tensors), once)
    assert not torch.equal(once, then)


@pytest.mark.gpu
def test_a_replay_drops_others_and_a_seed_repeats_them() -> None:
    q, k, v = (t.detach() for t in gpu_tokens(2, 2, 256, 32))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        softmax_attention(q, k, v, None, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = softmax_attention(q, k, v, None, 0.1)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        for _ in range(2):
            graph.replay()
            found.append(out.clone())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def test_forward_mode_of_a_bias():
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    bias, step = torch.randn(5, 5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    _, found = torch.func.jvp(lambda b: softmax_attention(q, k, v, b), (bias,), (step,))
    ahead, behind = (softmax_attention(q, k, v, bias + h * step) for h in (1e-6, -1e-6))
    torch.testing.assert_close(found, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-8)
