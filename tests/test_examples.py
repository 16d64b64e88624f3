"""Every example runs as a stranger would run it: from another folder, with nothing but its own options. One is a
command; the others start from a process that has imported torch, to save the time for it."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from wellcond.records import read_rows

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {
    "plain_loop.py": (),
    "accelerate_loop.py": ("accelerate",),
    "lightning_fit.py": ("lightning",),
    "huggingface_trainer.py": ("transformers", "accelerate"),
}
TIMM_TRAIN = "WELLCOND_TIMM_TRAIN"


def run(folder, *arguments):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    env.pop("PYTEST_CURRENT_TEST", None)
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, encoding="utf-8", timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


SCRIPT = """
import os, runpy, sys
os.chdir(sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_forked(launcher, folder, *arguments, world=1):
    started = launcher.program(
        SCRIPT, folder, *arguments, log=folder / "log.txt", env={"TQDM_DISABLE": "1"}, world=world
    )
    assert set(started.wait()) == {0}, started.output()[-6000:]
    return started.output()


def check(rows, *, blocks, steps):
    assert sorted({row["step"] for row in rows}) == steps
    assert {row["index"] for row in rows} == set(range(blocks))
    assert {row["site"] for row in rows} == {"sa", "+sa", "mlp", "+mlp"}
    kappas = [row["value"] for row in rows if row["name"] == "log_kappa"]
    assert len(kappas) == len(steps) * blocks * 4  # no step twice
    assert all(0 < value < 17 for value in kappas)


def test_every_example_is_tested_and_named_in_the_readme():
    here = {path.name for path in EXAMPLES.glob("*.py")}
    assert here == {*NEEDS, "timm_train.py"}
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"]({name})" in text for name in here)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_it_trains_measures_and_prints_two_tables(name, tmp_path, launcher):
    for package in NEEDS[name]:
        pytest.importorskip(package)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "probe.jsonl").write_text("of an earlier run\n")
    options = EXAMPLES / name, "--epochs", 1, "--output", "out"
    said = run_forked(launcher, tmp_path, *options) if NEEDS[name] else run(tmp_path, *options)
    assert said.count("+mlp") == 2
    assert said.index("before training") < said.index("after training")
    # 29 batches; with accelerate two of them are one step, and the last of the epoch has one
    last = [28] if name in ("lightning_fit.py", "huggingface_trainer.py") else []  # callbacks know it
    steps = [0, 10] if "accelerate" in name else [0, 20, *last]
    check(read_rows(tmp_path / "out" / "probe.jsonl"), blocks=6, steps=steps)


@pytest.mark.slow
def test_two_processes_with_accelerate_measure_together(tmp_path, launcher):
    """With the variables that torchrun sets."""
    pytest.importorskip("accelerate")
    options = EXAMPLES / "accelerate_loop.py", "--epochs", 1, "--output", "out", "--cpu"
    said = run_forked(launcher, tmp_path, *options, world=2)
    assert said.count("after training") == 1  # one of them prints
    rows = read_rows(tmp_path / "out" / "probe.jsonl")
    check(rows, blocks=6, steps=[0])  # and one writes; each has half of the batches
    assert {row["count"] for row in rows if row["name"] == "log_kappa"} == {128}


@pytest.fixture
def folder_of_digits(tmp_path):
    digits = load_digits()
    for number in range(32):
        pixels = (digits.images[number] * 15).astype("uint8")
        for split in ("train", "validation"):
            path = tmp_path / "digits" / split / str(digits.target[number] % 2) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((32, 32)).convert("RGB").save(path)
    return tmp_path / "digits"


@pytest.mark.slow
@pytest.mark.skipif(TIMM_TRAIN not in os.environ, reason=f"set {TIMM_TRAIN} to the train.py of timm's repository")
@pytest.mark.parametrize("more", [(), ("--torchcompile", "eager", "--amp", "--amp-dtype", "bfloat16")], ids=str)
def test_timms_own_script_trains_with_a_probe_inside(more, tmp_path, folder_of_digits):
    options = {
        "--data-dir": folder_of_digits, "--model": "vit_tiny_patch16_224", "--img-size": 32, "--num-classes": 2,
        "--epochs": 2, "--warmup-epochs": 0, "--cooldown-epochs": 0, "--batch-size": 8, "--grad-accum-steps": 2,
        "--workers": 0, "--device": "cpu", "--output": "out", "--experiment": "a",
    }  # fmt: skip
    arguments = [word for option in options.items() for word in option]
    sizes = ["--model-kwargs", "img_size=32", "patch_size=8", "depth=3", "embed_dim=32", "num_heads=2"]
    script = Path(os.environ[TIMM_TRAIN]).resolve()
    said = run(tmp_path, EXAMPLES / "timm_train.py", "--every", 2, script, *arguments, *sizes, "--model-ema", *more)
    assert said.index("at the first step") < said.index("at the last measured step")
    # 32 images in batches of 8, two to a step, for two epochs: four steps, and no pass of a validation among them
    check(read_rows(tmp_path / "out" / "a" / "probe.jsonl"), blocks=3, steps=[0, 2])


def test_timms_script_may_be_missing_but_not_in_silence(tmp_path):
    main = runpy.run_path(str(EXAMPLES / "timm_train.py"))["main"]
    with pytest.raises(SystemExit, match=r"it should be train\.py of timm's repository"):
        main(script=tmp_path / "train.py", every=1, arguments=[])
