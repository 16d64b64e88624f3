"""Blocks without a skip: for each class that adds one, a forward that can leave the add out.

    block.__class__ = skipless_class(type(block), frozenset({"sa"}))       # what remove_skip does
    removed_skips(block)                                                   # frozenset({'sa'})
    block.__class__ = plain_class(block)                                   # what restore_skip does

Each forward below is the family's own, with every add made by `_add`, which hands on the branch alone where the skip is
removed. Drop path goes with the skip: a branch that is all there is must not be dropped. LayerScale stays.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellcond.models.families import full_name

__all__ = ["Skipless", "forward_is_known", "plain_class", "removed_skips", "skipless_class"]

TIMM = "timm.models."
TORCHVISION = "torchvision.models."
HF = "transformers.models."

_skipless: dict[str, type["Skipless"]] = {}  # full name of a class that adds → what is mixed into it


class Skipless:
    """Mixed into the class of a module that adds skips: its forward, able to leave some of them out."""

    _plain_class: type
    _removed_skips: frozenset[str] = frozenset()
    _takes: tuple[str, ...] | None = None
    """The arguments of the forward it was written after, where other versions of the library return something else."""

    if TYPE_CHECKING:  # the modules and parameters of the class it is mixed into

        def __getattr__(self, name: str) -> Any: ...

    def _add(self, skip: str, x: Tensor, branch: Tensor, drop_path: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if skip in self._removed_skips:
            return branch
        return x + (branch if drop_path is None else drop_path(branch))

    def extra_repr(self) -> str:
        return f"without the skips: {', '.join(sorted(self._removed_skips))}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made on demand, so that pickle could not find it by name: it is made again from the plain one.
        if type(self) is not skipless_class(self._plain_class, self._removed_skips):
            return super().__reduce_ex__(protocol)  # someone subclassed it further, and knows better
        return _new_skipless, (self._plain_class, self._removed_skips), self.__getstate__()


def removed_skips(module: nn.Module) -> frozenset[str]:
    """The skips that this module, a block or a part of one, leaves out."""
    return module._removed_skips if isinstance(module, Skipless) else frozenset()


def plain_class(module: nn.Module) -> type:
    """The module's class with all its skips."""
    return module._plain_class if isinstance(module, Skipless) else type(module)


def forward_is_known(module: nn.Module) -> bool:
    """Whether a forward without skips was written for this module, and after the forward that it has now."""
    plain = plain_class(module)
    known = next((cls for cls in plain.__mro__ if full_name(cls) in _skipless), None)
    if known is None or plain.forward is not known.forward or "forward" in vars(module):
        return False
    takes = _skipless[full_name(known)]._takes
    return takes is None or takes == tuple(inspect.signature(known.forward).parameters)[1:]


@functools.cache
def skipless_class(plain: type[nn.Module], removed: frozenset[str]) -> type[nn.Module]:
    """`plain` without some of its skips; `plain` itself if none is removed."""
    if not removed:
        return plain
    mixin = next(_skipless[full_name(cls)] for cls in plain.__mro__ if full_name(cls) in _skipless)
    own = {"_plain_class": plain, "_removed_skips": removed, "__module__": __name__}
    return type(f"Skipless{plain.__name__}", (mixin, plain), own)


def _new_skipless(plain: type[nn.Module], removed: frozenset[str]) -> nn.Module:
    made = skipless_class(plain, removed)
    return made.__new__(made)


def _for(*names: str) -> Callable[[type[Skipless]], type[Skipless]]:
    def remember(mixin: type[Skipless]) -> type[Skipless]:
        _skipless.update(dict.fromkeys(names, mixin))
        return mixin

    return remember


# ---- torch


@_for("torch.nn.modules.transformer.TransformerEncoderLayer")
class _TorchEncoder(Skipless):
    _takes = ("src", "src_mask", "src_key_padding_mask", "is_causal")

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        y = self._sa_block(
            self.norm1(src) if self.norm_first else src, src_mask, src_key_padding_mask, is_causal=is_causal
        )
        x = self._add("sa", src, y)
        if self.norm_first:
            return self._add("mlp", x, self._ff_block(self.norm2(x)))
        x = self.norm1(x)
        return self.norm2(self._add("mlp", x, self._ff_block(x)))


