import re

import pytest
import torch

from wellcond.demo import demo
from wellcond.demo import graying as demo_graying
from wellcond.demo import training as demo_training
from wellcond.demo.training import ARMS
from wellcond.records import read_json
from wellcond.words import BLOCK_SITES as SITES

QUICK = ["epochs=1", "model_kwargs=img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2", "batch_size=256"]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    demo.run(folder, settings=QUICK)
    return folder


def test_the_record_of_graying_holds_every_measurement(output):
    record = read_json(output / "graying.json")
    found = record["measurements"]
    assert {(one["photograph"], one["method"]) for one in found} == {
        (photo.name, method) for photo in demo_graying.load_photographs() for method in ("none", "svd", "dct")
    }
    assert all(len(one["spectrum"]) == 196 for one in found)
    assert record["environment"]["versions"]["torch"]


def test_the_record_of_training_holds_every_arm_at_both_ends(output):
    arms = read_json(output / "training.json")["arms"]
    assert list(arms) == [title for title, _ in ARMS.values()]
    for arm in arms.values():
        assert 0 <= arm["metrics"]["top1"] <= 1
        for when in ("trained", "untrained"):
            assert {site: len(values) for site, values in arm["log_kappa"][when].items()} == dict.fromkeys(SITES, 1)
    # Without its skip the stream is the branch, to the bit; with it, it is not.
    bare, plain = arms["no attention skip"]["log_kappa"]["trained"], arms["both skips"]["log_kappa"]["trained"]
    assert bare["sa"] == bare["+sa"]
    assert plain["sa"] != plain["+sa"]


def test_the_page_says_what_was_measured(output):
    page = (output / "index.html").read_text(encoding="utf-8")
    for one in read_json(output / "graying.json")["measurements"]:
        if one["epsilon"] in demo_graying.EPSILONS:
            assert f"{one['log_kappa']:.3f}" in page
    for arm in read_json(output / "training.json")["arms"].values():
        assert f"{100 * arm['metrics']['top1']:.1f}" in page
        assert f"{arm['log_kappa']['trained']['sa'][0]:.2f}" in page
    assert len(page) < 2e6
    assert len(re.findall("<img src=.data:", page)) == 2 * len(demo_graying.CURVE)
    for title in ("Training loss", "Accuracy on new digits", "Spectrum of china", "What is decided", "Larger evidence"):
        assert title in page
    first = read_json(output / "graying.json")["measurements"][0]["kappa"]
    assert re.search(f"<h1>Graying lowers κ .* from {first:,.0f} to [0-9,]+, as proven</h1>", page)


def test_a_second_run_trains_nothing_and_replaces_the_page(output, capsys):
    before = (output / "index.html").stat().st_ino
    torch.set_num_threads(2)
    try:
        path = demo.run(output, settings=QUICK)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert path == output / "index.html"
    assert path.stat().st_ino != before
    names = sorted(file.name for file in output.iterdir())
    assert names == ["graying.json", "index.html", "runs", "training.json"]
    out = capsys.readouterr().out
    assert str(path) in out.replace("\n", "")
    assert out.count("done before") == len(ARMS)


def test_a_length_in_steps_takes_the_place_of_the_epochs():
    config = demo_training.configure("both", ["steps=10"])
    config.check()
    assert config.steps == 10


def test_other_settings_are_other_runs():
    plain, changed = (demo_training.configure("both", settings) for settings in ([], ["epochs=2"]))
    assert demo_training._digest(plain) != demo_training._digest(changed)
    assert [demo_training.configure(arm).remove_skips for arm in ARMS] == [(), ("sa",), ("mlp",), ()]
    assert demo_training.configure("dct").gray == "dct"
