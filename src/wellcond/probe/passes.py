"""Forward passes: watch the model's own, whatever it is wrapped in, or run a separate one only to measure it.

    with watching(model, before, after):
        model(images)                                   # before(args, kwargs), the pass, after(finished)
    batch_size(args, kwargs)                            # 256, from the arguments of the call
    with own_pass(probe):
        run_apart(model, *first_samples(args, kwargs, 64), exact=True)

If the pass fails, `after` is called with False, except that hooks do not run on a KeyboardInterrupt. A model compiled
in place (`model.compile()`) ignores hooks once it has run, so there the compiled call itself is wrapped;
`torch.compile(model)` is a module whose own hooks run outside the compiled code.

The separate pass leaves no trace in the model, not even in buffers and caches that it writes in evaluation mode. It
runs on a copy of the first samples in evaluation mode, without gradients, uncompiled, from a copy of the random state.
`exact` turns autocast and TF32 off and computes in float32, or in float64 on request, since low precision can both hide
and invent large condition numbers. Weights below that precision are upcast, and sharded ones (FSDP2) gathered, block by
block while the block runs, so that memory never holds a second copy of the model. FullyShardedDataParallel gathers its
weights itself, in the precision it stores them in.
"""

import contextlib
import copy
import enum
import inspect
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from wellcond.models.sites import find_blocks
from wellcond.numerics.autocast import no_tf32
from wellcond.numerics.linearize import evaluation_mode
from wellcond.numerics.no_trace import no_trace
from wellcond.numerics.split_linear import linear_by_parts

__all__ = [
    "argument",
    "batch_size",
    "first_samples",
    "is_compiled",
    "is_sharded",
    "needs_separate_pass",
    "own_pass",
    "run_apart",
    "watching",
    "whose_pass",
]

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)
FAST_WHEN_UNSEEN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # in evaluation mode, if nothing listens
Before = Callable[[tuple[Any, ...], dict[str, Any]], None]
After = Callable[[bool], None]

_running = threading.local()

# ---- the model's own pass


@contextlib.contextmanager
def watching(model: nn.Module, before: Before, after: After) -> Iterator[None]:
    """Call `before` and `after` around each forward pass of `model`, inside this context."""
    around = _around_compiled_call if model._compiled_call_impl is not None else _by_hooks
    with around(model, before, after):
        yield


@contextlib.contextmanager
def _around_compiled_call(model: nn.Module, before: Before, after: After) -> Iterator[None]:
    call: Any = model._compiled_call_impl
    if not isinstance(call, WatchedCall):
        model._compiled_call_impl = call = WatchedCall(call)
    watcher = before, after
    call.watchers.append(watcher)
    try:
        yield
    finally:
        call.watchers.remove(watcher)
        # If it is not there any more, the model has been compiled again since.
        if not call.watchers and model._compiled_call_impl is call:
            model._compiled_call_impl = call.compiled


