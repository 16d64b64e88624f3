"""The weights that are read reproduce, by hand and in float64, what each family's attention gives; those set, too."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from timm.models.convmixer import ConvMixer
from torch import Tensor, nn
from torch.nn.utils import parametrize

import wellcond
from wellcond.attention import SoftmaxAttention
from wellcond.models import AttentionWeights, attention_weights, set_attention_weights
from wellcond.models.sites import Block, find_blocks

SMALL = {"depth": 1, "embed_dim": 24, "num_heads": 3, "num_classes": 5, "img_size": 32}
SWIN = {"img_size": 32, "window_size": 4, "depths": (1,), "num_heads": (3,), "embed_dim": 24, "num_classes": 5}
PVT = {"depths": (1, 1, 1, 1), "embed_dims": (24, 24, 24, 24), "num_heads": (3, 3, 3, 3), "num_classes": 5}
HF = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 48}
HF_IMAGES = {**HF, "image_size": 32, "patch_size": 8}
WORDS = {**HF, "vocab_size": 50, "max_position_embeddings": 40}


def timm_model(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, **kwargs)


def hf(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**settings))

    return build


def torchvision_swin(version: str) -> Callable[[], nn.Module]:
    module = torchvision.models.swin_transformer
    block = {"v1": module.SwinTransformerBlock, "v2": module.SwinTransformerBlockV2}[version]
    merging = {"v1": module.PatchMerging, "v2": module.PatchMergingV2}[version]
    return lambda: module.SwinTransformer(
        [4, 4], 24, [2], [3], [4, 4], num_classes=5, block=block, downsample_layer=merging
    )


def own_width() -> nn.Module:
    """An attention whose keys and values have another width than its queries."""
    layer = nn.TransformerEncoderLayer(24, 3, 48, batch_first=True)
    layer.self_attn = nn.MultiheadAttention(24, 3, kdim=16, vdim=8, batch_first=True)
    return layer


ZOO: dict[str, Callable[[], nn.Module]] = {
    "vit": timm_model("vit_tiny_patch16_224", **SMALL),
    "vit without bias": timm_model("vit_tiny_patch16_224", **SMALL, qkv_bias=False),
    "vit of ours": timm_model("vit_tiny_patch16_224", **SMALL, attn_layer=SoftmaxAttention),
    "vit relpos": timm_model("vit_relpos_small_patch16_224", **SMALL, qkv_bias=True),
    "eva": timm_model("eva02_tiny_patch14_224", **{**SMALL, "img_size": 28}),
    "eva fused": timm_model("vit_small_patch16_dinov3", **SMALL),
    "beit": timm_model("beit_base_patch16_224", **SMALL),
    "swin": timm_model("swin_tiny_patch4_window7_224", **SWIN),
    "swin v2": timm_model("swinv2_tiny_window8_256", **SWIN),
    "cait": timm_model("cait_xxs24_224", **SMALL, depth_token_only=1),
    "pvt v2": timm_model("pvt_v2_b0", **PVT),
    "pvt v2 linear": timm_model("pvt_v2_b2_li", **PVT),
    "torchvision vit": lambda: torchvision.models.VisionTransformer(32, 8, 1, 3, 24, 48),
    "torchvision swin": torchvision_swin("v1"),
    "torchvision swin v2": torchvision_swin("v2"),
    "torch encoder": lambda: nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True),
    "torch encoder, keys of another width": own_width,
    "hf vit": hf("ViT", **HF_IMAGES),
    "hf dinov2": hf("Dinov2", **HF_IMAGES),
    "hf dinov3": hf("DINOv3ViT", **HF_IMAGES),
    "hf clip": hf("CLIPVision", **HF_IMAGES),
    "hf siglip": hf("SiglipVision", **HF_IMAGES),
    "bert": hf("Bert", **WORDS),
    "roberta": hf("Roberta", **WORDS),
    "electra": hf("Electra", **WORDS, embedding_size=24),
    "distilbert": hf("DistilBert", dim=24, n_layers=1, n_heads=3, hidden_dim=48, vocab_size=50),
}
# Whose attention has more in it than softmax(q kᵀ) v: cosines, relative positions by an MLP, rotations, norms within.
MORE = {"swin v2", "torchvision swin v2", "vit relpos", "eva", "eva fused", "hf dinov3"}
KEYS_OF_ANOTHER_WIDTH = "torch encoder, keys of another width"


def build(name: str) -> nn.Module:
    """With no weight where it started: biases start at zero, and would be missed by nobody."""
    torch.manual_seed(0)
    model = ZOO[name]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, torchvision.models.swin_transformer.ShiftedWindowAttentionV2):
                module.qkv.bias[24:48] = 0  # as its constructor does
    return model


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.T if bias is None else x @ weight.T + bias


def random_like(weights: AttentionWeights) -> AttentionWeights:
    drawn = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return AttentionWeights(**{k: torch.randn_like(v) if isinstance(v, Tensor) else v for k, v in drawn.items()})


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def attended(weights: AttentionWeights, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Plain softmax attention, written out, of what the three projections read."""
    q = heads_of(linear(queries, weights.query, weights.query_bias), weights.num_heads)
    k = heads_of(linear(keys, weights.key, weights.key_bias), weights.num_heads)
    v = heads_of(linear(values, weights.value, weights.value_bias), weights.num_heads)
    mixed = (q @ k.mT / math.sqrt(weights.head_dim)).softmax(-1) @ v
    return linear(mixed.transpose(-2, -3).flatten(-2), weights.output, weights.output_bias)


