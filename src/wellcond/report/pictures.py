"""Pictures in a page: arrays become images inside it, each with a name under which a reader can save it.

    grid = picture_grid([Picture(pixels, "the photograph", name="china"), …], columns=5, caption="What to see.")

Pixels are (height, width, 3) for colour or (height, width) for gray: floats from 0 to 1, or uint8.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .markup import Html, file_stem, tag

__all__ = ["Picture", "picture_grid"]


@dataclass(frozen=True)
class Picture:
    """One image with the line below it."""

    pixels: Any
    label: str
    name: str = field(kw_only=True)
    """The file's name without its ending, when a reader saves it."""
    alt: str = field(default="", kw_only=True)
    """What it shows, for those who cannot see it; by default the label."""
    exact: bool = field(default=False, kw_only=True)
    """PNG instead of JPEG, and sharp pixels when enlarged: for matrices."""
    grid: tuple[int, int] | None = field(default=None, kw_only=True)
    """Rows and columns of lines to lay over it."""

    def __html__(self) -> str:
        data, ending = _encode(self.pixels, exact=self.exact, name=self.name)
        height, width = np.shape(self.pixels)[:2]
        image = tag(
            "img",
            src=f"data:image/{ending};base64,{base64.b64encode(data).decode()}",
            alt=self.alt or self.label,
            width=str(width),
            height=str(height),
            class_="exact" if self.exact else None,
        )
        lines = tag("span", class_="lines", style=_lines(*self.grid)) if self.grid else None
        # The script gives the link its target: written here too, every image would stand in the page twice.
        file = f"{self.name}.{'jpg' if ending == 'jpeg' else ending}"
        link = tag("a", image, lines, download=file, title=f"Download {file}")
        return tag("div", link, tag("p", self.label), class_="picture")


def picture_grid(pictures: Sequence[Picture], *, title: str, columns: int | tuple[int, ...], caption: Any = "") -> Html:
    """Pictures side by side, `columns` of one width, or of these relative widths, and fewer on a phone."""
    if not pictures:
        raise ValueError(f"the figure {title!r} has no pictures; leave it out")
    widths = (1,) * columns if isinstance(columns, int) else columns
    if not widths or min(widths) < 1:
        raise ValueError(
            f"the figure {title!r} cannot have columns={columns}; give a number from 1, or a tuple of widths"
        )
    template = " ".join(f"minmax(0,{width}fr)" for width in widths)
    kind = "pictures" if isinstance(columns, int) else "pictures stacked"
    body = tag("div", list(pictures), class_=kind, style=f"--columns:{template}")
    head = tag("div", tag("h3", title), class_="figure-head")
    return tag("figure", head, body, tag("figcaption", caption) if caption else None, id=file_stem(title))


def _encode(pixels: Any, *, exact: bool, name: str) -> tuple[bytes, str]:
    from PIL import Image

    array = np.asarray(pixels)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3) or 0 in array.shape:
        raise ValueError(
            f"the picture {name!r} has shape {array.shape}; expected (height, width, 3) or (height, width)"
        )
    if array.dtype != np.uint8:
        if not np.issubdtype(array.dtype, np.floating):
            raise ValueError(f"the picture {name!r} is {array.dtype}; expected floats from 0 to 1, or uint8")
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise ValueError(
                f"the picture {name!r} has values outside 0…1, or NaN; scale or clip it first, and say so beside it"
            )
        array = np.round(array * 255).astype(np.uint8)
    file = io.BytesIO()
    if exact:
        Image.fromarray(array).save(file, format="PNG", optimize=True)
        return file.getvalue(), "png"
    Image.fromarray(array).save(file, format="JPEG", quality=92, subsampling=0)
    return file.getvalue(), "jpeg"


def _lines(rows: int, columns: int) -> str:
    return f"--rows:{rows};--cols:{columns}"
