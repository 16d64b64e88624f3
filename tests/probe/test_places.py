"""What a pattern of sites and blocks means, and what is said where it means nothing."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

from wellcond.probe import Probe
from wellcond.probe.places import choose


def names(model: nn.Module, *what: Any) -> list[tuple[str, str]]:
    return [(want.place.block, want.place.site) for want in choose(model, *what)]


@pytest.fixture
def deep(make_vit: Any) -> Any:
    return make_vit(depth=12)


def test_sites_by_pattern(vit: Any) -> None:
    assert names(vit, "*sa") == [(f"blocks.{i}", site) for i in range(2) for site in ("sa", "+sa")]
    assert names(vit, ["mlp", "in"]) == [(f"blocks.{i}", site) for i in range(2) for site in ("in", "mlp")]
    assert {site for _, site in names(vit, "*")} == {"tokens", "embed", "in", "sa", "+sa", "mlp", "+mlp"}


@pytest.mark.parametrize(
    ("blocks", "indices"),
    [
        ("blocks.1?", [10, 11]),
        ("*", range(12)),
        (None, range(12)),
        (3, [3]),
        (-1, [11]),
        ([3, "blocks.1?", 3], [3, 10, 11]),
        ([5, 1], [1, 5]),
        (range(2), [0, 1]),
    ],
)
def test_blocks_by_pattern_and_index(deep: Any, blocks: Any, indices: Any) -> None:
    assert names(deep, "sa", blocks) == [(f"blocks.{i}", "sa") for i in indices]


def test_what_a_pattern_could_have_matched_is_told(vit: Any) -> None:
    for wrong in ("atention", "+as", ["sa", "x*"]):
        with pytest.raises(ValueError, match=r"there is no site .*tokens, embed, in, sa, \+sa, mlp, \+mlp"):
            Probe(vit, sites=wrong)
    for wrong in ("blocks.2", "layer*", 2, -3, [0, 7]):
        with pytest.raises(ValueError, match=r"no block is called .*blocks\.0, blocks\.1"):
            Probe(vit, blocks=wrong)
    with pytest.raises(ValueError, match="empty list names no sites; the sites are tokens"):
        Probe(vit, sites=[])
    with pytest.raises(ValueError, match="empty list names no blocks"):
        Probe(vit, blocks=[])


def test_a_site_that_the_blocks_lack_says_why(vit: Any) -> None:
    convmixer = timm.models.convmixer.ConvMixer(dim=16, depth=2, kernel_size=3, patch_size=8)
    with pytest.raises(ValueError, match=r"none of the 2 blocks.*'\+mlp': a ConvMixer has no skip.*What they have: "):
        Probe(convmixer, sites=["sa", "+mlp"])
    assert len(names(convmixer, ["sa", "*mlp"])) == 4  # a pattern that means something is fine
    parallel = timm.create_model(
        "vit_tiny_patch16_224", depth=1, block_fn=timm.models.vision_transformer.ParallelScalingBlock
    )
    with pytest.raises(ValueError, match="one skip, around attention and MLP together"):
        Probe(parallel, sites="+sa")


def test_by_default_what_there_is() -> None:
    convmixer = timm.models.convmixer.ConvMixer(dim=16, depth=1, kernel_size=3, patch_size=8)
    assert [site for _, site in names(convmixer)] == ["sa", "+sa", "mlp"]
    block = timm.models.vision_transformer.ParallelScalingBlock
    parallel = timm.create_model("vit_tiny_patch16_224", depth=1, block_fn=block)
    assert [site for _, site in names(parallel)] == ["sa", "mlp", "+mlp"]


def test_models_without_blocks() -> None:
    with pytest.raises(ValueError, match=r"ResNet has no blocks that wellcond knows.*\n.*register_blocks"):
        Probe(timm.create_model("resnet18"))
    with pytest.raises(ValueError, match="Linear has no blocks"):
        Probe(nn.Linear(2, 2))


def test_names_are_those_of_the_model_inside_its_wrappers(vit: Any) -> None:
    plain = names(vit, "*")
    assert names(nn.DataParallel(vit), "*") == plain
    assert names(torch.compile(vit, backend="eager"), "*") == plain  # pyright: ignore[reportArgumentType]
