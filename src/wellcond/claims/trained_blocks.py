"""Small real matrices of trained blocks: inputs and weights of the blocks of a ViT trained on scikit-learn's digits.

    python -m wellcond.claims.trained_blocks        # evidence/trained/digits-vit-{blocks,mlps}.safetensors and .json
    blocks_of(model, images)[2].x                   # the input of block 2's attention; .w_q, .w_k, .w_v, .w_o
    mlps_of(model, images)["blocks.2.w_up"]

Statements about attention are made about X, W_Q, W_K and W_V; random matrices obey many that trained ones violate. The
model has no biases in query, key and value, so that these matrices are everything; the biases of the MLPs are left out,
because the statements about MLPs have none. On one machine, with the same versions, the same seed gives the same files.
`wellcond.theory.trained` reads them.
"""

import argparse
import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from wellcond.models.build import create_model
from wellcond.records import write_record
from wellcond.train.computing import one_thread

__all__ = ["AttentionBlock", "Digits", "blocks_of", "inputs_of", "load_digits", "mlps_of", "run", "train"]

MODEL: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 1,
    "in_chans": 1,
    "embed_dim": 64,
    "depth": 6,
    "num_heads": 4,
    "num_classes": 10,
}
BLOCKS, IMAGES = (0, 2, 5), 8
EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 12, 32, 2e-3, 0.05
TEST = 297  # of the 1,797 images
OUTPUT = Path("evidence/trained")
SELF = "wellcond.claims.trained_blocks"  # as a command, __name__ is __main__


class Digits(NamedTuple):
    """Images (b, 1, 8, 8) and their digits, in two parts that share no image.

    They are scaled so that the training images have mean 0 and standard deviation 1."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionBlock:
    """Input and weights of one block's attention, with n tokens of width d and h heads: Q of head i is X W_Q[i]."""

    x: Tensor
    """The attention's normed input of some test images, (images, n, d)."""
    w_q: Tensor
    """(h, d, d/h), like the next two. Logits are Q Kᵀ/√(d/h)."""
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    """(d, d): the block adds to its tokens the heads' outputs, side by side, times W_O, plus b_o."""
    b_o: Tensor


def load_digits(seed: int) -> Digits:
    """Return scikit-learn's digits, split at random."""
    from sklearn import datasets

    pixels, targets = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    images, labels = torch.from_numpy(pixels).float()[order].reshape(-1, 1, 8, 8), torch.from_numpy(targets)[order]
    mean, std = images[TEST:].mean(), images[TEST:].std()
    images = (images - mean) / std
    return Digits(images[TEST:], labels[TEST:], images[:TEST], labels[:TEST])


