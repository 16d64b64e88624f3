"""The effective rank by products against that of all singular values, in float64."""

import pytest
import torch

from wellcond.numerics.singular import effective_rank
from wellcond.numerics.spectral_sums import effective_rank_by_products


def truth(s: torch.Tensor) -> torch.Tensor:
    p = s / s.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()


def gram_of(s: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(*s.shape, s.shape[-1], generator=generator, dtype=torch.float64))[0]
    return (q * s.square()[:, None, :]) @ q.mT


@pytest.mark.parametrize("m", [1, 2, 17, 64, 197])
def test_spectra_of_many_kinds(m, one_thread):
    kinds = [torch.logspace(0, -decades, m, dtype=torch.float64) for decades in (0, 0.5, 2, 4, 6, 9)]
    kinds += [torch.linspace(1, 1e-3, m, dtype=torch.float64), torch.rand(m, dtype=torch.float64) + 1e-3]
    one_large = torch.full((m,), 1e-4, dtype=torch.float64)
    one_large[0] = 1
    zeros = torch.zeros(m, dtype=torch.float64)
    zeros[: (m + 1) // 2] = 3.0
    s = torch.stack([*kinds, one_large, zeros])
    got = effective_rank_by_products(gram_of(s) * 1e6)  # of any scale
    torch.testing.assert_close(got, truth(s), rtol=1e-2, atol=0)
    assert (got / truth(s) - 1).abs().median() < 2e-3


@pytest.mark.gpu
def test_a_gpu_gives_what_a_cpu_gives():
    x = torch.randn(3, 197, 300, dtype=torch.float64) * torch.logspace(0, -3, 300, dtype=torch.float64)
    x = torch.cat([x, torch.zeros(1, 197, 300), torch.full((1, 197, 300), torch.nan)])
    torch.testing.assert_close(effective_rank(x.cuda()).cpu(), effective_rank(x), rtol=1e-2, atol=0, equal_nan=True)
