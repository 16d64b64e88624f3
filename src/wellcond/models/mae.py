"""Masked autoencoding: a ViT sees a quarter of the patches of each image and learns to predict the others' pixels.

    mae = MaskedAutoencoder("vit_base_patch16_224", gray="visible")      # or an encoder that you built with timm
    mae(images).loss.backward()
    model = timm.create_model("vit_base_patch16_224", global_pool="avg", drop_path_rate=0.1)
    hand_over(mae.encoder, model)           # copies weights and surgery; the head stays random: fine-tune all of it
    linear_probe(model)                     # or (without drop path): freeze everything but a new head

The encoder is timm's own VisionTransformer and stays one: its blocks, hooks and parameter names are timm's, so the
probe and all surgery work on it. The visible patches go through its own patch projection, laid side by side in one
row; a grayed projection therefore grays exactly the visible tokens, in their order in the image.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from timm.layers.drop import DropPath
from timm.layers.patch_dropout import PatchDropout, PatchDropoutWithIndices
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wellcond.models.build import build_model
from wellcond.models.families import register_family, unwrap
from wellcond.models.surgery import (
    GrayingSettings,
    attention_of,
    built_attention,
    graying_of,
    plan_attention,
    plan_skips,
    put_attention,
    put_skips,
    skips_of,
    ungray,
)
from wellcond.models.surgery import gray as gray_model
from wellcond.numerics.fused import tokens_of, untokens

__all__ = ["MaskedAutoencoder", "MaskedOutput", "PixelDecoder", "hand_over", "linear_probe", "sincos_positions"]

WAVELENGTH = 10_000.0  # upper bound of the wavelengths of the position waves, over 2π, in patches
PIXEL_EPSILON = 1e-6  # added to a patch's variance, which is zero for a patch of one colour

Model = TypeVar("Model", bound=nn.Module)


class MaskedOutput(NamedTuple):
    """The output of a forward pass. A tuple, because DDP, FSDP and torch.compile look for tensors inside tuples."""

    loss: Tensor
    """The mean squared error over all values of all masked patches, a scalar."""
    prediction: Tensor
    """(b, n, c·p²): every patch, masked or not, with its values in the order (channel, row, column)."""
    mask: Tensor
    """(b, n), True where a patch was hidden from the encoder."""


class MaskedAutoencoder(nn.Module):
    """A ViT encoder and a light decoder, trained to fill in masked patches.

    Args:
        encoder: a timm VisionTransformer, used as it is except that its head is removed and its position embedding
            replaced (see `keep_positions`); or a timm model name, built with weights drawn as in the original ViT.
        encoder_kwargs: arguments for timm's `create_model` if `encoder` is a name: img_size, patch_size, in_chans …
        mask_ratio: the share of patches to hide, in (0, 1); at least one is hidden and at least one stays visible.
        normalize_pixels: predict each patch minus its mean, divided by its standard deviation, instead of raw pixels.
        gray: which tokens to gray: None, "visible" (only those that the encoder sees), or "all" (before masking: since
            graying mixes tokens, the hidden ones then leak into the visible ones). The prediction target is always the
            original image.
        graying: how to gray. None keeps the graying of an encoder that is already grayed (with gray=None as well, and
            then its visible tokens are grayed), and otherwise means DCT graying with epsilon 0.95.
        keep_positions: keep the encoder's position embedding, and train it if it is trainable, instead of replacing it
            by fixed sines and cosines; for an encoder that was trained before.

    Masks are drawn from torch's default generator for the images' device, or from the one given to `forward`.
    """

    def __init__(
        self,
        encoder: VisionTransformer | str,
        *,
        encoder_kwargs: Mapping[str, Any] | None = None,
        decoder_dim: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        mask_ratio: float = 0.75,
        normalize_pixels: bool = False,
        gray: Literal["visible", "all"] | None = None,
        graying: GrayingSettings | None = None,
        keep_positions: bool = False,
    ):
        super().__init__()
        if gray not in (None, "visible", "all"):
            raise ValueError(f"gray={gray!r}: gray the 'visible' tokens, 'all' of them before masking, or None")
        if graying is not None and gray is None:
            raise ValueError("graying says how, but gray=None grays nothing; add gray='visible' or gray='all'")
        if not 0 < mask_ratio < 1:
            raise ValueError(f"mask_ratio={mask_ratio} is not between 0 and 1; 0.75 hides three patches of four")
        if encoder_kwargs is not None and not isinstance(encoder, str):
            raise ValueError("encoder_kwargs build an encoder by its name; this one is built already")
        self.encoder: VisionTransformer = _built(encoder, encoder_kwargs or {}) if isinstance(encoder, str) else encoder
        embedding = _check_encoder(self.encoder)
        channels, (ph, pw) = embedding.proj.in_channels, embedding.proj.stride
        self.grid_size: tuple[int, int] = cast(tuple[int, int], tuple(embedding.grid_size))
        self.patch_size: tuple[int, int] = (ph, pw)
        self.image_shape: tuple[int, int, int] = (channels, self.grid_size[0] * ph, self.grid_size[1] * pw)
        patches = self.grid_size[0] * self.grid_size[1]
        self.num_masked: int = min(max(round(mask_ratio * patches), 1), patches - 1)
        self.num_visible: int = patches - self.num_masked
        self.normalize_pixels = normalize_pixels
        self.gray_all: bool = gray == "all"
        self.keep_positions = keep_positions
        self.decoder: PixelDecoder = PixelDecoder(
            encoder_dim=self.encoder.embed_dim,
            dim=decoder_dim,
            depth=decoder_depth,
            heads=decoder_heads,
            grid_size=self.grid_size,
            values=channels * ph * pw,
        ).to(device=embedding.proj.weight.device, dtype=embedding.proj.weight.dtype)
        if not keep_positions and self.encoder.embed_dim % 4:
            raise ValueError(f"fixed positions need an embed_dim that 4 divides, not {self.encoder.embed_dim}")
        # The encoder is changed from here on: all checks come before, except those of the graying settings.
        if gray is not None and (graying is not None or graying_of(self.encoder) is None):
            how = graying or GrayingSettings(method="dct")
            gray_model(self.encoder, **asdict(how))
        self.encoder.reset_classifier(0)  # DDP expects a gradient for every parameter, and a head would not get one
        if not keep_positions:
            self.encoder.pos_embed.requires_grad_(False)  # pyright: ignore[reportOptionalMemberAccess]
            self.set_positions()

    @torch.no_grad()
    def set_positions(self) -> None:
        """Rewrite the fixed positions, e.g. after `to_empty`, or after timm's `init_weights` has drawn random ones."""
        self.decoder.set_positions()
        positions = self.encoder.pos_embed
        if not self.keep_positions and positions is not None:
            patches = self.grid_size[0] * self.grid_size[1]
            positions.zero_()  # the class token and registers have no position in the image
            positions[0, positions.shape[1] - patches :] = sincos_positions(
                self.grid_size, positions.shape[2], device=positions.device
            ).to(positions.dtype)

    def forward(
        self, images: Tensor, *, generator: torch.Generator | None = None, visible: Tensor | None = None
    ) -> MaskedOutput:
        """Mask the normalised images (b, c, h, w) and predict the masked patches.

        Masks are random in evaluation mode too: pass a seeded generator there, so that every evaluation scores the same
        task. A compiled model accepts no generator; pass it the result of `draw_visible` as `visible` instead.
        """
        self._check_images(images)
        if visible is None:
            visible = self.draw_visible(images.shape[0], images.device, generator)
        elif generator is not None or visible.shape != (images.shape[0], self.num_visible):
            raise ValueError(
                f"visible is what draw_visible gives, of shape {(images.shape[0], self.num_visible)}, and takes the "
                f"place of a generator; got shape {tuple(visible.shape)}{' and a generator' if generator else ''}"
            )
        prediction = self.decoder(self.encode(images, visible), visible)
        mask = torch.ones(prediction.shape[:2], dtype=torch.bool, device=images.device).scatter(1, visible, False)
        return MaskedOutput(self._loss(images, prediction, mask), prediction, mask)

    def draw_visible(self, batch: int, device: torch.device | str, generator: torch.Generator | None = None) -> Tensor:
        """Draw the visible patches of each image, uniformly and independently: sorted indices (batch, num_visible)."""
        patches = self.num_visible + self.num_masked
        if generator is None:  # passing generator=None would make torch.compile refuse batches of another size
            noise = torch.rand(batch, patches, device=device)
        else:
            noise = torch.rand(batch, patches, generator=generator, device=generator.device).to(device)
        # Sorted into timm's order, since DCT graying depends on how values change from one token to the next.
        return noise.argsort(dim=1)[:, : self.num_visible].sort(dim=1).values

    def encode(self, images: Tensor, visible: Tensor) -> Tensor:
        """Encode only the patches with the indices `visible` (b, v); returns normalised tokens (b, prefix + v, d)."""
        encoder = self.encoder
        tokens = encoder.patch_embed.norm(self._embed(images, visible))
        positions = encoder.pos_embed
        assert positions is not None
        patches = self.grid_size[0] * self.grid_size[1]
        placed, ahead = positions[:, positions.shape[1] - patches :], positions[:, : positions.shape[1] - patches]
        tokens = tokens + take(placed.expand(len(tokens), -1, -1), visible)
        prefix: list[Tensor] = [token for token in (encoder.cls_token, encoder.reg_token) if token is not None]
        if prefix:
            first = torch.cat(prefix, dim=1)
            first = first + ahead if ahead.shape[1] else first  # with timm's `no_embed_class` they have no positions
            tokens = torch.cat([first.expand(len(tokens), -1, -1), tokens], dim=1)
        tokens = encoder.norm_pre(encoder.pos_drop(tokens))
        for block in encoder.blocks:
            if encoder.grad_checkpointing and self.training:
                tokens = cast(Tensor, checkpoint(block, tokens, use_reentrant=False))
            else:
                tokens = block(tokens)
        # timm uses one of these norms (`fc_norm`, after the pool, with mean pooling); the other is the identity.
        return encoder.fc_norm(encoder.norm(tokens))

    def _embed(self, images: Tensor, visible: Tensor) -> Tensor:
        """Project the visible patches with the encoder's own projection, which grays its input if it is grayed."""
        ph, pw = self.patch_size
        if self.gray_all:
            return take(self.encoder.patch_embed.proj(images).flatten(2).transpose(1, 2), visible)
        seen = take(tokens_of(images, ph, pw), visible)
        strip = untokens(seen, (len(seen), images.shape[1], ph, seen.shape[1] * pw), ph, pw)
        return self.encoder.patch_embed.proj(strip).flatten(2).transpose(1, 2)

    def _loss(self, images: Tensor, prediction: Tensor, mask: Tensor) -> Tensor:
        target, center, scale = self._target(images)
        error = (prediction.to(target.dtype) - (target - center) / scale).square().mean(dim=2)
        return torch.where(mask, error, 0).sum() / mask.sum()

    def _target(self, images: Tensor) -> tuple[Tensor, Tensor | int, Tensor | int]:
        """Return the patches' values in float32 or better, the offset to subtract and the scale to divide by."""
        tokens = tokens_of(images, *self.patch_size)
        tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        if not self.normalize_pixels:
            return tokens, 0, 1
        variance, mean = torch.var_mean(tokens, dim=2, keepdim=True, correction=0)
        return tokens, mean, (variance + PIXEL_EPSILON).sqrt()

    @torch.no_grad()
    def reconstruct(self, images: Tensor, output: MaskedOutput) -> Tensor:
        """Return the images with the predictions in place of the masked patches, for inspection.

        With `normalize_pixels` the predictions are rescaled by each patch's true mean and standard deviation, which the
        model did not predict.
        """
        target, center, scale = self._target(images)
        painted = torch.where(output.mask[..., None], output.prediction.to(target.dtype) * scale + center, target)
        return untokens(painted, images.shape, *self.patch_size).to(images.dtype)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks of encoder and decoder in the backward pass instead of storing their activations."""
        self.encoder.set_grad_checkpointing(enable)
        self.decoder.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that timm's optimiser factory excludes from weight decay."""
        return {f"encoder.{name}" for name in self.encoder.no_weight_decay()} | {"decoder.mask_token"}

    def _check_images(self, images: Tensor) -> None:
        if tuple(self.encoder.patch_embed.grid_size) != self.grid_size:
            raise ValueError(
                f"the encoder's grid of patches became {tuple(self.encoder.patch_embed.grid_size)} since the decoder "
                f"was built for {self.grid_size}; build the MaskedAutoencoder after set_input_size"
            )
        if tuple(images.shape[1:]) != self.image_shape or not images.shape[0] or not images.is_floating_point():
            raise ValueError(
                f"expected normalised images (batch, {', '.join(map(str, self.image_shape))}), got {images.dtype} of "
                f"shape {tuple(images.shape)}; resize them, or build the encoder with another img_size or in_chans"
            )


