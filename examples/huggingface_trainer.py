"""Measure a Hugging Face ViT while their Trainer trains it on scikit-learn's digits.

python examples/huggingface_trainer.py --epochs 3 --output runs/trainer
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import wellcond
from wellcond.probe.transformers import ProbeCallback  # probe


class Digits(torch.utils.data.Dataset):
    def __init__(self):
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8)
        self.labels = torch.tensor(digits.target)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def main(epochs: int, output: Path) -> None:
    torch.manual_seed(0)
    data = Digits()
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=64, intermediate_size=256,
        num_hidden_layers=6, num_attention_heads=4,
    )  # fmt: skip
    model = ViTForImageClassification(config)

    show("before training", model, data.images)
    (output / "probe.jsonl").unlink(missing_ok=True)  # rows are added to a file that is there
    args = TrainingArguments(
        output_dir=str(output),
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data)
    # Told of its trainer, it also writes the mean log κ of each site and its worst block into the Trainer's logs.
    trainer.add_callback(ProbeCallback(every=20, trainer=trainer))  # probe: output_dir/probe.jsonl
    trainer.train()
    show("after training", model, data.images)


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
