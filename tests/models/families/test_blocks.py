"""Every family, on real models: each tap holds what its name says, with all skips and without some."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from timm.models.convmixer import ConvMixer
from timm.models.vision_transformer import (
    Block,
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
)
from timm.models.vision_transformer_relpos import ResPostRelPosBlock
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from wellcond.models.sequence import build as build_sequence
from wellcond.models.sites import Block as FoundBlock
from wellcond.models.sites import Tap, find_blocks
from wellcond.models.surgery import remove_skip, restore_skip, skips_of
from wellcond.probe import Probe
from wellcond.words import BLOCK_SITES

DROP = 0.5
BATCH = 8
SMALL = {"depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5, "img_size": 32, "drop_path_rate": DROP}
SWIN = {"img_size": 32, "window_size": 4, "depths": (2, 1), "num_heads": (2, 4), "embed_dim": 16, "num_classes": 5}
PVT = {"depths": (1, 2, 1, 1), "embed_dims": (8, 16, 16, 16), "num_heads": (1, 1, 1, 1), "num_classes": 5}
HF = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
HF_IMAGES = {**HF, "image_size": 32, "patch_size": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WORDS = {**HF, **NO_DROPOUT, "vocab_size": 50, "max_position_embeddings": 40}


class MaskedAutoencoder(nn.Module):
    """An MAE as people write it themselves of timm's blocks: an encoder of the visible patches, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = timm.layers.PatchEmbed(32, 8, 3, 24)
        self.blocks = nn.ModuleList([Block(24, 3, drop_path=DROP) for _ in range(2)])
        self.mask_token = nn.Parameter(torch.randn(1, 1, 24))
        self.decoder_blocks = nn.ModuleList([Block(24, 3, drop_path=DROP)])

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)[:, ::4]
        for block in self.blocks:
            x = block(x)
        x = torch.cat([x, self.mask_token.expand(len(x), 12, -1)], dim=1)
        for block in self.decoder_blocks:
            x = block(x)
        return x


class TorchEncoder(nn.Module):
    """A ViT as people write it themselves of torch's own layers."""

    def __init__(self, norm_first: bool = False, batch_first: bool = True) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 24, 8, 8)
        layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(self.patch_embed(images).flatten(2).mT)


def timm_model(name: str, **kwargs: object) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False, **kwargs)


def vit(**kwargs: object) -> Callable[[], nn.Module]:
    return timm_model("vit_tiny_patch16_224", patch_size=8, **SMALL, **kwargs)


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=48, num_classes=5
    )


def torchvision_swin(**kwargs: object) -> nn.Module:
    return torchvision.models.SwinTransformer(
        [4, 4], embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=[4, 4], num_classes=5,
        stochastic_depth_prob=DROP, **kwargs,
    )  # fmt: skip


def torchvision_swin_v2() -> nn.Module:
    swin = torchvision.models.swin_transformer
    return torchvision_swin(block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2)


