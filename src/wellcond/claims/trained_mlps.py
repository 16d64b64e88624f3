"""The MLPs of the same small trained ViT whose attention `trained_blocks` keeps: their weights and normed inputs.

    python -m wellcond.claims.trained_mlps        # evidence/trained/digits-vit-mlps.safetensors, and a .json

Trains the model again, to the same bits on the same machine, since weights that nobody else needs are not kept. Biases
are left out: the statements about MLPs have none.
"""

import argparse
import contextlib
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from wellcond.claims.trained_blocks import BLOCKS, EPOCHS, IMAGES, MODEL, accuracy, load_digits, train
from wellcond.records import write_record

__all__ = ["mlps_of", "run"]

OUTPUT = Path("evidence/trained/digits-vit-mlps.safetensors")


@torch.no_grad()
def mlps_of(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """`blocks.N.x_mlp` (images, n, d), `.w_up` (d, 4d) and `.w_down` (4d, d), multiplied from the right."""
    found: dict[str, Tensor] = {}
    with contextlib.ExitStack() as hooks:
        for index in BLOCKS:
            mlp = model.get_submodule(f"blocks.{index}.mlp")

            def keep(_: nn.Module, args: tuple[Tensor, ...], index: int = index) -> None:
                found[f"blocks.{index}.x_mlp"] = args[0].clone()

            hooks.callback(mlp.register_forward_pre_hook(keep).remove)
            found[f"blocks.{index}.w_up"] = mlp.get_parameter("fc1.weight").T.contiguous()
            found[f"blocks.{index}.w_down"] = mlp.get_parameter("fc2.weight").T.contiguous()
        model(images)
    return found


def run(path: str | os.PathLike[str] = OUTPUT, *, epochs: int = EPOCHS, seed: int = 0) -> None:
    """Train, and write the matrices, with a JSON beside them that says how they came about."""
    digits = load_digits(seed)
    model = train(digits, epochs=epochs, seed=seed)
    settings = ", ".join(f"{key}={value}" for key, value in MODEL.items())
    about = {
        "model": f"timm vit_tiny_patch16_224, qkv_bias=False, {settings}",
        "source": f"trained by wellcond.claims.trained_blocks, {epochs} epochs, on 1,500 digits of scikit-learn",
        "what": (
            f"blocks {', '.join(map(str, BLOCKS))}: x_mlp, the MLP's normed input of {IMAGES} test images (images, "
            "n, d); "
            "w_up (d, 4d) and w_down (4d, d), multiplied from the right; no biases"
        ),
        "licence": "Apache-2.0; the images are scikit-learn's (BSD-3-Clause)",
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(mlps_of(model, digits.test_images[:IMAGES]), path, metadata={**about, "seed": str(seed)})
    measured = {"accuracy": accuracy(model, digits.test_images, digits.test_labels), "epochs": epochs}
    write_record(path.with_suffix(".json"), {**about, **measured}, seed=seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small ViT on digits, and keep the matrices of its MLPs.")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run(given.output, epochs=given.epochs, seed=given.seed)
