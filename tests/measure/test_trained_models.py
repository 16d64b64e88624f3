"""The architectures fit published weights by name, begin as they should, and are models like any other."""

import math

import pytest
import timm
import torch
from torch import nn

from wellcond import sites
from wellcond.measure.trained_models import Cifar10Vit, GalileoNano, galileo_weights
from wellcond.models.build import build_model


def galileo_file(model: GalileoNano, path) -> None:
    """The model's weights under Galileo's names."""
    state, theirs = model.state_dict(), {}
    for name, value in state.items():
        if ".attn.qkv." in name:
            for part, third in zip("qkv", value.chunk(3), strict=True):
                theirs[name.replace(".qkv.", f".{part}.")] = third.clone()
        elif name.startswith(("blocks.", "norm.")):
            theirs[name] = value
    theirs |= {f"space_time_embed.S2_RGB.proj.{kind}": state[f"s2_rgb.{kind}"] for kind in ("weight", "bias")}
    theirs |= {"s_t_channel_embed": torch.zeros(7, 32), "pos_embed": torch.zeros(24, 32)}
    theirs |= {"month_embed.weight": torch.zeros(12, 32), "time_embed.TC.weight": torch.randn(128, 3)}
    channels, time, month = state["encoding"].chunk(3)
    theirs["s_t_channel_embed"][1], theirs["pos_embed"][0], theirs["month_embed.weight"][5] = channels, time, month
    torch.save(theirs, path)


@pytest.mark.parametrize(("name", "blocks", "side"), [("cifar10_vit", 6, 32), ("galileo_nano", 4, 96)])
def test_timm_builds_them(name, blocks, side):
    built = build_model(name)
    assert len(sites(built.model)) == 5 * blocks
    assert built.data_config["input_size"] == (3, side, side)
    assert built.model(torch.rand(2, 3, side, side)).isfinite().all()


@pytest.mark.parametrize("name", ["cifar10_vit", "galileo_nano"])
def test_settings_are_refused_and_not_ignored(name):
    with pytest.raises(ValueError, match="takes no settings"):
        timm.create_model(name, depth=3)
    with pytest.raises(ValueError, match="takes no settings"):
        timm.create_model(name, num_classes=7)
    with pytest.raises(ValueError, match="give the file as the checkpoint"):
        timm.create_model(name, pretrained=True)


@pytest.mark.parametrize("model_class", [Cifar10Vit, GalileoNano])
def test_linear_maps_begin_after_xavier(model_class):
    for name, module in model_class().named_modules():
        if not isinstance(module, nn.Linear):
            continue
        assert not module.bias.any()
        for part in module.weight.chunk(3) if name.endswith(".qkv") else [module.weight]:
            bound = math.sqrt(6 / sum(part.shape))
            assert 0.95 * bound < part.abs().max() <= bound


@torch.no_grad()
def test_galileos_weights_come_back_under_our_names(tmp_path):
    model = GalileoNano()
    for parameter in model.parameters():
        parameter.uniform_(-1, 1)
    galileo_file(model, tmp_path / "encoder.pt")
    found = galileo_weights(tmp_path / "encoder.pt")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_galileos_tokens_are_patches_of_the_bands_with_their_encodings():
    model, seen = GalileoNano().double(), []
    model.encoding.normal_()
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    images = torch.rand(1, 3, 96, 96, dtype=torch.float64)
    model(images)
    row, column = 2, 7
    patch = images[0, [2, 1, 0], 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]  # blue, green, red
    token = (model.s2_rgb.weight * patch).sum((1, 2, 3)) + model.s2_rgb.bias
    place = [
        wave(8 * at * 10000 ** (-k / 32)) for at in (column, row) for wave in (math.sin, math.cos) for k in range(8)
    ]
    expected = token + torch.cat([model.encoding, torch.tensor(place, dtype=torch.float64)])
    torch.testing.assert_close(seen[0][0, 12 * row + column], expected, rtol=0, atol=1e-5)  # places are float32
