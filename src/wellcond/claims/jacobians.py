"""Jacobians of a ViT's attentions and MLPs, one by one, which four claims measure.

    for half in halves(model, images):               # of one image, block by block: attention, MLP, attention, …
        half.site, half.spectrum("skip").log_kappa   # "sa", tensor([0.13])
        half.log_kappa(), half.log_kappa(skip=True)  # of its output: at `sa`, and at `+sa`

`skip`      x ↦ x + f(norm(x)), with respect to the tokens x
`bare`      f with respect to its input, the normed tokens: a norm's own Jacobian is singular (it removes the mean), so
            without the skip the Jacobian of f(norm(x)) is singular too, whatever f does
`params`    f with respect to its own parameters, which a skip does not change: the square root of the empirical NTK

Everything is in float64. `exact` spectra are computed on the CPU, whose LAPACK is faster than a GPU's library for a few
thousand rows.
"""

from typing import Any

import torch
from torch import Tensor, nn

from wellcond.claims.claim import Options
from wellcond.claims.measurements import images_of
from wellcond.claims.sets import GivenData
from wellcond.claims.trained_blocks import inputs_of
from wellcond.numerics.jacobian import JacobianSpectrum, jacobian_spectrum
from wellcond.numerics.singular import measure_conditioning

__all__ = ["KINDS", "MAX_ENTRIES", "SHORT", "Half", "halves", "image_for", "small_vit"]

KINDS = {
    "skip": "with its skip, by its input",
    "bare": "without its skip, by its normed input",
    "params": "by its parameters",
}
SHORT = {"skip": "with its skip", "bare": "without its skip", "params": "by its parameters"}
MAX_ENTRIES = 2**28
SPREAD, STRIDE = 64, 23  # how many images, and the step from one seed's image to the next
HALVES = {"sa": ("norm1", "attn"), "mlp": ("norm2", "mlp")}  # in timm's ViT


def small_vit(width: int, heads: int, **settings: Any) -> dict[str, Any]:
    """Return timm's settings of a narrow ViT without a class token, so that n patches are n tokens."""
    return {"embed_dim": width, "num_heads": heads, "class_token": False, "global_pool": "avg", **settings}


def image_for(options: Options, data: GivenData, seed: int) -> Tensor:
    """Return an image of the set, (1, channels, size, size) in float64, another one for each seed.

    In a set that is sorted by class, its class differs from that of the seed before."""
    images = images_of(options, data, SPREAD)
    return images[[STRIDE * seed % len(images)]].double()


class Half(nn.Module):
    """The attention or MLP of a block, with its norm and its skip, at the tokens that it read."""

    def __init__(self, site: str, block: nn.Module, tokens: Tensor):
        super().__init__()
        norm, inner = HALVES[site]
        self.site: str = site
        self.norm: nn.Module = block.get_submodule(norm)
        self.inner: nn.Module = block.get_submodule(inner)
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))

    def spectrum(self, kind: str, **settings: Any) -> JacobianSpectrum:
        settings = {"method": "exact", "max_entries": MAX_ENTRIES, **settings}
        if kind == "skip":
            return jacobian_spectrum(self, self.tokens, "input", **settings)
        with torch.no_grad():
            normed = self.norm(self.tokens)
        return jacobian_spectrum(self.inner, normed, "params" if kind == "params" else "input", **settings)

    @torch.no_grad()
    def log_kappa(self, *, skip: bool = False) -> float:
        output = self.inner(self.norm(self.tokens))
        return float(measure_conditioning(output + self.tokens if skip else output).log_kappa)


def halves(model: nn.Module, image: Tensor) -> list[Half]:
    """Return the halves of a timm ViT, in order of execution, for an image (1, c, h, w) in the model's dtype.

    LayerScale is ignored."""
    blocks = model.eval().get_submodule("blocks").named_children()
    norms = {f"blocks.{at}.{norm}": (site, block) for at, block in blocks for site, (norm, _) in HALVES.items()}
    tokens = inputs_of(model, norms, image)
    return [Half(site, block, tokens[path]) for path, (site, block) in norms.items()]
