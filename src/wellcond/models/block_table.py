"""The table of transformer blocks: where each class keeps its sites, its skips and its LayerScale.

    row = row_of(model.blocks[0])                # None for a module that is no known block
    row.taps["sa"]                               # Tap(path='drop_path1', end='input', call=0)
    register_blocks(MyBlock, taps={"sa": "attn:output", "+sa": "norm2:input"})      # teach one more class

A block is known by the name of its class or of a class it derives from, so that no model library is imported for
another one's model, and blocks are found wherever they sit: in timm's models, or in one of your own built of them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from torch import nn

from wellcond.models.families import class_names, full_name
from wellcond.words import BLOCK_SITES, SKIPS

__all__ = ["BLOCK_SITES", "BlockRow", "Tap", "register_blocks", "row_of"]


@dataclass(frozen=True, kw_only=True)
class Tap:
    """Where one tensor can be had without touching the model's code."""

    path: str
    """The module, relative to the block; "" is the block itself."""
    end: Literal["input", "output"]
    """Its first positional argument, or its output (the first element if that is a tuple)."""
    call: int = 0
    """Which call of that module within one forward of the block: CaiT calls its one drop path twice."""


@dataclass(frozen=True, kw_only=True)
class BlockRow:
    """One row: what is known about a class of blocks."""

    taps: Mapping[str, Tap]
    """Site → where to have it."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Site → why this block has none."""
    skips: Mapping[str, str] = field(default_factory=dict)
    """Skip → the path of the module whose forward adds it, "" for the block itself."""
    why_no_skip: str = "wellcond knows its sites, but not how to run it without a skip"
    """Why a skip that is not among `skips` cannot be removed."""
    scales: Mapping[str, str] = field(default_factory=dict)
    """Skip → the path of the parameter that scales its branch (LayerScale, or the norm at the end of the branch)."""
    attention: str | None = None
    """The path of the module that attends."""
    channels_first: bool = False
    """Whether 4-D tensors are (b, d, h, w)."""
    sits_at: str = ""
    """Where in the block the class of this row sits: ConvMixer's block is a plain nn.Sequential around it."""
    variant: Callable[[nn.Module], "BlockRow"] | None = None
    """For a class whose sites depend on how it was built: the row of one block."""


def _tap(text: str) -> Tap:
    """`"drop_path:input:1"`, `"mlp:output"`, `":output"` (the block's own) as a Tap."""
    path, _, rest = text.partition(":")
    end, _, call = rest.partition(":")
    if end not in ("input", "output") or not (call == "" or call.isdecimal()):
        raise ValueError(
            f'a tap is "module:input" or "module:output", with ":1" behind it for the second call of that module, and '
            f'":output" is the block\'s own; not {text!r}'
        )
    return Tap(path=path, end=cast(Literal["input", "output"], end), call=int(call or 0))


def _row(*taps: str, attention: str = "attn", scales: tuple[str, str] | None = None, **more: object) -> BlockRow:
    """A row with all five sites, in the order of BLOCK_SITES, of a block that adds both skips itself."""
    return BlockRow(
        taps={site: _tap(tap) for site, tap in zip(BLOCK_SITES, taps, strict=True)},
        attention=attention,
        scales=dict(zip(SKIPS, scales, strict=True)) if scales else {},
        **{"skips": {"sa": "", "mlp": ""}, **more},  # pyright: ignore[reportArgumentType]
    )


def _parallel_scaling(block: nn.Module) -> BlockRow:
    """Attention and MLP side by side: their own outputs exist only where nothing joins or scales them first."""
    one_skip = "a parallel block has one skip, around attention and MLP together"
    taps = {"in": _tap("in_norm:output"), "+mlp": _tap(":output")}
    lacks = {"+sa": one_skip}
    if not isinstance(getattr(block, "attn_out_proj", None), nn.Module):
        lacks |= dict.fromkeys(SKIPS, "one projection makes the outputs of attention and MLP together")
    elif not isinstance(block.get_submodule("ls"), nn.Identity):
        lacks |= dict.fromkeys(SKIPS, "LayerScale comes after the sum of attention and MLP")
    else:
        taps |= {"sa": _tap("attn_out_proj:output"), "mlp": _tap("mlp_out_proj:output")}
    return BlockRow(taps=taps, lacks=lacks, why_no_skip=one_skip)


def _hf_vit(block: nn.Module) -> BlockRow:
    return HF_VIT_4 if hasattr(block, "intermediate") else HF_VIT  # transformers 4 names the parts as in BERT


