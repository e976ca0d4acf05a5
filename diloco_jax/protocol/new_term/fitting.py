"""Tell which offers fit a coordinator without its state: those of its config, and of
one run.

An offer that does not fit is put off and named, and ends nothing: a single island would
otherwise keep all others from a new term. If none fits, the coordinator may be wrong,
and the islands with the run's anchors must go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from diloco_jax.protocol.messages import MAX_TEXT, Hello
from diloco_jax.protocol.new_term.events import Offered

MOST_NAMED = 8
"""Islands that one message names; the number of the others follows."""


def misfit(ours: str, event: Offered) -> str:
    """Explain why an island does not fit; empty if it does.

    ours: the coordinator's run id; empty if it does not know it.
    """
    offer = event.hello
    if event.differences:
        text = "; ".join(event.differences)[:MAX_TEXT]
        return (
            f"island {offer.island!r} is in run {offer.run_id} with another config: "
            f"{text} (here: this coordinator's)"
        )
    if offer.versions and not offer.run_id:
        return f"island {offer.island!r} offers anchors of no run"
    if ours and offer.run_id not in ("", ours):
        return (
            f"island {offer.island!r} is in run {offer.run_id}, and this coordinator "
            f"gathers anchors of run {ours}"
        )
    return ""


def of_most(run_ids: Iterable[str]) -> str:
    """Return the run of most islands; empty if two have as many."""
    ranked = Counter(run_ids).most_common(2)
    if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
        return ""
    return ranked[0][0] if ranked else ""


def parted(offers: Iterable[Hello]) -> str:
    """Describe islands of several runs; empty if there is one run."""
    by_run: dict[str, list[str]] = {}
    for offer in offers:
        by_run.setdefault(offer.run_id, []).append(offer.island)
    if len(by_run) < 2:
        return ""
    sides = [
        f"{_listed([repr(name) for name in sorted(names)])} in run {run_id}"
        for run_id, names in sorted(by_run.items())
    ]
    return (
        f"islands of {len(sides)} runs offer anchors: {_listed(sides)}; the run of "
        f"most islands goes on, and among as many each nobody can tell which is the "
        f"coordinator's: start it again with --run-id and its own run, or end the "
        f"islands of the other one, or revoke their keys"
    )


def nobody(misfits: Mapping[str, str], seconds: float) -> str:
    """Explain that there is no offer to begin with."""
    if not misfits:
        return f"no island offered its anchors within {seconds:g} s"
    return (
        f"no island offered anchors that fit within {seconds:g} s: "
        f"{_listed(list(misfits.values()))}. If the islands are right, it is this "
        f"coordinator that is wrong: start it with their run's config.json"
    )


def _listed(texts: list[str]) -> str:
    more = len(texts) - MOST_NAMED
    return "; ".join([*texts[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])
