"""The benchmark of training runs anywhere, and its rates are those of the steady part."""

import math
import sys

import pytest
import torch

from wellcond.bench import training
from wellcond.bench.photographs import write_photographs
from wellcond.bench.training import read_rate, timm_rate
from wellcond.records import TrainRow, read_json


def test_every_loop_is_timed_against_the_model_alone(tmp_path):
    record = read_json(training.run(output=tmp_path / "train.json", device="cpu", quick=True))
    names = [row["training"] for row in record["rows"]]
    assert names == ["model alone", "ours", "ours, mixed images", "ours, a probe every 3 steps"]
    alone = record["rows"][0]
    assert alone["ratio"] == 1
    for row in record["rows"]:
        assert row["ratio"] == pytest.approx(row["images per second"] / alone["images per second"])
        assert row["step ms"] == pytest.approx(1000 * row["batch"] / row["images per second"])
    assert record["environment"]["versions"]["timm"]


def test_a_given_folder_decides_the_classes(tmp_path):
    write_photographs(tmp_path / "data", size=32, classes=3, each=4)
    record = read_json(
        training.run(output=tmp_path / "train.json", device="cpu", batch_size=4, quick=True, data_dir=tmp_path / "data")
    )
    assert {row["classes"] for row in record["rows"]} == {3}
    assert {row["batch"] for row in record["rows"]} == {4}


def test_a_training_that_fails_costs_its_own_row_alone(tmp_path, monkeypatch):
    def fail_if_mixed(config, *args, **kwargs):
        if config.mixup:
            raise RuntimeError("out of memory\nwith a long story")
        return train(config, *args, **kwargs)

    train = training.train
    monkeypatch.setattr(training, "train", fail_if_mixed)
    rows = read_json(training.run(output=tmp_path / "train.json", device="cpu", quick=True))["rows"]
    notes = {row["training"]: row["note"] for row in rows}
    assert notes.pop("ours, mixed images") == "failed: RuntimeError: out of memory"
    assert set(notes.values()) == {""}
    for row in rows:
        assert math.isnan(row["images per second"]) == math.isnan(row["ratio"]) == bool(row["note"])


def test_what_is_timed_on_a_gpu_fits_its_time():
    """All trainings for the setting that is compared with timm; few for the others."""
    settings = list(training._settings(torch.device("cuda"), None, False, None))
    assert [(s.size, s.batch) for s in settings] == [(64, 256), (64, 1024), (32, 256)]
    assert [s.ours for s in settings] == [training.EVERYTHING, ("plain",), ("plain", "mixed")]
    for where, batch in (("cuda", 64), ("cpu", 8)):
        settings = list(training._settings(torch.device(where), batch if where == "cuda" else None, False, None))
        assert [(s.size, s.batch) for s in settings] == [(64, batch), (32, batch)]


def test_the_steady_part_leaves_the_start_and_what_follows_out():
    rates = {10: 1.0, 20: 100.0, 30: 300.0, 40: 1.0}
    rows = [TrainRow(step=step, loss=1.0, images_per_second=rate) for step, rate in rates.items()]
    # As long at 100 as three times as long at 300: the mean over time, and not over windows.
    assert training.steady_rate(rows, batch=8, first=10, last=30) == pytest.approx(150.0)
    with pytest.raises(ValueError, match="no two rows"):
        training.steady_rate(rows, batch=8, first=40, last=50)


def test_timms_rate_is_read_without_the_start_of_the_epoch():
    """Three seconds until the first step is done, then half a second for each."""

    def line(epoch, step, mean):
        return (
            f"Train: {epoch} [{step:>4d}/11 ( 50%)]  Loss: 1.23 (1.24)  Time: 0.500s, {64 / 0.5:>7.2f}/s  "
            f"({mean:.3f}s, {64 / mean:>7.2f}/s)  LR: 1.000e-04  Data: 0.001 (0.002)"
        )

    lines = [line(0, 0, 60.0), line(0, 10, 10.0)]
    lines += [line(1, step, (3.0 + 0.5 * step) / (step + 1)) for step in (0, 5, 10)]
    assert read_rate("\n".join(lines), batch=64) == pytest.approx(128.0, rel=1e-3)
    with pytest.raises(ValueError, match="too few lines"):
        read_rate(lines[0], batch=64)


def test_a_script_that_fails_leaves_a_row_that_says_so(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit('no such option')\n")
    rate, note = timm_rate(sys.executable, script, {"model": "x"}, batch=1)
    assert math.isnan(rate)
    assert note == "failed: no such option"
    with pytest.raises(ValueError, match="no file"):
        training.run(output=tmp_path / "x.json", device="cpu", quick=True, timm_train=tmp_path / "nothing.py")
