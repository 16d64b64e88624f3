"""Derivatives by torch.func and forward mode inside compiled code: an operator of ours would drop tangents there."""

import pytest
import torch
from torch.autograd import forward_ad

from wellcond.attention import ATTENTIONS, find_attention, nystrom_fused, skyformer_fused
from wellcond.numerics import gaussian
from wellcond.numerics.fastpaths import plain_twins

SETTINGS = {"skyformer": {"num_landmarks": 6}, "nystrom": {"num_landmarks": 6}}


def by_jvp(attend, q):
    return torch.func.jvp(attend, (q,), (q,))[1]


def by_dual_numbers(attend, q):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(attend(forward_ad.make_dual(q, q))).tangent


def by_func_grad(attend, q):
    return torch.func.grad(lambda q: attend(q).square().sum())(q)


@pytest.mark.parametrize("derivative", [by_jvp, by_dual_numbers, by_func_grad])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_they_are_those_of_plain_operations(name, derivative, device, monkeypatch):
    dtype = torch.float16 if name == "nystrom" else torch.float32  # its kernels take no other
    monkeypatch.setattr(gaussian, "DIRECT", 1)  # as for long sequences: an operator, where it may be one
    for module in (nystrom_fused, skyformer_fused):
        for asked in ("fused_kernels", "large_programs"):
            monkeypatch.setattr(module, asked, lambda _: True)
    q, k, v = (torch.randn(1, 2, 40, 8, device=device).to(dtype) for _ in range(3))

    def attend(q):
        return find_attention(name).function(q, k, v, **SETTINGS.get(name, {}))

    with plain_twins():
        want = derivative(attend, q)
    torch.compiler.reset()
    found = torch.compile(lambda q: derivative(attend, q), backend="aot_eager", fullgraph=True)(q)
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2}[dtype]
    assert (found - want).norm() <= tolerance * want.norm()
    assert want.norm() > 0
