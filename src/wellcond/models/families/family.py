"""The description of a model family, and the registry in which classes are looked up.

    find_projection(timm.create_model("vit_base_patch16_224"))   # PatchEmbed, Conv2d(3, 768, …): the first tokens
    block_kind(model.blocks[0]).tap_of["sa"]                     # Tap(path='drop_path1', end='input', call=0)
    skipless_forward(type(model.blocks[0]))                      # its forward without the skips
    attention_kind(model.blocks[0].attn).weights                 # where its q, k, v and output weights are
    register_family(MyViT, "stem.patchify", blocks=…, skipless=…, attention=…)        # add a family

Classes are registered by full name, and their subclasses are found as well. So no model library is imported needlessly,
and blocks are found anywhere: in timm's models, or in a model of your own built from timm's blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar, cast

from torch import nn

from wellcond.words import BLOCK_SITES, ENDS, SKIPS, End

if TYPE_CHECKING:
    from wellcond.models.families.forwards import Replaced, Skipless

__all__ = [
    "AttentionKind",
    "BlockKind",
    "Family",
    "PatchProjection",
    "Tap",
    "WeightPaths",
    "attention_kind",
    "block_kind",
    "by_hand",
    "class_names",
    "find_embedding",
    "find_projection",
    "full_name",
    "register",
    "register_blocks",
    "register_family",
    "replaced_forward",
    "skipless_forward",
    "unwrap",
    "usual_block",
]

Class = type[nn.Module] | str
Known = TypeVar("Known")


# ---- The description of a family


@dataclass(frozen=True, kw_only=True)
class PatchProjection:
    """Where a model turns images into its first tokens."""

    path: str
    """The path in the model of the `nn.Conv2d` that reads the image; its stride is the patch size."""
    embeddings: tuple[str, ...] = ()
    """The classes that may hold it: timm's HybridEmbed (a CNN stem) has such a convolution too, but on feature maps."""


@dataclass(frozen=True, kw_only=True)
class Tap:
    """Where a hook can read a tensor without changes to the model's code."""

    path: str
    """The module's path relative to the block; "" is the block itself."""
    end: End
    """Its first positional argument, or its output (the first element if that is a tuple)."""
    call: int = 0
    """Which call of the module within one forward of the block: CaiT calls its only drop path twice."""

    @classmethod
    def parse(cls, text: str) -> "Tap":
        """Parse `"drop_path:input:1"`, `"mlp:output"` or `":output"` (the block's own) into a Tap."""
        path, _, rest = text.partition(":")
        end, _, call = rest.partition(":")
        if end not in ENDS or not (call == "" or call.isdecimal()):
            raise ValueError(
                f'a tap is "module:input" or "module:output", with ":1" behind it for the second call of that module, '
                f'and ":output" is the block\'s own; not {text!r}'
            )
        return cls(path=path, end=cast(End, end), call=int(call or 0))


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """One class of blocks: its sites, its skips, the scales of its branches, and its attention module."""

    taps: Mapping[str, str | Tap]
    """Site → where to read it, as a Tap or as text: "norm2:input", ":output", "drop_path:input:1"."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Site → why this block does not have it."""
    skips: Mapping[str, str] = field(default_factory=dict)
    """Skip → the path of the module whose forward adds it; "" for the block itself."""
    why_no_skip: str = (
        "wellcond knows its sites, but not how to run it without a skip (register_family's skipless= teaches that)"
    )
    """Why a skip that is missing from `skips` cannot be removed."""
    scales: Mapping[str, str] = field(default_factory=dict)
    """Skip → the path of the parameter that scales its branch (LayerScale, or the norm at the end of the branch)."""
    attention: str | None = None
    """The path of the attention module."""
    output: str | None = None
    """The path of the attention's output projection, if it is not inside the attention module (BERT)."""
    channels_first: bool = False
    """Whether 4-D tensors are (b, d, h, w)."""
    sits_at: str = ""
    """The path within the block of the registered class: ConvMixer's block is a plain nn.Sequential around it."""
    variant: Callable[[nn.Module], "BlockKind"] | None = None
    """For a class whose sites depend on its arguments: a function that returns the kind of a given block."""
    tap_of: Mapping[str, Tap] = field(init=False, repr=False)
    """`taps`, parsed."""

    def __post_init__(self) -> None:
        if unknown := sorted({*self.taps, *self.lacks} - set(BLOCK_SITES)):
            raise ValueError(f"a block has no sites {unknown}; its sites are {', '.join(BLOCK_SITES)}")
        if unknown := sorted({*self.skips, *self.scales} - set(SKIPS)):
            raise ValueError(f"a block has no skips {unknown}; its skips are {', '.join(SKIPS)}")
        parsed = {site: Tap.parse(tap) if isinstance(tap, str) else tap for site, tap in self.taps.items()}
        object.__setattr__(self, "tap_of", parsed)