def _bert(block: nn.Module) -> BlockRow:
    if not getattr(block, "chunk_size_feed_forward", 0):
        return BERT
    chunked = "chunk_size_feed_forward cuts the MLP into pieces; set it to 0 to measure"
    taps = {site: tap for site, tap in BERT.taps.items() if site not in ("mlp", "+mlp")}
    return dataclasses.replace(BERT, taps=taps, lacks={"mlp": chunked, "+mlp": chunked})


def _torch_encoder(block: nn.Module) -> BlockRow:
    if not getattr(block.get_submodule("self_attn"), "batch_first", True):
        why = "batch_first=False keeps tokens as (n, b, d), where samples cannot be told apart; build it with True"
        return BlockRow(taps={}, lacks=dict.fromkeys(BLOCK_SITES, why))
    return TORCH_PRE_NORM if getattr(block, "norm_first", False) else TORCH_POST_NORM


LS = ("ls1.gamma", "ls2.gamma")
GAMMA = ("gamma_1", "gamma_2")
NORMS = ("norm1.weight", "norm2.weight")
HF_LS = ("layer_scale1.lambda1", "layer_scale2.lambda1")
# Drop path comes last in a branch, so that its input is the branch, also where LayerScale is a bare parameter.
PRE_NORM = ("norm1:output", "drop_path1:input", "norm2:input", "drop_path2:input", ":output")
POST_NORM = (":input", "drop_path1:input", "mlp:input", "drop_path2:input", ":output")  # norms end the branches
CAIT = ("norm1:output", "drop_path:input:0", "norm2:input", "drop_path:input:1", ":output")

PARALLEL_SCALING = BlockRow(taps={}, variant=_parallel_scaling)
PARALLEL_THINGS = BlockRow(
    taps={"+sa": _tap("ffns.0.norm:input"), "+mlp": _tap(":output")},
    lacks={
        "in": "each of the parallel attentions has a norm of its own",
        "sa": "the parallel attentions are summed outside any module",
        "mlp": "the parallel MLPs are summed outside any module",
    },
    skips={"sa": "", "mlp": ""},
)
CONVMIXER = BlockRow(
    taps={"in": _tap("0.fn:input"), "sa": _tap("0.fn:output"), "+sa": _tap("0:output"), "mlp": _tap(":output")},
    lacks={"+mlp": "a ConvMixer has no skip around its pointwise convolution"},
    skips={"sa": "0"},
    why_no_skip="a ConvMixer has no skip around its pointwise convolution",
    channels_first=True,
    sits_at="0",
)
HF_VIT = _row(
    "layernorm_before:output", "dropout:output:0", "layernorm_after:input", "dropout:output:1", ":output",
    attention="attention", variant=_hf_vit,
)  # fmt: skip
HF_VIT_4 = _row(
    "layernorm_before:output", "attention:output", "layernorm_after:input", "output.dropout:output", ":output",
    attention="attention.attention",
)  # fmt: skip
HF_DINO = _row(*CAIT, attention="attention", scales=HF_LS)
HF_CLIP = _row(
    "layer_norm1:output", "self_attn:output", "layer_norm2:input", "mlp:output", ":output", attention="self_attn"
)
BERT = _row(
    ":input", "attention.output.dropout:output", "attention.output.LayerNorm:input",
    "output.dropout:output", "output.LayerNorm:input",
    attention="attention.self", skips={"sa": "attention.output", "mlp": "output"}, variant=_bert,
)  # fmt: skip
DISTILBERT = _row(
    ":input", "attention:output", "sa_layer_norm:input", "ffn:output", "output_layer_norm:input", attention="attention"
)
TORCH_PRE_NORM = _row(
    "norm1:output", "dropout1:output", "norm2:input", "dropout2:output", ":output", attention="self_attn"
)
TORCH_POST_NORM = _row(
    ":input", "dropout1:output", "norm1:input", "dropout2:output", "norm2:input", attention="self_attn"
)

