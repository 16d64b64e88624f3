"""An attention from outside the package, registered as docs/adding-an-attention.md says and by nothing else."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import wellcond
from wellcond.attention import ATTENTIONS, AttentionCore, find_attention
from wellcond.bench import attention as bench
from wellcond.records import read_json

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}


def cosine_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    tau: float = 10.0,
    power: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Softmax of cosines, times tau."""
    query, key = (nn.functional.normalize(t, dim=-1) for t in (query, key))
    attend = nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=tau) ** power


def mean_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The mean of all values: it knows no masks, no order and no dropout."""
    return value.mean(-2, keepdim=True).expand(*query.shape[:-1], value.shape[-1])


@pytest.fixture(autouse=True)
def _registered():
    before = dict(ATTENTIONS)
    assert wellcond.register_attention("cosine")(cosine_attention) is cosine_attention
    wellcond.register_attention("mean")(mean_attention)
    yield
    ATTENTIONS.clear()
    ATTENTIONS.update(before)


@pytest.fixture
def model() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **SMALL)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def test_it_replaces_a_models_attention_and_trains(model: nn.Module, images: Tensor) -> None:
    plain = model.eval()(images)
    wellcond.replace_attention(model, "cosine", tau=5.0)
    assert {how.settings["tau"] for how in wellcond.attention_of(model).values()} == {5.0}
    q, k, v = torch.randn(3, 2, 3, 17, 8).unbind(0)
    core = model.blocks[0].attn.attention_core
    torch.testing.assert_close(core(q, k, v), cosine_attention(q, k, v, tau=5.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.cross_entropy(model.train()(images), torch.tensor([0, 1]))
    loss.backward()
    before = model.blocks[0].attn.qkv.weight.detach().clone()
    optimizer.step()
    assert loss.isfinite()
    assert not torch.equal(model.blocks[0].attn.qkv.weight, before)
    wellcond.restore_attention(model)
    assert wellcond.attention_of(model) == {}
    assert plain.shape == model(images).shape


def test_files_of_weights_remember_it(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    wellcond.replace_attention(model, "cosine", tau=0.3, power=2)
    expected = model.eval()(images)
    wellcond.save(model, tmp_path / "cosine.safetensors")
    fresh = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    loaded = wellcond.load(fresh, tmp_path / "cosine.safetensors")
    assert loaded.attention["blocks.1"].name == "cosine"
    assert loaded.attention["blocks.1"].settings == {"tau": 0.3, "power": 2}
    assert torch.equal(fresh(images), expected)
    del ATTENTIONS["cosine"]
    with pytest.raises(ValueError, match=r"the attention 'cosine', which is not registered here: import the module"):
        wellcond.load(timm.create_model("vit_tiny_patch16_224", **SMALL), tmp_path / "cosine.safetensors")


def test_timm_builds_models_with_it_that_copy_pickle_and_compile(images: Tensor) -> None:
    layer = find_attention("cosine").layer
    assert layer.__name__ == "CosineAttention"
    assert "tau=10.0, power=1" in layer.__doc__
    built = timm.create_model("vit_tiny_patch16_224", attn_layer=layer, **SMALL).eval()
    expected = built(images)
    assert torch.equal(copy.deepcopy(built)(images), expected)
    assert torch.equal(pickle.loads(pickle.dumps(built))(images), expected)
    compiled = torch.compile(built.blocks[0].attn, fullgraph=True, backend="aot_eager")
    tokens = torch.randn(2, 17, 24)
    torch.testing.assert_close(compiled(tokens), built.blocks[0].attn(tokens))
    torch.compiler.reset()
    with pytest.raises(TypeError, match="CosineAttention has no argument 'taus'; its settings are: tau, power"):
        layer(24, num_heads=3, taus=1.0)


def test_it_has_rows_in_the_benchmark(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench, "QUICK", bench.QUICK._replace(tokens=128, lengths=(64,), landmarks=8))
    rows = read_json(bench.run(output=tmp_path / "attention.json", device="cpu", quick=True))["rows"]
    mine = [row for row in rows if row["method"] == "cosine"]
    assert [row["n"] for row in mine] == [64]
    assert mine[0]["both ms"] > 0
    assert mine[0]["times faster"] > 0


def test_settings_are_of_the_kind_of_their_defaults() -> None:
    core = find_attention("cosine").core
    assert core(tau=2).settings == {"tau": 2.0, "power": 1}
    assert type(core(tau=2).settings["tau"]) is float
    for wrong in ({"tau": "2"}, {"tau": True}, {"power": 1.5}, {"power": "1"}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}=.* must be of type"):
            core(**wrong)


def test_what_the_function_does_not_take_is_refused_and_never_ignored(model: nn.Module, images: Tensor) -> None:
    wellcond.replace_attention(model, "mean")
    assert model(images).isfinite().all()
    core = find_attention("mean").core()
    assert (core.drops_weights, core.takes_bias, core.takes_pair_masks) == (False, False, False)
    q = torch.randn(1, 3, 4, 8)
    for given in ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, {"dropout_p": 0.1}, {"is_causal": True}):
        with pytest.raises(ValueError, match=f"mean attention takes no {next(iter(given))}"):
            core(q, q, q, **given)
    with pytest.raises(ValueError, match="mean attention takes no scale"):
        core(q, q, q, scale=2.0)
    assert core(q, q, q, scale=8**-0.5).shape == q.shape  # what models hand over
    with pytest.raises(ValueError, match="proj_drop"):
        find_attention("mean").layer(24, num_heads=3, attn_drop=0.1)


def test_mistakes_in_a_registration_are_named() -> None:
    with pytest.raises(ValueError, match=r"there is an attention 'cosine' already, .*cosine_attention; choose another"):
        wellcond.register_attention("cosine")(mean_attention)
    wellcond.register_attention("cosine")(cosine_attention)  # a module that is loaded again
    with pytest.raises(ValueError, match="letters, digits"):
        wellcond.register_attention("my attention")(mean_attention)
    for wrong in (lambda q, k, v: v, lambda query, key, value, scale=None, is_causal=False: value):
        with pytest.raises(TypeError, match="in its order: query, key, value, attn_mask"):
            wellcond.register_attention("wrong")(wrong)
    with pytest.raises(TypeError, match=r"write the settings out.*\*\*settings"):
        wellcond.register_attention("wrong")(lambda query, key, value, **settings: value)

    def without_default(query, key, value, *, size):
        return value

    with pytest.raises(TypeError, match="'size' needs a default"):
        wellcond.register_attention("wrong")(without_default)
    with pytest.raises(TypeError, match="SkyformerCore is the core of 'skyformer' already"):
        wellcond.register_attention("wrong", core=find_attention("skyformer").core)
    with pytest.raises(TypeError, match="set the flags of Own instead"):
        wellcond.register_attention("wrong", core=type("Own", (AttentionCore,), {}), pairs=False)
    assert "wrong" not in ATTENTIONS


def test_a_core_of_its_own_differs_from_the_function_where_it_says_so() -> None:
    class SharpCore(AttentionCore):
        """Sharper in training."""

        defaults = {"tau": 3.0}  # noqa: RUF012

        @classmethod
        def check(cls, **settings: Any) -> None:
            if settings["tau"] <= 0:
                raise ValueError("tau must be positive")

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            settings = self.settings
            return cosine_attention(*args, **kwargs, **{**settings, "tau": settings["tau"] * (1 + self.training)})

    def sharp_attention(query: Tensor, key: Tensor, value: Tensor, *, tau: float = 10.0, power: int = 1) -> Tensor:
        return cosine_attention(query, key, value, tau=tau, power=power)

    wellcond.register_attention("sharp", core=SharpCore)(sharp_attention)
    core = find_attention("sharp").layer(24, num_heads=3).core
    assert core.settings == {"tau": 3.0, "power": 1}
    q, k, v = torch.randn(3, 1, 3, 5, 8).unbind(0)
    torch.testing.assert_close(core.train()(q, k, v), cosine_attention(q, k, v, tau=6.0))
    torch.testing.assert_close(core.eval()(q, k, v), cosine_attention(q, k, v, tau=3.0))
    with pytest.raises(ValueError, match="tau must be positive"):
        find_attention("sharp").layer(24, num_heads=3, tau=-1.0)


def test_a_method_without_pairs_is_kept_from_models_that_need_them() -> None:
    wellcond.register_attention("cosine", pairs=False)(cosine_attention)
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1,), embed_dim=12, num_heads=(2,))
    with pytest.raises(ValueError, match="relative position bias"):
        wellcond.replace_attention(swin, "cosine")