class WatchedCall:
    """A model's compiled call, with `before` and `after` of each watcher around it; the last one is outermost."""

    def __init__(self, compiled: Callable[..., Any]):
        self.compiled = compiled
        self.watchers: list[tuple[Before, After]] = []
        # Not as a decorator, which would load the compiler with this file.
        self._uncompiled = torch.compiler.disable(self._watched, recursive=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._uncompiled(*args, **kwargs)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for before, after in reversed(self.watchers):
                before(args, kwargs)
                stack.push(lambda kind, _error, _trace, after=after: after(kind is None))
            return self.compiled(*args, **kwargs)


@contextlib.contextmanager
def _by_hooks(model: nn.Module, before: Before, after: After) -> Iterator[None]:
    ends = Ends(before, after)
    handles = (
        model.register_forward_pre_hook(ends.enter, with_kwargs=True, prepend=True),
        model.register_forward_hook(ends.finish),
        model.register_forward_hook(ends.leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Ends:
    """Hooks at both ends of a module's pass. In a deep or pickled copy of the module, such as an EMA, they do nothing.

    They also do nothing if they are compiled into the user's code, which a probe of the inner model must not change.
    The probe has then seen no pass, and reports it.
    """

    def __init__(self, before: Before | None, after: After | None):
        self.before: Before | None = before
        self.after: After | None = after
        self._finished: list[bool] = []
        # One entry per running pass (a probe's own runs inside another); empty if attached in the middle of a pass.

    def __reduce__(self) -> Any:
        return Ends, (None, None)

    def enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self.before is None:
            return
        self._finished.append(False)
        self.before(args, kwargs)

    def finish(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        # Not called if the pass has failed. (The output cannot tell: a model may return None.)
        if torch.compiler.is_compiling() or self.after is None or not self._finished:
            return
        self._finished[-1] = True
        self.after(True)

    def leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling() or self.after is None or not self._finished:
            return
        if not self._finished.pop():
            self.after(False)


# ---- the arguments of a pass


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the length of the first tensor among the arguments; 1 if there is none.

    If it is in a list of tensors of several lengths, these are samples, and the list's length counts.
    """
    first = next((value for value in (*args, *kwargs.values()) if _lengths(value)), None)
    if first is None:
        return 1
    whole = isinstance(first, list | tuple) and all(isinstance(item, Tensor) and item.ndim > 0 for item in first)
    return len(first) if whole and _may_be_samples(first) and len(set(_lengths(first))) > 1 else _lengths(first)[0]


def first_samples(args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> Any:
    """Return copies of the arguments, (args, kwargs), cut to the first `samples` if their first dimension is the batch.

    They are copies since some models change their arguments in place, such as a cache of keys and values, and the
    model's own pass is still to come. Nothing is cut if it is not certain which dimension is the batch.
    """
    size = batch_size(args, kwargs)
    cuts = size > samples and _is_certain(args, kwargs, size)
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return _copied(leaf, memo)
        return (leaf[:samples] if cuts and leaf.ndim > 0 and len(leaf) == size else leaf).detach().clone()

    return pytree.tree_map(copied, (args, kwargs))


def argument(model: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the model's argument `name`, passed by position or by name; None if it was not passed."""
    if name in kwargs or not args:
        return kwargs.get(name)
    parameters = list(inspect.signature(model.forward).parameters)
    place = parameters.index(name) if name in parameters else len(args)
    return args[place] if place < len(args) else None


def _lengths(tree: Any) -> list[int]:
    return [len(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim > 0]


def _is_certain(args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> bool:
    """Whether a first dimension of length `size` can only be the batch, and nothing else depends on the batch.

    It may not be so with a mask (n, n) if n is the batch size, a mask (b · heads, n, n), a list of samples, and objects
    of other classes.
    """
    values = (*args, *kwargs.values())
    leaves = [leaf for value in values for leaf in pytree.tree_leaves(value, is_leaf=_may_be_samples)]
    if not all(isinstance(leaf, Tensor) or _is_plain(leaf) for leaf in leaves):
        return False
    _first, *shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
    return not any((n == size and size in rest) or (n > size and n % size == 0) for n, *rest in shapes)


def _may_be_samples(value: Any) -> bool:
    """Whether `value` is a list or tuple of tensors alike, which may be samples of one length each."""
    if not isinstance(value, list | tuple):
        return False
    dimensions = [item.ndim for item in value if isinstance(item, Tensor) and item.ndim > 0]
    return len(dimensions) > len(set(dimensions))


def _is_plain(leaf: Any) -> bool:
    """Whether a pass cannot change `leaf`, or it is a function or a module, of which a copy would cost too much."""
    return isinstance(leaf, PLAIN) or callable(leaf)


def _copied(leaf: Any, memo: dict[int, Any]) -> Any:
    if _is_plain(leaf):
        return leaf
    try:
        with DetachedCopies():
            return copy.deepcopy(leaf, memo)
    except Exception as error:
        kind = type(leaf).__name__
        warnings.warn(f"the probe's own pass shares a {kind}, which cannot be copied: {error!r}", stacklevel=2)
        return leaf


class DetachedCopies(TorchFunctionMode):
    """Inside this mode, deepcopy detaches tensors with a graph, which it would refuse."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


# ---- the separate pass


@contextlib.contextmanager
def own_pass(owner: object) -> Iterator[None]:
    """Run the model for `owner` alone inside this context: other probes neither count nor measure the pass."""
    before = whose_pass()
    _running.owner = owner
    try:
        yield
    finally:
        _running.owner = before


def whose_pass() -> object | None:
    """Return the owner of the pass running in this thread; None for the model's own."""
    return getattr(_running, "owner", None)


def run_apart(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, exact: bool | str) -> None:
    """Run the model inside `model` once more and discard the output. It may change the arguments: give it copies.

    `exact` sets the precision: the model's own (False), that of its weights without autocast ("stored"), at least
    float32 (True), or float64 ("float64").
    """
    inner = _callable_inside(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_own_random_state(inner))
        if not _wrapped_parts(inner):  # FSDP1 keeps its state in plain attributes
            stack.enter_context(no_trace(inner.modules()))
        stack.enter_context(evaluation_mode(inner))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_no_fast_path())
        if not exact:
            # Weights cast without gradients must not stay in autocast's cache: the model's own pass would use them.
            stack.enter_context(_no_autocast_cache())
            inner(*args, **kwargs)
            return
        stack.enter_context(_no_autocast(inner))
        stack.enter_context(no_tf32())
        if exact == "stored":
            inner(*args, **kwargs)
            return
        dtype = torch.float64 if exact == "float64" else torch.float32
        if _gathers_itself(inner):
            stack.enter_context(_as_stored(inner))
            dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), dtype)
        else:
            stack.enter_context(_upcast_weights(inner, dtype))
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: _upcast(tensor, dtype), (args, kwargs))
        stack.enter_context(linear_by_parts())  # as exact as float32, in half the time
        inner(*args, **kwargs)


def is_compiled(model: nn.Module) -> bool:
    """Whether `model` or a part of it was compiled: by torch.compile (also of its forward) or by module.compile()."""
    return any(
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether a pass of `model` needs all processes, because each holds only a part of the weights."""
    return bool(_wrapped_parts(model)) or any(map(_is_distributed, model.parameters()))


def needs_separate_pass(model: nn.Module) -> str | None:
    """Return why hooks would miss the model's own forward pass, or None if they would not."""
    if is_compiled(model):
        return "compiled code skips hooks, so the model underneath was measured in a pass of its own (evaluation mode)"
    if isinstance(model, nn.DataParallel):
        return "DataParallel runs copies of the model, so the one underneath was measured in a pass of its own"
    if any(isinstance(module, FAST_WHEN_UNSEEN) and not module.training for module in model.modules()):
        return "torch's own attention takes another path while someone listens, so it was measured in a pass of its own"
    return None


def _callable_inside(model: nn.Module) -> nn.Module:
    """Return the module to call: inside torch's own wrappers, since other code around a model may change its input."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:  # for one, FullyShardedDataParallel, whose own forward gathers the weights
            return model
        model = inner


@contextlib.contextmanager
def _own_random_state(model: nn.Module) -> Iterator[None]:
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    numpy = sys.modules.get("numpy")  # if not loaded, it is not in use
    ours, theirs = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=sorted(device.index for device in devices)):
            yield
    finally:
        random.setstate(ours)
        if numpy:
            numpy.random.set_state(theirs)


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    """Disable torch's encoder fast path: it makes nested tensors of padded input, which hooked layers cannot read."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _no_autocast_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _no_autocast(model: nn.Module) -> Iterator[None]:
    kinds = {"cpu", *(p.device.type for p in model.parameters())}
    with contextlib.ExitStack() as stack:
        for kind in filter(torch.amp.is_autocast_available, kinds):
            stack.enter_context(torch.autocast(kind, enabled=False))
        # accelerate wraps the model's forward in autocast, and keeps the original in _original_forward.
        for module in model.modules():
            original = vars(module).get("_original_forward")
            if original is not None and "forward" in vars(module):
                stack.callback(setattr, module, "forward", vars(module)["forward"])
                module.forward = original
        yield


def _wrapped_parts(model: nn.Module) -> list[Any]:
    """Return the modules wrapped in FSDP1 (FullyShardedDataParallel), which manages its weights itself."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]


def _sharded_parts(model: nn.Module) -> list[Any]:
    """Return the modules sharded by FSDP2."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _gathers_itself(model: nn.Module) -> bool:
    """Whether the weights must not be touched: with FSDP1, and with FSDP2 combined with tensor parallelism."""
    return bool(_wrapped_parts(model)) or (bool(_sharded_parts(model)) and any(map(_is_parallel, model.parameters())))


@contextlib.contextmanager
def _as_stored(model: nn.Module) -> Iterator[None]:
    """Let FullyShardedDataParallel compute in the precision of its stored weights, whatever it trains in.

    That is float32, unless the whole model is stored in less. It holds in evaluation mode, inside this context.
    """
    handles = [module._handle for module in _wrapped_parts(model) if module._handle is not None]
    before = [handle._use_full_prec_in_eval for handle in handles]
    for handle in handles:
        handle._use_full_prec_in_eval = True
    try:
        yield
    finally:
        for handle, value in zip(handles, before, strict=True):
            if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):  # it has run
                handle.reshard(True)  # else the outermost stay gathered, and a later pass reuses them
            handle._use_full_prec_in_eval = value


@contextlib.contextmanager
def _upcast_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Upcast what is below `dtype` and gather what is sharded, block by block, inside this context."""
    blocks = {id(block.module): block.module for block in find_blocks(model)}
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    with contextlib.ExitStack() as stack:
        whole = stack.enter_context(_no_gathering(model))
        stack.enter_context(_swapped(outside, dtype, whole=whole))
        for block in blocks.values():
            stack.enter_context(_swapped_while_it_runs(block, dtype, whole=whole))
        yield


@contextlib.contextmanager
def _swapped_while_it_runs(block: nn.Module, dtype: torch.dtype, *, whole: bool) -> Iterator[None]:
    running: list[contextlib.ExitStack] = []

    def enter(*_: Any) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(_swapped(block.modules(), dtype, whole=whole))
        running.append(stack)

    def leave(*_: Any) -> None:
        if running:
            running.pop().close()

    handles = (
        block.register_forward_pre_hook(enter, prepend=True),
        block.register_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        while running:  # left over from an interrupted pass
            leave()
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _swapped(modules: Iterable[nn.Module], dtype: torch.dtype, *, whole: bool) -> Iterator[None]:
    """Replace the modules' parameters, buffers and tensors in plain attributes by upcast copies, until the end.

    With `whole`, sharded ones are gathered.
    """
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    copies: dict[int, Tensor] = {}  # tied weights stay tied
    try:
        for module in modules:
            for held in (module._parameters, module._buffers, vars(module)):
                for name, tensor in held.items():
                    if not isinstance(tensor, Tensor):
                        continue
                    gathers = whole and _is_distributed(tensor)
                    if not (gathers or _is_below(tensor, dtype)):
                        continue
                    if id(tensor) not in copies:
                        full: Tensor = cast(Any, tensor).full_tensor() if gathers else tensor
                        copies[id(tensor)] = _upcast(full.detach(), dtype)
                    before.append((cast(dict[str, Any], held), name, tensor))
        for held, name, tensor in before:
            wide = copies[id(tensor)]
            held[name] = nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


@contextlib.contextmanager
def _no_gathering(model: nn.Module) -> Iterator[bool]:
    """Remove FSDP2's own hooks inside this context, and yield whether the model has sharded parts.

    The hooks would gather the weights in the precision that training computes in, and round the blocks' inputs to it.
    """
    sharded = _sharded_parts(model)
    kept: list[tuple[Any, Any]] = []
    for module in sharded:
        module.reshard()  # a forward without a backward leaves weights gathered, and rounded
        state: Any = module._get_fsdp_state()
        for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
            for one in getattr(handle, "handles", (handle,)):  # several, if modules are sharded as one
                hooks = one.hooks_dict_ref()
                if hooks and one.id in hooks:
                    kept.append((hooks, list(hooks.items())))
                    del hooks[one.id]
    try:
        yield bool(sharded)
    finally:
        for hooks, items in reversed(kept):
            hooks.clear()
            hooks.update(items)


def _is_distributed(tensor: Tensor) -> bool:
    return type(tensor).__name__ == "DTensor"


def _is_parallel(tensor: Any) -> bool:
    """Whether not only FSDP2 shards it: FSDP2 alone uses one mesh dimension, and at most a second one for replicas."""
    if not _is_distributed(tensor):
        return False
    *others, _last = tensor.placements
    return len(others) > 1 or not all(placement.is_replicate() for placement in others)


def _is_below(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < dtype.itemsize


def _upcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if _is_below(tensor, dtype) else tensor
