"""The door: checks of a peer's messages beyond their types, before anything is computed
from them.
"""

from __future__ import annotations

from diloco_jax.config import RunConfig, differences, shared_fields
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.models.build import other_model
from diloco_jax.protocol import messages
from diloco_jax.wire.errors import Refused, RemoteProtocolError

SHORTEST_MEDIAN_S = 1e-9
"""Shortest median of a step in seconds; the speed of a shorter step would not be
finite."""
INCARNATIONS_AHEAD = 600
"""Incarnations beyond the present unix second that are believed. Launchers count from
1, or in unix seconds and attempts, by clocks that are no more than minutes fast. A
thief of a key shuts the island's own process out for no longer than that."""
OF_NO_FRAGMENT = ("granted", "progress", "restored")


def check_hello(hello: messages.Hello) -> None:
    """Raise RemoteProtocolError if the numbers of a hello or their products are
    absurd."""
    _check_tokens(hello, hello.steps)
    for version in hello.versions:
        if version.term == 0:
            raise RemoteProtocolError(
                f"island {hello.island!r} has version {tuple(version)}, and terms "
                f"count from 1; start it again"
            )


def check_incarnation(hello: messages.Hello, last: int, unix: float) -> None:
    """Raise Refused if an incarnation is no plausible number of an attempt: it would
    shut out all later ones. last: the island's last one; unix: the present time in
    seconds."""
    most = max(last + 1, int(unix) + INCARNATIONS_AHEAD)
    if hello.incarnation > most:
        raise Refused(
            "incarnation",
            f"incarnation {hello.incarnation} of island {hello.island!r} is too high: "
            f"its last one is {last}, the unix time {int(unix)} at the coordinator, "
            f"and the limit {most}; start it with --incarnation {last + 1}, or set the "
            f"clock that is wrong",
        )


def check_report(
    hello: messages.Hello, report: messages.Report, fragments: int
) -> None:
    """Raise RemoteProtocolError if a report's numbers are absurd, or if one of its
    records names a fragment that the run does not have. hello: the session's."""
    _check_tokens(hello, max(report.steps, report.measures.steps))
    if 0 < (median_s := report.measures.median_step_seconds) < SHORTEST_MEDIAN_S:
        raise RemoteProtocolError(
            f"island {hello.island!r} says that its steps take {median_s} s, no step "
            f"takes less than {SHORTEST_MEDIAN_S}; start it again"
        )
    for record in report.records:
        if record.fragment >= fragments or (
            record.fragment < 0 and record.kind not in OF_NO_FRAGMENT
        ):
            raise RemoteProtocolError(
                f"record {record.seq} ({record.kind}) of island {hello.island!r} is of "
                f"fragment {record.fragment}, the run has {fragments}; start the "
                f"island with the run's config.json"
            )


class Likeness:
    """Compare an island's config and model with those of the run."""

    def __init__(self, run: RunConfig, plan: FragmentPlan) -> None:
        self._shared, self._fingerprint = shared_fields(run), run.fingerprint()
        self._plan = plan.digest()

    def differences(self, hello: messages.Hello) -> list[str]:
        """List the differences as `field: ours here, theirs there`; empty if there are
        none.
        """
        if hello.fingerprint != self._fingerprint:
            prints = f"fingerprint: {self._fingerprint} here, {hello.fingerprint} there"
            return [*differences(self._shared, hello.run), prints]
        return other_model(self._plan, hello.plan)


def _check_tokens(hello: messages.Hello, steps: int) -> None:
    if steps * hello.tokens_per_step > messages.MAX_TOKENS:
        raise RemoteProtocolError(
            f"island {hello.island!r} has made {steps} steps of "
            f"{hello.tokens_per_step} tokens, the limit is {messages.MAX_TOKENS} "
            f"tokens; start it again"
        )
