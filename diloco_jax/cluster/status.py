"""The state of a run, and what an operator asks of one island.

`diloco status HOST:PORT or WORKDIR [--json]` asks the coordinator, or reads the files
in the workdir. `diloco admit NAME --coordinator HOST:PORT [--remove]`, `diloco release
NAME` and `diloco profile NAME [--steps N]` speak of one island.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax import run_files
from diloco_jax.cluster.processes import with_own_keys
from diloco_jax.config import ConfigError, Placement
from diloco_jax.config.config import check_name
from diloco_jax.config.fields import Bound, positional, setting
from diloco_jax.config.loading import read_config_json
from diloco_jax.config.options import command
from diloco_jax.errors import EXIT_DONE
from diloco_jax.faults import parse_faults
from diloco_jax.files import expand
from diloco_jax.observability.measures import EVALUATING
from diloco_jax.observability.terminal import duration_text
from diloco_jax.protocol.messages import MOST_STEPS, ProfileOrder, Steer
from diloco_jax.wire.errors import ConnectionLost
from diloco_jax.workdir import has_begun, is_held, read_summary, require_format

if TYPE_CHECKING:
    from diloco_jax.wire.client import Client
    from diloco_jax.wire.peers import Principal


@contextlib.contextmanager
def asking(
    address: str, placement: Placement, who: Principal | None = None
) -> Iterator[Client]:
    """Yield a connection for words alone. who: the principal, whose certificate must be
    there; None = any that is, which is enough for `status()`."""
    from diloco_jax.wire.client import Client
    from diloco_jax.wire.tls import TlsFiles

    tls = None
    if folder := placement.certificates:
        tls = TlsFiles.load(folder, who) if who else TlsFiles.load_any(folder)
    client = Client(
        address,
        tls=tls,
        deadlines=placement.deadlines,
        bulk_channels=0,
        insecure=placement.insecure,
    )
    with contextlib.closing(client):
        yield client


def require_target(target: str) -> Path | None:
    """Return the workdir that was given, or None for HOST:PORT; raise ConfigError if it
    is neither."""
    workdir = expand(target)
    if workdir.is_dir():
        return workdir
    if ":" not in target:
        raise ConfigError(
            f"{target!r} is neither a folder nor HOST:PORT; give a run's workdir, or "
            f"its coordinator's address"
        )
    return None


def reached(target: str, placement: Placement) -> tuple[str, Placement]:
    """Return the address of a coordinator, given as HOST:PORT or by the workdir of its
    run, and the placement with which to call it.

    For a workdir, certificates are those of the run's config unless `placement` names
    others. Raises ConfigError, or ConnectionLost if no coordinator is up there.
    """
    if (workdir := require_target(target)) is None:
        return target, placement
    require_format(workdir)
    try:
        address = (workdir / run_files.ADDRESS).read_text().strip()
    except FileNotFoundError:
        raise ConnectionLost(f"no coordinator is up in {workdir}") from None
    if not placement.certificates:
        own = read_config_json(workdir / run_files.CONFIG).placement
        placement = with_own_keys(own, workdir)
    return address, placement


def read_status(target: str, placement: Placement) -> dict[str, Any]:
    """Return the status of a run: from its coordinator at HOST:PORT, or of a workdir.

    If the coordinator of a workdir is gone, this is the run's summary with `phase`
    "done", "evaluating" while a `diloco run` computes its loss, or "stopped" if the run
    had not ended. Raises ConnectionLost if there is no summary either. If `placement`
    names no certificates, those of the workdir's config are used.
    """
    workdir = expand(target)
    if not workdir.is_dir():
        return _ask(target, placement)
    require_format(workdir)
    up, summary = (workdir / run_files.ADDRESS).exists(), read_summary(workdir)
    if not up and not summary and not has_begun(workdir):
        raise ConfigError(
            f"{workdir} has neither {run_files.ADDRESS} nor summary.json: no run was "
            f"started there, or its coordinator is not up yet"
        )
    try:
        if up:
            return _ask(target, placement)
        if not summary:
            raise ConnectionLost("no coordinator is up")
    except ConnectionLost as error:
        if not summary:
            raise ConnectionLost(f"{error}. {_cut_off(workdir)}") from error
    phase = "done" if summary["phase"] == "done" else "stopped"
    if phase == "done" and "eval_loss" not in summary and is_held(workdir):
        phase = EVALUATING
    return {**summary, "phase": phase}


def _cut_off(workdir: Path) -> str:
    """Describe a run that has neither a coordinator nor a summary."""
    tape, silent = workdir / run_files.TAPE, ""
    if tape.exists():
        seconds = max(0.0, time.time() - tape.stat().st_mtime)
        silent = f", and wrote nothing to its tape for {duration_text(seconds)}"
    return (
        f"The run in {workdir} left no summary{silent}: it was cut off, or its "
        f"coordinator is being started again; if nothing does that, `diloco run "
        f"--resume {workdir}` goes on with a run of this machine"
    )


def _ask(target: str, placement: Placement) -> dict[str, Any]:
    address, placement = reached(target, placement)
    with asking(address, placement) as client:
        return client.status(placement.deadlines.connect_s)


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


@command(StatusOptions, "diloco status")
def status_command(options: StatusOptions) -> int:
    """Show who is alive, who takes part, and how far the run is."""
    from rich.console import Console

    from diloco_jax.observability.measures import health_of
    from diloco_jax.observability.terminal import closing_report, render

    placement = Placement(certificates=options.certificates, insecure=options.insecure)
    status = read_status(options.target, placement)
    if options.json:
        print(json.dumps({**status, "health": health_of(status)}))
    elif "wall_seconds" in status:
        config = read_config_json(expand(options.target) / run_files.CONFIG)
        own = config.placement
        faults = parse_faults(own.faults, config.islands, own.workers)
        report = closing_report(status, faults)
        Console(stderr=True, markup=False).print(
            report, highlight=False, soft_wrap=True
        )
    else:
        Console(stderr=True, markup=False).print(render(status, None))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneIslandOptions:
    """The options of a command by which an operator asks a coordinator for something
    about one island."""

    name: str = positional(metavar="NAME", help="Name of the island.")
    coordinator: str = setting(
        "",
        metavar="HOST:PORT or WORKDIR",
        help="The run's coordinator, or its workdir on this machine.",
    )
    certificates: str = setting(
        "", help="Folder made by diloco certs, with the operator's files."
    )
    insecure: bool = setting(
        False, help="Ask an address that is not loopback without TLS."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmitOptions(OneIslandOptions):
    """The options of `diloco admit`."""

    remove: bool = setting(False, help="Put the island out, and let it in no longer.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileOptions(OneIslandOptions):
    """The options of `diloco profile`."""

    steps: int = setting(5, Bound(1, MOST_STEPS), help="Whole steps in the trace.")


@command(AdmitOptions, "diloco admit")
def admit_command(options: AdmitOptions) -> int:
    """Let an island into a run that goes on, although the run's config does not name
    it. It stays admitted when the coordinator is started again."""
    how: Any = "remove" if options.remove else "admit"
    told = _ordered(options, Steer(how=how, island=options.name))
    done = "is let in no longer" if options.remove else "is let in"
    others = ", ".join(told["admitted"]) or "none"
    return _say(f"island {options.name} {done}; besides those of the config: {others}")


@command(OneIslandOptions, "diloco release")
def release_command(options: OneIslandOptions) -> int:
    """Let the deltas of a quarantined island be merged again at once."""
    told = _ordered(options, Steer(how="release", island=options.name))
    others = ", ".join(told["quarantined"]) or "none"
    return _say(f"island {options.name} is in no quarantine; still in it: {others}")


@command(ProfileOptions, "diloco profile")
def profile_command(options: ProfileOptions) -> int:
    """Have an island that trains trace its next steps with jax.profiler. Its host 0
    writes the trace into its own workdir, in profiles/NAME-STEP."""
    told = _ordered(options, ProfileOrder(island=options.name, steps=options.steps))
    return _say(
        f"island {options.name} traces its next {options.steps} steps into "
        f"{told['folder']} of its workdir, on the machine of its host 0; its log says "
        f"when the trace is there, or why there is none"
    )


def _ordered(options: OneIslandOptions, order: Steer | ProfileOrder) -> dict[str, Any]:
    """Order something with an operator's key; return the coordinator's answer."""
    from diloco_jax.wire.peers import OPERATOR

    check_name(options.name)
    if not options.coordinator:
        raise ConfigError("--coordinator is missing: HOST:PORT, or the run's workdir")
    given = Placement(certificates=options.certificates, insecure=options.insecure)
    address, placement = reached(options.coordinator, given)
    patience_s = 2 * placement.deadlines.budget_s
    with asking(address, placement, OPERATOR) as client:
        if isinstance(order, Steer):
            return client.steer(order, patience_s)
        return client.profile(order, patience_s)


def _say(text: str) -> int:
    print(text, file=sys.stderr)
    return EXIT_DONE
