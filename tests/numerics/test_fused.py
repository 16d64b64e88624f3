"""The fused kernels as torch operators: registered in full, differentiable as their plain twins, whole in a graph."""

import pytest
import torch

from wellcond.numerics.dct import dct_power
from wellcond.numerics.fastpaths import plain_twins
from wellcond.numerics.fused import gray_dct, spectral_power_images, tokens_of, untokens
from wellcond.numerics.spectral import spectral_power

pytestmark = [
    # Triton's interpreter is NumPy, which warns of log2(0) where hardware goes on with −inf.
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning"),
    # opcheck looks at the gradient of a tensor that it made itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def plain_spectral_power(tokens, epsilon, restore_scale):
    with plain_twins():
        return spectral_power(tokens, epsilon, method="products", restore_scale=restore_scale)


def plain_dct_power(tokens, epsilon, restore_scale):
    return dct_power(tokens, epsilon, restore_scale=restore_scale)


OPERATORS = {"spectral power": (spectral_power_images, plain_spectral_power), "dct": (gray_dct, plain_dct_power)}


@pytest.fixture(params=OPERATORS)
def operator(request):
    return OPERATORS[request.param]


def test_the_operator_is_registered_in_full(operator, device):
    images = torch.randn(1, 1, 4, 4, device=device, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator[0], (images, 2, 2, 0.95, True), test_utils=tests)


@pytest.mark.parametrize("name", ["dct", pytest.param("spectral power", marks=pytest.mark.gpu)])
def test_the_derivative_can_be_traced_and_leaves_nothing_of_the_tracer_behind(name, device):
    fused, plain = OPERATORS[name]
    images = torch.randn(1, 1, 6, 10, device=device, requires_grad=True)
    torch.library.opcheck(fused, (images, 3, 5, 0.95, True), test_utils="test_aot_dispatch_dynamic")
    assert plain(tokens_of(images, 3, 5), 0.95, True).isfinite().all()


@pytest.mark.parametrize("restore_scale", [True, False])
def test_values_and_gradients_are_the_plain_twins(operator, device, restore_scale):
    fused, plain = operator
    images = torch.randn(2, 2, 8, 12, device=device, requires_grad=True)
    weight = torch.randn(2, 2, 8, 12, device=device)
    patch = (4, 3)
    got = fused(images, *patch, 0.95, restore_scale)
    want = untokens(plain(tokens_of(images, *patch), 0.95, restore_scale), images.shape, *patch)
    assert (got - want).norm() < 1e-3 * want.norm()
    (gradient,) = torch.autograd.grad((got * weight).sum(), images)
    (expected,) = torch.autograd.grad((want * weight).sum(), images)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_a_patch_of_zero_means_matrices(operator, device):
    fused, plain = operator
    x = torch.randn(2, 7, 11, device=device, requires_grad=True)
    got, want = fused(x, 0, 0, 0.95, True), plain(x, 0.95, True)
    assert got.shape == x.shape
    assert (got - want).norm() < 1e-3 * want.norm()
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want)]
    assert (gradients[0] - gradients[1]).norm() < 2e-3 * gradients[1].norm()  # of squares, so of two values


def test_second_derivatives_are_the_plain_twins(operator, device):
    fused, plain = operator
    x = torch.randn(2, 5, 8, device=device, requires_grad=True)
    weight = torch.randn(2, 5, 8, device=device)
    found = []
    for y in (fused(x, 0, 0, 0.95, True), plain(x, 0.95, True)):
        (gradient,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    assert found[1].norm() > 0.1
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_any_layout_goes_in_and_a_contiguous_one_comes_out(operator, device):
    fused, _ = operator
    images = torch.randn(2, 2, 6, 6, device=device)
    plain = fused(images, 3, 3, 0.95, True)
    last = fused(images.to(memory_format=torch.channels_last), 3, 3, 0.95, True)
    assert last.is_contiguous()
    assert torch.equal(last, plain)


@pytest.mark.gpu
def test_compiled_whole_with_its_gradient(operator, device):
    fused, _ = operator
    images = torch.randn(2, 3, 8, 8, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: fused(x, 4, 4, 0.95, True).square().sum(), fullgraph=True)
    (got,) = torch.autograd.grad(compiled(images), images)
    (want,) = torch.autograd.grad(fused(images, 4, 4, 0.95, True).square().sum(), images)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "patch"),
    [((2, 3, 8, 12), (4, 4)), ((1, 1, 5, 7), (5, 1)), ((0, 3, 4, 4), (2, 2)), ((2, 5, 6, 6), (2, 3))],
)
def test_tokens_are_the_patches_in_the_order_of_a_convolutions_weight(shape, patch):
    images = torch.randn(shape, dtype=torch.float64)
    tokens = tokens_of(images, *patch)
    assert torch.equal(untokens(tokens, shape, *patch), images)
    weight = torch.randn(4, shape[1], *patch, dtype=torch.float64)
    if shape[0]:
        embedded = torch.nn.functional.conv2d(images, weight, stride=patch)
        torch.testing.assert_close(tokens @ weight.flatten(1).T, embedded.flatten(2).mT)
