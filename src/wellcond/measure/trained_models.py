"""Two small vision transformers with public trained weights, reimplemented so that those weights fit.

    model = build_model("cifar10_vit", checkpoint="vit_cifar10.pth").model                # timm knows both names
    save_file(galileo_weights("encoder.pt"), "galileo_nano.safetensors")
    model = build_model("galileo_nano", checkpoint="galileo_nano.safetensors").model

Importing this file registers them with timm, so `measure` and everything else that takes timm's names can use them.
Without weights, each is initialised the way its authors do it. FILES says where the files come from.
"""

import os
from typing import Any

import torch
from timm.models import register_model
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from wellcond.models.weights import read_weights

__all__ = ["FILES", "Cifar10Vit", "GalileoNano", "cifar10_vit", "galileo_nano", "galileo_weights"]

MONTH = 5  # June, counted from 0
FILES = {
    "vit_cifar10.pth": "of the public repository smmk47/CIFAR10-Classification",
    "encoder.pt": "data/models/nano/encoder.pt of the public repository nasaharvest/galileo",
    "cifar10/val.tar": "CIFAR-10's 10,000 test images as PNG, in folders of their classes",
}


class Cifar10Vit(nn.Module):
    """A ViT of torch's own encoder layers: 128 wide, 6 deep, 8 heads, 64 patches of 4 × 4 pixels and a class token.

    Its norms come after the sum: x ↦ norm(x + attention(x)), not x + attention(norm(x)) as in most ViTs.
    """

    num_classes = 10

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed: nn.ModuleDict = nn.ModuleDict({"proj": nn.Conv2d(3, 128, 4, stride=4)})
        self.cls_token: nn.Parameter = nn.Parameter(torch.zeros(1, 1, 128))
        self.pos_embed: nn.Parameter = nn.Parameter(torch.zeros(1, 65, 128))
        self.dropout: nn.Dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(128, 8, 256, dropout=0.1, batch_first=True)
        self.transformer: nn.TransformerEncoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.mlp_head: nn.Sequential = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 10))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        _xavier(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed["proj"](images).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.mlp_head(self.transformer(self.dropout(x))[:, 0])


class GalileoNano(nn.Module):
    """Galileo's smallest encoder, for satellite images: 4 pre-norm blocks, 128 wide, 8 heads.

    Here it reads pictures as its Sentinel-2 bands blue, green and red at a single time: 144 patches of 8 × 8 pixels,
    one of the many kinds of tokens that it knows. Its norm and its four encodings (channels, time, month, place) are
    those of the trained model.
    """

    num_classes = 0

    def __init__(self) -> None:
        super().__init__()
        self.s2_rgb: nn.Conv2d = nn.Conv2d(3, 128, 8, stride=8)
        self.encoding: nn.Parameter = nn.Parameter(
            torch.zeros(96)
        )  # channels, time and month, the same for every token here
        self.register_buffer("place", _places(12, spacing=8.0), persistent=False)
        self.blocks: nn.ModuleList = nn.ModuleList(
            [Block(128, 8, mlp_ratio=4.0, qkv_bias=True, norm_layer=nn.LayerNorm) for _ in range(4)]
        )
        self.norm: nn.LayerNorm = nn.LayerNorm(128)
        _xavier(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.s2_rgb(images.flip(1)).flatten(2).mT
        place: Tensor = self.get_buffer("place")
        x = x + torch.cat([self.encoding.expand(len(place), -1), place], dim=-1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def galileo_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the weights of Galileo-Nano's encoder under the names of `GalileoNano`, for June."""
    theirs, _ = read_weights(path)
    ours = {
        "s2_rgb.weight": theirs["space_time_embed.S2_RGB.proj.weight"],
        "s2_rgb.bias": theirs["space_time_embed.S2_RGB.proj.bias"],
        # S2_RGB is the second channel group of those that vary in space and time; the time step is the first
        "encoding": torch.cat(
            [theirs["s_t_channel_embed"][1], theirs["pos_embed"][0], theirs["month_embed.weight"][MONTH]]
        ),
        "norm.weight": theirs["norm.weight"],
        "norm.bias": theirs["norm.bias"],
    }
    for name, value in theirs.items():
        if not name.startswith("blocks."):
            continue
        if ".attn.q." in name:  # timm keeps query, key and value in one matrix
            packed = [theirs[name.replace(".attn.q.", f".attn.{part}.")] for part in "qkv"]
            ours[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(packed)
        elif ".attn.k." not in name and ".attn.v." not in name:
            ours[name] = value
    return ours


@register_model
def cifar10_vit(pretrained: bool = False, **settings: Any) -> Cifar10Vit:
    """Return what timm.create_model("cifar10_vit") gives."""
    model: Any = Cifar10Vit()
    model.pretrained_cfg = _config(
        model,
        pretrained,
        settings,
        32,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        first_conv="patch_embed.proj",
    )
    return model


@register_model
def galileo_nano(pretrained: bool = False, **settings: Any) -> GalileoNano:
    """Return what timm.create_model("galileo_nano") gives."""
    model: Any = GalileoNano()
    # The authors scale each band so that its usual range becomes 0 … 1, which pictures have already.
    model.pretrained_cfg = _config(
        model, pretrained, settings, 96, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), first_conv="s2_rgb"
    )
    return model


def _config(model: Any, pretrained: bool, settings: dict[str, Any], side: int, **more: Any) -> dict[str, Any]:
    if pretrained:
        raise ValueError("these weights cannot be loaded by name; give the file as the checkpoint")
    given = {name: value for name, value in settings.items() if value is not None}
    if given.pop("num_classes", model.num_classes) != model.num_classes or given:
        raise ValueError(f"{type(model).__name__} has the shape of its weights and takes no settings, not {settings}")
    return {"input_size": (3, side, side), "crop_pct": 1.0, "interpolation": "bilinear", "classifier": None, **more}


def _xavier(model: nn.Module) -> None:
    """Initialise as the authors of both models do: linear weights Xavier uniform, biases zero."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            for part in module.weight.data.chunk(3) if name.endswith(".qkv") else [module.weight]:
                nn.init.xavier_uniform_(part)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _places(side: int, *, spacing: float) -> Tensor:
    """Return sines and cosines of column and row, eight of each, (side², 32); neighbours are `spacing` apart."""
    rates = 10000.0 ** (-torch.arange(8) / 32)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = [(spacing * at.flatten().float())[:, None] * rates for at in (columns, rows)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=-1)
