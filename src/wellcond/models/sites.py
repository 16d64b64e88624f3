"""The sites of a model: its blocks, and where each of them has its `in`, `sa`, `+sa`, `mlp` and `+mlp`.

    print(wellcond.sites(timm.create_model("vit_base_patch16_224")))        # a table: blocks × sites
    for block in find_blocks(model):
        block.name, block.taps["sa"]                                        # 'blocks.0', Tap(path='drop_path1', …)

`in` is the input of the attention, `sa` its branch after LayerScale but before drop path and the residual add, `+sa`
the result of the add; likewise `mlp` and `+mlp`. `families` describes each class of blocks.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from wellcond.models.families.family import BlockKind, Tap, block_kind, register_blocks, unwrap
from wellcond.models.families.forwards import removed_skips
from wellcond.words import BLOCK_SITES

__all__ = [
    "Block",
    "Site",
    "SiteList",
    "Tap",
    "find_blocks",
    "register_blocks",
    "select_blocks",
    "sites",
]

# Wrappers around a single block (torch.compile, checkpointing, FSDP) appear in module paths, but not in our names.
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}

Which = None | str | int | Iterable[str | int]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of a model and the location of its sites."""

    name: str
    """The block's path inside `unwrap(model)`: "blocks.3", "layers.2.blocks.5"."""
    index: int
    """0, 1, 2, … across the whole model, in order of execution."""
    module: nn.Module
    taps: Mapping[str, Tap]
    """Site → where to read it; only the sites that this block has."""
    lacks: Mapping[str, str]
    """Site → why this block does not have it."""
    channels_first: bool = False
    """Whether 4-D tensors are (b, d, h, w), as in ConvMixer, rather than (b, h, w, d), as in Swin."""
    attention: str | None = None
    """The path of the attention module, relative to the block; None if there is none."""
    kind: BlockKind
    """The description of its class: its skips, the parameters that scale its branches, and so on."""


class Site(NamedTuple):
    """One place where the probe can measure."""

    block: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (the row's word; nobody searches a Site)
    site: str


class SiteList(list[Site]):
    """The sites of a model; prints as a table of blocks × sites."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks: list[Block] = list(blocks)
        super().__init__(Site(b.name, b.index, site) for b in self.blocks for site in BLOCK_SITES if site in b.taps)

    def __str__(self) -> str:
        width = max([len("block"), *(len(block.name) for block in self.blocks)])
        lines = [f"{'index':>5}  {'block':<{width}}  " + "  ".join(f"{site:^4}" for site in BLOCK_SITES)]
        for block in self.blocks:
            marks = "  ".join(f"{'x' if site in block.taps else '-':^4}" for site in BLOCK_SITES)
            lines.append(f"{block.index:>5}  {block.name:<{width}}  {marks}")
        notes: dict[tuple[str, str, str], int] = {}
        for block in self.blocks:
            for site, why in block.lacks.items():
                key = (type(block.module).__name__, site, why)
                notes[key] = notes.get(key, 0) + 1
        lines += [f"no {site} in {count} × {kind}: {why}" for (kind, site, why), count in notes.items()]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def sites(model: nn.Module) -> SiteList:
    """Return all places in `model` where the probe can measure, as (block, index, site); print the list to see a table.

    Raises ValueError for a model without known blocks; the message says how to register them.
    """
    return SiteList(find_blocks(model))


def find_blocks(model: nn.Module) -> list[Block]:
    """Return the blocks of the model inside its wrappers (DDP, torch.compile, EMA), in order of execution.

    Raises ValueError for a model without known blocks; the message says how to register them.
    """
    root = unwrap(model)
    modules = dict(root.named_modules())
    found: dict[str, BlockKind] = {}
    for path, module in modules.items():
        kind = block_kind(module)
        if kind is None or (kind.sits_at and path.rpartition(".")[2] != kind.sits_at):
            continue
        path = path.removesuffix(kind.sits_at).removesuffix(".") if kind.sits_at else path
        outer = next((name for name in found if name == "" or path.startswith(f"{name}.")), None)
        if outer is not None:
            raise ValueError(
                f"{path} ({type(module).__name__}) is a block inside the block {outer or 'that is the model itself'} "
                f"({type(modules[outer]).__name__}): register_blocks was told of both; a site can belong to one only"
            )
        found[path] = kind
    if not found:
        raise ValueError(_how_to_register(root))
    return [_block(_plain(path), index, modules[path], kind) for index, (path, kind) in enumerate(found.items())]


def select_blocks(blocks: list[Block], which: Which) -> list[Block]:
    """Return the blocks selected by `which`: an index, a name, an fnmatch pattern, several of these, or None for all.

    Raises ValueError, listing the blocks' names, if a name, index or pattern matches no block.
    """
    if which is None:
        return blocks
    chosen: set[int] = set()
    for wanted in which if isinstance(which, Iterable) and not isinstance(which, str) else [which]:
        if not isinstance(wanted, str | int) or isinstance(wanted, bool):
            raise ValueError(f"blocks are named by index, name or pattern, not by {wanted!r}")
        if isinstance(wanted, str):
            hits = {block.index for block in blocks if fnmatch.fnmatchcase(block.name, wanted)}
        else:
            hits = {range(len(blocks))[wanted]} if -len(blocks) <= wanted < len(blocks) else set()
        if not hits:
            names = [block.name for block in blocks]
            listed = ", ".join(names if len(names) <= 8 else [*names[:4], "…", *names[-2:]])
            raise ValueError(f"no block is called {wanted!r}; the model's {len(names)} blocks are {listed}")
        chosen |= hits
    if not chosen:
        raise ValueError("an empty list names no blocks; None stands for all of them")
    return [block for block in blocks if block.index in chosen]


def _block(name: str, index: int, module: nn.Module, kind: BlockKind) -> Block:
    for site, tap in kind.tap_of.items():
        try:
            module.get_submodule(tap.path)
        except AttributeError:
            raise ValueError(
                f"{type(module).__name__} has no module {tap.path}, where wellcond looks for its {site}; "
                "say where it is with wellcond.register_blocks"
            ) from None
    removed = {skip for skip, path in kind.skips.items() if skip in removed_skips(module.get_submodule(path))}
    taps = {site: kind.tap_of[site] for site in BLOCK_SITES if site in kind.tap_of}
    for skip in removed:  # without its skip, a branch is also the value after the add, and drop path no longer runs
        before = kind.tap_of.get(skip)
        taps[skip] = kind.tap_of[f"+{skip}"]
        for site, tap in taps.items():
            if before and before.end == "input" and (tap.path, tap.end) == (before.path, "input"):
                taps[site] = replace(tap, call=tap.call - (before.call < tap.call))
    return Block(
        name=name,
        index=index,
        module=module,
        taps=taps,
        lacks={s: kind.lacks.get(s, "it was registered without") for s in BLOCK_SITES if s not in taps},
        channels_first=kind.channels_first,
        attention=kind.attention,
        kind=kind,
    )


def _plain(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _how_to_register(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} has no blocks that wellcond knows. Say where its blocks keep their sites, e.g.\n"
        '    wellcond.register_blocks(MyBlock, attention="attn", taps={"in": "norm1:output", "sa": "attn:output",\n'
        '        "+sa": "norm2:input", "mlp": "mlp:output", "+mlp": ":output"})\n'
        'with the modules of MyBlock: "norm2:input" is the tensor that its norm2 reads, ":output" the block\'s own.'
    )
