"""The options of `diloco run`."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.fields import setting
from diloco_jax.options import TRUST_CODE


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """See `diloco run --help`."""

    baseline: bool = setting(
        False,
        help="Afterwards train the same model plainly on as many tokens, and compare.",
    )
    init: str = setting(
        "",
        metavar="hf:DIR|run:WORKDIR",
        help="Start from weights, whose model is taken over with them: of a folder "
        "with config.json and safetensors, or of a run.",
    )
    resume: str = setting(
        "",
        help="Workdir of a stopped run that should go on; CONFIG may be left out.",
    )
    dashboard: bool = setting(
        False, help="Show the run in a browser, too, until it ends: prints the address."
    )
    trust_code: bool = setting(False, help=TRUST_CODE)
    json: bool = setting(
        False, help="Print the summary to standard output as one JSON object."
    )
