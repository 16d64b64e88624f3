"""Removed skips survive what people do to models, come back when asked, and nothing is removed by halves."""

import copy
import functools
import io
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import wellcond
from wellcond.models.surgery import remove_skip, restore_skip, skips_of

Make = Callable[..., nn.Module]
BOTH = {"blocks.0": ("sa", "mlp"), "blocks.1": ("sa", "mlp")}


def without(model: nn.Module, images: Tensor, *skips: str) -> Tensor:
    """What the small ViT must give without these skips in all blocks, step by step, by its own modules."""
    x = model._pos_embed(model.patch_embed(images))
    x = model.norm_pre(x)
    for block in model.blocks:
        sa = block.ls1(block.attn(block.norm1(x)))
        x = sa if "sa" in skips else x + sa
        mlp = block.ls2(block.mlp(block.norm2(x)))
        x = mlp if "mlp" in skips else x + mlp
    return model.forward_head(model.norm(x))


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    os.environ.update({"MASTER_ADDR": "127.0.0.1"})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- removing and restoring


@pytest.mark.parametrize("skips", [("sa",), ("mlp",), ("sa", "mlp"), ("mlp", "sa")])
def test_the_whole_model_runs_without_its_skips(vit: nn.Module, images: Tensor, skips: tuple[str, ...]) -> None:
    plain, expected = vit(images), without(vit, images, *skips)
    for skip in skips:
        remove_skip(vit, skip)
    assert torch.equal(vit(images), expected)
    assert not torch.equal(expected, plain)
    restore_skip(vit)
    assert torch.equal(vit(images), plain)
    assert all(type(block) is Block for block in vit.blocks)
    assert skips_of(vit) == {}


def test_what_was_removed_is_told(make_vit: Make) -> None:
    vit = make_vit(depth=12)
    assert skips_of(vit) == {}
    assert remove_skip(vit, "sa", blocks="blocks.1?").blocks == {"blocks.10": ("sa",), "blocks.11": ("sa",)}
    remove_skip(vit, "mlp", blocks=[0, "blocks.11"])
    assert skips_of(vit) == {"blocks.0": ("mlp",), "blocks.10": ("sa",), "blocks.11": ("sa", "mlp")}
    assert "without the skips: mlp, sa" in repr(vit.blocks[11])
    assert restore_skip(vit, "sa").blocks == {"blocks.10": ("sa",), "blocks.11": ("sa",)}
    assert skips_of(vit) == {"blocks.0": ("mlp",), "blocks.11": ("mlp",)}
    restore_skip(vit, blocks=-1)
    assert skips_of(vit) == {"blocks.0": ("mlp",)}


def test_removing_twice_is_removing_once(vit: nn.Module, images: Tensor) -> None:
    expected = without(vit, images, "sa")
    remove_skip(vit, "sa")
    kind = type(vit.blocks[0])
    assert remove_skip(vit, "sa").blocks == {}
    assert type(vit.blocks[0]) is kind
    assert torch.equal(vit(images), expected)


def test_restoring_what_is_there_does_nothing(vit: nn.Module) -> None:
    assert restore_skip(vit).blocks == {}
    assert restore_skip(nn.Linear(2, 2)).blocks == {}  # not even a model of blocks


# ---- for a while


def test_removed_inside_a_with(vit: nn.Module, images: Tensor) -> None:
    plain, expected = vit(images), without(vit, images, "sa")
    with remove_skip(vit, "sa") as change:
        assert change.blocks == {"blocks.0": ("sa",), "blocks.1": ("sa",)}
        assert torch.equal(vit(images), expected)
    assert torch.equal(vit(images), plain)
    with pytest.raises(RuntimeError), remove_skip(vit, "sa"):
        vit(images[:, :1])  # one channel is not three
    assert torch.equal(vit(images), plain)


def test_restored_inside_a_with(vit: nn.Module, images: Tensor) -> None:
    plain = vit(images)
    remove_skip(vit, "sa", blocks=0)
    with restore_skip(vit):
        assert torch.equal(vit(images), plain)
    assert skips_of(vit) == {"blocks.0": ("sa",)}


def test_a_with_takes_back_its_own_change_alone(vit: nn.Module) -> None:
    remove_skip(vit, "sa", blocks=0)
    with remove_skip(vit, "sa"):
        with remove_skip(vit, "mlp", blocks=1):
            assert skips_of(vit) == {"blocks.0": ("sa",), "blocks.1": ("sa", "mlp")}
        remove_skip(vit, "mlp", blocks=0)
    assert skips_of(vit) == {"blocks.0": ("sa", "mlp")}


@pytest.mark.parametrize(("said", "skip"), [("attention", "sa"), ("Self-Attention", "sa"), ("ffn", "mlp")])
def test_the_words_of_others_are_understood(vit: nn.Module, said: str, skip: str) -> None:
    change = remove_skip(vit, said, blocks=0)
    assert change.blocks == skips_of(vit) == {"blocks.0": (skip,)}
    restore_skip(vit, said)
    assert skips_of(vit) == {}


