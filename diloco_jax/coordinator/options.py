"""The options of `diloco coordinator`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from diloco_jax.config.fields import setting
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
    trust_code: bool = setting(False, help=TRUST_CODE)


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
