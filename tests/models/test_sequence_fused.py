"""The encoders' layers by kernels, in Triton's interpreter: the numbers of their modules, and not where these count."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.config import patch as patch_dynamo
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import wellcond
from wellcond.models import sequence
from wellcond.models.sequence import build
from wellcond.numerics import fastpaths, narrow_layer
from wellcond.numerics.fastpaths import plain_twins

kernels = pytest.importorskip("wellcond.numerics.triton.narrow_layer")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="no interpreter: test_narrow_layer.py, test_sequence_gpu.py"),
]

SMALL = {"length": 24, "vocab_size": 20, "dim": 16, "mlp_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}
ATTENTIONS = [
    ("softmax", {}),
    ("kernelized", {}),
    ("nystrom", {"num_landmarks": 8}),
    ("skyformer", {"num_landmarks": 8}),
    ("skyformer", {"num_landmarks": 8, "compat": True}),
    ("linear", {}),
]


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """As on a GPU under autocast, in float32: what the kernels before attention were given."""
    seen: list[Tensor] = []
    enter = kernels.enter

    def counted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(x)
        return enter(x, *args, **kwargs)

    for module in (sequence, narrow_layer):
        monkeypatch.setattr(module, "fused_kernels", lambda _: not fastpaths._forced_plain)
    monkeypatch.setattr(narrow_layer, "HALVES", (torch.float32,))
    monkeypatch.setattr(kernels, "enter", counted)
    yield seen
    torch.compiler.reset()


def small(attention: str = "softmax", task: str = "listops", **more: Any) -> Any:
    torch.manual_seed(0)
    model = build(task, attention, **{**SMALL, **more})
    with torch.no_grad():
        for parameter in model.parameters():  # far from their start, so that every part shows
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch(kind: str = "padded", seed: int = 1) -> tuple[Tensor, Tensor | None]:
    """Three sequences; "with holes" in the first, and nothing in the last."""
    tokens = torch.randint(1, 20, (3, 24), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(24) < torch.tensor([24, 17, 3])[:, None]
    if kind == "with holes":
        mask[0, 3:9], mask[2] = False, False
    return tokens, None if kind == "whole" else mask


def all_of(model: Any, *inputs: Any) -> list[Tensor]:
    """Logits, and the gradients of all parameters."""
    torch.manual_seed(1)
    out = model(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]


def check_alike(found: list[Tensor], want: list[Tensor], tolerance: float = 1e-5) -> None:
    for one, other in zip(found, want, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= tolerance * (other.norm() + 0.1)


@pytest.mark.parametrize("kind", ["whole", "padded", "with holes"])
@pytest.mark.parametrize(("attention", "settings"), ATTENTIONS)
def test_the_numbers_are_those_of_the_modules(
    attention: str, settings: dict[str, Any], kind: str, entered: list[Tensor]
) -> None:
    model, given = small(attention, **settings), batch(kind)
    with plain_twins():
        want = all_of(model, *given)
    assert not entered
    check_alike(all_of(model, *given), want)
    assert len(entered) == 2


def test_pairs(entered: list[Tensor]) -> None:
    model, given = small(task="retrieval"), (*batch(), *batch("whole", seed=2))
    with plain_twins():
        want = all_of(model, *given)
    check_alike(all_of(model, *given), want)
    assert [len(x) for x in entered] == [6, 6]


def test_padding_becomes_zeros_and_costs_nothing(entered: list[Tensor]) -> None:
    model, (tokens, mask) = small(), batch()
    assert mask is not None
    model(tokens, mask)
    assert (entered[1][~mask] == 0).all()
    assert (entered[1][mask] != 0).all()
    model(torch.where(mask, tokens, 7), mask)
    assert torch.equal(entered[3], entered[1])


def test_dropout_follows_torchs_generator_and_the_modules(entered: list[Tensor]) -> None:
    model, given = small(dropout=0.3), batch()
    model.drop.eval()  # before the layers
    once, again = all_of(model, *given), all_of(model, *given)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    assert not torch.equal(model(*given), model(*given))
    for drops in (module for module in model.blocks.modules() if isinstance(module, nn.Dropout)):
        drops.eval()  # in a model that trains
    assert torch.equal(model(*given), model(*given))
    model.eval()
    with plain_twins():
        want = all_of(model, *given)
    check_alike(all_of(model, *given), want)
    for drops in (module for module in model.blocks.modules() if isinstance(module, nn.Dropout)):
        drops.train()  # as for Monte Carlo dropout
    count = len(entered)
    assert not torch.equal(model(*given), model(*given))
    assert len(entered) == count + 4


def test_a_checkpoint_makes_the_pass_anew(entered: list[Tensor]) -> None:
    block, x = small(dropout=0.3).blocks[0], torch.randn(2, 24, 16, requires_grad=True)
    found = []
    for call in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(call(x).square().sum(), [x, *block.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert len(entered) == 3


# ---- where the modules count


PLACES = ("norm1", "attn", "attn.qkv", "attn.proj", "attn.proj_drop", "norm2", "mlp", "mlp.0", "mlp.1", "mlp.3")
HOOKS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_is_heard(place: str, entered: list[Tensor]) -> None:
    model, given = small(), batch()
    with plain_twins():
        want = all_of(model, *given)
    for kind in HOOKS if place in ("norm1", "mlp.3") else HOOKS[:1]:
        heard: list[nn.Module] = []
        module = model.blocks[0].get_submodule(place)
        handle = getattr(module, kind)(lambda module, *_, heard=heard: heard.append(module))
        check_alike(all_of(model, *given), want)
        assert heard == [module]
        assert len(entered) == 1  # the other layer
        handle.remove()
        entered.clear()
    all_of(model, *given)
    assert len(entered) == 2


def test_a_hook_of_all_modules_is_heard(entered: list[Tensor]) -> None:
    model, heard = small(), set()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: heard.add(module))
    try:
        model(*batch())
    finally:
        handle.remove()
    assert not entered
    assert set(model.blocks.modules()) - {model.blocks} - set(attention_drops(model)) <= heard


def attention_drops(model: Any) -> list[nn.Module]:
    """Never called: their rate is read."""
    return [block.get_submodule("attn.attn_drop") for block in model.blocks]


def test_a_hook_of_the_layer_itself_hears_the_kernels(entered: list[Tensor]) -> None:
    model, heard = small(), []
    model.blocks[1].register_forward_hook(lambda *given: heard.append(given[-1]))
    features = model.features(*batch("whole"))
    assert torch.equal(heard[0], features["before"])
    assert len(entered) == 2


class OtherAttention(nn.Module):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return 0.5 * x


class OtherLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        return 2 * super().forward(input)


def other_forward(block: Any) -> None:
    block.mlp.forward = torch.tanh


def other_width(block: Any) -> None:
    block.mlp[0], block.mlp[3] = nn.Linear(16, 48), nn.Linear(48, 16)


def everything_dropped(block: Any) -> None:
    for drop in (block.attn.proj_drop, block.mlp[2], block.mlp[4]):
        drop.p = 1.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "relu": lambda block: block.mlp.__setitem__(1, nn.ReLU()),
    "tanh": lambda block: block.mlp.__setitem__(1, nn.GELU(approximate="tanh")),
    "dropout": lambda block: setattr(block.attn.proj_drop, "p", 0.2),
    "one dropout trains": lambda block: block.mlp[2].eval(),
    "everything dropped": everything_dropped,
    "eps": lambda block: setattr(block.norm2, "eps", 1e-3),
    "no bias": lambda block: setattr(block.attn, "proj", nn.Linear(16, 16, bias=False)),
    "no weights": lambda block: setattr(block, "norm1", nn.LayerNorm(16, elementwise_affine=False)),
    "norm of all": lambda block: setattr(block, "norm1", nn.LayerNorm([24, 16])),
    "another norm": lambda block: setattr(block, "norm2", nn.RMSNorm(16)),
    "another linear": lambda block: setattr(block.attn, "qkv", OtherLinear(16, 48)),
    "another MLP": lambda block: setattr(block, "mlp", nn.Identity()),
    "a longer MLP": lambda block: block.mlp.append(nn.Tanh()),
    "another width": other_width,
    "another attention": lambda block: setattr(block, "attn", OtherAttention()),
    "another forward": other_forward,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_takes_its_modules(change: str, entered: list[Tensor]) -> None:
    model, given = small(), batch()
    for drops in (module for module in model.modules() if isinstance(module, nn.Dropout)):
        drops.p = 0.1 if change == "one dropout trains" else 0.0
    CHANGES[change](model.blocks[0])
    torch.manual_seed(1)
    model(*given)
    assert len(entered) == 1  # the other layer
    for drops in (module for module in model.blocks[1].modules() if isinstance(module, nn.Dropout)):
        drops.p = 0.0
    torch.manual_seed(1)
    found = model(*given)
    with plain_twins():
        torch.manual_seed(1)
        check_alike([found], [model(*given)])


@pytest.mark.parametrize("skip", ["sa", "mlp"])
def test_a_removed_skip_stays_removed(skip: str, entered: list[Tensor]) -> None:
    model, given = small(), batch()
    before = model(*given)
    entered.clear()
    wellcond.remove_skip(model, skip, blocks=0)
    with plain_twins():
        want = all_of(model, *given)
    check_alike(all_of(model, *given), want)
    assert len(entered) == 1
    assert not torch.allclose(want[0], before)


def test_without_autocast_there_are_no_kernels(entered: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_layer, "HALVES", (torch.bfloat16, torch.float16))
    model, given = small().eval(), batch()
    want = model(*given)
    assert not entered
    with torch.autocast("cpu", torch.float16):
        found = model(*given)
    assert len(entered) == 2
    torch.testing.assert_close(found.float(), want, rtol=0, atol=1e-2 * float(want.detach().abs().max()))
    assert not small().double().blocks[0]._can_fuse(torch.zeros(2, 24, 16, dtype=torch.float64), None)


def test_masks_of_other_kinds(entered: list[Tensor]) -> None:
    block, x = small().eval().blocks[0], torch.randn(2, 24, 16)
    keep = torch.arange(24) < torch.tensor([24, 9])[:, None, None, None]
    added = torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
    want = block(x, keep)
    assert len(entered) == 1
    for mask in (added, keep.expand(-1, 2, -1, -1), keep.expand(-1, -1, 24, -1)):
        torch.testing.assert_close(block(x, mask)[keep[:, 0, 0]], want[keep[:, 0, 0]])
    block(x, keep[:1])
    assert len(entered) == 1


def test_other_derivatives_take_plain_operations(entered: list[Tensor]) -> None:
    block, x = small().blocks[0], torch.randn(2, 24, 16)
    weights = {name: weight.detach() for name, weight in block.named_parameters()}
    tangents = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def of_weights(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(block, weights, (x,)).square().sum()

    def of_tokens(x: Tensor) -> Tensor:
        return block(x).square().sum()

    calls: list[Callable[[], Any]] = [
        lambda: list(torch.func.grad(of_weights)(weights).values()),
        lambda: torch.func.jvp(of_weights, (weights,), (tangents,)),
        lambda: [torch.func.grad(of_tokens)(x)],
        lambda: torch.func.jvp(of_tokens, (x,), (torch.ones_like(x),)),
        lambda: [torch.func.vmap(block)(x[None].expand(2, -1, -1, -1))],
    ]
    for call in calls:
        with plain_twins():
            want = call()
        for one, other in zip(call(), want, strict=True):
            assert torch.equal(one, other)
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(block(forward_ad.make_dual(x, torch.ones_like(x))))
    assert made.tangent is not None
    assert made.tangent.abs().max() > 0
    assert not entered
    block(x)
    assert len(entered) == 1


def test_an_exported_program_has_plain_operations(entered: list[Tensor]) -> None:
    model, given = small().eval(), batch()
    exported = torch.export.export(model, given)
    assert "wellcond" not in exported.graph_module.code
    assert not entered
    torch.testing.assert_close(exported.module()(*given), model(*given))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_the_probe_sees_all_sites(attention: str, exact: bool, entered: list[Tensor]) -> None:
    model, given = small(attention).eval(), batch()
    sites, found = ("in", "sa", "+sa", "mlp", "+mlp"), []
    for around in (plain_twins, contextlib.nullcontext):
        with around(), wellcond.Probe(model, sites, exact=exact) as probe:
            model(*given)
        found.append(probe.rows())
    assert {(row["index"], row["site"]) for row in found[0]} == {(block, site) for block in (0, 1) for site in sites}
    assert found[0] == found[1]
    assert len(entered) == 2 * exact  # it measures a pass of its own, and the other one has no hooks


@patch_dynamo("skip_nnmodule_hook_guards", False)
def test_compiled_the_numbers_are_the_same_and_a_later_hook_is_heard(entered: list[Tensor]) -> None:
    model, given = small(depth=1), batch()
    with plain_twins():
        want = all_of(model, *given)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    check_alike(all_of(compiled, *given), want)
    assert len(entered) == 1
    heard: list[nn.Module] = []
    handle = model.blocks[0].norm1.register_forward_hook(lambda module, *_: heard.append(module))
    check_alike([compiled(*given)], want[:1])
    assert heard == [model.blocks[0].norm1]
    assert len(entered) == 1
    handle.remove()
    check_alike([compiled(*given)], want[:1])
    assert len(heard) == 1
    assert len(entered) == 2
