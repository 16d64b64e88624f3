"""Padding is told by the masks that blocks are given, whatever they are called and whoever wraps the model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellcond import Probe, register_blocks, remove_skip
from wellcond.probe.capture import Padding, counted

KEEP = torch.tensor([[True, True, False, False], [True, True, True, True]])
ADDED = torch.zeros(2, 4).masked_fill(~KEEP, float("-inf"))
PAIRS = KEEP[:, None, :, None] & KEEP[:, None, None, :]
CAUSAL = torch.ones(4, 4).tril().bool()


@pytest.mark.parametrize(
    ("argument", "mask", "hides"),
    [
        ("attention_mask", KEEP, False), ("attention_mask", KEEP.long(), False),
        ("attention_mask", KEEP.float(), False),
        ("attention_mask", ADDED[:, None, None], False), ("attn_mask", KEEP[:, None, None], False),
        ("attn_mask", PAIRS, False), ("attn_mask", PAIRS & CAUSAL, False), ("attn_mask", PAIRS[:, 0], False),
        ("attn_mask", torch.zeros(PAIRS.shape).masked_fill(~PAIRS, torch.finfo(torch.float32).min), False),
        ("src_key_padding_mask", ~KEEP, True), ("src_key_padding_mask", ADDED, True),
        ("key_padding_mask", ~KEEP, False),
        ("patch_valid", KEEP, False), ("mask", KEEP[:, None, None].float(), False), ("mask", PAIRS.float(), False),
    ],
)  # fmt: skip
def test_all_forms_say_the_same(argument: str, mask: Tensor, hides: bool) -> None:
    found = counted(mask, argument, (2, 4), hides=hides)
    assert found is not None
    assert torch.equal(found.expand(2, 4), KEEP)


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL, CAUSAL[None, None], torch.zeros(4, 4), torch.zeros(2, 1, 1, 4), ADDED[1:],
        ~CAUSAL, ~CAUSAL[None], (~CAUSAL).float(), torch.zeros(4, 4).masked_fill(~CAUSAL, float("-inf")),
    ],
)  # fmt: skip
def test_what_hides_no_token_from_all(mask: Tensor) -> None:
    found = counted(mask, "attn_mask", (2, 4))
    assert found is not None
    assert found.all()


def test_torchs_own_masks_hide() -> None:
    found = counted(~CAUSAL, "src_mask", (2, 4), hides=True)
    assert found is not None
    assert found.all()


SQUARE = torch.arange(4) < torch.tensor([2, 4, 1, 4])[:, None]  # as many samples as tokens
LAST_IS_HIDDEN = torch.ones(4, 4).bool() & (torch.arange(4) < 3)


@pytest.mark.parametrize(
    ("argument", "mask", "hides", "expected"),
    [
        ("attention_mask", SQUARE, False, SQUARE), ("patch_valid", SQUARE, False, SQUARE),
        ("src_key_padding_mask", ~SQUARE, True, SQUARE), ("key_padding_mask", ~SQUARE, False, SQUARE),
        ("src_mask", ~CAUSAL, True, LAST_IS_HIDDEN | True), ("src_mask", ~LAST_IS_HIDDEN, True, LAST_IS_HIDDEN[:1]),
        ("attn_mask", LAST_IS_HIDDEN, False, LAST_IS_HIDDEN[:1]), ("mask", CAUSAL, False, CAUSAL | True),
        ("mask", SQUARE, False, None),
    ],
)  # fmt: skip
def test_with_as_many_samples_as_tokens_the_name_decides(
    argument: str, mask: Tensor, hides: bool, expected: Tensor | None
) -> None:
    found = counted(mask, argument, (4, 4), hides=hides)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert torch.equal(found.expand(4, 4), expected.expand(4, 4))


def test_what_tells_nothing() -> None:
    shapes = torch.ones(4), torch.ones(2, 7), torch.ones(6, 4, 4).bool(), torch.ones(3, 4).bool()
    for mask in (*shapes, torch.zeros(2, 4).bool()):
        assert counted(mask, "attn_mask", (2, 4)) is None


def test_a_block_without_a_mask_has_no_padding_where_others_have_one() -> None:
    block, x = nn.TransformerEncoderLayer(8, 2), torch.zeros(2, 4, 8)
    padding = Padding(whole=KEEP)
    padding.see("vision", block, (x,), {})
    assert padding.of("vision") is KEEP  # nobody has one yet
    padding.see("text", block, (x,), {"src_key_padding_mask": ~KEEP})
    assert padding.of("vision") is None
    found = padding.of("text")
    assert found is not None
    assert torch.equal(found, KEEP)


class Wrapped(nn.Module):
    """Somebody's own module around an encoder, with a name of its own for the mask."""

    def __init__(self, encoder: nn.Module, call: Callable[..., Any]):
        super().__init__()
        self.encoder, self.call = encoder, call

    def forward(self, tokens: Tensor, present: Tensor) -> Any:
        return self.call(self.encoder, tokens, present)