def train(digits: Digits, *, epochs: int = EPOCHS, seed: int = 0) -> nn.Module:
    """Train a ViT of 65 tokens, one per pixel and the class token, with AdamW and a cosine that ends near zero."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create_model("vit_tiny_patch16_224", {"qkv_bias": False, **MODEL})
        with torch.no_grad():  # a token of one pixel says little: with timm's std of 0.02, positions are slow to learn
            model.get_parameter("pos_embed").normal_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        steps = -(-len(digits.labels) // BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=LEARNING_RATE, total_steps=epochs * steps, pct_start=0.1
        )
        for _ in track(range(epochs), "Training on the digits", console=Console(stderr=True), transient=True):
            for chosen in torch.randperm(len(digits.labels)).split(BATCH):
                loss = F.cross_entropy(model(digits.images[chosen]), digits.labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return (model(images).argmax(-1) == labels).float().mean().item()


@torch.no_grad()
def inputs_of(model: nn.Module, paths: Iterable[str], images: Tensor) -> dict[str, Tensor]:
    """Return copies of what the modules at these paths read when the model sees the images."""
    found: dict[str, Tensor] = {}

    def keep(path: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        found[path] = args[0].clone()

    with contextlib.ExitStack() as hooks:
        for path in paths:
            hook = model.get_submodule(path).register_forward_pre_hook(partial(keep, path))
            hooks.callback(hook.remove)
        model(images)
    return found


@torch.no_grad()
def blocks_of(model: nn.Module, images: Tensor) -> dict[int, AttentionBlock]:
    """Return the attention matrices of some blocks of a timm ViT. Raises ValueError if its qkv has biases."""
    found = {}
    inputs = inputs_of(model, [f"blocks.{index}.attn" for index in BLOCKS], images)
    for index, (path, x) in zip(BLOCKS, inputs.items(), strict=True):
        weights = dict(model.get_submodule(path).named_parameters())
        if "qkv.bias" in weights:
            raise ValueError("query, key and value have biases, which these matrices leave out: use qkv_bias=False")
        heads, width = MODEL["num_heads"], x.shape[-1]
        # timm packs query, key and value, and within each the heads, into the rows of one weight, used transposed
        query, key, value = weights["qkv.weight"].reshape(3, heads, width // heads, width).transpose(-1, -2).clone()
        w_o, b_o = weights["proj.weight"].T.clone(), weights["proj.bias"].clone()
        found[index] = AttentionBlock(x=x, w_q=query, w_k=key, w_v=value, w_o=w_o, b_o=b_o)
    return found


@torch.no_grad()
def mlps_of(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return `blocks.N.x_mlp` (images, n, d), `.w_up` (d, 4d) and `.w_down` (4d, d), which multiply from the right."""
    found: dict[str, Tensor] = {}
    inputs = inputs_of(model, [f"blocks.{index}.mlp" for index in BLOCKS], images)
    for index, (path, x) in zip(BLOCKS, inputs.items(), strict=True):
        found[f"blocks.{index}.x_mlp"] = x
        found[f"blocks.{index}.w_up"] = model.get_parameter(f"{path}.fc1.weight").T.contiguous()
        found[f"blocks.{index}.w_down"] = model.get_parameter(f"{path}.fc2.weight").T.contiguous()
    return found


def run(folder: str | os.PathLike[str] = OUTPUT, *, epochs: int = EPOCHS, seed: int = 0) -> nn.Module:
    """Train, and write the matrices of attention and of the MLPs, each with a JSON that says how they were made."""
    digits = load_digits(seed)
    model = train(digits, epochs=epochs, seed=seed)
    images = digits.test_images[:IMAGES]
    blocks = ", ".join(map(str, BLOCKS))
    attention = {
        f"blocks.{i}.{name}": value.contiguous()
        for i, block in blocks_of(model, images).items()
        for name, value in vars(block).items()
    }
    what = (
        f"blocks {blocks}: x, the attention's normed input of {IMAGES} test images (images, n, d); w_q, w_k, w_v "
        "(heads, d, d/heads), multiplied from the right; w_o (d, d) and b_o (d)"
    )
    measured = {
        "accuracy": accuracy(model, digits.test_images, digits.test_labels),
        "accuracy on the training images": accuracy(model, digits.images, digits.labels),
        "test images": len(digits.test_labels),
        "epochs": epochs,
    }
    _write(Path(folder) / "digits-vit-blocks.safetensors", attention, what, measured, seed)
    what = (
        f"blocks {blocks}: x_mlp, the MLP's normed input of {IMAGES} test images (images, n, d); w_up (d, 4d) and "
        "w_down (4d, d), multiplied from the right; no biases"
    )
    _write(Path(folder) / "digits-vit-mlps.safetensors", mlps_of(model, images), what, measured, seed)
    return model


def _write(path: Path, tensors: dict[str, Tensor], what: str, measured: dict[str, Any], seed: int) -> None:
    settings = ", ".join(f"{key}={value}" for key, value in MODEL.items())
    about = {
        "model": f"timm vit_tiny_patch16_224, qkv_bias=False, {settings}",
        "source": f"trained by {SELF}, {measured['epochs']} epochs, on 1,500 digits of scikit-learn",
        "what": what,
        "licence": "Apache-2.0; the images are scikit-learn's (BSD-3-Clause)",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={**about, "seed": str(seed)})
    write_record(path.with_suffix(".json"), {**about, **measured}, seed=seed)


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description="Train a small ViT on digits, and keep the matrices of its blocks.")
    _parser.add_argument("--output", type=Path, default=OUTPUT)
    _parser.add_argument("--epochs", type=int, default=EPOCHS)
    _parser.add_argument("--seed", type=int, default=0)
    _given = _parser.parse_args()
    run(_given.output, epochs=_given.epochs, seed=_given.seed)
