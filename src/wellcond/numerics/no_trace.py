"""Run a model without a trace in what its modules keep, and without the caches that an earlier pass has filled.

    with no_trace(model.modules()):
        model(images)                       # may write buffers, counters, caches: all of it is undone

Some modules write when they are called, in evaluation mode too: observers of value ranges, counters, tables of
positions made at the first call, timm's attention biases by device. Without this, the model's next pass would read what
a pass in another precision or with other weights has left.

Inside this context, buffers are copies, and so are tensors in plain attributes and in their dicts, lists and tuples.
Dicts of tensors with "cache" in their name look empty, so that they are filled anew (but not by a module that tries to
read first and fills its cache after a KeyError: to it they look full). At the end each attribute and buffer is the same
object as before, and each dict, list and set has the same content. Parameters and hooks are left alone, and so are
objects of other classes. Not for FullyShardedDataParallel, which keeps its state in such attributes.
"""

import collections
import contextlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["no_trace"]

OWN = frozenset(vars(nn.Module()))  # what every module has: parameters, hooks, flags
CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, set)

Kept = dict[int, tuple[Any, Any]]  # id → a dict, list or set, and a copy of it
Copies = dict[int, Any]  # id → a tensor's copy: one that two modules share stays shared; a cache's stand-in


class _Emptied(collections.OrderedDict[Any, Any]):
    """A cache that looks empty, so that a pass fills it anew. What is read without a look whether it is there was not
    filled by a pass, and is read from the cache."""

    def __init__(self, cache: dict[Any, Any]):
        super().__init__()
        self.cache = cache

    def __missing__(self, key: Any) -> Any:
        if isinstance(self.cache, collections.defaultdict) and self.cache.default_factory is not None:
            return self.setdefault(key, self.cache.default_factory())
        return self.cache[key]


@contextlib.contextmanager
def no_trace(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo, at the end, whatever `modules` have written to their buffers and plain attributes."""
    kept: Kept = {}
    copies: Copies = {}
    try:
        for module in modules:
            if any(map(is_lazy, [*module.parameters(recurse=False), *module.buffers(recurse=False)])):
                continue  # a pass gives it its shape, which it shall keep
            attributes, buffers = vars(module), vars(module).get("_buffers")
            plain = {name: value for name, value in attributes.items() if name not in OWN}
            kept[id(attributes)] = attributes, attributes.copy()
            for name, value in plain.items():
                _keep(value, kept, copies)
                attributes[name] = _copied(value, copies)
                if "cache" in name and isinstance(value, dict) and type(value) in CONTAINERS and _holds_tensor(value):
                    copies[id(value)] = attributes[name] = copies.get(id(value), _Emptied(value))
            if isinstance(buffers, dict):  # a scripted module keeps them elsewhere
                _keep(buffers, kept, copies)
                _keep(attributes.get("_non_persistent_buffers_set"), kept, copies)
        yield
    finally:
        for container, before in kept.values():
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)


def _keep(value: Any, kept: Kept, copies: Copies) -> None:
    """Keep the content of a dict, list or set, and of those inside it, and put copies of its tensors there."""
    if isinstance(value, tuple):
        for item in value:
            _keep(item, kept, copies)
        return
    if type(value) not in CONTAINERS or id(value) in kept:
        return
    kept[id(value)] = value, value.copy()
    for item in _items(value):
        _keep(item, kept, copies)
    if not isinstance(value, set):
        for place, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[place] = _copied(item, copies)


def _copied(value: Any, copies: Copies) -> Any:
    """Return a copy of a tensor, or of a tuple with tensors; anything else as it is."""
    if type(value) is tuple:
        items = tuple(_copied(item, copies) for item in value)
        return items if any(map(operator.is_not, items, value)) else value
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or is_lazy(value):
        return value
    if id(value) not in copies:
        copies[id(value)] = value.detach().clone()
    return copies[id(value)]


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (type(value) in CONTAINERS and any(map(_holds_tensor, _items(value))))


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