def torchs_encoder() -> Wrapped:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    return Wrapped(encoder, lambda encoder, x, present: encoder(x, src_key_padding_mask=~present))


def bert() -> Wrapped:
    transformers = pytest.importorskip("transformers")
    small = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=11
    )
    return Wrapped(
        transformers.BertModel(small), lambda model, x, present: model(inputs_embeds=x, attention_mask=present.long())
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of the model's own pass
@pytest.mark.parametrize("make", [torchs_encoder, bert])
@pytest.mark.parametrize("training", [False, True])
def test_padding_is_left_out_behind_a_wrapper(make: Callable[[], Wrapped], training: bool) -> None:
    torch.manual_seed(0)
    model, x = make().train(training), torch.randn(2, 4, 8)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def measured(x: Tensor) -> list[Any]:
        with Probe(model) as probe, torch.no_grad():
            model(x, KEEP)
        return [(row["site"], row["name"], row["value"]) for row in probe.rows()]

    other = torch.where(KEEP[..., None], x, 100 * torch.randn_like(x))
    first, second = measured(x), measured(other)
    assert [row[:2] for row in first] == [row[:2] for row in second]
    assert [row[2] for row in first] == pytest.approx([row[2] for row in second], rel=1e-3)


def test_padding_is_left_out_without_skips() -> None:
    """DistilBERT's blocks get their mask by position, and their forward without skips takes (hidden_states, *args)."""
    transformers = pytest.importorskip("transformers")
    small = {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "vocab_size": 11}
    model = transformers.DistilBertModel(transformers.DistilBertConfig(**small)).eval()
    remove_skip(model, "mlp", blocks=1)

    def measured(x: Tensor) -> list[float]:
        with Probe(model, sites="sa") as probe:
            model(inputs_embeds=x, attention_mask=KEEP.long())
        return [row["value"] for row in probe.rows()]

    x = torch.randn(2, 4, 8)
    other = torch.where(KEEP[..., None], x, 100 * torch.randn_like(x))
    assert measured(x) == pytest.approx(measured(other), rel=1e-3)


def test_a_mask_that_does_not_tell_is_said() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = x + self.attn(x) * mask.mean()
            return x + self.mlp(x)

    register_blocks(Odd, taps={"sa": "attn:output", "mlp": "mlp:output"})
    model: Any = nn.Module()
    model.blocks = nn.ModuleList([Odd()])
    model.forward = lambda x: model.blocks[0](x, torch.ones(3, 5, 7))
    said = r"a mask \(3, 5, 7\) of blocks.0 does not tell padding apart"
    with pytest.warns(UserWarning, match=said), Probe(model, sites="sa") as probe:
        model(torch.randn(2, 4, 8))
    assert probe.rows()


class AroundTorchs(nn.Module):
    """Somebody's own block around torch's attention; `convert` makes what that is given of the block's mask."""

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attn, self.mlp, self.convert = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8), convert

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(x, x, x, key_padding_mask=self.convert(mask))[0]
        return x + self.mlp(x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("mask", "convert"), [(~KEEP, lambda mask: mask), (KEEP, lambda mask: ~mask)])
def test_a_block_around_torchs_attention(mask: Tensor, convert: Callable[[Tensor], Tensor], training: bool) -> None:
    register_blocks(AroundTorchs, attention="attn", taps={"sa": "attn:output", "+mlp": ":output"})
    model = Wrapped(AroundTorchs(convert), lambda block, x, mask: block(x, mask)).train(training)
    x = torch.randn(2, 4, 8)
    other = torch.where(KEEP[..., None], x, 100 * torch.randn_like(x))

    def measured(*args: Tensor) -> dict[tuple[str, str], float]:
        with Probe(model, exact=False) as probe:
            model(*args)
        return {(row["site"], row["name"]): row["value"] for row in probe.rows() if row["name"] == "sigma_max"}

    found = measured(x, mask)
    assert found == pytest.approx(measured(other, mask), rel=1e-4)
    alone = [measured(x[i : i + 1, :n], mask[i : i + 1, :n]) for i, n in enumerate(KEEP.sum(1).tolist())]
    assert found == pytest.approx({key: (alone[0][key] + alone[1][key]) / 2 for key in found}, rel=1e-4)
