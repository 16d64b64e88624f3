"""Condition numbers, spectral powers and cosine transforms: tensors in, tensors out. Needs only torch and NumPy."""

from .dct import dct, dct2, idct, idct2
from .density import SpectralDensity
from .jacobian import JacobianSpectrum, jacobian_spectrum
from .singular import (
    Conditioning,
    condition_number,
    effective_rank,
    measure_conditioning,
    singular_values,
    stable_rank,
)
from .spectral import spectral_power

__all__ = [
    "Conditioning",
    "JacobianSpectrum",
    "SpectralDensity",
    "condition_number",
    "dct",
    "dct2",
    "effective_rank",
    "idct",
    "idct2",
    "jacobian_spectrum",
    "measure_conditioning",
    "singular_values",
    "spectral_power",
    "stable_rank",
]
