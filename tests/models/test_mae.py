"""Masked autoencoding against plain formulations of it, in float64, and through what people do to models."""

import copy
import math
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wellcond
from wellcond.attention import SkyformerAttention
from wellcond.graying import gray_tokens
from wellcond.models.mae import MaskedAutoencoder, PixelDecoder, hand_over, linear_probe, sincos_positions
from wellcond.models.sites import find_blocks
from wellcond.models.surgery import GrayingSettings, attention_of, gray, graying_of, replace_attention, ungray

SMALL = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}
SVD = GrayingSettings(method="svd", epsilon=0.6)


def make_encoder(**kwargs: Any) -> Any:
    """Three by five patches of 4 × 4 pixels."""
    settings = {"img_size": (12, 20), "patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 3, **kwargs}
    return timm.create_model("vit_tiny_patch16_224", **settings)


def make_mae(**kwargs: Any) -> MaskedAutoencoder:
    return MaskedAutoencoder(make_encoder(), **{**SMALL, **kwargs})


def pictures(batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, 12, 20, dtype=torch.float64)


def patches(images: Tensor, size: int = 4) -> Tensor:
    """(b, n, c·p²), by torch's own way to cut an image."""
    return nn.functional.unfold(images, size, stride=size).transpose(1, 2)


def rows(tokens: Tensor, which: Tensor) -> Tensor:
    return torch.stack([tokens[sample, index] for sample, index in enumerate(which)])


# ---- the encoder


ENCODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "registers": {"reg_tokens": 2, "no_embed_class": True},
    "mean pooling": {"class_token": False, "global_pool": "avg"},
    "norm before": {"pre_norm": True},
    "norm inside": {"embed_norm_layer": nn.LayerNorm},
    "any size": {"dynamic_img_size": True},
    "layer scale": {"init_values": 0.1},
    "oblong patches": {"patch_size": (6, 4)},
}


@pytest.mark.parametrize("graying", [None, SVD, GrayingSettings(method="dct", epsilon=0.7)])
@pytest.mark.parametrize("settings", ENCODERS.values(), ids=ENCODERS)
def test_with_every_patch_visible_the_encoder_is_timms(settings: dict[str, Any], graying: GrayingSettings) -> None:
    mae = MaskedAutoencoder(
        make_encoder(**settings), gray="visible" if graying else None, graying=graying, **SMALL
    ).double()
    images, count = pictures(), mae.num_visible + mae.num_masked
    nn.init.normal_(mae.encoder.pos_embed)
    encoded = mae.encode(images, torch.arange(count).expand(3, -1))
    expected = mae.encoder.fc_norm(mae.encoder.forward_features(images))
    torch.testing.assert_close(encoded, expected, rtol=1e-9, atol=1e-9)
    assert mae(images).loss.isfinite()


