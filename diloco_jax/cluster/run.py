"""`diloco run`: a whole run on this machine, from workdir to closing report.

`--resume WORKDIR` goes on with a run that was stopped. The run keeps its `RunConfig`;
islands and placement may differ. Nothing in the workdir changes before all checks of
it have passed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from diloco_jax import files, run_files
from diloco_jax import workdir as workdirs
from diloco_jax.cluster import cluster
from diloco_jax.cluster.cluster import Cluster, Route, straight
from diloco_jax.cluster.processes import (
    are_own,
    kill_group,
    log_tail,
    private_files,
    quoted,
    start_child,
    with_keys,
)
from diloco_jax.cluster.status import asking
from diloco_jax.config import (
    Config,
    ConfigError,
    Placement,
    differences,
    shared_fields,
)
from diloco_jax.config.config import require_worth
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.config.resolving import (
    resolve,
    with_absolute_paths,
    with_choices_of,
    with_model_of,
)
from diloco_jax.coordinator.going_on import too_few
from diloco_jax.coordinator.journal import Recovered
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from diloco_jax.faults import parse_faults
from diloco_jax.files import write_json
from diloco_jax.observability.tape import newest_record, tells_of_the_end
from diloco_jax.observability.terminal import (
    Dashboard,
    bar,
    closing_report,
    comparison,
    say,
)
from diloco_jax.process import Interrupt
from diloco_jax.protocol.records import from_tape
from diloco_jax.wire import addresses
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import WireError
from diloco_jax.wire.peers import COORDINATOR, island
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)


class Beginning:
    """A context in which `workdir` exists and only this process begins a run in it."""

    def __init__(self, config: Config, config_path: str) -> None:
        """Make the folder that the config names or, if it names none, a new one named
        after its file. Raise ConfigError if that fails."""
        config = with_absolute_paths(config)
        asked = Path(config.placement.workdir)
        self._existed = bool(config.placement.workdir) and asked.is_dir()
        if config.placement.workdir:
            workdirs.make_workdir(asked)
        else:
            asked = _new_folder(config_path)
        self.workdir = asked
        placement = dataclasses.replace(config.placement, workdir=str(asked))
        self._config = dataclasses.replace(config, placement=placement)
        self._held = contextlib.ExitStack()
        self._held.enter_context(
            workdirs.held(asked, "another command that began there")
        )
        self._before = set(asked.iterdir())

    def __enter__(self) -> Beginning:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def create(self) -> Config:
        """Write `config.json`; return its contents, the config with absolute paths.

        Raises ConfigError, and changes nothing, if a run is there already, or what is
        left of a start that was killed."""
        if any((self.workdir / file).exists() for file in run_files.SIGNS_OF_A_RUN):
            _require_no_coordinator(self.workdir)
            or_go_on = ""
            if _can_go_on(self.workdir):
                go_on = f"diloco run --resume {self.workdir}"
                or_go_on = f", or go on with that run: {go_on}"
            raise ConfigError(
                f"workdir {self.workdir} holds {_described(self.workdir, self._config)}"
                f"; give another --workdir{or_go_on}"
            )
        write_config_json(self._config, self.workdir / run_files.CONFIG)
        return self._config

    def undo(self, *, keep_logs: bool = False) -> None:
        """Remove everything of the run after a failed start.

        keep_logs: keep the logs, which tell why. Other programs' files stay."""
        for path in set(self.workdir.iterdir()) - self._before:
            name = path.name
            if name == run_files.LOGS and keep_logs:
                continue
            scratch = name.endswith(".tmp") and name.startswith(run_files.NAMES)
            if name not in run_files.NAMES and not scratch:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not self._existed:
            with contextlib.suppress(OSError):  # It is not empty.
                self.workdir.rmdir()