@dataclass(frozen=True, kw_only=True)
class WeightPaths:
    """Where an attention module keeps its weights.

    A path leads to a linear layer or a parameter (out, in). "qkv:0/3" is the first third of its rows, for layers that
    combine several projections.
    """

    query: str = "qkv:0/3"
    key: str = "qkv:1/3"
    value: str = "qkv:2/3"
    output: str = "proj"
    heads: str = "num_heads"
    """The attribute that holds the number of heads."""
    biases: Mapping[str, str | None] = field(default_factory=dict)
    """query, key, value or output → the path of its bias, if that is not next to the weight; None if there is no bias,
    or none that may be set (the keys of Swin V2 and BEiT)."""

    def __post_init__(self) -> None:
        for path in (self.query, self.key, self.value, self.output, *filter(None, self.biases.values())):
            _, colon, share = path.partition(":")
            part, _, of = share.partition("/")
            if colon and not (part.isdecimal() and of.isdecimal() and int(part) < int(of)):
                raise ValueError(f'a share of the rows is written "qkv:0/3", "qkv:1/3", "qkv:2/3"; not {path!r}')
        if unknown := sorted(self.biases.keys() - {"query", "key", "value", "output"}):
            raise ValueError(f"an attention has no bias of {unknown[0]}; biases are of query, key, value and output")


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """One class of attention modules."""

    weights: WeightPaths | Callable[[nn.Module], WeightPaths] | None = None
    """Where the q, k, v and output weights are, or a function that says so for one module; None if it has none."""
    replaced: "type[Replaced] | None" = None
    """Its forward with a replaceable attention."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything wellcond knows about a kind of model; each key is the full name of a class."""

    models: Mapping[str, PatchProjection] = field(default_factory=dict)
    """Model → where its first tokens come from, if they are image patches."""
    embeddings: Mapping[str, str] = field(default_factory=dict)
    """Model → where its first tokens come from, if they are words: the path of the module that returns the embedded
    sequences (b, n, d). Its first argument is the ids; `mask`, (b, n) bool or None, is False for padding."""
    inner: Mapping[str, str] = field(default_factory=dict)
    """Model that contains another model as a whole → the path of that model, which prefixes its weights' names."""
    blocks: Mapping[str, BlockKind] = field(default_factory=dict)
    """Block → its sites, skips and attention."""
    skipless: Mapping[str, "type[Skipless]"] = field(default_factory=dict)
    """Block, or the part of a block that adds a skip → its forward, which can leave the skip out."""
    attention: Mapping[str, AttentionKind] = field(default_factory=dict)
    """Attention module → its weights, and its forward with a replaceable attention."""


def usual_block(*taps: str, attention: str = "attn", scales: tuple[str, str] | None = None) -> BlockKind:
    """Return the kind of a block that has all five sites, in the order of BLOCK_SITES, and adds both skips itself."""
    return BlockKind(
        taps=dict(zip(BLOCK_SITES, taps, strict=True)),
        attention=attention,
        scales=dict(zip(SKIPS, scales, strict=True)) if scales else {},
        skips=dict.fromkeys(SKIPS, ""),
    )


# ---- Registration


_models: dict[str, PatchProjection] = {}
_embeddings: dict[str, str] = {}
_inner: dict[str, str] = {}
_blocks: dict[str, BlockKind] = {}
_skipless: "dict[str, type[Skipless]]" = {}
_attention: dict[str, AttentionKind] = {}


def register(family: Family) -> Family:
    """Register a family, replacing earlier entries for its classes, and return it."""
    _models.update(family.models)
    _embeddings.update(family.embeddings)
    _inner.update(family.inner)
    _blocks.update(family.blocks)
    _skipless.update(family.skipless)
    _attention.update(family.attention)
    return family


