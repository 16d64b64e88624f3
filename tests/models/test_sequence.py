"""The encoders of the Long Range Arena: their sizes, their numbers in plain float64, padding, and compiling them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from wellcond import attention_of
from wellcond.attention import register_attention
from wellcond.models.sequence import TASKS, PairClassifier, SequenceClassifier, build, find_task

SMALL = {"length": 24, "vocab_size": 20, "dim": 8, "mlp_dim": 12}
ATTENTIONS = {
    "softmax": {},
    "linear": {},
    "kernelized": {},
    "skyformer": {"num_landmarks": 8},
    "nystrom": {"num_landmarks": 8},
}
LENGTHS = (24, 5, 17)


def small(attention: str = "softmax", task: str = "listops", **more: Any) -> SequenceClassifier:
    torch.manual_seed(0)
    model = build(task, attention, **{**SMALL, **ATTENTIONS.get(attention, {}), **more}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # far from their start, so that every part shows
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch(lengths: tuple[int, ...] = LENGTHS, n: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 20, (len(lengths), n), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(n) < torch.tensor(lengths)[:, None]
    return tokens.masked_fill(~mask, 0), mask


def plain(state: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    return x @ state[prefix + ".weight"].T + state[prefix + ".bias"]


def normed(state: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return state[prefix + ".weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() + state[prefix + ".bias"]


def reference(model: nn.Module, tokens: Tensor, *, divisor: float) -> Tensor:
    """The mean of one sequence without its padding, in plain operations: two heads, two layers."""
    state = model.state_dict()
    x = state["embedding.tokens.weight"][tokens] + state["embedding.positions"][: len(tokens)]
    for layer in ("blocks.0.", "blocks.1."):
        y = normed(state, layer + "norm1", x)
        weight, bias = (state[f"{layer}attn.qkv.{kind}"].chunk(3) for kind in ("weight", "bias"))
        q, k, v = ((y @ w.T + b).unflatten(-1, (2, -1)) for w, b in zip(weight, bias, strict=True))
        heads = [(q[:, h] @ k[:, h].T / math.sqrt(q.shape[-1])).exp() for h in range(2)]
        mixed = [(weights / weights.sum(-1, keepdim=True)) @ v[:, h] for h, weights in enumerate(heads)]
        x = x + plain(state, layer + "attn.proj", torch.cat(mixed, -1))
        y = plain(state, layer + "mlp.0", normed(state, layer + "norm2", x))
        y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        x = x + plain(state, layer + "mlp.3", y)
    return normed(state, "norm", x).sum(0) / divisor


def head(model: nn.Module, x: Tensor) -> Tensor:
    return plain(model.state_dict(), "head.2", plain(model.state_dict(), "head.0", x).clamp_min(0))


@pytest.mark.parametrize(
    ("task", "count"),
    [("listops", 209_802), ("text", 370_562), ("retrieval", 395_138), ("pathfinder", 173_954), ("image", 158_602)],
)
@pytest.mark.parametrize("attention", ["softmax", "skyformer"])
def test_parameters_to_the_unit(task: str, count: int, attention: str) -> None:
    model = build(f"lra_{task}", attention)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.embedding.positions.shape[0] == TASKS[task].length
    assert isinstance(model, PairClassifier) == (task == "retrieval")


@pytest.mark.parametrize("pooling", ["padded", "valid"])
def test_one_sequence_in_plain_operations(pooling: str) -> None:
    model, (tokens, mask) = small(pooling=pooling), batch()
    out = model(tokens, mask)
    for row, length in enumerate(LENGTHS):
        divisor = 24 if pooling == "padded" else length
        expected = head(model, reference(model, tokens[row, :length], divisor=divisor))
        torch.testing.assert_close(out[row], expected, rtol=1e-9, atol=1e-9)


def test_pairs_in_plain_operations() -> None:
    model, (first, mask0), (second, mask1) = small(task="retrieval"), batch(), batch((9, 24, 20), seed=2)
    out = model(first, mask0, second, mask1)
    assert out.shape == (3, 2)
    for row in range(3):
        a = reference(model, first[row][mask0[row]], divisor=24)
        b = reference(model, second[row][mask1[row]], divisor=24)
        expected = head(model, torch.cat([a, b, a * b, a - b]))
        torch.testing.assert_close(out[row], expected, rtol=1e-9, atol=1e-9)
    features = model.features(first, mask0, second, mask1)
    torch.testing.assert_close(features["after"][1::2].sum(1)[0] / 24, reference(model, second[0, :9], divisor=24))


def test_a_pair_may_have_one_mask_or_none() -> None:
    model, (first, mask), (second, _) = small(task="retrieval"), batch(), batch((24, 24, 24), seed=2)
    full = torch.ones_like(mask)
    torch.testing.assert_close(model(first, mask, second, None), model(first, mask, second, full))
    torch.testing.assert_close(model(second, None, second, None), model(second, full, second, full))


def test_documents_pass_one_by_one_where_samples_depend_on_each_other() -> None:
    model, (first, mask0), (second, mask1) = small("skyformer", "retrieval", compat=True), batch(), batch(seed=2)
    torch.manual_seed(3)
    out = model(first, mask0, second, mask1)
    torch.manual_seed(3)
    a, b = model.pooled(first, mask0), model.pooled(second, mask1)
    assert torch.equal(out, model.head(torch.cat([a, b, a * b, a - b], -1)))
    features = model.features(first, mask0, second, mask1)
    assert features["before"].shape == (6, 24, 8)


@pytest.mark.parametrize("pooling", ["padded", "valid"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_and_batch_mates_change_nothing(attention: str, pooling: str) -> None:
    model, (tokens, mask) = small(attention, pooling=pooling), batch()
    out = model(tokens, mask)
    for row, length in enumerate(LENGTHS):
        alone = model(tokens[row : row + 1, :length])
        torch.testing.assert_close(out[row : row + 1], alone, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(out, model(torch.where(mask, tokens, 7), mask), rtol=1e-8, atol=1e-8)
    full = torch.ones_like(mask)
    torch.testing.assert_close(model(tokens), model(tokens, full), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_training_draws_among_valid_positions_and_reaches_every_weight(attention: str) -> None:
    model, (tokens, mask) = small(attention).train(), batch()
    F.cross_entropy(model(tokens.int(), mask), torch.tensor([0, 3, 9])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if "qkv.bias" not in name:  # of the keys' bias softmax sees nothing
            assert parameter.grad.abs().max() > 0, name
    torch.manual_seed(5)
    out = model(tokens, mask)
    torch.manual_seed(5)
    other = torch.where(mask, tokens, 7)
    torch.testing.assert_close(out, model(other, mask), rtol=1e-8, atol=1e-8)


def test_features_before_and_after_the_norm() -> None:
    model, (tokens, mask) = small(), batch()
    found = model.features(tokens, mask)
    assert list(found) == ["before", "after"]
    assert found["before"][~mask].abs().max() == 0 == found["after"][~mask].abs().max()
    torch.testing.assert_close(model.norm(found["before"])[mask], found["after"][mask])
    torch.testing.assert_close(found["after"].mean(1), model.pooled(tokens, mask))


def test_the_start_is_torchs_own() -> None:
    torch.manual_seed(0)
    model = build("text").requires_grad_(False)
    for weight in (model.embedding.tokens.weight, model.embedding.positions):
        assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
    for layer, inputs in ((model.blocks[0].attn.qkv, 64), (model.blocks[1].mlp[3], 128), (model.head[0], 64)):
        bound = inputs**-0.5
        assert 0.95 * bound < float(layer.weight.abs().max()) <= bound
        assert float(layer.weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_the_weights_are_the_same_whatever_the_attention() -> None:
    states = []
    for attention, settings in ATTENTIONS.items():
        torch.manual_seed(7)
        states.append(build("image", attention, **{**SMALL, **settings}).state_dict())
    for state in states[1:]:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[name], states[0][name]) for name in state)


@pytest.mark.filterwarnings("error")
def test_settings_reach_the_attention_without_a_word() -> None:
    model = build("text", "skyformer", gamma=0.05)
    found = attention_of(model)
    assert list(found) == ["blocks.0", "blocks.1"]
    assert found["blocks.1"].settings["num_landmarks"] == 128
    assert found["blocks.1"].settings["gamma"] == 0.05
    assert attention_of(build("text", "nystrom"))["blocks.0"].settings["num_landmarks"] == 128
    assert attention_of(build("text", "skyformer", compat=True))["blocks.0"].settings["compat"]
    assert model.blocks[0].attn.attn_drop.p == 0.1


def test_an_attention_of_somebody_elses() -> None:
    @register_attention("averaging_for_a_test")
    def averaging(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, power: int = 1
    ) -> Tensor:
        kept = value if attn_mask is None else value * attn_mask.mT
        return (kept.mean(-2, keepdim=True) * power).expand_as(query)

    model, (tokens, mask) = small("averaging_for_a_test", power=2), batch()
    assert model(tokens, mask).shape == (3, 10)
    assert attention_of(model)["blocks.0"].settings == {"power": 2}


class NoWaiting(TorchDispatchMode):
    """Fails where values are read, for which a GPU would have to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("masked", [True, False])
