"""Every validation image is counted once, however few there are for the processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wellcond import records
from wellcond.bench.photographs import write_photographs
from wellcond.train.config import Config
from wellcond.train.loop import train


@pytest.fixture
def two_to_validate(tmp_path: Path) -> Path:
    """Two classes, six images of each for training and one for validation."""
    write_photographs(tmp_path / "data", size=8, classes=2, each=6)
    for file in (tmp_path / "data/val").glob("*/000001.jpg"):
        file.unlink()
    return tmp_path / "data"


@pytest.mark.parametrize("shard", ["false", "true"])
def test_a_process_without_a_validation_image_waits_for_the_others(
    command: Any, two_to_validate: Path, tmp_path: Path, shard: str
) -> None:
    """Three processes, two images; a sharded model has to be called by all of them."""
    settings = (f"data=folder:{two_to_validate}", "batch_size=6", "epochs=1", "padding=0")
    settings += (f"cache_dir={tmp_path / 'cache'}", "lr=0")
    three = command(tmp_path / "three", *settings, f"shard={shard}", world=3)
    assert three.wait() == [0, 0, 0], three.output()
    one = command(tmp_path / "one", *settings)
    assert one.wait() == [0], one.output()
    [few], [truth] = (validated(tmp_path / name) for name in ("three", "one"))
    assert {name: few[name] for name in ("top1", "top5")} == {name: truth[name] for name in ("top1", "top5")}
    assert few["loss"] == pytest.approx(truth["loss"], rel=1e-5)


def validated(folder: Path) -> list[dict[str, Any]]:
    return [row for row in records.read_rows(folder / "metrics.jsonl") if row["split"] == "val"]


def test_streamed_images_none_of_which_can_be_read(
    make_config: Callable[..., Config], two_to_validate: Path, tmp_path: Path
) -> None:
    """With one left, it alone is counted; with none there is nothing to divide by, and that is said."""
    config = make_config(
        data=f"folder:{two_to_validate}", cache_limit=0, workers=0, padding=0, batch_size=4, epochs=1, lr=0.0
    )
    first, second = sorted((two_to_validate / "val").glob("*/*.jpg"))
    first.write_bytes(first.read_bytes()[:200])
    assert train(config, tmp_path / "one", device="cpu", quiet=True).metrics["top1"] in (0.0, 1.0)
    second.write_bytes(second.read_bytes()[:200])
    with pytest.raises(ValueError, match="none of the 2 validation images can be read"):
        train(config, tmp_path / "none", device="cpu", quiet=True)
