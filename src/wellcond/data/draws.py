"""Random numbers that depend on the image, not on when they are drawn.

    draw_uniform(seed=0, epoch=3, rows=torch.tensor([17, 4]), count=8)      # (2, 8) float32 in [0, 1)
    order = draw_order(seed=0, epoch=3, count=50_000)                       # a permutation

Each number is a hash of (seed, epoch, stream, row, column), by the finalizer of SplitMix64. So an image's crop is the
same in any batch, rank or step, on a CPU or a GPU, and nothing has to be replayed to resume in the middle of an epoch.
The global generators of torch, NumPy and Python are neither read nor advanced.
"""

import torch
from torch import Tensor

__all__ = ["draw_normal", "draw_order", "draw_uniform", "make_key", "send"]

STEP = 0x9E3779B97F4A7C15  # 2⁶⁴ / the golden ratio, odd: successive multiples are spread evenly
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's multipliers
WORD = (1 << 64) - 1


def make_key(*numbers: int) -> int:
    """Hash several numbers, in this order, into one 64-bit number: the seed of a generator for one purpose."""
    key = 0
    for number in numbers:
        key = _scramble((key + STEP + number) & WORD)
    return key


def draw_uniform(*, seed: int, epoch: int, rows: Tensor, count: int, stream: int = 0) -> Tensor:
    """Return (rows, count) float32 in [0, 1), 24 bits each. Use another `stream` for another purpose."""
    return _top_bits(_draw_words(make_key(seed, epoch, stream), rows, count))


def draw_normal(*, seed: int, epoch: int, rows: Tensor, count: int, stream: int = 0) -> Tensor:
    """Return (rows, count) float32 from the standard normal distribution, by the Box-Muller transform."""
    words = _draw_words(make_key(seed, epoch, stream), rows, (count + 1) // 2)  # 48 bits of each word make two numbers
    radius = (-2 * torch.log1p(-_top_bits(words))).sqrt()  # 1 − u is never 0
    angle = 2 * torch.pi * _top_bits(words << 24)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]


def draw_order(*, seed: int, epoch: int, count: int) -> Tensor:
    """Return the order of an epoch: a permutation of `count` rows, int64 on the CPU."""
    generator = torch.Generator().manual_seed(make_key(seed, epoch) >> 1)
    return torch.randperm(count, generator=generator)


def _draw_words(key: int, rows: Tensor, count: int) -> Tensor:
    per_row = _scramble_all(rows.to(torch.int64) * _signed(STEP) + _signed(key))
    which = torch.arange(1, count + 1, device=rows.device) * _signed(STEP)
    return _scramble_all(per_row[:, None] + which)


def _top_bits(words: Tensor) -> Tensor:
    """Return the highest 24 bits, as many as a float32 holds, as a number in [0, 1)."""
    return ((words >> 40) & 0xFFFFFF).float() * 2**-24


def _scramble(word: int) -> int:
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)


def _scramble_all(words: Tensor) -> Tensor:
    """`_scramble` for int64 tensors, which wrap around. A right shift copies the sign bit, so the copies are masked."""
    words = (words ^ ((words >> 30) & (WORD >> 30))) * _signed(FIRST)
    words = (words ^ ((words >> 27) & (WORD >> 27))) * _signed(SECOND)
    return words ^ ((words >> 31) & (WORD >> 31))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device without synchronising: a plain `.to` would first wait for all the work queued on the GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # only copies from pinned memory are asynchronous
    return tensor.to(device, non_blocking=True)
