"""The Long Range Arena encoders as trained for Skyformer: two pre-norm layers, mean pooling, a small head.

    model = build("listops")                                        # softmax attention, 209,802 parameters
    model = build("text", "skyformer", gamma=0.05)                  # any registered attention, with its settings
    logits = model(tokens, mask)                                    # (b, n) ids, (b, n) bool: True is a token
    logits = build("retrieval")(tokens0, mask0, tokens1, mask1)     # two documents through one encoder
    model.features(tokens, mask)["before"]                          # token embeddings, before the final norm

Without a mask (None) every token counts, and attentions use their faster code paths for unmasked input, so pass no mask
if a task has no padding. A mask of all True gives the same numbers.

With their family (families/sequence.py), the probe and all surgery work on these models, graying included.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention import find_attention, softmax_attention
from wellcond.attention.softmax_fused import draw_seed, ends_of
from wellcond.models.families.forwards import plain_attention_class, split_heads, split_qkv
from wellcond.models.surgery import AttentionSettings, plan_attention, put_attention
from wellcond.models.surgery.attention import check_settings
from wellcond.numerics import narrow_layer
from wellcond.numerics.fastpaths import fused_kernels
from wellcond.words import meant

__all__ = [
    "POOLINGS",
    "TASKS",
    "PairClassifier",
    "SequenceAttention",
    "SequenceBlock",
    "SequenceClassifier",
    "SequenceEmbedding",
    "SequenceTask",
    "build",
    "find_task",
]

POOLINGS = ("padded", "valid")
"""The positions averaged before the head: all of the model's positions, as published, or only those that are not
padding."""
LANDMARKS = 128  # in every task, for attentions with landmarks


@dataclass(frozen=True, kw_only=True)
class SequenceTask:
    """The model sizes set by a task."""

    length: int
    """Tokens per sequence, padded to the next power of two."""
    vocab_size: int
    """Rows of the token embedding; token 0 is padding."""
    num_classes: int
    documents: int = 1
    """Two if pairs of documents are classified."""


TASKS: dict[str, SequenceTask] = {
    "listops": SequenceTask(length=2048, vocab_size=32, num_classes=10),
    "text": SequenceTask(length=4096, vocab_size=512, num_classes=2),
    "retrieval": SequenceTask(length=4096, vocab_size=512, num_classes=2, documents=2),
    "pathfinder": SequenceTask(length=1024, vocab_size=512, num_classes=2),
    "image": SequenceTask(length=1024, vocab_size=256, num_classes=10),
}
"""The five tasks of the Long Range Arena by name."""


def find_task(name: str) -> SequenceTask:
    """Return the sizes of a task such as "listops" (or "lra_listops"); ValueError, listing the tasks, if unknown."""
    task = TASKS.get(name.removeprefix("lra_"))
    if task is None:
        near = meant(name.removeprefix("lra_"), TASKS)
        raise ValueError(f"there is no task {name!r} in the Long Range Arena{near} (its tasks are {', '.join(TASKS)})")
    return task


def build(
    task: str,
    attention: str = "softmax",
    *,
    dim: int = 64,
    depth: int = 2,
    num_heads: int = 2,
    mlp_dim: int = 128,
    length: int | None = None,
    vocab_size: int | None = None,
    num_classes: int | None = None,
    dropout: float = 0.1,
    attention_dropout: float | None = None,
    pooling: str = "padded",
    **settings: Any,
) -> "SequenceClassifier":
    """Build the model for a task, with random weights; a `PairClassifier` for retrieval.

    Args:
        task: listops, text, retrieval, pathfinder or image; `lra_listops` and so on work too.
        attention: the name of any registered attention. Anything but softmax is installed as by `replace_attention`, so
            that `restore_attention`, `save` and `load` recognise it; the weights are the same for all attentions.
        length: defaults to the task's.
        vocab_size: likewise.
        num_classes: likewise.
        attention_dropout: the dropout of attention weights; ignored by attentions that have none. By default 0.1, as
            published, but 0 for `kernelized`: dropout would require storing all n × n weights, and its kernel stores
            none of them.
        pooling: the sum of the token embeddings is divided by the model's length, to which the published code pads all
            sequences (`padded`), or by the number of tokens that are not padding (`valid`). The two differ by a factor
            for each sample.
        settings: settings of the attention. `num_landmarks` defaults to 128, or a quarter of `length` if that is below
            512.

    Weights are drawn from torch's generator: embeddings from N(0, 0.02²), the rest by torch's default initialisation.
    The projections of queries, keys and values share one matrix; torch's initialisation depends only on the input
    width, so they are distributed like three separate ones.
    """
    sizes = find_task(task)
    kind = PairClassifier if sizes.documents == 2 else SequenceClassifier
    if "num_landmarks" in find_attention(attention).core.setting_names():
        settings.setdefault("num_landmarks", max(1, min(LANDMARKS, (length or sizes.length) // 4)))
    if attention_dropout is None:
        attention_dropout = 0.0 if attention == "kernelized" else 0.1
    wanted = AttentionSettings(name=attention, settings=check_settings(attention, settings))
    model = kind(
        length=sizes.length if length is None else length,
        vocab_size=sizes.vocab_size if vocab_size is None else vocab_size,
        num_classes=sizes.num_classes if num_classes is None else num_classes,
        dim=dim,
        depth=depth,
        num_heads=num_heads,
        mlp_dim=mlp_dim,
        dropout=dropout,
        attention_dropout=attention_dropout,
        pooling=pooling,
    )
    if attention != "softmax":
        put_attention(model, plan_attention(model, {f"blocks.{i}": wanted for i in range(depth)}))
    return model


class SequenceEmbedding(nn.Module):
    """Map token ids (b, n) to (b, n, d), the sum of a token and a position embedding."""

    def __init__(self, vocab_size: int, length: int, dim: int) -> None:
        super().__init__()
        self.tokens: nn.Embedding = nn.Embedding(vocab_size, dim)
        self.positions: nn.Parameter = nn.Parameter(torch.empty(length, dim))
        for weight in (self.tokens.weight, self.positions):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Embed all tokens, padding included; `mask` is used only if the result is grayed."""
        n, length = tokens.shape[-1], self.positions.shape[0]
        if n > length:
            raise ValueError(f"the sequences have {n} tokens, and the model positions for {length}; build it with more")
        return self.tokens(tokens) + self.positions[:n]


