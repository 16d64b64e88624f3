"""Products with long, narrow matrices against float64, whole and in parts, and their derivatives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from wellcond.numerics.fastpaths import plain_twins
from wellcond.numerics.tall import flat_product, tall_product, thin_product

PRODUCTS: dict[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    tall_product: lambda a, b: a.mT @ b,
    thin_product: lambda x, small: x @ small,
    flat_product: lambda small, x: small @ x.mT,
}
every = pytest.mark.parametrize(("product", "meant"), PRODUCTS.items(), ids=[p.__name__ for p in PRODUCTS])


def factors(product: Callable[..., Tensor], n: int, *lead: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = {
        tall_product: ((n, 5), (n, 3)),
        thin_product: ((n, 5), (5, 3)),
        flat_product: ((4, 5), (n, 5)),
    }[product]
    return [torch.randn(*lead, *shape, dtype=dtype) for shape in shapes]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers, otherwise in memory."""
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "heads side by side" and x.ndim > 2:
        return torch.cat([x, x], -1).transpose(-3, -2).contiguous().transpose(-3, -2)[..., : x.shape[-1]]
    return x


@every
@pytest.mark.parametrize("layout", ["plain", "transposed", "heads side by side"])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("n", [1, 97, 128, 5000])
def test_parts_add_up(product, meant, layout: str, lead: tuple[int, ...], n: int) -> None:
    a, b = factors(product, n, *lead)
    a, b = laid_out(a, layout), laid_out(b, layout)
    exact, over = meant(a, b), torch.randn_like(meant(a, b))
    expected = torch.autograd.grad(meant(*(found := [t.detach().requires_grad_() for t in (a, b)])), found, over)
    for parts in (None, 1, 2, 7, 64, 10**6):
        leaves = [t.detach().requires_grad_() for t in (a, b)]
        out = product(*leaves, parts=parts)
        torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(torch.autograd.grad(out, leaves, over), expected, rtol=1e-11, atol=1e-11)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_everything_is_float32_inside(product, meant, dtype: torch.dtype) -> None:
    a, b = (t.requires_grad_() for t in factors(product, 2100, 2, dtype=dtype))
    exact = meant(a.double(), b.double())
    for parts in (None, 4, 9):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = product(a, b, parts=parts)
            assert out.dtype == torch.float32
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
        # torch's own backward pass of the plain product follows autocast, ours does not
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=parts is not None):
            found = torch.autograd.grad(out.square().sum(), (a, b))
        expected = torch.autograd.grad(meant(a.double(), b.double()).square().sum(), (a, b))
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == dtype
            assert float((x - y).double().norm() / y.double().norm()) < 2 * torch.finfo(dtype).eps + 1e-6


def test_a_thin_product_is_rounded_once_to_the_dtype_wanted() -> None:
    x, small = (t.requires_grad_() for t in factors(thin_product, 50, 2, dtype=torch.bfloat16))
    for parts in (1, 3):
        out = thin_product(x, small, dtype=torch.bfloat16, parts=parts)
        assert torch.equal(out, thin_product(x, small).bfloat16())
        out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


@every
def test_gradients_of_gradients(product, meant) -> None:
    a, b = (t.requires_grad_() for t in factors(product, 11, 2))

    def whole(a: Tensor, b: Tensor) -> Tensor:
        return product(a, b, parts=3)

    assert torch.autograd.gradcheck(whole, (a, b), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(whole, (a, b))


@every
def test_torch_func(product, meant) -> None:
    a, b = factors(product, 11, 4)
    in_parts = torch.func.vmap(lambda a, b: product(a, b, parts=3))(a, b)
    torch.testing.assert_close(in_parts, meant(a, b))
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        found = jacobian(lambda a: product(a, b, parts=3))(a)
        torch.testing.assert_close(found, jacobian(lambda a: meant(a, b))(a))


@every
def test_a_batch_is_shared_by_what_has_none(product, meant) -> None:
    (a, _), (_, b) = factors(product, 23), factors(product, 23, 3, 2)
    a.requires_grad_()
    out = product(a, b, parts=4)
    torch.testing.assert_close(out, meant(a, b))
    found, expected = (torch.autograd.grad(t.square().sum(), a)[0] for t in (out, meant(a, b)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16])
def test_compiled_and_rounded(dtype: torch.dtype, rounded: torch.dtype) -> None:
    torch.compiler.reset()
    x, small = (t.requires_grad_() for t in factors(thin_product, 130, 2, dtype=dtype))

    def in_parts(x: Tensor, small: Tensor) -> Tensor:
        return thin_product(x, small, dtype=rounded, parts=4)

    out, compiled = in_parts(x, small), torch.compile(in_parts, backend="aot_eager", fullgraph=True)(x, small)
    assert torch.equal(out, compiled)
    over = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(t, (x, small), over) for t in (out, compiled)), strict=True):
        assert torch.equal(a, b)
        assert a.abs().sum() > 0


@every
def test_compiled_whole(product, meant) -> None:
    torch.compiler.reset()
    a, b = (t.requires_grad_() for t in factors(product, 130, 2, 3))
    compiled = torch.compile(lambda a, b: product(a, b, parts=4), backend="aot_eager", fullgraph=True)
    out = compiled(a, b)
    torch.testing.assert_close(out, meant(a, b))
    found = torch.autograd.grad(out.square().sum(), (a, b))
    torch.testing.assert_close(found, torch.autograd.grad(meant(a, b).square().sum(), (a, b)))


@every
def test_nothing_at_all(product, meant) -> None:
    for n, lead in ((0, (2,)), (600, (0,))):
        a, b = factors(product, n, *lead)
        for parts in (None, 3):
            assert torch.equal(product(a, b, parts=parts), meant(a, b))


def test_mistakes_are_named() -> None:
    x = torch.ones(4, 3)
    for product, other in ((tall_product, torch.ones(5, 3)), (thin_product, x), (flat_product, torch.ones(4, 2))):
        with pytest.raises(ValueError, match="expected"):
            product(x, other)
        with pytest.raises(ValueError, match="parts=0"):
            product(x, x.mT if product is thin_product else x, parts=0)


@pytest.mark.gpu
@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [2048, 65537])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_on_the_gpu(product, meant, dtype: torch.dtype, n: int, compiled: bool) -> None:
    torch.compiler.reset()
    a, b = (t.to("cuda", dtype).requires_grad_() for t in factors(product, n, 2, 3))
    exact = meant(a.double(), b.double())
    over = torch.randn_like(exact)
    expected = torch.autograd.grad(exact, (a, b), over)
    called = torch.compile(product, fullgraph=True) if compiled else product
    out = called(a, b)
    assert out.dtype == torch.float32
    assert float((out - exact).detach().norm() / exact.detach().norm()) < 1e-5
    assert torch.equal(out, called(a, b))
    for x, y in zip(torch.autograd.grad(out, (a, b), over.float()), expected, strict=True):
        assert x.dtype == dtype
        assert float((x - y).double().norm() / y.double().norm()) < torch.finfo(dtype).eps + 1e-5


@pytest.mark.gpu
def test_the_switch_turns_parts_off_on_the_gpu() -> None:
    a, b = (t.cuda() for t in factors(tall_product, 5000, 2, dtype=torch.float32))
    with plain_twins():
        assert torch.equal(tall_product(a, b), a.mT @ b)
    torch.testing.assert_close(tall_product(a, b), a.mT @ b, rtol=1e-4, atol=1e-3)
