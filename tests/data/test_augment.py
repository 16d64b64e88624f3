"""Batched crops, flips, colours, boxes and mixtures against one image at a time."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torchvision.transforms.v2 import functional as tv

from wellcond.data.augment import (
    DRAWS,
    Augmentation,
    Mixing,
    draw_mixing,
    erase_boxes,
    mix_images,
    mix_labels,
    vary_images,
)  # fmt: skip
from wellcond.data.draws import draw_uniform

COUNT, SIDE = 48, 24


@pytest.fixture(scope="module")
def pixels(photos: dict[str, Image.Image]) -> Tensor:
    photo = torch.from_numpy(np.array(photos["flower"])).permute(2, 0, 1)
    return torch.stack([photo[:, 8 * i : 8 * i + SIDE, 12 * i : 12 * i + SIDE] for i in range(COUNT)])


@pytest.fixture(scope="module")
def draws() -> Tensor:
    return draw_uniform(seed=0, epoch=0, rows=torch.arange(COUNT), count=DRAWS)


def test_each_image_has_a_crop_and_flip_of_its_own(pixels: Tensor, draws: Tensor) -> None:
    varied = vary_images(pixels, draws, Augmentation(padding=3, flip=0.5))
    found = []
    for image, result in zip(pixels, varied, strict=True):
        padded = pad(image, [3] * 4)
        crops = {
            (top, left, flipped): crop.flip(2) if flipped else crop
            for top in range(7)
            for left in range(7)
            for crop in [padded[:, top : top + SIDE, left : left + SIDE]]
            for flipped in (False, True)
        }
        matches = [place for place, crop in crops.items() if torch.equal(crop.float(), result)]
        assert len(matches) == 1  # it is a crop, and which one is beyond doubt
        found += matches
    assert len(set(found)) > 30  # of 98 places, 48 draws hit 38 on average
    assert {top for top, _, _ in found} == {left for _, left, _ in found} == set(range(7))
    assert 12 < sum(flipped for _, _, flipped in found) < 36


def test_resized_crops_are_crops_resized(pixels: Tensor, draws: Tensor) -> None:
    """Each result is the bilinear enlargement of one whole-numbered box, in float64; area and shape as asked for."""
    how = Augmentation(scale_min=0.3, flip=0.5)
    varied = vary_images(pixels, draws, how).double()
    boxes, flips = set(), 0
    for image, result in zip(pixels[:5].double(), varied[:5], strict=True):
        best = (1e9, (0, 0, 0, 0), False)
        for high in range(10, SIDE + 1):
            for wide in range(10, SIDE + 1):
                if not (high * wide / SIDE**2 > 0.27 and 0.65 < wide / high < 1.55):
                    continue
                windows = image.unfold(1, high, 1).unfold(2, wide, 1)  # c, tops, lefts, high, wide
                tops, lefts = windows.shape[1:3]
                stacked = windows.permute(1, 2, 0, 3, 4).flatten(0, 1)
                large = interpolate(stacked, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
                for flipped in (False, True):
                    errors = (large.flip(3) if flipped else large).sub(result).abs().amax((1, 2, 3))
                    error, place = errors.min(0)
                    best = min(best, (error.item(), (*divmod(int(place), lefts), high, wide), flipped))
                assert len(errors) == tops * lefts
        assert best[0] < 1e-2, best  # of 255; float32 knows the positions to 1e-6
        boxes.add(best[1])
        flips += best[2]
    assert len(boxes) == 5
    assert 0 < flips < 5


def test_the_whole_image_is_left_alone(pixels: Tensor, draws: Tensor) -> None:
    assert torch.equal(vary_images(pixels, draws, Augmentation()), pixels.float())


def test_colours_against_torchvision(pixels: Tensor, draws: Tensor) -> None:
    strength = 0.4
    varied = vary_images(pixels, draws, Augmentation(color_jitter=strength))
    factors = (1 - strength + 2 * strength * draws[:, 3:6].double()).tolist()
    for image, result, (brightness, contrast, saturation) in zip(pixels, varied, factors, strict=True):
        truth = tv.adjust_brightness(image.double() / 255, brightness)
        truth = tv.adjust_saturation(tv.adjust_contrast(truth, contrast), saturation)
        assert (truth * 255 - result).abs().max() < 0.1  # torchvision's weights of red, green, blue have four digits


def test_erased_boxes(pixels: Tensor, draws: Tensor) -> None:
    images = pixels.float() / 255 + 1
    erased = erase_boxes(images, draws, torch.zeros(COUNT, 3 * SIDE * SIDE), Augmentation(erasing=0.5))
    gone = (erased == 0).all(1)
    assert torch.equal(erased, images * ~gone[:, None])  # the rest is as it was
    count = 0
    for mask in gone:
        if not mask.any():
            continue
        count += 1
        rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
        high, wide = len(rows), len(columns)
        assert mask.sum() == high * wide == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)  # one full box
        assert 0.01 < high * wide / SIDE**2 < 0.4
    assert 12 < count < 36
    assert len({tuple(mask.nonzero()[0].tolist()) for mask in gone if mask.any()}) > count * 0.7


def test_erased_by_noise(draws: Tensor) -> None:
    noise = torch.randn(COUNT, 3 * SIDE * SIDE)
    erased = erase_boxes(torch.full((COUNT, 3, SIDE, SIDE), 99.0), draws, noise, Augmentation(erasing=1))
    box = (erased != 99).all(1, keepdim=True)
    assert box.flatten(1).any(1).float().mean() > 0.9
    assert torch.equal(erased, torch.where(box, noise.view_as(erased), 99.0))


def mix(how: Augmentation, *sizes: int, step: int = 0) -> Mixing:
    sizes = sizes or (COUNT,)
    return draw_mixing(how, sizes, seed=0, epoch=0, step=step, h=SIDE, w=SIDE, device=torch.device("cpu"))


def test_mixup_is_the_mean_of_two_neighbours_and_of_their_labels(pixels: Tensor) -> None:
    mixing = mix(Augmentation(mixup=0.8))
    images, labels = pixels.float(), torch.arange(COUNT) % 5
    mixed = mix_images(images, mixing)
    soft = mix_labels(labels, mixing, num_classes=5, smoothing=0.1)
    shares = mixing.share.tolist()
    assert len(set(shares)) == 1
    for index, share in enumerate(shares):
        other = index ^ 1
        torch.testing.assert_close(mixed[index], share * images[index] + (1 - share) * images[other])
        truth = torch.full((5,), 0.1 / 5)
        truth[labels[index]] += 0.9 * share
        truth[labels[other]] += 0.9 * (1 - share)
        torch.testing.assert_close(soft[index], truth)


def test_cutmix_labels_count_the_pixels() -> None:
    images = torch.arange(COUNT).float()[:, None, None, None].expand(-1, 3, SIDE, SIDE)
    for step in range(20):
        mixing = mix(Augmentation(cutmix=1.0), step=step)
        mixed = mix_images(images, mixing)
        assert ((mixed == images) | (mixed == images[torch.arange(COUNT) ^ 1])).all()
        torch.testing.assert_close((mixed == images).float().mean((1, 2, 3)), mixing.share)


def test_mixup_and_cutmix_take_turns() -> None:
    mixing = mix(Augmentation(mixup=1.0, cutmix=1.0), *[1] * 720)
    share, keep = mixing.share, mixing.keep
    assert (share == 1).float().mean() < 0.1  # some boxes are empty
    mixed = share < 1
    assert torch.equal(keep[keep < 1], share[keep < 1])  # mixup: of pixels as of labels
    assert 0.4 < (keep[mixed] == 1).float().mean() < 0.6


@pytest.mark.parametrize("alphas", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_batches_mixed_together_are_as_mixed_alone(pixels: Tensor, alphas) -> None:
    """To the bit, the last of them with an odd number of images; their numbers are those of their steps."""
    how, sizes = Augmentation(**alphas), (16, 16, 13)
    images, labels = pixels[:45].float(), torch.arange(45) % 5
    mixing = mix(how, *sizes, step=3)
    together = mix_images(images, mixing), mix_labels(labels, mixing, num_classes=5, smoothing=0.1)
    for step, (some, classes, *found) in enumerate(
        zip(*(rows.split(sizes) for rows in (images, labels, *together)), strict=True), 3
    ):
        alone = mix(how, len(some), step=step)
        assert torch.equal(found[0], mix_images(some, alone))
        assert torch.equal(found[1], mix_labels(classes, alone, num_classes=5, smoothing=0.1))


def test_a_mixture_is_what_one_number_or_one_box_makes_of_two_images(pixels: Tensor) -> None:
    """Pair by pair with Python's numbers, to the bit: mixup's share, or a slice copied from the other image."""
    images = pixels.float()
    for step in range(6):
        mixing = mix(Augmentation(mixup=0.8, cutmix=1.0), step=step)
        assert mixing.box is not None
        for index, (result, keep, box) in enumerate(
            zip(mix_images(images, mixing), mixing.keep.tolist(), mixing.box.int().tolist(), strict=True)
        ):
            truth = torch.lerp(images[index ^ 1], images[index], keep)
            top, bottom, left, right = box
            truth[:, top:bottom, left:right] = images[index ^ 1][:, top:bottom, left:right]
            assert torch.equal(result, truth)


def test_an_odd_one_stays_itself() -> None:
    images = torch.rand(5, 1, 4, 4)
    mixing = mix(Augmentation(mixup=1.0), 5)
    assert torch.equal(mix_images(images, mixing)[4], images[4])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"flip": 1.5}, "flip is 1.5; it is a probability"),
        ({"erasing": -0.1}, "erasing is -0.1"),
        ({"padding": -1}, "padding is -1"),
        ({"mixup": float("nan")}, "mixup is nan"),
        ({"scale_min": 0.0}, "scale_min is 0.0"),
        ({"scale_min": 1.1}, "scale_min is 1.1"),
        ({"scale_min": 0.5, "padding": 4}, "two ways to crop"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
    ],
)
def test_values_that_mean_nothing(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Augmentation(**settings)


def test_which_labels_are_soft() -> None:
    assert not Augmentation(padding=4, flip=0.5, erasing=0.5).soft_labels
    assert Augmentation(label_smoothing=0.1).soft_labels
    assert Augmentation(cutmix=1.0).soft_labels


def test_what_batches_cannot_do() -> None:
    with pytest.raises(ValueError, match="make it even"):
        Augmentation(mixup=0.8).check_batches(31, streamed=False)
    with pytest.raises(ValueError, match="cache_limit=0"):
        Augmentation(auto_augment="rand-m9").check_batches(32, streamed=False)
    Augmentation(auto_augment="rand-m9", mixup=0.8).check_batches(32, streamed=True)
