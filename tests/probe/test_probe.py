"""The probe's numbers are those of a forward pass written by hand, and it leaves nothing behind."""

import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from wellcond import records
from wellcond.probe import Probe

SITES = ("in", "sa", "+sa", "mlp", "+mlp")


# ---- values


@pytest.mark.parametrize("exact", [True, False])
def test_every_number_is_that_of_the_tokens(
    vit: Any, images: Tensor, by_hand: Any, truth: Any, rows_of: Any, exact: bool
) -> None:
    with Probe(vit, sites=[*SITES, "embed"], exact=exact, run="a") as probe:
        vit(images)
    found, expected = rows_of(probe.rows()), by_hand(vit, images)
    assert found.keys() == expected.keys()
    for place, tokens in expected.items():
        for name, value in truth(tokens).items():
            assert found[place][name] == pytest.approx(value, rel=2e-4), (place, name)
        assert (found[place]["capped"], found[place]["excluded"]) == (0, 0)
    for row in probe.rows():
        assert (row["run"], row["step"], row["count"], row["dtype"], row["status"]) == ("a", 0, 4, "float32", "ok")
        assert row["index"] == (-1 if row["site"] == "embed" else int(row["block"][-1]))


def test_exact_is_close_to_the_model_in_float64(
    vit: Any, images: Tensor, by_hand: Any, truth: Any, rows_of: Any
) -> None:
    with Probe(vit) as probe:
        vit(images)
    found = rows_of(probe.rows())
    expected = by_hand(vit.double(), images.double())
    for place in found:
        assert found[place]["log_kappa"] == pytest.approx(truth(expected[place])["log_kappa"], rel=1e-3)


def test_raw_patches(vit: Any, images: Tensor, truth: Any, rows_of: Any) -> None:
    with Probe(vit, sites="tokens") as probe:
        vit(images)
    patches = nn.functional.unfold(images, 8, stride=8).mT
    (place,) = (found := rows_of(probe.rows()))
    assert place == ("patch_embed.proj", "tokens")
    assert found[place]["log_kappa"] == pytest.approx(truth(patches)["log_kappa"], rel=2e-4)


def test_the_decay_of_the_singular_values(vit: Any, images: Tensor, by_hand: Any, rows_of: Any) -> None:
    with Probe(vit, sites="+mlp", blocks=1, spectrum=True) as probe:
        vit(images)
    s = torch.linalg.svdvals(by_hand(vit, images)["blocks.1", "+mlp"].double())  # 17 tokens: all of them
    decay = (s / s[:, :1]).log().mean(0).exp()
    found = rows_of(probe.rows())["blocks.1", "+mlp"]
    assert [name for name in found if name.startswith("sigma.")] == [f"sigma.{i}" for i in range(17)]
    for i in range(17):
        assert found[f"sigma.{i}"] == pytest.approx(float(decay[i]), rel=1e-3)


