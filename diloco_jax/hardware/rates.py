"""Rates of the coordinator's machine, as the package's benchmarks measured them."""

from __future__ import annotations

import msgspec

from diloco_jax.config.placement import MergeRoute
from diloco_jax.hardware.rule_rates import RULES_OF_PACKAGE, RuleRates


class MachineRates(msgspec.Struct, frozen=True, kw_only=True):
    """Work that a core does, and the rate of memory."""

    merge_core_seconds: dict[str, float]
    """Core seconds per 1e9 parameters of a merge by a weighted sum, whatever its
    deltas: the outer step and the encoded publish. By codec of the publish."""
    delta_core_seconds: dict[str, float]
    """Core seconds per 1e9 parameters of each delta, its check on arrival included. By
    codec of the deltas."""
    rules: dict[str, RuleRates]
    """Costs of rules beyond that, by `sync.merge`."""
    replay_core_seconds: dict[str, float]
    """Core seconds per 1e9 parameters of a publish in recovery, which decodes it, adds
    it and advances the outer optimizer by it, on any route. By codec of the publish."""
    merge_route: str
    """Route of the measured merges: "native" or "xla"."""
    upload_core_seconds: float
    """Core seconds of the coordinator per GB that arrives, with mutual TLS."""
    fetch_core_seconds: float
    """The same per GB that is fetched from it."""
    write_core_seconds: float
    """Core seconds per GB of sealed files that are written."""
    copy_bytes_per_s: float
    """Bytes that one core copies per second. It tells how machines compare: merges are
    bound by memory."""
    merge: str
    """`sync.merge` of the measured weighted sums."""
    outer: str
    """`outer.optimizer` of the measured merges."""
    merges_from: str
    """Command, machine and date of the merges' figures and of the copy."""
    wire_from: str
    """The same of the wire's."""

    def merging(self, codec: str) -> float:
        """Return `merge_core_seconds` of a codec; of the slowest if this one was not
        measured.
        """
        return _or_dearest(self.merge_core_seconds, codec)

    def per_delta(self, codec: str) -> float:
        """Return `delta_core_seconds` of a codec; of the slowest if this one was not
        measured.
        """
        return _or_dearest(self.delta_core_seconds, codec)

    def replaying(self, codec: str) -> float:
        """Return `replay_core_seconds` of a codec; of the slowest if this one was not
        measured.
        """
        return _or_dearest(self.replay_core_seconds, codec)

    def lines(self, rule: str) -> list[str]:
        """Return lines for people: each rate, and where it is from. rule: the run's,
        whose rates are told if it has any of its own."""
        merges = ", ".join(f"{k} {v:.3g}" for k, v in self.merge_core_seconds.items())
        deltas = ", ".join(f"{k} {v:.3g}" for k, v in self.delta_core_seconds.items())
        return [
            f"merges, core seconds per 1e9 parameters ({self.merge}, {self.outer}, "
            f"route {self.merge_route}): "
            f"{merges}; each delta {deltas}; a copy {_gb(self.copy_bytes_per_s)}"
            f" [{self.merges_from}]",
            *([self.rules[rule].line(rule)] if rule in self.rules else []),
            f"wire with TLS, core seconds per GB: {self.upload_core_seconds:.3g} up, "
            f"{self.fetch_core_seconds:.3g} down [{self.wire_from}]",
            f"sealed files, core seconds per GB: {self.write_core_seconds:.3g}",
            "disk: as published for its size and machine (not measured)",
        ]


CONSTANTS = MachineRates(
    merge_core_seconds={"f32": 7.6, "bf16": 6.9, "int8": 7.3, "int4": 10.9},
    delta_core_seconds={"f32": 2.56, "bf16": 1.75, "int8": 1.50, "int4": 1.93},
    rules=RULES_OF_PACKAGE["xla"],
    replay_core_seconds={"f32": 5.7, "int8": 5.7},
    merge_route="xla",
    upload_core_seconds=0.73,
    fetch_core_seconds=0.44,
    write_core_seconds=0.6,
    copy_bytes_per_s=8.4e9,
    merge="rda",
    outer="nesterov",
    merges_from="constant: `python benchmarks/merging.py`, 2 cores, Intel Xeon, "
    "2026-11-26",
    wire_from="constant: `python benchmarks/wire.py`, 2 cores, AMD EPYC, 2026-11-25",
)
"""Merges: the line through 2 to 16 deltas of docs/results/merging.md, by the route that
needs no compiler; it is within 3 % of each. On two cores of an AMD EPYC, 2026-11-24 and
25, merges took about half as much. The Xeon's rates are taken: the machines of
`machines.py` have Xeons, a store of 1 B parameters took there what these say
(docs/results/coordinator_scale.md), and of two measurements the slower one promises
less. Replay: the most of that page, about. Wire: the coordinator's end in
docs/results/wire.md. Sealed files: 16 of 64 MiB in turn, on the Xeon, 2026-11-26."""

NATIVE = msgspec.structs.replace(
    CONSTANTS,
    merge_core_seconds={"f32": 2.1, "bf16": 2.0, "int8": 2.2, "int4": 2.5},
    delta_core_seconds={"f32": 0.90, "bf16": 0.64, "int8": 0.50, "int4": 0.52},
    rules=RULES_OF_PACKAGE["native"],
    merge_route="native",
)
"""The same by the route "native", through 2 to 64 deltas: within 6 % of each."""


def constants_of(route: MergeRoute) -> MachineRates:
    """Return the constants for a merge route. "auto" counts as "xla": a plan does not
    know whether the coordinator's machine will have a compiler."""
    return NATIVE if route == "native" else CONSTANTS


def _or_dearest(rates: dict[str, float], codec: str) -> float:
    return rates.get(codec, max(rates.values()))


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
