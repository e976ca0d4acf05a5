"""The options of `diloco chaos`."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.fields import NOT_NEGATIVE, SOME_SECONDS, setting


@dataclasses.dataclass(frozen=True)
class ChaosOptions:
    """See `diloco chaos --help`."""

    strikes: tuple[str, ...] = setting(
        (),
        help="Each as WHO@TIMEs:KIND[SECONDS][=VALUE], in seconds from the first "
        "merge: a@30s:kill, coordinator@50s:stop4, a+b@60s:delay10=0.2, "
        "worker-1@80s:kill; or as WHO@STEP:ACTION, at a step of its own (--faults).",
    )
    schedule: str = setting(
        "",
        help="File of more strikes, one a line; lines that begin with # are comments.",
    )
    save_schedule: str = setting(
        "",
        help="File to which all strikes are written before the run, for --schedule.",
    )
    schedule_seed: int = setting(
        0,
        NOT_NEGATIVE,
        help="Seed of a random schedule, which is drawn if no strike is given.",
    )
    every_s: float = setting(
        20.0, SOME_SECONDS, help="Seconds between two random strikes."
    )
    for_s: float = setting(
        600.0, SOME_SECONDS, help="Seconds in which random strikes begin."
    )
    kinds: tuple[str, ...] = setting(
        ("kill", "kill", "stop"),
        help="Kinds of random strikes, each as often as it is named: kill, stop, "
        "slow, partition, partition-up, partition-down, throttle, delay, corrupt, "
        "full.",
    )
    link_bytes_per_s: float = setting(
        0.0,
        NOT_NEGATIVE,
        help="Bytes/s in each direction of each whole link between an island and the "
        "coordinator; 0 = no limit.",
    )
    twin: bool = setting(
        False,
        help="Afterwards run the same config without strikes and faults, and report "
        "its goodput too.",
    )
    json: bool = setting(
        False, help="Print the report to standard output as one JSON object."
    )
