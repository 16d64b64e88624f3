import sys
from pathlib import Path

import pytest

from wellcond.data import DataSet, open_data

SIZE = 16


def open_small(spec: str | Path, cache: Path, **settings) -> DataSet:
    return open_data(str(spec), image_size=SIZE, cache_dir=cache, **settings)


def test_a_folder_through_the_hubs_reader(
    tmp_path: Path, make_tree, check_photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")  # and not the user's
    tree = make_tree()
    data = open_small(f"hf:{tree}", tmp_path / "cache")
    check_photos(data, tree)


def test_the_hub_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'wellcond\[hf\]'"):
        open_small("hf:uoft-cs/cifar10", tmp_path / "cache")
