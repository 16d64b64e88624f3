"""Every family is measured at each of its sites, alike live and in a pass of its own, and its attention is heard."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from wellcond.models.sites import find_blocks
from wellcond.probe import Probe

SMALL: dict[str, Any] = {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
SWIN: dict[str, Any] = {"img_size": 32, "depths": (1, 2), "embed_dim": 16, "num_heads": (1, 2), "num_classes": 3}
PVT: dict[str, Any] = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4)}
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {**SMALL, "patch_size": 8},
    "deit_tiny_distilled_patch16_224": {**SMALL, "patch_size": 8},
    "vit_small_patch14_reg4_dinov2": {**SMALL, "patch_size": 8},
    "vit_base_patch16_siglip_224": {**SMALL, "patch_size": 8},
    "eva02_tiny_patch14_224": {**SMALL, "patch_size": 8},
    "vit_small_patch16_dinov3": {**SMALL, "patch_size": 8, "num_heads": 1},
    "beit_base_patch16_224": {**SMALL, "patch_size": 8},
    "cait_xxs24_224": {**SMALL, "patch_size": 8, "depth_token_only": 1},
    "swin_tiny_patch4_window7_224": {**SWIN, "window_size": 4},
    "swinv2_tiny_window8_256": {**SWIN, "window_size": 4},
    "pvt_v2_b0": {**PVT, "num_classes": 3},
}
HF: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
IMAGES = {"image_size": 32, "patch_size": 8}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "ViT": {**HF, **IMAGES},
    "Dinov2": {**HF, **IMAGES},
    "CLIPVision": {**HF, **IMAGES},
    "SiglipVision": {**HF, **IMAGES},
    "Bert": {**HF, "vocab_size": 50},
    "Roberta": {**HF, "vocab_size": 50},
    "Electra": {**HF, "vocab_size": 50, "embedding_size": 32},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "vocab_size": 50},
}


def check(model: nn.Module, inputs: Tensor, rows_of: Callable[..., Any]) -> None:
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases, class tokens and LayerScale start as good as zero
            parameter.add_(0.05 * torch.randn_like(parameter))
        plain = model(inputs)
        found = []
        for exact in (True, False):
            with Probe(model, sites="*", exact=exact) as probe:
                out = model(inputs)
            assert_same(out, plain)
            found.append(rows_of(probe.rows()))
    exact, live = found
    alone = rows_of(probe.rows(), "status")
    blocks = find_blocks(model)
    for block in blocks:
        for site in block.taps:
            values = exact[block.name, site]
            single = alone[block.name, site]["log_kappa"] == "single"
            assert values["excluded"] == (2 if single else 0)
            for name, value in values.items():
                found = live[block.name, site][name]
                assert found == pytest.approx(value, rel=1e-2, nan_ok=single), (block.name, site, name)
        if block.attention is not None and "sa" in block.taps:
            assert exact[block.name, "sa"]["attention_entropy"] >= 0  # 0 where a reduced grid leaves one key


def assert_same(found: Any, expected: Any) -> None:
    for one, two in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, two)


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str, rows_of: Any) -> None:
    check(timm.create_model(name, **TIMM[name]), torch.randn(2, 3, 32, 32), rows_of)


def test_timm_parallel_blocks(rows_of: Any) -> None:
    block = timm.models.vision_transformer.ParallelScalingBlock
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, patch_size=8, block_fn=block)
    check(model, torch.randn(2, 3, 32, 32), rows_of)


def test_timm_convmixer(rows_of: Any) -> None:
    model = timm.models.convmixer.ConvMixer(dim=16, depth=2, kernel_size=3, patch_size=4, num_classes=3)
    check(model, torch.randn(2, 3, 32, 32), rows_of)


@pytest.mark.parametrize("name", ["VisionTransformer", "SwinTransformer", "SwinTransformerV2"])
def test_torchvision(name: str, rows_of: Any) -> None:
    models = pytest.importorskip("torchvision").models
    if name == "VisionTransformer":
        model = models.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=48)
    else:
        size: dict[str, Any] = {"embed_dim": 16, "depths": [1, 2], "num_heads": [1, 2], "window_size": [4, 4]}
        if name == "SwinTransformerV2":
            swin = models.swin_transformer
            size |= {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
        model = models.SwinTransformer(patch_size=[4, 4], num_classes=3, **size)
    check(model, torch.randn(2, 3, 32, 32), rows_of)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(name: str, rows_of: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**HUGGING_FACE[name]))
    inputs = torch.randint(2, 50, (2, 9)) if "vocab_size" in HUGGING_FACE[name] else torch.randn(2, 3, 32, 32)
    check(model, inputs, rows_of)
