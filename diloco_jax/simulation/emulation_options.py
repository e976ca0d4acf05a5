"""Additions of an emulation to a config: network, chance, and islands' comings and
goings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from diloco_jax.config import ConfigError, suggest
from diloco_jax.config.fields import (
    NOT_NEGATIVE,
    SECONDS,
    SHARE,
    check_bounds,
    explained,
    setting,
)
from diloco_jax.config.options import TRUST_CODE
from diloco_jax.simulation.clock import LineSpeed

MOST_REPORTS = 1e6
"""Reports that islands may send while an emulation waits: about a minute on one core.
"""


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class EmulationOptions:
    """Settings of an emulation. Times are virtual seconds.

    By default everything but the steps takes no time, so that equal islands are in
    lockstep: a delta taken at a step boundary is merged and adopted at that boundary.

    Example:
      >>> from diloco_jax import EmulationOptions
      >>> options = EmulationOptions(merge_seconds=0.5, joins={"spot": (20.0, 60.0)})
      >>> options.joins["spot"]  # it takes part from the 20th second to the 60th
      (20.0, 60.0)
    """

    line: LineSpeed = setting(LineSpeed(), help="Every island's connection.")
    merge_seconds: float = setting(
        0.0,
        SECONDS,
        help="Seconds from the last delta to the published merge. To emulate an "
        "overlap of tau steps whatever the network: (tau - 0.5) steps' seconds, so "
        "that the adoption is tau boundaries after the take.",
    )
    merge_spread: float = setting(
        0.0,
        SHARE,
        help="Standard deviation of the merges' seconds over their mean (log-normal): "
        "a busy coordinator, links that vary.",
    )
    join_seconds: float = setting(
        0.0, SECONDS, help="Seconds for which an island compiles at every start."
    )
    step_spread: float = setting(
        0.0,
        SHARE,
        help="Standard deviation of step times over their mean (log-normal).",
    )
    failure_every_seconds: float = setting(
        0.0,
        NOT_NEGATIVE,
        help="Mean seconds between random failures of one island (Poisson); 0 = none.",
    )
    down_seconds: float = setting(
        10.0,
        SECONDS,
        help="Seconds from a failure, random or one of --faults, to the new start.",
    )
    chance_seed: int = setting(
        0,
        NOT_NEGATIVE,
        help="Seed of step times, merge times and failures. Parameters and data follow "
        "the run's seed.",
    )
    joins: Mapping[str, tuple[float, float]] = setting(
        {},
        help="From when until when an island takes part, by name, in seconds; inf = to "
        "the end. Islands that are not named take part from 0 to the end.",
    )
    unlike_shards: bool = setting(
        False,
        help="Train every island on a part of its own: the documents in the order of "
        "their names, cut into as many parts of one length as there are islands. An "
        "island draws from its part at random, at the pace of the run's epochs: few "
        "windows come twice in a run that is much shorter than an epoch; after a whole "
        "one about a quarter has, and a quarter to a third has not come at all.",
    )
    skip_rows: tuple[tuple[int, int], ...] = setting(
        (),
        metavar="[FIRST STOP ...]",
        help="Rows of the training data, each time FIRST to STOP - 1 counted from 0, "
        "that nobody learns from. They keep their places: steps that draw one count "
        "its tokens as computed, and none of them as predicted.",
    )
    evaluate_every_tokens: int = setting(
        0,
        NOT_NEGATIVE,
        help="Tokens between two evaluations of the global parameters, each on "
        "placement.evaluate_batches batches; 0 = only at the end.",
    )

    def validate(self, islands: Mapping[str, Any]) -> None:
        """Raise ConfigError naming field, value and remedy. islands: by name."""
        check_bounds(self)
        check_bounds(self.line)
        for name in ("up_bytes_per_s", "down_bytes_per_s"):
            if not (speed := getattr(self.line, name)) > 0:
                raise ConfigError(
                    f"{name} = {speed}; it must be above 0 (inf = no limit)"
                )
        for name, (start, stop) in self.joins.items():
            if name not in islands:
                raise ConfigError(
                    f"joins has {name!r}, which is no island{suggest(name, islands)}; "
                    f"there are {', '.join(islands)}"
                )
            if not 0 <= start < stop:
                raise ConfigError(
                    f"joins.{name} = {start:g} to {stop:g}; choose 0 <= from < to"
                )

        if self.skip_rows and self.unlike_shards:
            raise ConfigError(
                f"skip_rows = {self.skip_rows} with unlike_shards, which cuts the data "
                f"into other rows; leave one of them out"
            )

    def require_reach(
        self, islands: int, report_s: float, pauses: Mapping[str, float]
    ) -> None:
        """Raise ConfigError if a wait is longer than an emulation gets through.

        While it waits, each island reports every `report_s` seconds. pauses: seconds of
        each fault that stops somebody, infinite for a hang.
        """
        most = MOST_REPORTS * report_s / islands
        waits = {
            "merge_seconds": self.merge_seconds,
            "join_seconds": self.join_seconds,
            "down_seconds": self.down_seconds,
            "latency_s": self.line.latency_s,
            **pauses,
        }
        for field, value in waits.items():
            if value > most:
                raise ConfigError(
                    f"{field} = {value:g}: meanwhile {islands} islands report every "
                    f"{report_s:g} s (placement.time_budget_s / 10), and more than "
                    f"{MOST_REPORTS:.0e} reports take too long; it must be "
                    f"at most {most:g}"
                )


def options_of(given: Any) -> EmulationOptions:
    """Return the options of a call, None being the default ones. Raises ConfigError."""
    if given is None:
        return EmulationOptions()
    if not isinstance(given, EmulationOptions):
        raise ConfigError(
            f"options = {given!r}; give an EmulationOptions with the settings that "
            f"differ, as in EmulationOptions(merge_seconds=0.5)"
        )
    return given


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions(EmulationOptions):
    """The options of `diloco emulate`."""

    init: str = setting(
        "",
        metavar="hf:DIR|hf:OWNER/NAME|run:WORKDIR",
        help="Start from weights, whose model is taken over with them.",
    )
    trust_code: bool = setting(False, help=TRUST_CODE)
    json: bool = setting(
        False, help="Print the summary to standard output as one JSON object."
    )
