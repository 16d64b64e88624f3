import numpy as np
import pytest
import torch

from wellcond.data import Augmentation, DataSet, SequenceSet, eval_batches, open_data, train_batches
from wellcond.data.dataset import hold_out
from wellcond.data.sequences import Rows, kept_tokens, spread


def make(count: int = 50, length: int = 8, *, pairs: bool = False, mask: str = "published") -> SequenceSet:
    """Row i begins with i + 1; every third token is 0 though it is none of the padding."""
    shape = (count, 2) if pairs else (count,)
    lengths = torch.arange(count * (1 + pairs)).reshape(shape) % length + 1
    tokens = torch.randint(1, 200, (*shape, length), generator=torch.Generator().manual_seed(0))
    tokens[..., 2::3] = 0
    tokens[..., 0] = torch.arange(count).reshape(-1, *[1] * pairs) + 1
    tokens = tokens * (torch.arange(length) < lengths[..., None])
    labels = torch.arange(count) % 3
    return SequenceSet(tokens.to(torch.uint8), lengths.int(), labels, vocab=256, mask=mask)  # pyright: ignore[reportArgumentType]


def rows_of(batch) -> list[int]:
    return (batch.inputs[0][:, 0] - 1).tolist()


def test_a_batch_is_tokens_and_a_mask_under_both_rules() -> None:
    published, fixed = make(mask="published"), make(mask="fixed")
    rows = torch.tensor([10, 3, 3])
    tokens, mask = published.inputs(rows)
    assert (tokens.dtype, mask.dtype, tokens.shape) == (torch.int32, torch.bool, (3, 8))
    assert torch.equal(tokens, published.tokens[rows].int())
    assert torch.equal(mask, tokens != 0)
    tokens, mask = fixed.inputs(rows)
    assert torch.equal(mask, torch.arange(8) < fixed.lengths[rows][:, None])
    assert mask[0].sum() == 3  # a 0 within the length counts
    assert published.inputs(rows)[1][0].sum() == 2


def test_pairs_give_two_of_each() -> None:
    pairs = make(pairs=True, mask="fixed")
    assert pairs.pairs
    rows = torch.tensor([4, 1])
    first, first_mask, second, second_mask = pairs.inputs(rows)
    assert torch.equal(torch.stack([first, second], 1), pairs.tokens[rows].int())
    assert torch.equal(torch.stack([first_mask, second_mask], 1).sum(-1), pairs.lengths[rows])
    assert all(tensor.is_contiguous() for tensor in (first, first_mask, second, second_mask))


def test_padding_pieces_of_different_lengths() -> None:
    pieces = [
        Rows(np.array([1, 2, 3], np.uint8), np.array([1, 2], np.int32), np.array([0, 1], np.uint8)),
        Rows(np.array([9, 8, 7, 6], np.uint8), np.array([4], np.int32), np.array([2], np.uint8)),
    ]
    found = SequenceSet.of(pieces, length=4, vocab=10)
    assert found.tokens.tolist() == [[1, 0, 0, 0], [2, 3, 0, 0], [9, 8, 7, 6]]
    assert found.labels.tolist() == [0, 1, 2]
    assert found.lengths.tolist() == [1, 2, 4]
    assert "3 × 4" in repr(found)
    assert kept_tokens(2048), kept_tokens(4096) == (2000, 4000)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_an_epoch_sees_every_sequence_once_over_all_ranks(world: int) -> None:
    part = make(60)
    ranks = [train_batches(part, batch_size=2, seed=3, rank=rank, world=world) for rank in range(world)]
    seen = [row for batches in ranks for batch in batches.epoch(1) for row in rows_of(batch)]
    assert sorted(seen) == list(range(60))
    steps = [
        [row for batch in step for row in rows_of(batch)] for step in zip(*(r.epoch(1) for r in ranks), strict=True)
    ]
    alone = [rows_of(batch) for batch in train_batches(part, batch_size=2 * world, seed=3).epoch(1)]
    assert steps == alone  # two processes with 2 each see what one with 4 sees


