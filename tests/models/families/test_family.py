"""Every family: graying inside equals graying by hand, the weights keep their names, and ungray undoes it all."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
import transformers
from timm.models.convmixer import ConvMixer
from torch import Tensor, nn

from wellcond.graying import TokenGraying
from wellcond.models.families import find_projection, register_family, unwrap
from wellcond.models.surgery import GrayedConv2d, gray, graying_of, is_grayed, ungray

SMALL = {"depth": 1, "embed_dim": 48, "num_heads": 3, "num_classes": 7}
SWIN = {"img_size": 64, "window_size": 4, "depths": (1, 1), "num_heads": (2, 4), "embed_dim": 16, "num_classes": 7}
PVT = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 16), "num_heads": (1, 1, 1, 1), "num_classes": 7}
HF = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 96, "image_size": 64}


def timm_model(name: str, **kwargs: object) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False, **kwargs)


def torchvision_vit(**kwargs: object) -> nn.Module:
    model = torchvision.models.VisionTransformer(
        image_size=64, patch_size=16, num_layers=1, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=7, **kwargs
    )
    nn.init.normal_(model.heads.head.weight)  # starts at zero, and would hide any difference
    return model


def torchvision_swin(**kwargs: object) -> nn.Module:
    return torchvision.models.SwinTransformer(
        [4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=[4, 4], num_classes=7, **kwargs
    )


# name → how to build it, its patch size, the size of its images
ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], tuple[int, int]]] = {
    "vit": (timm_model("vit_tiny_patch16_224", img_size=64, **SMALL), (16, 16), (64, 64)),
    "vit patch 8": (timm_model("vit_tiny_patch16_224", img_size=32, patch_size=8, **SMALL), (8, 8), (32, 32)),
    "vit oblong": (
        timm_model("vit_tiny_patch16_224", img_size=(32, 64), patch_size=(8, 16), **SMALL),
        (8, 16),
        (32, 64),
    ),
    "vit dynamic": (timm_model("vit_tiny_patch16_224", dynamic_img_size=True, **SMALL), (16, 16), (48, 80)),
    "vit one channel": (timm_model("vit_tiny_patch16_224", img_size=64, in_chans=1, **SMALL), (16, 16), (64, 64)),
    "deit": (timm_model("deit_tiny_patch16_224", img_size=64, **SMALL), (16, 16), (64, 64)),
    "deit distilled": (timm_model("deit_tiny_distilled_patch16_224", img_size=64, **SMALL), (16, 16), (64, 64)),
    "dinov2": (timm_model("vit_small_patch14_reg4_dinov2", img_size=56, **SMALL), (14, 14), (56, 56)),
    "dinov3": (timm_model("vit_small_patch16_dinov3", img_size=64, **SMALL), (16, 16), (64, 64)),
    "siglip": (timm_model("vit_base_patch16_siglip_224", img_size=64, **SMALL), (16, 16), (64, 64)),
    "eva02": (timm_model("eva02_tiny_patch14_224", img_size=56, **SMALL), (14, 14), (56, 56)),
    "beit": (timm_model("beit_base_patch16_224", img_size=64, **SMALL), (16, 16), (64, 64)),
    "beitv2": (timm_model("beitv2_base_patch16_224", img_size=64, **SMALL), (16, 16), (64, 64)),
    "swin": (timm_model("swin_tiny_patch4_window7_224", **SWIN), (4, 4), (64, 64)),
    "swin v2": (timm_model("swinv2_tiny_window8_256", **SWIN), (4, 4), (64, 64)),
    "cait": (timm_model("cait_xxs24_224", img_size=64, init_values=1.0, **SMALL), (16, 16), (64, 64)),
    "pvt v2": (timm_model("pvt_v2_b0", **PVT), (4, 4), (64, 64)),  # 7×7 kernels, stride 4
    "convmixer": (lambda: ConvMixer(dim=16, depth=1, kernel_size=5, patch_size=8, num_classes=7), (8, 8), (32, 32)),
    "torchvision vit": (torchvision_vit, (16, 16), (64, 64)),
    "torchvision swin": (torchvision_swin, (4, 4), (64, 64)),
    "torchvision swin v2": (
        lambda: torchvision_swin(
            block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
        ),
        (4, 4),
        (64, 64),
    ),
    "hf vit": (lambda: transformers.ViTModel(transformers.ViTConfig(**HF)), (16, 16), (64, 64)),
    "hf vit classifier": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**HF, num_labels=7)),
        (16, 16),
        (64, 64),
    ),
    "vit features": (
        timm_model("vit_tiny_patch16_224", img_size=64, features_only=True, out_indices=(0,), depth=1, embed_dim=48),
        (16, 16),
        (64, 64),
    ),
    "swin features": (
        timm_model("swin_tiny_patch4_window7_224", features_only=True, out_indices=(0, 1), **SWIN),
        (4, 4),
        (64, 64),
    ),
    "pvt v2 features": (timm_model("pvt_v2_b0", features_only=True, **PVT), (4, 4), (64, 64)),
}


def outputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    with torch.no_grad():
        out = model(images)
    if isinstance(out, Tensor):
        return [out]
    return [*out] if isinstance(out, list) else [out[0]]


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("method", ["dct", "svd"])
@pytest.mark.parametrize("name", ZOO)
def test_graying_inside_is_graying_outside(name: str, method: str) -> None:
    build, patch_size, size = ZOO[name]
    model = build().eval()
    channels = find_projection(model)[1].in_channels
    images = torch.randn(2, channels, *size)
    plain, plain_classes, keys = outputs(model, images), classes(model), list(model.state_dict())
    by_hand = outputs(model, TokenGraying(method, 0.7, patch_size=patch_size)(images))

    assert gray(model, method, epsilon=0.7) is model

    assert is_grayed(model)
    assert list(model.state_dict()) == keys
    grayed = outputs(model, images)
    assert all(torch.equal(a, b) for a, b in zip(grayed, by_hand, strict=True))
    assert not torch.equal(
        grayed[-1], plain[-1]
    )  # the images do reach the output, so that the line above says something

    assert ungray(model) is model

    assert not is_grayed(model)
    assert classes(model) == plain_classes
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, images), plain, strict=True))


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "a CNN": timm_model("resnet18"),
    "a hybrid of CNN and ViT": timm_model("vit_tiny_r_s16_p8_224", img_size=64, depth=1),
    "a hybrid without projection": timm_model("vitamin_small_224"),
    "NaFlex": timm_model("naflexvit_base_patch16_gap", depth=1, embed_dim=48, num_heads=3),
    "a convolutional stem": lambda: torchvision_vit(
        conv_stem_configs=[torchvision.models.vision_transformer.ConvStemConfig(8, 16, 16)]
    ),
    # The mask comes after the embedding: graying the whole image would show the masked patches to the others.
    "masked image modelling": lambda: transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**HF)),
    "a linear layer": lambda: nn.Linear(3, 3),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_families_raise_and_show_the_way_by_hand(name: str) -> None:
    model = UNKNOWN[name]()
    before = classes(model)
    if name == "masked image modelling":  # it holds a ViTModel, and the message says how to gray that on one's own risk
        with pytest.raises(ValueError, match=r'holds a ViTModel: gray that.*get_submodule\("vit"\)'):
            gray(model, "dct")
    else:
        with pytest.raises(ValueError, match=r"cannot gray \w+") as caught:
            gray(model, "dct")
        code = [line.strip() for line in str(caught.value).splitlines() if line.startswith("    ")]
        scope = {"wellcond": sys.modules["wellcond.graying"], "nn": nn, "model": model}
        exec("\n".join(code), scope)  # the two lines of the message run as they stand
        assert isinstance(scope["model"], nn.Sequential)
        assert isinstance(scope["model"][0], TokenGraying)
        assert scope["model"][1] is model
    assert classes(model) == before
    assert graying_of(model) is None


def test_a_model_of_words_is_not_told_to_gray_its_images() -> None:
    model = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    )
    with pytest.raises(
        ValueError, match=r"BertModel: it reads words.*register_family\(BertModel, embedding="
    ) as caught:
        gray(model, "dct")
    assert "image" not in str(caught.value)


def test_a_model_inside_another_is_pointed_at(vit: nn.Module, images: Tensor) -> None:
    model = nn.Sequential(nn.Identity(), vit)
    with pytest.raises(ValueError, match="holds a VisionTransformer") as caught:
        gray(model, "dct")
    assert 'wellcond.gray(model.get_submodule("1"), "dct")' in str(caught.value)
    gray(model.get_submodule("1"), "dct")
    assert is_grayed(model)


class Patchify(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)

    def forward(self, images: Tensor) -> Tensor:
        return self.patches(images).flatten(2).mean(-1)


def test_a_family_can_be_registered() -> None:
    model, images = Patchify(), torch.randn(2, 3, 16, 16)
    with pytest.raises(ValueError, match="register_family"):
        gray(model, "dct")
    register_family(Patchify, "patches")
    expected = model(TokenGraying("dct", 0.7, patch_size=4)(images))
    assert torch.equal(gray(model, "dct", epsilon=0.7)(images), expected)
    register_family(Patchify, "nowhere.patches")
    with pytest.raises(ValueError, match=r"no patch projection at nowhere\.patches"):
        gray(Patchify(), "dct")


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.optim.swa_utils.AveragedModel,
        timm.utils.ModelEmaV3,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    ],
    ids=["DataParallel", "AveragedModel", "ModelEmaV3", "compile", "DataParallel of compile"],
)
def test_wrappers_are_looked_through(vit: nn.Module, images: Tensor, wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(vit)
    inner = unwrap(wrapped)
    assert type(inner) is type(vit)
    images = images.to(next(inner.parameters()).device)  # DataParallel moves the model where there is a GPU
    plain = inner(images)
    assert gray(wrapped, "dct", epsilon=0.7) is wrapped
    assert isinstance(inner.get_submodule("patch_embed.proj"), GrayedConv2d)
    assert graying_of(wrapped) == graying_of(inner)
    ungray(wrapped)
    assert torch.equal(inner(images), plain)


class Tower(nn.Module):
    """Looks like a wrapper, but has a weight of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.scale = module, nn.Parameter(torch.ones(()))


def test_a_model_with_weights_of_its_own_is_no_wrapper(vit: nn.Module) -> None:
    tower = Tower(vit)
    assert unwrap(tower) is tower


def test_no_model_library_is_imported_for_a_model_of_another() -> None:
    code = """
import sys, torch
from torch import nn
from wellcond.models import gray, register_family

class Patchify(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)

register_family(Patchify, "patches")
gray(Patchify(), "dct")
print(sorted({"timm", "torchvision", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
