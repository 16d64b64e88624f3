"""One update of the weights, if the gradient is finite; if it is not, everything stays as it was before the step.

    update = Update(config, parts)
    update.begin()                          # before the step's passes
    skipped = update(step, logged=True)     # after them, with clipping and averaging; a tensor, True if skipped
    update.gradient_norm                    # before clipping

A single infinite gradient would destroy weights and moments for good. The norm of the whole gradient, over all
micro-batches and all processes, decides, so that all processes decide the same. Torch's fused Adam and AdamW on a GPU
take the decision as a tensor, and nothing waits for it; for other optimisers on a GPU, and for sharded parameters, the
CPU waits for the norm at each step. `skip_limit=0` turns all of this off.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.train.config import Config
from wellcond.train.setup import Parts

__all__ = ["Update"]

foreach: Any = torch  # its functions over lists of tensors, which its own optimisers use, are not exported


class Update:
    def __init__(self, config: Config, parts: Parts):
        self.config: Config = config
        self.parts: Parts = parts
        self.gradient_norm: Tensor = torch.tensor(math.nan)
        """The gradient's norm in the last step; with neither `skip_limit` nor `clip_grad`, in the last logged one."""
        self._buffers = _Buffers(parts.model) if config.skip_limit else None
        kinds = {(parameter.dtype, parameter.device) for parameter in parts.parameters}
        self._alike = len(kinds) == 1 and not parts.sharded
        """Whether torch's functions over lists can take all gradients at once, without sorting by dtype and device."""

    def begin(self) -> None:
        if self._buffers is not None:
            self._buffers.keep()

    def __call__(self, step: int, *, logged: bool) -> Tensor | None:
        """Update the weights; return whether the step was skipped, on the device, or None if steps never are."""
        config, parts = self.config, self.parts
        measured = logged or config.clip_grad is not None or config.skip_limit > 0
        if measured or config.clip_value is not None:
            parts.scaler.unscale_(parts.optimizer)
        if measured:
            self.gradient_norm = self._total_norm()
        if config.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(parts.parameters, config.clip_grad, self.gradient_norm)
        if config.clip_value is not None:
            self._clip_values(config.clip_value)
        skipped = None
        if self._buffers is None:
            parts.scaler.step(parts.optimizer)
            self._average(step)
        else:
            skipped = self.gradient_norm * 0 != 0  # NaN if the norm is not finite
            if _takes_decision(parts.optimizer):
                self._step_unless(skipped, step)
            elif skipped:  # waits for a GPU
                self._buffers.put_back()
            else:
                parts.optimizer.step()
                self._average(step)
        parts.scaler.update()  # float16's scale, by what was found when unscaling
        parts.forget_gradients()
        return skipped

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parts.parameters if parameter.grad is not None]

    @torch.no_grad()
    def _total_norm(self) -> Tensor:
        gradients = self._gradients()
        if self._alike and gradients:  # as get_total_norm does
            return torch.linalg.vector_norm(torch.stack(foreach._foreach_norm(gradients, 2.0)), 2.0)
        norm: Any = nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    @torch.no_grad()
    def _clip_values(self, most: float) -> None:
        if not self._alike:
            nn.utils.clip_grad_value_(self.parts.parameters, most)
        elif gradients := self._gradients():  # as clip_grad_value_ does
            foreach._foreach_clamp_min_(gradients, -most)
            foreach._foreach_clamp_max_(gradients, most)

    def _step_unless(self, skipped: Tensor, step: int) -> None:
        """Take the step or skip it on the GPU, without the CPU knowing which."""
        optimizer: Any = self.parts.optimizer
        optimizer.found_inf = skipped.float()  # as torch's GradScaler does
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf
        assert self._buffers is not None
        self._buffers.put_back(where=skipped)
        self._average(step, unless=skipped)

    @torch.no_grad()
    def _average(self, step: int, unless: Tensor | None = None) -> None:
        ema = self.parts.ema
        if ema is None:
            return
        decay = ema.get_decay(step)
        if unless is None or decay == 0:  # with decay 0 the average is the model itself, skipped or not
            ema.update(self.parts.model, step=step)
            return
        pairs = list(zip(ema.module.state_dict().values(), self.parts.model.state_dict().values(), strict=True))
        means, values = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
        for mean, value in pairs:
            if not mean.is_floating_point():
                mean.copy_(value)
        changes = foreach._foreach_sub(values, means)
        foreach._foreach_mul_(changes, (1 - unless.float()) * (1 - decay))
        foreach._foreach_add_(means, changes)


def _takes_decision(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser can skip a step as told by a tensor. Checked each time: a loaded state may change that."""
    groups = optimizer.param_groups
    known = getattr(optimizer, "_step_supports_amp_scaling", False) and all(group.get("fused") for group in groups)
    return known and isinstance(optimizer, torch.optim.Adam) and groups[0]["params"][0].is_cuda  # AdamW is a subclass


class _Buffers:
    """The buffers that forward passes change, such as a batch norm's averages; only those that saved states contain."""

    def __init__(self, model: nn.Module):
        saved = model.state_dict().keys()
        kinds: dict[Any, list[Tensor]] = defaultdict(list)
        for name, buffer in model.named_buffers():
            if name in saved:
                kinds[buffer.dtype, buffer.device].append(buffer)
        self._kinds = [(buffers, *(_flat(buffers) for _ in range(2))) for buffers in kinds.values()]

    def keep(self) -> None:
        for buffers, (_, kept), _ in self._kinds:
            foreach._foreach_copy_(kept, buffers)

    @torch.no_grad()
    def put_back(self, where: Tensor | None = None) -> None:
        """Restore all buffers as they were kept; given `where`, only if that is true."""
        for buffers, (before, kept), (now, other) in self._kinds:
            if where is not None:
                foreach._foreach_copy_(other, buffers)
                torch.where(where, before, now, out=before)
            foreach._foreach_copy_(buffers, kept)


def _flat(buffers: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return one flat tensor, and views of it in the shapes of the buffers."""
    sizes = [buffer.numel() for buffer in buffers]
    memory = torch.empty(sum(sizes), dtype=buffers[0].dtype, device=buffers[0].device)
    return memory, [part.view(buffer.shape) for part, buffer in zip(memory.split(sizes), buffers, strict=True)]