def hf(kind: str, **settings: object) -> Callable[[], nn.Module]:
    """A Hugging Face model, and the configuration that goes with it."""
    config = kind.removesuffix("Model").removesuffix("ForPreTraining") + "Config"
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**settings))


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "vit": vit(),
    "vit with LayerScale": vit(init_values=0.5),
    "vit post-norm": vit(block_fn=ResPostBlock),
    "vit parallel": vit(block_fn=ParallelScalingBlock),
    "vit parallel with LayerScale": vit(block_fn=ParallelScalingBlock, init_values=0.5),
    "vit parallel differential": timm_model(
        "vit_tiny_patch16_224", patch_size=8, **{**SMALL, "num_heads": 2}, block_fn=DiffParallelScalingBlock
    ),
    "vit of parallel things": vit(block_fn=ParallelThingsBlock, init_values=0.5),
    "deit": timm_model("deit_tiny_patch16_224", **SMALL),
    "dinov2": timm_model("vit_small_patch14_reg4_dinov2", patch_size=8, **{**SMALL, "init_values": 0.5}),
    "siglip": timm_model("vit_base_patch16_siglip_224", **SMALL),
    "mae": MaskedAutoencoder,
    "vit relpos": timm_model("vit_srelpos_small_patch16_224", patch_size=8, **{**SMALL, "init_values": 0.5}),
    "vit relpos post-norm": timm_model(
        "vit_srelpos_small_patch16_224", patch_size=8, **{**SMALL, "init_values": None}, block_fn=ResPostRelPosBlock
    ),
    "pit": timm_model("pit_ti_224", drop_path_rate=DROP, num_classes=5),
    "eva02": timm_model("eva02_tiny_patch14_224", patch_size=8, **SMALL),
    "eva post-norm": timm_model("eva02_tiny_patch14_224", patch_size=8, use_post_norm=True, **SMALL),
    "dinov3": timm_model("vit_small_patch16_dinov3", patch_size=8, **{**SMALL, "init_values": 0.5}),
    "beit": timm_model("beit_base_patch16_224", patch_size=8, **{**SMALL, "init_values": 0.5}),
    "beit without LayerScale": timm_model("beit_base_patch16_224", patch_size=8, **{**SMALL, "init_values": None}),
    "swin": timm_model("swin_tiny_patch4_window7_224", drop_path_rate=DROP, **SWIN),
    "swin v2": timm_model("swinv2_tiny_window8_256", drop_path_rate=DROP, **SWIN),
    "cait": timm_model("cait_xxs24_224", patch_size=8, **{**SMALL, "init_values": 0.5}),
    "pvt v2": timm_model("pvt_v2_b0", drop_path_rate=DROP, **PVT),
    "convmixer": lambda: ConvMixer(dim=16, depth=2, kernel_size=3, patch_size=8, num_classes=5),
    "torch encoder": TorchEncoder,
    "torch encoder pre-norm": lambda: TorchEncoder(norm_first=True),
    "torchvision vit": torchvision_vit,
    "torchvision swin": torchvision_swin,
    "torchvision swin v2": torchvision_swin_v2,
    "hf vit": hf("ViTModel", **HF_IMAGES),
    "hf deit": hf("DeiTModel", **HF_IMAGES),
    "hf mae": hf("ViTMAEModel", **HF_IMAGES, mask_ratio=0.5),
    "hf dinov2": hf("Dinov2Model", **HF_IMAGES, layerscale_value=0.5, drop_path_rate=DROP),
    "hf dinov2 with registers": hf("Dinov2WithRegistersModel", **HF_IMAGES, layerscale_value=0.5),
    "hf dinov3": hf("DINOv3ViTModel", **HF_IMAGES, layerscale_value=0.5, drop_path_rate=DROP),
    "hf clip": hf("CLIPVisionModel", **HF_IMAGES),
    "hf siglip": hf("SiglipVisionModel", **HF_IMAGES),
}
TEXTS: dict[str, Callable[[], nn.Module]] = {
    "bert": hf("BertModel", **WORDS),
    "roberta": hf("RobertaModel", **WORDS),
    "xlm-roberta": hf("XLMRobertaModel", **WORDS),
    "camembert": hf("CamembertModel", **WORDS),
    "electra": hf("ElectraModel", **WORDS, embedding_size=24),
    "distilbert": hf(
        "DistilBertModel", vocab_size=50, max_position_embeddings=40, dim=24, n_layers=2, n_heads=3, hidden_dim=48,
        dropout=0.0, attention_dropout=0.0,
    ),
}  # fmt: skip
OURS: dict[str, Callable[[], nn.Module]] = {
    "lra": lambda: build_sequence("listops", dim=24, num_heads=3, length=16, vocab_size=50),
    "lra with skyformer": lambda: build_sequence(
        "text", "skyformer", dim=24, length=16, vocab_size=50, num_landmarks=32
    ),  # all queries and keys: none is drawn
}
ZOO = {**IMAGES, **TEXTS, **OURS}
NORM_AFTER_ADD = {*TEXTS, "torch encoder"}  # + LayerNorm of the sum: what the MLP's skip carries is the normed sum
ONE_SKIP = {"vit parallel", "vit parallel with LayerScale", "vit parallel differential"}


