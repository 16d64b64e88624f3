"""The claims, one file each: arms, data sets, the papers' numbers, how to judge and draw; and what they share.

    from wellcond.claims import CLAIMS, reproduce
    CLAIMS["asa-fig1c"].claim
    reproduce(["asa-fig1c"], scale="smoke")             # what `wellcond reproduce asa-fig1c --scale smoke` does

To add one, write a file named after its id that defines `CLAIM`, and list the id in catalogue.py. In another package,
call `wellcond.register_claim`; docs/adding-a-claim.md has an example.
"""

from .arms import Between, TrainedArms
from .catalogue import CLAIMS, QUEUE, claim, register_claim
from .claim import THE_PAPER, Claim, Measured, MeasuredOn, Options, Statement, TableRow
from .comparison import SKIPS, Arm, Comparison
from .measurements import register_measurement
from .reproduce import reproduce

__all__ = [
    "CLAIMS",
    "QUEUE",
    "SKIPS",
    "THE_PAPER",
    "Arm",
    "Between",
    "Claim",
    "Comparison",
    "Measured",
    "MeasuredOn",
    "Options",
    "Statement",
    "TableRow",
    "TrainedArms",
    "claim",
    "register_claim",
    "register_measurement",
    "reproduce",
]
