"""Books of tokens under torchft, which keeps none.

They are kept as this package's ledger is, from what each replica wrote. A step is
useful in a fragment once a round of that fragment is committed by the replica that made
it. It is lost when the round is discarded, when the replica dies or when it takes over
another one's parameters before that. Where all have died, everything is: the replicas
write no checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.peers.work import Merge


@dataclasses.dataclass
class Books:
    """Tokens of one replica, by what became of them."""

    merges: list[Merge]
    lost: float = 0.0


def books_of(name: str, log: Sequence[dict[str, Any]], tokens_per_step: int) -> Books:
    """Return the merges and lost tokens that one replica's lines tell."""
    books, sizes = Books([]), [1]
    since = [0]
    """Steps by fragment that are in no round yet."""

    def share(fragment: int) -> float:
        return sizes[fragment] / sum(sizes)

    def lose(fragments: Iterable[int]) -> None:
        for fragment in fragments:
            books.lost += since[fragment] * tokens_per_step * share(fragment)
            since[fragment] = 0

    for line in log:
        if line["kind"] == "began":
            lose(range(len(since)))
            sizes = line["sizes"]
            since = [0] * len(sizes)
        elif line["kind"] == "healed":
            lose(range(len(since)))
        elif line["kind"] == "step":
            since = [steps + 1 for steps in since]
        elif line["kind"] == "round" and line["committed"]:
            fragment = line["fragment"]
            tokens = since[fragment] * tokens_per_step * share(fragment)
            books.merges.append(Merge(line["time"], {name: tokens}))
            since[fragment] = 0
        elif line["kind"] == "round":
            lose([line["fragment"]])
    return books


def forgotten_at(lines: Sequence[dict[str, Any]]) -> float:
    """Return when the common model began anew, since all that held it had ended: the
    time of the first round whose number goes back; 0 if none does."""
    found, highest = 0.0, 0
    rounds = [x for x in lines if x["kind"] == "round" and x["committed"]]
    for line in sorted(rounds, key=lambda x: x["time"]):
        # Replicas write the same round one after the other.
        if line["number"] < highest - 1:
            found, highest = line["time"], line["number"]
        highest = max(highest, line["number"])
    return found