# ---- timm


@_for(TIMM + "vision_transformer.Block", TIMM + "vision_transformer_relpos.RelPosBlock")
class _ViT(Skipless):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self._add("sa", x, self.ls1(self.attn(self.norm1(x), *args, **kwargs)), self.drop_path1)
        return self._add("mlp", x, self.ls2(self.mlp(self.norm2(x))), self.drop_path2)


@_for(
    TIMM + "vision_transformer.ResPostBlock",
    TIMM + "vision_transformer_relpos.ResPostRelPosBlock",
    TIMM + "eva.EvaBlockPostNorm",
)
class _PostNorm(Skipless):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self._add("sa", x, self.norm1(self.attn(x, *args, **kwargs)), self.drop_path1)
        return self._add("mlp", x, self.norm2(self.mlp(x)), self.drop_path2)


@_for(TIMM + "vision_transformer.ParallelThingsBlock")
class _ParallelThings(Skipless):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self._sum("sa", x, [(a, a.attn(a.norm(x), *args, **kwargs)) for a in self.attns])
        return self._sum("mlp", x, [(f, f.mlp(f.norm(x))) for f in self.ffns])

    def _sum(self, skip: str, x: Tensor, things: list[tuple[Any, Tensor]]) -> Tensor:
        branches = [thing.ls(y) for thing, y in things]
        if skip not in self._removed_skips:  # each thing is dropped on its own
            branches = [thing.drop_path(branch) for (thing, _), branch in zip(things, branches, strict=True)]
        return self._add(skip, x, torch.stack(branches).sum(dim=0))


@_for(TIMM + "eva.EvaBlock", TIMM + "beit.Block")
class _Gamma(Skipless):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.attn(self.norm1(x), *args, **kwargs)
        x = self._add("sa", x, y if self.gamma_1 is None else self.gamma_1 * y, self.drop_path1)
        y = self.mlp(self.norm2(x))
        return self._add("mlp", x, y if self.gamma_2 is None else self.gamma_2 * y, self.drop_path2)


