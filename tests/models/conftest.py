"""Small models with random weights, and images, for the tests of surgery and weights."""

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn


@pytest.fixture
def make_vit() -> Callable[..., nn.Module]:
    def make(**kwargs: object) -> nn.Module:
        settings = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 7, **kwargs}
        return timm.create_model("vit_tiny_patch16_224", **settings).eval()

    return make


@pytest.fixture
def vit(make_vit: Callable[..., nn.Module]) -> nn.Module:
    return make_vit()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 64, 64)
