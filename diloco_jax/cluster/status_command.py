"""`diloco status HOST:PORT or WORKDIR [--json]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from diloco_jax.config import Placement


def status_command(arguments: Sequence[str]) -> int:
    """Shows how a run stands; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="diloco status",
        description="Shows who is alive, who takes part, and how far it is.",
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="HOST:PORT or WORKDIR")
    parser.add_argument("--json", action="store_true", help="one object, on stdout")
    parser.add_argument(
        "--certificates", default="", metavar="DIR", help="made by `diloco certs`"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="ask a non-loopback address without TLS"
    )
    options = parser.parse_args(arguments)
    from rich.console import Console

    from diloco_jax.cluster.status import read_status
    from diloco_jax.observability.report import closing_report
    from diloco_jax.observability.terminal import render

    placement = Placement(certificates=options.certificates, insecure=options.insecure)
    status = read_status(options.target, placement)
    if options.json:
        print(json.dumps(status))
    elif "wall_seconds" in status:
        Console(stderr=True, markup=False).print(
            closing_report(status, {}), highlight=False, soft_wrap=True
        )
    else:
        Console(stderr=True, markup=False).print(render(status, None))
    return 0
