import io
import os
import signal
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from wellcond.claims import runs as module
from wellcond.claims.measurements import measure_ends
from wellcond.claims.runs import WEIGHTS, Planned, Runs, config_difference
from wellcond.models import remove_skip
from wellcond.numerics import measure_conditioning
from wellcond.records import read_json, write_json
from wellcond.train.checkpoint import latest
from wellcond.train.config import Config
from wellcond.train.loop import _Run
from wellcond.train.recipes import recipe
from wellcond.train.stopping import Interrupted, OutOfTime
from wellcond.words import BLOCK_SITES

TINY = {
    "epochs": 2,
    "lr": 1e-3,
    "batch_size": 256,
    "model_kwargs": {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2},
}
CONSOLE = Console(quiet=True)


def plan(name="a", *, measure=(), **changes):
    return Planned(name=name, config=recipe("digits", **TINY).changed(changes), measure=measure)


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path, console=CONSOLE, device="cpu")


def interrupt_the_training(monkeypatch):
    """A real signal, when the training has begun to listen for it."""
    go = _Run.go

    def signalled(self, asked):
        os.kill(os.getpid(), signal.SIGINT)
        return go(self, asked)

    monkeypatch.setattr(_Run, "go", signalled)


def test_what_is_done_is_not_run_again(runs, monkeypatch):
    first = runs.run(plan())
    assert first["status"] == "finished"
    assert 0 <= first["metrics"]["top1"] <= 1
    assert first["environment"]["versions"]["torch"]
    assert first["losses"][-1][0] == 2.0

    def fail(*args, **kwargs):
        raise AssertionError("it was trained again")

    monkeypatch.setattr(module, "train", fail)
    assert runs.run(plan()) == first
    assert runs.trained == 1


def test_other_data_than_before_are_told_once(tmp_path):
    console = Console(record=True, width=300, file=io.StringIO())
    runs = Runs(tmp_path, console=console, device="cpu")

    def train(name, **changes):
        runs.run(plan(f"digits/vit/both/{name}", epochs=1, **changes))
        return console.export_text(clear=True).count("these data differ from those of earlier results")

    assert train("seed-0") == 0
    assert train("seed-1", seed=1) == 0
    assert train("grid-0", holdout=0.1) == 0  # another part of the set
    for path in tmp_path.rglob("result.json"):
        write_json(path, read_json(path) | {"data": "of another order"})
    assert train("seed-2", seed=2) == 1
    assert train("seed-3", seed=3) == 0


