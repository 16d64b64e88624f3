"""Measure a timm model in a loop with accelerate: mixed precision, gradient accumulation, one process or many.

python examples/accelerate_loop.py --epochs 3 --output runs/accelerate
accelerate launch --num_processes 2 examples/accelerate_loop.py --mixed-precision bf16    # on two GPUs
torchrun --nproc-per-node 2 examples/accelerate_loop.py --cpu       # `accelerate launch` starts only one on a CPU
"""

import argparse
from pathlib import Path

import timm
import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import wellcond


def main(epochs: int, output: Path, mixed_precision: str, cpu: bool) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=2, cpu=cpu)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8)
    data = TensorDataset(images, torch.tensor(digits.target))
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=6, num_heads=4
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))

    show("before training", accelerator, model, images)
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        (output / "probe.jsonl").unlink(missing_ok=True)  # rows are added to a file that is there
    # The model that `prepare` gave back is the one that is called. Every process has a probe; the first one writes.
    # Whatever the mixed precision, it measures in float32, and on the samples of the first batch each time.
    probe = wellcond.Probe(model, every=10).to(output / "probe.jsonl")  # probe
    step = 0
    for epoch in range(epochs):
        model.train()
        with probe:  # probe
            for images_here, labels in loader:
                probe.step = step  # probe: an optimiser's step, of which only the first batch is measured
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(images_here), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                step += accelerator.sync_gradients
        accelerator.print(f"epoch {epoch}: last loss {loss.item():.3f}")
    show("after training", accelerator, model, images)
    accelerator.end_training()


def show(title: str, accelerator: Accelerator, model: torch.nn.Module, images: torch.Tensor) -> None:
    """Once, of these images; processes are merged, so that each has to take part."""
    with torch.no_grad(), wellcond.Probe(model.eval()) as probe:  # probe
        model(images[:64].to(accelerator.device))
    accelerator.print(f"\n{title}\n{probe.table()}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path())
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    main(**vars(parser.parse_args()))
