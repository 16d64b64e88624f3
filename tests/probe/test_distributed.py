"""Two processes measure what one would: the same rows on both, written once."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wellcond import records
from wellcond.probe import Probe

# What each rank runs; `case` is the part that differs, and says what to call and how to measure it.
RANK = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from wellcond import records
from wellcond.probe import Probe

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
model, images = torch.load(folder + "/case.pt", weights_only=False)
dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(folder + "/store", 2))
mine = images[2 * rank : 2 * rank + 2]


def keep(name, probe):
    records.append_rows(f"{folder}/{name}-{rank}.jsonl", probe.rows())


def shard(model, **settings):
    mesh = init_device_mesh("cpu", (2,))
    for block in [*model.blocks, model]:
        fully_shard(block, mesh=mesh, **settings)
    return model


#CASE
dist.barrier()
dist.destroy_process_group()
"""

DDP = """
parallel = DistributedDataParallel(model)
for name, training, exact in (("eval", False, None), ("train", True, None), ("exact", True, True)):
    parallel.train(training)
    with Probe(parallel, exact=exact, spectrum=True).to(f"{folder}/{name}-file.jsonl") as probe:
        parallel(mine).square().mean().backward()
    keep(name, probe)
    probe.to(f"{folder}/{name}-again.jsonl")  # what there is already is written once too

with Probe(parallel, reduce=False) as probe:
    parallel(mine)
keep("own", probe)

compiled = torch.compile(parallel, backend="eager")
with Probe(compiled) as probe:
    compiled(mine)
keep("compiled", probe)
"""

FAILING = """
import warnings
import wellcond.numerics.singular as singular

def broken(*_, **__):
    raise RuntimeError("this rank cannot")

parallel = DistributedDataParallel(model).train()
if rank == 0:
    singular.measure_conditioning = broken
with warnings.catch_warnings(record=True) as told, Probe(parallel) as probe:
    warnings.simplefilter("always")
    parallel(mine).square().mean().backward()
assert (rank == 0) == any("this rank cannot" in str(w.message) for w in told), told
keep("train", probe)

parallel.eval()
try:
    with Probe(parallel) as probe:
        parallel(mine)
    assert rank == 1
except RuntimeError as error:
    assert rank == 0 and "this rank cannot" in str(error), error
keep("eval", probe)
"""

FSDP = """
with torch.no_grad():
    expected = model(mine)
shard(model)
with torch.no_grad(), Probe(model) as probe:
    torch.testing.assert_close(model(mine), expected)
keep("eval", probe)
model.train()
for name, exact in (("train", False), ("exact", True)):
    with Probe(model, exact=exact) as probe:
        model(mine).square().mean().backward()
    keep(name, probe)
"""


def run_ranks(case: str, model: Any, images: Tensor, folder: Path) -> None:
    torch.save((model, images), folder / "case.pt")
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            command = [sys.executable, "-c", RANK.replace("#CASE", case), str(rank), str(folder)]
            log = stack.enter_context((folder / f"{rank}.log").open("w"))
            ranks.append(stack.enter_context(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
            stack.callback(ranks[-1].kill)  # a rank whose mate has failed would wait for it
        codes = [rank.wait(timeout=240) for rank in ranks]
    assert codes == [0, 0], [(folder / f"{rank}.log").read_text() for rank in range(2)]


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    for one, two in zip(found, expected, strict=True):
        # One process takes effective ranks and spectra of its first samples, two of the first of each.
        assert one["value"] == pytest.approx(two["value"], rel=1e-4), one
        assert {**one, "value": 0} == {**two, "value": 0}


def measured_alone(model: Any, images: Tensor, **settings: Any) -> list[Any]:
    with Probe(model, **settings) as probe:
        model(images)
    return probe.rows()


def test_data_parallel(vit: Any, images: Tensor, tmp_path: Path) -> None:
    run_ranks(DDP, vit, images, tmp_path)
    for name in ("eval", "train", "exact"):
        ranks = [records.read_rows(tmp_path / f"{name}-{rank}.jsonl") for rank in range(2)]
        assert ranks[0] == ranks[1]
        assert_alike(ranks[0], measured_alone(vit.train(name != "eval"), images, spectrum=True))
        for file in ("file", "again"):
            assert records.read_rows(tmp_path / f"{name}-{file}.jsonl") == ranks[0]  # once, by one of them
    vit.eval()
    for rank in range(2):
        assert_alike(
            records.read_rows(tmp_path / f"own-{rank}.jsonl"), measured_alone(vit, images[2 * rank : 2 * rank + 2])
        )
        assert_alike(records.read_rows(tmp_path / f"compiled-{rank}.jsonl"), measured_alone(vit, images))


def test_a_rank_that_fails_does_not_hold_up_the_other(vit: Any, images: Tensor, tmp_path: Path) -> None:
    run_ranks(FAILING, vit, images, tmp_path)
    other = measured_alone(vit, images[2:])
    for name, ranks in (("train", (0, 1)), ("eval", (1,))):
        for rank in ranks:
            assert_alike(records.read_rows(tmp_path / f"{name}-{rank}.jsonl"), other)


def test_sharded(vit: Any, images: Tensor, tmp_path: Path) -> None:
    run_ranks(FSDP, vit, images, tmp_path)
    for name in ("eval", "train", "exact"):
        for rank in range(2):
            found = records.read_rows(tmp_path / f"{name}-{rank}.jsonl")
            assert_alike(found, measured_alone(vit, images))
