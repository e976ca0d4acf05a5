"""The merges of a holder that are under way: ordered, then prepared, then committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from diloco_jax.core.fragment_merge import MergeResult
from diloco_jax.protocol.holding import Merge, MergeMeasured
from diloco_jax.protocol.values import Version


class PreparedMerge(NamedTuple):
    """A merge whose publish is on disk. seconds: time that computing took."""

    merge: Merge
    merged: MergeResult
    seconds: float

    def measured(self) -> MergeMeasured:
        """Return the numbers of the merge."""
        contributions = self.merge.contributions
        return MergeMeasured(
            fragment=self.merge.fragment,
            version=self.merge.version,
            islands=tuple(c.island for c in contributions),
            tokens=sum(c.tokens for c in contributions),
            share=self.merge.share,
            norm=self.merged.norm,
            seconds=self.seconds,
            measures=self.merged.measures._asdict(),
            directions=self.merged.directions,
        )


class MergesUnderWay:
    """At most one of each fragment. Orders, commits and `give_up` come from one thread;
    the threads that compute ask whether a merge is still wanted."""

    def __init__(self) -> None:
        self._ordered: dict[int, tuple[Merge, Future[None]]] = {}
        self._prepared: dict[int, PreparedMerge] = {}

    def order(self, merge: Merge, compute: Callable[[], None]) -> Callable[[], None]:
        """Note an ordered merge; return `compute`, for another thread, so that its end
        is known here.
        """
        ended: Future[None] = Future()
        self._ordered[merge.fragment] = merge, ended

        def job() -> None:
            try:
                compute()
            finally:
                ended.set_result(None)

        return job

    def is_wanted(self, merge: Merge) -> bool:
        """Tell whether an ordered merge has not been given up."""
        ordered = self._ordered.get(merge.fragment)
        return ordered is not None and ordered[0] is merge

    def prepared(self, prepared: PreparedMerge) -> None:
        """Note that a merge is prepared."""
        self._prepared[prepared.merge.fragment] = prepared

    def pop(self, fragment: int) -> PreparedMerge:
        """Return the prepared merge of a fragment, which is committed."""
        self._ordered.pop(fragment, None)
        return self._prepared.pop(fragment)

    def give_up(self, committed: Mapping[int, Version], patience_s: float) -> list[int]:
        """Give up all merges but prepared ones that were committed, with versions by
        fragment; return the fragments of those.

        Waits until nothing is computed or written any more. Raises TimeoutError if that
        takes longer than `patience_s`.
        """
        before, self._ordered = self._ordered, {}
        for _, ended in before.values():
            ended.result(patience_s)
        self._prepared = {
            fragment: prepared
            for fragment, prepared in self._prepared.items()
            if prepared.merge.version == committed[fragment]
        }
        return list(self._prepared)
