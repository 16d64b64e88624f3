"""Sharded states: every process writes its part while training goes on, and any number of processes can read them.

    shards = Shards(here)                               # in all processes
    copies = {name: shards.copied(t) for …}             # this process's part, on the CPU: training may go on
    shards.start(lambda: …shards.write(folder, copies)…)  # in a thread of its own, with a process group of its own
    problem = shards.wait()                             # None, or what went wrong, the same in all processes

    read_shards(folder, tensors)                        # fills tensors, whole or sharded, however they were saved
    shapes_of(folder)                                   # name → a tensor on the meta device, without memory

The files are those of torch.distributed.checkpoint: `__RANK_0.distcp` with tensors, and `.metadata`, a pickle. Torch
unpickles that without restriction; here only the classes it needs are created, and anything else is refused.
"""

import contextlib
import hashlib
import io
import pickle
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from wellcond.train.processes import Processes

__all__ = ["Shards", "checksum", "gathered", "is_sharded", "laid_out", "read_shards", "shapes_of"]

METADATA = ".metadata"
FILE = re.compile(r"__\d+_\d+\.distcp")


class Shards:
    """Writes states in the background, one at a time."""

    def __init__(self, here: Processes):
        self.here: Processes = here
        self.took: float = 0.0
        """The longest time that a state has taken, in seconds."""
        self._group: Any = None
        self._mesh: Any = None
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        if here.world > 1:
            from torch.distributed.device_mesh import DeviceMesh

            # A group of its own: this thread's messages must not get mixed up with those of the training.
            self._group = dist.new_group(backend="gloo")
            self._mesh = DeviceMesh.from_group(self._group, "cpu")

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of this process's part on the CPU, independent of the training."""
        given: Any = tensor
        if not hasattr(given, "to_local"):
            return tensor.detach().to("cpu", copy=True)
        from torch.distributed.tensor import DTensor

        mine = given.to_local().detach().to("cpu", copy=True)
        return DTensor.from_local(
            mine, self._mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride()
        )

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread, in each process. If it fails in the main one, `wait` says so in all."""

        def run() -> None:
            began = time.monotonic()
            try:
                problem = None
                try:
                    work()
                except Exception as error:
                    problem = str(error) or type(error).__name__
                self._problem = self._of_main(problem)
            except Exception as error:  # another process is gone
                self._problem = f"the processes cannot reach each other ({error})"
            self.took = max(self.took, time.monotonic() - began)

        self._thread = threading.Thread(target=run, name="wellcond-save", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> str | None:
        """Wait for the work that was started; return what went wrong, or None."""
        if self._thread is None:
            return None
        self._thread.join(timeout)
        if self._thread.is_alive():
            return f"it was not written after {timeout:g} seconds"
        self._thread, problem, self._problem = None, self._problem, None
        return problem

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Write the files to disk. The main process returns their checksums, or raises OSError if any process fails."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        class Writer(FileSystemWriter):
            def storage_meta(self) -> None:
                """Return None, not torch's random ID and folder name, so that equal states are identical files."""

        main = self.here.is_main
        writer, planner = Writer(folder), DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(sorted(tensors.items())), None, main)  # the order differs in a resumed run
        writer.set_up_storage_writer(main)
        plans, metadata = self._gathered(writer.prepare_local_plan(planner.create_local_plan())), cast(Any, None)
        if main:
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
        plan = planner.finish_plan(self._scattered(plans))
        written, sums, problem = [], {}, None
        try:
            written = writer.write_data(plan, planner).wait()  # with an fsync of each file
            sums = {file.name: checksum(file) for file in folder.glob(f"__{self.here.rank}_*.distcp")}
        except Exception as error:
            problem = f"process {self.here.rank}: {error}"
        found = self._gathered((written, sums, problem))
        for _, _, failed in found:
            if failed is not None:
                raise OSError(failed)
        if main:
            writer.finish(metadata, [results for results, _, _ in found])
            found.append(((), {METADATA: checksum(folder / METADATA)}, None))
        return {name: digest for _, digests, _ in found for name, digest in digests.items()}

    # Communication in the thread's own group; only this program's own objects are sent, and unpickled

    def _gathered(self, value: Any) -> list[Any]:
        """Return the values of all processes on the main one, and an empty list elsewhere."""
        if self._group is None:
            return [value]
        found = [None] * self.here.world if self.here.is_main else None
        dist.gather_object(value, found, dst=0, group=self._group)
        return found or []

    def _scattered(self, values: list[Any]) -> Any:
        if self._group is None:
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values if self.here.is_main else None, src=0, group=self._group)
        return mine[0]

    def _of_main(self, value: Any) -> Any:
        if self._group is None:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, group=self._group)
        return told[0]