register_family(MaskedAutoencoder, "encoder.patch_embed.proj")


def take(tokens: Tensor, which: Tensor) -> Tensor:
    """Select from tokens (b, n, d), for each sample, the rows with the indices `which` (b, v): (b, v, d)."""
    return tokens.gather(1, which[..., None].expand(-1, -1, tokens.shape[2]))


def _built(name: str, settings: Mapping[str, Any]) -> VisionTransformer:
    model = build_model(name, model_kwargs={"num_classes": 0, "weight_init": "jax", **settings}).model
    return cast(VisionTransformer, model.train())


def _check_encoder(encoder: nn.Module) -> PatchEmbed:
    """Return the encoder's patch embedding; ValueError if single tokens cannot be left out of the encoder."""

    def refuse(why: str) -> ValueError:
        return ValueError(f"{type(encoder).__name__} cannot be the encoder of a masked autoencoder: {why}")

    plain = isinstance(encoder, VisionTransformer)
    if not plain or type(encoder)._pos_embed is not VisionTransformer._pos_embed:
        raise refuse("take a plain timm VisionTransformer, e.g. vit_base_patch16_224")
    embedding = encoder.patch_embed
    if not isinstance(embedding, PatchEmbed) or not isinstance(embedding.proj, nn.Conv2d):
        raise refuse(f"its patch_embed is a {type(embedding).__name__}, which does not project patch by patch")
    if encoder.pos_embed is None:
        raise refuse("it has no position embedding; build it with pos_embed='learn'")
    if encoder.attn_pool is not None:
        raise refuse("its attention pooling would stay untrained; build it with global_pool='token' or 'avg'")
    if not isinstance(encoder.patch_drop, nn.Identity):
        raise refuse("it drops patches itself; build it with patch_drop_rate=0")
    size, (ph, pw) = cast(tuple[int, int] | None, embedding.img_size), embedding.proj.stride
    if size is None or size[0] % ph or size[1] % pw or size[0] * size[1] < 2 * ph * pw:
        patch = (ph, pw)
        raise refuse(f"images of {size} pixels do not divide into two or more patches of {patch}; choose its img_size")
    return embedding


