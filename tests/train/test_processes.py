"""Which device a process takes: the one it is told, if it is there."""

import pytest
import torch

from wellcond.train.processes import check_device, join


@pytest.mark.parametrize("device", ["gpu", "", f"cuda:{torch.cuda.device_count()}"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    for refuses in (check_device, join):
        with pytest.raises(ValueError, match=r"--device.*write cpu"):
            refuses(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="there is no GPU that torch can use"):
        join("cuda")


def test_alone_a_process_is_the_first_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    here = join("cpu")
    assert (here.rank, here.world, here.is_main, here.device) == (0, 1, True, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0", None])
def test_a_gpu_has_its_number(device: str | None) -> None:
    assert join(device).device == torch.device("cuda", 0)