@pytest.mark.parametrize("where", [None, "visible", "all"])
def test_the_projection_is_a_linear_map_of_the_grayed_tokens(where: Any) -> None:
    mae = make_mae(gray=where, graying=SVD if where else None).double()
    images, visible = pictures(), torch.tensor([[0, 7, 13], [1, 2, 3], [4, 9, 14]])
    seen: list[Tensor] = []
    mae.encoder.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mae.encode(images, visible)
    tokens = patches(images)
    if where == "all":
        tokens = gray_tokens(tokens, "svd", epsilon=0.6)
    tokens = rows(tokens, visible)
    if where == "visible":
        tokens = gray_tokens(tokens, "svd", epsilon=0.6)
    projection, positions = mae.encoder.patch_embed.proj, mae.encoder.pos_embed[0, 1:]
    expected = tokens @ projection.weight.flatten(1).T + projection.bias + positions[visible]
    torch.testing.assert_close(seen[0][:, 1:], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(seen[0][:, :1], mae.encoder.cls_token.expand(3, -1, -1))


@pytest.mark.parametrize("where", [None, "visible", "all"])
@pytest.mark.parametrize("method", ["svd", "dct"])
def test_what_is_masked_leaks_only_if_all_tokens_are_grayed(where: Any, method: str) -> None:
    mae = make_mae(gray=where, graying=GrayingSettings(method=method, epsilon=0.7) if where else None)
    images = pictures().float()
    visible = mae.draw_visible(3, "cpu")
    hidden = torch.ones(3, 15).scatter(1, visible, 0).reshape(3, 1, 3, 5)
    hidden = hidden.repeat_interleave(4, 2).repeat_interleave(4, 3)
    others = images + 10 * hidden
    same = torch.equal(mae.encode(images, visible), mae.encode(others, visible))
    assert same == (where != "all")
    shown = images + 10 * (1 - hidden)
    assert not torch.equal(mae.encode(images, visible), mae.encode(shown, visible))


def test_a_sample_does_not_depend_on_its_batch_mates() -> None:
    mae = make_mae(gray="visible").double()
    images, visible = pictures(), mae.draw_visible(3, "cpu")
    together = mae.decoder(mae.encode(images, visible), visible)
    alone = mae.decoder(mae.encode(images[1:2], visible[1:2]), visible[1:2])
    torch.testing.assert_close(together[1:2], alone, rtol=1e-9, atol=1e-9)


# ---- masks


def test_masks_hide_each_patch_alike_and_each_image_apart() -> None:
    mae = make_mae()
    assert (mae.num_visible, mae.num_masked) == (4, 11)
    visible = mae.draw_visible(4000, "cpu")
    assert visible.shape == (4000, 4)
    assert bool((visible.diff(dim=1) > 0).all())  # in the image's order, none twice
    share = torch.zeros(15).scatter_add(0, visible.flatten(), torch.ones(visible.numel())) / 4000
    deviation = (4 / 15 * 11 / 15 / 4000) ** 0.5
    assert bool(((share - 4 / 15).abs() < 5 * deviation).all())
    assert len({tuple(row) for row in visible.tolist()}) > 1000  # of 1365
    together = ((visible == 0).any(1) & (visible == 1).any(1)).double().mean()
    assert abs(together - 4 / 15 * 3 / 14) < 0.02  # no patch knows of its neighbour but for the count


def test_masks_follow_the_seed_or_the_generator() -> None:
    mae, images = make_mae(), pictures().float()
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(mae(images).mask)
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    torch.manual_seed(3)
    state = torch.get_rng_state()
    drawn = [mae(images, generator=torch.Generator().manual_seed(5)).mask for _ in range(2)]
    assert torch.equal(*drawn)
    assert torch.equal(torch.get_rng_state(), state)
    visible = mae.draw_visible(3, "cpu", torch.Generator().manual_seed(5))
    assert torch.equal(mae(images, visible=visible).mask, drawn[0])


@pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.5, 0.99, 1 - 1e-9])
@pytest.mark.parametrize("grid", [(1, 2), (3, 5), (7, 7)])
def test_at_least_one_patch_is_visible_and_one_masked(ratio: float, grid: tuple[int, int]) -> None:
    encoder = make_encoder(img_size=(4 * grid[0], 4 * grid[1]), depth=1)
    mae = MaskedAutoencoder(encoder, mask_ratio=ratio, gray="visible", **SMALL)
    out = mae(torch.randn(2, 3, 4 * grid[0], 4 * grid[1]))
    count = grid[0] * grid[1]
    hidden = min(max(round(ratio * count), 1), count - 1)
    assert out.mask.sum(1).tolist() == [hidden, hidden]
    assert out.prediction.shape == (2, count, 48)
    assert out.loss.isfinite()


# ---- the loss


