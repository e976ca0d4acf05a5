"""A schedule of strikes on a local run, written as `WHO@TIMEs:KIND[SECONDS][=VALUE]`.

WHO is an island, `coordinator`, or several joined with `+` (all of a site). TIME
counts from the run's first merge. A schedule may also have faults at an exact step, in
the form of `placement.faults`. A file of it has one strike or fault a line. Strikes
meet the processes of the launcher.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from diloco_jax.config.fields import NOT_NEGATIVE, SOME_SECONDS, setting
from diloco_jax.errors import ConfigError, suggest
from diloco_jax.faults import COORDINATOR, is_fault
from diloco_jax.files import write_text


@dataclasses.dataclass(frozen=True)
class ChaosOptions:
    """See `diloco chaos --help`."""

    strikes: tuple[str, ...] = setting(
        (),
        help="Each as WHO@TIMEs:KIND[SECONDS][=VALUE], in seconds from the first "
        "merge: a@30s:kill, coordinator@50s:stop4, a+b@60s:delay10=0.2; "
        "or as WHO@STEP:ACTION, at a step of its own (--faults).",
    )
    schedule: str = setting(
        "",
        help="File of more strikes, one a line; lines that begin with # are comments.",
    )
    save_schedule: str = setting(
        "", help="File to which all strikes are written before the run, for --schedule."
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
    link_delay_s: float = setting(
        0.0,
        NOT_NEGATIVE,
        help="Seconds more in each direction of each whole link, joins included.",
    )
    twin: bool = setting(
        False,
        help="Afterwards run the same config without strikes and faults, and report "
        "its goodput too.",
    )
    json: bool = setting(
        False, help="Print the report to standard output as one JSON object."
    )


KINDS = {
    "kill": "SIGKILL, once",
    "stop": "SIGSTOP for SECONDS",
    "slow": "it runs for the share VALUE of the time, below 1",
    "partition": "no byte passes, in either direction",
    "partition-up": "no byte passes towards the coordinator",
    "partition-down": "no byte passes towards the island",
    "throttle": "VALUE bytes/s in each direction",
    "delay": "VALUE seconds more in each direction",
    "full": "the disk of the workdir is full, if less than 1 GiB of it is free",
    "corrupt": "a bit of each larger piece of bulk is wrong, in both directions",
}
"""Meaning of each kind of strike."""
OF_PROCESSES = ("kill", "stop", "slow")
OF_DISK = ("full",)
OF_NETWORK = tuple(kind for kind in KINDS if kind not in OF_PROCESSES + OF_DISK)
SECONDS_DRAWN = (1.0, 6.0)
"""Shortest and longest strike of a random schedule."""
DRAWN_VALUES = {"slow": 0.5, "throttle": 1e6, "delay": 0.1}
"""Values of a random schedule, of all kinds that have one."""

_NUMBER = r"\d+(?:\.\d+)?"
_PATTERN = re.compile(
    rf"(?P<who>[^@]+)@(?P<at>{_NUMBER})s:(?P<kind>{'|'.join(map(re.escape, KINDS))})"
    rf"(?P<seconds>{_NUMBER})?(?:=(?P<value>{_NUMBER}))?"
)
_FORMS = "'WHO@TIMEs:kill', 'WHO@TIMEs:KINDSECONDS' or 'WHO@TIMEs:KINDSECONDS=VALUE'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strike:
    """One strike of a schedule."""

    at_s: float
    """Seconds after the first merge."""
    who: tuple[str, ...]
    kind: str
    seconds: float = 0.0
    """Its duration; 0 for a kill."""
    value: float = 0.0
    """Share of a slow one, bytes/s of a throttle, seconds of a delay."""

    def __str__(self) -> str:
        seconds = _number(self.seconds) if self.seconds else ""
        value = f"={_number(self.value)}" if self.kind in DRAWN_VALUES else ""
        who = "+".join(self.who)
        return f"{who}@{_number(self.at_s)}s:{self.kind}{seconds}{value}"

    @property
    def of_network(self) -> bool:
        """Whether it strikes a link, and neither a process nor a disk."""
        return self.kind in OF_NETWORK

    def links(self, islands: Iterable[str]) -> tuple[str, ...]:
        """Return the islands whose links it strikes; the coordinator stands for all."""
        if not self.of_network:
            return ()
        return tuple(n for n in islands if n in self.who or COORDINATOR in self.who)


def read_schedule(path: Path) -> tuple[str, ...]:
    """Return the strikes and faults of a file, one a line; empty lines and those that
    begin with # are left out. Raises ConfigError."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"schedule = {str(path)!r} cannot be read ({error}); give a text file with "
            f"one strike a line, as --save-schedule writes it"
        ) from error
    if not (found := tuple(line for line in lines if line and line[0] != "#")):
        raise ConfigError(
            f"schedule = {str(path)!r} has no strike; write one a line, as in "
            f"'a@30s:kill'"
        )
    return found


def write_schedule(texts: Iterable[str], path: Path) -> None:
    """Write a file that `read_schedule` reads. Raises ConfigError."""
    try:
        write_text("".join(f"{text}\n" for text in texts), path)
    except OSError as error:
        raise ConfigError(
            f"save_schedule = {str(path)!r} cannot be written ({error}); give a file "
            f"in a folder that exists"
        ) from error


