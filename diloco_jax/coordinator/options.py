"""The options of `diloco coordinator`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from diloco_jax.config.fields import setting
from diloco_jax.errors import ConfigError
from diloco_jax.options import TRUST_CODE


@dataclasses.dataclass(frozen=True)
class CoordinatorOptions:
    """See `diloco coordinator --help`."""

    init: str = setting(
        "",
        metavar="[hf:DIR|run:WORKDIR|from-island:NAME]",
        help="Begin a new run in WORKDIR, with parameters that are drawn or that an "
        "island begins with, or with the model and parameters of a folder of weights "
        "or of a run. Without it, the run there goes on, or else the run whose anchors "
        "the islands offer.",
    )
    resume: bool = setting(
        False, help="The whole run was stopped: all its islands have ended."
    )
    run_id: str = setting(
        "",
        metavar="RUN",
        help="The run whose state was lost: of islands that offer their anchors, those "
        "of this run alone are gathered. Status and log of a coordinator that gathers "
        "name the run of each island.",
    )
    trust_code: bool = setting(False, help=TRUST_CODE)

    def check_run(self) -> None:
        """Raise ConfigError for a --run-id beside what says which run it is."""
        others = {
            "--init begins a run": self.init,
            "--resume goes on from the workdir": self.resume,
        }
        for why, given in others.items():
            if self.run_id and given:
                raise ConfigError(
                    f"--run-id {self.run_id} is for a coordinator that has lost its "
                    f"state, and {why}; leave one of them out"
                )


DRAWN = "drawn"
"""Value of an `--init` that names no source."""


def with_source(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the value of an `--init` that has none."""
    spelled = []
    for argument, follows in zip(arguments, [*arguments, "--"][1:], strict=True):
        spelled.append(argument)
        if argument == "--init" and follows.startswith("-"):
            spelled.append(DRAWN)
    return spelled
