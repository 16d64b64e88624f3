"""asa-fig8: with DCT graying, the lower ε, the better conditioned the Jacobian of an attention block.

    wellcond reproduce asa-fig8 --scale smoke                                      # the digits, on a CPU
    wellcond reproduce asa-fig8 --scale lab --data-dir tiny-imagenet=… --data-dir imagenette=…      # two minutes

What is measured, and how, is the same as in asa-fig7: jacobian_spectra.py.
"""

from wellcond.claims.jacobian_spectra import spectra_claim

__all__ = ["CLAIM"]

CLAIM = spectra_claim("asa-fig8", "dct", epsilons=(1.0, 0.97, 0.95, 0.9))
