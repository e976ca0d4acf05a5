"""Write the publish of a merge, which prepares it, however long its disk is full."""

from __future__ import annotations

import time
from collections.abc import Callable

from diloco_jax.coordinator.disk_wait import given_up
from diloco_jax.coordinator.holding.anchors import WRITE_AGAIN_S
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.core.fragment_merge import MergeResult
from diloco_jax.errors import remedy
from diloco_jax.protocol.holding import HolderTroubled, Merge
from diloco_jax.protocol.values import Prepared


class PublishWriting:
    """Writes publishes, on any thread."""

    def __init__(
        self,
        publishes: Publishes,
        within_s: float,
        wait: Callable[[float], None],
        tell: Callable[[HolderTroubled], None],
    ) -> None:
        """within_s: seconds after which a publish that cannot be written has failed.
        wait: pauses for some seconds, and ends early at the end of the process."""
        self._publishes, self._within_s = publishes, within_s
        self._wait, self._tell = wait, tell

    def write(
        self, merge: Merge, merged: MergeResult, wanted: Callable[[], bool]
    ) -> Prepared | None:
        """Write the publish of a merge, however often that takes; None once it is not
        wanted any more. Raises OSError, naming the fragment and the file, after
        `within_s`."""
        told, began = False, time.monotonic()
        while wanted():
            try:
                return self._publishes.write(
                    merge.fragment, merge.version, merged.payload, final=merge.final
                )
            except OSError as error:
                waited_s = time.monotonic() - began
                if waited_s >= self._within_s:
                    what = f"the publish of fragment {merge.fragment}"
                    raise given_up(what, waited_s, self._within_s, error) from error
                if not told:
                    self._tell_unwritten(merge, merged, error)
                told = True
                self._wait(WRITE_AGAIN_S)
        return None

    def _tell_unwritten(
        self, merge: Merge, merged: MergeResult, error: OSError
    ) -> None:
        text = (
            f"fragment {merge.fragment} is not merged yet: its publish of "
            f"{len(merged.payload):,} bytes cannot be written to {error.filename} "
            f"({error.strerror}); {remedy(error)} within "
            f"{self._within_s:g} s (4 * placement.outage_budget_s), and it goes "
            f"on; after that the coordinator ends"
        )
        self._tell(HolderTroubled(text=text))
