"""`diloco profile NAME --coordinator HOST:PORT [--steps N]`."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from diloco_jax.cluster.steer_commands import OneIslandOptions, operator_of
from diloco_jax.config import ConfigError
from diloco_jax.config.fields import Bound, setting
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.files import absolute
from diloco_jax.options import parse
from diloco_jax.protocol.messages import MOST_STEPS, ProfileOrder

if TYPE_CHECKING:
    from diloco_jax.wire.client import Client

POLL_S = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileOptions(OneIslandOptions):
    """The options of `diloco profile`."""

    steps: int = setting(5, Bound(1, MOST_STEPS), help="Whole steps in the trace.")
    target: str = setting(
        "",
        metavar="DIR",
        help="A folder of this machine that does not exist yet, to which the trace is "
        "copied; empty = it stays with the coordinator.",
    )


def profile_command(arguments: Sequence[str]) -> int:
    """Have an island trace its next steps; return when the trace is stored."""
    (options,) = parse(
        [ProfileOptions],
        arguments,
        "diloco profile",
        "Trace the next steps of an island that trains, with jax.profiler. Its host 0 "
        "sends the trace to the coordinator, which stores it in its workdir, in "
        "profiles/NAME-STEP.",
    )
    target = Path(absolute(options.target)) if options.target else None
    if target is not None and target.exists():
        raise ConfigError(f"--target {target} exists; name a folder that does not")
    from rich.console import Console

    from diloco_jax.observability.terminal import bar

    with (
        operator_of(options) as (client, patience_s),
        bar(Console(stderr=True), f"trace of {options.name}") as report,
    ):
        order = ProfileOrder(island=options.name, steps=options.steps)
        told = _await(client, order, patience_s, report)
        if target is not None and told["phase"] == "done":
            _copy(client, told, target, options.name)
    if told["phase"] == "failed":
        print(f"error: {told['text']}", file=sys.stderr)
        return EXIT_FAILED
    where = f"{told['folder']} of the coordinator's machine"
    folder = target or told["folder"]
    print(
        f"{target or where}: {options.steps} steps of island {options.name} from step "
        f"{told['step']} on, {told['bytes'] / 1e6:.1f} MB; `tensorboard --logdir "
        f"{folder}` shows them (pip install xprof)",
        file=sys.stderr,
    )
    return EXIT_DONE


def _copy(client: Client, told: dict[str, Any], target: Path, island: str) -> None:
    """Copy a trace that is stored; the folder has its name once all is there."""
    from diloco_jax.coordinator.profiles import place_of

    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", suffix=".tmp", dir=target.parent
    ) as made:
        path = Path(made) / "whole" / place_of(f"{island}-{told['step']}", island)
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            for part in client.trace(told["number"]):
                file.write(part)
        (Path(made) / "whole").rename(target)


def _await(
    client: Client,
    order: ProfileOrder,
    patience_s: float,
    report: Callable[[float], None],
) -> dict[str, Any]:
    """Give the order; return what became of it. While the coordinator answers, the
    deadlines are its own."""
    from diloco_jax.wire.errors import Busy, ConnectionLost

    told = client.profile(order, patience_s)
    order = replace(order, number=told["number"])
    heard = time.monotonic()
    while told["phase"] not in ("done", "failed"):
        time.sleep(POLL_S)
        try:
            told = client.profile(order, patience_s)
            heard = time.monotonic()
        except (Busy, ConnectionLost):
            if time.monotonic() - heard > patience_s:
                raise
        report(float(told.get("share", 0.0)))
    return told