def register_family(
    model: Class,
    projection: str | None = None,
    *,
    embedding: str | None = None,
    blocks: Mapping[type[nn.Module], BlockKind] | Mapping[str, BlockKind] | None = None,
    skipless: "Mapping[type[nn.Module], type[Skipless]] | Mapping[str, type[Skipless]] | None" = None,
    attention: Mapping[type[nn.Module], AttentionKind] | Mapping[str, AttentionKind] | None = None,
) -> Family:
    """Teach wellcond a new family of models; docs/families.md has a complete example.

        wellcond.register_family(MyViT, "stem.patchify")                  # enough for gray

    Args:
        model: the model's class, or its full name. Subclasses belong to the family too.
        projection: the path to its patch projection: an `nn.Conv2d` that reads the image itself, and whose stride is
            the patch size. None for a model that does not read images.
        embedding: for a model that reads words, the path to the module that embeds them: called with ids (b, n) and
            with `mask`, (b, n) bool or None, it returns the tokens (b, n, d) for `gray` to gray.
        blocks: class of blocks → its sites, for `sites`, the probe and everything built on them.
        skipless: the class that adds the skips, usually that of the blocks → a `Skipless` with its forward, for
            `remove_skip`.
        attention: class of the attention module → where its weights are, for `attention_weights`, and a `Replaced` with
            its forward, for `replace_attention`.

    Raises ValueError for sites that do not exist, and TypeError for forwards that are not a `Skipless` or a `Replaced`.
    """
    from wellcond.models.families.forwards import Replaced, Skipless

    forwards = {_name(cls): forward for cls, forward in (skipless or {}).items()}
    kinds = {_name(cls): kind for cls, kind in (blocks or {}).items()}
    attentions = {_name(cls): kind for cls, kind in (attention or {}).items()}
    for name, forward in forwards.items():
        _check_forward(name, forward, Skipless, "add_skip")
        if name in kinds and not kinds[name].skips:
            kinds[name] = replace(kinds[name], skips=dict.fromkeys(SKIPS, ""))
    for name, kind in attentions.items():
        if kind.replaced is not None:
            _check_forward(name, kind.replaced, Replaced, "attend")
    for kind in kinds.values():
        if not kind.taps and kind.variant is None:
            raise ValueError('a block without taps has nothing to measure; give at least one, e.g. {"+mlp": ":output"}')
    models = {} if projection is None else {_name(model): PatchProjection(path=projection)}
    embeddings = {} if embedding is None else {_name(model): embedding}
    if models and embeddings:
        raise ValueError(f"{_name(model)} has a projection of images or an embedding of words as its start; give one")
    if not (models or embeddings or kinds or forwards or attentions):
        raise ValueError(
            f"nothing is said about {_name(model)}: give its projection or embedding, blocks, skipless or attention"
        )
    return register(Family(models=models, embeddings=embeddings, blocks=kinds, skipless=forwards, attention=attentions))


def register_blocks(
    block_class: Class,
    *,
    taps: Mapping[str, str | Tap],
    attention: str | None = None,
    channels_first: bool = False,
    lacks: Mapping[str, str] | None = None,
) -> None:
    """Teach `sites` and the probe where a class of blocks, given as a class or its full name, has its sites.

    A tap is "module:input" or "module:output", with the module's path relative to the block; ":output" is the block's
    own output, and "drop_path:input:1" the second call of that module in one forward. Sites that are left out are not
    measured, and `lacks` may say why. `attention` is the path of the attention module. The probe reads padding from the
    block's arguments with "mask" or "valid" in their names: True or 1 is a token that counts, unless the name contains
    "padding"; docs/families.md has the details. `register_family` can do all this and more.

        wellcond.register_blocks(MyBlock, attention="attn", taps={
            "in": "norm1:output", "sa": "attn:output", "+sa": "norm2:input", "mlp": "mlp:output", "+mlp": ":output"})
    """
    kind = BlockKind(taps=dict(taps), lacks=dict(lacks or {}), attention=attention, channels_first=channels_first)
    register_family(block_class, blocks={_name(block_class): kind})


def _check_forward(name: str, forward: object, base: type, method: str) -> None:
    if not (isinstance(forward, type) and issubclass(forward, base)):
        raise TypeError(
            f"the forward of {name} is a class that derives from wellcond.models.{base.__name__}, with a forward that "
            f"calls self.{method}; not {forward!r}"
        )


# ---- Lookup


def block_kind(module: nn.Module) -> BlockKind | None:
    """Return the kind of a block, looked up by its class and base classes; None if it is not a known block."""
    kind = _nearest(_blocks, type(module))
    return kind.variant(module) if kind is not None and kind.variant is not None else kind


def attention_kind(module: nn.Module) -> AttentionKind | None:
    """Return the kind of an attention module; None if its class is not known."""
    return _nearest(_attention, type(module))