@pytest.mark.parametrize("where", [None, "visible", "all"])
@pytest.mark.parametrize("normalize", [False, True])
def test_loss_is_the_squared_error_of_masked_patches_of_the_original(normalize: bool, where: Any) -> None:
    mae = make_mae(normalize_pixels=normalize, gray=where).double()
    images = 3 + 2 * pictures()
    out = mae(images)
    errors = []
    for sample in range(3):
        for index, patch in enumerate(patches(images)[sample]):
            if out.mask[sample, index]:
                if normalize:
                    patch = (patch - patch.mean()) / (patch.std(correction=0) ** 2 + 1e-6).sqrt()
                errors.append((out.prediction[sample, index] - patch).square())
    assert len(errors) == 3 * mae.num_masked
    torch.testing.assert_close(out.loss, torch.cat(errors).mean(), rtol=1e-12, atol=0)


def test_predictions_of_visible_patches_do_not_count() -> None:
    mae = make_mae()
    out = mae(pictures().float())
    (gradient,) = torch.autograd.grad(out.loss, out.prediction)
    assert torch.equal(gradient.abs().amax(2) > 0, out.mask)


def test_a_patch_of_one_colour_has_a_finite_normalised_loss() -> None:
    out = make_mae(normalize_pixels=True)(torch.ones(2, 3, 12, 20))
    out.loss.backward()
    assert out.loss.isfinite()


