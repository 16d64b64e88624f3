"""The trainings on ImageNet are rehearsed: each can be built, and its command parsed."""

import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from wellcond.claims.asa_table4 import ARMS
from wellcond.claims.claim import Options
from wellcond.claims.imagenet import IMAGES, TABLES, gpu_hours, plan
from wellcond.cli.training import configure
from wellcond.records import write_json

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("id_", list(TABLES))
def test_every_training_of_a_table_is_built_and_its_command_is_that_training(id_):
    lines = plan(id_, Options(scale="paper", evidence=ROOT / "evidence"))
    commands = [shlex.split(line) for line in lines if line.startswith("    torchrun")]
    assert len(commands) == len(TABLES[id_])
    for words, launch in zip(commands, TABLES[id_], strict=True):
        settings = [after for word, after in pairwise(words) if word == "--set"]
        name = words[words.index("train") + 1]
        config = configure(name, scale="paper", options={}, settings=[s for s in settings if "checkpoint" not in s])
        assert (config.gray, config.recipe) == (launch.gray, launch.recipe)
        assert config.epsilon == launch.settings.get("epsilon", 0.95)
        assert any("checkpoint" in setting for setting in settings) is (launch.after is not None)
    assert sum("GPU hours, at" in line for line in lines) == len(commands)
    assert "nothing was trained" in lines[-1]


def test_a_finetuning_starts_where_its_pretraining_ends():
    pretraining, finetuning = TABLES["asa-table5"][2:]
    steps = 400 * (IMAGES // 2048)
    assert f"runs/paper/{pretraining.name}/checkpoints/step-{steps:08d}/model.safetensors" in finetuning.command()


def test_table_4_is_the_claims_arms():
    assert {launch.recipe for launch in TABLES["asa-table4"]} == {arm.recipe for arm in ARMS.values()}
    assert len(TABLES["asa-table4"]) == len(ARMS)


def test_hours_are_those_of_measured_speeds(tmp_path):
    assert gpu_hours("vit_base", 3395.0) == pytest.approx(300 * IMAGES / 3395 / 3600)
    nothing = plan("asa-fig5", Options(scale="paper", evidence=tmp_path / "evidence"))
    assert [line for line in nothing if "GPU hours" in line] == nothing[-2:-1]  # which says where they would come from
    run = tmp_path / "evidence" / "runs" / "lab" / "imagenette" / "vit_base" / "vit_base" / "seed-0-lr-0.0003"
    write_json(run / "result.json", {"images_per_second": 1000.0})
    own = plan("asa-fig5", Options(scale="paper", evidence=tmp_path / "evidence"))
    assert any(f"{300 * IMAGES / 1000 / 3600:,.0f} GPU hours" in line and "on Imagenette" in line for line in own)
    # Where this very model was timed by itself, that counts; a training may have shared its GPU.
    row = {"kind": "step", "ms": 64.0, "model": "vit_base_patch16_224", "epsilon": None}
    rows = [row | {"path": "plain"}, row | {"path": "dct", "epsilon": 0.95}]
    rows += [row | {"path": "dct", "epsilon": 0.8, "ms": 128.0}]  # graying of another strength, computed in float64
    write_json(tmp_path / "benchmarks" / "graying-h200.json", {"batch_size": 256, "rows": rows})
    timed = plan("asa-fig5", Options(scale="paper", evidence=tmp_path / "evidence"))
    assert sum("at 4,000 images per second and GPU (benchmarks/graying-h200.json)" in line for line in timed) == 2
    assert plan("asa-fig1c", Options(scale="paper")) == []