def test_an_interrupted_run_goes_on_to_the_same_bits(runs, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_the_training(patch)
        with pytest.raises(Interrupted):
            runs.run(plan("stopped"))
    assert not (tmp_path / "stopped" / "result.json").exists()
    assert latest(tmp_path / "stopped" / "checkpoints").step == 1
    assert runs.run(plan("stopped"))["metrics"] == runs.run(plan("whole"))["metrics"]
    a, b = (latest(tmp_path / name / "checkpoints").model for name in ("stopped", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_diverged_run_is_a_result(runs):
    config = {"lr": 1e30, "opt": "sgd", "epochs": 3, "log_every": 1}
    found = runs.run(plan(**config))
    assert found["status"] == "diverged"
    assert found["metrics"] is None
    assert "diverged at step" in found["why"]
    assert 0 < found["steps"] < 66
    start = replace(plan(**config), keep_weights=True)  # it has none to keep, and is not tried again for them
    assert runs.run(start) == found
    with pytest.raises(OutOfTime, match=f"starts from the weights of {start.name}, and it diverged"):
        runs.run(replace(plan("c"), start=start.name))
    assert runs.run(plan(**config)) == found
    assert runs.trained == 1


def test_another_configuration_is_refused(runs):
    runs.run(plan())
    with pytest.raises(ValueError, match=r"lr: 0.001 there, 0.1 now"):
        runs.run(plan(lr=0.1))


def test_a_setting_that_came_later_had_its_default():
    config = plan(epsilon=0.9).config
    older = {name: value for name, value in config.as_json().items() if name not in ("flip", "epsilon")}
    assert config_difference(config.changed({"epsilon": Config().epsilon}), older) == ""
    assert config_difference(config, older).startswith("epsilon: ")


def test_a_result_holds_no_path_of_this_machine(runs, tmp_path):
    runs.run(plan(measure=("log_kappa",)))
    assert str(tmp_path) not in (tmp_path / "a" / "result.json").read_text(encoding="utf-8")
    assert read_json(tmp_path / "a" / "result.json")["config"]["cache_dir"] == ""


def test_a_run_starts_from_the_weights_of_another(runs, tmp_path):
    """In float16: what the other ended with, rounded, is what this one begins with."""
    first = Planned(name="first", config=plan().config, keep_weights=True)
    second = Planned(name="second", config=plan(lr=0.0, warmup_epochs=0).config, start="first")
    with pytest.raises(OutOfTime, match="second starts from the weights of first, and these are not in"):
        runs.run(second)
    assert runs.left == ["second"]
    runs.run(first)
    found = runs.run(second)
    assert (found["start"], found["config"]["checkpoint"]) == ("first", "")
    assert found["data"] == runs.finished(first)["data"]  # the same samples in the same order
    assert len(found["data"]) == 16
    ends = [latest(tmp_path / name / "checkpoints").model for name in ("first", "second")]
    assert all(torch.equal(ends[0][name].half().float(), ends[1][name]) for name in ends[0])
    assert runs.finished(second) == found
    (tmp_path / "first" / WEIGHTS).unlink()
    assert runs.finished(first) is None
    assert runs.finished(second) == found
    runs.run(first)  # goes on from its end
    assert (tmp_path / "first" / WEIGHTS).exists()


def test_many_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without torchrun"):
        Runs(tmp_path, console=CONSOLE)


def test_both_ends_are_measured_against_float64(runs, tmp_path):
    """The attention's output of the first block, computed by hand from the saved weights."""
    import timm

    from wellcond.data import EvalBatches, open_data

    planned = plan(measure=("log_kappa",), remove_skips=["sa"])
    found = runs.run(planned)["log_kappa"]
    assert found == measure_ends(planned.config, tmp_path / "a", device="cpu")
    assert (found["images"], found["blocks"]) == (36, 2)
    data = open_data("digits", image_size=8)
    images = torch.cat([x for x, _ in EvalBatches(data.val, batch_size=360)])[::10].double()
    torch.manual_seed(planned.config.seed)
    model = timm.create_model(planned.config.model, num_classes=10, in_chans=1, **planned.config.model_kwargs)
    remove_skip(model, "sa")
    model = model.eval().double()
    for when in ("untrained", "trained"):
        if when == "trained":
            model.load_state_dict(latest(tmp_path / "a" / "checkpoints").model)
        block = model.blocks[0]
        with torch.no_grad():
            tokens = model._pos_embed(model.patch_embed(images))
            normed = measure_conditioning(block.norm1(tokens)).log_kappa.mean().item()
            truth = measure_conditioning(block.attn(block.norm1(tokens))).log_kappa.mean().item()
        assert found[when]["sa"][0] == pytest.approx(truth, abs=2e-3)
        assert found[when]["in"][0] == pytest.approx(normed, abs=2e-3)
        assert found[when]["+sa"] == found[when]["sa"]  # without its skip
    assert list(found["trained"]) == list(BLOCK_SITES)
    # The second block lies beyond float32 and is not compared; the first is, and agrees.
    assert max(found["largest distance from float64"].values()) < 0.01
    assert found["capped"]["trained"] > 0


def test_the_limit_leaves_time_to_measure_and_does_not_stay_in_the_result(tmp_path):
    runs = Runs(tmp_path, console=CONSOLE, device="cpu", time_limit="1h")
    assert runs._config(plan(measure=("log_kappa",))).time_limit == "3590s"
    assert runs._config(plan()).time_limit == "3600s"
    result = runs.run(plan(measure=("log_kappa",)))
    assert result["log_kappa"]["trained"]
    assert result["config"]["time_limit"] == ""
    assert Runs(tmp_path, console=CONSOLE, device="cpu").run(plan(measure=("log_kappa",))) == result


def test_what_another_machine_has_finished_is_done_here(tmp_path, monkeypatch):
    """With its result alone, kept beside the evidence; other measurements on the way do not make it another run."""
    kept = tmp_path / "kept"
    first = Runs(tmp_path / "there", console=CONSOLE, device="cpu", kept=kept).run(plan("digits/vit/both/seed-0"))

    def fail(*args, **kwargs):
        raise AssertionError("it was trained again")

    monkeypatch.setattr(module, "train", fail)
    here = Runs(tmp_path / "here", console=CONSOLE, device="cpu", kept=kept)
    assert here.run(plan("digits/vit/both/seed-0", probe_every=7)) == first
    assert [run["name"] for run in here.results("digits/vit/both/seed-*")] == ["digits/vit/both/seed-0"]
    with pytest.raises(ValueError, match="--evidence another one"):
        here.run(plan("digits/vit/both/seed-0", lr=0.5))


def test_a_result_that_was_not_copied_to_the_evidence_is_copied_later(tmp_path):
    """The main process may be killed while a run of another process is about to end."""
    name, kept = "digits/vit/both/seed-0", tmp_path / "kept"
    first = Runs(tmp_path / "here", console=CONSOLE, device="cpu", kept=kept).run(plan(name))
    (kept / name / "result.json").unlink()
    Runs(tmp_path / "here", console=CONSOLE, device="cpu", kept=kept).run(plan(name))
    assert read_json(kept / name / "result.json") == first


def test_of_arms_that_are_not_asked_for_nothing_is_trained(tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    done = Runs(tmp_path / "there", console=CONSOLE, device="cpu", kept=kept).run(plan("digits/vit/both/seed-0"))
    some = Runs(tmp_path / "here", console=CONSOLE, device="cpu", kept=kept, arms=["no-sa"])
    assert some.run(plan("digits/vit/both/seed-0")) == done  # what is done is read all the same
    with pytest.raises(OutOfTime):
        some.run(plan("digits/vit/both/seed-1"))
    assert (some.left, some.left_out) == ([], ["digits/vit/both/seed-1"])
    assert some.run(plan("digits/vit/no-sa/seed-0"))["status"] == "finished"
    one = Runs(tmp_path / "here", console=CONSOLE, device="cpu", kept=kept, seeds=1)
    with pytest.raises(OutOfTime):
        one.run(plan("digits/vit/both/seed-1", seed=1))
    assert one.run(plan("digits/vit/no-sa/grid-0.1"))["status"] == "finished"


def test_what_is_asked_for_later_is_measured_where_the_weights_are(tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    there = Runs(tmp_path / "there", console=CONSOLE, device="cpu", kept=kept)
    assert "log_kappa" not in there.run(plan())
    here = Runs(tmp_path / "here", console=CONSOLE, device="cpu", kept=kept)
    assert here.run(plan(measure=("log_kappa",)))["log_kappa"] is None  # only the result was carried here
    reads = Runs(tmp_path / "there", console=CONSOLE, device="cpu", kept=kept, training=False)
    assert reads.run(plan(measure=("log_kappa",)))["log_kappa"] is None  # nor where it could: there may be no data
    with pytest.raises(OutOfTime):
        reads.run(replace(plan("b"), start="weights/of/another"))
    assert reads.left_out == ["b"]
    found = there.run(plan(measure=("log_kappa",)))["log_kappa"]
    assert found["trained"]
    assert read_json(kept / "a" / "result.json")["log_kappa"] == found
    assert here.run(plan(measure=("log_kappa",)))["log_kappa"] == found
    with pytest.raises(ValueError, match="there is no measurement 'kappa'; they are log_kappa"):
        there.run(plan(measure=("kappa",)))
