import timm
import torch
from torch.nn import functional as F

from wellcond.claims.trained_blocks import BLOCKS, MODEL
from wellcond.claims.trained_mlps import mlps_of


def test_the_matrices_are_what_the_mlps_compute_with():
    model = timm.create_model("vit_tiny_patch16_224", qkv_bias=False, **MODEL).eval()
    images = torch.randn(2, 1, 8, 8)
    outputs = {}
    for index in BLOCKS:
        model.get_submodule(f"blocks.{index}.mlp").register_forward_hook(
            lambda _, args, output, index=index: outputs.update({index: output})
        )
    found = mlps_of(model, images)
    assert len(found) == 3 * len(BLOCKS)
    for index in BLOCKS:
        x, up, down = (found[f"blocks.{index}.{name}"] for name in ("x_mlp", "w_up", "w_down"))
        mlp = model.get_submodule(f"blocks.{index}.mlp")
        expected = F.gelu(x @ up + mlp.fc1.bias) @ down + mlp.fc2.bias
        torch.testing.assert_close(expected, outputs[index], atol=1e-6, rtol=1e-5)


def test_it_leaves_no_hook_behind():
    model = timm.create_model("vit_tiny_patch16_224", qkv_bias=False, **MODEL).eval()
    mlps_of(model, torch.randn(1, 1, 8, 8))
    assert not any(module._forward_pre_hooks for module in model.modules())
