"""What `wellcond measure` writes to a folder: rows, possibly those of the untrained model, notes, and a page.

    measured = Measured.read(Path("measure-vit_tiny_patch16_224"))     # None for any other folder
    measured.page().write("report.html")                               # the page that `measure` wrote

`measure` and `report` share this module, so that a regenerated page is the same as the original.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond.records import CONFIG, Run, read_rows
from wellcond.records import PROBE as ROWS
from wellcond.records import REPORT as PAGE

from .page import Page
from .reference import Band, ReferenceModels, reference
from .run_page import conditioning_page

__all__ = ["CONFIG", "MARK", "PAGE", "ROWS", "UNTRAINED", "UNTRAINED_ROWS", "Measured", "measured_config"]

MARK = "wellcond measure"  # identifies such a folder in its config.json
UNTRAINED, UNTRAINED_ROWS = "untrained", "untrained.jsonl"

Row = Mapping[str, Any]


def measured_config(folder: Path) -> dict[str, Any] | None:
    """Return what `measure` recorded about a folder; None for any other folder."""
    try:
        about = Run.open(folder).about
    except (OSError, ValueError):
        return None
    return about if about.get("what") == MARK else None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one model."""

    model: str
    trained: bool
    rows: Iterable[Row]
    untrained: Iterable[Row] | None
    """Rows of the same architecture with random weights, if requested."""
    notes: list[str]
    """What readers must know, one sentence each."""
    why_random: str = ""
    """Why the weights are random, if they are and the reason is known."""
    shape: tuple[int, int] | None = None
    """Tokens and width of the blocks, if all have the same."""

    @classmethod
    def read(cls, folder: Path, read: Callable[[Path], list[dict[str, Any]]] = read_rows) -> "Measured | None":
        """Read `folder`; None if `measure` did not write it. `read` reads a file of rows."""
        config = measured_config(folder)
        if config is None:
            return None
        start = folder / UNTRAINED_ROWS
        return cls(
            model=str(config.get("model") or folder.resolve().name),
            trained=config.get("trained") is not False,
            rows=read(folder / ROWS),
            untrained=read(start) if start.is_file() else None,
            notes=list(map(str, config.get("notes") or ())),
            why_random=str(config.get("why_random") or ""),
            shape=tuple(config["shape"]) if config.get("shape") else None,
        )

    @property
    def title(self) -> str:
        return self.model if self.trained else f"{self.model}, untrained"

    @property
    def warning(self) -> str:
        """The warning above table and page; empty unless the weights are random."""
        if self.trained:
            return ""
        why = f" ({self.why_random})" if self.why_random else ""
        return (
            f"Random weights{why}: these numbers describe the model before training, not after it. "
            "--checkpoint FILE measures trained weights."
        )

    @property
    def like(self) -> ReferenceModels | None:
        """The models in our evidence whose token matrices are nearest in shape; None if no others are near, or if the
        blocks' shapes differ."""
        return reference().nearest(*self.shape) if self.shape else None

    @property
    def reference(self) -> dict[str, Mapping[str, Band]]:
        """Where those models lie, by site: trained, and also untrained if untrained weights are measured here."""
        if self.like is None:
            return {}
        shown = {"trained": self.like.trained}
        return shown if self.trained and self.untrained is None else {**shown, UNTRAINED: self.like.untrained}

    @property
    def about_reference(self) -> list[str]:
        if self.shape is None:
            return []
        text = self.like.beside(self.shape, self.reference) if self.like else reference().too_far(*self.shape)
        return [text] if text else []

    def page(self) -> Page:
        """Return the page. The untrained model comes first, since the other is compared with it."""
        runs = {self.model: self.rows} if self.untrained is None else {UNTRAINED: self.untrained, self.model: self.rows}
        them = self.like.them if self.like else ""
        return conditioning_page(
            runs,
            title=f"Conditioning of {self.title}",
            notes=[*self.about_reference, *self.notes],
            warning=self.warning,
            reference={f"{which} {them}": bands for which, bands in self.reference.items()},
        )
