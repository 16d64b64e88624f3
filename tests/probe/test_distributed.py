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

# What each rank runs. Starting two processes takes longer than all that they measure, so it is done once.
RANK = """
import copy, sys, warnings, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
import wellcond.numerics.singular as singular
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


# DistributedDataParallel
parallel = DistributedDataParallel(copy.deepcopy(model))
for name, training, exact in (("eval", False, None), ("train", True, None), ("exact", True, True)):
    parallel.train(training)
    with Probe(parallel, exact=exact, spectrum=True).to(f"{folder}/{name}-file.jsonl") as probe:
        parallel(mine).square().mean().backward()
    keep(name, probe)
    probe.to(f"{folder}/{name}-again.jsonl")  # what there is already is written once too
parallel.eval()
with Probe(parallel, reduce=False) as probe:
    parallel(mine)
keep("own", probe)
compiled = torch.compile(parallel, backend="eager")
with Probe(compiled) as probe:
    compiled(mine)
keep("compiled", probe)

# one rank fails

def broken(*_, **__):
    raise RuntimeError("this rank cannot")

works = singular.measure_conditioning
if rank == 0:
    singular.measure_conditioning = broken
parallel.train()
with warnings.catch_warnings(record=True) as told, Probe(parallel) as probe:
    warnings.simplefilter("always")
    parallel(mine).square().mean().backward()
assert (rank == 0) == any("this rank cannot" in str(w.message) for w in told), told
keep("failing-train", probe)
parallel.eval()
try:
    with Probe(parallel) as probe:
        parallel(mine)
    assert rank == 1
    keep("failing-eval", probe)
except RuntimeError as error:
    assert rank == 0 and "this rank cannot" in str(error), error
singular.measure_conditioning = works

# fully_shard
sharded = shard(copy.deepcopy(model))
with torch.no_grad():
    expected = model(mine)
    with Probe(sharded) as probe:
        torch.testing.assert_close(sharded(mine), expected)
keep("sharded-eval", probe)
sharded.train()
for name, exact in (("train", False), ("exact", True)):
    with Probe(sharded, exact=exact) as probe:
        sharded(mine).square().mean().backward()
    keep("sharded-" + name, probe)
low = shard(copy.deepcopy(model), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
with warnings.catch_warnings(record=True) as told, Probe(low) as probe:
    warnings.simplefilter("always")
    low(mine)
assert any("bfloat16 by itself" in str(w.message) for w in told), told
keep("low", probe)
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(model: Any, images: Tensor, folder: Path) -> None:
    torch.save((model, images), folder / "case.pt")
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            command = [sys.executable, "-c", RANK, str(rank), str(folder)]
            log = stack.enter_context((folder / f"{rank}.log").open("w"))
            ranks.append(stack.enter_context(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
            stack.callback(ranks[-1].kill)  # a rank whose mate has failed would wait for it
        codes = [rank.wait(timeout=240) for rank in ranks]
    assert codes == [0, 0], [(folder / f"{rank}.log").read_text() for rank in range(2)]


def read(folder: Path, name: str) -> list[Any]:
    return records.read_rows(folder / f"{name}.jsonl")


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    for one, two in zip(found, expected, strict=True):
        # One process takes effective ranks and spectra of its first samples, two of the first of each.
        assert one["value"] == pytest.approx(two["value"], rel=1e-4), one
        assert {**one, "value": 0} == {**two, "value": 0}


def measured_alone(model: Any, images: Tensor, **settings: Any) -> list[Any]:
    with Probe(model, **settings) as probe:
        model(images)
    return probe.rows()


@pytest.mark.slow
def test_two_processes(vit: Any, images: Tensor, tmp_path: Path) -> None:
    run_ranks(vit, images, tmp_path)
    alone = measured_alone(vit, images)

    # DistributedDataParallel: both have the rows of the whole batch, and one of them writes
    for name in ("eval", "train", "exact"):
        ranks = [read(tmp_path, f"{name}-{rank}") for rank in range(2)]
        assert ranks[0] == ranks[1]
        assert_alike(ranks[0], measured_alone(vit, images, spectrum=True))
        for file in ("file", "again"):
            assert read(tmp_path, f"{name}-{file}") == ranks[0]
    for rank in range(2):
        assert_alike(read(tmp_path, f"compiled-{rank}"), alone)
        assert_alike(read(tmp_path, f"own-{rank}"), measured_alone(vit, images[2 * rank : 2 * rank + 2]))

    # the first rank failed: neither waits for the other, and what the second measured is there
    for name in ("train-0", "train-1", "eval-1"):
        assert_alike(read(tmp_path, f"failing-{name}"), measured_alone(vit, images[2:]))

    # fully_shard
    for name in ("eval", "train", "exact"):
        for rank in range(2):
            assert_alike(read(tmp_path, f"sharded-{name}-{rank}"), alone)
    low = [row for row in read(tmp_path, "low-0") if row["site"] == "sa"]
    assert {row["dtype"] for row in low} == {"bfloat16"}
    assert "ok" not in {row["status"] for row in low}
