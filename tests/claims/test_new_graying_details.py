import pytest
import torch
from rich.console import Console

from wellcond.bench.photographs import MEAN, STD, photographs
from wellcond.claims.new_graying_details import CHANGED, CLAIM, VARIANTS, grayed_images
from wellcond.claims.reproduce import reproduce
from wellcond.graying import TokenGraying
from wellcond.numerics.fused import tokens_of
from wellcond.numerics.singular import condition_number
from wellcond.records import read_json

MEANS, STDS = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
USUAL = [name for name in VARIANTS if name not in CHANGED]


def grayed(name, images, patch=8):
    return grayed_images(images, VARIANTS[name], patch, MEANS, STDS)


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_way_is_that_of_our_module(name):
    images, how = photographs(3, 32), VARIANTS[name]
    ours = TokenGraying(how.method, how.epsilon, patch_size=8)(images.double())
    torch.testing.assert_close(grayed(name, images).double(), ours, rtol=1e-6, atol=1e-6)


def test_each_change_is_the_one_it_is_called():
    images = photographs(3, 32)
    printed = torch.linalg.svdvals(tokens_of(grayed("svd-0.7-printed", images).double(), 8, 8))
    torch.testing.assert_close(printed[:, 0], torch.ones(3).double(), rtol=1e-6, atol=0)
    usual = torch.linalg.svdvals(tokens_of(grayed("svd-0.7", images).double(), 8, 8))
    torch.testing.assert_close(printed / printed[:, :1], usual / usual[:, :1], rtol=1e-4, atol=1e-8)

    def kappa(pixels):
        return condition_number(tokens_of(pixels.double(), 8, 8))

    pixels = images.double() * STDS + MEANS
    grayed_first = grayed("svd-0.7-before", images).double() * STDS + MEANS
    torch.testing.assert_close(kappa(grayed_first), kappa(pixels) ** 0.7, rtol=1e-3, atol=0)

    swapped = VARIANTS["dct-0.95-by-pixel"]
    by_pixel = torch.arange(3 * 64).view(3, 64).T.flatten()  # red, green and blue of each pixel side by side
    tokens = tokens_of(images.double(), 8, 8)[..., by_pixel]
    from_pixels = tokens_of(grayed("dct-0.95-by-pixel", images).double(), 8, 8)[..., by_pixel]
    module = TokenGraying(swapped.method, swapped.epsilon, patch_size=(1, 192))
    rows = module(tokens[:, None].reshape(3, 1, 16, 192)).reshape(3, 16, 192)
    torch.testing.assert_close(from_pixels, rows, rtol=1e-5, atol=1e-5)


def record(name, printed=0.5, order=0.01):
    found = {"plain": [6.4, 6.5, 6.45]}
    found |= {one: [value - 0.1 for value in found["plain"]] for one in USUAL}
    for one in CHANGED:
        moved = printed if one == "svd-0.7-printed" else order
        found[one] = [value + moved for value in found[VARIANTS[one].usual]]
    return {"data": name, "scale": "lab", "model": "vit_base_patch16_224", "images": 16, "seeds": 3, "+sa": found}


def test_a_detail_holds_if_it_moves_nothing(cells):
    records = [record(name) for name in CLAIM.sets]
    whole = CLAIM.verdict(records)
    assert whole.verdict == "holds in part"
    assert {part.outcome for part in whole.parts if "the largest value 1" in part.name} == {"does not hold"}
    assert {part.outcome for part in whole.parts if "the largest value 1" not in part.name} == {"holds"}
    said = CLAIM.says({one["data"]: one for one in records})
    assert (
        "values (for the DCT) moves log κ after attention by at most 0.01, graying before normalising by at most 0.01"
        in said
    )
    assert said.endswith("moves it by +0.50 on Tiny-ImageNet and +0.50 on Imagenette.")
    lines = cells(CLAIM.lines(records[1]))
    assert [what for what, row in lines.items() if "the paper" in row] == [
        f"Imagenette, {VARIANTS[name].title}" for name in USUAL
    ]
    assert lines["Imagenette, DCT ε .95"] == {
        "log κ of +sa": "6.35 [6.23, 6.47]", "lower than without graying by": "0.10 [0.10, 0.10]",
        "the paper": "0.31, trained on ImageNet-1K",
    }  # fmt: skip
    assert not any("the paper" in row for row in cells(CLAIM.lines(records[0])).values())


def test_smoke(tmp_path):
    places = {"output": tmp_path / "runs", "evidence": tmp_path / "evidence"}
    assert reproduce("new-graying-details", scale="smoke", console=Console(quiet=True), **places) == 0
    found = read_json(tmp_path / "evidence" / "new-graying-details" / "smoke-digits.json")
    assert set(found["+sa"]) == {"plain", *VARIANTS}
    assert found["+sa"]["dct-0.95-by-pixel"] == found["+sa"]["dct-0.95"]  # digits have a single channel
    assert found["+sa"]["svd-0.7"] != found["+sa"]["svd-0.7-printed"]