# Parallel blocks have it too, but not a site for each branch.
WITH_DROP_PATH = [
    *(
        "vit",
        "vit with LayerScale",
        "vit post-norm",
        "deit",
        "dinov2",
        "siglip",
        "mae",
        "pit",
        "eva02",
        "eva post-norm",
    ),
    *(
        "vit relpos",
        "vit relpos post-norm",
        "dinov3",
        "beit",
        "beit without LayerScale",
        "swin",
        "swin v2",
        "cait",
        "pvt v2",
    ),
    *("torchvision swin", "torchvision swin v2", "hf dinov2", "hf dinov3"),
]


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model in float64, alive: what starts at zero (gammas, norms of Swin v2, heads) is drawn anew."""
    model = ZOO[name]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    if name in TEXTS or name in OURS:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model, torch.randint(3, 50, (BATCH, 10))
    side = 64 if name == "pvt v2" else 224 if name == "pit" else 32
    return model, torch.randn(BATCH if name != "pit" else 2, 3, side, side, dtype=torch.float64)


class Taps:
    """What passes at the taps of blocks, and the arguments of each block, during one forward."""

    def __init__(self, blocks: list[FoundBlock]) -> None:
        self.seen: list[dict[str, Tensor]] = [{} for _ in blocks]
        self.reads: list[dict[str, Tensor]] = [{} for _ in blocks]
        self.arguments: list[Any] = [None for _ in blocks]
        self.stack = ExitStack()
        for number, block in enumerate(blocks):
            for site, tap in block.taps.items():
                self.watch(self.seen[number], block.module, site, tap)
            if block.attention is not None:
                module = block.module.get_submodule(block.attention)
                self.pre(
                    module, lambda args, kwargs, n=number: self.reads[n].update({"attention": first(args, kwargs)})
                )
            self.pre(block.module, lambda args, kwargs, n=number: self.arguments.__setitem__(n, (args, kwargs)))

    def pre(self, module: nn.Module, note: Callable[[Any, Any], None]) -> None:
        handle = module.register_forward_pre_hook(lambda _, args, kwargs: note(args, kwargs), with_kwargs=True)
        self.stack.callback(handle.remove)

    def watch(self, seen: dict[str, Tensor], block: nn.Module, site: str, tap: Tap) -> None:
        calls = iter(range(100))

        def note(value: Any) -> None:
            if next(calls) == tap.call:
                seen[site] = (value[0] if isinstance(value, tuple) else value).detach().clone()

        module = block.get_submodule(tap.path)
        if tap.end == "input":
            handle = module.register_forward_pre_hook(lambda _, args: note(args))
        else:
            handle = module.register_forward_hook(lambda _, args, out: note(out))
        self.stack.callback(handle.remove)

    def __enter__(self) -> "Taps":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return (args[0] if args else next(iter(kwargs.values()))).detach().clone()


@torch.no_grad()
def look(blocks: list[FoundBlock], run: Callable[[], object]) -> Taps:
    with Taps(blocks) as taps:
        run()
    for block, seen in zip(blocks, taps.seen, strict=True):
        assert set(seen) == set(block.taps), block.name  # every tap fired
    return taps


def skipped(arguments: Any) -> Tensor:
    """What a block's first skip carries: its first argument, or CaiT's class token."""
    args, _ = arguments
    is_class_token = len(args) > 1 and isinstance(args[1], Tensor) and args[1].ndim == 3 and args[1].shape[1] == 1
    return args[1] if is_class_token else args[0]


def tokens(x: Tensor) -> Tensor:
    """(b, n, d), whatever the block's layout; a ConvMixer's (b, d, h, w) does as well for sums."""
    return x.flatten(1, 2) if x.ndim == 4 else x


def carried(name: str, block: FoundBlock, seen: dict[str, Tensor]) -> Tensor:
    """What the MLP's skip carries."""
    if name not in NORM_AFTER_ADD:
        return seen["+sa"]
    norm = {"distilbert": "sa_layer_norm", "torch encoder": "norm1"}.get(name, "attention.output.LayerNorm")
    return block.module.get_submodule(norm)(seen["+sa"])


