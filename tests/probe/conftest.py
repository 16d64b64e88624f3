"""Small models with random weights, what their tokens are when computed by hand, and what a κ is in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

Values = dict[str, float]


@pytest.fixture
def make_vit() -> Callable[..., Any]:
    def make(**kwargs: object) -> nn.Module:
        settings = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 7}
        model = timm.create_model("vit_tiny_patch16_224", **{**settings, **kwargs}).eval()
        with torch.no_grad():  # as timm starts them, biases and class token are so small that nothing would show
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture
def vit(make_vit: Callable[..., Any]) -> Any:
    return make_vit()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 32, 32)


@pytest.fixture
def by_hand() -> Callable[[Any, Tensor], dict[tuple[str, str], Tensor]]:
    """The tokens of a timm ViT at each block and site, from a forward pass written out here."""

    @torch.no_grad()
    def run(model: Any, images: Tensor) -> dict[tuple[str, str], Tensor]:
        x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
        found = {("blocks.0", "embed"): x}
        for index, block in enumerate(model.blocks):
            normed = block.norm1(x)
            attended = block.ls1(block.attn(normed))
            x = x + attended
            added, mlp = x, block.ls2(block.mlp(block.norm2(x)))
            x = x + mlp
            sites = {"in": normed, "sa": attended, "+sa": added, "mlp": mlp, "+mlp": x}
            found |= {(f"blocks.{index}", site): tokens for site, tokens in sites.items()}
        return found

    return run


@pytest.fixture
def truth() -> Callable[[Tensor], Values]:
    """The means that a probe reports, of (b, n, d), by float64 singular value decompositions."""

    def values(tokens: Tensor) -> Values:
        s = torch.linalg.svdvals(tokens.double())
        p = s / s.sum(-1, keepdim=True)
        log_kappa = (s[:, 0] / s[:, -1]).log()
        return {
            "log_kappa": float(log_kappa.mean()),
            "log_kappa_max": float(log_kappa.max()),
            "sigma_max": float(s[:, 0].mean()),
            "sigma_min": float(s[:, -1].mean()),
            "stable_rank": float((s.square().sum(-1) / s[:, 0].square()).mean()),
            "effective_rank": float((-(p * p.log()).sum(-1)).exp().mean()),
        }

    return values


@pytest.fixture
def state() -> Callable[[nn.Module], Any]:
    """All that a probe might leave behind in a model and around it: hooks, flags, compiled calls, modes, settings."""

    def look(model: nn.Module) -> Any:
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks")
        return (
            [[list(getattr(module, kind)) for kind in hooks] for module in model.modules()],
            [(module.training, module._compiled_call_impl, vars(module).get("forward")) for module in model.modules()],
            torch._C._len_torch_function_stack(),
            torch.is_autocast_cache_enabled(),
            torch.backends.cuda.matmul.fp32_precision,
        )

    return look


@pytest.fixture
def rows_of() -> Callable[..., Any]:
    """{(block, site): {name: value}} of rows, or of another field of them."""

    def sort(rows: list[Any], field: str = "value") -> dict[tuple[str, str], dict[str, Any]]:
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for row in rows:
            found.setdefault((row["block"], row["site"]), {})[row["name"]] = row[field]
        return found

    return sort


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
