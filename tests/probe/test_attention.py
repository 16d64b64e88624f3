"""Entropy and largest logit are those of the attention written out in float64, fused or not, masked or not."""

import copy
import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellcond import replace_attention
from wellcond.attention import softmax, softmax_fused
from wellcond.models.sequence import build
from wellcond.probe import Probe
from wellcond.probe import attention as listening
from wellcond.probe.attention import AttentionListener


def intercepted(
    attend: Any, *, share: float = 1.0, samples: int = 1, valid: Tensor | None = None
) -> tuple[float, float]:
    """(entropy, largest logit) of what a module that calls `attend` computes."""

    class Attention(nn.Module):
        def forward(self) -> Tensor:
            return attend()

    module = Attention()
    listener = AttentionListener({"a": module}, share=share, samples=samples, valid=lambda _key: valid)
    with listener.hooks(), listener:
        out = module()
    assert torch.equal(out, attend())
    assert listener.failed == {}
    heard = listener.found["a"]
    assert heard.samples == samples
    return float(heard.entropy / heard.rows), float(heard.largest_logit)


def truth(logits: Tensor) -> tuple[float, float]:
    """The same of masked logits (…, queries, keys), in float64, of the rows that attend to anything."""
    logits = logits.detach().double().flatten(0, -2)
    logits = logits[~logits.isneginf().all(-1)]
    weights = logits.softmax(-1)
    entropy = -torch.where(weights > 0, weights * weights.log(), 0).sum(-1)
    return float(entropy.mean()), float(logits.max())


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, 4, 2, 7, 8).unbind()
    return 3 * query, key, value  # sharp enough that the entropy says something