def test_only_some_samples_are_measured(vit: Any, images: Tensor, by_hand: Any, truth: Any, rows_of: Any) -> None:
    for exact in (True, False):
        with Probe(vit, max_samples=3, rank_samples=2, exact=exact) as probe:
            vit(images)
        found, counts = rows_of(probe.rows()), rows_of(probe.rows(), "count")
        for place, tokens in by_hand(vit, images).items():
            if place in found:
                assert found[place]["log_kappa"] == pytest.approx(truth(tokens[:3])["log_kappa"], rel=2e-4)
                assert found[place]["effective_rank"] == pytest.approx(truth(tokens[:2])["effective_rank"], rel=2e-4)
                assert (counts[place]["log_kappa"], counts[place]["effective_rank"]) == (3, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("exact", [True, False])
def test_a_bad_sample_leaves_the_others_alone(
    vit: Any, images: Tensor, by_hand: Any, truth: Any, rows_of: Any, bad: float, exact: bool
) -> None:
    good = by_hand(vit, images[[0, 2, 3]])
    images[1, 0, 3, 3] = bad
    with Probe(vit, exact=exact) as probe:
        vit(images)
    found, counts, status = (rows_of(probe.rows(), field) for field in ("value", "count", "status"))
    for place in found:
        assert found[place]["log_kappa"] == pytest.approx(truth(good[place])["log_kappa"], rel=2e-4)
        assert (counts[place]["log_kappa"], found[place]["excluded"]) == (3, 1)
        assert counts[place]["excluded"] == 4
        assert status[place]["log_kappa"] == "non_finite"


def test_nothing_but_nan_is_no_number(vit: Any, images: Tensor, rows_of: Any) -> None:
    with torch.no_grad():
        vit.patch_embed.proj.weight.fill_(math.nan)
    with Probe(vit, spectrum=True) as probe:
        vit(images)
    found = rows_of(probe.rows())
    for row in probe.rows():
        assert row["status"] == "non_finite", row
    for place in found:
        assert math.isnan(found[place]["log_kappa"])
        assert found[place]["excluded"] == 4
    assert math.isnan(found["blocks.0", "sa"]["attention_entropy"])
    assert math.isnan(found["blocks.0", "sa"]["largest_logit"])


def test_a_dead_branch_is_zero_not_well_conditioned(vit: Any, images: Tensor, rows_of: Any) -> None:
    for parameter in vit.blocks[0].attn.proj.parameters():
        nn.init.zeros_(parameter)
    with Probe(vit, sites=["sa", "+sa"]) as probe:
        vit(images)
    found, status = rows_of(probe.rows()), rows_of(probe.rows(), "status")
    assert status["blocks.0", "sa"]["log_kappa"] == "zero"
    assert math.isnan(found["blocks.0", "sa"]["log_kappa"])
    assert status["blocks.0", "+sa"]["log_kappa"] == "ok"


def test_beyond_what_float32_sees_is_the_ceiling(vit: Any, images: Tensor, rows_of: Any) -> None:
    with torch.no_grad():  # all tokens of an image alike: rank one
        vit.pos_embed.copy_(vit.pos_embed[:, :1].clone())
        vit.cls_token.copy_(vit.patch_embed(torch.zeros(1, 3, 32, 32))[:, :1])
    with Probe(vit, sites=["+mlp"]) as probe:
        vit(torch.zeros(2, 3, 32, 32))
    found, status = rows_of(probe.rows()), rows_of(probe.rows(), "status")
    assert found["blocks.1", "+mlp"]["log_kappa"] == pytest.approx(math.log(2**23))
    assert found["blocks.1", "+mlp"]["capped"] == 2
    assert status["blocks.1", "+mlp"]["log_kappa"] == "ceiling"


# ---- which passes are measured


def test_every_third_pass(vit: Any, images: Tensor) -> None:
    probe = Probe(vit, sites="+mlp", every=3)
    with probe:
        for _ in range(10):
            vit(images)
    assert sorted({row["step"] for row in probe.rows()}) == [0, 3, 6, 9]
    assert probe.step == 10


def test_steps_set_by_hand(vit: Any, images: Tensor) -> None:
    with Probe(vit, sites="+mlp", blocks=0, every=5) as probe:
        for step in (4, 5, 6, 10):
            probe.step = step
            for _ in range(2):  # micro-batches: the first is measured
                vit(images)
    assert [row["step"] for row in probe.rows() if row["name"] == "log_kappa"] == [5, 10]
    assert probe.step == 10


def test_a_failed_pass_is_measured_when_it_is_tried_again(vit: Any, images: Tensor) -> None:
    with Probe(vit, sites="+mlp", blocks=0) as probe:
        probe.step = 7
        with pytest.raises((RuntimeError, AssertionError)):
            vit(images[:, :2])
        vit(images)
    assert [row["step"] for row in probe.rows() if row["name"] == "log_kappa"] == [7]


def test_seeing_no_pass_raises(vit: Any, images: Tensor) -> None:
    probe = Probe(vit)
    with pytest.raises(RuntimeError, match="saw no forward pass"), probe:
        vit.forward_features(images)
    with probe:
        vit(images)
    with pytest.raises(RuntimeError, match="saw no forward pass"), probe:  # passes of before do not count
        pass
    with pytest.raises(KeyError, match="theirs"), probe:  # another exception is not hidden
        raise KeyError("theirs")


def test_blocks_that_never_run_raise(vit: Any, make_vit: Any, images: Tensor) -> None:
    class TwoModels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Conv2d(3, 2, 3), make_vit()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = TwoModels()
    with pytest.raises(RuntimeError, match=r"none of the 8 places.*sa of unused\.blocks\.0"), Probe(model):
        model(images)


def test_places_not_reached_are_told(vit: Any, images: Tensor) -> None:
    vit.blocks[0].forward = lambda x: x + vit.blocks[0].attn(vit.blocks[0].norm1(x))
    with pytest.warns(UserWarning, match=r"3 places were not reached: sa of blocks\.0, \+sa of blocks\.0"):  # noqa: SIM117
        with Probe(vit) as probe:
            vit(images)
    assert "mlp of blocks.0" in probe.table()
    assert {row["block"] for row in probe.rows()} == {"blocks.0", "blocks.1"}


# ---- models of other kinds


def test_batches_passed_by_name(truth: Any, rows_of: Any) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **small)).eval()
    images = torch.randn(3, 3, 32, 32)
    with Probe(model, sites="+mlp", max_samples=2) as probe:
        model(pixel_values=images, output_hidden_states=True)
    tokens = model(pixel_values=images, output_hidden_states=True).hidden_states[-1].detach()[:2]
    (found,) = rows_of(probe.rows()).values()
    assert found["log_kappa"] == pytest.approx(truth(tokens)["log_kappa"], rel=2e-4)