@pytest.mark.parametrize("name", ZOO)
@torch.no_grad()
def test_each_sum_is_its_branch_and_what_was_skipped(name: str) -> None:
    model, inputs = build(name)
    blocks = find_blocks(model)
    taps = look(blocks, lambda: model(inputs))
    assert [block.index for block in blocks] == list(range(len(blocks)))
    for block, seen, arguments, reads in zip(blocks, taps.seen, taps.arguments, taps.reads, strict=True):
        assert model.get_submodule(block.name) is block.module
        assert set(block.taps) | set(block.lacks) == set(BLOCK_SITES)
        assert not set(block.taps) & set(block.lacks)
        x = tokens(skipped(arguments))
        if name in ONE_SKIP:
            if "sa" in seen:
                branch = seen["sa"] + seen["mlp"]
                assert torch.equal(seen["+mlp"], x + branch)
            continue
        if "sa" in seen:
            assert torch.equal(tokens(seen["+sa"]), x + tokens(seen["sa"]))
        if "mlp" in seen and "+mlp" in seen:
            assert torch.equal(tokens(seen["+mlp"]), tokens(carried(name, block, seen)) + tokens(seen["mlp"]))
        if block.attention is not None:  # windows are cut from the same numbers
            assert torch.equal(seen["in"].flatten().sort().values, reads["attention"].flatten().sort().values)


@pytest.mark.parametrize("name", WITH_DROP_PATH)
@torch.no_grad()
def test_branches_are_taken_before_drop_path(name: str) -> None:
    model, inputs = build(name)
    for module in model.modules():  # rates grow with depth; here they are all the same
        if "DropPath" in type(module).__name__:
            module.drop_prob = DROP
        elif isinstance(module, StochasticDepth):
            module.p = DROP
    blocks = find_blocks(model)
    taps = look(blocks, lambda: model.train()(inputs))
    dropped = kept = 0
    for seen, arguments in zip(taps.seen, taps.arguments, strict=True):
        sums = [("sa", "+sa", skipped(arguments)), ("mlp", "+mlp", seen["+sa"])]
        for branch, total, before in sums:
            assert seen[branch].flatten(1).abs().amax(dim=1).min() > 0  # whole, for every sample
            added = (tokens(seen[total]) - tokens(before)).flatten(1)
            whole = tokens(seen[branch]).flatten(1)
            for sample, full in zip(added, whole, strict=True):
                if sample.abs().max() == 0:
                    dropped += 1
                elif torch.allclose(sample, full / (1 - DROP), atol=1e-10):
                    kept += 1
                else:
                    assert torch.allclose(sample, full, atol=1e-10)  # CaiT's class blocks have no drop path
    assert dropped > 0
    assert kept > 0


HF_5 = int(transformers.__version__.partition(".")[0]) >= 5
REMOVABLE = [n for n in ZOO if n not in ONE_SKIP and (HF_5 or not (n.startswith("hf") or n == "distilbert"))]