class SequenceAttention(nn.Module):
    """Multi-head softmax attention with parameters named as in timm."""

    def __init__(self, dim: int, num_heads: int, attn_drop: float, proj_drop: float) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim={dim} does not divide among num_heads={num_heads}")
        self.num_heads = num_heads
        self.qkv: nn.Linear = nn.Linear(dim, 3 * dim)
        self.proj: nn.Linear = nn.Linear(dim, dim)
        self.attn_drop: nn.Dropout = nn.Dropout(attn_drop)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = split_qkv(self.qkv(x), self.num_heads)
        return self.proj_drop(self.proj(self.attend(q, k, v, attn_mask)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """(b, heads, n, p) → (b, n, heads · p)."""
        dropout = self.attn_drop.p if self.training else 0.0
        return softmax_attention(q, k, v, attn_mask, dropout).transpose(1, 2).flatten(2)


_USUAL: list[type[nn.Module]] = [
    nn.LayerNorm, nn.Linear, nn.Linear, nn.Dropout, nn.LayerNorm, nn.Linear, nn.GELU, nn.Dropout, nn.Linear, nn.Dropout,
]  # fmt: skip


class SequenceBlock(nn.Module):
    """One pre-norm layer: attention and MLP, each with a norm before it and a skip around it.

    On a GPU under autocast, unless a module has a hook, the modules are not called one by one: everything except
    attention runs in two kernel launches (numerics/narrow_layer.py), and padding at the end of sequences becomes zeros.
    """

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.norm1: nn.LayerNorm = nn.LayerNorm(dim)
        self.attn: SequenceAttention = SequenceAttention(dim, num_heads, attention_dropout, dropout)
        self.norm2: nn.LayerNorm = nn.LayerNorm(dim)
        self.mlp: nn.Sequential = nn.Sequential(
            nn.Linear(dim, mlp_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp_dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if self._can_fuse(x, attn_mask):
            return self._fused(x, attn_mask)
        x = x + self.attn(self.norm1(x), attn_mask)
        return x + self.mlp(self.norm2(x))

    def _can_fuse(self, x: Tensor, attn_mask: Tensor | None) -> bool:
        if not fused_kernels(x.device) or nn.modules.module._has_any_global_hook():
            return False
        attn, mlp = self.attn, self.mlp
        if plain_attention_class(attn) is not SequenceAttention or type(mlp) is not nn.Sequential:
            return False
        parts: tuple[Any, ...] = (self.norm1, attn.qkv, attn.proj, attn.proj_drop, self.norm2, *mlp)
        if [type(part) for part in parts] != _USUAL or any(_is_heard(part) for part in (attn, mlp, *parts)):
            return False
        first, second, third = (part for part in parts if type(part) is nn.Dropout)
        return (
            first.p == second.p == third.p < 1
            and first.training == second.training == third.training
            and self.norm1.eps == self.norm2.eps
            and parts[6].approximate == "none"
            and (attn_mask is None or _keeps_keys(attn_mask, x))
            and narrow_layer.can_fuse(x, self._weights())
        )

    def _weights(self) -> list[Tensor]:
        """Return the weights and biases: four of the layers before attention, then those of the layers after it."""
        mlp: Any = self.mlp
        layers = self.norm1, self.attn.qkv, self.attn.proj, self.norm2, mlp[0], mlp[3]
        return [t for layer in layers for t in (layer.weight, layer.bias)]

    def _fused(self, x: Tensor, attn_mask: Tensor | None) -> Tensor:
        """Run `forward` with the fused kernels."""
        attn, weights, eps = self.attn, self._weights(), self.norm1.eps
        ends = None if attn_mask is None else ends_of(attn_mask[:, 0, 0])
        parts = narrow_layer.enter(x, weights[:4], ends, eps=eps)
        q, k, v = (split_heads(part, attn.num_heads) for part in parts)
        attended = attn.attend(q, k, v, attn_mask).to(q.dtype)
        dropout = attn.proj_drop.p if attn.proj_drop.training else 0.0
        seed = draw_seed(x.device) if dropout else None
        return narrow_layer.leave(attended, x, weights[4:], seed, ends, dropout_p=dropout, eps=eps)


def _keeps_keys(attn_mask: Tensor, x: Tensor) -> bool:
    return attn_mask.dtype == torch.bool and attn_mask.shape == (x.shape[0], 1, 1, x.shape[1])


def _is_heard(module: nn.Module) -> bool:
    """Whether the module has hooks, or its forward was replaced."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(len(those) > 0 for those in hooks) or "forward" in module.__dict__


class SequenceClassifier(nn.Module):
    """A classifier of token sequences; `build` sets the sizes for a task."""

    documents = 1

    def __init__(
        self,
        *,
        length: int,
        vocab_size: int,
        num_classes: int,
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 2,
        mlp_dim: int = 128,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        pooling: str = "padded",
    ) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is unknown; use {' or '.join(map(repr, POOLINGS))}")
        self.pooling = pooling
        self.embedding: SequenceEmbedding = SequenceEmbedding(vocab_size, length, dim)
        self.drop: nn.Dropout = nn.Dropout(dropout)
        self.blocks: nn.ModuleList = nn.ModuleList(
            SequenceBlock(dim, num_heads, mlp_dim, dropout, attention_dropout) for _ in range(depth)
        )
        self.norm: nn.LayerNorm = nn.LayerNorm(dim)
        inputs = dim if self.documents == 1 else 4 * dim
        self.head: nn.Sequential = nn.Sequential(nn.Linear(inputs, mlp_dim), nn.ReLU(), nn.Linear(mlp_dim, num_classes))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map ids (b, n), int32 or int64, to logits (b, classes); `mask` (b, n) bool is False for padding."""
        return self.head(self.pooled(tokens, mask))

    def features(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the last layer's token embeddings (b, n, d), `before` and `after` the final norm; padding is 0."""
        x = self._encoded(tokens, mask)
        return {"before": _masked(x, mask), "after": _masked(self.norm(x), mask)}

    def pooled(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean of each sequence, (b, d); it does not depend on how much padding the sequence comes with."""
        x = _masked(self.norm(self._encoded(tokens, mask)), mask)
        if self.pooling == "padded":
            return x.sum(1) / self.embedding.positions.shape[0]
        return x.mean(1) if mask is None else x.sum(1) / mask.sum(1, keepdim=True).clamp_min(1)

    def _encoded(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        _check(tokens, mask)
        x = self.drop(self.embedding(tokens, mask))
        attn_mask = None if mask is None else mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, attn_mask)
        return x


class PairClassifier(SequenceClassifier):
    """A classifier of document pairs: one encoder, and a head on both means, their product and their difference.

    The documents of all pairs form one batch, alternating, so that the probe sees both. With Skyformer's `compat`,
    where the samples of a batch affect each other, the first and the second documents are encoded in separate passes,
    as in the published code.
    """

    documents = 2

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens0: Tensor, mask0: Tensor | None, tokens1: Tensor, mask1: Tensor | None
    ) -> Tensor:
        """Map ids and masks of the first and of the second documents, each (b, n), to logits (b, classes)."""
        if self._couples_samples():
            first, second = self.pooled(tokens0, mask0), self.pooled(tokens1, mask1)
        else:
            tokens, mask = _in_turn(tokens0, mask0, tokens1, mask1)
            first, second = self.pooled(tokens, mask).unflatten(0, (-1, 2)).unbind(1)
        return self.head(torch.cat([first, second, first * second, first - second], -1))

    def features(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens0: Tensor, mask0: Tensor | None, tokens1: Tensor, mask1: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the token embeddings of all documents, (2b, n, d): the first of a pair, then its second."""
        if not self._couples_samples():
            return super().features(*_in_turn(tokens0, mask0, tokens1, mask1))
        first, second = super().features(tokens0, mask0), super().features(tokens1, mask1)
        return {name: torch.stack([first[name], second[name]], 1).flatten(0, 1) for name in first}

    def _couples_samples(self) -> bool:
        cores = (getattr(block.attn, "attention_core", None) for block in self.blocks)
        return any(bool(getattr(core, "compat", False)) for core in cores)


def _in_turn(
    tokens0: Tensor, mask0: Tensor | None, tokens1: Tensor, mask1: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (2b, n) tokens and mask: the first document of a pair, its second, the first of the next pair, …"""
    _check(tokens0, mask0)
    _check(tokens1, mask1)
    tokens = torch.stack([tokens0, tokens1], 1).flatten(0, 1)
    if mask0 is None and mask1 is None:
        return tokens, None
    full = torch.ones(tokens0.shape, dtype=torch.bool, device=tokens0.device)
    return tokens, torch.stack([full if mask0 is None else mask0, full if mask1 is None else mask1], 1).flatten(0, 1)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask[..., None]


def _check(tokens: Tensor, mask: Tensor | None) -> None:
    """Check shapes and dtypes only: looking at values would make the host wait for the GPU."""
    if tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"tokens are ids (b, n), int32 or int64; got {tuple(tokens.shape)} of {tokens.dtype}: tokens.int()"
        )
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"a mask is boolean, True for a token and False for padding, and of the tokens' shape "
            f"{tuple(tokens.shape)}; got {tuple(mask.shape)} of {mask.dtype}"
        )
