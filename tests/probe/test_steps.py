"""A probe that is attached for one pass of each measured step, and what a logger gets of it."""

import math

import pytest
import timm
import torch

from wellcond import Probe
from wellcond.probe.steps import StepProbe, check_settings, summary


def tiny(**kwargs):
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **{**settings, **kwargs})


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def steps_of(rows):
    return sorted({row["step"] for row in rows})


@pytest.mark.parametrize("exact", [True, False])
def test_the_first_pass_of_a_step_is_measured_and_the_hooks_are_gone_after_it(exact):
    model, batches = tiny().train(), torch.randn(2, 4, 3, 16, 16)
    probe = StepProbe(model, every=2, exact=exact)
    probe.begin(4)
    assert hooks(model) > 0
    model(batches[0])
    assert hooks(model) == 0
    model(batches[1])
    assert probe.end()
    truth = Probe(model, every=1, exact=exact)
    truth.step = 4
    with truth:
        model(batches[0])
    assert probe.rows() == truth.rows()


def test_a_step_of_several_batches_is_measured_once_and_other_steps_are_not():
    model, images = tiny().train(), torch.randn(4, 3, 16, 16)
    probe, measured = StepProbe(model, every=2), []
    for step in [0, 0, 1, 1, 2, 2, 3]:
        probe.begin(step)
        model(images)
        measured.append(probe.end())
    assert measured == [True, False, False, False, True, False, False]
    assert steps_of(probe.rows()) == [2]  # the file has all, the memory the last


def test_a_failing_pass_leaves_no_hooks():
    model = tiny().train()
    probe = StepProbe(model)
    probe.begin(0)
    with pytest.raises(AssertionError):
        model(torch.randn(4, 3, 20, 20))
    assert hooks(model) == 0


def test_a_model_that_is_not_called_is_an_error_at_once_and_a_warning_later():
    model = tiny().train()
    probe = StepProbe(model)
    probe.begin(0)
    model.forward_features(torch.randn(4, 3, 16, 16))
    with pytest.raises(RuntimeError, match="VisionTransformer was not called"):
        probe.end()
    assert hooks(model) == 0
    probe.begin(1)
    model(torch.randn(4, 3, 16, 16))
    probe.end()
    probe.begin(2)
    with pytest.warns(UserWarning, match="not called in step 2"):
        assert not probe.end()


def test_the_summary_names_mean_and_worst_block_of_each_site():
    model = tiny(depth=3).train()
    probe = StepProbe(model, sites=("sa", "+mlp"))
    probe.begin(0)
    model(torch.randn(4, 3, 16, 16))
    probe.end()
    kappas = {
        row["index"]: row["value"] for row in probe.rows() if row["name"] == "log_kappa" and row["site"] == "+mlp"
    }
    found = summary(probe.rows())
    assert set(found) == {
        f"probe/{site}/{name}"
        for site in ("sa", "plus_mlp")
        for name in ("mean_log_kappa", "worst_log_kappa", "worst_block")
    }
    assert found["probe/plus_mlp/mean_log_kappa"] == pytest.approx(sum(kappas.values()) / 3)
    assert (
        kappas[found["probe/plus_mlp/worst_block"]] == found["probe/plus_mlp/worst_log_kappa"] == max(kappas.values())
    )


def test_a_block_of_nan_is_the_worst_and_does_not_hide_the_mean_of_the_others():
    model = tiny(depth=3).train()
    with torch.no_grad():
        model.blocks[1].attn.proj.bias[0] = math.nan
    probe = StepProbe(model, sites="sa", blocks=[0, 1])
    probe.begin(0)
    model(torch.randn(4, 3, 16, 16))
    probe.end()
    found = summary(probe.rows())
    assert math.isfinite(found["probe/sa/mean_log_kappa"])
    assert math.isnan(found["probe/sa/worst_log_kappa"])
    assert found["probe/sa/worst_block"] == 1


def test_unknown_settings_are_refused_by_name():
    check_settings({"sites": "sa", "max_samples": 3})
    with pytest.raises(ValueError, match="no setting sight; its settings are sites, blocks"):
        check_settings({"sight": "sa"})
    check_settings({}, "auto")
    with pytest.raises(ValueError, match="every must be a whole number from 1 on"):
        check_settings({}, "often")