def test_nothing_waits_for_the_device(attention: str, masked: bool) -> None:
    model, (tokens, mask) = small(attention).float().train(), batch()
    with NoWaiting():
        F.cross_entropy(model(tokens, mask if masked else None), torch.tensor([0, 3, 9])).backward()


@pytest.mark.parametrize(("attention", "task"), [("softmax", "text"), ("skyformer", "retrieval"), ("nystrom", "text")])
def test_it_compiles_as_one_graph(attention: str, task: str) -> None:
    torch.compiler.reset()
    model, inputs = small(attention, task).float(), batch()
    inputs = (*inputs, *inputs) if task == "retrieval" else inputs
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("words"), "its tasks are listops"),
        (lambda: build("text", "skyformers"), "there is no attention"),
        (lambda: build("text", "softmax", num_landmarks=3), "no setting 'num_landmarks'"),
        (lambda: build("text", pooling="full"), "'padded' or 'valid'"),
        (lambda: build("text", dim=65), "does not divide"),
        (lambda: small()(torch.zeros(2, 25, dtype=torch.long)), "positions for 24"),
        (lambda: small()(torch.zeros(2, 4)), "int32 or int64"),
        (lambda: small()(torch.zeros(2, 4).long(), torch.ones(2, 4)), "boolean"),
        (lambda: small()(torch.zeros(2, 4).long(), torch.ones(2, 5).bool()), "tokens' shape"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    assert find_task("lra_image") is TASKS["image"]


def test_only_kernelized_goes_without_dropout_of_its_weights_by_default():
    sizes = {"dim": 8, "mlp_dim": 8, "length": 16, "vocab_size": 20}
    found = {name: build("listops", name, **sizes).blocks[0].attn.attn_drop.p for name in ("softmax", "kernelized")}
    assert found == {"softmax": 0.1, "kernelized": 0.0}
    given = build("listops", "kernelized", attention_dropout=0.2, **sizes)
    assert given.blocks[0].attn.attn_drop.p == 0.2