def test_fused_and_written_out(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value = qkv
    logits = query @ key.mT / math.sqrt(8)
    expected = pytest.approx(truth(logits), rel=1e-5)
    assert intercepted(lambda: F.scaled_dot_product_attention(query, key, value)) == expected
    assert intercepted(lambda: F.scaled_dot_product_attention(query=query, key=key, value=value)) == expected
    assert intercepted(lambda: logits.softmax(dim=-1) @ value) == expected
    assert intercepted(lambda: torch.softmax(logits, 3) @ value) == expected
    assert intercepted(lambda: F.softmax(logits, dim=-1, dtype=torch.float32) @ value) == expected
    scaled = pytest.approx(truth(query @ key.mT * 0.1), rel=1e-5)
    assert intercepted(lambda: F.scaled_dot_product_attention(query, key, value, scale=0.1)) == scaled


def test_in_pieces(qkv: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = qkv
    logits = query @ key.mT / math.sqrt(8)
    mask = torch.randn(4, 1, 7, 7)
    for budget in (1, 4 * 7 * 3, 4 * 7 * 7 * 2):
        monkeypatch.setattr(listening, "BUDGET_BYTES", budget)
        assert intercepted(lambda: logits.softmax(-1) @ value) == pytest.approx(truth(logits), rel=1e-5)
        assert intercepted(lambda: F.scaled_dot_product_attention(query, key, value, mask)) == pytest.approx(
            truth(logits + mask), rel=1e-5
        )


@pytest.mark.parametrize("shape", [(7, 7), (1, 1, 1, 7), (4, 1, 1, 7), (4, 2, 7, 7), (1, 2, 7, 7)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(qkv: tuple[Tensor, Tensor, Tensor], shape: tuple[int, ...], kind: str) -> None:
    query, key, value = qkv
    keep = torch.rand(shape) > 0.4
    keep[..., 0] = True
    mask = keep if kind == "bool" else torch.randn(shape).masked_fill(~keep, -math.inf)
    logits = query @ key.mT / math.sqrt(8)
    masked = logits.masked_fill(~keep, -math.inf) if kind == "bool" else logits + mask
    found = intercepted(lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
    assert found == pytest.approx(truth(masked), rel=1e-5)
    half = intercepted(lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=mask), share=0.5, samples=2)
    assert half == pytest.approx(truth(masked[:2]), rel=1e-5)


def test_causal_and_grouped_heads(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value = qkv
    logits = query @ key.mT / math.sqrt(8)
    causal = logits.masked_fill(~torch.ones(7, 7).tril().bool(), -math.inf)
    found = intercepted(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True))
    assert found == pytest.approx(truth(causal), rel=1e-5)
    one_key = (key[:, :1], value[:, :1])
    found = intercepted(lambda: F.scaled_dot_product_attention(query, *one_key, enable_gqa=True))
    assert found == pytest.approx(truth(query @ key[:, :1].mT / math.sqrt(8)), rel=1e-5)


def test_a_query_that_may_attend_to_nothing_is_left_out(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value = qkv
    keep = torch.ones(7, 7, dtype=torch.bool)
    keep[3] = False
    masked = (query @ key.mT / math.sqrt(8)).masked_fill(~keep, -math.inf)
    found = intercepted(lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=keep).nan_to_num())
    assert found == pytest.approx(truth(masked), rel=1e-5)


def test_padding_is_left_out(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value = qkv
    valid = torch.arange(7) < torch.tensor([7, 5, 3, 1])[:, None]
    mask = valid[:, None, None, :]
    masked = (query @ key.mT / math.sqrt(8)).masked_fill(~mask, -math.inf)
    expected = pytest.approx(truth(masked.masked_fill(~valid[:, None, :, None], -math.inf)), rel=1e-5)
    assert intercepted(lambda: F.scaled_dot_product_attention(query, key, value, mask), valid=valid) == expected
    assert intercepted(lambda: masked.softmax(-1) @ value, valid=valid) == expected


def test_a_failure_to_hear_is_not_the_models(qkv: tuple[Tensor, Tensor, Tensor], monkeypatch: Any) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(listening, "_sdpa_logits", fails)
    module = nn.Module()
    module.forward = lambda: F.scaled_dot_product_attention(*qkv)
    listener = AttentionListener({"a": module}, samples=4)
    with listener.hooks(), listener:
        assert torch.equal(module(), F.scaled_dot_product_attention(*qkv))
    assert "out of memory" in str(listener.failed["a"])


def test_the_probe_tells_of_attention_it_could_not_hear(vit: Any, images: Tensor, monkeypatch: Any) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(listening, "_sdpa_logits", fails)
    with (
        pytest.warns(UserWarning, match=r"attention of blocks\.[01] could not be measured.*memory"),
        Probe(vit) as probe,
    ):
        vit(images)
    assert {row["name"] for row in probe.rows()} >= {"log_kappa"}
    assert "attention_entropy" not in {row["name"] for row in probe.rows()}


# ---- in models


def attention_rows(model: nn.Module, *args: Any, **settings: Any) -> dict[str, list[float]]:
    with Probe(model, sites="sa", **settings) as probe:
        model(*args)
    names = ("attention_entropy", "largest_logit")
    return {name: [row["value"] for row in probe.rows() if row["name"] == name] for name in names}


def test_vit_fused_unfused_and_by_hand(vit: Any, images: Tensor, by_hand: Any) -> None:
    fused = attention_rows(vit, images)
    live = attention_rows(vit, images, exact=False)
    some = attention_rows(vit, images, exact=False, max_samples=2)
    for block in vit.blocks:
        assert block.attn.fused_attn
        block.attn.fused_attn = False
    unfused = attention_rows(vit, images)
    tokens = by_hand(vit, images)
    assert len(fused["attention_entropy"]) == 2
    for index, block in enumerate(vit.blocks):
        qkv = block.attn.qkv(tokens[f"blocks.{index}", "in"]).reshape(4, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
        logits = qkv[0].double() @ qkv[1].double().mT / 4
        expected = pytest.approx(truth(logits), rel=1e-5)
        for found in (fused, live, unfused):
            assert (found["attention_entropy"][index], found["largest_logit"][index]) == expected
        half = (some["attention_entropy"][index], some["largest_logit"][index])
        assert half == pytest.approx(truth(logits[:2]), rel=1e-5)


@pytest.mark.parametrize("name", ["nystrom", "linear", "kernelized", "skyformer"])
def test_what_is_not_softmax_over_keys_has_no_entropy(vit: Any, images: Tensor, name: str) -> None:
    expected = attention_rows(vit, images)
    few = {"num_landmarks": 4} if name in ("nystrom", "skyformer") else {}
    with replace_attention(vit, name, **few):
        assert attention_rows(vit, images) == {"attention_entropy": [], "largest_logit": []}
    if name == "nystrom":
        with replace_attention(vit, name, num_landmarks=17):  # a landmark for each key: softmax attention
            assert attention_rows(vit, images) == expected


@pytest.mark.parametrize("exact", [True, False])
def test_blocks_that_share_their_attention(vit: Any, images: Tensor, exact: bool) -> None:
    vit.blocks[1].attn = vit.blocks[0].attn
    apart = copy.deepcopy(vit)
    apart.blocks[1].attn = copy.deepcopy(apart.blocks[0].attn)
    found = attention_rows(vit, images, exact=exact)
    assert len(set(found["attention_entropy"])) == 2
    assert found == attention_rows(apart, images, exact=exact)
    last = attention_rows(vit, images, exact=exact, blocks=1)
    assert last == {name: values[1:] for name, values in found.items()}


@pytest.mark.parametrize("exact", [True, False])
def test_swin_windows_belong_to_their_samples(exact: bool, rows_of: Any) -> None:
    small: dict[str, Any] = {"depths": (2,), "embed_dim": 16, "num_heads": (2,), "window_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, num_classes=3, **small).eval()
    images = torch.randn(5, 3, 32, 32)  # with four windows each, the second block's shifted and masked
    with Probe(model, sites="sa", max_samples=3, exact=exact) as probe:
        model(images)
    with Probe(model, sites="sa") as expected:
        model(images[:3])
    found, wanted = rows_of(probe.rows()), rows_of(expected.rows())
    for place in wanted:
        assert found[place]["attention_entropy"] == pytest.approx(wanted[place]["attention_entropy"], rel=1e-5)
        assert found[place]["largest_logit"] == pytest.approx(wanted[place]["largest_logit"], rel=1e-5)
    assert {row["count"] for row in probe.rows()} == {3}


@pytest.mark.parametrize("training", [False, True])
def test_torchvision(training: bool) -> None:
    models = pytest.importorskip("torchvision").models
    size = {"image_size": 32, "patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    model, images = models.VisionTransformer(**size, num_classes=5).train(training), torch.randn(3, 3, 32, 32)
    for parameter in model.encoder.layers[0].self_attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    seen: list[Tensor] = []
    handle = model.encoder.layers[0].ln_1.register_forward_hook(lambda *hook: seen.append(hook[2]))
    with torch.no_grad():
        plain = model(images)
        handle.remove()
        for exact in (True, False):
            with Probe(model, sites="sa", exact=exact) as probe:
                assert torch.equal(model(images), plain)  # evaluation takes the fast path, and goes on to
            attention = model.encoder.layers[0].self_attention
            mixed = F.linear(seen[0], attention.in_proj_weight, attention.in_proj_bias).double()
            query, key, _ = mixed.reshape(3, 17, 3, 2, 8).permute(2, 0, 3, 1, 4)
            found = {row["name"]: row["value"] for row in probe.rows()}
            expected = truth(query @ key.mT / math.sqrt(8))
            assert (found["attention_entropy"], found["largest_logit"]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("exact", [True, False])
def test_torch_goes_on_to_take_its_fast_path(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("torchvision").models
    model = models.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32).eval()
    fast, taken = torch._native_multi_head_attention, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        taken.append(1)
        return fast(*args, **kwargs)

    monkeypatch.setattr(torch, "_native_multi_head_attention", counted)
    with torch.no_grad(), Probe(model, exact=exact):
        model(torch.randn(2, 3, 32, 32))
    assert len(taken) == 2  # once a layer: in the model's own pass, while the probe's takes the other path


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("by_position", [False, True])
def test_bert_with_padding(rows_of: Any, implementation: str, by_position: bool) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, attn_implementation=implementation, **small)
    model = transformers.BertModel(config).eval()
    words = torch.randint(1, 50, (4, 12))
    lengths = [12, 7, 5, 7]
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    for exact in (True, False):
        with Probe(model, sites=["sa", "+mlp", "embed"], exact=exact, spectrum=True) as probe:
            model(words, mask) if by_position else model(input_ids=words, attention_mask=mask)
        each = []
        for word, length in zip(words, lengths, strict=True):  # each sentence by itself, without its padding
            with Probe(model, sites=["sa", "+mlp", "embed"]) as alone:
                model(word[None, :length])
            each.append(rows_of(alone.rows()))
        found, counts = rows_of(probe.rows()), rows_of(probe.rows(), "count")
        for place in found:
            for name in ("log_kappa", "sigma_max", "sigma_min", "stable_rank", "effective_rank"):
                mean = sum(one[place][name] for one in each) / 4
                assert found[place][name] == pytest.approx(mean, rel=2e-3), (place, name)
                assert counts[place][name] == 4
            if place[1] == "sa":  # a mean over queries: a longer sentence has more of them
                total = sum(one[place]["attention_entropy"] * n for one, n in zip(each, lengths, strict=True))
                assert found[place]["attention_entropy"] == pytest.approx(total / sum(lengths), rel=1e-4)
                largest = max(one[place]["largest_logit"] for one in each)
                assert found[place]["largest_logit"] == pytest.approx(largest, rel=1e-4)


def test_a_mask_that_tells_no_padding_is_told_of() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **small)).eval()
    with Probe(model) as probe:
        model(torch.randint(1, 50, (2, 6)), attention_mask=torch.ones(2, 6, 6))
    assert any("(2, 6, 6) does not tell padding apart" in note for note in probe.notes)


def test_softmax_of_ours_is_heard_where_it_would_take_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding, on a GPU, it does not call torch's function unless somebody listens."""
    monkeypatch.setattr(softmax, "fused_kernels", lambda _device: True)
    monkeypatch.setattr(softmax_fused, "fused_kernels", lambda _device: True)
    model = build("text", length=24, vocab_size=20, dim=8, mlp_dim=8).eval()
    tokens = torch.randint(1, 20, (3, 24))
    mask = torch.arange(24) < torch.tensor([24, 11, 3])[:, None]
    with Probe(model) as probe:
        model(tokens, mask)
    heard = [row for row in probe.rows() if row["name"] == "attention_entropy"]
    assert len(heard) == 2
    assert all(0 < row["value"] < math.log(24) for row in heard)


@pytest.mark.parametrize("samples", [4, 2])
def test_torchs_attention_has_one_entropy_whether_its_weights_are_wanted_or_not(samples: int) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x, valid = torch.randn(4, 7, 8), torch.arange(7) < torch.tensor([7, 5, 3, 1])[:, None]

    def heard(wanted: bool) -> tuple[float, float]:
        listener = AttentionListener({0: module}, samples=samples, share=samples / 4, valid=lambda _: valid)
        with listener.hooks():
            module(x, x, x, key_padding_mask=~valid, need_weights=wanted)
        assert not listener.failed
        found = listener.found[0]
        return float(found.entropy / found.rows), float(found.rows)

    assert heard(True) == pytest.approx(heard(False), rel=1e-5)
    assert heard(True)[1] == 2 * int(valid[:samples].sum())