@_for(TIMM + "swin_transformer.SwinTransformerBlock")
class _Swin(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        tokens = self._add("sa", x, self._attn(self.norm1(x)), self.drop_path1).flatten(1, 2)
        return self._add("mlp", tokens, self.mlp(self.norm2(tokens)), self.drop_path2).reshape(x.shape)


@_for(TIMM + "swin_transformer_v2.SwinTransformerV2Block")
class _SwinV2(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        tokens = self._add("sa", x, self.norm1(self._attn(x)), self.drop_path1).flatten(1, 2)
        return self._add("mlp", tokens, self.norm2(self.mlp(tokens)), self.drop_path2).reshape(x.shape)


@_for(TIMM + "cait.LayerScaleBlock")
class _CaiT(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        x = self._add("sa", x, self.gamma_1 * self.attn(self.norm1(x)), self.drop_path)
        return self._add("mlp", x, self.gamma_2 * self.mlp(self.norm2(x)), self.drop_path)


@_for(TIMM + "cait.LayerScaleBlockClassAttn")
class _CaiTClass(Skipless):
    def forward(self, x: Tensor, x_cls: Tensor) -> Tensor:
        attended = self.attn(self.norm1(torch.cat((x_cls, x), dim=1)))
        x_cls = self._add("sa", x_cls, self.gamma_1 * attended, self.drop_path)
        return self._add("mlp", x_cls, self.gamma_2 * self.mlp(self.norm2(x_cls)), self.drop_path)


@_for(TIMM + "pvt_v2.Block")
class _PVTv2(Skipless):
    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        x = self._add("sa", x, self.attn(self.norm1(x), feat_size), self.drop_path1)
        return self._add("mlp", x, self.mlp(self.norm2(x), feat_size), self.drop_path2)


@_for(TIMM + "convmixer.Residual")
class _ConvMixer(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        return self._add("sa", x, self.fn(x))


# ---- torchvision


@_for(TORCHVISION + "vision_transformer.EncoderBlock")
class _TorchvisionViT(Skipless):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torchvision's own name)
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self._add("sa", input, self.dropout(x))
        return self._add("mlp", x, self.mlp(self.ln_2(x)))


@_for(TORCHVISION + "swin_transformer.SwinTransformerBlock")
class _TorchvisionSwin(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        x = self._add("sa", x, self.attn(self.norm1(x)), self.stochastic_depth)
        return self._add("mlp", x, self.mlp(self.norm2(x)), self.stochastic_depth)


@_for(TORCHVISION + "swin_transformer.SwinTransformerBlockV2")
class _TorchvisionSwinV2(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        x = self._add("sa", x, self.norm1(self.attn(x)), self.stochastic_depth)
        return self._add("mlp", x, self.norm2(self.mlp(x)), self.stochastic_depth)


# ---- Hugging Face


@_for(
    HF + "vit.modeling_vit.ViTLayer", HF + "deit.modeling_deit.DeiTLayer", HF + "vit_mae.modeling_vit_mae.ViTMAELayer"
)
class _HfViT(Skipless):
    _takes = ("hidden_states", "attention_mask", "kwargs")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y, _ = self.attention(self.layernorm_before(hidden_states), *args, **kwargs)
        x = self._add("sa", hidden_states, self.dropout(y))
        return self._add("mlp", x, self.dropout(self.mlp(self.layernorm_after(x))))


@_for(
    HF + "dinov2.modeling_dinov2.Dinov2Layer",
    HF + "dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer",
)
class _HfDino(Skipless):
    _takes = ("hidden_states", "attention_mask", "kwargs")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y, _ = self.attention(self.norm1(hidden_states), *args, **kwargs)
        x = self._add("sa", hidden_states, self.layer_scale1(y), self.drop_path)
        return self._add("mlp", x, self.layer_scale2(self.mlp(self.norm2(x))), self.drop_path)


@_for(HF + "dinov3_vit.modeling_dinov3_vit.DINOv3ViTLayer")
class _HfDinoV3(_HfDino):
    _takes = ("hidden_states", "attention_mask", "position_embeddings", "kwargs")


@_for(HF + "clip.modeling_clip.CLIPEncoderLayer", HF + "siglip.modeling_siglip.SiglipEncoderLayer")
class _HfClip(Skipless):
    _takes = ("hidden_states", "attention_mask", "kwargs")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y, _ = self.self_attn(self.layer_norm1(hidden_states), *args, **kwargs)
        x = self._add("sa", hidden_states, y)
        return self._add("mlp", x, self.mlp(self.layer_norm2(x)))


@_for(HF + "distilbert.modeling_distilbert.TransformerBlock")
class _HfDistilBert(Skipless):
    _takes = ("hidden_states", "attention_mask", "kwargs")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y, _ = self.attention(hidden_states, *args, **kwargs)
        x = self.sa_layer_norm(self._add("sa", hidden_states, y))
        return self.output_layer_norm(self._add("mlp", x, self.ffn(x)))


BERTS = ("bert", "roberta", "xlm_roberta", "camembert", "electra")
BERT_CLASSES = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra")


class _HfBertOutput(Skipless):
    _skip: str

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self._add(self._skip, input_tensor, self.dropout(self.dense(hidden_states))))


@_for(*(f"{HF}{name}.modeling_{name}.{cls}SelfOutput" for name, cls in zip(BERTS, BERT_CLASSES, strict=True)))
class _HfBertSelfOutput(_HfBertOutput):
    _skip = "sa"


@_for(*(f"{HF}{name}.modeling_{name}.{cls}Output" for name, cls in zip(BERTS, BERT_CLASSES, strict=True)))
class _HfBertMlpOutput(_HfBertOutput):
    _skip = "mlp"