# ---- The decoder


class PixelDecoder(nn.Module):
    """The light decoder, built of timm's blocks: maps the encoded visible tokens to the values of every patch.

    All masked patches enter as the same learned vector; only their positions distinguish them.
    """

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
        self.embed: nn.Linear = nn.Linear(encoder_dim, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        # Not saved, because they are determined by the sizes.
        self.register_buffer("positions", torch.empty(1, grid_size[0] * grid_size[1], dim), persistent=False)
        self.blocks: nn.Sequential = nn.Sequential(
            *(Block(dim, heads, qkv_bias=True, norm_layer=cast(type[nn.Module], norm_layer)) for _ in range(depth))
        )
        self.norm: nn.LayerNorm = norm_layer(dim)
        self.head: nn.Linear = nn.Linear(dim, values)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise the weights (Glorot uniform, as in the original ViT) and write the positions."""
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
        """Rewrite the fixed positions."""
        width = self.positions.shape[2]
        self.positions.copy_(sincos_positions(self.grid_size, width, device=self.positions.device)[None])

    def forward(self, encoded: Tensor, visible: Tensor) -> Tensor:
        """Map the tokens (b, prefix + v, encoder_dim) of the patches `visible` (b, v, indices) to (b, n, values)."""
        tokens = self.embed(encoded)
        batch, _, dim = tokens.shape
        ahead = tokens.shape[1] - visible.shape[1]  # class token and registers come along, without a position
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


def sincos_positions(grid_size: tuple[int, int], dim: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return fixed 2-D positions (rows · columns, dim) in float64: sines and cosines of the row, then of the column.

    Positions are in row-major order. Each of the four parts takes a quarter of `dim`, with frequencies that decrease
    geometrically from 1. The dot product of two positions depends only on their offset. Raises ValueError unless `dim`
    is divisible by 4.
    """
    if dim % 4 or dim < 4:
        raise ValueError(f"two-dimensional sines and cosines need a width that 4 divides, not {dim}")
    quarter = dim // 4
    frequency = WAVELENGTH ** -(torch.arange(quarter, dtype=torch.float64, device=device) / quarter)
    rows, columns = (torch.arange(size, dtype=torch.float64, device=device) for size in grid_size)
    row, column = (angle.reshape(-1, 1) * frequency for angle in torch.meshgrid(rows, columns, indexing="ij"))
    return torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=1)