def _new_folder(config_path: str) -> Path:
    """Make a folder of this command alone: several may begin in the same second."""
    name = f"{Path(config_path).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    parent = Path("runs").absolute()
    workdirs.make_workdir(parent)
    for count in itertools.count(1):
        folder = parent / (name if count == 1 else f"{name}-{count}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def _described(workdir: Path, config: Config) -> str:
    """Describe the run that is there, compared with the one that was to begin there."""
    try:
        there = read_config_json(workdir / run_files.CONFIG).run
    except ConfigError:
        return "another run (its config.json cannot be read)"
    where = ("in that run", "in this config")
    lines = differences(shared_fields(there), shared_fields(config.run), where)
    if lines:
        return f"another run, with {'; '.join(lines)}"
    if _can_go_on(workdir):
        return "this run"
    # A replay or a fork leaves parameters without facts of a run, an emulation a tape.
    left = (run_files.CHECKPOINTS, run_files.TAPE, run_files.LOG)
    made = not workdirs.holds_run(workdir) and any((workdir / n).exists() for n in left)
    if made or (workdir / run_files.SUMMARY).exists():
        return "another run of this config"
    return "what a killed start of this config left (you may remove it)"


def _can_go_on(workdir: Path) -> bool:
    """Return whether there is a run with a log, or with a complete snapshot. A bucket
    is not looked into: it may have one."""
    if not workdirs.holds_run(workdir):
        return False
    if workdirs.has_begun(workdir):
        return True
    try:
        there = read_config_json(workdir / run_files.CONFIG).placement
    except ConfigError:
        return False
    folder = there.checkpoints or str(workdir / run_files.CHECKPOINTS)
    # A snapshot gets its name when it is complete, and that of the state comes last.
    return files.is_bucket(folder) or any(Path(folder).glob("*/state-*.snapshot"))


def _require_no_coordinator(workdir: Path) -> None:
    """Raise ConfigError if a coordinator serves the run there just now."""
    lock = workdir / run_files.LOCK
    if lock.exists():
        with workdirs.held(lock, "a coordinator"):
            pass


def resumed_config(config: Config, workdir: Path) -> Config:
    """Return the config with which the run in `workdir` goes on.

    config: the user's config; the run fills what it leaves open (corpus, cycle, outer
    optimizer). Raises ConfigError if the workdir holds no run, one of another config or
    format, or one that a coordinator serves just now.
    """
    workdirs.require_folder(workdir)
    facts = workdirs.read_facts(workdir)
    written = read_config_json(workdir / run_files.CONFIG).run
    placement = dataclasses.replace(config.placement, workdir=str(workdir))
    config = with_choices_of(written, with_model_of(written, config))
    digest = config.run.data.digest or written.data.digest
    data = dataclasses.replace(config.run.data, digest=digest)
    run = dataclasses.replace(config.run, data=data)
    config = resolve(dataclasses.replace(config, run=run, placement=placement))
    total = config.run.total_tokens
    more = workdirs.with_more_tokens(written, total)
    where = ("in the run", "in the config")
    lines = differences(shared_fields(more), shared_fields(config.run), where)
    if lines:
        raise ConfigError(
            f"run {facts.run_id} in {workdir} goes on with its own settings alone, but "
            f"the config has others: {'; '.join(lines)}. Islands and placement may "
            f"differ, and a run that is over may get more total_tokens; for anything "
            f"else, begin a new run"
        )
    if more != written:
        _require_over(workdir, written.total_tokens, total)
    _require_no_coordinator(workdir)
    return config


def _require_over(workdir: Path, before: int, total: int) -> None:
    """Raise ConfigError unless the run is over and has less than `total` tokens."""
    summary = workdirs.read_summary(workdir)
    if summary.get("phase") != "done":
        raise ConfigError(
            f"total_tokens = {total}, but the run in {workdir} is on its way to "
            f"{before}: leave total_tokens out until it is over, then extend it"
        )
    if summary["tokens"] >= total:
        raise ConfigError(too_few(total, summary["tokens"], workdir))


def finished(config: Config, workdir: Path) -> dict[str, Any]:
    """Return the summary of a run that is over; empty while it is not, or if the config
    extends it."""
    summary = workdirs.read_summary(workdir)
    over = summary.get("phase") == "done"
    return summary if over and summary["tokens"] >= config.run.total_tokens else {}


class ReplacedFiles:
    """The files of the workdir that a resumed run writes anew.

    Making this object writes the new `config.json`, and removes the old summary and the
    address of a coordinator that was killed. `undo` is for a start that failed."""

    def __init__(self, config: Config, workdir: Path) -> None:
        self._before = {
            path: path.read_bytes()
            for path in (workdir / run_files.CONFIG, workdir / run_files.SUMMARY)
            if path.exists()
        }
        write_config_json(config, workdir / run_files.CONFIG)
        for name in (run_files.SUMMARY, run_files.ADDRESS):
            (workdir / name).unlink(missing_ok=True)

    def undo(self, *, keep_logs: bool = True) -> None:
        """Restore config and summary as they were; logs are kept in any case."""
        for path, octets in self._before.items():
            write_json(json.loads(octets), path)


def tell_resumed(workdir: Path, console: Console) -> None:
    """Print from which merges the run goes on, once the coordinator is up."""
    line = newest_record(workdir / run_files.TAPE, "recovered")
    recovered = from_tape(line, Recovered)
    merges = sum(version.number for version in recovered.versions)
    say(console, f"goes on after {merges:,} merges")


def tell_extended(config: Config, workdir: Path, console: Console) -> None:
    """Print what an extension does to the learning rate; nothing if there is none."""
    summary = workdirs.read_summary(workdir)
    done, total = summary.get("tokens", 0), config.run.total_tokens
    if summary.get("phase") != "done" or done >= total:
        return
    from diloco_jax.core.inner import learning_rate  # It imports jax.

    inner = config.run.inner
    say(
        console,
        f"extended from {done:,} to {total:,} tokens: the learning rate, which ended "
        f"at {learning_rate(inner, 1.0):.3g}, goes on from "
        f"{learning_rate(inner, done / total):.3g}",
    )


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
    _require_here(config.placement)
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
            require_worth(config.run)
            config = resolve(config, text_is_here=True)
            _require_loss(config)
            begun = whole.enter_context(Beginning(config, config_path))
            config, workdir = begun.create(), begun.workdir
        shown = cluster.dashboard(workdir, console)
        with shown if dashboard else contextlib.nullcontext():
            return _run(config, workdir, console, begun, route, baseline=baseline)


def _require_here(placement: Placement) -> None:
    """Raise ConfigError if a part of the run is on another machine, or this machine
    cannot reach itself."""
    if placement.workers > 1:
        raise ConfigError(
            f"placement.workers = {placement.workers}, which run at addresses of their "
            f"own: this starts all of a run on this machine; leave them out, or start "
            f"`diloco worker`, `diloco coordinator` and `diloco island` yourself"
        )
    addresses.require_loopback(placement.bind)


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
    say(console, f"{len(config.islands)} islands, workdir {workdir}")
    cluster = Cluster(config, workdir, resume=begun is None, route=route)
    with Interrupt() as interrupt:
        if begun is None and finished(config, workdir):
            say(console, "the run in it is finished")
            code = EXIT_DONE
        else:
            code = _processes(cluster, console, interrupt, begun)
            if begun is None and finished(config, workdir):
                # The run only had to end: its islands were refused, or not started.
                code = EXIT_DONE
        summary = workdirs.read_summary(workdir)
        if code == EXIT_DONE and summary and "eval_loss" not in summary:
            code = _evaluate(config, workdir, summary, console, interrupt)
    if not summary:
        say(console, f"no summary: see {workdir / 'logs'}")
        code = code or EXIT_FAILED
    else:
        placement = config.placement
        faults = parse_faults(placement.faults, config.islands, placement.workers)
        report = closing_report(summary, faults)
        say(console, f"\n{report}")
    if summary and baseline and code == EXIT_DONE:
        from diloco_jax.baseline import run as run_baseline

        with bar(console, "the baseline trains") as told:
            summary["baseline"] = run_baseline(
                config, lambda done, total, loss: told(min(1.0, done / total))
            )
        workdirs.add_to_summary(workdir, {"baseline": summary["baseline"]})
        say(console, f"\n{comparison(summary, summary['baseline'])}")
    if workdirs.has_begun(workdir):
        say(console, f"look at it with: diloco dashboard {workdir}")
        if interrupt.count or not summary:
            say(console, f"go on with: diloco run --resume {workdir}")
    return code, summary


def _processes(
    cluster: Cluster, console: Console, interrupt: Interrupt, begun: Beginning | None
) -> int:
    """Start, watch and stop everything; return the exit code of the run so far."""
    if begun is None:
        tell_extended(cluster.config, cluster.workdir, console)
    change = begun or ReplacedFiles(cluster.config, cluster.workdir)
    try:
        cluster.config = with_keys(cluster.config, cluster.workdir)
        with console.status("the coordinator starts") as shown:
            cluster.start(interrupt, lambda log: shown.update(_newest(log)))
    except Exception as error:
        # Nothing has run: leave the workdir as it was.
        cluster.kill()
        change.undo(keep_logs=not isinstance(error, ConfigError))
        raise
    else:
        if begun is None and not interrupt.count:
            tell_resumed(cluster.workdir, console)
        code = _supervise(cluster, console, interrupt)
        if not cluster.address and not workdirs.read_summary(cluster.workdir):
            change.undo(keep_logs=True)
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
        with asking(cluster.address, cluster.config.placement) as client:
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
                    say(console, "all is merged: the coordinator saves it")
            if now >= next_status_s:
                next_status_s = now + STATUS_EVERY_S
                try:
                    status = client.status(STATUS_EVERY_S)
                except WireError as error:  # It may be restarting.
                    logger.debug("no status: %s", error)
                else:
                    cluster.observe(status)
                    dashboard.show(cluster.overlay(status), now)
            interrupt.wait(LOOP_S)


def _exit_code(cluster: Cluster, console: Console) -> int:
    for process in (*cluster.islands.values(), cluster.coordinator):
        if process.state in ("refused", "failed"):
            text = f"{process.name} {process.state}: {process.reason} ({process.log})"
            say(console, text)
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
    command = cluster.eval_command(workdir)
    environment = cluster.coordinator_environment()
    with log.open("ab") as output:
        process = start_child(command, environment, output, output)
    deadline = time.monotonic() + config.placement.compile_budget_s
    with console.status("evaluating") as shown:
        while (
            process.poll() is None
            and not interrupt.count
            and time.monotonic() < deadline
        ):
            shown.update(_newest(log))
            interrupt.wait(LOOP_S)
    if process.poll() is None:
        kill_group(process)
        process.wait()
        if not interrupt.count:
            say(
                console,
                f"evaluation took longer than placement.compile_budget_s = "
                f"{config.placement.compile_budget_s:g}; "
                f"`diloco eval {workdir}` has no time limit",
            )
    if process.returncode != 0:
        said = f"evaluation ended with code {process.returncode}\n{quoted(log)}"
        say(console, said)
        return EXIT_FAILED
    summary.update(workdirs.read_summary(workdir))
    return EXIT_DONE