@pytest.mark.parametrize("normalize", [False, True])
def test_a_perfect_prediction_reconstructs_the_image(normalize: bool) -> None:
    mae = make_mae(normalize_pixels=normalize).double()
    images = pictures()
    out = mae(images)
    target = patches(images)
    if normalize:
        target = (target - target.mean(2, keepdim=True)) / (target.var(2, correction=0, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(mae.reconstruct(images, out._replace(prediction=target)), images)
    painted = patches(mae.reconstruct(images, out))
    assert torch.equal(painted[~out.mask], patches(images)[~out.mask])
    assert not torch.isclose(painted[out.mask], patches(images)[out.mask]).all()


# ---- the decoder


def test_masked_patches_enter_the_decoder_as_one_vector_and_their_positions() -> None:
    mae = make_mae().double()
    visible, encoded = torch.tensor([[2, 11]]), torch.randn(1, 3, 24, dtype=torch.float64)
    seen: list[Tensor] = []
    mae.decoder.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mae.decoder(encoded, visible)
    embedded = mae.decoder.embed(encoded)[0]
    expected = mae.decoder.mask_token[0] + mae.decoder.positions[0]
    expected[[2, 11]] = embedded[1:] + mae.decoder.positions[0, [2, 11]]
    torch.testing.assert_close(seen[0][0], torch.cat([embedded[:1], expected]), rtol=1e-12, atol=1e-12)


def test_parameters_of_the_papers_model() -> None:
    with torch.device("meta"):
        mae = MaskedAutoencoder("vit_base_patch16_224")
    block = lambda d: 12 * d * d + 13 * d  # noqa: E731 (four products of attention, eight of the MLP; biases and norms)
    encoder = 12 * block(768) + (768 + 1) * 768 + 768 + 197 * 768 + 2 * 768
    decoder = 8 * block(512) + (768 + 1) * 512 + 512 + 2 * 512 + (512 + 1) * 768
    assert sum(p.numel() for p in mae.encoder.parameters()) == encoder == 85_798_656
    assert sum(p.numel() for p in mae.decoder.parameters()) == decoder == 26_008_320
    assert (mae.num_visible, mae.num_masked) == (49, 147)
    assert not mae.encoder.pos_embed.requires_grad


def test_a_model_made_on_the_meta_device_gets_its_positions() -> None:
    with torch.device("meta"):
        empty = make_mae()
    empty.to_empty(device="cpu")
    full = make_mae()
    empty.load_state_dict(full.state_dict())
    empty.encoder.pos_embed.data.fill_(5)
    empty.set_positions()
    images = pictures(2).float()
    outs = [mae(images, generator=torch.Generator().manual_seed(0)) for mae in (empty, full)]
    assert torch.equal(outs[0].prediction, outs[1].prediction)


def test_weights_start_as_described() -> None:
    mae = MaskedAutoencoder("vit_tiny_patch16_224", encoder_kwargs={"img_size": 32, "depth": 1}, **SMALL)
    for linear in [m for m in mae.modules() if isinstance(m, nn.Linear)]:
        bound = (6 / (linear.in_features + linear.out_features)) ** 0.5
        assert 0.9 * bound < linear.weight.abs().max() <= bound
        assert linear.bias.abs().max() < 1e-4
    assert 0.005 < mae.decoder.mask_token.std() < 0.05


def test_positions_can_be_kept() -> None:
    encoder = make_encoder()
    before = encoder.pos_embed.detach().clone()
    mae = MaskedAutoencoder(encoder, keep_positions=True, **SMALL)
    mae.set_positions()
    assert torch.equal(encoder.pos_embed, before)
    mae(pictures().float()).loss.backward()
    assert bool((encoder.pos_embed.grad[0].abs().amax(1) > 0).any())


# ---- training


def digits(count: int) -> Tensor:
    images = torch.from_numpy(load_digits().images[:count]).float()[:, None]
    return (images - images.mean()) / images.std()


def digit_mae(**kwargs: Any) -> MaskedAutoencoder:
    settings = {"img_size": 8, "patch_size": 2, "in_chans": 1, "depth": 1, "embed_dim": 48, "num_heads": 3}
    decoder = {"decoder_dim": 32, "decoder_depth": 1, "decoder_heads": 2}
    return MaskedAutoencoder("vit_tiny_patch16_224", encoder_kwargs=settings, **decoder, **kwargs)


@pytest.mark.parametrize("where", [None, "visible", "all"])
def test_training_on_digits_lowers_the_loss(where: Any) -> None:
    images, mae = digits(256), digit_mae(gray=where)
    optimizer = torch.optim.AdamW(mae.parameters(), lr=3e-3)
    for step in range(60):
        torch.manual_seed(step)
        optimizer.zero_grad()
        mae(images[(step % 4) * 64 :][:64]).loss.backward()
        optimizer.step()
    with torch.no_grad():
        assert mae(images).loss < 0.7 * images.var()  # the variance is the loss of one mean value for all pixels


def test_visible_patches_tell_the_decoder_which_image_it_is() -> None:
    images, mae = digits(16), digit_mae()
    visible = torch.tensor([[2, 5, 9, 14]]).expand(16, -1)  # the same for all: the mask cannot tell them apart
    hidden = [index for index in range(16) if index not in (2, 5, 9, 14)]
    optimizer = torch.optim.AdamW(mae.parameters(), lr=3e-3)
    target = patches(images, 2)[:, hidden]
    for _ in range(150):
        optimizer.zero_grad()
        loss = (mae.decoder(mae.encode(images, visible), visible)[:, hidden] - target).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < 0.7 * (target - target.mean(0)).square().mean()  # the loss of the mean picture


@pytest.mark.parametrize("where", [None, "visible", "all"])
def test_every_trained_parameter_gets_a_gradient(where: Any) -> None:
    for settings in ENCODERS.values():
        mae = MaskedAutoencoder(make_encoder(**settings), gray=where, **SMALL)
        mae(pictures().float()).loss.backward()
        assert [name for name, p in mae.named_parameters() if p.requires_grad and p.grad is None] == []


def test_checkpointing_gives_the_same_gradients() -> None:
    mae, images, gradients = make_mae(gray="visible"), pictures().float(), []
    calls: list[nn.Module] = []
    for block in [*mae.encoder.blocks, *mae.decoder.blocks]:
        block.register_forward_pre_hook(lambda module, _: calls.append(module))
    for checkpointed in (False, True):
        mae.set_grad_checkpointing(checkpointed)
        torch.manual_seed(1)
        mae.zero_grad()
        calls.clear()
        mae(images).loss.backward()
        assert len(calls) == (6 if checkpointed else 3)  # each block runs again
        gradients.append([p.grad.clone() for p in mae.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("normalize", [False, True])
def test_autocast_keeps_the_loss_in_float32(normalize: bool) -> None:
    mae, images = make_mae(gray="visible", normalize_pixels=normalize), pictures().float()
    plain = mae(images, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = mae(images, generator=torch.Generator().manual_seed(0))
    assert low.prediction.dtype == torch.bfloat16
    assert low.loss.dtype == torch.float32
    torch.testing.assert_close(low.loss, plain.loss, rtol=0.02, atol=0)
    low.loss.backward()
    half = mae.bfloat16()(images.bfloat16())
    assert half.loss.dtype == torch.float32


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(("where", "method"), [("visible", "dct"), ("all", "svd")])
def test_compiles_in_one_graph(where: Any, method: str) -> None:
    mae = MaskedAutoencoder(make_encoder(depth=1), gray=where, graying=GrayingSettings(method=method), **SMALL)
    compiled, images = torch.compile(mae, fullgraph=True, backend="aot_eager"), pictures().float()
    outs, gradients = [], []
    for model in (mae, compiled):
        torch.manual_seed(4)
        mae.zero_grad()
        outs.append(model(images))
        outs[-1].loss.backward()
        gradients.append([p.grad.clone() for p in mae.parameters() if p.requires_grad])
    assert torch.equal(outs[0].mask, outs[1].mask)
    torch.testing.assert_close(outs[0].prediction, outs[1].prediction, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)
    images = pictures(5).float()  # a last, smaller batch: another size of batch, compiled for any
    visible = mae.draw_visible(5, "cpu", torch.Generator().manual_seed(0))
    torch.testing.assert_close(compiled(images, visible=visible).loss, mae(images, visible=visible).loss)
    assert compiled(images).loss.isfinite()


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    os.environ.update({"MASTER_ADDR": "127.0.0.1"})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_and_sharded(one_process: None) -> None:
    mae, images = make_mae(gray="visible"), pictures().float()
    gradients = []
    for sharded in (False, True):
        if sharded:
            for block in [*mae.encoder.blocks, *mae.decoder.blocks, mae]:
                fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
        model = mae if sharded else DistributedDataParallel(mae)
        for _ in range(2):  # DDP complains of a parameter without a gradient at the second step
            torch.manual_seed(1)
            mae.zero_grad()
            model(images).loss.backward()
        found = [p.grad for p in mae.parameters() if p.requires_grad]
        gradients.append([g.full_tensor() if sharded else g.clone() for g in found])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_copies_and_pickles() -> None:
    mae, images = make_mae(gray="visible"), pictures().float()
    expected = mae(images, generator=torch.Generator().manual_seed(0)).prediction
    for other in (copy.deepcopy(mae), pickle.loads(pickle.dumps(mae))):
        assert torch.equal(other(images, generator=torch.Generator().manual_seed(0)).prediction, expected)


def test_timms_optimiser_spares_tokens_and_positions_from_decay() -> None:
    from timm.optim import create_optimizer_v2

    mae = make_mae()
    groups = create_optimizer_v2(mae, opt="adamw", lr=1e-3, weight_decay=0.05).param_groups
    names = {id(p): name for name, p in mae.named_parameters()}
    spared = {names[id(p)] for group in groups if not group["weight_decay"] for p in group["params"]}
    assert {"encoder.cls_token", "decoder.mask_token"} <= spared
    assert "decoder.head.weight" not in spared


# ---- measuring and surgery


def test_blocks_are_found_probed_and_cut() -> None:
    mae, images = make_mae(), pictures().float()
    names = [block.name for block in find_blocks(mae)]
    assert names == ["encoder.blocks.0", "encoder.blocks.1", "decoder.blocks.0"]
    with wellcond.Probe(mae, sites=["tokens", "embed", "sa"], blocks="encoder.*", exact=False) as probe:
        mae(images)
    measured = {(row["block"], row["site"]) for row in probe.rows()}
    assert ("encoder.blocks.1", "sa") in measured
    assert ("encoder.patch_embed.proj", "tokens") in measured
    before = mae(images, generator=torch.Generator().manual_seed(0)).loss
    wellcond.remove_skip(mae, "sa", blocks="encoder.*")
    assert wellcond.skips_of(mae.encoder) == {"blocks.0": ("sa",), "blocks.1": ("sa",)}
    assert mae(images, generator=torch.Generator().manual_seed(0)).loss != before


def test_graying_follows_the_encoder() -> None:
    mae, images = make_mae(), pictures().float()
    run = lambda: mae(images, generator=torch.Generator().manual_seed(0)).prediction  # noqa: E731
    plain = run()
    assert gray(mae, "svd", epsilon=0.6) is mae
    assert graying_of(mae.encoder) == SVD
    grayed = run()
    assert not torch.equal(grayed, plain)
    ungray(mae)
    assert torch.equal(run(), plain)
    again = MaskedAutoencoder(gray(make_encoder(), "svd", epsilon=0.6), gray="all", **SMALL)
    assert graying_of(again) == SVD  # an encoder that is grayed already stays so
    assert graying_of(make_mae(gray="visible")) == GrayingSettings(method="dct", epsilon=0.95)


def test_a_saved_model_is_grayed_when_loaded(tmp_path: Path) -> None:
    mae, fresh, images = make_mae(gray="visible", graying=SVD), make_mae(), pictures().float()
    wellcond.save(mae, tmp_path / "mae.safetensors")
    wellcond.load(fresh, tmp_path / "mae.safetensors")
    outs = [m(images, generator=torch.Generator().manual_seed(0)).prediction for m in (mae, fresh)]
    assert torch.equal(*outs)


# ---- what may be wrong


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_ratio": 1.0}, "between 0 and 1"),
        ({"mask_ratio": 0}, "between 0 and 1"),
        ({"gray": "masked"}, "'visible'"),
        ({"graying": SVD}, "gray='visible'"),
        ({"gray": "all", "graying": GrayingSettings(method="fft")}, "fft"),
        ({"encoder_kwargs": {"depth": 1}}, "built already"),
        ({"decoder_heads": 3}, "width 16 with 3 heads"),
        ({"decoder_dim": 18, "decoder_heads": 1}, "width 18"),
        ({"decoder_depth": -1}, "-1 blocks"),
    ],
)
def test_wrong_settings_leave_the_encoder_alone(settings: dict[str, Any], message: str) -> None:
    encoder = make_encoder()
    before = copy.deepcopy(encoder.state_dict())
    with pytest.raises(ValueError, match=message):
        MaskedAutoencoder(encoder, **{**SMALL, **settings})
    assert before.keys() == encoder.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: timm.create_model("resnet10t"), "plain timm VisionTransformer"),
        (lambda: timm.create_model("deit_tiny_distilled_patch16_224", depth=1), "plain timm VisionTransformer"),
        (lambda: make_encoder(pos_embed="none"), "pos_embed='learn'"),
        (lambda: make_encoder(global_pool="map"), "global_pool='token'"),
        (lambda: make_encoder(patch_drop_rate=0.5), "patch_drop_rate=0"),
        (lambda: make_encoder(img_size=(13, 20)), "do not divide"),
        (lambda: make_encoder(img_size=4), "two or more patches"),
        (lambda: make_encoder(embed_dim=18), "4 divides"),
        (lambda: "vit_tny_patch16_224", "vit_tiny_patch16_224"),
    ],
)
def test_encoders_that_cannot_be_masked_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedAutoencoder(make(), **SMALL)


