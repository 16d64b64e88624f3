"""A trained encoder becomes a classifier: nothing of it is lost, and only what should be trained is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import wellcond
from wellcond.models.mae import MaskedAutoencoder, hand_over, linear_probe
from wellcond.models.surgery import attention_of, gray, graying_of, replace_attention

SMALL = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}


def make_vit(**kwargs: Any) -> Any:
    settings = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 7, **kwargs}
    return timm.create_model("vit_tiny_patch16_224", **settings).eval()


def trained(**kwargs: Any) -> MaskedAutoencoder:
    """No longer what it was at its start, norms included."""
    mae = MaskedAutoencoder(make_vit(**kwargs), gray="visible", **SMALL)
    with torch.no_grad():
        for parameter in mae.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mae.eval()


@pytest.fixture
def pictures() -> Tensor:
    return torch.randn(4, 3, 32, 32)


@pytest.mark.parametrize("before", ["token", "avg"])
@pytest.mark.parametrize("after", ["token", "avg"])
def test_weights_graying_and_skips_are_handed_over(before: str, after: str, pictures: Tensor) -> None:
    mae = trained(global_pool=before)
    wellcond.remove_skip(mae.encoder, "mlp", blocks=1)
    replace_attention(mae.encoder, "linear", blocks=0)
    model = make_vit(global_pool=after)
    head = model.head.weight.clone()
    assert hand_over(mae.encoder, model) is model
    assert graying_of(model) == graying_of(mae)
    assert wellcond.skips_of(model) == {"blocks.1": ("mlp",)}
    assert attention_of(model) == attention_of(mae.encoder) != {}
    assert torch.equal(model.head.weight, head)
    assert model.pos_embed.requires_grad
    ours, theirs = (m.norm if isinstance(m.norm, nn.LayerNorm) else m.fc_norm for m in (mae.encoder, model))
    assert torch.equal(ours.weight, theirs.weight)
    everything = torch.arange(4).expand(4, -1)
    found = model.fc_norm(model.forward_features(pictures))
    torch.testing.assert_close(found, mae.encode(pictures, everything), rtol=1e-4, atol=1e-5)


def test_an_ungrayed_encoder_ungrays_the_model() -> None:
    mae = MaskedAutoencoder(make_vit(), **SMALL)
    model = gray(make_vit(), "dct")
    assert graying_of(hand_over(mae.encoder, model)) is None


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"img_size": 64}, "pos_embed"), ({"depth": 3}, "blocks.2"), ({"reg_tokens": 1}, "reg_token")],
)
def test_a_model_that_does_not_fit_stays_as_it_was(settings: dict[str, Any], name: str) -> None:
    model = make_vit(**settings)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=name):
        hand_over(trained().encoder, model)
    assert graying_of(model) is None
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_the_encoders_file_is_a_plain_timm_model(tmp_path: Path) -> None:
    mae, file = trained(), tmp_path / "encoder.safetensors"
    wellcond.save(mae.encoder, file)
    plain = make_vit(num_classes=0)
    plain.load_state_dict(mae.encoder_state_dict())
    loaded = wellcond.load(model := make_vit(), file, strict=False)
    assert sorted(loaded.missing) == ["head.bias", "head.weight"]
    assert graying_of(model) == graying_of(mae)


# ---- the linear probe


def test_only_the_head_is_trained(pictures: Tensor) -> None:
    model = linear_probe(hand_over(trained().encoder, make_vit())).train()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.1.weight", "head.1.bias"}
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    nn.functional.cross_entropy(model(pictures), torch.arange(4)).backward()
    optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name for name in changed if not name.startswith("head.")} == set()
    assert {"head.1.weight", "head.1.bias", "head.0.running_mean"} <= changed


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_features_are_normalised_over_the_batch(pool: str, pictures: Tensor) -> None:
    model = linear_probe(make_vit(global_pool=pool).double(), 5).train()
    assert model.head[1].weight.dtype == torch.float64
    images = pictures.double()
    features = model.forward_head(model.forward_features(images), pre_logits=True)
    scaled = (features - features.mean(0)) / (features.var(0, correction=0) + 1e-6).sqrt()
    expected = scaled @ model.head[1].weight.T + model.head[1].bias
    torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-12)
    assert model(images).shape == (4, 5)


def test_a_probe_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="num_classes"):
        linear_probe(make_vit(num_classes=0))
    for settings in ({"drop_path_rate": 0.1}, {"proj_drop_rate": 0.1}):
        with pytest.raises(ValueError, match="at random"):
            linear_probe(make_vit(**settings))
