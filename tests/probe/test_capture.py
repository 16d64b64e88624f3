"""What is caught is the right tensor of the right block, small, and nobody else's."""

import contextlib
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from wellcond.models import gray
from wellcond.models.sites import register_blocks
from wellcond.probe import Probe
from wellcond.probe.capture import Capture
from wellcond.probe.places import Place, choose


def caught(model: nn.Module, *inputs: Any, sites: Any = "*", max_samples: int = 64) -> dict[Place, Tensor]:
    capture = Capture(choose(model, sites), max_samples=max_samples)
    with capture.hooks(), capture.listening():
        model(*inputs)
    assert not capture.errors
    return capture.take()


def test_the_tensors_are_those_of_the_pass(vit: Any, images: Tensor, by_hand: Any) -> None:
    found, expected = caught(vit, images), by_hand(vit, images)
    for place, tokens in found.items():
        if place.site != "tokens":
            assert torch.equal(tokens, expected[place.block, place.site]), place


def test_drop_path_is_looked_past(make_vit: Any, images: Tensor) -> None:
    vit = make_vit(drop_path_rate=0.9, init_values=0.1).train()
    torch.manual_seed(0)
    found = caught(vit, images, sites=["in", "sa"])
    dropped = vit.blocks[1].drop_path1
    assert dropped.drop_prob > 0
    for index, block in enumerate(vit.blocks):
        place = {site: Place(f"blocks.{index}", index, site) for site in ("in", "sa")}
        expected = block.ls1(block.attn(found[place["in"]]))  # after LayerScale, and no sample dropped
        assert torch.equal(found[place["sa"]], expected)


def test_memory_is_bounded_by_the_samples(vit: Any) -> None:
    images = torch.randn(16, 3, 32, 32, requires_grad=True)
    for place, tokens in caught(vit.train(), images, max_samples=3).items():
        assert len(tokens) == 3
        assert tokens.untyped_storage().nbytes() == tokens.nbytes, place  # no view of the whole batch is kept
        assert tokens.grad_fn is None
        assert not tokens.requires_grad


def test_operations_in_place_do_not_reach_the_copy(images: Tensor) -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.attn(x)
            y += x  # timm does so in some places, and so do many people
            y.mul_(2)
            return y

    register_blocks(Adding, taps={"sa": "attn:output", "+sa": ":output"})
    block, x = Adding(), torch.randn(2, 5, 4)
    with torch.no_grad():
        found = caught(block, x)
        assert torch.equal(found[Place("", 0, "sa")], block.attn(x))


def test_blocks_that_share_a_module_are_told_apart() -> None:
    identity = nn.Identity()

    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.drop_path = nn.Linear(4, 4), identity

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop_path(self.attn(x))

    register_blocks(Sharing, taps={"sa": "drop_path:input", "+sa": ":output"})
    model, x = nn.Sequential(Sharing(), Sharing()), torch.randn(2, 5, 4)
    found = caught(model, x, sites="sa")
    assert torch.equal(found[Place("0", 0, "sa")], model[0].attn(x))
    assert torch.equal(found[Place("1", 1, "sa")], model[1].attn(model[0](x)))


def test_a_block_called_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.Linear(4, 4)

        def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
            return self.attn(hidden_states) + mask

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Named()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(mask=torch.zeros(1), hidden_states=x)

    register_blocks(Named, taps={"in": ":input", "sa": "attn:output"})
    x = torch.randn(2, 5, 4)
    assert torch.equal(caught(Model(), x, sites="in")[Place("block", 0, "in")], x)


def test_a_block_that_runs_twice_is_caught_at_its_first_run(vit: Any, images: Tensor, by_hand: Any) -> None:
    vit.blocks = nn.Sequential(vit.blocks[0], vit.blocks[0])
    found, expected = caught(vit, images), by_hand(vit, images)
    for site in ("in", "sa", "+sa", "mlp", "+mlp"):
        assert torch.equal(found[Place("blocks.0", 0, site)], expected["blocks.0", site])


def test_convmixer_tokens_are_its_pixels(rows_of: Any, truth: Any) -> None:
    model = timm.models.convmixer.ConvMixer(dim=24, depth=2, kernel_size=3, patch_size=4, num_classes=3).eval()
    x = torch.randn(2, 3, 32, 32)
    found = caught(model, x, sites="+sa")
    stem = model.stem(x)
    assert torch.equal(found[Place("blocks.0", 0, "+sa")], model.blocks[0][0](stem).flatten(2).mT)


def test_swin_tokens_are_its_pixels() -> None:
    small: dict[str, Any] = {"depths": (2,), "embed_dim": 16, "num_heads": (2,), "window_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, num_classes=3, **small).eval()
    x = torch.randn(2, 3, 32, 32)
    found = caught(model, x, sites=["embed", "*sa", "*mlp"])
    before = model.patch_embed(x)
    assert torch.equal(found[Place("layers.0.blocks.0", -1, "embed")], before.flatten(1, 2))
    for index, block in enumerate(model.layers[0].blocks):
        after = block(before)
        place = {site: found[Place(f"layers.0.blocks.{index}", index, site)] for site in ("sa", "+sa", "mlp", "+mlp")}
        assert torch.equal(place["+mlp"], after.flatten(1, 2))
        assert torch.equal(place["+sa"], before.flatten(1, 2) + place["sa"])
        assert torch.equal(place["+mlp"], place["+sa"] + place["mlp"])
        before = after


def test_grayed_patches(vit: Any, images: Tensor) -> None:
    plain = caught(vit, images, sites="tokens")[Place("patch_embed.proj", -1, "tokens")]
    gray(vit, "dct", epsilon=0.5)
    grayed = caught(vit, images, sites="tokens")[Place("patch_embed.proj", -1, "tokens")]
    expected = vit.patch_embed.proj.graying(images)
    assert torch.equal(grayed, nn.functional.unfold(expected, 8, stride=8).mT)
    assert not torch.allclose(grayed, plain)


def test_outside_of_listening_nothing_is_caught(vit: Any, images: Tensor) -> None:
    capture = Capture(choose(vit, "sa"), max_samples=2)
    with capture.hooks():
        vit(images)
        assert capture.tensors == {}


# torch says so of every pass without gradients through its older kind of checkpointing, the exact one too
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_measured_once(vit: Any, images: Tensor, reentrant: bool, state: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner._pos_embed(self.inner.patch_embed(x))
            for block in self.inner.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.inner.forward_head(self.inner.norm(x))

    model = Checkpointed(vit).train()
    results = []
    for probed in (None, False, True):
        model.zero_grad()
        before = state(model)
        probe = Probe(model, exact=bool(probed))
        with contextlib.nullcontext() if probed is None else probe:
            model(images).square().sum().backward()
        assert state(model) == before
        results.append([parameter.grad for parameter in model.parameters()])
        counts = [row["count"] for row in probe.rows() if row["name"] == "log_kappa"]
        assert counts == ([] if probed is None else [4] * 8)
    for plain, *others in zip(*results, strict=True):
        assert all(torch.equal(plain, other) for other in others)


def test_timm_checkpointing(vit: Any, images: Tensor) -> None:
    vit.train()
    found = []
    for enable in (False, True):
        vit.set_grad_checkpointing(enable)
        for exact in (True, False):
            with Probe(vit, exact=exact) as probe:
                vit(images).square().sum().backward()
            found.append(probe.rows())
    assert found[:2] == found[2:]
