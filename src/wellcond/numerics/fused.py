"""The fused kernels as torch operators, so that `torch.compile` keeps them intact and autograd knows their derivatives.

    spectral_power_images(x, ph, pw, epsilon, restore_scale)   # images (b, c, h, w) cut into ph × pw patches, or,
    gray_dct(x, ph, pw, epsilon, restore_scale)                # with ph = 0, matrices (b, n, d)

Triton is imported when an operator first runs. The derivative is that of the plain twin, recomputed at the same input.
"""

import torch
from torch import Tensor

__all__ = ["gray_dct", "spectral_power_images", "tokens_of", "untokens"]


@torch.library.custom_op("wellcond::spectral_power", mutates_args=())
def spectral_power_images(x: Tensor, ph: int, pw: int, epsilon: float, restore_scale: bool) -> Tensor:
    """Replace every image's token matrix U Σ Vᵀ by U Σ^ε Vᵀ, in the layout of the image; `x` is not modified."""
    from .power_fit import folded_fit
    from .spectral import floor_of
    from .triton.spectral_power import spectral_power_in_place_layout

    n, d, geometry = _layout(x, ph, pw)
    fit = folded_fit(epsilon, floor_of("products", torch.float32, n, d))
    return spectral_power_in_place_layout(x.contiguous(), n, d, geometry, fit, restore_scale=restore_scale)


@torch.library.custom_op("wellcond::gray_dct", mutates_args=())
def gray_dct(x: Tensor, ph: int, pw: int, epsilon: float, restore_scale: bool) -> Tensor:
    """Apply DCT graying to every image's token matrix, in the layout of the image; `x` is not modified."""
    from .triton.gray_dct import gray_dct_images

    n, d, geometry = _layout(x, ph, pw)
    return gray_dct_images(x.contiguous(), n, d, geometry, epsilon, restore_scale=restore_scale)


@spectral_power_images.register_fake
@gray_dct.register_fake
def _(x: Tensor, ph: int, pw: int, epsilon: float, restore_scale: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    x, ctx.ph, ctx.pw, ctx.epsilon, ctx.restore_scale = inputs
    ctx.save_for_backward(x)


def _backward_by(twin):
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # a second derivative is requested
        with torch.enable_grad():
            leaf = x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_()
            tokens = tokens_of(leaf, ctx.ph, ctx.pw) if ctx.ph else leaf
            out = twin(tokens, ctx.epsilon, ctx.restore_scale)
            out = untokens(out, x.shape, ctx.ph, ctx.pw) if ctx.ph else out
        return torch.autograd.grad(out, leaf, grad, create_graph=again)[0], None, None, None, None

    return backward


def _plain_spectral_power(tokens: Tensor, epsilon: float, restore_scale: bool) -> Tensor:
    from .fastpaths import plain_twins
    from .spectral import spectral_power

    with plain_twins():
        return spectral_power(tokens, epsilon, method="products", restore_scale=restore_scale)


def _plain_gray_dct(tokens: Tensor, epsilon: float, restore_scale: bool) -> Tensor:
    from .dct import dct_power

    return dct_power(tokens, epsilon, restore_scale=restore_scale)


spectral_power_images.register_autograd(_backward_by(_plain_spectral_power), setup_context=_save)
gray_dct.register_autograd(_backward_by(_plain_gray_dct), setup_context=_save)


def _layout(x: Tensor, ph: int, pw: int):
    from .triton.geometry import Geometry

    if ph == 0:
        _, n, d = x.shape
        return n, d, Geometry.of_matrices(n, d)
    _, channels, height, width = x.shape
    return (height // ph) * (width // pw), channels * ph * pw, Geometry.of_images(height, width, (ph, pw))


def tokens_of(images: Tensor, ph: int, pw: int) -> Tensor:
    """Return tokens, (b, c, h, w) → (b, n, c·ph·pw), with values ordered (channel, row, column) as in a conv weight."""
    batch, channels, height, width = images.shape
    patches = images.reshape(batch, channels, height // ph, ph, width // pw, pw).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, (height // ph) * (width // pw), channels * ph * pw)


def untokens(tokens: Tensor, shape: torch.Size | tuple[int, ...], ph: int, pw: int) -> Tensor:
    """Invert `tokens_of`, for images of `shape`."""
    batch, channels, height, width = shape
    patches = tokens.reshape(batch, height // ph, width // pw, channels, ph, pw)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, height, width)
