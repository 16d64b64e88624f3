"""What pages know of the evidence: the packaged file is read without torch, and the nearest models are found."""

import math

import pytest

from wellcond.claims.reference import ADVICE
from wellcond.report import reference as module
from wellcond.report.advice import advise
from wellcond.report.reference import Band, Reference, reference, verdict_on
from wellcond.words import DEFAULT_SITES


def models(**more):
    return {"model": "ViT", "tokens": 65, "width": 192, "sets": ["CIFAR-10"], "runs": 3, "untrained": {}, **more}


MADE_UP = Reference.of(
    {
        "models": [
            models(trained={"sa": [10.0, 11.0, 12.0]}),
            models(model="square", tokens=130, width=128, runs=1, trained={"sa": [16.0, 17.0, 18.0]}),
        ],
        "advice": {
            "gray": {"claim": "asa-table2", "verdict": "holds", "finding": ""},
            "restore_skip": {"claim": "asa-fig1c", "verdict": "smoke only", "finding": ""},
        },
    }
)


@pytest.mark.parametrize(
    ("shape", "found"),
    [((65, 192), "ViT"), ((197, 768), "ViT"), ((17, 64), "ViT"), ((197, 192), "square"), ((0, 0), "ViT")],
)
def test_the_nearest_are_near_in_tokens_and_width(shape, found):
    assert MADE_UP.nearest(*shape).model == found
    assert Reference(models=[], advice={}).nearest(*shape) is None


def test_a_small_model_is_not_compared_with_a_large_one_of_the_same_aspect_ratio():
    large = Reference.of({"models": [models(trained={}), models(model="ViT-Base", tokens=197, width=768, trained={})],
                          "advice": {}})  # fmt: skip
    assert abs(math.log((17 / 64) / (197 / 768))) < abs(math.log((17 / 64) / (65 / 192)))
    assert large.nearest(17, 64).model == "ViT"
    assert reference().nearest(17, 64).shape == "65 tokens of 192 values"  # of train digits


def test_what_is_far_from_all_has_no_reference_and_is_told_why():
    for tokens, width, near in ((65 * 4, 192 * 4, True), (65 * 4, 192 * 5, False), (1370, 384, False), (4, 16, False)):
        assert (MADE_UP.nearest(tokens, width) is not None) == near
        assert (MADE_UP.too_far(tokens, width) == "") == near
    assert "the nearest models in our evidence have 130 tokens of 128 values; here 1370 of 384" in MADE_UP.too_far(
        1370, 384
    )
    assert Reference(models=[], advice={}).too_far(4, 16) == ""


def test_what_is_said_of_them():
    first, second = MADE_UP.models
    assert first.trained["sa"] == Band(10.0, 11.0, 12.0)
    assert str(first.trained["sa"]) == "10.0 to 12.0"
    assert (first.them, second.them) == ("ViTs", "square")
    assert first.about == "3 runs on CIFAR-10, 65 tokens of 192 values"


def test_advice_carries_our_own_verdict(monkeypatch):
    monkeypatch.setattr(module, "reference", lambda: MADE_UP)
    assert verdict_on("gray") == "our own verdict: holds, asa-table2"
    assert verdict_on("restore_skip") == "we have no verdict yet: asa-fig1c"


def test_the_packaged_file_has_what_pages_ask_for():
    for advice in ADVICE:
        assert verdict_on(advice)
    largest = reference().models[0]
    for bands in (largest.trained, largest.untrained):
        assert set(DEFAULT_SITES) <= set(bands)
        assert all(band.low <= band.median <= band.high for band in bands.values())
    assert largest.trained["sa"].low > largest.trained["+sa"].high  # asa-fig1b, which holds
    assert callable(advise)