def by_hand(name: str, block: Block, x: Tensor) -> Tensor:
    weights = attention_weights(block)
    if name == KEYS_OF_ANOTHER_WIDTH:
        return attended(weights, x, x[..., :16], x[..., :8])
    if not name.startswith("pvt"):
        return attended(weights, x, x, x)
    module: Any = block.module.get_submodule("attn")
    image = x.mT.unflatten(-1, SIDES)
    image = image if module.pool is None else module.pool(image)
    smaller = module.norm(module.sr(image).flatten(2).mT)
    smaller = smaller if module.act is None else module.act(smaller)
    return attended(weights, x, smaller, smaller)


SIDES = (16, 16)  # of an image of tokens that PVT v2 makes smaller by 8


def tokens_for(name: str) -> Tensor:
    count = 5 if name == "beit" else math.prod(SIDES) if name.startswith("pvt") else 16
    return torch.randn(2, count, 24, dtype=torch.float64)


def run(name: str, block: Block, x: Tensor) -> Tensor:
    """What the block's attention makes of the tokens, the output projection included; without position biases."""
    module: Any = block.module.get_submodule(block.attention or "")
    if getattr(module, "relative_position_bias_table", None) is not None:
        nn.init.zeros_(module.relative_position_bias_table)
    if name == "cait":  # let no heads talk
        for mixing in (module.proj_l, module.proj_w):
            nn.init.eye_(mixing.weight)
            nn.init.zeros_(mixing.bias)
    if name == KEYS_OF_ANOTHER_WIDTH:
        return module(x, x[..., :16], x[..., :8], need_weights=False)[0]
    if isinstance(module, nn.MultiheadAttention):
        return module(x, x, x, need_weights=False)[0]
    if name.startswith("pvt"):
        return module(x, list(SIDES))
    if name == "torchvision swin":
        return module(x.unflatten(1, (4, 4))).flatten(1, 2)
    if block.kind.output is not None:
        return block.module.get_submodule(block.kind.output)(module(x)[0])
    if name.startswith(("hf", "distilbert")):
        return module(x, attention_mask=None)[0]
    return module(x)


@pytest.mark.parametrize("name", [name for name in ZOO if name not in MORE])
@torch.no_grad()
def test_what_is_read_reproduces_the_attention_and_what_is_set_changes_it(name: str) -> None:
    block = find_blocks(build(name))[0]
    x = tokens_for(name)
    before = run(name, block, x)
    torch.testing.assert_close(by_hand(name, block, x), before, rtol=1e-9, atol=1e-9)
    old = attention_weights(block)
    set_attention_weights(block, random_like(old))
    after = run(name, block, x)
    assert not torch.allclose(after, before, atol=1e-3)
    torch.testing.assert_close(by_hand(name, block, x), after, rtol=1e-9, atol=1e-9)
    set_attention_weights(block, old)
    assert torch.equal(run(name, block, x), before)