def test_images_of_another_kind_are_refused() -> None:
    mae = make_mae()
    for images in (torch.randn(2, 3, 16, 20), torch.randn(2, 1, 12, 20), torch.randn(3, 12, 20)):
        with pytest.raises(ValueError, match=r"expected normalised images \(batch, 3, 12, 20\)"):
            mae(images)
    with pytest.raises(ValueError, match="uint8"):
        mae(torch.zeros(2, 3, 12, 20, dtype=torch.uint8))
    with pytest.raises(ValueError, match="expected"):
        mae(torch.zeros(0, 3, 12, 20))
    for visible in (torch.arange(5).expand(2, -1), torch.arange(4)):
        with pytest.raises(ValueError, match=r"of shape \(2, 4\)"):
            mae(torch.randn(2, 3, 12, 20), visible=visible)
    mae.encoder.set_input_size((16, 20))
    with pytest.raises(ValueError, match="after set_input_size"):
        mae(torch.randn(2, 3, 16, 20))


# ---- the decoder's fixed positions: what they say about where a patch is


def test_positions_are_the_waves_they_claim_to_be() -> None:
    table = sincos_positions((3, 5), 12)
    assert table.shape == (15, 12)
    assert table.dtype == torch.float64
    for row in range(3):
        for column in range(5):
            waves = [1.0, 10_000 ** (-1 / 3), 10_000 ** (-2 / 3)]
            expected = [f(at * wave) for at in (row, column) for f in (math.sin, math.cos) for wave in waves]
            torch.testing.assert_close(table[5 * row + column], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("grid", [(1, 1), (1, 9), (7, 4), (6, 6)])
def test_products_depend_on_the_offset_alone(grid: tuple[int, int]) -> None:
    rows, columns = grid
    table = sincos_positions(grid, 64)
    products = (table @ table.T).reshape(rows, columns, rows, columns)
    torch.testing.assert_close(table.square().sum(1), torch.full((rows * columns,), 32.0, dtype=torch.float64))
    seen: dict[tuple[int, int], float] = {}
    for r, c, s, t in torch.cartesian_prod(*(torch.arange(n) for n in (rows, columns, rows, columns))).tolist():
        value = products[r, c, s, t].item()
        assert math.isclose(seen.setdefault((abs(r - s), abs(c - t)), value), value, abs_tol=1e-9)
        assert (value < 32 - 1e-3) == ((r, c) != (s, t))  # no two places look alike


def test_rows_and_columns_trade_places() -> None:
    table = sincos_positions((4, 6), 16).reshape(4, 6, 2, 8)
    turned = sincos_positions((6, 4), 16).reshape(6, 4, 2, 8)
    assert torch.equal(table, turned.transpose(0, 1).flip(2))


@pytest.mark.parametrize("dim", [0, 2, 6, 10])
def test_a_width_that_four_does_not_divide_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="4 divides"):
        sincos_positions((2, 2), dim)


