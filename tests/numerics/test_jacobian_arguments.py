"""Arguments after x, split by sample: against Jacobians by plain autograd, each sample with what belongs to it."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from wellcond.numerics.jacobian import jacobian_spectrum
from wellcond.numerics.jacobian_arguments import BatchArguments
from wellcond.numerics.linearize import first_tensor


def true_values(block: Callable[..., Any], x: Tensor, given: list[dict[str, Any]]) -> Tensor:
    """Singular values of each sample's Jacobian in float64, each sample with its own arguments."""
    if isinstance(block, nn.Module):
        block = copy.deepcopy(block).double().eval()
    found = []
    for sample, kwargs in zip(x.double().split(1), given, strict=True):
        with sdpa_kernel(SDPBackend.MATH):
            rows = torch.autograd.functional.jacobian(lambda s, kw=kwargs: first_tensor(block(s, **kw)), sample)
        found.append(torch.linalg.svdvals(rows.reshape(-1, sample.numel())))
    return torch.stack(found)


def scaled(x: Tensor, by: Tensor) -> Tensor:
    return x * by


def test_what_would_broadcast_is_split() -> None:
    by = torch.stack([torch.full((3, 4), 1.0), torch.full((3, 4), 5.0)])
    for method in ("exact", "gram", "lanczos", "density"):
        found = jacobian_spectrum(scaled, torch.ones(2, 3, 4), k=2, args=(by,), method=method)
        assert (found.outputs, found.inputs) == (12, 12)
        assert_close(found.largest, torch.tensor([[1.0, 1.0], [5.0, 5.0]], dtype=torch.float64))
        assert "; split with the samples: args[0]" in found.why
        assert "unchecked" not in found.why


def vit_block() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=16, num_heads=2).blocks[0]


def vit_with_masks() -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    mask = torch.ones(3, 1, 6, 6, dtype=torch.bool)
    mask[1, ..., 3:], mask[2, ..., 1:] = False, False
    return vit_block(), torch.randn(3, 6, 16), {"attn_mask": mask}


def bert_with_masks() -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=10
    )
    mask = torch.zeros(2, 1, 1, 6)
    mask[1, ..., 1:] = -1e30
    return transformers.BertModel(config).encoder.layer[0], torch.randn(2, 6, 16), {"attention_mask": mask}


def cait_with_class_tokens() -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    model = timm.create_model("cait_xxs24_224", img_size=32, depth=1, embed_dim=16, num_heads=2, init_values=1.0)
    return model.blocks_token_only[0], torch.randn(2, 6, 16), {"x_cls": torch.randn(2, 1, 16)}


@pytest.mark.parametrize("make", [vit_with_masks, bert_with_masks, cait_with_class_tokens])
def test_real_blocks(make: Callable[[], tuple[nn.Module, Tensor, dict[str, Tensor]]]) -> None:
    block, x, kwargs = make()
    (name, tensor), samples = next(iter(kwargs.items())), len(x)
    wide = tensor.double() if tensor.is_floating_point() else tensor
    truth = true_values(block, x, [{name: wide[i : i + 1]} for i in range(samples)])
    found = jacobian_spectrum(block, x, kwargs=kwargs)
    assert_close(found.values, truth, rtol=0, atol=1e-12 * float(truth.max()))
    assert found.why.endswith(f"split with the samples: kwargs['{name}']")
    products = jacobian_spectrum(block, x, k=3, method="lanczos", args=(tensor,))  # the second argument of all three
    assert_close(products.largest, truth[:, :3])
    alone = jacobian_spectrum(block, x[1:2], kwargs={name: tensor[1:2]})
    assert torch.equal(alone.values[0], found.values[1])
    assert "split" not in alone.why


class Pair(NamedTuple):
    gain: Tensor
    shift: Tensor


def test_nested_arguments() -> None:
    x, gain = torch.randn(3, 4), torch.randn(3, 4)
    shared = torch.randn(4)

    def block(x: Tensor, tree: dict[str, Any], *, pair: Pair, power: int) -> Tensor:
        assert pair.gain.dtype == x.dtype  # a named tuple is cast as well
        return (x * tree["gains"][0] * tree["gains"][1] * pair.gain) ** power + pair.shift

    found = jacobian_spectrum(
        block, x, args=({"gains": [gain, shared]},), kwargs={"pair": Pair(2 * gain, shared), "power": 1}
    )
    truth = (2 * gain.double() ** 2 * shared.double()).abs().sort(descending=True).values
    assert_close(found.values, truth)
    assert found.why.endswith("split with the samples: args[0]['gains'][0], kwargs['pair'].gain")


def test_names_and_parts() -> None:
    mask, table, gain = torch.ones(2, 1, 5), torch.ones(5, 2), torch.tensor([1.0, 2.0])
    arguments = BatchArguments((mask, None, 2, "mean"), {"tables": (table, {"gain": gain}), "scale": 2.0}, 2)
    assert arguments.split == ["args[0]", "kwargs['tables'][1]['gain']"]
    assert arguments.shared == ["kwargs['tables'][0]"]
    args, kwargs = arguments.of_sample(1)
    assert args[0].shape == (1, 1, 5)
    assert args[1:] == (None, 2, "mean")
    assert kwargs["tables"][0] is table
    assert kwargs["tables"][1]["gain"].tolist() == [2.0]
    assert kwargs["scale"] == 2.0
    single = BatchArguments((mask[:1],), None, 1)
    assert single.split == []
    assert single.of_sample(0)[0][0] is single.whole[0][0]


