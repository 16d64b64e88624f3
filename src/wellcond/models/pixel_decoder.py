"""The light decoder of a masked autoencoder, and the fixed positions that both of its halves use.

    decoder = PixelDecoder(encoder_dim=768, dim=512, depth=8, heads=16, grid_size=(14, 14), values=768)
    decoder(encoded, visible)                      # (b, prefix + v, 768) and (b, v) → the values of all 196 patches
    sincos_positions((14, 14), 512)                # (196, 512), float64

Each masked patch enters as the same trained vector, told apart by its position alone.
"""

from functools import partial
from typing import cast

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["PixelDecoder", "sincos_positions"]

WAVELENGTH = 10_000.0  # of the slowest wave, over 2π, in patches


def sincos_positions(grid_size: tuple[int, int], dim: int, *, device: torch.device | str | None = None) -> Tensor:
    """(rows · columns, dim) in float64, row by row: sines and cosines of the row, then those of the column.

    Each takes a quarter of `dim`, with frequencies that fall geometrically from 1. The scalar product of two positions
    depends on their offset alone. Raises ValueError unless 4 divides `dim`.
    """
    if dim % 4 or dim < 4:
        raise ValueError(f"two-dimensional sines and cosines need a width that 4 divides, not {dim}")
    quarter = dim // 4
    frequency = WAVELENGTH ** -(torch.arange(quarter, dtype=torch.float64, device=device) / quarter)
    rows, columns = (torch.arange(size, dtype=torch.float64, device=device) for size in grid_size)
    row, column = (angle.reshape(-1, 1) * frequency for angle in torch.meshgrid(rows, columns, indexing="ij"))
    return torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=1)


class PixelDecoder(nn.Module):
    """Encoded visible tokens in, the values of every patch out; built of timm's blocks."""

    mask_token: nn.Parameter
    positions: Tensor

    def __init__(self, *, encoder_dim: int, dim: int, depth: int, heads: int, grid_size: tuple[int, int], values: int):
        super().__init__()
        if dim % 4 or dim < 4 or heads < 1 or dim % heads:
            raise ValueError(f"a decoder of width {dim} with {heads} heads: both 4 and the heads have to divide it")
        if depth < 0:
            raise ValueError(f"a decoder cannot have {depth} blocks")
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        self.grid_size = grid_size
        self.grad_checkpointing = False
        self.embed = nn.Linear(encoder_dim, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        # Not saved: the numbers follow from the sizes.
        self.register_buffer("positions", torch.empty(1, grid_size[0] * grid_size[1], dim), persistent=False)
        self.blocks = nn.Sequential(
            *(Block(dim, heads, qkv_bias=True, norm_layer=cast(type[nn.Module], norm_layer)) for _ in range(depth))
        )
        self.norm = norm_layer(dim)
        self.head = nn.Linear(dim, values)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the weights (Glorot's uniform distribution, as in the original ViT) and write the positions."""
        nn.init.normal_(self.mask_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        self.set_positions()

    @torch.no_grad()
    def set_positions(self) -> None:
        """Write the fixed positions anew."""
        width = self.positions.shape[2]
        self.positions.copy_(sincos_positions(self.grid_size, width, device=self.positions.device)[None])

    def forward(self, encoded: Tensor, visible: Tensor) -> Tensor:
        """(b, n, values) of the tokens (b, prefix + v, encoder_dim) of those patches that `visible` (b, v) counts."""
        tokens = self.embed(encoded)
        batch, _, dim = tokens.shape
        ahead = tokens.shape[1] - visible.shape[1]  # class token and registers: they go along, without a position
        where = visible[..., None].expand(-1, -1, dim)
        canvas = self.mask_token.to(tokens.dtype).expand(batch, self.positions.shape[1], dim)
        patches = canvas.scatter(1, where, tokens[:, ahead:]) + self.positions
        tokens = torch.cat([tokens[:, :ahead].to(patches.dtype), patches], dim=1)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                tokens = cast(Tensor, checkpoint(block, tokens, use_reentrant=False))
            else:
                tokens = block(tokens)
        return self.head(self.norm(tokens[:, ahead:]))
