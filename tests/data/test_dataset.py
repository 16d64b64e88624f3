import pytest
import torch

from wellcond.data import Images, open_data
from wellcond.data.dataset import hold_out, pixel_sums, split_rows


def test_the_digits() -> None:
    data = open_data("digits", image_size=8)
    assert data.train.shape == data.val.shape == (1, 8, 8)
    assert (len(data.train), len(data.val), data.test) == (1437, 360, None)
    assert data.classes == [str(digit) for digit in range(10)]
    for part in (data.train, data.val):
        assert part.labels.bincount().min() > len(part) * 0.08
    assert data.train.pixels.max() == 255  # 16 grays over the whole range
    large = open_data("digits", image_size=16)
    small = torch.nn.functional.avg_pool2d(large.train.pixels.float(), 2)
    both = torch.stack([small.flatten(), data.train.pixels.float().flatten()])
    assert torch.corrcoef(both)[0, 1] > 0.95  # the same digits, enlarged


def test_mean_and_deviation_against_float64() -> None:
    pixels = torch.randint(0, 256, (50, 3, 7, 5), dtype=torch.uint8)
    pixels[:, 1] //= 3
    pixels[:, 2] = 9
    rows = torch.arange(0, 50, 3)
    whole = Images(pixels, torch.zeros(50).long(), mean=torch.zeros(3), std=torch.zeros(3))
    for images, chosen in ((whole, pixels), (whole.part(rows), pixels[rows])):
        truth = chosen.double() / 255
        measured = images.measured()
        torch.testing.assert_close(measured.mean.double(), truth.mean((0, 2, 3)), rtol=1e-7, atol=1e-7)
        std = truth.std((0, 2, 3), correction=0)
        torch.testing.assert_close(measured.std[:2].double(), std[:2], rtol=1e-6, atol=0)
        assert measured.std[2] == 1  # a channel of one value is not divided by 0


def test_sums_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randint(0, 256, (23, 2, 4, 4), dtype=torch.uint8)
    whole = pixel_sums(pixels)
    monkeypatch.setattr("wellcond.data.dataset.CHUNK_BYTES", 100)
    assert [chunk.stop - chunk.start for chunk in split_rows(23, pixels.numel())] == [3] * 7 + [2]
    assert torch.equal(pixel_sums(pixels), whole)
    assert torch.equal(whole[:, :, 1], pixels.long().square().sum((2, 3)))


def test_a_part_is_no_copy_and_a_part_of_a_part_is_right() -> None:
    train = open_data("digits", image_size=8).train
    part = train.part(torch.arange(100, 200)).part(torch.tensor([5, 3]))
    assert torch.equal(part.pixels, train.pixels[[105, 103]])
    assert torch.equal(part.labels, train.labels[[105, 103]])
    assert torch.equal(part.gather(torch.tensor([1])), train.pixels[[103]])
    assert part._pixels.data_ptr() == train.pixels.data_ptr()
    assert part.nbytes == 2 * 64


def test_a_holdout_takes_its_share_of_each_class() -> None:
    data = open_data("digits", image_size=8)
    held = open_data("digits", image_size=8, holdout=0.2, seed=4)
    assert held.test is not None
    assert torch.equal(held.test.pixels, data.val.pixels)
    counts = data.train.labels.bincount()
    assert torch.equal(held.val.labels.bincount(), (counts * 0.2).round().long())
    rows = torch.cat([held.train.rows, held.val.rows])
    assert torch.equal(rows.sort().values, torch.arange(len(data.train)))  # each image in one of the two
    truth = held.train.pixels.double() / 255
    torch.testing.assert_close(held.train.mean.double(), truth.mean((0, 2, 3)), rtol=1e-6, atol=0)
    assert held.train.mean == held.val.mean == held.test.mean
    again = hold_out(data, 0.2, seed=4)
    assert torch.equal(again.val.rows, held.val.rows)
    assert not torch.equal(hold_out(data, 0.2, seed=5).val.rows, held.val.rows)


@pytest.mark.parametrize(
    ("share", "says"), [(1.0, "below 1"), (-0.1, "below 1"), (1e-4, "takes 0 of the"), (0.999, "both")]
)
def test_impossible_holdouts(share: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_data("digits", image_size=8, holdout=share)


def test_moving_to_where_it_is_changes_nothing() -> None:
    train = open_data("digits", image_size=8).train
    assert train.to("cpu") is train


@pytest.mark.gpu
def test_on_the_gpu_if_it_fits() -> None:
    train = open_data("digits", image_size=8, holdout=0.1).train
    moved = train.to("cuda")
    assert moved.device.type == moved.labels.device.type == "cuda"
    assert torch.equal(moved.pixels.cpu(), train.pixels)
    assert train.to("cuda", share=1e-9) is train
