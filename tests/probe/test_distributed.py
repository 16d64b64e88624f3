"""Two processes measure what one would: the same rows on both, written once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wellcond import records
from wellcond.probe import Probe

# What each rank runs. Starting two processes takes longer than all that they measure, so it is done once.
RANK = """
import contextlib, copy, sys, types, warnings, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
import wellcond.numerics.singular as singular
import wellcond.probe.probe
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
for name, training, exact in (("eval", False, True), ("train", True, False), ("exact", True, True)):
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

# fully_shard in bfloat16: each step is that of the whole weights in float32, and training does not notice
policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def shard_as_one(model):
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(list(model.blocks), mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def train_low(model, probe):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    outputs = []
    for step in range(3):
        with FSDP.summon_full_params(model, writeback=False) if isinstance(model, FSDP) else contextlib.nullcontext():
            weights = {key: getattr(value, "full_tensor", value.clone)() for key, value in model.state_dict().items()}
        if rank == 0:
            torch.save(weights, f"{folder}/{name}-{step}.pt")
        if step == 2:
            with torch.no_grad():
                model.eval()(mine)  # leaves the outermost weights gathered, in bfloat16
            model.train()
        if probe is not None:
            probe.step = step
            probe.attach()
        outputs.append(model(mine * (1 + step)))
        if probe is not None:
            probe.detach()
        outputs[-1].float().square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    return [*outputs, *(getattr(p, "full_tensor", p.clone)() for p in model.parameters())]


def wrap(model):
    each = ModuleWrapPolicy({type(model.blocks[0])})
    mixed = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    settings = {"mixed_precision": mixed, "use_orig_params": True, "device_id": torch.device("cpu")}
    return FSDP(model, auto_wrap_policy=each, **settings)


for name, sharding in (("low", lambda model: shard(model, **policy)), ("grouped", shard_as_one), ("older", wrap)):
    plain, low = (sharding(copy.deepcopy(model)).train() for _ in range(2))
    before = [(id(parameter), parameter.dtype) for parameter in low.parameters()]
    hooks = [list(module._forward_pre_hooks.items()) for module in low.modules()]
    probe = Probe(low)
    for one, two in zip(train_low(low, probe), train_low(plain, None), strict=True):
        assert torch.equal(one, two)
    assert [(id(parameter), parameter.dtype) for parameter in low.parameters()] == before
    assert [list(module._forward_pre_hooks.items()) for module in low.modules()] == hooks
    keep(name, probe)
    with Probe(low, exact=False) as probe:
        low(mine)
    keep(name + "-live", probe)

# tensor parallelism: the parts stay parts
for dtype in (torch.float32, torch.bfloat16):
    parted = copy.deepcopy(model).to(dtype).train()
    for block in parted.blocks:
        plan = {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()}
        parallelize_module(block, init_device_mesh("cpu", (2,)), plan)
    with Probe(parted, reduce=False) as probe:
        parted(images.to(dtype)).float().square().mean().backward()  # each has the whole batch
    keep(f"parted-{dtype}", probe)

# both: FSDP2 gathers for itself, and what a pass in float64 would need is not there, but nothing breaks
for policy in ({}, policy):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    both = copy.deepcopy(model).train()
    for block in both.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    for part in [*both.blocks, both]:
        fully_shard(part, mesh=mesh["data"], **policy)
    for exact in (True, "float64"):
        with warnings.catch_warnings(record=True) as told, Probe(both, exact=exact, reduce=False) as probe:
            warnings.simplefilter("always")
            both(images).float().square().mean().backward()
        assert any("bfloat16 by itself" in str(w.message) for w in told) == bool(policy), told
        keep(f"both-{bool(policy)}-{exact}", probe)

# every="auto": clocks differ, steps do not
clock = [0.0]
wellcond.probe.probe.time = types.SimpleNamespace(perf_counter=lambda: clock[0])
for name, measured, settings in (("clock", parallel, {}), ("clock-sharded", sharded, {"reduce": False})):
    norm = next(module for path, module in measured.named_modules() if path.endswith("norm") and "." not in path[7:])
    handle = norm.register_forward_hook(lambda module, *_: clock.append(clock.pop() + 3 * (not module.training)))
    measured.train()
    with Probe(measured, sites="+mlp", blocks=0, every="auto", **settings) as probe:
        for _ in range(12):
            measured(mine).square().mean().backward()
            clock[0] += 1 if rank == 0 else 50  # by its own clock the second one would not wait so long
    handle.remove()
    keep(name, probe)
dist.barrier()
dist.destroy_process_group()
"""


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
def test_two_processes(vit: Any, images: Tensor, launcher: Any, tmp_path: Path) -> None:
    torch.save((vit, images), tmp_path / "case.pt")
    launcher.ranks(RANK, tmp_path)
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
    for name in ("low", "grouped", "older"):
        for step in range(3):
            vit.load_state_dict(torch.load(tmp_path / f"{name}-{step}.pt"))
            # the samples that came first, at every step; and in float32 though both trained in bfloat16
            expected = [{**row, "step": step} for row in measured_alone(vit, images)]
            for rank in range(2):
                assert_alike([row for row in read(tmp_path, f"{name}-{rank}") if row["step"] == step], expected)
        live = [row for row in read(tmp_path, f"{name}-live-0") if row["site"] == "sa"]
        assert {row["dtype"] for row in live} == {"bfloat16"}
        assert "ok" not in {row["status"] for row in live}
    vit.load_state_dict(torch.load(tmp_path / "low-0.pt"))

    # tensor parallelism
    for dtype in (torch.float32, torch.bfloat16):
        expected = measured_alone(copy.deepcopy(vit).to(dtype), images.to(dtype))
        for rank in range(2):
            assert_alike(read(tmp_path, f"parted-{dtype}-{rank}"), expected)

    for rank in range(2):
        for exact in (True, "float64"):
            assert_alike(read(tmp_path, f"both-False-{exact}-{rank}"), alone)
            low = [row["dtype"] for row in read(tmp_path, f"both-True-{exact}-{rank}") if row["site"] == "sa"]
            assert set(low) == {"bfloat16"}

    # every="auto"
    for name in ("clock", "clock-sharded"):
        steps = [sorted({row["step"] for row in read(tmp_path, f"{name}-{rank}")}) for rank in range(2)]
        assert steps == [[0, 4], [0, 4]]
