import re

import numpy as np
import pytest
import torch

from wellcond.experiments import demo
from wellcond.records import read_json

PHOTOGRAPHS = demo.load_photographs()


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    demo.run(folder)
    return folder


def test_photographs_are_what_a_model_gets():
    for photo in PHOTOGRAPHS:
        assert photo.pixels.shape == (3, 224, 224)
        assert 0 <= photo.pixels.min() < photo.pixels.max() <= 1
        # one row per patch, its values channel by channel, as a convolution reads them
        patch = ((photo.pixels - demo.MEAN) / demo.STD)[:, 16:32, 48:64]
        assert torch.equal(photo.tokens[14 + 3], patch.flatten())


@pytest.mark.parametrize("photo", PHOTOGRAPHS, ids=lambda photo: photo.name)
def test_measurements_agree_with_float64(photo):
    x = photo.tokens.double().numpy()
    u, s, v = np.linalg.svd(x, full_matrices=False)
    for epsilon in (0.95, 0.5):
        found = demo.measure(photo, "svd", epsilon)
        truth = s[0] * (s / s[0]) ** epsilon
        np.testing.assert_allclose(found.spectrum, truth, rtol=1e-4)
        assert found.kappa == pytest.approx((s[0] / s[-1]) ** epsilon, rel=1e-4)
        assert found.log_kappa == pytest.approx(np.log(found.kappa), rel=1e-6)
        assert found.change == pytest.approx(np.linalg.norm((u * truth) @ v - x) / np.linalg.norm(x), rel=1e-3)
        assert found.status == "ok"


def test_no_graying_changes_nothing():
    photo = PHOTOGRAPHS[0]
    found = demo.measure(photo, "none", 1.0)
    assert found.change == 0
    np.testing.assert_allclose(found.pixels, photo.pixels.permute(1, 2, 0), atol=1e-5)
    np.testing.assert_allclose(found.difference, 0.5, atol=0.1)


def test_the_record_holds_every_measurement(output):
    record = read_json(output / "graying.json")
    found = record["measurements"]
    assert {(one["photograph"], one["method"]) for one in found} == {
        (photo.name, method) for photo in PHOTOGRAPHS for method in ("none", "svd", "dct")
    }
    assert all(len(one["spectrum"]) == 196 for one in found)
    assert record["environment"]["versions"]["torch"]


def test_the_page_says_what_was_measured(output):
    page = (output / "index.html").read_text(encoding="utf-8")
    for one in read_json(output / "graying.json")["measurements"]:
        if one["epsilon"] in demo.EPSILONS:
            assert f"{one['log_kappa']:.3f}" in page
    assert len(page) < 4e6
    assert len(re.findall("<img", page)) == 26
    assert page.count('<figure class="chart"') == 5


def test_a_second_run_replaces_the_first(output, capsys):
    before = (output / "index.html").stat().st_ino
    threads = torch.get_num_threads()
    path = demo.run(output)
    assert path == output / "index.html"
    assert path.stat().st_ino != before
    assert sorted(file.name for file in output.iterdir()) == ["graying.json", "index.html"]
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    assert str(path) in out.replace("\n", "")
    assert "log κ" in out
