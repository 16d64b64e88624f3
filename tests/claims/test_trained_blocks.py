"""The matrices of trained blocks are those that the model computes with, and the committed file holds trained ones."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from wellcond import records
from wellcond.claims.trained_blocks import (
    BLOCKS,
    IMAGES,
    MODEL,
    Digits,
    blocks_of,
    load_digits,
    read_blocks,
    run,
    train,
)

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
    import timm

    with pytest.raises(ValueError, match="qkv_bias=False"):
        blocks_of(timm.create_model("vit_tiny_patch16_224", **MODEL), digits.test_images)


def test_what_is_written_is_read_back(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("wellcond.claims.trained_blocks.load_digits", lambda seed: digits)
    blocks = run(tmp_path / "new" / "blocks.safetensors", epochs=1)
    found = read_blocks(tmp_path / "new" / "blocks.safetensors")
    assert list(found) == list(BLOCKS)
    for index, block in blocks.items():
        assert all(torch.equal(value, vars(found[index])[name]) for name, value in vars(block).items())
    assert records.read_json(tmp_path / "new" / "blocks.json")["epochs"] == 1


def test_the_committed_blocks_are_trained_ones():
    record = records.read_json(EVIDENCE.with_suffix(".json"))
    assert record["accuracy"] > 0.9
    assert record["environment"]["commit"]
    with safe_open(EVIDENCE, framework="pt") as file:
        assert file.metadata()["model"] == record["model"]
    for block in read_blocks(EVIDENCE).values():
        assert block.x.shape == (IMAGES, 65, 64)
        assert block.w_q.shape == block.w_k.shape == block.w_v.shape == (4, 64, 16)
        assert all(value.isfinite().all() for value in vars(block).values())
        assert block.w_q.std() > 0.03  # 0.02 at the start
