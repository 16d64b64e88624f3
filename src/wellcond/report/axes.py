"""Axes of charts: where a value lies, and which values get a tick.

    scale = Scale.fit(values, log=True, start=320, end=20)     # pixels from bottom to top
    scale(0.01), scale.ticks()                                 # a position; [(0.001, "10⁻³"), …]

A value without a place (NaN, infinite, absurdly large, or not positive on a logarithmic axis) is never placed:
`drawable` tells.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Scale", "drawable", "format_number"]

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


LARGEST, SMALLEST = 1e250, 1e-250  # beyond them an axis, with its margins, would leave the doubles


def drawable(value: float, log: bool) -> bool:
    return math.isfinite(value) and abs(value) <= LARGEST and (value >= SMALLEST or not log)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A map from values to pixels."""

    low: float
    high: float
    log: bool
    start: float
    end: float

    @classmethod
    def fit(cls, values: Iterable[float], *, log: bool, start: float, end: float, padding: float = 0.0) -> "Scale":
        """The scale that shows all drawable values, with `padding` (a part of the range) on both sides."""
        found = [value for value in values if drawable(value, log)]
        low, high = (min(found), max(found)) if found else (1.0, 10.0)
        if log:
            decades = math.log10(high) - math.log10(low)
            margin = 10.0 ** (padding * decades) if decades > 1e-9 else 3.0
            return cls(low=low / margin, high=high * margin, log=log, start=start, end=end)
        size = max(abs(low), abs(high))
        if high - low > max(1e-12 * size, SMALLEST):
            margin = (high - low) * padding
        else:  # one value, to the eye: it lies in the middle
            margin = size / 2 if size > SMALLEST else 0.5
        low, high = low - margin, high + margin
        return cls(low=low, high=high, log=log, start=start, end=end)

    def __call__(self, value: float) -> float:
        low, high = self._unit(self.low), self._unit(self.high)
        return self.start + (self._unit(value) - low) / (high - low) * (self.end - self.start)

    def _unit(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def ticks(self, most: int = 6, base: int = 10) -> list[tuple[float, str]]:
        """Round values within the range, with their labels; on a logarithmic axis powers of `base`."""
        if not self.log:
            return self._linear_ticks(most)
        return self._log_ticks(most) if base == 10 else self._power_ticks(most, base)

    def _linear_ticks(self, most: int) -> list[tuple[float, str]]:
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next((power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9)), power * 10)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [index * step for index in range(first, last + 1)]
        digits = max(0, -math.floor(math.log10(step) + 1e-9)) + (1 if f"{step:e}".startswith("2.5") else 0)
        largest = max((abs(value) for value in values), default=0.0)
        if largest >= 1e5 or 0 < largest < 1e-3:
            return [(value, format_number(value)) for value in values]
        return [(value, _minus(f"{value:.{digits}f}")) for value in values]

    def _log_ticks(self, most: int) -> list[tuple[float, str]]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        stride = max(1, math.ceil((last - first + 1) / most))
        values = [10.0**k for k in range(first, last + 1) if k % stride == 0]
        if len(values) < 3 and self.high / self.low < 1e3:  # less than two decades: the steps between help
            around = range(first - 1, last + 1)
            values = [m * 10.0**k for k in around for m in (1, 2, 5) if self.low <= m * 10.0**k <= self.high]
        plain = all(0.01 <= value < 1e4 for value in values)
        return [(value, f"{value:g}" if plain else _power_of_ten(value)) for value in values]

    def _power_ticks(self, most: int, base: int) -> list[tuple[float, str]]:
        first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
        stride = max(1, math.ceil((last - first + 1) / most))
        powers = range(first, last + 1, stride)
        plain = all(k >= 0 and base**k < 1e4 for k in powers)
        return [(float(base) ** k, str(base**k) if plain else f"{base}{_superscript(k)}") for k in powers]


def _superscript(exponent: int) -> str:
    return str(exponent).translate(SUPERSCRIPTS)


def _power_of_ten(value: float) -> str:
    if value in (1, 10):
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = round(value / 10.0**exponent)
    return ("" if factor == 1 else f"{factor}·") + "10" + _superscript(exponent)


def format_number(value: float, digits: int = 3) -> str:
    """A number for a reader: 0.0541, 3,567, 1.2·10⁷, ∞; NaN as NaN."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return _minus(f"{value:,.{places}f}")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return _minus(mantissa) + "·10" + _superscript(int(exponent))


def _minus(text: str) -> str:
    return text.replace("-", "−")