def skipless_forward(plain: type) -> "tuple[type, type[Skipless]] | None":
    """Return the first class in the MRO of `plain` with a registered forward without skips, and that forward."""
    return next(((cls, _skipless[full_name(cls)]) for cls in plain.__mro__ if full_name(cls) in _skipless), None)


def replaced_forward(plain: type) -> "tuple[type, type[Replaced]] | None":
    """Return the first class in the MRO of `plain` whose attention can be replaced, and the forward for it."""
    kinds = ((cls, _attention.get(full_name(cls))) for cls in plain.__mro__)
    return next(((cls, kind.replaced) for cls, kind in kinds if kind is not None and kind.replaced is not None), None)


def find_projection(model: nn.Module) -> tuple[nn.Module, nn.Conv2d]:
    """Return the module that holds the patch projection, and the projection itself.

    Raises ValueError for an unknown family; the message says what to do.
    """
    root = unwrap(model)
    for name in class_names(root):
        if name in _inner and hasattr(root, _inner[name]):
            return find_projection(getattr(root, _inner[name]))
        if name in _models:
            return _resolve(root, _models[name])
    inner = next((path for path, child in root.named_modules() if path and _is_known(child)), None)
    if inner is None and _reads_words(root):
        name = type(root).__name__
        raise ValueError(
            f"cannot gray {name}: it reads words, and which of its modules embeds them is not known. If one takes ids "
            f'and their mask, name it: wellcond.register_family({name}, embedding="embed")'
        )
    if inner is None:
        raise ValueError(by_hand(root, "its family is not known (wellcond.register_family teaches one more)"))
    raise ValueError(
        f"cannot gray {type(root).__name__} as a whole, but it holds a {type(root.get_submodule(inner)).__name__}: "
        f'gray that, e.g. wellcond.gray(model.get_submodule("{inner}"), "dct")'
    )


def _reads_words(model: nn.Module) -> bool:
    kinds = [type(module) for module in model.modules()]
    return nn.Embedding in kinds and nn.Conv2d not in kinds


def find_embedding(model: nn.Module) -> nn.Module | None:
    """Return the module that embeds the words of a model that reads words; None if none is known."""
    root = unwrap(model)
    path = next((_embeddings[name] for name in class_names(root) if name in _embeddings), None)
    if path is None:
        return None
    try:
        return root.get_submodule(path)
    except AttributeError:
        raise ValueError(by_hand(root, f"it has no embedding at {path}")) from None


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers without weights: DistributedDataParallel, DataParallel, torch.compile, EMA."""
    while not _is_known(model):
        children = dict(model.named_children())
        only_child = children.get("module") if len(children) == 1 else None
        if next(model.parameters(recurse=False), None) is not None:
            only_child = None  # it has weights of its own: a model, not a wrapper
        inner = children.get("_orig_mod", only_child)
        if inner is None:
            break
        model = inner
    return model


def by_hand(model: nn.Module, why: str) -> str:
    """Return the error message for a model that cannot be grayed: why, and two lines of code to gray its images."""
    return (
        f"cannot gray {type(model).__name__}: {why}. Gray its images by hand instead, with its own patch size:\n"
        '    graying = wellcond.TokenGraying("dct", 0.95, patch_size=16)\n'
        "    model = nn.Sequential(graying, model)"
    )


def _resolve(root: nn.Module, where: PatchProjection) -> tuple[nn.Module, nn.Conv2d]:
    holder_path, _, _ = where.path.rpartition(".")
    try:
        holder, projection = root.get_submodule(holder_path), root.get_submodule(where.path)
    except AttributeError:
        raise ValueError(by_hand(root, f"it has no patch projection at {where.path}")) from None
    if where.embeddings and not set(where.embeddings) & set(class_names(holder)):
        what = f"its {holder_path} is a {type(holder).__name__}, which does not read patches of the image"
        raise ValueError(by_hand(root, what))
    if not isinstance(projection, nn.Conv2d):
        what = f"its {where.path} is a {type(projection).__name__}, not a convolution of patches"
        raise ValueError(by_hand(root, what))
    return holder, projection


def _is_known(model: nn.Module) -> bool:
    return any(name in _models or name in _inner or name in _embeddings for name in class_names(model))


def _nearest(known: Mapping[str, Known], cls: type) -> Known | None:
    return next((known[name] for name in map(full_name, cls.__mro__) if name in known), None)


def class_names(model: nn.Module) -> list[str]:
    """Return the full names of the model's class and all its base classes, in MRO order."""
    return [full_name(cls) for cls in type(model).__mro__]


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _name(cls: Class) -> str:
    return cls if isinstance(cls, str) else full_name(cls)
