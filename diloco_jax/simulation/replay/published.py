"""Publishes of a repeated coordinator, kept as long as the tape needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from diloco_jax.core.fragment_merge import Arrays, MergeResult
from diloco_jax.core.payload import Buffer
from diloco_jax.protocol.values import FIRST_VERSION, Version
from diloco_jax.simulation.replay.recording import Life, Recording

Key = tuple[int, Version]
"""Fragment and version."""


class PublishedVersions:
    """Anchors and encoded publishes by version.

    Incarnations begin with anchors and adopt publishes; a coordinator that comes back
    needs publishes, too.

    first: A of the first version, by fragment. All methods raise KeyError for versions
    that have not been merged yet.
    """

    def __init__(self, recording: Recording, first: Sequence[Arrays]) -> None:
        self._anchor_uses: Counter[Key] = Counter()
        self._publish_uses: Counter[Key] = Counter()
        for life in recording.lives.values():
            self._anchor_uses.update(enumerate(life.begins()))
            for fragment, have, want in _adopted(life):
                if have.term == want.term:
                    chain = [(fragment, version) for version in _between(have, want)]
                    self._publish_uses.update(chain)
                else:
                    self._anchor_uses[fragment, want] += 1
        for begun in recording.begun:
            self._anchor_uses[begun.fragment, begun.replaced] += 1
        for recovery in recording.recoveries:
            starts = recovery.starts
            self._publish_uses.update(
                (m.fragment, m.version)
                for m in recording.merges[: recovery.merges]
                if m.fragment in starts and m.version > starts[m.fragment]
            )
        self._anchors: dict[Key, Arrays] = {}
        self._publishes: dict[Key, Buffer] = {}
        for fragment, anchor in enumerate(first):
            self._keep_anchor((fragment, FIRST_VERSION), anchor)

    def keep(self, fragment: int, version: Version, merged: MergeResult) -> None:
        """Keep a committed merge as far as the tape needs it."""
        key = (fragment, version)
        self._keep_anchor(key, merged.state.anchor)
        if self._publish_uses[key]:
            self._publishes[key] = merged.payload

    def begin(self, fragment: int, version: Version, anchor: Arrays) -> None:
        """Keep the anchor with which a term of a fragment begins, if it is needed."""
        self._keep_anchor((fragment, version), anchor)

    def anchor(self, fragment: int, version: Version) -> bytes:
        """Return A_v in full, in f32 tiles; once for every use on the tape."""
        key = (fragment, version)
        arrays = self._anchors[key]
        self._anchor_uses[key] -= 1
        if not self._anchor_uses[key]:
            del self._anchors[key]
        return b"".join(array.tobytes() for array in arrays)

    def publish(self, fragment: int, version: Version) -> Buffer:
        """Return the encoded publish of a version; once for every use on the tape."""
        key = (fragment, version)
        payload = self._publishes[key]
        self._publish_uses[key] -= 1
        if not self._publish_uses[key]:
            del self._publishes[key]
        return payload

    def chain(self, fragment: int, have: Version, want: Version) -> list[Buffer]:
        """Return the publishes that lead from one version to another, oldest first."""
        return [self.publish(fragment, version) for version in _between(have, want)]

    def _keep_anchor(self, key: Key, anchor: Arrays) -> None:
        if self._anchor_uses[key]:
            self._anchors[key] = anchor


def _adopted(life: Life) -> Iterator[tuple[int, Version, Version]]:
    """Yield the fragment of each adoption, the version before it and its own."""
    have = life.begins()
    for _, record in life.records[len(have) :]:
        if record.kind == "adopted":
            yield record.fragment, have[record.fragment], record.version
            have[record.fragment] = record.version


def _between(have: Version, want: Version) -> Iterator[Version]:
    while have < want:
        have = have.next()
        yield have
