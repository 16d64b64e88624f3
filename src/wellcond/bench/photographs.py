"""Real photographs for benchmarks: random crops of scikit-learn's two sample images, resized and normalised."""

import os
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["photographs", "write_photographs"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
DISTINCT = 64  # distinct photographs in a folder; the others repeat them


def photographs(count: int, size: int = 224, *, seed: int = 0) -> Tensor:
    """Return (count, 3, size, size) in float32, normalised as ImageNet is; the same for the same seed."""
    import numpy as np
    from sklearn.datasets import load_sample_images

    pictures = [
        torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 for image in load_sample_images().images
    ]
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    crops = []
    for index in range(count):
        picture = pictures[index % len(pictures)]
        side = size // 2 + below(min(picture.shape[1:]) - size // 2 + 1)
        top, left = below(picture.shape[1] - side + 1), below(picture.shape[2] - side + 1)
        crop = picture[None, :, top : top + side, left : left + side]
        crop = torch.nn.functional.interpolate(crop, size=(size, size), mode="bicubic", antialias=True)
        crops.append((crop * 255).round().clamp(0, 255) / 255)
    mean = torch.tensor(MEAN).view(3, 1, 1)
    std = torch.tensor(STD).view(3, 1, 1)
    return (torch.cat(crops) - mean) / std


def write_photographs(folder: Path, *, size: int, classes: int, each: int, seed: int = 0) -> None:
    """Write a folder for torchvision's ImageFolder: train/CLASS with `each` JPEGs, and val/CLASS with two."""
    import numpy as np
    from PIL import Image

    scale, shift = torch.tensor(STD).view(3, 1, 1), torch.tensor(MEAN).view(3, 1, 1)
    pixels = ((photographs(DISTINCT, size, seed=seed) * scale + shift) * 255).round().clamp(0, 255).byte()
    files = []
    for image in pixels:
        file = BytesIO()
        Image.fromarray(np.asarray(image.permute(1, 2, 0))).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    count, written = 0, dict[bytes, Path]()
    for split, number in (("train", each), ("val", 2)):
        for label in range(classes):
            place = folder / split / f"{label:04d}"
            place.mkdir(parents=True)
            for index in range(number):
                _write(place / f"{index:06d}.jpg", files[count % len(files)], written)
                count += 1


def _write(file: Path, content: bytes, written: dict[bytes, Path]) -> None:
    """Write a file, if possible as a hard link to one of the same content, which is many times faster."""
    try:
        os.link(written[content], file)
    except (KeyError, OSError):
        file.write_bytes(content)
        written.setdefault(content, file)