@pytest.mark.parametrize("name", ZOO)
@torch.no_grad()
def test_each_weight_goes_where_it_belongs(name: str) -> None:
    """Values that are the same for all tokens are what is mixed, whatever the queries and keys, norms and rotations."""
    model = build(name)
    block = find_blocks(model)[0]
    weights = attention_weights(block)
    seen: list[Tensor] = []
    outside = block.kind.output
    attention = block.module.get_submodule(block.attention or "")
    module = block.module.get_submodule(outside) if outside else attention
    hook = module.register_forward_hook(lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out))
    alike = replace(
        weights,
        value=torch.zeros_like(weights.value),
        value_bias=None if weights.value_bias is None else torch.full_like(weights.value_bias, 0.5),
    )
    set_attention_weights(block, alike)
    if name == KEYS_OF_ANOTHER_WIDTH:
        x = torch.randn(2, 4, 24, dtype=torch.float64)
        attention(x, x[..., :16], x[..., :8], need_weights=False)
    else:
        forward(name, model)
    hook.remove()
    carried = torch.zeros_like(weights.output[0]) if alike.value_bias is None else alike.value_bias
    inner: Any = getattr(attention, "norm", None)
    if isinstance(inner, nn.LayerNorm) and not name.startswith("pvt"):
        carried = inner(carried)
    expected = linear(carried, weights.output, weights.output_bias)
    if name != "cait":  # the rows of talking heads do not sum to one
        torch.testing.assert_close(seen[0], expected.expand_as(seen[0]), rtol=1e-9, atol=1e-9)
    assert weights.per_head("query").shape == (3, 8, weights.query.shape[1])
    assert torch.equal(weights.per_head("output")[1], weights.output[:, 8:16])


def forward(name: str, model: nn.Module) -> None:
    if name in ("bert", "roberta", "electra", "distilbert"):
        model(torch.arange(12).reshape(2, 6))
    elif name == "torch encoder":
        model.train()(torch.randn(2, 6, 24, dtype=torch.float64))  # in evaluation it takes a path without its modules
    else:
        side = 28 if name == "eva" else 32
        model(torch.randn(2, 3, side, side, dtype=torch.float64))


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "swin v2": lambda module, x: module(x),
    "torchvision swin v2": lambda module, x: module(x.unflatten(1, (4, 4))),
    "vit relpos": lambda module, x: module(x[:, :4]),
    "eva": lambda module, x: module(x),
    "hf dinov3": lambda module, x: module(x, position_embeddings=(torch.ones(16, 8).double(), torch.zeros(16, 8)))[0],
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_queries_are_told_from_keys_where_more_happens_to_both(name: str) -> None:
    """Without keys no content decides who attends to whom, and the output is affine in the tokens. Constant queries
    leave the choice to the keys."""
    block = find_blocks(build(name))[0]
    module: Any = block.module.get_submodule(block.attention or "")
    weights = attention_weights(block)
    assert weights.query_bias is not None
    x, y = torch.randn(2, 2, 16, 24, dtype=torch.float64)

    def bend() -> float:
        ends, middle = [CALLS[name](module, z) for z in (x, y)], CALLS[name](module, (x + y) / 2)
        return float((middle - sum(ends) / 2).abs().max())

    no_bias = None if weights.key_bias is None else torch.zeros_like(weights.key_bias)
    set_attention_weights(block, replace(weights, key=torch.zeros_like(weights.key), key_bias=no_bias))
    assert bend() < 1e-9
    set_attention_weights(block, replace(weights, query=torch.zeros_like(weights.query), key_bias=no_bias))
    assert bend() > 1e-3


def test_grouped_queries_have_fewer_heads_of_keys() -> None:
    model = timm.create_model(
        "vit_small_patch16_dinov3", **{**SMALL, "num_heads": 4}, num_kv_heads=2, qkv_fused=False, attn_type="rope"
    )
    weights = attention_weights(find_blocks(model)[0])
    assert weights.per_head("query").shape == (4, 6, 24)
    assert weights.per_head("key").shape == weights.per_head("value").shape == (2, 6, 24)