_rows = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": BlockRow(taps={}, variant=_torch_encoder),
    "timm.models.vision_transformer.Block": _row(*PRE_NORM, scales=LS),  # ViT, DeiT, DINOv2, SigLIP, MAE
    "timm.models.vision_transformer.ResPostBlock": _row(*POST_NORM, scales=NORMS),
    "timm.models.vision_transformer.ParallelScalingBlock": PARALLEL_SCALING,
    "timm.models.vision_transformer.DiffParallelScalingBlock": PARALLEL_SCALING,
    "timm.models.vision_transformer.ParallelThingsBlock": PARALLEL_THINGS,
    "timm.models.vision_transformer_relpos.RelPosBlock": _row(*PRE_NORM, scales=LS),
    "timm.models.vision_transformer_relpos.ResPostRelPosBlock": _row(*POST_NORM, scales=NORMS),
    "timm.models.eva.EvaBlock": _row(*PRE_NORM, scales=GAMMA),  # EVA, DINOv3
    "timm.models.eva.EvaBlockPostNorm": _row(*POST_NORM, scales=NORMS),
    "timm.models.beit.Block": _row(*PRE_NORM, scales=GAMMA),
    "timm.models.swin_transformer.SwinTransformerBlock": _row(*PRE_NORM),
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": _row(*POST_NORM, scales=NORMS),
    "timm.models.cait.LayerScaleBlock": _row(*CAIT, scales=GAMMA),
    "timm.models.cait.LayerScaleBlockClassAttn": _row(*CAIT, scales=GAMMA),
    "timm.models.pvt_v2.Block": _row(*PRE_NORM),
    "timm.models.convmixer.Residual": CONVMIXER,
    "torchvision.models.vision_transformer.EncoderBlock": _row(
        "ln_1:output", "dropout:output", "ln_2:input", "mlp:output", ":output", attention="self_attention"
    ),
    "torchvision.models.swin_transformer.SwinTransformerBlock": _row(
        "norm1:output", "stochastic_depth:input:0", "norm2:input", "stochastic_depth:input:1", ":output"
    ),
    "torchvision.models.swin_transformer.SwinTransformerBlockV2": _row(
        ":input", "stochastic_depth:input:0", "mlp:input", "stochastic_depth:input:1", ":output", scales=NORMS
    ),
    "transformers.models.vit.modeling_vit.ViTLayer": HF_VIT,
    "transformers.models.deit.modeling_deit.DeiTLayer": HF_VIT,
    "transformers.models.vit_mae.modeling_vit_mae.ViTMAELayer": HF_VIT,
    "transformers.models.dinov2.modeling_dinov2.Dinov2Layer": HF_DINO,
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer": HF_DINO,
    "transformers.models.dinov3_vit.modeling_dinov3_vit.DINOv3ViTLayer": HF_DINO,
    "transformers.models.clip.modeling_clip.CLIPEncoderLayer": HF_CLIP,
    "transformers.models.siglip.modeling_siglip.SiglipEncoderLayer": HF_CLIP,
    "transformers.models.bert.modeling_bert.BertLayer": BERT,
    "transformers.models.roberta.modeling_roberta.RobertaLayer": BERT,
    "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRobertaLayer": BERT,
    "transformers.models.camembert.modeling_camembert.CamembertLayer": BERT,
    "transformers.models.electra.modeling_electra.ElectraLayer": BERT,
    "transformers.models.distilbert.modeling_distilbert.TransformerBlock": DISTILBERT,
}


def row_of(module: nn.Module) -> BlockRow | None:
    """What the table says about a module, by its class and those it derives from; None if it is no known block."""
    row = next((_rows[name] for name in class_names(module) if name in _rows), None)
    return row.variant(module) if row is not None and row.variant is not None else row


def register_blocks(
    block_class: type[nn.Module] | str,
    *,
    taps: Mapping[str, str | Tap],
    attention: str | None = None,
    channels_first: bool = False,
    lacks: Mapping[str, str] | None = None,
) -> None:
    """Teach `sites` and the probe one more class of blocks (or its full name): where it keeps its sites.

    A tap is "module:input" or "module:output", the module's path relative to the block; ":output" is the block's own,
    and "drop_path:input:1" the second call of that module in one forward. Sites that are left out are not measured, and
    `lacks` may say why. `attention` is the path of the module that attends.

        wellcond.register_blocks(MyBlock, attention="attn", taps={
            "in": "norm1:output", "sa": "attn:output", "+sa": "norm2:input", "mlp": "mlp:output", "+mlp": ":output"})
    """
    if unknown := sorted({*taps, *(lacks or {})} - set(BLOCK_SITES)):
        raise ValueError(f"a block has no sites {unknown}; its sites are {', '.join(BLOCK_SITES)}")
    if not taps:
        raise ValueError('a block without taps has nothing to measure; give at least one, e.g. {"+mlp": ":output"}')
    parsed = {site: _tap(tap) if isinstance(tap, str) else tap for site, tap in taps.items()}
    name = block_class if isinstance(block_class, str) else full_name(block_class)
    _rows[name] = BlockRow(taps=parsed, lacks=dict(lacks or {}), attention=attention, channels_first=channels_first)
