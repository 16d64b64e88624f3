import pytest
import torch

from wellcond.claims.jobs import deal
from wellcond.train.processes import check_device


def test_jobs_are_dealt_over_the_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [job["CUDA_VISIBLE_DEVICES"] for job in deal(5, gpus=2)] == ["0", "1", "0", "1", "0"]
    assert [job["CUDA_VISIBLE_DEVICES"] for job in deal(2, "cuda", gpus=4)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8932f937")  # of eight, say
    assert [job["CUDA_VISIBLE_DEVICES"] for job in deal(3, gpus=2)] == ["3", "GPU-8932f937", "3"]


def test_one_gpu_is_shared_and_a_named_one_kept(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert deal(3, gpus=1) == deal(3, "cuda:0", gpus=1) == [{}, {}, {}]
    assert deal(2, "cuda:1", gpus=2) == [{"CUDA_VISIBLE_DEVICES": "1"}] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert deal(1, "cuda:1", gpus=2) == [{"CUDA_VISIBLE_DEVICES": "5"}]


def test_each_gets_its_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert deal(2, "cpu") == deal(2, gpus=1)
    assert {job["OMP_NUM_THREADS"] for job in deal(10_000, gpus=2)} == {"1"}
    shares = [int(job["OMP_NUM_THREADS"]) for job in deal(1, "cpu") + deal(2, gpus=0) + deal(10_000, "cpu", gpus=8)]
    assert shares[0] >= shares[1] == shares[2] >= 1
    assert shares[1] == max(1, shares[0] // 2)
    assert set(shares[3:]) == {1}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert deal(2, "cpu") == [{}, {}]


def test_a_device_that_is_not_there_is_refused():
    check_device(None)
    check_device("cpu")
    for device in ("gpu", "", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(ValueError, match="--device"):
            check_device(device)
