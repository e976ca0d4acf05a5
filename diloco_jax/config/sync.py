"""The synchronization settings: cycles, merges, adoptions and codecs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from diloco_jax.config.fields import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    SHARE,
    setting,
)

FragmentBy = Literal["size", "layer", "tensor"]
PartialMerges = Literal["scaled", "full"]
GraceWindow = Literal["alike", "overlap"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Settings for combining the islands' work.

    Example:
      >>> from diloco_jax import Config
      >>> Config().replace("sync.grace", 0).run.sync.grace
      0
      >>> Config().replace("sync.qorum", 2)
      Traceback (most recent call last):
          ...
      diloco_jax.errors.ConfigError: no field 'sync.qorum' in this config; did...
    """

    steps_per_cycle: int = setting(
        24,
        AT_LEAST_1,
        help="H: inner steps of the pacing island between two merges of one fragment.",
    )
    fragments: int = setting(
        24,
        AT_LEAST_1,
        help="P: fragments that the model is cut into; each is merged once per cycle.",
    )
    fragment_by: FragmentBy = setting(
        "size",
        help="What goes into a fragment by itself, so that all are about equally "
        'large: a tensor of one layer ("size"), a whole layer, or a tensor with all '
        "its layers.",
    )
    overlap_steps: int = setting(
        2,
        NOT_NEGATIVE,
        help="tau: steps an island may do between its take and the adoption.",
    )
    quorum: int = setting(
        1, AT_LEAST_1, help="K: deltas without which a fragment is not merged."
    )
    grace: float = setting(
        0.8,
        BELOW_1,
        help="gamma: share of the slack spent on waiting for more than K deltas; "
        "0 = none.",
    )
    grace_window: GraceWindow = setting(
        "alike",
        help='How long a grace above 0 waits for more than K deltas: "overlap", for '
        'the slack alone, as published; "alike", also until islands of about the '
        "pacing one's speed can have answered, even if that makes an adoption late.",
    )
    max_staleness: int = setting(
        1,
        NOT_NEGATIVE,
        help="Versions by which a delta's base may lag the version it is merged into.",
    )
    delta_bound: float = setting(
        5.0,
        NOT_NEGATIVE,
        help="Longest delta that is merged, as a multiple of what is usual among the "
        "other islands; 0 = any that is finite. A refused island restarts the fragment "
        "from the global parameters.",
    )
    quarantine_after: int = setting(
        8,
        NOT_NEGATIVE,
        help="Deltas in a row that are not finite or too long, after which an island "
        "is merged no more, as long as most of the live islands are left; 0 = never.",
    )
    release_cycles: int = setting(
        2,
        AT_LEAST_1,
        help="Cycles in which all deltas of a quarantined island must be within bounds "
        "before it is merged again.",
    )
    weighting: str = setting(
        "tokens",
        code=True,
        help='Weight of a delta in its merge: "tokens", those behind it; '
        '"tokens_times_rate", the same times the island\'s tokens per second (as '
        'published); "uniform". This option, merge, adopt and the codecs also take '
        'a member of your own as "path/to/file.py:name" (docs/extending.md).',
    )
    partial_merges: PartialMerges = setting(
        "scaled",
        help="Length of a merge that lacks some live islands: scaled by its share of "
        "all tokens per second, or in full.",
    )
    merge: str = setting(
        "rda",
        code=True,
        help='Rule by which deltas become one: "mean", their weighted mean; "rda", '
        "which averages their lengths and directions apart; "
        '"trimmed_mean", which leaves out the extremes, and "clipped_mean", which '
        "shortens what is longer than most, for islands that may send wrong deltas "
        "(docs/results/liars.md).",
    )
    adopt: str = setting(
        "keep",
        code=True,
        help='What an adoption does with the island\'s own steps. "keep" and '
        '"rebase" lose none; they differ where the island\'s last delta missed the '
        'merge (docs/design/pending_deltas.md). "overwrite" loses the steps since the '
        'take; "blend" averages the island\'s values and the merged ones.',
    )
    blend_alpha: float = setting(
        0.5, SHARE, help='Share of the local value that adopt = "blend" keeps.'
    )
    codec_up: str = setting(
        "int8",
        code=True,
        help='Encoding of deltas: "f32", "bf16", "int8" or "int4".',
    )
    codec_down: str = setting(
        "int8", code=True, help="Encoding of merged fragments: the same choices."
    )
    error_feedback: bool = setting(
        True, help="Add what the encoding of a delta lost to the island's next one."
    )
