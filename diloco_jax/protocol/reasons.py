"""Reasons for lost steps: the words under which the ledger books them.

The words are for programs and come from a fixed set. A peer's explanation for people
goes to the log and the tape (`said`).
"""

from __future__ import annotations

from typing import Final, Literal

EndReason = Literal[
    "finished", "stopped", "preempted", "refused", "failed", "died", "absent"
]
"""Reason for which an incarnation ended with open steps. stopped: it was asked to end,
or the whole run was. refused: it was not let in, or was put out for an impossible
claim or by an operator. died: another incarnation replaced it, and it had said no
goodbye. finished, absent: the run ended first, with the island live or absent."""

FAILURES: Final[frozenset[EndReason]] = frozenset(("failed", "died"))
"""Ends that another attempt may repeat; nobody asked for them."""

RefusalReason = Literal[
    "non_finite",
    "out_of_bounds",
    "quarantined",
    "stale",
    "future",
    "overlap",
    "empty",
    "refused",
]
"""Reason for which a delta is not merged; its steps are lost if the island gives them
up. out_of_bounds: it is much longer than the others' deltas. quarantined: it is within
bounds, but too many before it were not. stale: its base lags the current version too
far. future: its base is a version that no merge has made. overlap: some of its steps
are settled. refused: the island gave the delta up without being told to."""

Refusal = RefusalReason | Literal[""]
"""Reason for which a delta is not merged; empty: it is fit."""

LossReason = EndReason | RefusalReason | Literal["coordinator", "worker", "overwritten"]
"""Reason for lost steps. coordinator: it was killed with deltas that it had not merged.
worker: likewise, of a worker.
overwritten: an adoption undid the steps."""

STOPPED: Final = "stopped"
STALE: Final = "stale"
FUTURE: Final = "future"
WORKER: Final = "worker"
# The local value is unusable.
NON_FINITE: Final = "non_finite"
OUT_OF_BOUNDS: Final = "out_of_bounds"
QUARANTINED: Final = "quarantined"
# A reopened delta would overlap again.
OVERLAP: Final = "overlap"