def test_class_attention_of_cait() -> None:
    block = find_blocks(build("cait"))[-1]
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    module: Any = block.module.get_submodule("attn")
    torch.testing.assert_close(module(x), attended(attention_weights(block), x[:, :1], x, x), rtol=1e-9, atol=1e-9)


def test_copies_are_given_and_parameters_stay(vit: nn.Module, images: Tensor) -> None:
    block: Any = vit.get_submodule("blocks.0")
    before, parameter = vit(images), block.attn.qkv.weight
    weights = attention_weights(block)
    weights.query.zero_()
    assert torch.equal(vit(images), before)
    set_attention_weights(block, weights)
    assert block.attn.qkv.weight is parameter
    assert parameter.requires_grad
    assert not parameter[:48].any()
    assert parameter[48:].any()


def test_surgery_does_not_hide_them(vit: nn.Module) -> None:
    plain = attention_weights(find_blocks(vit)[0])
    wellcond.remove_skip(vit, "sa")
    wellcond.replace_attention(vit, "kernelized")
    changed = attention_weights(find_blocks(vit)[0])
    assert torch.equal(plain.query, changed.query)


def test_value_and_output_that_undo_each_other(vit: nn.Module) -> None:
    """What cures do: with one head's worth of identity, attention hands on a mean of its tokens."""
    block: Any = vit.get_submodule("blocks.0")
    eye, zero = torch.eye(48), torch.zeros(48)
    weights = attention_weights(block)
    weights = replace(weights, query=0 * weights.query, query_bias=zero, value=eye, value_bias=zero)
    set_attention_weights(block, replace(weights, output=eye, output_bias=zero))
    x = torch.randn(2, 7, 48)
    torch.testing.assert_close(block.attn(x), x.mean(1, keepdim=True).expand_as(x))


MISTAKES = {
    "no query_bias that could be set": {"query_bias": torch.zeros(48)},
    "has a output_bias of shape": {"output_bias": None},
    r"key is of shape \(48, 47\)": {"key": torch.zeros(48, 47)},
    "has 3 heads, and the weights were made for 4": {"num_heads": 4},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_does_not_fit_changes_nothing(make_vit: Callable[..., nn.Module], message: str) -> None:
    vit = make_vit(qkv_bias=False)
    block = find_blocks(vit)[0]
    state = {name: value.clone() for name, value in vit.state_dict().items()}
    wrong = replace(random_like(attention_weights(block)), **MISTAKES[message])
    with pytest.raises(ValueError, match=message):
        set_attention_weights(block, wrong)
    assert all(torch.equal(value, state[name]) for name, value in vit.state_dict().items())


def test_a_key_bias_that_the_module_ignores_cannot_be_set() -> None:
    block = find_blocks(build("beit"))[0]
    with pytest.raises(ValueError, match="no key_bias that could be set"):
        set_attention_weights(block, replace(attention_weights(block), key_bias=torch.zeros(24)))


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_blocks_without_such_weights_say_so(vit: nn.Module) -> None:
    with pytest.raises(ValueError, match="VisionTransformer is no block that wellcond knows"):
        attention_weights(vit)
    mixer = ConvMixer(dim=8, depth=1)
    with pytest.raises(ValueError, match=r"blocks.0 \(Sequential\) has no single module that attends"):
        attention_weights(find_blocks(mixer)[0])
    block: Any = vit.get_submodule("blocks.0")
    with pytest.raises(ValueError, match="'keys' names no weights"):
        attention_weights(block).per_head("keys")
    parametrize.register_parametrization(block.attn.qkv, "weight", _Doubled())
    with pytest.raises(ValueError, match="parametrize"):
        set_attention_weights(block, attention_weights(block))
    block.attn = nn.Identity()
    with pytest.raises(ValueError, match="register_family teaches it"):
        attention_weights(block)


def test_no_weights_are_written_to_a_model_without_memory(make_vit: Callable[..., nn.Module], vit: nn.Module) -> None:
    with torch.device("meta"):
        empty = make_vit()
    with pytest.raises(ValueError, match="meta device"):
        set_attention_weights(find_blocks(empty)[0], attention_weights(find_blocks(vit)[0]))
