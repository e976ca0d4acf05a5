"""`diloco run`: a whole run on this machine, from workdir to closing report."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from diloco_jax import files, run_files
from diloco_jax import workdir as workdirs
from diloco_jax.cluster import beside, commands
from diloco_jax.cluster.beginning import Beginning
from diloco_jax.cluster.children import kill_group, start_child
from diloco_jax.cluster.cluster import Cluster, Route, require_here, straight
from diloco_jax.cluster.private import are_own, private_files, with_keys
from diloco_jax.cluster.processes import log_tail
from diloco_jax.cluster.resume import (
    ReplacedFiles,
    finished,
    resumed_config,
    tell_extended,
    tell_resumed,
)
from diloco_jax.cluster.status import status_client
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.resolving import resolve
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from diloco_jax.faults import parse_faults
from diloco_jax.observability.tape import tells_of_the_end
from diloco_jax.observability.terminal import Dashboard, bar, closing_report, comparison
from diloco_jax.process import Interrupt
from diloco_jax.wire import addresses
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import WireError
from diloco_jax.wire.principal import COORDINATOR, island
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0
LOOP_S = 0.2
CONCLUDE_S = 3600.0
"""Seconds for the last snapshot of a run that is over, however large it is."""


def run(
    config: Config,
    config_path: str,
    console: Console,
    *,
    baseline: bool,
    resume: str = "",
    route: Route = straight,
    dashboard: bool = False,
) -> tuple[int, dict[str, Any]]:
    """Run a config on this machine; return the exit code and the summary ({} if there
    is none).

    resume: workdir of a run that goes on; empty = begin a new run. route: where islands
    reach the coordinator. dashboard: show it in a browser, too. Progress and report go
    to `console`. Raises ConfigError or SecurityError before anything is started, and
    ClusterError if the run cannot start.
    """
    config.validate()
    require_here(config.placement)
    addresses.require_loopback(config.placement.bind)
    _check_security(config, resume)
    with private_files(), contextlib.ExitStack() as whole:
        if resume:
            workdir = Path(files.absolute(resume))
            if workdir.is_dir():
                whole.enter_context(workdirs.held(workdir, "another `diloco run`"))
            config = resumed_config(config, workdir)
            if not finished(config, workdir):
                config = resolve(config, text_is_here=True)
            begun = None
        else:
            config = resolve(config, text_is_here=True)
            _require_loss(config)
            begun = whole.enter_context(Beginning(config, config_path))
            config, workdir = begun.create(), begun.workdir
        shown = beside.dashboard(workdir, console)
        with shown if dashboard else contextlib.nullcontext():
            return _run(config, workdir, console, begun, route, baseline=baseline)


def _require_loss(config: Config) -> None:
    """Raise ConfigError if only train loops of users know the model's loss."""
    if config.run.model.factory:
        from diloco_jax.models.build import build

        build(config.run).require_loss()


def _run(
    config: Config,
    workdir: Path,
    console: Console,
    begun: Beginning | None,
    route: Route,
    *,
    baseline: bool,
) -> tuple[int, dict[str, Any]]:
    """Run it in its workdir. begun: undoes a new run; None = a run that goes on."""
    resume = begun is None
    console.print(f"{len(config.islands)} islands, workdir {workdir}", highlight=False)
    cluster = Cluster(config, workdir, resume=resume, route=route)
    with Interrupt() as interrupt:
        if resume and finished(config, workdir):
            console.print("the run in it is finished", highlight=False)
            code = EXIT_DONE
        else:
            code = _processes(cluster, console, interrupt, begun)
            if resume and finished(config, workdir):
                # The run only had to end: its islands were refused, or not started.
                code = EXIT_DONE
        summary = workdirs.read_summary(workdir)
        if code == EXIT_DONE and summary and "eval_loss" not in summary:
            code = _evaluate(config, workdir, summary, console, interrupt)
    if not summary:
        console.print(f"no summary: see {workdir / 'logs'}", highlight=False)
        _say_what_next(workdir, console, interrupt)
        return code or EXIT_FAILED, {}
    placement = config.placement
    faults = parse_faults(placement.faults, config.islands, placement.workers)
    report = closing_report(summary, cluster.outages.by_island(), faults)
    console.print(f"\n{report}", highlight=False, soft_wrap=True)
    if baseline and code == EXIT_DONE:
        from diloco_jax.baseline import run as run_baseline

        with bar(console, "the baseline trains") as told:
            summary["baseline"] = run_baseline(
                config, lambda done, total, loss: told(min(1.0, done / total))
            )
        workdirs.add_to_summary(workdir, {"baseline": summary["baseline"]})
        text = comparison(summary, summary["baseline"])
        console.print(f"\n{text}", highlight=False, soft_wrap=True)
    _say_what_next(workdir, console, interrupt)
    return code, summary


def _say_what_next(workdir: Path, console: Console, interrupt: Interrupt) -> None:
    cut_off = interrupt.count or not workdirs.read_summary(workdir)
    if not workdirs.has_begun(workdir):
        return
    texts = [f"look at it with: diloco dashboard {workdir}"]
    if cut_off:
        texts.append(f"go on with: diloco run --resume {workdir}")
    for text in texts:
        console.print(text, highlight=False, soft_wrap=True)


