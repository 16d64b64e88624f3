"""Token Graying: better-conditioned input tokens (Always Skip Attention, algorithms 1 and 2).

    tokens = gray_tokens(tokens, "svd", epsilon=0.95)          # (…, n, d) → (…, n, d)
    images = TokenGraying("dct", 0.95, patch_size=16)(images)  # images → images, patch by patch

Both methods raise magnitudes relative to the largest one to the power epsilon: singular values (`svd`) or two-dimensional
DCT coefficients (`dct`), so the small ones grow and the condition number falls.
"""

import torch
from torch import Tensor, nn

from wellcond.numerics.dct import dct2, idct2

__all__ = ["TokenGraying", "gray_tokens"]

METHODS = ("svd", "dct")


def gray_tokens(x: Tensor, method: str, *, epsilon: float = 0.95, restore_scale: bool = True) -> Tensor:
    coefficients = dct2(x.float())
    peak = coefficients.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(1e-30)
    grayed = coefficients.sign() * (coefficients.abs() / peak) ** epsilon
    return idct2(grayed * peak if restore_scale else grayed).to(x.dtype)


class TokenGraying(nn.Module):
    """Images in, images of the same shape out: cut into patches, grayed, put together again. No parameters."""

    def __init__(
        self, method: str, epsilon: float = 0.95, patch_size: int | tuple[int, int] = 16, *, restore_scale: bool = True
    ):
        super().__init__()
        self.method = method
        self.epsilon = epsilon
        self.patch_size = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
        self.restore_scale = restore_scale

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        ph, pw = self.patch_size
        rows, cols = height // ph, width // pw
        tokens = images.reshape(batch, channels, rows, ph, cols, pw).permute(0, 2, 4, 1, 3, 5)
        tokens = tokens.reshape(batch, rows * cols, channels * ph * pw)
        grayed = gray_tokens(tokens, self.method, epsilon=self.epsilon, restore_scale=self.restore_scale)
        grayed = grayed.reshape(batch, rows, cols, channels, ph, pw).permute(0, 3, 1, 4, 2, 5)
        return grayed.reshape(images.shape)