def test_for_parameters_the_batch_stays_whole() -> None:
    block, x, kwargs = vit_with_masks()
    found = jacobian_spectrum(block, x, "params", k=2, method="lanczos", steps=8, kwargs=kwargs)
    assert found.outputs == x.numel()
    assert "split" not in found.why


# ---- what the shape alone cannot tell


def test_a_shared_mask_with_as_many_rows_as_samples_is_not_split_in_silence() -> None:
    block, x = vit_block(), torch.randn(6, 6, 16)
    causal = torch.ones(6, 6).tril().bool()
    with pytest.raises(ValueError, match=r"sample 0 alone .*split with the 6 samples: kwargs\['attn_mask'\] \(6, 6\)"):
        jacobian_spectrum(block, x, kwargs={"attn_mask": causal})
    truth = true_values(block, x, [{"attn_mask": causal}] * 6)
    one = jacobian_spectrum(block, x[2:3], kwargs={"attn_mask": causal})  # the way out that the message names
    assert_close(one.values[0], truth[2])
    found = jacobian_spectrum(block, x[:4], kwargs={"attn_mask": causal})  # no doubt here
    assert_close(found.values, truth[:4])
    assert "split" not in found.why


def test_a_batch_that_is_not_the_first_dimension() -> None:
    heads = nn.MultiheadAttention(8, 2, batch_first=True)
    x, mask = torch.randn(3, 4, 8), torch.zeros(6, 4, 4)

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return heads.double()(x, x, x, attn_mask=mask)[0]

    with pytest.raises(ValueError, match=r"not sample 0 alone.*given to each as it is: args\[0\] \(6, 4, 4\)"):
        jacobian_spectrum(attend, x, args=(mask,))
    with pytest.raises(ValueError, match=r"\(1, 3, 4, 8\), whose first dimension is not the batch"):
        jacobian_spectrum(scaled, x, args=(torch.randn(1, 3, 4, 8),))


def test_what_an_object_holds_is_not_split_in_silence() -> None:
    class Context:
        by = torch.randn(2, 4, dtype=torch.float64)

    with pytest.raises(ValueError, match=r"sample 0 alone .*kwargs\['context'\] \(a Context\)"):
        jacobian_spectrum(lambda x, context: x * context.by, torch.randn(2, 4), kwargs={"context": Context()})


def test_a_tensor_that_cannot_be_split_is_named() -> None:
    def add(x: Tensor, tables: list[Tensor]) -> Tensor:
        return x * tables[0].to_dense()

    with pytest.raises(ValueError, match=r"args\[0\]\[0\] \(torch.sparse_coo\) cannot be split"):
        jacobian_spectrum(add, torch.randn(3, 3), args=([torch.eye(3).to_sparse()],))


def test_samples_that_see_each_other_through_an_argument() -> None:
    def mixed(x: Tensor, by: Tensor) -> Tensor:
        return x * by.mean(0)

    with pytest.raises(ValueError, match="samples see each other"):
        jacobian_spectrum(mixed, torch.randn(3, 4), args=(torch.randn(3, 4),))


# ---- what must not be mistaken for that


def test_a_loss_with_labels() -> None:
    model, x, labels = nn.Linear(4, 5).double(), torch.randn(3, 4), torch.tensor([0, 4, 2])

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), labels)

    found = jacobian_spectrum(loss, x, args=(labels,))
    assert_close(found.values, true_values(loss, x, [{"labels": label} for label in labels.split(1)]))
    assert "split with the samples: args[0] (unchecked, for the block gives one number for all)" in found.why


def test_arguments_as_one_sample_needs_them() -> None:
    block, x, y = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8), torch.randn(1, 5, 8)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, 2:] = True
    found = jacobian_spectrum(block, x, args=(y, y, hidden), kwargs={"need_weights": False})
    shared = {"key": y.double(), "value": y.double(), "need_weights": False}
    truth = true_values(block, x, [shared | {"key_padding_mask": hidden[i : i + 1]} for i in range(2)])
    assert_close(found.values, truth, rtol=0, atol=1e-12)
    assert "args[2] (unchecked, for the block does not take the whole batch" in found.why


def test_a_sample_that_is_not_finite_hides_no_other() -> None:
    x, by = torch.randn(3, 4), torch.randn(3, 4)
    x[1] = math.nan
    found = jacobian_spectrum(scaled, x, args=(by,))
    assert found.status_names() == ["ok", "non_finite", "ok"]
    assert_close(found.values[2], by[2].double().abs().sort(descending=True).values)


def test_random_draws_and_batch_statistics_of_training() -> None:
    """They are another sample's alone, which says nothing about the arguments."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)

        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return self.drop(self.norm(x) * by)

    block, x, by = Block().train(), torch.randn(2, 6, 20), torch.randn(2, 6, 20)
    state = torch.get_rng_state()
    found = jacobian_spectrum(block, x, args=(by,), eval_mode=False)
    assert (found.values == 0).any()
    assert block.training
    assert block.norm.num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_rounding_of_a_coarser_dtype_inside() -> None:
    weight = torch.randn(64, 64)

    def block(x: Tensor, by: Tensor) -> Tensor:
        return ((x * by).float() @ weight).double()

    x, by = torch.randn(5, 7, 64), torch.randn(5, 7, 64)
    found = jacobian_spectrum(block, x, k=2, args=(by,), method="lanczos", steps=12)
    assert found.ceiling == 2**23
    assert found.why.count("split with the samples: args[0];") == 1


def test_inside_inference_mode() -> None:
    with torch.inference_mode():
        x, by = torch.randn(2, 4), torch.randn(2, 4)
        found = jacobian_spectrum(scaled, x, args=(by,))
    assert_close(found.values, by.double().abs().sort(descending=True).values)