def _processes(
    cluster: Cluster, console: Console, interrupt: Interrupt, begun: Beginning | None
) -> int:
    """Start, watch and stop everything; return the exit code of the run so far."""
    resume = begun is None
    if resume:
        tell_extended(cluster.config, cluster.workdir, console)
    change = ReplacedFiles(cluster.config, cluster.workdir) if resume else None
    try:
        cluster.config = with_keys(cluster.config, cluster.workdir)
        with console.status("the coordinator starts") as shown:
            cluster.start(interrupt, lambda log: shown.update(_newest(log)))
    except Exception as error:
        # Nothing has run: leave the workdir as it was.
        cluster.kill()
        if change is not None:
            change.undo()
        if begun is not None:
            keep_logs = not isinstance(error, ConfigError)
            begun.undo(keep_logs=keep_logs)
        raise
    else:
        if resume and not interrupt.count:
            tell_resumed(cluster.workdir, console)
        code = _supervise(cluster, console, interrupt)
        unserved = not cluster.address and not workdirs.read_summary(cluster.workdir)
        if begun is not None and unserved:
            begun.undo(keep_logs=True)
        if change is not None and unserved:
            change.undo()
        return code
    finally:
        cluster.kill()


def _newest(log: Path) -> Text:
    """Return the last line of a log, such as how far its process is."""
    return Text("".join(log_tail(log, 1)) or "starting", overflow="ellipsis")


def _check_security(config: Config, resume: str) -> None:
    """Raise ConfigError or SecurityError before anything starts.

    Keys that the run itself lacks are made later.
    """
    placement = config.placement
    folder = placement.certificates
    addresses.require_tls(placement.bind, tls=bool(folder), insecure=placement.insecure)
    if folder and not (resume and are_own(placement, Path(resume))):
        for who in (COORDINATOR, *map(island, config.islands)):
            TlsFiles.load(folder, who)


def _supervise(cluster: Cluster, console: Console, interrupt: Interrupt) -> int:
    """Watch and stop the processes; return the exit code of the run so far."""
    if cluster.islands and not interrupt.count:
        client = status_client(cluster.address, cluster.config.placement)
        with contextlib.closing(client):
            _watch(cluster, client, console, interrupt)
    if interrupt.count:
        console.print("ending: islands say goodbye, the coordinator sums up")
        cluster.stop(interrupt)
        return EXIT_FAILED
    cluster.stop(interrupt)
    return _exit_code(cluster, console)


def _watch(
    cluster: Cluster, client: Client, console: Console, interrupt: Interrupt
) -> None:
    """Watch until the coordinator has ended, no island is left, or an interrupt."""
    deadlines = cluster.config.placement.deadlines
    next_status_s = 0.0
    give_up_s = float("inf")
    with Dashboard(console) as dashboard:
        while cluster.poll() and not interrupt.count:
            now = time.monotonic()
            if now > give_up_s:
                return
            if not cluster.alone():
                give_up_s = float("inf")
            elif give_up_s == float("inf"):
                # Islands leave before the coordinator writes its last snapshot.
                over = tells_of_the_end(cluster.workdir / run_files.TAPE)
                give_up_s = now + (CONCLUDE_S if over else deadlines.flush_s)
                if over:
                    console.print("all is merged: the coordinator saves it")
            if now >= next_status_s:
                next_status_s = now + STATUS_EVERY_S
                try:
                    status = client.status(STATUS_EVERY_S)
                except WireError as error:  # It may be restarting.
                    logger.debug("no status: %s", error)
                else:
                    cluster.observe(status, now)
                    dashboard.show(cluster.overlay(status), now)
            interrupt.wait(LOOP_S)


def _exit_code(cluster: Cluster, console: Console) -> int:
    for process in (*cluster.islands.values(), cluster.coordinator):
        if process.state in ("refused", "failed"):
            console.print(
                f"{process.name} {process.state}: {process.reason} ({process.log})",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )
    if cluster.done and any(
        island.state == "done" for island in cluster.islands.values()
    ):
        return EXIT_DONE
    refused = all(island.state == "refused" for island in cluster.islands.values())
    return EXIT_REFUSED if refused else EXIT_FAILED


def _evaluate(
    config: Config,
    workdir: Path,
    summary: dict[str, Any],
    console: Console,
    interrupt: Interrupt,
) -> int:
    """Have the validation loss added to the summary; return the exit code."""
    log = workdir / run_files.LOGS / "eval.log"
    console.print("evaluating on the whole validation split", highlight=False)
    with log.open("ab") as stderr:
        process = start_child(
            commands.eval_command(workdir),
            commands.coordinator_environment(),
            subprocess.PIPE,
            stderr,
        )
    deadline = time.monotonic() + config.placement.compile_budget_s
    output = b""
    with console.status("evaluating") as shown:
        while not interrupt.count and time.monotonic() < deadline:
            try:
                output, _ = process.communicate(timeout=LOOP_S)
                break
            except subprocess.TimeoutExpired:
                shown.update(_newest(log))
    if process.poll() is None:
        kill_group(process)
        process.communicate()
        if not interrupt.count:
            console.print(
                f"evaluation took longer than placement.compile_budget_s = "
                f"{config.placement.compile_budget_s:g}; "
                f"`diloco eval {workdir}` has no time limit",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )
    if process.returncode != 0:
        tail = "\n".join(f"  {line}" for line in log_tail(log, 15))
        console.print(
            f"evaluation ended with code {process.returncode}\n{log}:\n{tail}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
        return EXIT_FAILED
    summary.update(json.loads(output))
    return EXIT_DONE
