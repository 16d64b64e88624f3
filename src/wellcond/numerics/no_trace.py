"""Run a model without a trace in what its modules keep, and without the caches that an earlier pass has filled.

    with no_trace(model.modules()):
        model(images)                       # may write buffers, counters, caches: all of it is undone

Some modules write when they are called, in evaluation mode too: observers of value ranges, counters, tables of
positions made at the first call, timm's attention biases by device. Without this, the model's next pass would read what
a pass in another precision or with other weights has left.

Inside this context, buffers and tensors in plain attributes are copies, and dicts of tensors with "cache" in their name
are empty, so that they are made anew. At the end each attribute and buffer is the same object as before, and each dict,
list and set has the same content. Parameters and hooks are left alone, and so are objects of other classes. Not for
FullyShardedDataParallel, which keeps its state in such attributes.
"""

import collections
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["no_trace"]

OWN = frozenset(vars(nn.Module()))  # what every module has: parameters, hooks, flags
CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, set)

Kept = dict[int, tuple[Any, Any]]  # id → a dict, list or set, and a copy of it


@contextlib.contextmanager
def no_trace(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo, at the end, whatever `modules` have written to their buffers and plain attributes."""
    kept: Kept = {}
    copies: dict[int, Tensor] = {}  # a tensor that two modules share stays shared
    try:
        for module in modules:
            attributes, buffers = vars(module), vars(module).get("_buffers")
            plain = {name: value for name, value in attributes.items() if name not in OWN}
            for name, value in plain.items():
                _keep(value, kept)
                if "cache" in name and type(value) in CONTAINERS and isinstance(value, dict) and _holds_tensor(value):
                    value.clear()
            kept[id(attributes)] = attributes, attributes.copy()
            _copy_tensors(attributes, plain, copies)
            if isinstance(buffers, dict):  # a scripted module keeps them elsewhere
                kept[id(buffers)] = buffers, buffers.copy()
                _keep(attributes.get("_non_persistent_buffers_set"), kept)
                _copy_tensors(buffers, buffers.copy(), copies)
        yield
    finally:
        for container, before in kept.values():
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)


def _keep(value: Any, kept: Kept) -> None:
    """Keep the content of a dict, list or set, and of those inside it."""
    if type(value) not in CONTAINERS or id(value) in kept:
        return
    kept[id(value)] = value, value.copy()
    for item in _items(value):
        _keep(item, kept)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (type(value) in CONTAINERS and any(map(_holds_tensor, _items(value))))


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _copy_tensors(held: dict[str, Any], values: dict[str, Any], copies: dict[int, Tensor]) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or is_lazy(value):
            continue
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        held[name] = copies[id(value)]