@pytest.mark.parametrize("name", REMOVABLE)
@torch.no_grad()
def test_without_its_skip_a_block_hands_on_its_branch_to_the_bit(name: str) -> None:
    model, inputs = build(name)
    keys, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    before = find_blocks(model)
    truth = look(before, lambda: model(inputs))
    plain = [call(block, arguments) for block, arguments in zip(before, truth.arguments, strict=True)]
    # In training mode batch norm computes something else, and torch's attention the same with other rounding.
    training = not any(isinstance(module, nn.BatchNorm2d | nn.MultiheadAttention) for module in model.modules())
    for skips in [("sa",), ("mlp",), ("sa", "mlp")]:
        if name == "convmixer" and "mlp" in skips:
            continue
        for skip in skips:
            remove_skip(model, skip)
        assert set(skips_of(model).values()) == {skips}
        assert len(skips_of(model)) == len(before)
        assert list(model.state_dict()) == keys
        model.train(training)  # drop path would now drop branches, were it still there
        blocks = find_blocks(model)
        for block, seen, arguments in zip(blocks, truth.seen, truth.arguments, strict=True):
            now = look([block], lambda b=block, a=arguments: call(b, a)).seen[0]
            if "sa" in skips:
                assert torch.equal(now["sa"], now["+sa"])
                if "sa" in seen:
                    assert torch.equal(tokens(now["sa"]), tokens(seen["sa"]))
                else:  # parallel things: nobody else holds the sum of the branches
                    args, _ = arguments
                    parts = [part.ls(part.attn(part.norm(args[0]))) for part in block.module.attns]
                    assert torch.equal(now["sa"], torch.stack(parts).sum(dim=0))
            if skips == ("mlp",):
                block.module.eval()  # the attention's own skip is still there, with its drop path
                now = look([block], lambda b=block, a=arguments: call(b, a)).seen[0]
                assert torch.equal(tokens(now["+sa"]), tokens(seen["+sa"]))
                if "mlp" in seen:
                    assert torch.equal(tokens(now["mlp"]), tokens(seen["mlp"]))
            if "mlp" in skips:
                assert torch.equal(now["mlp"], now["+mlp"])
            elif "+mlp" in now:
                block.module.eval()
                now = look([block], lambda b=block, a=arguments: call(b, a)).seen[0]
                if "mlp" in now:
                    total = tokens(carried(name, block, now)) + tokens(now["mlp"])
                    assert torch.equal(tokens(now["+mlp"]), total)
        restore_skip(model)
        model.eval()
        assert [type(module) for module in model.modules()] == classes
        again = [call(block, arguments) for block, arguments in zip(before, truth.arguments, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def call(block: FoundBlock, arguments: Any) -> Tensor:
    args, kwargs = arguments
    out = block.module(*args, **kwargs)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize(("name", "skip"), [*((name, "sa") for name in sorted(ONE_SKIP)), ("convmixer", "mlp")])
def test_a_skip_that_is_not_there_cannot_be_removed(name: str, skip: str) -> None:
    model, _ = build(name)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"cannot remove the \w+ skip of blocks\.0: a (parallel block|ConvMixer) has"):
        remove_skip(model, skip)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.skipif(HF_5, reason="transformers 5 has the forwards that remove_skip knows")
def test_forwards_of_transformers_4_are_left_alone() -> None:
    model, _ = build("hf vit")
    with pytest.raises(ValueError, match="transformers before 5"):
        remove_skip(model, "sa")


def test_masks_reach_the_attention_of_a_block_without_skip() -> None:
    model, _ = build("vit")
    block = model.blocks[0].eval()
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    mask = torch.rand(6, 6) > 0.5
    mask.fill_diagonal_(True)
    truth = copy.deepcopy(block)
    remove_skip(model, "sa")
    sa = truth.ls1(truth.attn(truth.norm1(x), attn_mask=mask))
    expected = sa + truth.mlp(truth.norm2(sa))
    assert torch.equal(block(x, attn_mask=mask), expected)
    assert not torch.equal(block(x), expected)


def test_masks_reach_torchs_own_layer_without_skip() -> None:
    model, _ = build("torch encoder pre-norm")
    layer, x = model.encoder.layers[0], torch.randn(2, 6, 24, dtype=torch.float64)
    mask = torch.rand(6, 6) > 0.5
    mask.fill_diagonal_(False)
    sa = layer.self_attn(*[layer.norm1(x)] * 3, attn_mask=mask)[0]
    expected = sa + layer.linear2(layer.linear1(layer.norm2(sa)).relu())
    remove_skip(model, "sa")
    torch.testing.assert_close(layer(x, src_mask=mask), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layer(x), expected)


def test_tokens_before_samples_are_not_measured_as_samples() -> None:
    blocks = find_blocks(TorchEncoder(batch_first=False))
    assert all(not block.taps and "batch_first=False" in block.lacks["sa"] for block in blocks)
    with pytest.raises(ValueError, match="batch_first=False"):
        Probe(TorchEncoder(batch_first=False))