def gathered(tensor: Tensor) -> Tensor:
    """Return a sharded tensor, whole, on the main process's CPU, and an empty one elsewhere. A collective call."""
    given: Any = tensor
    if not hasattr(given, "full_tensor"):
        return tensor
    whole = given.detach().full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else whole.new_empty(0)


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor`, which is whole in every process, sharded as `like` is, if `like` is sharded."""
    given, target = cast(Any, tensor), cast(Any, like)
    if not hasattr(target, "placements") or hasattr(given, "placements"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    whole = tensor.to(like.device)
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def is_sharded(folder: Path) -> bool:
    return (folder / METADATA).exists()


def shapes_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors saved there, by name, on the meta device."""
    known = _read_metadata(folder).state_dict_metadata
    return {name: torch.empty(kept.size, dtype=kept.properties.dtype, device="meta") for name, kept in known.items()}


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill these tensors, which have the sizes that `shapes_of` gives; sharded ones get this process's part."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = _read_metadata(folder)
    reader, planner = (
        FileSystemReader(folder),
        DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    planner.set_up_planner(dict(tensors), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()  # reads each tensor by torch.load with weights_only


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- the pickle


def _read_metadata(folder: Path) -> Any:
    """Read `.metadata`. Raises ValueError if it is damaged or asks for more than metadata of tensors need."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    path = folder / METADATA
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} holds no metadata of tensors alone, and is not unpickled: {error}") from error
    kinds = {type(metadata): Metadata}
    with contextlib.suppress(AttributeError):  # fields that are missing, or not dicts
        kinds |= {type(kept): TensorStorageMetadata for kept in metadata.state_dict_metadata.values()}
        kinds |= {type(info): _StorageInfo for info in metadata.storage_data.values()}
    if set(kinds) != {Metadata, TensorStorageMetadata, _StorageInfo} or any(k is not v for k, v in kinds.items()):
        raise ValueError(f"{path} holds no metadata of saved tensors")
    for info in metadata.storage_data.values():
        if not FILE.fullmatch(str(info.relative_path)) or info.transform_descriptors:
            raise ValueError(f"{path} leads to {str(info.relative_path)!r}, which is no file of this state")
    return metadata


def _classes() -> dict[tuple[str, str], Any]:
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as torchs

    names = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")
    names += ("StorageMeta", "_MEM_FORMAT_ENCODING")
    found = {(torchs.__name__, name): getattr(torchs, name) for name in names}
    return found | {(filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo, ("torch", "Size"): torch.Size}


_Python: Any = getattr(pickle, "_Unpickler")  # noqa: B009 (the one in Python, whose steps can be looked at)


class _Unpickler(_Python):
    """Creates only the classes that torch's metadata need, sets their fields, and calls nothing else."""

    def __init__(self, file: Any):
        super().__init__(file)
        self.classes = _classes()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.classes:
            return self.classes[module, name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def load_build(self) -> None:
        """Set fields of instances only: set on a class, they would change it for the whole program."""
        if type(self.stack[-2]) not in self.classes.values():
            raise pickle.UnpicklingError(f"it sets fields of {self.stack[-2]!r}")
        _Python.load_build(self)

    dispatch = {**_Python.dispatch, pickle.BUILD[0]: load_build}  # noqa: RUF012 (as there)


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it has tensors of the layout {name}")
    return torch.strided
