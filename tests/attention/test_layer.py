"""The modules inside timm's models: constructor, weights, training, compile, autocast, copies."""

import contextlib
import copy
import functools
import inspect
import io
import pickle
from pathlib import Path

import pytest
import timm
import torch
from timm.layers.attention import Attention as TimmAttention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wellcond.attention import ATTENTIONS, LinearAttention, SkyformerAttention, SoftmaxAttention

SMALL = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 7}
SETTINGS = {"skyformer": {"num_landmarks": 8}, "nystrom": {"num_landmarks": 8}}
every = pytest.mark.parametrize("name", ATTENTIONS)


def build(name: str, **kwargs) -> nn.Module:
    layer = ATTENTIONS[name].layer
    for_timm = type(
        "Configured", (layer,), {"__init__": functools.partialmethod(layer.__init__, **SETTINGS.get(name, {}))}
    )
    return timm.create_model("vit_tiny_patch16_224", attn_layer=for_timm, **{**SMALL, **kwargs})


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 64, 64)


@every
def test_timm_builds_and_trains_it(name: str, images: Tensor) -> None:
    model = build(name, qk_norm=True, scale_attn_norm=True, proj_drop_rate=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(images).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.blocks[0].attn.qkv.weight.grad.abs().sum() > 0


@every
def test_weights_go_both_ways(name: str, images: Tensor) -> None:
    plain = timm.create_model("vit_tiny_patch16_224", qk_norm=True, **SMALL).eval()
    other = build(name, qk_norm=True).eval()
    other.load_state_dict(plain.state_dict())
    plain.load_state_dict(other.state_dict())
    if name == "softmax":
        assert torch.equal(other(images), plain(images))


@every
def test_evaluation_repeats_to_the_bit_and_copies_agree(name: str, images: Tensor) -> None:
    model = build(name).eval()
    out = model(images)
    assert torch.equal(model(images), out)
    assert torch.equal(copy.deepcopy(model)(images), out)
    layer = ATTENTIONS[name].layer(48, num_heads=3).eval()
    tokens = torch.randn(2, 9, 48)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(tokens), layer(tokens))


@pytest.mark.parametrize(("name", "train"), [*((name, False) for name in ATTENTIONS), ("skyformer", True)])
def test_compiles_whole(name: str, train: bool, images: Tensor) -> None:
    model = build(name, depth=1).train(train)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    expected = model(images)
    torch.manual_seed(1)
    out = compiled(images)
    if not train:  # compiled code may draw its random numbers in another order
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.compiler.reset()


def test_checkpointing_draws_the_same_landmarks_again() -> None:
    layer = SkyformerAttention(12, num_heads=3, num_landmarks=4)
    tokens = torch.randn(2, 30, 12)
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(0)
        layer.zero_grad()
        run(tokens).square().sum().backward()
        grads.append(layer.qkv.weight.grad.clone())
    assert torch.equal(*grads)


@every
def test_exports(name: str) -> None:
    layer = ATTENTIONS[name].layer(12, num_heads=3, **SETTINGS.get(name, {})).eval()
    tokens = torch.randn(2, 20, 12)
    program = torch.export.export(layer, (tokens,))
    torch.testing.assert_close(program.module()(tokens), layer(tokens))


def test_masks_reach_the_attention() -> None:
    layer = SkyformerAttention(12, num_heads=3, num_landmarks=6).eval()
    tokens, mask = torch.randn(2, 9, 12), torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[:, ..., 6:] = False
    torch.testing.assert_close(layer(tokens, attn_mask=mask)[:, :6], layer(tokens[:, :6]))
    with pytest.raises(ValueError, match="causal"):
        layer(tokens, is_causal=True)
    linear = LinearAttention(12, num_heads=3).eval()
    torch.testing.assert_close(linear(tokens, is_causal=True)[:, :4], linear(tokens[:, :4], is_causal=True))


def test_the_same_as_timms_own() -> None:
    settings = {"num_heads": 3, "qkv_bias": True, "qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm}
    ours, theirs = SoftmaxAttention(12, **settings), timm.layers.Attention(12, **settings)
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randn(2, 9, 12)
    assert torch.equal(ours(tokens), theirs(tokens))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        SoftmaxAttention(10, num_heads=3)
    with pytest.raises(ValueError, match="proj_drop"):
        SkyformerAttention(12, num_heads=3, attn_drop=0.1)
    with pytest.raises(ValueError, match="norm_layer"):
        SoftmaxAttention(12, num_heads=3, qk_norm=True)
    with pytest.raises(TypeError, match="num_landmarks"):
        SoftmaxAttention(12, num_heads=3, num_landmarks=4)


@pytest.mark.skipif(
    "gated" not in inspect.signature(TimmAttention).parameters, reason="an older timm has fewer arguments"
)
@pytest.mark.parametrize("gated", [False, True])
def test_the_constructor_is_timms_by_position_too(gated: bool) -> None:
    given = (48, 3, 8, 40, True, True, True, False, gated, 0.0, 0.0, nn.LayerNorm)
    theirs, ours = TimmAttention(*given).eval(), SoftmaxAttention(*given).eval()
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randn(2, 9, 48)
    assert ours(tokens).shape == (2, 9, 40)
    torch.testing.assert_close(ours(tokens), theirs(tokens))


def test_an_unknown_setting_is_named_beside_those_there_are() -> None:
    with pytest.raises(TypeError, match=r"SkyformerAttention has no argument 'landmark'; its settings are: num_landm"):
        SkyformerAttention(48, num_heads=3, landmark=8)
    with pytest.raises(TypeError, match="its settings are: none"):
        SoftmaxAttention(48, num_heads=3, divisor=8)
    with pytest.raises(ValueError, match="or give attn_head_dim"):
        SkyformerAttention(50, num_heads=3)
    assert SkyformerAttention(50, num_heads=3, attn_head_dim=16)(torch.randn(1, 9, 50)).shape == (1, 9, 50)


@pytest.mark.filterwarnings("ignore")  # the exporter's own
@every
def test_exports_to_onnx(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    solver = {"solver": "iteration"} if name == "skyformer" else {}  # ONNX has no Cholesky factors
    layer = ATTENTIONS[name].layer(12, num_heads=3, **SETTINGS.get(name, {}), **solver).eval()
    x, file = torch.randn(2, 20, 12), tmp_path / "layer.onnx"
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(layer, (x,), file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), layer(x).detach(), rtol=1e-4, atol=1e-4)
