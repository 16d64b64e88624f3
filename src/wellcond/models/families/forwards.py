"""Forwards that surgery mixes into a module's class: one can leave out skips, the other uses another attention.

    class SkiplessMyBlock(Skipless):                        # the block's own forward, with every add in `add_skip`
        def forward(self, x):
            x = self.add_skip("sa", x, self.attn(self.norm1(x)), self.drop_path1)
            return self.add_skip("mlp", x, self.mlp(self.norm2(x)), self.drop_path2)

    class ReplacedMyAttention(Replaced):                    # the module's own forward, around `attend`
        def forward(self, x):
            return self.proj(self.attend(*split_qkv(self.qkv(x), self.num_heads)))

    block.__class__ = skipless_class(type(block), frozenset({"sa"}))                          # what remove_skip does
    block.attn.__class__, block.attn.attention_core = replaced_class(type(block.attn)), core  # and replace_attention

A family says which forwards belong to which of its classes. The combined classes are created on demand (`mixed`), one
per plain class and set of removed skips, and deepcopy and pickle can recreate them.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from wellcond.attention import AttentionCore
from wellcond.models.families.family import replaced_forward, skipless_forward

__all__ = [
    "MixedIn",
    "Replaced",
    "Skipless",
    "forward_is_known",
    "is_mixed",
    "mixed",
    "plain_attention_class",
    "plain_class",
    "removed_skips",
    "replaced_class",
    "skipless_class",
    "split_heads",
    "split_qkv",
]


class MixedIn:
    """Base of the mixins: pickle could not find a class by name that is created on demand, so it makes it again."""

    _plain_class: type
    _made_of: tuple[Any, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_mixed(type(self)):
            return super().__reduce_ex__(protocol)  # a subclass of one, by fully_shard: left to its own pickling
        return _new, type(self)._made_of, self.__getstate__()  # pyright: ignore[reportAttributeAccessIssue]


def mixed(word: str, mixin: type[MixedIn], plain: type, removed: frozenset[str] = frozenset()) -> Any:
    """Return the class `plain` with a mixin before it, named after `word`; `removed` is for `Skipless`."""
    return _mixed(word, mixin, plain, removed)


def is_mixed(cls: type) -> bool:
    """Whether this class was made by `mixed`, and is no subclass of such a one."""
    return "_made_of" in vars(cls)


@functools.cache
def _mixed(word: str, mixin: type[MixedIn], plain: type, removed: frozenset[str]) -> Any:
    own = {"_plain_class": plain, "_removed_skips": removed, "_made_of": (word, mixin, plain, removed)}
    return type(f"{word}{plain.__name__}", (mixin, plain), {**own, "__module__": __name__})


def _new(*made_of: Any) -> Any:
    made = _mixed(*made_of)
    return made.__new__(made)


# ---- Without a skip


class Skipless(MixedIn):
    """Mixin for the class of a module that adds skips: its forward, which can leave some of them out.

    Drop path goes with the skip, because a branch without a skip must not be dropped. LayerScale stays.
    """

    _removed_skips: frozenset[str] = frozenset()
    _takes: tuple[str, ...] | None = None
    """The arguments of the forward that it reproduces, if that of other library versions returns something else."""

    if TYPE_CHECKING:  # the modules and parameters of the class it is mixed into

        def __getattr__(self, name: str) -> Any: ...

    def add_skip(
        self, skip: str, x: Tensor, branch: Tensor, drop_path: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return x + drop_path(branch), or only the branch if the skip ("sa" or "mlp") is removed."""
        if skip in self._removed_skips:
            return branch
        return x + (branch if drop_path is None else drop_path(branch))

    def extra_repr(self) -> str:
        """Show the removed skips in `print(model)`."""
        return f"without the skips: {', '.join(sorted(self._removed_skips))}"


def removed_skips(module: nn.Module) -> frozenset[str]:
    """Return the skips that this module, a block or a part of one, leaves out."""
    return module._removed_skips if isinstance(module, Skipless) else frozenset()


def plain_class(module: nn.Module) -> type:
    """Return the module's class with all its skips."""
    return module._plain_class if isinstance(module, Skipless) else type(module)


def forward_is_known(module: nn.Module) -> bool:
    """Whether there is a forward without skips for this module, and it reproduces the module's current forward."""
    plain = plain_class(module)
    found = skipless_forward(plain)
    if found is None or plain.forward is not found[0].forward or "forward" in vars(module):
        return False
    known, mixin = found
    return mixin._takes is None or mixin._takes == tuple(inspect.signature(known.forward).parameters)[1:]


def skipless_class(plain: type[nn.Module], removed: frozenset[str]) -> type[nn.Module]:
    """Return `plain` without some of its skips; `plain` itself if none is removed."""
    if not removed:
        return plain
    found = skipless_forward(plain)
    assert found is not None
    return mixed("Skipless", found[1], plain, removed)


# ---- With another attention


class Replaced(MixedIn):
    """Mixin for the class of an attention module: its forward (projections, norms, rotations, biases), but with another
    attention.

    Parts of the plain forward that another attention cannot use are named in `drops`, or refused.
    """

    _has_forward: ClassVar[bool] = True
    """Whether it brings a forward, so that the plain class must have exactly the forward that it reproduces."""
    drops: ClassVar[str] = ""
    """The parts of the plain forward that no other attention can use."""
    attention_core: AttentionCore

    if TYPE_CHECKING:  # the modules and parameters of the class it is mixed into

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def refuses(cls, module: Any, core: AttentionCore, model: nn.Module) -> str:
        """Return why this module of the model cannot use the attention `core`; "" if it can."""
        return ""

    @classmethod
    def weight_dropout(cls, module: Any) -> float:
        """Return the rate at which the plain module drops attention weights."""
        return getattr(getattr(module, "attn_drop", None), "p", 0.0)

    @classmethod
    def after_swap(cls, modules: Iterable[nn.Module], model: nn.Module) -> None:
        """Hook called after surgery with the modules of the model that got this class, or their plain class back."""

    def is_asked(self) -> bool:
        """Whether `attention_core` is in use; a library may have switched to another attention since."""
        return True

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        bias: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Run the attention, (b, heads, n, p) → (b, n, heads · p). `bias` (…, n, m) is added to the scores; pairs for
        which `keep` is False are masked (only with a bias)."""
        dropout = self.weight_dropout(self) if self.training and self.attention_core.drops_weights else 0.0
        if bias is None:
            out = self.attention_core(q, k, v, attn_mask, dropout, is_causal)
        else:
            out = self.attention_core.with_bias(q, k, v, bias, keep, dropout)
        return out.transpose(1, 2).flatten(2)


def plain_attention_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class with its own attention."""
    return module._plain_class if isinstance(module, Replaced) else type(module)


def replaced_class(plain: type[nn.Module]) -> type[nn.Module] | None:
    """Return `plain` with a replaceable attention; None if no forward is known for it, or only one it overrides."""
    found = replaced_forward(plain)
    if found is None:
        return None
    known, mixin = found
    if mixin._has_forward and plain.forward is not known.forward:
        return None
    return mixed("Replaced", mixin, plain)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, n, heads · p) → (b, heads, n, p)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def split_qkv(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """(b, n, 3 · heads · p) → three of (b, heads, n, p)."""
    return x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