@pytest.mark.parametrize("depth", [0, 2])
def test_shapes(depth: int) -> None:
    decoder = PixelDecoder(encoder_dim=24, dim=16, depth=depth, heads=2, grid_size=(3, 5), values=48)
    assert decoder(torch.randn(2, 6, 24), torch.tensor([[0, 3, 4, 9]]).expand(2, -1)).shape == (2, 15, 48)
    assert "positions" not in decoder.state_dict()


# ---- a trained encoder becomes a classifier: nothing of it is lost, and only what should be trained is


def make_classifier(**kwargs: Any) -> Any:
    settings = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 7, **kwargs}
    return timm.create_model("vit_tiny_patch16_224", **settings).eval()


def trained(**kwargs: Any) -> MaskedAutoencoder:
    """No longer what it was at its start, norms included."""
    mae = MaskedAutoencoder(make_classifier(**kwargs), gray="visible", **SMALL)
    with torch.no_grad():
        for parameter in mae.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mae.eval()


@pytest.fixture
def photographs() -> Tensor:
    return torch.randn(4, 3, 32, 32)


@pytest.mark.parametrize("before", ["token", "avg"])
@pytest.mark.parametrize("after", ["token", "avg"])
def test_weights_graying_and_skips_are_handed_over(before: str, after: str, photographs: Tensor) -> None:
    mae = trained(global_pool=before)
    wellcond.remove_skip(mae.encoder, "mlp", blocks=1)
    replace_attention(mae.encoder, "linear", blocks=0)
    model = make_classifier(global_pool=after)
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
    found = model.fc_norm(model.forward_features(photographs))
    torch.testing.assert_close(found, mae.encode(photographs, everything), rtol=1e-4, atol=1e-5)


