"""The options of `diloco coordinator`."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.fields import setting


@dataclasses.dataclass(frozen=True)
class CoordinatorOptions:
    """See `diloco coordinator --help`."""

    init: bool = setting(
        False,
        help="Begin a new run in WORKDIR. Without it the run there goes on; if there "
        "is none, the run whose anchors the islands offer does.",
    )
    resume: bool = setting(
        False, help="The whole run was stopped: all its islands have ended."
    )
