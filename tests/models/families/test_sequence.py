"""The family of wellcond's own sequence models, with padding: probe, graying, skips, attention, weights, files."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellcond
from wellcond.graying import gray_tokens
from wellcond.models.families import find_embedding
from wellcond.models.sequence import build
from wellcond.numerics.dct import dct_bases, dct_basis

SMALL = {"length": 20, "vocab_size": 20, "dim": 8, "mlp_dim": 12, "pooling": "valid"}
LENGTHS = (20, 6, 13)


def model(attention: str = "softmax", task: str = "text", **more: Any) -> Any:
    torch.manual_seed(0)
    return build(task, attention, **{**SMALL, **more}).double().eval()


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 20, (3, 20), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(20) < torch.tensor(LENGTHS)[:, None]


def measured(net: nn.Module, *inputs: Any, **settings: Any) -> dict[tuple[str, str], float]:
    with wellcond.Probe(net, sites=["embed", "in", "*sa", "*mlp"], **settings) as probe, torch.no_grad():
        net(*inputs)
    return {(row["block"], row["site"]): row["value"] for row in probe.rows() if row["name"] == "log_kappa"}


def log_kappa(samples: list[Tensor]) -> float:
    return float(torch.stack([wellcond.condition_number(x).log() for x in samples]).mean())


def test_the_probe_leaves_padding_out(inputs: tuple[Tensor, Tensor]) -> None:
    net, (tokens, mask) = model(), inputs
    found = measured(net, tokens, mask)
    assert len(found) == 11
    with torch.no_grad():
        x = net.embedding(tokens)
        assert found["blocks.0", "embed"] == pytest.approx(log_kappa([x[i, mask[i]] for i in range(3)]), rel=1e-5)
        last = net.features(tokens, mask)["before"]
    assert found["blocks.1", "+mlp"] == pytest.approx(log_kappa([last[i, mask[i]] for i in range(3)]), rel=1e-5)
    other = measured(net, torch.where(mask, tokens, 3), mask)
    assert other == pytest.approx(found, rel=1e-6)


def test_the_probe_sees_both_documents(inputs: tuple[Tensor, Tensor]) -> None:
    net, (tokens, mask) = model(task="retrieval"), inputs
    found = measured(net, tokens, mask, tokens.flip(0), mask.flip(0))
    with torch.no_grad():
        x = net.embedding(tokens)
    assert found["blocks.0", "embed"] == pytest.approx(log_kappa([x[i, mask[i]] for i in range(3)]), rel=1e-5)
    first = measured(net, tokens, mask, tokens[[1, 1, 1]], mask[[1, 1, 1]], max_samples=2)  # one pair: two documents
    pair = [x[0, mask[0]], net.embedding(tokens).detach()[1, mask[1]]]
    assert first["blocks.0", "embed"] == pytest.approx(log_kappa(pair), rel=1e-5)


@pytest.mark.parametrize("method", ["svd", "dct"])
def test_gray_grays_the_tokens_that_count(inputs: tuple[Tensor, Tensor], method: str) -> None:
    net, (tokens, mask) = model(), inputs
    plain, classes, keys = net(tokens, mask), [type(m) for m in net.modules()], list(net.state_dict())
    embedded = net.embedding(tokens, mask)
    assert wellcond.gray(net, method, epsilon=0.7) is net
    grayed = net.embedding(tokens, mask)
    for row, length in enumerate(LENGTHS):
        expected = gray_tokens(embedded[row, :length], method, epsilon=0.7)
        torch.testing.assert_close(grayed[row, :length], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(net.embedding(tokens), gray_tokens(embedded, method, epsilon=0.7))
    out = net(tokens, mask)
    assert not torch.allclose(out, plain)
    torch.testing.assert_close(net(torch.where(mask, tokens, 3), mask), out)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(net(tokens[row : row + 1, :length]), out[row : row + 1], rtol=1e-8, atol=1e-10)
    assert list(net.state_dict()) == keys
    assert wellcond.graying_of(net) == wellcond.models.GrayingSettings(method=method, epsilon=0.7)
    for duplicate in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        assert torch.equal(duplicate(net)(tokens, mask), out)
    wellcond.gray(net, method, epsilon=0.5)
    assert wellcond.graying_of(net).epsilon == 0.5
    assert wellcond.ungray(net) is net
    assert [type(m) for m in net.modules()] == classes
    assert torch.equal(net(tokens, mask), plain)


@pytest.mark.parametrize("method", ["svd", "dct"])
def test_graying_lowers_kappa_and_trains(inputs: tuple[Tensor, Tensor], method: str) -> None:
    net, (tokens, mask) = model(task="retrieval"), inputs
    before = measured(net, tokens, mask, tokens, mask)["blocks.0", "embed"]
    wellcond.gray(net, method, epsilon=0.7)
    after = measured(net, tokens, mask, tokens, mask)["blocks.0", "embed"]
    assert after == pytest.approx(0.7 * before, rel=1e-6) if method == "svd" else after < before
    net.train()(tokens, mask, tokens, mask).sum().backward()
    assert net.embedding.tokens.weight.grad.isfinite().all()
    assert net.embedding.tokens.weight.grad.abs().max() > 0


def test_gradients_through_graying_with_padding() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    keep = torch.tensor([[True, False, True, True, False], [True] * 5])
    for method in ("svd", "dct"):
        assert torch.autograd.gradcheck(lambda x, m=method: gray_tokens(x, m, epsilon=0.6, keep=keep), x)


def test_bases_are_those_of_each_length() -> None:
    keep = torch.tensor([[True] * 6, [False, True, True, False, True, False], [False] * 6])
    bases = dct_bases(keep, dtype=torch.float64)
    torch.testing.assert_close(bases[0], dct_basis(6, dtype=torch.float64))
    torch.testing.assert_close(bases[1][:3][:, keep[1]], dct_basis(3, dtype=torch.float64))
    torch.testing.assert_close(bases[1].mT @ bases[1], torch.diag(keep[1].double()))
    assert bases[2].abs().max() == 0
    long, whole = torch.arange(1024) < 1000, dct_basis(1000, dtype=torch.float64)
    torch.testing.assert_close(dct_bases(long)[:1000, :1000].double(), whole, rtol=0, atol=1e-7)


def test_masks_of_graying_are_checked() -> None:
    x = torch.randn(2, 5, 3)
    for keep in (torch.ones(2, 4).bool(), torch.ones(2, 5)):
        with pytest.raises(ValueError, match="keep says which tokens count"):
            gray_tokens(x, "dct", keep=keep)
    assert gray_tokens(x, "svd", keep=torch.zeros(2, 5).bool()).abs().max() == 0


def test_what_hides_the_embedding_is_refused() -> None:
    net = model()
    net.embedding.forward = net.embedding.forward
    with pytest.raises(ValueError, match="gray before that"):
        wellcond.gray(net, "dct")


@pytest.mark.parametrize("skip", ["sa", "mlp"])
def test_its_skips_go_and_come_back(inputs: tuple[Tensor, Tensor], skip: str) -> None:
    net, (tokens, mask) = model("kernelized"), inputs
    before, x = net(tokens, mask), torch.randn(3, 20, 8, dtype=torch.float64)
    block, attn_mask = net.blocks[0], mask[:, None, None]
    branch = block.attn(block.norm1(x), attn_mask)
    x_sa = branch if skip == "sa" else x + branch
    mlp = block.mlp(block.norm2(x_sa))
    with wellcond.remove_skip(net, skip):
        assert torch.equal(block(x, attn_mask), x_sa + mlp if skip == "sa" else mlp)
    assert torch.equal(net(tokens, mask), before)


@pytest.mark.parametrize("name", ["linear", "kernelized", "skyformer", "nystrom"])
def test_its_attention_is_replaced_and_restored(inputs: tuple[Tensor, Tensor], name: str) -> None:
    net, (tokens, mask) = model(attention_dropout=0.0), inputs
    before = net(tokens, mask)
    settings = {"num_landmarks": 4} if name in ("skyformer", "nystrom") else {}
    wellcond.replace_attention(net, name, **settings)
    assert torch.equal(net(tokens, mask), model(name, **settings)(tokens, mask))
    wellcond.restore_attention(net)
    assert torch.equal(net(tokens, mask), before)


def test_its_weights_are_read_and_set() -> None:
    net = model()
    weights = wellcond.attention_weights(net.blocks[0])
    assert weights.num_heads == 2
    assert torch.equal(weights.value, net.blocks[0].attn.qkv.weight[16:])
    assert torch.equal(weights.output, net.blocks[0].attn.proj.weight)


def test_its_file_remembers_the_surgery(inputs: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    net = model("skyformer", num_landmarks=4)
    wellcond.gray(net, "dct", epsilon=0.7)
    wellcond.remove_skip(net, "sa", blocks=1)
    wellcond.save(net, tmp_path / "net.safetensors")
    fresh = model()
    loaded = wellcond.load(fresh, tmp_path / "net.safetensors")
    assert loaded.attention["blocks.0"].name == "skyformer"
    assert torch.equal(fresh(*inputs), net(*inputs))


class Words(nn.Module):
    """Somebody's own model of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).sum(1)


class Table(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(20, 8)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: A002
        return super().forward(input)


def test_a_model_of_words_is_taught_from_outside() -> None:
    wellcond.register_family(Words, embedding="table")
    net, ids = Words(), torch.randint(0, 20, (2, 5))
    expected = gray_tokens(net.table(ids), "dct", epsilon=0.5).sum(1)
    assert find_embedding(net) is net.table
    torch.testing.assert_close(wellcond.gray(net, "dct", epsilon=0.5)(ids), expected)
    with pytest.raises(ValueError, match="give one"):
        wellcond.register_family(Words, "table", embedding="table")
    wellcond.register_family(Words, embedding="nowhere")
    with pytest.raises(ValueError, match="no embedding at nowhere"):
        wellcond.gray(Words(), "dct")


def wrapped(net: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.module = net
    return outer


@pytest.mark.parametrize("wrap", [wrapped, torch.compile])
def test_wrapped_models_are_grayed_inside(wrap: Callable[[nn.Module], nn.Module]) -> None:
    net = model()
    wellcond.gray(wrap(net), "dct")
    assert wellcond.is_grayed(net)
