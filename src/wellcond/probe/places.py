"""Choose which places of a model to measure, from patterns of sites and blocks, and where to capture each tensor.

wanted = choose(model, sites="*sa", blocks=["blocks.1?", 3])
wanted[0].place                     # Place(block='blocks.3', index=3, site='sa')
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from wellcond.models.families import find_projection, unwrap
from wellcond.models.sites import Block, Tap, Which, find_blocks, select_blocks
from wellcond.words import BLOCK_SITES, DEFAULT_SITES, ENDS, SITES, meant, our_word

__all__ = ["Place", "Wanted", "block_ends", "choose", "form_of"]


class Place(NamedTuple):
    """The place that a row describes, in its fields of the same names."""

    block: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    site: str


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One place to measure, and where to capture its tensor."""

    place: Place
    block: nn.Module
    """The module that runs once per pass; the tap is relative to it."""
    tap: Tap
    channels_first: bool = False
    attention: nn.Module | None = None


def choose(model: nn.Module, sites: str | Iterable[str] | None = None, blocks: Which = None) -> list[Wanted]:
    """Return the places in order of execution. ValueError if a pattern matches nothing, listing what there is."""
    found, known = find_blocks(model), SITES
    if sites is None:  # no family has all of them in every block: take those it has
        sites = [site for site in DEFAULT_SITES if any(site in block.taps for block in select_blocks(found, blocks))]
        sites = sites or DEFAULT_SITES  # if it has none, the error below says why
    patterns: list[str] = list(sites) if isinstance(sites, Iterable) and not isinstance(sites, str) else [sites]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"sites are names or patterns such as '*sa', got {sites!r}; the sites are {', '.join(known)}")
    if not patterns:
        raise ValueError(f"an empty list names no sites; the sites are {', '.join(known)}")
    patterns = [our_word(pattern) for pattern in patterns]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            near = meant(pattern, known)
            raise ValueError(f"there is no site {pattern!r}{near} (the sites are {', '.join(known)})")
    chosen = select_blocks(found, blocks)
    wanted = [want for want in _of_the_input(model, found[0]) if _any(want.place.site, patterns)]
    here = [site for site in BLOCK_SITES if _any(site, patterns)]
    wanted += [_at(block, site) for block in chosen for site in here if site in block.taps]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(want.place.site, pattern) for want in wanted):
            reasons = {
                why for block in chosen for site, why in block.lacks.items() if fnmatch.fnmatchcase(site, pattern)
            }
            there = sorted({site for block in chosen for site in block.taps})
            raise ValueError(
                f"none of the {len(chosen)} blocks has the site {pattern!r}"
                f"{': ' + '; '.join(sorted(reasons)) if reasons else ''}. What they have: {', '.join(there) or 'none'}"
            )
    return wanted


def block_ends(model: nn.Module, blocks: Which = None) -> list[Wanted]:
    """Return each block's input and output as places, for the linear map between them."""
    return [
        Wanted(
            place=Place(block.name, block.index, end),
            block=block.module,
            tap=Tap(path="", end=end),
            channels_first=block.channels_first,
        )
        for block in select_blocks(find_blocks(model), blocks)
        for end in ENDS
    ]


def form_of(wanted: Iterable[Wanted]) -> tuple[object, ...]:
    """Return what the blocks are made of: if surgery has changed that, the places must be chosen again."""
    blocks = {id(want.block): want.block for want in wanted}.values()
    return tuple((id(module), type(module)) for block in blocks for module in block.modules())


def _at(block: Block, site: str) -> Wanted:
    attends = site == "sa" and block.attention is not None
    return Wanted(
        place=Place(block.name, block.index, site),
        block=block.module,
        tap=block.taps[site],
        channels_first=block.channels_first,
        attention=block.module.get_submodule(block.attention or "") if attends else None,
    )


def _of_the_input(model: nn.Module, first: Block) -> list[Wanted]:
    """Return `tokens`, if the model reads patches through a known projection, and `embed`; their index is −1."""
    entry = Tap(path="", end="input")
    embed = Wanted(
        place=Place(first.name, -1, "embed"), block=first.module, tap=entry, channels_first=first.channels_first
    )
    try:
        _, projection = find_projection(model)
    except ValueError:
        return [embed]
    name = next(name for name, module in unwrap(model).named_modules() if module is projection)
    return [Wanted(place=Place(name, -1, "tokens"), block=projection, tap=entry), embed]


def _any(site: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(site, pattern) for pattern in patterns)
