"""asa-fig7: with SVD graying, the lower ε, the better conditioned the Jacobian of an attention block.

    wellcond reproduce asa-fig7 --scale smoke                                      # the digits, on a CPU
    wellcond reproduce asa-fig7 --scale lab --data-dir tiny-imagenet=… --data-dir imagenette=…      # two minutes

What is measured, and how, is the same as in asa-fig8: jacobian_spectra.py.
"""

from wellcond.claims.jacobian_spectra import spectra_claim

__all__ = ["CLAIM"]

CLAIM = spectra_claim("asa-fig7", "svd", epsilons=(1.0, 0.9, 0.7, 0.5))