def divided(texts: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide a schedule into strikes, and faults at a step (`placement.faults`)."""
    texts = tuple(texts)
    faults = tuple(filter(is_fault, texts))
    return tuple(text for text in texts if text not in faults), faults


def parse_strikes(texts: Iterable[str], islands: Sequence[str]) -> tuple[Strike, ...]:
    """Parse and sort by time; ConfigError on an unknown form or name, and on strikes
    that last and overlap on one process or link."""
    strikes = sorted((_parse(text, islands) for text in texts), key=lambda s: s.at_s)
    until: dict[tuple[str, bool], Strike] = {}
    for strike in strikes:
        names = strike.links(islands) if strike.of_network else strike.who
        for name in names if strike.seconds else ():
            key = (name, strike.of_network)
            before = until.get(key)
            if before and strike.at_s <= before.at_s + before.seconds:
                raise ConfigError(
                    f"strikes has {strike}, while {before} still strikes {name}; begin "
                    f"it after {before.at_s + before.seconds:g} s"
                )
            until[key] = strike
    return tuple(strikes)


def random_strikes(
    seed: int,
    islands: Sequence[str],
    *,
    every_s: float,
    for_s: float,
    kinds: Sequence[str],
) -> tuple[Strike, ...]:
    """Draw one strike each `every_s` seconds, for `for_s` seconds.

    Processes are struck alike, the coordinator's too; of links, those of islands.
    Strikes last up to 6 s, and end before the next one. Raises ConfigError.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(
                f"kinds has {kind!r}{suggest(kind, list(KINDS))}; there are "
                f"{', '.join(KINDS)}"
            )
    low, high = SECONDS_DRAWN
    if every_s <= low or not kinds:
        raise ConfigError(
            f"a random schedule needs every_s above {low:g}, found {every_s:g}, and at "
            f"least one of kinds, found {len(kinds)}"
        )
    numbers = random.Random(seed)
    strikes = []
    for number in range(1, int(for_s / every_s) + 1):
        kind = numbers.choice(list(kinds))
        known = [] if kind in OF_DISK else [*islands]
        if kind in OF_PROCESSES + OF_DISK:
            known.append(COORDINATOR)
        longest = round(min(high, every_s * 0.9), 3)
        seconds = round(numbers.uniform(low, max(low, longest)), 1)
        strikes.append(
            Strike(
                at_s=round(number * every_s, 3),
                who=(numbers.choice(known),),
                kind=kind,
                seconds=0.0 if kind == "kill" else min(seconds, longest),
                value=DRAWN_VALUES.get(kind, 0.0),
            )
        )
    return tuple(strikes)


def of_options(
    options: ChaosOptions, islands: Sequence[str]
) -> tuple[tuple[Strike, ...], tuple[str, ...]]:
    """Return the strikes of `diloco chaos`, random ones if none is given, and faults at
    a step. Raises ConfigError."""
    texts = options.strikes
    if options.schedule:
        texts += read_schedule(Path(options.schedule))
    timed, faults = divided(texts)
    if texts:
        return parse_strikes(timed, islands), faults
    drawn = random_strikes(
        options.schedule_seed,
        islands,
        every_s=options.every_s,
        for_s=options.for_s,
        kinds=options.kinds,
    )
    return drawn, faults


def _number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _parse(text: str, islands: Sequence[str]) -> Strike:
    match = _PATTERN.fullmatch(text)
    kind = match["kind"] if match else ""
    if (
        match is None
        or (kind == "kill") != (match["seconds"] is None)
        or (kind in DRAWN_VALUES) != (match["value"] is not None)
        or (kind != "kill" and not float(match["seconds"]))
        or (kind in ("throttle", "slow") and not float(match["value"]))
        or (kind == "slow" and float(match["value"]) >= 1)
    ):
        raise ConfigError(
            f"strikes has {text!r}; the forms are {_FORMS}, as in 'a@30s:stop5' or "
            f"'a+b@60s:delay10=0.2'; SECONDS and bytes/s are above 0, the share of "
            f"slow is between 0 and 1, {', '.join(DRAWN_VALUES)} alone have a VALUE; "
            f"kinds are {', '.join(KINDS)}"
        )
    known = [*islands, COORDINATOR]
    who = tuple(dict.fromkeys(match["who"].split("+")))
    for name in who:
        if name not in known:
            raise ConfigError(
                f"strikes has {text!r}, but there is no {name!r}"
                f"{suggest(name, known)}; known are {', '.join(known)}"
            )
    if kind in OF_DISK and who != (COORDINATOR,):
        raise ConfigError(
            f"strikes has {text!r}, but the disk of the workdir is the coordinator's; "
            f"write {COORDINATOR}@{match['at']}s:{kind}{match['seconds']}"
        )
    return Strike(
        at_s=float(match["at"]),
        who=who,
        kind=kind,
        seconds=float(match["seconds"] or 0),
        value=float(match["value"] or 0),
    )