def test_what_a_step_sees_depends_on_seed_epoch_and_step_alone() -> None:
    def run(epoch: int, start: int = 0, seed: int = 0) -> list[list[int]]:
        return [rows_of(batch) for batch in train_batches(make(), batch_size=8, seed=seed).epoch(epoch, start)]

    assert len(run(0)) == 6  # the last two of 50 are dropped
    assert run(2, start=4) == run(2)[4:]
    assert run(0) != run(1)
    assert run(0) != run(0, seed=1)
    with pytest.raises(ValueError, match="start is 7, but an epoch has 6 steps"):
        run(0, start=7)


def test_labels_go_with_their_tokens() -> None:
    for batch in train_batches(make(), batch_size=16, seed=0).epoch(0):
        assert batch.targets.tolist() == [row % 3 for row in rows_of(batch)]
        assert batch.count == 16


@pytest.mark.parametrize(("count", "world"), [(50, 1), (50, 4), (9, 4), (2, 4)])
def test_evaluation_counts_every_sequence_once(count: int, world: int) -> None:
    part = make(count)
    ranks = [list(eval_batches(part, batch_size=4, rank=rank, world=world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1  # sharded models wait for every process
    counted = [row for batches in ranks for batch in batches for row in rows_of(batch)[: batch.count]]
    assert sorted(counted) == list(range(count))
    if world == 1:
        assert counted == list(range(count))  # in order
    blank = [batch for batches in ranks for batch in batches if not batch.count]
    assert len(blank) == (2 if count == 2 else 0)
    assert all(batch.inputs[1].any() for batch in blank)  # of a real sequence: nothing is masked away


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("pairs", [False, True])
def test_by_length_each_batch_is_cut_where_its_longest_ends(
    pairs: bool, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wellcond.data.sequences.CROPPED_TO", 2)
    part = make(50, pairs=pairs, mask="fixed").part(torch.arange(49, -1, -1))
    ranks = [list(eval_batches(part.by_length(), batch_size=4, rank=rank, world=world)) for rank in range(world)]
    batches = [batch for rank in ranks for batch in rank]
    assert sorted(row for batch in batches for row in rows_of(batch)[: batch.count]) == list(range(50))
    for batch in batches:
        lengths = torch.stack([mask.sum(1) for mask in batch.inputs[1::2]], 1).amax(1)
        whole = part.inputs(49 - torch.tensor(rows_of(batch)))
        width = batch.inputs[0].shape[1]
        assert width == -(-int(lengths.max()) // 2) * 2
        for cut, full in zip(batch.inputs, whole, strict=True):
            assert torch.equal(cut, full[:, :width])
            assert not full[:, width:].any()
        assert batch.targets.tolist() == [row % 3 for row in rows_of(batch)]
    assert {batch.inputs[0].shape[1] for batch in batches} > {8}


def test_by_length_leaves_what_has_no_padding() -> None:
    full = SequenceSet(torch.ones(3, 5, dtype=torch.uint8), torch.full((3,), 5), torch.arange(3), vocab=9, mask="fixed")
    assert full.by_length() is full


def test_the_published_stream_of_validation() -> None:
    part = make(10)
    windows = [part.window(number, 4) for number in range(4)]
    assert [(window.tokens[:, 0] - 1).tolist() for window in windows] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5],
    ]  # fmt: skip


def test_parts_of_parts() -> None:
    part = make(20).part(torch.tensor([5, 6, 7, 8])).part(torch.tensor([3, 0]))
    assert (part.tokens[:, 0] - 1).tolist() == [8, 5]
    assert part.labels.tolist() == [2, 2]
    assert part.lengths.tolist() == [make(20).lengths[8], make(20).lengths[5]]
    assert part.nbytes == 16
    assert (spread(make(20), 5).tokens[:, 0] - 1).tolist() == [0, 5, 10, 14, 19]


def test_what_is_held_out_and_what_it_is_compared_by() -> None:
    whole = make(60)
    data = DataSet(name="x", classes=["a", "b", "c"], train=whole, val=make(6), test=None, skipped=[])
    held = hold_out(data, 0.1, seed=0)
    assert (len(held.train), len(held.val), len(held.test)) == (54, 6, 6)  # pyright: ignore[reportArgumentType]
    assert held.val.labels.bincount().tolist() == [2, 2, 2]
    own_test = hold_out(DataSet(**{**data.__dict__, "test": make(9)}), 0.1, seed=0)
    assert len(own_test.test) == 9  # pyright: ignore[reportArgumentType]
    other = make(60)
    assert whole.content() == other.content() == whole.part(torch.arange(60)).content()
    other.tokens[3, 0] += 1
    assert whole.content() != other.content()


def test_what_varies_images_is_refused_and_labels_can_be_smoothed() -> None:
    with pytest.raises(ValueError, match="flip varies images, and these are sequences"):
        train_batches(make(), batch_size=4, seed=0, augmentation=Augmentation(flip=0.5))
    smooth = Augmentation(label_smoothing=0.3)
    batch = next(train_batches(make(), batch_size=4, seed=0, augmentation=smooth, num_classes=3).epoch(0))
    torch.testing.assert_close(batch.targets.max(1).values, torch.full((4,), 0.8))
    with pytest.raises(ValueError, match="50 training sequences are less than one batch of 64"):
        train_batches(make(), batch_size=64, seed=0)
    with pytest.raises(ValueError, match="mask is 'none'; choose one of published, fixed"):
        make(mask="none")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_set_is_kept_on_the_gpu_and_gives_the_same_batches() -> None:
    here = list(train_batches(make(), batch_size=8, seed=0).epoch(1, start=2))
    there = list(train_batches(make(), batch_size=8, seed=0, device="cuda").epoch(1, start=2))
    assert make().to("cuda").device.type == "cuda"
    for one, other in zip(here, there, strict=True):
        assert all(torch.equal(a, b.cpu()) for a, b in zip(one.tensors, other.tensors, strict=True))


@pytest.mark.parametrize(
    ("spec", "options", "says"),
    [
        ("lra_text", {}, r"names no data; write lra_text:FOLDER, where FOLDER is aclImdb as https://ai.stanford"),
        ("lra_text:nowhere", {}, r"there is no nowhere/train/neg; lra_text:FOLDER is aclImdb"),
        ("lra_retrieval", {}, "new_aan_pairs.train.tsv.*imdb_pairs:FOLDER is a stand-in"),
        ("lra_retrieval:nowhere", {}, "there is no nowhere/new_aan_pairs.train.tsv"),
        ("imdb_pairs:nowhere", {}, "imdb_pairs:FOLDER is aclImdb"),
        ("lra_image", {}, "CIFAR-10 as torchvision"),
        ("lra_image:nowhere", {}, "there is no nowhere; lra_image:FOLDER is CIFAR-10"),
        ("lra_listops:nowhere", {}, "there is no nowhere/basic_train.tsv; .*without a folder"),
        ("lra_pathfinder:nowhere", {}, "there is no nowhere/metadata"),
        ("lra_listops", {"samples": 2}, "train, val and test need one each"),
        ("lra_listops", {"tokenizer": "words"}, "tokenizer is 'words'; choose one of brackets_dropped"),
        ("lra_pathfinder", {"contour": 7}, "contour is 7; choose one of 14, 9, 6"),
        (
            "lra_pathfinder",
            {"colour": 7},
            "no option 'colour'; did you mean contour.*its options: samples, contour, mask",
        ),
        ("digits", {"length": 7}, "digits has no option 'length' .its options: none"),
    ],
)
def test_what_is_missing_or_wrong_is_said(spec: str, options: dict, says: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        open_data(spec, cache_dir=tmp_path / "cache", options=options)
