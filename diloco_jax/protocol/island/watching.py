"""An island's turn at the merged model: which anchors it copies, and when it evaluates.

The coordinator names the versions of one cycle, fragment by fragment (`Watch`). Each is
copied while it is the anchor: before the adoption that would replace it, or after the
one that brings it. Once all fragments of the cycle are copied, the copies are evaluated
between steps. All hosts of an island come to the same, since it follows from decisions.
"""

from __future__ import annotations

from collections.abc import Callable

from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.messages import Watch
from diloco_jax.protocol.values import Version


class Watching:
    """The cycle that one incarnation watches.

    copy: copies the anchor of a fragment, in the place of an earlier cycle's.
    """

    def __init__(self, fragments: int, copy: Callable[[int], None]) -> None:
        self.cycle = 0
        """The cycle that is copied or evaluated; 0 before the first turn."""
        self._fragments, self._copy = fragments, copy
        self._wanted: dict[int, Version] = {}
        self._copied: set[int] = set()

    @property
    def evaluates(self) -> bool:
        """True while all fragments of the cycle are copied, and not evaluated yet."""
        return len(self._copied) == self._fragments

    def ask(self, watch: Watch) -> None:
        """Note the version of a fragment at a cycle. A new cycle takes the place of one
        that is not complete; one under evaluation is finished first."""
        if watch.cycle < self.cycle or self.evaluates:
            return
        if watch.cycle > self.cycle:
            self.cycle = watch.cycle
            self._wanted, self._copied = {}, set()
        self._wanted[watch.fragment] = watch.version

    def see(self, books: Books) -> None:
        """Copy the anchors that are wanted, of those that the island has now."""
        for fragment, version in list(self._wanted.items()):
            if books.version(fragment) == version:
                self._copy(fragment)
                self._copied.add(fragment)
                del self._wanted[fragment]

    def evaluated(self) -> None:
        """Note that the copies are evaluated: the next turn may come."""
        self._wanted, self._copied = {}, set()