# ---- After pre-training: the encoder as a classifier, fine-tuned as a whole or probed with a linear head


def hand_over(encoder: nn.Module, model: Model) -> Model:
    """Copy the encoder's weights, graying, removed skips and attention into a timm VisionTransformer, in place.

    The model's head stays as it is. Its pooling may differ: with mean pooling timm puts the last norm after the pool,
    and the encoder's last norm is loaded there. Position embeddings stay trainable or fixed as they were in the model.
    An attention that the model was built with stays, with a warning if the encoder has another one.

    Raises ValueError, naming what does not fit; the model is then unchanged.
    """
    target = unwrap(model).state_dict()
    weights = unwrap(encoder).state_dict()
    ours, theirs = _norm_of(weights), _norm_of(target)
    weights = {
        theirs + name.removeprefix(ours) if name.startswith(ours) else name: tensor
        for name, tensor in weights.items()
        if not name.startswith("head.")
    }
    wanted = {name: tensor for name, tensor in target.items() if not name.startswith("head.")}
    shared = wanted.keys() & weights.keys()
    misfits = (wanted.keys() ^ weights.keys()) | {name for name in shared if wanted[name].shape != weights[name].shape}
    if misfits:
        some = ", ".join(sorted(misfits)[:4]) + (" …" if len(misfits) > 4 else "")
        raise ValueError(
            f"the encoder and the {type(unwrap(model)).__name__} differ at {some}; build the model with the encoder's "
            "settings (its img_size too: the model's set_input_size changes it afterwards)"
        )
    skips, attention = plan_skips(model, skips_of(encoder)), plan_attention(model, attention_of(encoder))
    settings = graying_of(encoder)
    if settings is None:  # graying goes first, since it may raise
        ungray(model)
    else:
        gray_model(model, **asdict(settings))
    unwrap(model).load_state_dict(weights, strict=False)
    put_skips(skips)
    put_attention(model, attention)
    if built := built_attention(model).keys() - attention_of(encoder).keys():
        warnings.warn(
            f"the model was built with another attention in {len(built)} blocks ({min(built)} first), which stays; the "
            "encoder's weights were not trained for that",
            stacklevel=2,
        )
    return model


