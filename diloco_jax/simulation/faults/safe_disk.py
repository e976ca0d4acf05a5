"""Safety of the disk: what is committed is on it, and what is needed stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.records import Durable, Merged, TermBegun
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.faults.arrays import Anchor
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.observing import Invariant


class PreparedFirst(Invariant):
    """The publish of a merge is whole on the disk before the record that commits it. So
    is the anchor with which a lost fragment begins a term. What a worker has prepared
    and was not committed when it comes back is gone.
    """

    name = "prepared"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._prepared: dict[tuple[int, Version], str] = {}

    def worker_back(self, fragments: Sequence[int]) -> None:
        kept = {k: v for k, v in self._prepared.items() if k[0] not in fragments}
        self._prepared = kept

    def prepared(self, fragment: int, version: Version, digest: str) -> None:
        self._prepared[fragment, version] = digest

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Merged | TermBegun):
            found = self._prepared.get((record.fragment, record.version))
            self.hold(
                found == record.digest,
                "on the disk is {}, and committed:",
                found,
                record,
            )


class _Committed(Invariant):
    """Base: the version of the last durable merge, by fragment."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._versions = [Version()] * config.fragments

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Merged | TermBegun):
            self._versions[record.fragment] = record.version

    def opened(self, opened: Opened) -> None:
        self._versions = [fragment.version for fragment in opened.state.fragments]


class ChainsKept(_Committed):
    """From every snapshot of a fragment in its term that is kept, publishes on the disk
    lead to its last committed version: any snapshot but one may turn out not to read.
    """

    name = "chains"

    def cut(
        self,
        fragment: int,
        saved: Sequence[Version],
        published: Mapping[Version, bytes],
    ) -> None:
        committed = self._versions[fragment]
        version = min(v for v in saved if v.term == committed.term)
        while version < committed:
            version = version.next()
            self.hold(
                version in published,
                "fragment {}: snapshots {}, committed is {}, but no publish {}",
                fragment,
                saved,
                committed,
                version,
            )


class RestoredExactly(_Committed):
    """A coordinator comes up with the last committed version of every fragment: not
    with an older one, and not with one that was prepared and never committed.
    """

    name = "restored"

    def restored(self, fragment: int, anchor: Anchor) -> None:
        committed = self._versions[fragment]
        self.hold(
            anchor.version == committed,
            "fragment {} comes up at {}, committed is {}",
            fragment,
            anchor.version,
            committed,
        )
