"""A replaced attention: every family's forward, and all that must stay as it was."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellcond.attention import ATTENTIONS, SkyformerAttention, find_attention
from wellcond.models.families import Replaced
from wellcond.models.surgery import AttentionSettings, attention_of, remove_skip, replace_attention, restore_attention

Make = Callable[..., nn.Module]
SETTINGS = {"skyformer": {"num_landmarks": 6}, "nystrom": {"num_landmarks": 6}}
WITH_BIAS = ("softmax", "linear", "kernelized")
VIT = {"img_size": 64, "depth": 1, "embed_dim": 48, "num_heads": 3}
# A family with its smallest size, and the attentions that it can have.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "vit_tiny_patch16_224": ({**VIT, "qk_norm": True, "scale_attn_norm": True}, tuple(ATTENTIONS)),
    "deit_tiny_distilled_patch16_224": (VIT, tuple(ATTENTIONS)),
    "vit_small_patch16_dinov3": (VIT, tuple(ATTENTIONS)),  # rotations, no qkv bias of its own
    "eva02_tiny_patch14_224": ({**VIT, "img_size": 56}, tuple(ATTENTIONS)),
    "beit_base_patch16_224": (VIT, WITH_BIAS),
    "cait_xxs24_224": (VIT, tuple(ATTENTIONS)),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 32, "depths": (2,), "embed_dim": 16, "num_heads": (2,), "window_size": 4},
        WITH_BIAS,
    ),
    "pvt_v2_b0": ({"depths": (1, 1, 1, 1)}, tuple(ATTENTIONS)),
    "pvt_v2_b2_li": ({"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 40, 32)}, tuple(ATTENTIONS)),
}


def make(name: str, **kwargs: Any) -> tuple[nn.Module, Tensor]:
    settings = {**FAMILIES[name][0], **kwargs}
    model = timm.create_model(name, num_classes=7, **settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases, position tables and LayerScale start at nothing
            parameter.add_(0.1 * torch.randn_like(parameter))
    size = settings.get("img_size", 64)
    return model, torch.randn(2, 3, size, size)


def replace(model: nn.Module, name: str, **kwargs: Any):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*talking heads")
        return replace_attention(model, name, **{**SETTINGS.get(name, {}), **kwargs})


# ---- families


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("cait")])
def test_softmax_in_place_of_softmax_changes_nothing(family: str) -> None:  # so each forward is the family's own
    model, images = make(family)
    before = model(images)
    replace(model, "softmax")
    torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in FAMILIES for name in FAMILIES[family][1]])
def test_every_family_attends_and_comes_back(family: str, name: str) -> None:
    model, images = make(family)
    before, parameters = model(images), dict(model.named_parameters())
    keys = list(model.state_dict())
    change = replace(model, name)
    assert list(attention_of(model)) == list(change.blocks)
    out = model(images)
    if name not in ("softmax", "nystrom"):
        assert not torch.allclose(out, before, rtol=1e-3)
    assert torch.equal(model(images), out)
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    model.train()
    model(images).square().sum().backward()
    model.eval()
    unused = {key for key, parameter in model.named_parameters() if parameter.grad is None}
    assert all(key.endswith(("proj_l.weight", "proj_l.bias", "proj_w.weight", "proj_w.bias")) for key in unused)
    restore_attention(model)
    assert attention_of(model) == {}
    assert torch.equal(model(images), before)


def test_it_is_the_function_between_the_models_projections(make_vit: Make) -> None:
    attention = make_vit(depth=1).blocks[0].attn
    tokens = torch.randn(2, 9, 48)
    q, k, v = attention.qkv(tokens).reshape(2, 9, 3, 3, 16).permute(2, 0, 3, 1, 4)
    for name, kind in ATTENTIONS.items():
        model = make_vit(depth=1)
        model.blocks[0].attn.load_state_dict(attention.state_dict())
        replace_attention(model, name)
        expected = attention.proj(kind.function(q, k, v).transpose(1, 2).reshape(2, 9, 48))
        torch.testing.assert_close(model.blocks[0].attn(tokens), expected)


def test_a_position_bias_is_a_factor_of_kernelized_attention_and_a_summand_of_linear() -> None:
    model, _ = make("swin_tiny_patch4_window7_224")
    attention = model.layers[0].blocks[1].attn
    windows, mask = torch.randn(8, 16, 16), torch.zeros(4, 16, 16)
    mask[1, :, 7:] = -100
    q, k, v = attention.qkv(windows).reshape(8, 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
    bias, keep = attention._get_rel_pos_bias(), (mask == 0).repeat(2, 1, 1)[:, None]
    for name, weights in (
        ("kernelized", (-torch.cdist(q, k).square() / 2 / 8**0.5).exp() * bias.exp()),
        ("linear", q @ k.mT / 16 + bias),
    ):
        with replace_attention(model, name):
            out = attention(windows, mask)
        expected = attention.proj((weights * keep @ v).transpose(1, 2).reshape(8, 16, 16))
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["beit_base_patch16_224", "swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize("name", ["skyformer", "nystrom"])
def test_landmarks_refuse_a_position_bias(family: str, name: str) -> None:
    model, images = make(family)
    before = model(images)
    with pytest.raises(ValueError, match=r"relative position bias.*softmax, kernelized and linear"):
        replace_attention(model, name)
    assert torch.equal(model(images), before)


@pytest.mark.parametrize("name", ["skyformer", "nystrom"])
def test_landmarks_refuse_a_bias_that_blocks_share(name: str) -> None:
    """It is the whole model's, and no block tells."""
    model = timm.create_model(
        "beit_base_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2, num_classes=3,
        use_rel_pos_bias=False, use_shared_rel_pos_bias=True,
    ).eval()  # fmt: skip
    with pytest.raises(ValueError, match="relative position bias"):
        replace_attention(model, name)
    assert attention_of(model) == {}
    with replace_attention(model, "kernelized"):
        assert model(torch.randn(1, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_mask_of_pairs_is_taken_or_refused_at_once(name: str) -> None:
    """NaFlexVit's, of batches with padding."""
    model = timm.create_model("naflexvit_base_patch16_gap", embed_dim=24, depth=2, num_heads=2, num_classes=3).eval()
    patches = {
        "patches": torch.randn(2, 9, 16 * 16 * 3),
        "patch_coord": torch.stack([torch.arange(9) // 3, torch.arange(9) % 3], -1).expand(2, 9, 2),
        "patch_valid": (torch.arange(9) < torch.tensor([[9], [6]])),
    }
    if name in ("softmax", "kernelized"):
        replace_attention(model, name)
        assert model(patches).isfinite().all()
    else:
        with pytest.raises(ValueError, match="NaFlexVit hides padding"):
            replace_attention(model, name)
        assert attention_of(model) == {}


def test_a_model_without_known_blocks_is_told_what_can_be_done() -> None:
    with pytest.raises(
        ValueError, match=r"Sequential has no blocks whose attention.*SkyformerAttention\(dim, num_heads"
    ):
        replace_attention(nn.Sequential(nn.Linear(3, 3)), "linear")
    with pytest.raises(TypeError, match=r"the model comes first.*got str"):
        replace_attention("skyformer", nn.Linear(3, 3))  # pyright: ignore[reportArgumentType]


def test_what_is_lost_is_said(make_vit: Make) -> None:
    model, _ = make("cait_xxs24_224")
    with pytest.warns(UserWarning, match="1 blocks goes without talking heads"):
        replace_attention(model, "linear")
    dropping = make_vit(attn_drop_rate=0.2)
    with pytest.warns(UserWarning, match=r"2 blocks goes without dropout of attention weights \(p = 0.2\)"):
        replace_attention(dropping, "skyformer")
    dropping.train()(torch.randn(1, 3, 64, 64))
    replace_attention(dropping, "kernelized")  # which drops them


# ---- settings, blocks, undoing


def test_settings_are_read_back_and_replaced(vit: nn.Module) -> None:
    replace_attention(vit, "skyformer", num_landmarks=5, gamma=0.3)
    core = find_attention("skyformer").core(num_landmarks=5, gamma=0.3)
    assert attention_of(vit)["blocks.1"] == AttentionSettings(name="skyformer", settings=core.settings)
    replace_attention(vit, "kernelized", blocks=0)
    assert [how.name for how in attention_of(vit).values()] == ["kernelized", "skyformer"]


def test_blocks_and_with(vit: nn.Module, images: Tensor) -> None:
    before = vit(images)
    with replace_attention(vit, "linear", blocks="blocks.1") as change:
        assert change.blocks == ("blocks.1",)
        assert list(attention_of(vit)) == ["blocks.1"]
        linear = vit(images)
        with replace_attention(vit, "kernelized"):
            assert not torch.equal(vit(images), linear)
        assert torch.equal(vit(images), linear)
        with restore_attention(vit):
            assert torch.equal(vit(images), before)
        assert torch.equal(vit(images), linear)
    assert torch.equal(vit(images), before)
    assert restore_attention(vit).blocks == ()


def test_mistakes_change_nothing(vit: nn.Module, images: Tensor) -> None:
    before = vit(images)
    for name, settings, word in (
        ("performer", {}, "kernelized, linear, nystrom"),
        ("skyformer", {"landmark_count": 3}, "num_landmarks, gamma"),
        ("softmax", {"gamma": 1.0}, "it has none"),
        ("skyformer", {"gamma": -1.0}, "gamma"),
        ("nystrom", {"conv_kernel": 33}, "attn_layer=NystromAttention"),
        ("linear", {"blocks": "stages.*"}, "no block is called"),
    ):
        with pytest.raises(ValueError, match=word):
            replace_attention(vit, name, **settings)
    assert attention_of(vit) == {}
    assert torch.equal(vit(images), before)


class OwnAttention(timm.layers.Attention):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return x


def test_what_it_does_not_know_is_refused(make_vit: Make) -> None:
    own = make_vit(attn_layer=OwnAttention)
    with pytest.raises(ValueError, match="OwnAttention, has a forward that replace_attention does not know"):
        replace_attention(own, "linear")
    hooked = make_vit()
    hooked.blocks[1].attn.forward = hooked.blocks[1].attn.forward
    with pytest.raises(ValueError, match=r"blocks\.1.*does not know"):
        replace_attention(hooked, "linear")
    built = make_vit(attn_layer=SkyformerAttention)
    with pytest.raises(ValueError, match="was built with SkyformerAttention"):
        replace_attention(built, "linear")
    assert {how.name for how in attention_of(built).values()} == {"skyformer"}
    mixer = timm.models.ConvMixer(dim=16, depth=1)
    with pytest.raises(ValueError, match="no single module that attends"):
        replace_attention(mixer, "linear")
    cosine = timm.create_model(
        "swinv2_tiny_window8_256", img_size=64, depths=(1,), embed_dim=16, num_heads=(2,), window_size=4
    )
    with pytest.raises(ValueError, match="does not know"):
        replace_attention(cosine, "linear")


def test_parametrized_attention_is_refused(vit: nn.Module) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    vit.blocks[0].attn.register_parameter("spare", nn.Parameter(torch.ones(1)))
    parametrize.register_parametrization(vit.blocks[0].attn, "spare", Doubled())
    with pytest.raises(ValueError, match=r"fully_shard, parametrize|does not know"):
        replace_attention(vit, "linear")


# ---- copies, compile, other surgery


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_attend_alike_and_are_independent(vit: nn.Module, images: Tensor, duplicate: Any) -> None:
    before = vit(images)
    replace_attention(vit, "skyformer", num_landmarks=6)
    out = vit(images)
    twin = duplicate(vit)
    assert attention_of(twin) == attention_of(vit)
    assert torch.equal(twin(images), out)
    assert torch.equal(restore_attention(twin) and twin(images), before)
    assert torch.equal(vit(images), out)


def test_optimisers_and_hooks_stay_attached(vit: nn.Module, images: Tensor) -> None:
    optimiser = torch.optim.SGD(vit.parameters(), lr=1.0)
    seen = []
    vit.blocks[0].attn.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    replace_attention(vit, "linear")
    weight = vit.blocks[0].attn.qkv.weight
    before = weight.detach().clone()
    vit(images).square().sum().backward()
    optimiser.step()
    assert not torch.equal(weight, before)
    assert seen == [(2, 17, 48)]


def test_a_compiled_model_attends_anew(make_vit: Make, images: Tensor) -> None:
    model = make_vit(depth=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = compiled(images)
    replace_attention(compiled, "skyformer", num_landmarks=6)
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(compiled(images), before, rtol=1e-3)
    restore_attention(compiled)
    torch.testing.assert_close(compiled(images), before, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


def test_beside_removed_skips(vit: nn.Module, images: Tensor) -> None:
    with remove_skip(vit, "sa"), replace_attention(vit, "linear"):
        x = vit.blocks[0].norm1(torch.randn(2, 17, 48))
        assert vit.blocks[0].attn(x).shape == x.shape
        without = vit(images)
    with replace_attention(vit, "linear"):
        assert not torch.allclose(vit(images), without)


def test_training_draws_landmarks_by_torchs_seed_and_evaluation_does_not(vit: nn.Module, images: Tensor) -> None:
    replace_attention(vit, "skyformer", num_landmarks=6)
    assert torch.equal(vit(images), vit(images))
    vit.train()
    torch.manual_seed(3)
    first = vit(images)
    assert not torch.equal(vit(images), first)
    torch.manual_seed(3)
    assert torch.equal(vit(images), first)


# ---- Hugging Face


@pytest.fixture
def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5.0")  # older ones are refused
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64
    )
    return transformers.BertModel(config).eval()


IDS = torch.arange(24).reshape(2, 12)
KEEP = (torch.arange(12) < torch.tensor([[12], [7]])).long()


def states(model: nn.Module, ids: Tensor = IDS, keep: Tensor | None = KEEP) -> Tensor:
    return model(input_ids=ids, attention_mask=keep).last_hidden_state


@pytest.mark.filterwarnings("ignore:.*goes without dropout")
@pytest.mark.parametrize("before", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_hugging_face_with_padding(bert: nn.Module, name: str, before: str) -> None:
    bert.set_attn_implementation(before)
    own = states(bert)
    with replace(bert, name):
        out = states(bert)
        torch.testing.assert_close(out[1:, :7], states(bert, IDS[1:, :7], KEEP[1:, :7]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out[1:, :7], states(bert, IDS[1:, :7], None), rtol=1e-4, atol=1e-5)
        assert torch.equal(copy.deepcopy(bert)(IDS, KEEP).last_hidden_state, out)
        assert torch.equal(through_pickle(bert)(IDS, KEEP).last_hidden_state, out)
        if name == "softmax":
            torch.testing.assert_close(out, own)
        elif name != "nystrom":
            assert not torch.allclose(out, own, rtol=1e-3)
        bert.train()
        states(bert).square().sum().backward()
        bert.eval()
    assert bert.config._attn_implementation == before
    assert torch.equal(states(bert), own)


@pytest.mark.filterwarnings("ignore:.*goes without dropout")
def test_hugging_face_some_blocks(bert: nn.Module) -> None:
    own = states(bert)
    both = replace_attention(bert, "linear", blocks=[0])
    replace_attention(bert, "kernelized", blocks=[1])
    assert [how.name for how in attention_of(bert).values()] == ["linear", "kernelized"]
    restore_attention(bert, blocks=[1])
    some = states(bert)
    assert not torch.allclose(some, own, rtol=1e-3)
    both.undo()
    assert torch.equal(states(bert), own)
    assert bert.config._attn_implementation == "sdpa"


def test_hugging_face_vision_models_keep_rotations_and_more() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")  # older ones are refused
    size = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 64}
    images = torch.randn(2, 3, 64, 64)
    for name in ("ViT", "CLIPVision", "Dinov2", "DINOv3ViT"):
        if not hasattr(transformers, f"{name}Model"):
            continue
        config = getattr(transformers, f"{name}Config")(image_size=64, patch_size=16, **size)
        model = getattr(transformers, f"{name}Model")(config).eval()
        own = model(images).last_hidden_state
        with replace_attention(model, "softmax"):
            torch.testing.assert_close(model(images).last_hidden_state, own, rtol=1e-4, atol=1e-5)
        with replace_attention(model, "skyformer", num_landmarks=6):
            out = model(images).last_hidden_state
            assert torch.equal(model(images).last_hidden_state, out)
        assert not torch.allclose(out, own, rtol=1e-3)
        assert torch.equal(model(images).last_hidden_state, own)


def test_hugging_face_models_that_share_a_config_are_changed_one_at_a_time() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    size = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 64}
    config = transformers.CLIPConfig(
        text_config=size | {"vocab_size": 50, "eos_token_id": 1},
        vision_config=size | {"image_size": 64, "patch_size": 16},
    )
    one, other = (transformers.CLIPModel(config).vision_model.eval() for _ in range(2))
    whole, text = transformers.CLIPModel(config).eval(), torch.ones(1, 3, dtype=torch.int64)
    images = torch.randn(2, 3, 64, 64)
    replace_attention(other, "linear")
    replace_attention(whole, "linear", blocks="vision_model.*")
    assert whole.config.vision_config is whole.vision_model.config
    outs = [other(images)[0], whole(text, images).image_embeds]
    with replace_attention(one, "kernelized"):
        assert one.embeddings.config is one.config is not config.vision_config
    assert one.config._attn_implementation == config._attn_implementation == "sdpa"
    assert torch.equal(other(images)[0], outs[0])
    assert torch.equal(whole(text, images).image_embeds, outs[1])
    restore_attention(other)
    assert torch.equal(whole(text, images).image_embeds, outs[1])


@pytest.mark.filterwarnings("ignore:.*goes without dropout")
def test_hugging_face_parts_of_a_model_get_the_masks_that_their_attention_reads(bert: nn.Module) -> None:
    replace_attention(bert, "skyformer", num_landmarks=4)
    out = states(bert)
    restore_attention(bert)
    replace_attention(bert.encoder, "skyformer", num_landmarks=4)
    assert torch.equal(states(bert), out)


def test_hugging_face_weights_cannot_be_had(bert: nn.Module) -> None:
    replace_attention(bert, "linear")
    with pytest.raises(ValueError, match="output_attentions"):
        bert(IDS, KEEP, output_attentions=True)


@pytest.mark.filterwarnings("ignore:.*goes without dropout")
def test_hugging_face_can_switch_ours_off_and_we_say_so(bert: nn.Module) -> None:
    own = states(bert)
    replace(bert, "skyformer")
    bert.set_attn_implementation("sdpa")
    assert torch.equal(states(bert), own)
    assert attention_of(bert) == {}
    replace_attention(bert, "linear", blocks=[0])  # which does not bring the other block's back
    assert [how.name for how in attention_of(bert).values()] == ["linear"]
    some = states(bert)
    restore_attention(bert)
    assert torch.equal(states(bert), own)
    with replace_attention(bert, "linear", blocks=[0]):
        assert torch.equal(states(bert), some)
    replace(bert, "skyformer")
    bert.set_attn_implementation("eager")
    restore_attention(bert)
    assert bert.config._attn_implementation == "eager"
    assert not any(isinstance(module, Replaced) for module in bert.modules())


@pytest.mark.filterwarnings("ignore:.*goes without dropout")
@pytest.mark.parametrize("kind", ["Bert", "CLIPText"])
def test_hugging_face_causal_models_refuse_landmarks_before_anything_is_changed(kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    size = {"vocab_size": 50, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    size |= {"intermediate_size": 64} | ({"is_decoder": True} if kind == "Bert" else {"eos_token_id": 1})
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**size)).eval()
    own = states(model, keep=None)
    for name in ("skyformer", "nystrom"):
        with pytest.raises(ValueError, match="the model is causal"):
            replace(model, name)
    assert model.config._attn_implementation == "sdpa"
    assert not any(isinstance(module, Replaced) for module in model.modules())
    for name in ("softmax", "linear", "kernelized"):
        with replace(model, name):
            out = states(model, keep=None)
            torch.testing.assert_close(out[:, :5], states(model, IDS[:, :5], None), rtol=1e-4, atol=1e-5)
            if name == "softmax":
                torch.testing.assert_close(out, own, rtol=1e-4, atol=1e-5)
