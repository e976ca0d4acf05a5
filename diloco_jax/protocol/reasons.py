"""Why steps are lost: the words under which the ledger books them.

Words for programs, from a fixed set. What a peer says for people about it goes into the
log and onto the tape (`said`).
"""

from __future__ import annotations

from typing import Final, Literal

EndReason = Literal[
    "finished", "stopped", "preempted", "refused", "failed", "died", "absent"
]
"""An incarnation ended with open steps. stopped: it was asked to end, or the run as a
whole was; refused: it was not let in, or put out since what it said cannot be; died:
another one came in its place, and it had said no goodbye; finished,
absent: the run was over first, with it or without a sign of it."""

RefusalReason = Literal["non_finite", "stale", "overlap", "empty", "refused"]
"""A delta is not merged; its steps are lost if the island gives them up. stale: its
base lags the current version too far; overlap: some of its steps are settled; refused:
the island gave it up without being told to."""

Refusal = RefusalReason | Literal[""]
"""Empty: it is fit."""

LossReason = EndReason | RefusalReason | Literal["coordinator", "overwritten"]
"""coordinator: it was killed with what it had not merged; overwritten: by adopting."""

STOPPED: Final = "stopped"
STALE: Final = "stale"
# It leaves the local value unusable.
NON_FINITE: Final = "non_finite"
# Reopened, it would overlap again.
OVERLAP: Final = "overlap"
