"""What one measured pass has given: tensors, masks, attention, and what went wrong.

done = Pass(exact=True, samples=64)
done.remarks(missed, failed=False)              # what a reader of its numbers has to know
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from wellcond.probe.attention import Heard
from wellcond.probe.padding import Padding
from wellcond.probe.places import Place

__all__ = ["Pass"]


@dataclass
class Pass:
    exact: bool
    samples: int
    padding: Padding = field(default_factory=Padding)
    tensors: dict[Place, Tensor] = field(default_factory=dict)
    ends: dict[Place, Tensor] = field(default_factory=dict)
    """What blocks read and gave out, where the map between is asked for."""
    heard: dict[str, Heard] = field(default_factory=dict)
    unheard: dict[str, Exception] = field(default_factory=dict)
    error: Exception | None = None
    """What kept the pass from being measured at all."""
    errors: dict[Place, Exception] = field(default_factory=dict)
    """What kept single places from it."""
    low_precision: bool = False
    """Whether autocast computed in less than float32."""

    def remarks(self, missed: Iterable[Place], *, failed: bool) -> Iterator[str]:
        """In words; `missed` are the places that gave nothing, `failed` tells that this was said already."""
        if not failed:
            if self.errors:
                why = next(iter(self.errors.values()))
                yield f"{len(self.errors)} places could not be measured: {_some(self.errors)}: {why!r}"
            unreached = [place for place in missed if place not in self.errors]
            if unreached:
                yield f"{len(unreached)} places were not reached: {_some(unreached)}"
        for block, shape in list(self.padding.unread.items())[:1]:
            yield f"a mask {shape} of {block} does not tell padding apart: every token was measured"
        for block, error in self.unheard.items():
            yield f"the attention of {block} could not be overheard: {error!r}"
        low = sorted({str(tensor.dtype) for tensor in self.tensors.values() if tensor.dtype.itemsize < 4})
        if self.exact and low:
            yield f"the model computes in {', '.join(low)} by itself, in the exact pass too"


def _some(places: Iterable[Place]) -> str:
    names = [f"{place.site} of {place.block}" for place in places]
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