def test_an_ungrayed_encoder_ungrays_the_model() -> None:
    mae = MaskedAutoencoder(make_classifier(), **SMALL)
    model = gray(make_classifier(), "dct")
    assert graying_of(hand_over(mae.encoder, model)) is None


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"img_size": 64}, "pos_embed"), ({"depth": 3}, "blocks.2"), ({"reg_tokens": 1}, "reg_token")],
)
def test_a_model_that_does_not_fit_stays_as_it_was(settings: dict[str, Any], name: str) -> None:
    model = make_classifier(**settings)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=name):
        hand_over(trained().encoder, model)
    assert graying_of(model) is None
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_a_model_that_cannot_be_grayed_stays_as_it_was() -> None:
    model = make_classifier()
    model.patch_embed.proj.forward = model.patch_embed.proj.forward  # as accelerate does
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="replaced by a hook"):
        hand_over(trained().encoder, model)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_an_attention_that_the_encoder_did_not_have_is_told_of() -> None:
    mae = trained()
    with pytest.warns(UserWarning, match=r"in 2 blocks \(blocks\.0 first\), which stays"):
        model = hand_over(mae.encoder, make_classifier(attn_layer=SkyformerAttention))
    assert [how.name for how in attention_of(model).values()] == ["skyformer"] * 2
    replace_attention(mae.encoder, "skyformer")
    hand_over(mae.encoder, model)