# ---- what cannot be removed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"skip": "atention"}, "a skip is .*did you mean sa"),
        ({"skip": "residual"}, "a skip is"),
        ({"skip": "sa", "blocks": "layers.*"}, "no block is called"),
        ({"skip": "sa", "layer_scale": 1.0}, "nothing scales the sa branches"),
    ],
)
def test_wrong_arguments_change_nothing(vit: nn.Module, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        remove_skip(vit, **arguments)
    assert all(type(block) is Block for block in vit.blocks)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class OwnForward(Block):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return 2 * super().forward(x)


def parametrized(vit: nn.Module) -> None:
    vit.blocks[1].gain = nn.Parameter(torch.ones(3))
    parametrize.register_parametrization(vit.blocks[1], "gain", Doubled())


def own_forward(vit: nn.Module) -> None:
    vit.blocks[1] = OwnForward(48, 3)


def hooked_forward(vit: nn.Module) -> None:
    vit.blocks[1].forward = functools.partial(Block.forward, vit.blocks[1])


@pytest.mark.parametrize("change", [parametrized, own_forward, hooked_forward])
def test_blocks_that_would_pass_by_the_removal_raise(vit: nn.Module, change: Callable[[nn.Module], None]) -> None:
    change(vit)
    kinds = [type(block) for block in vit.blocks]
    with pytest.raises(ValueError, match=r"before that|wellcond.register_family a forward"):
        remove_skip(vit, "sa")
    assert [type(block) for block in vit.blocks] == kinds
    remove_skip(vit, "sa", blocks=0)  # the other block is as it should be


def test_parametrized_after_the_removal(vit: nn.Module) -> None:
    remove_skip(vit, "sa")
    parametrized(vit)
    with pytest.raises(ValueError, match="before that"):
        restore_skip(vit)
    assert skips_of(vit) == {"blocks.0": ("sa",), "blocks.1": ("sa",)}


def test_sharded_blocks(vit: nn.Module, one_process: None) -> None:
    remove_skip(vit, "sa", blocks=0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for block in vit.blocks:
        fully_shard(block, mesh=mesh)
    with pytest.raises(ValueError, match="fully_shard"):
        remove_skip(vit, "sa", blocks=1)
    with pytest.raises(ValueError, match="fully_shard"):
        restore_skip(vit)
    assert skips_of(vit) == {"blocks.0": ("sa",)}


def test_a_model_sharded_as_a_whole(make_vit: Make, images: Tensor, one_process: None) -> None:
    vit = make_vit(init_values=0.5)
    expected = without(vit, images, "sa").detach()
    fully_shard(vit, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))  # its blocks keep their class
    remove_skip(vit, "sa")
    assert torch.equal(vit(images).detach(), expected)


def test_subclasses_with_the_same_forward_are_fine(vit: nn.Module) -> None:
    class Mine(Block):
        pass

    vit.blocks[0].__class__ = Mine
    with remove_skip(vit, "sa"):
        assert isinstance(vit.blocks[0], Mine)
    assert type(vit.blocks[0]) is Mine


# ---- LayerScale


def tiny(name: str) -> nn.Module:
    if name == "cait":
        return timm.create_model("cait_xxs24_224", img_size=32, depth=2, embed_dim=24, num_heads=3).eval()
    if name == "swin v2":
        small = {"img_size": 32, "window_size": 4, "depths": (2,), "num_heads": (2,), "embed_dim": 16}
        return timm.create_model("swinv2_tiny_window8_256", **small).eval()
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, init_values=1e-5).eval()


@pytest.mark.parametrize("name", ["cait", "swin v2", "vit"])
def test_a_branch_scaled_to_nothing_warns_and_can_be_scaled_anew(name: str) -> None:
    model = tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"next to no signal is left.*layer_scale=1\.0"):
        remove_skip(model, "sa")
    restore_skip(model)
    scaled = {"cait": "gamma_1", "swin v2": "norm1.weight", "vit": "ls1.gamma"}[name]
    with remove_skip(model, "sa", layer_scale=1.0):  # and no warning, which would be an error
        for key, value in model.state_dict().items():
            expected = torch.ones_like(value) if key.endswith(scaled) and "block" in key else before[key]
            assert torch.equal(value, expected), key
        assert model(torch.randn(1, 3, 32, 32)).isfinite().all()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_trained_scales_are_kept_at_the_end_of_a_with() -> None:
    model = tiny("vit")
    with remove_skip(model, "mlp", layer_scale=1.0), torch.no_grad():
        model.blocks[0].ls2.gamma.mul_(3)
    assert model.blocks[0].ls2.gamma.eq(3).all()
    assert model.blocks[1].ls2.gamma.eq(torch.tensor(1e-5)).all()


def test_a_warning_that_is_an_error_leaves_the_skips() -> None:
    model = tiny("vit")
    with pytest.raises(UserWarning, match="no signal"):  # pytest makes errors of warnings
        remove_skip(model, "sa")
    assert skips_of(model) == {}


