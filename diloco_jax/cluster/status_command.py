"""`diloco status HOST:PORT or WORKDIR [--json]`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from diloco_jax.config import Placement
from diloco_jax.config.fields import positional, setting
from diloco_jax.options import parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """The options of `diloco status`."""

    target: str = positional(
        metavar="HOST:PORT or WORKDIR", help="A coordinator, or the workdir of a run."
    )
    json: bool = setting(False, help="Print one JSON object to standard output.")
    certificates: str = setting("", help="Folder made by diloco certs.")
    insecure: bool = setting(
        False, help="Ask an address that is not loopback without TLS."
    )


def status_command(arguments: Sequence[str]) -> int:
    """Show the state of a run; return the exit code."""
    (options,) = parse(
        [StatusOptions],
        arguments,
        "diloco status",
        "Show who is alive, who takes part, and how far the run is.",
    )
    from rich.console import Console

    from diloco_jax.cluster.status import read_status
    from diloco_jax.observability.measures import health_of
    from diloco_jax.observability.terminal import closing_report, render

    placement = Placement(certificates=options.certificates, insecure=options.insecure)
    status = read_status(options.target, placement)
    if options.json:
        print(json.dumps({**status, "health": health_of(status)}))
    elif "wall_seconds" in status:
        Console(stderr=True, markup=False).print(
            closing_report(status, {}), highlight=False, soft_wrap=True
        )
    else:
        Console(stderr=True, markup=False).print(render(status, None))
    return 0