def _norm_of(names: Mapping[str, Any]) -> str:
    """Return the prefix of a ViT's last norm, which is either before or after the pool."""
    return "fc_norm." if "fc_norm.weight" in names else "norm."


def linear_probe(model: VisionTransformer, num_classes: int | None = None) -> VisionTransformer:
    """Freeze a ViT, in place, and give it a new linear head behind a BatchNorm without parameters.

    The BatchNorm normalises the features, so that one learning rate suits every encoder. `num_classes` defaults to that
    of the model's own head. Raises ValueError for a model with dropout of any kind, which would drop frozen features,
    and for one with two heads.
    """
    classes = model.num_classes if num_classes is None else num_classes
    if classes < 1:
        raise ValueError("the model has no head that would tell the number of classes; give num_classes")
    if hasattr(model, "head_dist"):
        raise ValueError(
            f"{type(model).__name__} has a second head, head_dist, which the probe would leave random; take a model "
            "without distillation"
        )
    for name, module in model.named_modules():
        rates = {nn.Dropout: "p", DropPath: "drop_prob", PatchDropout: "prob", PatchDropoutWithIndices: "prob"}
        if any(isinstance(module, kind) and getattr(module, rate) for kind, rate in rates.items()):
            raise ValueError(f"{name} would drop frozen features at random; build the model without dropout")
    model.requires_grad_(False)
    model.reset_classifier(classes)
    linear = model.head
    assert isinstance(linear, nn.Linear)
    nn.init.trunc_normal_(linear.weight, std=0.01)
    nn.init.zeros_(linear.bias)
    device, dtype = linear.weight.device, linear.weight.dtype
    norm = nn.BatchNorm1d(linear.in_features, affine=False, eps=1e-6, device=device, dtype=dtype)
    model.add_module("head", nn.Sequential(norm, linear).train(model.training))
    return model