# ---- copies, pickles, weights


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_lack_the_same_skips_and_are_their_own(
    vit: nn.Module, images: Tensor, copied: Callable[[nn.Module], nn.Module]
) -> None:
    remove_skip(vit, "sa")
    twin = copied(vit)
    assert skips_of(twin) == skips_of(vit)
    assert torch.equal(twin(images), vit(images))
    with torch.no_grad():
        vit.blocks[0].attn.proj.bias.add_(1)
    assert not torch.equal(twin(images), vit(images))
    restore_skip(twin)
    assert type(twin.blocks[0]) is Block
    assert skips_of(vit) == {"blocks.0": ("sa",), "blocks.1": ("sa",)}


def test_torch_save_keeps_the_removal(vit: nn.Module, images: Tensor) -> None:
    remove_skip(vit, "mlp")
    file = io.BytesIO()
    torch.save(vit, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(images), vit(images))


def test_weights_go_both_ways_strictly(make_vit: Make, images: Tensor) -> None:
    plain, skipless = make_vit(), make_vit()
    remove_skip(skipless, "sa")
    skipless.load_state_dict(plain.state_dict())
    assert torch.equal(skipless(images), without(plain, images, "sa"))
    plain.load_state_dict(skipless.state_dict())


def test_hooks_stay(vit: nn.Module, images: Tensor) -> None:
    seen: list[Tensor] = []
    vit.blocks[1].register_forward_hook(lambda _, args, out: seen.append(out))
    with remove_skip(vit, "sa"):
        vit(images)
    vit(images)
    assert len(seen) == 2


def test_graying_and_removed_skips_live_together(vit: nn.Module, images: Tensor) -> None:
    plain = vit(images)
    wellcond.gray(vit, "dct", epsilon=0.7)
    remove_skip(vit, "sa")
    twin = pickle.loads(pickle.dumps(vit))
    assert torch.equal(twin(images), vit(images))
    wellcond.ungray(vit)
    assert torch.equal(vit(images), without(vit, images, "sa"))
    restore_skip(vit)
    assert torch.equal(vit(images), plain)


# ---- training


def test_a_branch_without_its_skip_is_never_dropped(make_vit: Make, images: Tensor) -> None:
    vit = make_vit(drop_path_rate=0.9)
    for skip in ("sa", "mlp"):
        remove_skip(vit, skip)
    evaluated = vit(images)
    assert torch.equal(vit.train()(images), evaluated)


def test_checkpointing_gives_the_same_gradients(vit: nn.Module, images: Tensor) -> None:
    remove_skip(vit, "sa")
    gradients = []
    for checkpointed in (False, True):
        vit.set_grad_checkpointing(checkpointed)
        vit.train().zero_grad()
        vit(images).square().sum().backward()
        gradients.append([p.grad.clone() for p in vit.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_ddp_inside_and_outside(vit: nn.Module, images: Tensor, one_process: None) -> None:
    expected = without(vit, images, "sa")
    parallel = DistributedDataParallel(vit)
    remove_skip(parallel, "sa")
    assert skips_of(parallel) == skips_of(vit) == {"blocks.0": ("sa",), "blocks.1": ("sa",)}
    out = parallel(images)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    assert all(p.grad is not None for p in vit.parameters())
    again = DistributedDataParallel(vit)
    assert torch.equal(again(images), expected)
    restore_skip(again)
    assert skips_of(vit) == {}


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_before_and_after(vit: nn.Module, images: Tensor) -> None:
    plain, expected = vit(images), without(vit, images, "sa")
    compiled = torch.compile(vit, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), plain)
    remove_skip(compiled, "sa")  # compiled before
    assert torch.equal(compiled(images), expected)
    assert torch.equal(torch.compile(vit, backend="eager", fullgraph=True)(images), expected)  # and after
    restore_skip(compiled)
    assert torch.equal(compiled(images), plain)


@pytest.mark.usefixtures("_fresh_compiler")
@torch.no_grad()
def test_blocks_compiled_one_by_one(vit: nn.Module, images: Tensor) -> None:
    plain, expected = vit(images), without(vit, images, "mlp")
    vit.blocks[0].compile(backend="eager")
    vit.blocks[1] = torch.compile(vit.blocks[1], backend="eager")
    assert torch.equal(vit(images), plain)
    with remove_skip(vit, "mlp"):
        assert skips_of(vit) == {"blocks.0": ("mlp",), "blocks.1": ("mlp",)}
        assert torch.equal(vit(images), expected)
    assert torch.equal(vit(images), plain)


def test_exported(vit: nn.Module, images: Tensor) -> None:
    expected = without(vit, images, "sa", "mlp")
    for skip in ("sa", "mlp"):
        remove_skip(vit, skip)
    assert skips_of(vit) == BOTH
    exported = torch.export.export(vit, (images,)).module()
    assert torch.equal(exported(images), expected)


def test_the_record_of_a_change_is_short_and_no_model(vit: nn.Module, images: Tensor) -> None:
    change = remove_skip(vit, "sa")
    assert len(repr(change)) < 400
    with pytest.raises(TypeError, match="the model was changed in place; call that one"):
        change(images)
