import pytest

from wellcond.data import Augmentation


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
        ({"crop_ratio": (2.0, 1.0)}, "crop_ratio"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"erasing_mode": "black"}, "choose one of const, rand, pixel"),
        ({"mix_per": "elem"}, "choose one of batch, pair"),
    ],
)
def test_values_that_mean_nothing(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Augmentation(**settings)


def test_which_labels_are_soft() -> None:
    assert not Augmentation(padding=4, flip=0.5, erasing=0.5).soft_labels
    assert Augmentation(label_smoothing=0.1).soft_labels
    assert Augmentation(cutmix=1.0).soft_labels
    assert not Augmentation(cutmix=1.0, mix_prob=0.0).soft_labels


def test_what_batches_cannot_do() -> None:
    with pytest.raises(ValueError, match="make it even"):
        Augmentation(mixup=0.8).check_batches(31, streamed=False)
    with pytest.raises(ValueError, match="cache_limit=0"):
        Augmentation(auto_augment="rand-m9").check_batches(32, streamed=False)
    Augmentation(auto_augment="rand-m9", mixup=0.8).check_batches(32, streamed=True)
