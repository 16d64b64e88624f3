"""Measure a timm model while Lightning trains it on scikit-learn's digits.

python examples/lightning_fit.py --epochs 3 --output runs/lightning
"""

import argparse
from pathlib import Path

import lightning
import timm
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import wellcond
from wellcond.probe.lightning import ProbeCallback  # probe


class Classifier(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(epochs: int, output: Path) -> None:
    lightning.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8)
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=64, shuffle=True)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=6, num_heads=4
    )

    show("before training", model, images)
    (output / "probe.jsonl").unlink(missing_ok=True)  # rows are added to a file that is there
    # The logger gets the mean log κ of each site and its worst block; the file, by default in the log folder, has all.
    probe = ProbeCallback(every=20, path=output / "probe.jsonl")  # probe
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(output, name="logs"),
        default_root_dir=output,
        enable_checkpointing=False,
        callbacks=[probe],  # probe
    )
    trainer.fit(Classifier(model), loader)
    show("after training", model, images)


def show(title: str, model: torch.nn.Module, images: torch.Tensor) -> None:
    """Once, of these images: the probe takes a pass of its own, in full precision."""
    with torch.no_grad(), wellcond.Probe(model.eval()) as probe:  # probe
        model(images[:64])
    model.train()  # Lightning trains a model in the mode in which it finds it
    print(f"\n{title}\n{probe.table()}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path())
    main(**vars(parser.parse_args()))
