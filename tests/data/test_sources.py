from pathlib import Path

import pytest

from wellcond.data import open_data
from wellcond.data.sources import same_kind


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere", "there is no such folder .write a path, or one of cifar10:PATH"),
        ("folder:nowhere", "there is no folder nowhere; name one with train/CLASS/FILE"),
        ("wds:nowhere/train-0.tar", "there is no shard nowhere/train-0.tar"),
        ("cifar10:nowhere", "there is no folder nowhere; cifar10:FOLDER is where torchvision put it"),
        ("folder:", "nothing after the colon; write folder:PATH"),
        ("hf:", "write hf:NAME"),
        ("cifar11:x", "unknown data 'cifar11:x': there is no source 'cifar11'; did you mean cifar10"),
    ],
)
def test_names_that_name_nothing(spec: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        open_data(spec, image_size=16, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_size_of_nothing() -> None:
    with pytest.raises(ValueError, match="image_size is 0"):
        open_data("digits", image_size=0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("photos", "/moved/photos", True),
        ("photos", "folder:/moved/photos", True),
        ("cifar10:a", "cifar10:b", True),
        ("lra_listops:a", "lra_listops:b", True),
        ("wds:a/{train,val}-*.tar", "wds:b", True),
        ("cifar10:a", "cifar100:a", False),
        ("lra_listops", "lra_listops:a", False),
        ("hf:mnist", "hf:food101", False),
        ("digits", "photos", False),
    ],
)
def test_data_of_one_kind_differ_in_the_place_alone(one: str, other: str, same: bool) -> None:
    assert same_kind(one, other) is same
