import functools
import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.config import patch as patch_dynamo
from torch.utils._python_dispatch import TorchDispatchMode

from wellcond.data import Augmentation, DataSet, EvalBatches, TrainBatches, eval_batches, open_data, train_batches
from wellcond.data import batches as batches_module
from wellcond.data.batches import TOGETHER, eval_cuts, fetch_batches
from wellcond.data.dataset import Images

EVERYTHING = Augmentation(
    scale_min=0.3, flip=0.5, color_jitter=0.4, erasing=0.5, mixup=0.8, cutmix=1.0, label_smoothing=0.1
)
MIXED = Augmentation(padding=1, flip=0.5, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
SHIFTED = Augmentation(padding=2, flip=0.5, erasing=0.3)


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return open_data("digits", image_size=8)


def make(data: DataSet, how: Augmentation, **settings) -> TrainBatches:
    return TrainBatches(data.train, **{"batch_size": 64, "seed": 0, "augmentation": how, "num_classes": 10, **settings})


def same(left, right) -> bool:
    return all(torch.equal(a, b) for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("how", [EVERYTHING, SHIFTED, Augmentation()])
def test_an_epoch_goes_on_from_any_step_to_the_same_bits(digits: DataSet, how: Augmentation) -> None:
    whole = list(make(digits, how).epoch(2))
    assert len(whole) == 1437 // 64 == make(digits, how).steps_per_epoch
    for start in (0, 1, 13, 22):
        torch.manual_seed(start)  # the global generator is nothing to it
        assert same(make(digits, how).epoch(2, start), whole[start:])
    assert not same(make(digits, how).epoch(3), whole)
    assert not same(make(digits, how, seed=1).epoch(2), whole)


@pytest.mark.parametrize("how", [EVERYTHING, SHIFTED])
@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_one_order_and_its_draws(digits: DataSet, how: Augmentation, world: int) -> None:
    whole = list(make(digits, how).epoch(1))
    ranks = [make(digits, how, batch_size=64 // world, rank=rank, world=world).epoch(1) for rank in range(world)]
    joined = [tuple(torch.cat(parts) for parts in zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
    assert same(joined, whole)


def test_an_image_does_not_depend_on_its_batch_mates(digits: DataSet) -> None:
    """In batches of another size the same image, in the same place of the order, comes out the same."""
    large = torch.cat([images for images, _ in make(digits, SHIFTED, batch_size=128).epoch(0)])
    small = torch.cat([images for images, _ in make(digits, SHIFTED, batch_size=32).epoch(0)])
    assert torch.equal(large, small[: len(large)])


def test_the_global_generators_are_left_alone(digits: DataSet) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    list(make(digits, EVERYTHING).epoch(0))
    list(EvalBatches(digits.val, batch_size=64))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002


def find_rows(images: Tensor, data: DataSet) -> list[int]:
    """Which training images these are, by their pixels."""
    pixels = (images * data.train.std + data.train.mean).mul(255).round().flatten(1)
    distances = torch.cdist(pixels.double(), data.train.pixels.flatten(1).double())
    assert distances.min(1).values.max() == 0
    return distances.argmin(1).tolist()


def test_without_augmentation_an_epoch_is_the_images_themselves(digits: DataSet) -> None:
    epoch = list(make(digits, Augmentation(), drop_last=False).epoch(0))
    images, labels = (torch.cat(parts) for parts in zip(*epoch, strict=True))
    assert len(epoch[-1][0]) == 1437 % 64
    rows = find_rows(images, digits)
    assert len(set(rows)) > 1430  # every image once; a few digits have an equal twin
    assert torch.equal(labels, digits.train.labels[rows])
    assert labels.dtype == torch.int64
    truth = (images.double().mean(), images.double().std(correction=0))
    torch.testing.assert_close(torch.stack(truth), torch.tensor([0.0, 1.0]).double(), atol=1e-5, rtol=0)
    assert rows != sorted(rows)


def test_labels_are_soft_where_they_have_to_be(digits: DataSet) -> None:
    _, plain = next(make(digits, Augmentation()).epoch(0))
    _, smooth = next(make(digits, Augmentation(label_smoothing=0.1)).epoch(0))
    assert torch.equal(smooth.argmax(1), plain)
    torch.testing.assert_close(smooth.max(1).values, torch.full((64,), 0.91))
    for _, mixed in itertools.islice(make(digits, EVERYTHING).epoch(0), 5):
        assert (mixed.shape, mixed.dtype) == ((64, 10), torch.float32)
        torch.testing.assert_close(mixed.sum(1), torch.ones(64))


def test_impossible_batches(digits: DataSet) -> None:
    for settings, says in (
        ({"batch_size": 2000}, "less than one batch of 2000; make"),
        ({"batch_size": 800, "world": 2}, "800 × 2 processes"),
        ({"batch_size": 0}, "1 or more"),
        ({"rank": 2, "world": 2}, "ranks go from 0 to 1"),
        ({"batch_size": 359, "world": 4, "drop_last": False}, "1 images for 4 processes"),
    ):
        with pytest.raises(ValueError, match=says):
            make(digits, Augmentation(), **settings)
    with pytest.raises(ValueError, match="an epoch has 22 steps"):
        next(make(digits, Augmentation()).epoch(0, 23))
    with pytest.raises(ValueError, match="make it even"):
        make(digits, EVERYTHING, batch_size=63)


@pytest.mark.parametrize(
    ("batch_size", "world"), [(64, 1), (36, 1), (64, 2), (7, 3), (359, 1), (17, 7), (120, 2), (1, 2)]
)
def test_evaluation_sees_each_image_once(digits: DataSet, batch_size: int, world: int) -> None:
    ranks = [list(EvalBatches(digits.val, batch_size=batch_size, rank=rank, world=world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1  # a sharded model waits for every rank
    assert all(0 < len(labels) <= batch_size for batches in ranks for _, labels in batches)
    images, labels = (torch.cat(parts) for parts in zip(*itertools.chain(*ranks), strict=True))
    pixels = (images * digits.val.std + digits.val.mean).mul(255).round().to(torch.uint8)
    order = torch.cat([torch.arange(rank, 360, world) for rank in range(world)])
    assert torch.equal(pixels, digits.val.pixels[order])
    assert torch.equal(labels, digits.val.labels[order])


def test_no_rank_is_left_without_a_last_batch() -> None:
    for count, size, world in itertools.product(range(1, 60), range(2, 9), range(1, 6)):
        cuts = eval_cuts(count, batch_size=size, world=world)
        rows = [list(range(rank, count, world)) for rank in range(world)]
        parts = [[part[cut] for cut in cuts] for part in rows]
        assert [list(itertools.chain(*part)) for part in parts] == rows
        if count >= world:
            assert all(0 < len(piece) <= size for part in parts for piece in part), (count, size, world)


def test_fetching_ahead_gives_the_same(digits: DataSet) -> None:
    """The thread that copies to another device; "meta" stands for one, on which shapes can be read."""
    parts = list(torch.arange(100).split(7))
    here = list(fetch_batches(digits.train, parts, torch.device("cpu")))
    there = list(fetch_batches(digits.train, parts, torch.device("meta")))
    assert [pixels.shape for pixels, _ in here] == [pixels.shape for pixels, _ in there]
    ahead = fetch_batches(digits.train, parts, torch.device("meta"))
    next(ahead)
    ahead.close()  # stopping early ends the thread


@pytest.mark.gpu
@pytest.mark.parametrize("how", [EVERYTHING, SHIFTED])
def test_the_gpu_draws_what_the_cpu_draws(digits: DataSet, how: Augmentation) -> None:
    cpu = list(make(digits, how).epoch(0))
    moved = TrainBatches(
        digits.train.to("cuda"), batch_size=64, seed=0, device="cuda", augmentation=how, num_classes=10
    )
    for batches in (moved, make(digits, how, device="cuda")):  # images on the GPU, and copied there
        for (images, labels), (truth, truth_labels) in zip(batches.epoch(0), cpu, strict=True):
            torch.testing.assert_close(images.cpu(), truth, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(labels.cpu(), truth_labels)


def test_by_function(digits: DataSet) -> None:
    batches = train_batches(digits.train, batch_size=64, seed=0, augmentation=SHIFTED, num_classes=10)
    assert same([batch.tensors for batch in batches.epoch(0)], make(digits, SHIFTED).epoch(0))
    evaluated = list(eval_batches(digits.val, batch_size=50))
    assert same([batch.tensors for batch in evaluated], EvalBatches(digits.val, batch_size=50))
    assert sum(batch.count for batch in evaluated) == len(digits.val)


def test_a_process_without_data_gets_blank_batches(digits: DataSet) -> None:
    """As many batches on every process, for sharded models wait for each other; blank ones count nothing."""
    few = digits.val.part(torch.arange(5))
    ranks = [list(eval_batches(few, batch_size=1, rank=rank, world=4)) for rank in range(4)]
    assert {len(batches) for batches in ranks} == {2}
    assert [sum(batch.count for batch in batches) for batches in ranks] == [2, 1, 1, 1]
    blank = ranks[3][1]
    assert blank.inputs[0].shape == (1, *few.shape)
    again = blank.holding([tensor + 1 for tensor in blank.tensors])
    assert (again.count, float(again.inputs[0].mean()), int(again.targets)) == (0, 1.0, 1)


@pytest.mark.parametrize("crop", [{"padding": 1}, {"scale_min": 0.3, "color_jitter": 0.4}])
def test_a_batch_does_not_depend_on_those_varied_together_with_it(
    monkeypatch: pytest.MonkeyPatch, digits: DataSet, crop
) -> None:
    how = Augmentation(**crop, flip=0.5, erasing=0.5, mixup=0.8, cutmix=1.0)
    for rank, world in ((0, 1), (1, 3)):
        make_these = functools.partial(make, digits, how, batch_size=14, rank=rank, world=world, drop_last=False)
        batches = make_these()
        assert batches.together == TOGETHER // 14
        whole = list(batches.epoch(1))
        assert len(whole[-1][0]) < 14  # and odd, in a group with even ones
        for together, drawn in ((1, 1), (3 * 14 + 1, 100)):
            monkeypatch.setattr(batches_module, "TOGETHER", together)
            monkeypatch.setattr(batches_module, "DRAWN", drawn)
            others = make_these()
            assert others.together == max(1, together // 14)
            for start in (0, 1, 4, len(whole) - 1, len(whole)):
                assert same(others.epoch(1, start), whole[start:])
            monkeypatch.undo()


def test_a_group_of_batches_takes_a_few_calls_for_each(digits: DataSet) -> None:
    """On a GPU Python's calls are what costs, so they are counted: those of a batch of 64, groups of 32."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    images = digits.train.part(torch.arange(1437).repeat(3))  # an epoch of 67 batches
    for how, limit in ((Augmentation(padding=1, flip=0.5), 4), (MIXED, 6)):
        epoch = TrainBatches(images, batch_size=64, seed=0, augmentation=how, num_classes=10).epoch(0)
        next(epoch)
        with Count() as count:
            for _ in itertools.islice(epoch, 64):
                pass
        assert count.calls <= 64 * limit


def test_large_images_are_varied_batch_by_batch() -> None:
    pixels = torch.zeros(8, 3, 512, 512, dtype=torch.uint8)
    images = Images(pixels, torch.zeros(8).long(), mean=torch.zeros(3), std=torch.ones(3))
    for size, together in ((1, 42), (8, 5)):  # 3 MB each, 128 MB in all
        batches = TrainBatches(images, batch_size=size, seed=0, augmentation=Augmentation(), num_classes=2)
        assert batches.together == together


def test_a_compiled_model_takes_batches_of_a_group_for_what_they_are(digits: DataSet) -> None:
    """Parts of a larger tensor, at different places in it: compiled once for all of them."""
    model = torch.compile(torch.nn.Conv2d(1, 4, 3), backend="eager", fullgraph=True)
    with patch_dynamo(error_on_recompile=True):
        for images, _ in itertools.islice(make(digits, MIXED).epoch(0), 5):
            assert images.is_contiguous()
            model(images).sum().backward()
