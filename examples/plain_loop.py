"""Measure a timm model while a plain PyTorch loop trains it on scikit-learn's digits.

python examples/plain_loop.py --epochs 3 --output runs/plain
"""

import argparse
from pathlib import Path

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import wellcond


def main(epochs: int, output: Path) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=6, num_heads=4
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    show("before training", model, images)
    # Attached to the training alone: what runs outside the `with` (an evaluation, say) is not measured.
    output.mkdir(parents=True, exist_ok=True)
    (output / "probe.jsonl").unlink(missing_ok=True)  # rows are added to a file that is there
    probe = wellcond.Probe(model, every=20).to(output / "probe.jsonl")  # probe
    for epoch in range(epochs):
        model.train()
        with probe:  # probe
            for batch in torch.randperm(len(images)).split(64):
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean()
        print(f"epoch {epoch}: accuracy {accuracy:.3f} on the images it was trained with")
    show("after training", model, images)


def show(title: str, model: torch.nn.Module, images: torch.Tensor) -> None:
    """Once, of these images: the probe takes a pass of its own, in full precision."""
    with torch.no_grad(), wellcond.Probe(model.eval()) as probe:  # probe
        model(images[:64])
    print(f"\n{title}\n{probe.table()}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path())
    main(**vars(parser.parse_args()))
