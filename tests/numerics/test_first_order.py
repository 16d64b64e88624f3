"""Every backward pass written by hand refuses to be differentiated, however a second derivative is asked for."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from wellcond.attention.nystrom_fused import fused_nystrom
from wellcond.attention.skyformer_fused import fused_skyformer
from wellcond.numerics import gaussian
from wellcond.numerics.gaussian import gaussian_product
from wellcond.numerics.inverse import solve_spd
from wellcond.numerics.spectral import _by_eigh, _by_svd


def product(x):
    return gaussian_product(x, x.flip(-2), x + 1, scale=0.5)


def solution(smallest):
    def solve(x):
        return solve_spd(x @ x.mT + 0.1 * torch.eye(x.shape[-2]).to(x), x, smallest=smallest)

    return solve


def fused(x):
    return fused_skyformer(x, x, x, positions=torch.arange(4, device=x.device), of_queries=2, scale=0.5, gamma=0.1)


CASES = {
    "product": product,
    "cholesky": solution(0.1),
    "eigenvalues": solution(0.0),
    "svd": lambda x: _by_svd(x[0], 0.9, 1e-3, True),
    "eigh": lambda x: _by_eigh(x[0], 0.9, 1e-3, True),
    "skyformer": fused,
    "nystrom": lambda x: fused_nystrom(x, x, x, num_landmarks=4, num_iterations=2, scale=0.5),
}


@pytest.fixture(params=CASES)
def case(request, monkeypatch, device):
    """A function, and a tensor that it takes."""
    monkeypatch.setattr(gaussian, "DIRECT", 0)
    return CASES[request.param], torch.randn(1, 2, 6, 8).to(device)


def gradient(function, x, **options):
    (found,) = torch.autograd.grad(function(x).sum() + x.square().sum(), x, **options)  # its own gradient: a constant
    return found


def test_a_gradient_alone_is_what_it_was(case):
    function, x = case
    x.requires_grad_()
    plain, tied = gradient(function, x), gradient(function, x, create_graph=True)
    assert not plain.requires_grad
    assert torch.equal(plain, tied)


def test_a_penalty_by_grad_is_refused(case):
    function, x = case
    found = gradient(function, x.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative was asked for"):
        torch.autograd.grad(found.square().sum(), x)


def test_a_penalty_by_backward_is_refused(case):
    function, x = case
    found = gradient(function, x.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative was asked for"):
        found.square().sum().backward()


def test_a_penalty_on_a_gradient_with_a_history_is_refused(case):
    function, x = case
    x.requires_grad_()
    weight = torch.ones((), device=x.device, requires_grad=True)
    (found,) = torch.autograd.grad((weight * function(x)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative was asked for"):
        torch.autograd.grad(found.square().sum(), weight)


@pytest.mark.parametrize("name", ["product", "cholesky", "eigenvalues"])
def test_the_way_out_that_is_named(name, monkeypatch):
    """torch.func has second derivatives, and right ones."""
    monkeypatch.setattr(gaussian, "DIRECT", 0)
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    plain = {
        "product": lambda x: (
            (-0.25 * (x[..., :, None, :] - x.flip(-2)[..., None, :, :]).square().sum(-1)).exp() @ (x + 1)
        )
    }.get(name, lambda x: torch.linalg.solve(x @ x.mT + 0.1 * torch.eye(3).to(x), x))

    def penalty(function):
        return lambda x: torch.func.grad(lambda x: function(x).square().sum())(x).square().sum()

    found, want = (torch.func.grad(penalty(f))(x) for f in (CASES[name], plain))
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-8)
    hessians = (torch.func.hessian(lambda x, f=f: f(x).square().sum())(x) for f in (CASES[name], plain))
    torch.testing.assert_close(*hessians, rtol=1e-6, atol=1e-8)


def test_a_checkpoint_gives_what_it_saved_once_only(case):
    """So it is asked for it once only, and the refusal is ours."""
    function, x = case
    out = checkpoint(function, x.requires_grad_(), use_reentrant=False)
    (slope,) = torch.autograd.grad(out.sum() + x.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        slope.square().sum().backward()
