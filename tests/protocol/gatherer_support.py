"""A gathering half of the protocol, and islands that are nothing but their messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kit import make_config
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import gathering
from diloco_jax.protocol.coordinator.events import Disconnected, Said, Tell, Timer
from diloco_jax.protocol.coordinator.gathering import (
    LEASES_AWAITED,
    AnchorArrived,
    Effect,
    Event,
    Offered,
)
from diloco_jax.protocol.messages import AnchorRequest, Hello, Report
from diloco_jax.protocol.values import Version

CONFIG = make_config(run_id="", outage_budget_s=250.0)
PATIENCE_S = LEASES_AWAITED * CONFIG.lease_s
E = TypeVar("E", bound=Effect)


class Gatherer:
    """Two islands, a and b, are in the config; it has two fragments."""

    def __init__(self, names: str = "ab", run_id: str = "") -> None:
        self.now, self.config = 50.0, replace(CONFIG, run_id=run_id)
        self.state = gathering.begin(self.config, frozenset(names), self.now)
        self.effects: list[Effect] = []

    def feed(self, event: Event) -> list[Effect]:
        self.state, effects = gathering.step(self.config, self.state, event, self.now)
        self.effects += effects
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

    def arrive(self, name: str, fragment: int, number: int) -> list[Effect]:
        version = Version(1, number)
        return self.feed(
            AnchorArrived(
                island=name, incarnation=1, fragment=fragment, version=version
            )
        )

    def hear(self, name: str) -> list[Effect]:
        return self.feed(
            Said(
                island=name,
                session=f"{name}1",
                message=Report(phase="training", steps=1, step_seconds=1.0),
            )
        )

    def lose(self, name: str) -> list[Effect]:
        return self.feed(Disconnected(island=name, session=f"{name}1"))

    def wait(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.feed(Timer())


def of(effects: Sequence[Effect], kind: type[E]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def asked(effects: Sequence[Effect]) -> list[tuple[str, int]]:
    return [
        (tell.session.rstrip("0123456789"), tell.message.fragment)
        for tell in of(effects, Tell)
        if isinstance(tell.message, AnchorRequest)
    ]