@pytest.mark.parametrize("exact", [True, False])
def test_a_model_that_returns_nothing_is_measured(vit: Any, images: Tensor, exact: bool) -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = vit

        def forward(self, x: Tensor) -> None:
            self.inner(x)

    model = Quiet().eval()
    with Probe(model, exact=exact) as probe:
        assert model(images) is None
    assert len(probe.rows()) > 0


def test_inference_mode(vit: Any, images: Tensor) -> None:
    values = []
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        for exact in (True, False):
            with mode(), Probe(vit, exact=exact) as probe:
                vit(images)
            values.append([row["value"] for row in probe.rows()])
    assert all(value == values[0] for value in values)


def test_a_model_without_numbers(images: Tensor) -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    with pytest.raises(ValueError, match="meta device"), Probe(model):
        model(images.to("meta"))


# ---- a measurement that fails


def broken(_tensor: Tensor, **_: Any) -> None:
    raise torch.linalg.LinAlgError("no convergence")


def test_failing_in_training_warns_and_goes_on(vit: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    vit.train()
    with Probe(vit) as probe:
        with monkeypatch.context() as patch:
            patch.setattr("wellcond.numerics.singular.measure_conditioning", broken)
            with pytest.warns(UserWarning, match="could not measure step 0, training goes on.*no convergence"):
                vit(images).sum().backward()
        assert vit.head.weight.grad is not None
        vit(images)
    assert {row["step"] for row in probe.rows()} == {1}


def test_failing_in_evaluation_raises(vit: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch, state: Any) -> None:
    before = state(vit)
    monkeypatch.setattr("wellcond.numerics.singular.measure_conditioning", broken)
    with pytest.raises(torch.linalg.LinAlgError, match="no convergence"), Probe(vit):
        vit(images)
    assert state(vit) == before


def test_a_failing_hook_does_not_end_training(vit: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("wellcond.probe.capture._as_tokens", fails)
    vit.train()
    with pytest.warns(UserWarning, match="training goes on.*out of memory"), Probe(vit):
        vit(images).sum().backward()
    vit.eval()
    with pytest.raises(RuntimeError, match="out of memory"), Probe(vit):
        vit(images)


def test_surgery_under_the_probe_does_not_end_training(vit: Any, images: Tensor) -> None:
    vit.train()
    with Probe(vit):
        del vit.blocks[0].drop_path2  # where a tap was
        vit.blocks[0].forward = lambda x: x
        with pytest.warns(UserWarning, match="training goes on.*drop_path2"):
            vit(images).sum().backward()


def test_a_pass_of_its_own_that_fails(vit: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("wellcond.probe.probe.run_apart", fails)
    vit.train()
    with pytest.warns(UserWarning, match="training goes on.*out of memory"), Probe(vit, exact=True):
        vit(images)


# ---- rows on disk


def test_rows_stream_to_a_file(vit: Any, images: Tensor, tmp_path: Path) -> None:
    file = tmp_path / "run" / "probe.jsonl"
    images[0] = math.nan
    probe = Probe(vit, sites="+mlp", blocks=-1)
    with probe:
        vit(images)
        probe.to(file)  # what there is, and then each as it comes
        first = records.read_rows(file)
        vit(images[:1])
        both = records.read_rows(file)
    assert {row["step"] for row in first} == {0}
    assert {row["step"] for row in both} == {0, 1}
    assert [str(row) for row in both] == [str(row) for row in probe.rows()]  # NaN is not equal to itself
    probe.clear()
    assert probe.rows() == []
    assert records.read_rows(file)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_data_frames_take_the_rows(vit: Any, images: Tensor, library: str) -> None:
    frames = pytest.importorskip(library)
    with Probe(vit) as probe:
        vit(images)
    frame = frames.DataFrame(probe.rows())
    assert set(frame.columns) == set(records.Row.__annotations__)
    assert len(frame) == len(probe.rows())


# ---- bad input


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"max_samples": 0}, {"rank_samples": -1}, {"every": 2.5}, {"max_samples": "64"}]
)
def test_wrong_numbers(vit: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} must be a whole number from 1 on"):
        Probe(vit, **wrong)


def test_not_a_model(vit: Any) -> None:
    with pytest.raises(ValueError, match=r"measures an nn\.Module, got method"):
        Probe(vit.forward)


def test_repr_says_what_it_does(vit: Any) -> None:
    assert repr(Probe(vit, every=9)) == "Probe(VisionTransformer, 8 places, every=9, step=0)"
