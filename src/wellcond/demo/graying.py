"""A part of the demo: gray two photographs by both methods, and measure them.

    results = gray_photographs(load_photographs(), console)       # name → results of each method and epsilon
    measure(load_photographs()[0], "svd", 0.95).kappa             # one of them

The photographs come with scikit-learn, so nothing is downloaded. Everything runs on the CPU.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from wellcond.graying import METHODS, explain_graying, gray_tokens
from wellcond.numerics import measure_conditioning, singular_values
from wellcond.numerics.fused import tokens_of, untokens
from wellcond.progress import steps

__all__ = [
    "CURVE",
    "EPSILONS",
    "PATCH",
    "SIZE",
    "Grayed",
    "Photograph",
    "as_record",
    "explain_paths",
    "gray_photographs",
    "load_photographs",
    "measure",
    "shown",
    "terminal_table",
]

SIZE, PATCH = 224, 16
EPSILONS = (0.95, 0.7, 0.5)  # those with a row in the table
CURVE = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)  # the stops of the page's slider
# ImageNet's, which most timm models are trained with.
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


@dataclass(frozen=True, kw_only=True)
class Grayed:
    """Measurements of a photograph's tokens after graying, or before it with the method "none"."""

    method: str
    epsilon: float
    kappa: float
    log_kappa: float
    status: str
    change: float
    """‖X̃ − X‖/‖X‖ in the Frobenius norm."""
    spectrum: list[float] = field(repr=False)
    """Singular values, largest first."""
    pixels: np.ndarray = field(repr=False)
    """The tokens as a picture, (224, 224, 3) from 0 to 1; brightness and contrast of each channel as before."""


@dataclass(frozen=True, kw_only=True)
class Photograph:
    """A photograph as a model sees it."""

    name: str
    pixels: Tensor
    """(3, 224, 224), from 0 to 1."""

    @property
    def tokens(self) -> Tensor:
        """(196, 768): one row per patch."""
        return tokens_of(((self.pixels - MEAN) / STD)[None], PATCH, PATCH)[0]


def gray_photographs(photographs: Sequence[Photograph], console: Console) -> dict[str, list[Grayed]]:
    """Gray and measure every photograph by every method and epsilon; each list begins with the photograph as it is."""
    work = [(photo, method, epsilon) for photo in photographs for method, epsilon in _settings()]
    if not console.is_terminal:
        console.print(f"Graying {len(photographs)} photographs: {len(work)} measurements …", highlight=False)
    results: dict[str, list[Grayed]] = {photo.name: [] for photo in photographs}
    with steps(len(work), console, lines=False) as begin:
        for photo, method, epsilon in work:
            begin(f"graying {photo.name}")
            results[photo.name].append(measure(photo, method, epsilon))
    return results


def load_photographs() -> list[Photograph]:
    """Load scikit-learn's two sample photographs: their central squares, resized to 224 pixels."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    found = []
    for name in ("china", "flower"):
        image = Image.fromarray(load_sample_image(f"{name}.jpg"))
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
        found.append(Photograph(name=name, pixels=torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255))
    return found


def measure(photo: Photograph, method: str, epsilon: float) -> Grayed:
    """Gray the photograph's tokens ("none" leaves them as they are) and measure them."""
    before = photo.tokens
    after = before if method == "none" else gray_tokens(before, method, epsilon=epsilon)
    found = measure_conditioning(after)
    grayed = untokens(after[None], torch.Size((1, 3, SIZE, SIZE)), PATCH, PATCH)[0] * STD + MEAN
    return Grayed(
        method=method,
        epsilon=epsilon,
        kappa=found.kappa.item(),
        log_kappa=found.log_kappa.item(),
        status=found.status_names()[0],
        change=((after - before).norm() / before.norm()).item(),
        spectrum=singular_values(after).tolist(),
        pixels=_as_picture(_matched(grayed, photo.pixels)),
    )


def explain_paths() -> dict[str, tuple[str, str]]:
    """Return for each method the path that graying takes here, and why."""
    shape = ((SIZE // PATCH) ** 2, 3 * PATCH**2)
    return {m: explain_graying(m, shape, torch.float32, torch.device("cpu"), EPSILONS[0]) for m in METHODS}


def _settings() -> list[tuple[str, float]]:
    epsilons = sorted({*EPSILONS, *CURVE} - {1.0}, reverse=True)
    return [("none", 1.0), *((method, epsilon) for method in METHODS for epsilon in epsilons)]


def _matched(image: Tensor, like: Tensor) -> Tensor:
    """Return `image` with the brightness and contrast of `like`, channel by channel.

    Graying at a small epsilon goes far beyond the range of pixels; clipped there, it would be mostly black and white.
    """
    mean, std = image.mean((1, 2), keepdim=True), image.std((1, 2), keepdim=True)
    return (image - mean) / std.clamp_min(1e-6) * like.std((1, 2), keepdim=True) + like.mean((1, 2), keepdim=True)


def _as_picture(image: Tensor) -> np.ndarray:
    return image.clamp(0, 1).permute(1, 2, 0).numpy()


def as_record(results: dict[str, list[Grayed]]) -> dict[str, object]:
    measurements = []
    for name, found in results.items():
        for one in found:
            values = {k: v for k, v in asdict(one).items() if k != "pixels"}
            measurements.append({"photograph": name, **values})
    return {"image_size": SIZE, "patch_size": PATCH, "dtype": "float32", "measurements": measurements}


def terminal_table(results: dict[str, list[Grayed]]) -> Table:
    table = Table(title="Condition numbers of the tokens", title_justify="left", pad_edge=False)
    table.add_column("photograph")
    table.add_column("graying")
    for name in ("ε", "log κ", "κ", "κ(X)^ε", "change"):
        table.add_column(name, justify="right")
    for name, found in results.items():
        plain = found[0]
        for index, one in enumerate(shown(found)):
            predicted = f"{plain.kappa**one.epsilon:,.0f}" if one.method == "svd" else ""
            epsilon = "" if one.method == "none" else f"{one.epsilon:g}"
            change = "" if one.method == "none" else f"{one.change:.1%}"
            values = [epsilon, f"{one.log_kappa:.2f}", f"{one.kappa:,.0f}", predicted, change]
            last = index == len(shown(found)) - 1
            table.add_row("" if index else name, one.method, *values, end_section=last)
    return table


def shown(found: list[Grayed]) -> list[Grayed]:
    """Return those that have a row in the table."""
    return [one for one in found if one.method == "none" or one.epsilon in EPSILONS]
