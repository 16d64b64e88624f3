"""Real pictures in small: crops of scikit-learn's two photographs, as class folders."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

MakeTree = Callable[..., Path]


@pytest.fixture(scope="session")
def photos() -> dict[str, Image.Image]:
    from sklearn.datasets import load_sample_image

    return {name: Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("china", "flower")}


@pytest.fixture
def make_tree(tmp_path: Path, photos: dict[str, Image.Image]) -> MakeTree:
    """A folder with train/ and val/ of the classes china and flower: crops of 40 × 32, each at another place."""

    def make(name: str = "photos", *, train: int = 6, val: int = 3, suffix: str = ".png") -> Path:
        root = tmp_path / name
        for split, count, top in (("train", train, 0), ("val", val, 200)):
            for label, photo in photos.items():
                (root / split / label).mkdir(parents=True)
                for index in range(count):
                    crop = photo.crop((20 * index, top, 20 * index + 40, top + 32))
                    crop.save(root / split / label / f"{index:03d}{suffix}")
        return root

    return make