def test_the_encoders_file_is_a_plain_timm_model(tmp_path: Path) -> None:
    mae, file = trained(), tmp_path / "encoder.safetensors"
    wellcond.save(mae.encoder, file)
    plain = make_classifier(num_classes=0)
    plain.load_state_dict(mae.encoder.state_dict())
    loaded = wellcond.load(model := make_classifier(), file, strict=False)
    assert sorted(loaded.missing) == ["head.bias", "head.weight"]
    assert graying_of(model) == graying_of(mae)


# ---- the linear probe


def test_only_the_head_is_trained(photographs: Tensor) -> None:
    model = linear_probe(hand_over(trained().encoder, make_classifier())).train()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.1.weight", "head.1.bias"}
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    nn.functional.cross_entropy(model(photographs), torch.arange(4)).backward()
    optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name for name in changed if not name.startswith("head.")} == set()
    assert {"head.1.weight", "head.1.bias", "head.0.running_mean"} <= changed


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_features_are_normalised_over_the_batch(pool: str, photographs: Tensor) -> None:
    model = linear_probe(make_classifier(global_pool=pool).double(), 5).train()
    assert model.head[1].weight.dtype == torch.float64
    images = photographs.double()
    features = model.forward_head(model.forward_features(images), pre_logits=True)
    scaled = (features - features.mean(0)) / (features.var(0, correction=0) + 1e-6).sqrt()
    expected = scaled @ model.head[1].weight.T + model.head[1].bias
    torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-12)
    assert model(images).shape == (4, 5)


def test_a_probe_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="num_classes"):
        linear_probe(make_classifier(num_classes=0))
    for settings in ({"drop_path_rate": 0.1}, {"proj_drop_rate": 0.1}, {"patch_drop_rate": 0.1}):
        with pytest.raises(ValueError, match="at random"):
            linear_probe(make_classifier(**settings))
    with pytest.raises(ValueError, match="second head"):
        linear_probe(timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1))
