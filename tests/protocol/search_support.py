"""A search for anchors, and islands that are nothing but their messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit import make_config, of
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import anchors
from diloco_jax.protocol.coordinator.anchors import LEASES_AWAITED
from diloco_jax.protocol.coordinator.search import (
    Aim,
    Effect,
    Event,
    FoundTerm,
    Offered,
)
from diloco_jax.protocol.coordinator.state import Disconnected, Said, Tell, Timer
from diloco_jax.protocol.holding import AnchorCompared, AnchorKept
from diloco_jax.protocol.messages import AnchorRequest, Hello, Report, Version

CONFIG = make_config(run_id="", outage_budget_s=250.0)
PATIENCE_S = LEASES_AWAITED * CONFIG.lease_s


def anchor(fragment: int, island: str, number: int, term: int) -> AnchorKept:
    """The anchor of an island of term 1, as a later term has it."""
    return AnchorKept(
        fragment=fragment,
        island=island,
        incarnation=1,
        replaced=Version(1, number),
        version=Version(term, number),
        digest=f"digest of {number}",
    )


class Searching:
    """Two islands, a and b, are in the config; it has two fragments. Ballots agree, but
    for what is in `says`."""

    def __init__(self, names: str = "ab", run_id: str = "", **aim: Any) -> None:
        self.now, self.config = 50.0, replace(CONFIG, run_id=run_id)
        self.aim = Aim(lost=(0, 1), names=frozenset(names), name="n", **aim)
        self.state = anchors.begin(self.config, self.aim, self.now)
        self.effects: list[Effect] = []
        self.says: dict[str, dict[str, Any] | None] = {}
        """By island, fields of its ballots; None: it sends none."""

    def feed(self, event: Event) -> list[Effect]:
        self.state, effects = anchors.step(self.config, self.state, event, self.now)
        self.effects += effects
        for name, fragment in asked(effects, ballots=True):
            if (says := self.says.get(name, {})) is not None:
                effects = effects + self.vote(name, fragment, **says)
        return effects

    def offer(self, name: str, *numbers: int, **fields: Any) -> list[Effect]:
        """Make an offer of fragments with these version numbers."""
        defaults: dict[str, Any] = {
            "incarnation": 1,
            "run_id": "run-1",
            "term": 1,
            "versions": tuple(Version(1, n) for n in numbers),
            "tokens": 0,
            "next_position": 0,
            "step_seconds": 1.0,
            "sequences_per_step": 2,
        }
        fields = {**defaults, **fields}
        fields.setdefault("session", f"{name}{fields['incarnation']}")
        differences = fields.pop("differences", ())
        hello = Hello(island=name, fingerprint="f", tokens_per_step=1, **fields)
        return self.feed(Offered(hello=hello, differences=differences))

    def arrive(
        self, name: str, fragment: int, number: int, term: int = 1, **fields: Any
    ) -> list[Effect]:
        """A holder has the island's anchor on disk."""
        defaults = {"incarnation": 1, "digest": f"digest of {number}"}
        return self.feed(
            AnchorKept(
                island=name,
                fragment=fragment,
                replaced=Version(term, number),
                version=Version(self.state.term, number),
                **{**defaults, **fields},
            )
        )

    def vote(self, name: str, fragment: int, **fields: Any) -> list[Effect]:
        """A holder has compared the island's ballot."""
        member = self.state.members[name]
        defaults: dict[str, Any] = {
            "version": (member.offer.versions or {fragment: Version()})[fragment],
            "incarnation": member.offer.incarnation,
            "equal": True,
            "apart": 1.0,
        }
        fields = {**defaults, **fields}
        return self.feed(AnchorCompared(island=name, fragment=fragment, **fields))

    def hear(self, name: str, incarnation: int = 1) -> list[Effect]:
        return self.feed(
            Said(
                island=name,
                session=f"{name}{incarnation}",
                message=Report(phase="training", steps=1, step_seconds=1.0),
            )
        )

    def lose(self, name: str) -> list[Effect]:
        return self.feed(Disconnected(island=name, session=f"{name}1"))

    def wait(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.feed(Timer())

    def pass_time(self, seconds: float, names: str) -> list[Effect]:
        """Let time pass, in which these islands are heard."""
        effects, end = list[Effect](), self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + CONFIG.lease_s / 2)
            effects += [effect for name in names for effect in self.hear(name)]
        return effects


def found(effects: Sequence[Effect]) -> FoundTerm:
    (one,) = of(effects, FoundTerm)
    return one


def asked(effects: Sequence[Effect], *, ballots: bool = False) -> list[tuple[str, int]]:
    """Who is asked for the anchors, or ballots, of which fragment."""
    return [
        (tell.session.rstrip("0123456789"), tell.message.fragment)
        for tell in of(effects, Tell)
        if isinstance(tell.message, AnchorRequest)
        if (tell.message.sample != 0) is ballots
    ]
