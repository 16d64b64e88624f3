"""The matrices of trained blocks are those that the model computes with, and the committed file holds trained ones."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from torch.nn import functional as F

from wellcond import records
from wellcond.claims.trained_blocks import (
    BLOCKS,
    IMAGES,
    MODEL,
    Digits,
    blocks_of,
    load_digits,
    mlps_of,
    run,
    train,
)
from wellcond.theory.trained import read_blocks

EVIDENCE = Path(__file__).parents[2] / "evidence" / "trained" / "digits-vit-blocks.safetensors"


@pytest.fixture(scope="module")
def digits() -> Digits:
    found = load_digits(seed=0)
    return Digits(found.images[:64], found.labels[:64], found.test_images[:IMAGES], found.test_labels[:IMAGES])


def test_attention_of_the_matrices_is_the_models(digits):
    model = train(digits, epochs=1).double()
    outputs = {}
    for index in BLOCKS:
        model.blocks[index].attn.register_forward_hook(lambda _, __, out, i=index: outputs.update({i: out}))
    blocks = blocks_of(model, digits.test_images.double())
    for index, block in blocks.items():
        query, key, value = (block.x[:, None] @ w for w in (block.w_q, block.w_k, block.w_v))
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        by_hand = (weights @ value).transpose(1, 2).flatten(2) @ block.w_o + block.b_o
        torch.testing.assert_close(by_hand, outputs[index], rtol=1e-12, atol=1e-14)


def test_the_split_is_the_seeds_and_shares_no_image():
    one, again, other = load_digits(0), load_digits(0), load_digits(1)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one.labels, other.labels)
    assert len(one.labels) + len(one.test_labels) == 1797
    train_images = {image.numpy().tobytes() for image in one.images}
    assert not any(image.numpy().tobytes() in train_images for image in one.test_images)


def test_the_same_seed_gives_the_same_bits(digits):
    first, again = (train(digits, epochs=1, seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], train(digits, epochs=1, seed=4).state_dict()["head.weight"])


def test_biases_are_not_left_out_in_silence(digits):
    with pytest.raises(ValueError, match="qkv_bias=False"):
        blocks_of(timm.create_model("vit_tiny_patch16_224", **MODEL), digits.test_images)


def test_what_is_written_is_read_back(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("wellcond.claims.trained_blocks.load_digits", lambda seed: digits)
    model = run(tmp_path / "new", epochs=1)
    names = ("blocks", "mlps")
    found = read_blocks([tmp_path / "new" / f"digits-vit-{name}.safetensors" for name in names])
    blocks, mlps = blocks_of(model, digits.test_images), mlps_of(model, digits.test_images)
    assert [block.name for block in found] == [f"blocks.{index}" for index in BLOCKS]
    for index, block in zip(BLOCKS, found, strict=True):
        assert all(torch.equal(value, block.tensors[name]) for name, value in vars(blocks[index]).items())
        assert torch.equal(block.tensors["w_up"], mlps[f"blocks.{index}.w_up"])
    for name in names:
        record = records.read_json(tmp_path / "new" / f"digits-vit-{name}.json")
        assert record["epochs"] == 1
        assert record["source"].startswith("trained by wellcond.claims.trained_blocks, 1 epochs")


def test_the_committed_blocks_are_trained_ones():
    record = records.read_json(EVIDENCE.with_suffix(".json"))
    assert record["accuracy"] > 0.9
    assert record["environment"]["commit"]
    with safe_open(EVIDENCE, framework="pt") as file:
        assert file.metadata()["model"] == record["model"]
    for block in read_blocks([EVIDENCE]):
        found = block.tensors
        assert found["x"].shape == (IMAGES, 65, 64)
        assert found["w_q"].shape == found["w_k"].shape == found["w_v"].shape == (4, 64, 16)
        assert all(value.isfinite().all() for value in found.values())
        assert found["w_q"].std() > 0.03  # 0.02 at the start


def test_the_matrices_are_what_the_mlps_compute_with():
    model = timm.create_model("vit_tiny_patch16_224", qkv_bias=False, **MODEL).eval()
    images = torch.randn(2, 1, 8, 8)
    outputs = {}
    for index in BLOCKS:
        model.get_submodule(f"blocks.{index}.mlp").register_forward_hook(
            lambda _, args, output, index=index: outputs.update({index: output})
        )
    found = mlps_of(model, images)
    assert len(found) == 3 * len(BLOCKS)
    for index in BLOCKS:
        x, up, down = (found[f"blocks.{index}.{name}"] for name in ("x_mlp", "w_up", "w_down"))
        mlp = model.get_submodule(f"blocks.{index}.mlp")
        expected = F.gelu(x @ up + mlp.fc1.bias) @ down + mlp.fc2.bias
        torch.testing.assert_close(expected, outputs[index], atol=1e-6, rtol=1e-5)


def test_it_leaves_no_hook_behind():
    model = timm.create_model("vit_tiny_patch16_224", qkv_bias=False, **MODEL).eval()
    mlps_of(model, torch.randn(1, 1, 8, 8))
    assert not any(module._forward_pre_hooks for module in model.modules())
