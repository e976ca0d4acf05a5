"""`diloco rehearse CONFIG`: the first hour of a run, which tries what its plan assumes.

A short run of the config is made with the machines of a launch or, without `--on`, with
processes here. Once all islands train it is left alone for a few cycles; then an island
is killed and comes back, and then the coordinator. What the run has recorded is
compared with the plan, row by row (`findings.py`), within the minutes and the price
that were given. It ends with the engine's own list of what is left.

Kills on a launch are its `stop` and `run`, for one part. On TPU VMs nothing can be
driven from here: the page has the lines to type, and `--records` reads what they leave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
from rich.console import Console

from diloco_jax.cluster.cluster import LocalCluster, LocalClusterError
from diloco_jax.cluster.processes import noted, signal_group
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.config import require_worth
from diloco_jax.config.resolving import resolve_open
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.faults import COORDINATOR
from diloco_jax.files import absolute, is_bucket, write_json, write_text
from diloco_jax.hardware.machines import (
    NOTHING_MEASURED,
    PROCESS_S,
    Measurements,
    read_measurements,
)
from diloco_jax.launch import command
from diloco_jax.launch.command import RehearseOptions
from diloco_jax.launch.findings import NOT_TRIED, Comparison, Tried, as_markdown
from diloco_jax.launch.spec import resource_name
from diloco_jax.launch.submit import CommandError
from diloco_jax.launch.tpu_vm import DISK
from diloco_jax.observability.tape import TapeError
from diloco_jax.observability.terminal import bar, say
from diloco_jax.planning.options import (
    Assumptions,
    parse_prices,
    price_per_hour,
    price_sentence,
    require_prices,
)
from diloco_jax.planning.plan import Plan, fragments_of, plan_run
from diloco_jax.run_files import CONFIG, TAPE
from diloco_jax.wire.errors import SecurityError
from diloco_jax.workdir import make_workdir

logger = logging.getLogger(__name__)

QUIET_CYCLES, QUIET_S = 3, 8.0
"""Cycles of every island, and seconds, in which nothing is struck. An island has a line
of metrics a second."""
LOOK_S, LOOK_AWAY_S = 0.5, 15.0
"""Seconds between two looks at a run here, and at one of a launch."""
REACH_S = 900.0
"""Seconds without an answer after which a coordinator counts as out of reach: by then
its machine, an ordinary one, has come, and has pulled its image. The first answer may
take longer, see `Drive`."""
PAUSES_S = (5.0, 15.0, 60.0, 120.0, 300.0)
"""Seconds between the attempts to delete a launch: a lost connection, or a Ctrl-C, may
break one off, and GKE deletes nothing while a creation goes on in the cloud."""
NOTHING = "nothing"
"""Beginning of what is left, if nothing is."""
LAUNCH = "launch"
"""Folder of a launch in its workdir."""
PAGE, REHEARSED = "rehearsal.md", "rehearsed.json"
"""The page, and what `diloco plan --measured` reads, in the workdir."""


class RehearsalOverError(Exception):
    """The rehearsal ends early; says why."""


def run(
    config: Config,
    path: str,
    options: RehearseOptions,
    console: Console,
    *,
    launcher: Sequence[str] = ("run",),
) -> int:
    """Rehearse, and write the page; return 0 if all was done and nothing deviates.

    launcher: the command that runs it here: `diloco run`, or `diloco chaos` with
    options. Raises ConfigError before anything is started.
    """
    require_worth(config.run)
    config = resolve_open(config)
    limit_s, costs, price_per_s = _stop_loss(config, options)
    assumed = NOTHING_MEASURED
    if options.measured:
        assumed = read_measurements(options.measured, config)
    plan = _planned(path, config, options, assumed)
    if options.on and plan:
        costs += f"; {_least(plan, options, limit_s, price_per_s)}"
    folder = f"runs/{Path(path).stem}-rehearsal-{time.strftime('%Y%m%d-%H%M%S')}"
    workdir = Path(absolute(config.placement.workdir or folder))
    if (workdir / PAGE).exists() or (workdir / "run").exists():
        raise ConfigError(
            f"workdir {workdir} holds a rehearsal already; give another --workdir"
        )
    # Here, config.json and launch/ would be written over.
    there = [name for name in (CONFIG, LAUNCH) if (workdir / name).exists()]
    if there and not options.records:
        raise ConfigError(
            f"workdir {workdir} has {' and '.join(there)} of a run or of its launch, "
            f"which a rehearsal would replace; give another --workdir"
        )
    say(console, costs)
    if options.on and options.on != "tpu_vm":
        command.require_answers(options.yes)
    make_workdir(workdir)
    named = f"{path} --launch.name {_name(config, path)} --workdir {workdir}"
    over, drive, left = "", None, "nothing was started"
    records = Path(absolute(options.records or str(workdir)))
    to_type: list[str] = []
    if options.on == "tpu_vm":
        over = "TPU VMs have no engine: type what stands below, line by line"
        left, to_type = LISTS, _to_type(config, path, named, limit_s)
    elif not options.records:
        ours = _rehearsed(config, plan, path, limit_s, str(workdir))
        engine: Here | Launched = Here(LocalCluster(ours, workdir, launcher))
        if options.on:
            # By the run that matters: this one has tokens for any speed of its steps.
            command.require_planned(config)
            given = command.LaunchOptions(
                on=options.on, yes=options.yes, price=options.price, unplanned=True
            )
            engine = Launched(ours, path, given)
        drive = Drive(engine, ours, console, plan)
        try:
            drive.run(limit_s)
        except (RehearsalOverError, CommandError, LocalClusterError) as error:
            over = str(error)
        except KeyboardInterrupt:
            over = "interrupted by hand"
        except BaseException:  # Whatever it is, what was bought is given back.
            say(console, f"What is left: {drive.engine.end()[1]}")
            raise
        records, left = drive.engine.end()
        if not over and not (records / TAPE).exists():
            over = f"no records are in {records}; copy them, and give --records"
        if not over and not left.startswith(NOTHING):
            over = "not all of it was deleted"
    origin = f"diloco rehearse {Path(path).name}, {time.strftime('%Y-%m-%d')}"
    struck = drive.struck if drive else ()
    link = options.link_gbit_per_s
    try:
        judge = Comparison(records, config, plan, assumed, link, struck, origin)
    except (TapeError, ConfigError) as error:
        say(console, f"What is left: {left}")
        raise ConfigError(f"--records {records}: {error}") from error
    rows, kept = judge.findings(), judge.measurements()
    by = "" if options.on else ", by the speed of these CPUs, not of slices"
    _tell(rows, kept, over, left, to_type, path, workdir, console, by)
    if options.json:
        told = {"findings": list(map(dataclasses.asdict, rows)), "over": over}
        print(json.dumps({**told, "measured": msgspec.to_builtins(kept)}))
    wrong = over or any(row.deviates for row in rows)
    return EXIT_FAILED if wrong else EXIT_DONE


def _tell(
    rows: Sequence[Tried],
    kept: Measurements,
    over: str,
    left: str,
    to_type: Sequence[str],
    path: str,
    workdir: Path,
    console: Console,
    by: str,
) -> None:
    """Write the page and the file for `diloco plan`, and print them for people.
    to_type: lines that make the rows. by: whose speeds these are, if not those of
    slices."""
    tried = sum(row.measured != NOT_TRIED for row in rows)
    wrong = sum(row.deviates for row in rows)
    head = f"{tried} of {len(rows)} rows were tried, {wrong} deviate."
    if over:
        head += f"\n\nIt ended early: {over}"
    tail = f"What is left: {left}"
    measured = f"`diloco plan {path} --measured {workdir / REHEARSED}`{by}"
    parts = [f"# Rehearsal of {path}", head, as_markdown(rows), measured, tail]
    if to_type:
        parts[2:2] = ["\n".join(("```bash", *to_type, "```"))]
    say(console, head)
    for line in to_type:
        say(console, line)
    for row in rows:
        follows = "" if row.follows == "nothing" else f": {row.follows}"
        say(console, f"{row}: assumed {row.assumed}, measured {row.measured}{follows}")
    say(console, tail)  # Before a full disk ends this.
    write_text("\n\n".join(parts) + "\n", workdir / PAGE)
    write_json(msgspec.to_builtins(kept), workdir / REHEARSED)
    for text in (f"plan with it: {measured}", f"page: {workdir / PAGE}"):
        say(console, text)


# ---- before it starts ----------------------------------------------------------------


def _stop_loss(
    config: Config, options: RehearseOptions
) -> tuple[float, str, float | None]:
    """Return the seconds that it may take, what it will cost, in words, and the price
    of a second; None if nobody knows it."""
    if options.records and options.on:
        raise ConfigError(
            f"--records {options.records} starts nothing, and --on {options.on} makes "
            f"machines; leave one of them out"
        )
    if options.records and not (Path(options.records) / TAPE).exists():
        raise ConfigError(
            f"--records {options.records} has no {TAPE}; name the workdir of a run"
        )
    if options.share > 1:
        raise ConfigError(f"share = {options.share:g}; give a share of at most 1")
    limit_s, per_hour = 60 * options.max_minutes, dict[str, float]()
    if options.price:
        prices = parse_prices(options.price)
        require_prices(config, prices)
        per_hour = price_per_hour(config, prices)
    elif options.max_price:
        raise ConfigError(
            f"--max-price {options.max_price:g} needs --price: nobody else knows what "
            f"the machines cost"
        )
    if options.records:
        return limit_s, "records are read, nothing is started", None
    each_s = sum(per_hour.values()) / 3600
    if options.on and options.max_price and each_s:
        limit_s = min(limit_s, options.max_price / each_s)
    ends = f"it ends after {limit_s / 60:.3g} minutes"
    if options.on is None:
        return limit_s, f"processes of this machine, nothing is paid; {ends}", None
    if options.on == "tpu_vm":
        ends = f"machines of the lines to type end after {limit_s / 60:.3g} minutes"
    else:
        ends += "; what deletes machines then is awaited"
    if not per_hour:
        return limit_s, f"price per hour: unknown, give --price; {ends}", None
    most = f"at most {each_s * limit_s:.2f} by then"
    return limit_s, f"{price_sentence(per_hour)}; {most}; {ends}", each_s


def _least(
    plan: Plan, options: RehearseOptions, limit_s: float, price_per_s: float | None
) -> str:
    """Return what the run's first start and the coordinator's restart take at least, in
    words. Raises ConfigError if that is more than `limit_s`.

    price_per_s: None if nobody knows it. Machines have to come, and nobody knows when.
    """
    first = plan.run.first_start
    restart = plan.run.measured.restart_seconds
    # The first fragments are merged by then; how long the log is, nobody knows.
    needed_s = first.seconds + (restart.value if restart else PROCESS_S) + QUIET_S
    minutes, remedies = math.ceil(needed_s / 60), []
    price = ", price unknown"
    if price_per_s is not None:
        # Rounded up, so that what is shown is enough.
        least = math.ceil(100 * 60 * minutes * price_per_s) / 100
        price = f", {least:.2f}"
        if options.max_price and options.max_price < needed_s * price_per_s:
            remedies.append(f"--max-price {least:.2f}")
    if options.max_minutes < needed_s / 60:
        remedies.append(f"--max-minutes {minutes}")
    needs = f"needs at least {minutes} minutes{price}"
    if first.compile_seconds is None:
        needs += ", and the compilation, for how long nobody measured"
    if remedies:
        given = f"--max-minutes {options.max_minutes:g}"
        if options.max_price:
            given += f" and --max-price {options.max_price:g}"
        raise ConfigError(
            f"it ends after {limit_s / 60:.3g} minutes by {given}, and {needs}, for a "
            f"restart of the coordinator and its {first.line}; give at least "
            f"{' and '.join(remedies)}"
        )
    return needs


def _planned(
    path: str, config: Config, options: RehearseOptions, assumed: Measurements
) -> Plan | None:
    """Return the plan that is tried, by arithmetic; None where islands name no slices,
    or nobody knows the FLOPs of the model before it is compiled."""
    if config.run.model.factory or not all(
        island.topology for island in config.islands.values()
    ):
        return None
    # TPUs of this machine play no part in a plan.
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    assumptions = Assumptions(
        link_gbit_per_s=options.link_gbit_per_s, share=(options.share,)
    )
    return plan_run(path, config, fragments_of(config), assumptions, measured=assumed)


def _rehearsed(
    config: Config, plan: Plan | None, path: str, limit_s: float, workdir: str
) -> Config:
    """Return the config of the rehearsal: it goes on until it is stopped, its machines
    end by themselves, and it has a name of its own. It leaves `placement.checkpoints`
    alone: the run refuses a folder with checkpoints of another one."""
    rate = sum(
        island.batch_size
        * config.run.sequence_length
        / ((plan.islands[name] if plan else island).step_seconds or 1e-3)
        for name, island in config.islands.items()
    )
    tokens = max(config.run.total_tokens, math.ceil(2 * limit_s * rate))
    placement, launch, hours = config.placement, config.launch, limit_s / 3600
    checkpoints = placement.checkpoints
    if checkpoints:  # That of the run that matters is left alone.
        folder = f"rehearsal-{time.strftime('%Y%m%d-%H%M%S')}"
        checkpoints = f"{checkpoints.rstrip('/')}/{folder}"
    placement = dataclasses.replace(
        placement,
        rehearse=True,
        workdir=workdir,
        checkpoints=checkpoints,
        evaluate_every_steps=0,
        restarts=max(2, placement.restarts),
    )
    launch = dataclasses.replace(
        launch,
        name=_name(config, path),
        max_hours=min(hours, launch.max_hours or hours),
    )
    whole = dataclasses.replace(config.run, total_tokens=tokens)
    return Config(
        run=whole, islands=config.islands, placement=placement, launch=launch
    ).validate()


def _name(config: Config, path: str) -> str:
    """Return the name of the rehearsal's launch, which is not that of the run."""
    return f"{config.launch.name or Path(path).stem}-rehearsal"


LISTS = (
    "nobody can know: `gcloud compute tpus queued-resources list` and `gcloud compute "
    "instances list` show it, and the last line to type deletes it"
)


def _to_type(config: Config, path: str, named: str, limit_s: float) -> list[str]:
    """Return the lines that rehearse on TPU VMs, in their order: the launch, whose
    machines end after `limit_s`, a kill each, and what brings and judges the
    records."""
    launch, name = config.launch, _name(config, path)
    hours = math.floor(min(limit_s / 3600, launch.max_hours or math.inf) * 1000) / 1000
    lead = resource_name(name, COORDINATOR)
    project = f"--project={launch.project}"
    ssh = f"gcloud compute ssh {lead} --zone={launch.coordinator_zone} {project}"
    kill = "--command='sudo docker kill diloco'"
    island = next(iter(config.islands))
    of = f"{resource_name(name, island)} --zone={launch.zones.get(island, '')}"
    return [
        f"diloco launch {named} --on tpu_vm --rehearse --launch.max-hours={hours:g}",
        "# Once all islands train: the kill and the return of an island, of the lead.",
        f"gcloud compute tpus queued-resources ssh {of} --node=all --worker=all "
        f"{project} {kill}",
        f"{ssh} {kill}",
        "# Some minutes later.",
        f"{ssh} --command='sudo tar -C {DISK} -c run' > run.tar",
        "tar -xf run.tar",
        f"diloco rehearse {path} --records run",
        f"diloco launch {named} --on tpu_vm --action delete",
    ]


# ---- engines ------------------------------------------------------------------------


class Here:
    """Processes of this machine, of a `diloco run` of their own."""

    look_s = LOOK_S
    unheard, until = "", math.inf

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.begin = cluster.start

    def status(self) -> dict[str, Any]:
        """Return the run's status. Raises LocalClusterError once it has ended."""
        if self._cluster.ended:
            raise self._cluster.error("ended before all was tried", {})
        return self._cluster.status()

    def strike(self, who: str) -> None:
        """Kill the coordinator, or an island with all its hosts."""
        for pid in noted(self._cluster.workdir).get(who, []):
            signal_group(pid, 9)

    def end(self) -> tuple[Path, str]:
        """End it in order; return its workdir, and what is left."""
        self._cluster.close()
        processes = noted(self._cluster.workdir)
        alive = [
            f"{name} ({pid})"
            for name, pids in processes.items()
            for pid in pids
            if signal_group(pid, 0)
        ]
        of = f"of the launcher's {', '.join(processes)}"
        return self._cluster.workdir, f"{', '.join(alive) or NOTHING} {of}"


class Launched:
    """The machines of a launch, by the commands of `diloco launch`."""

    look_s = LOOK_AWAY_S

    def __init__(
        self, config: Config, path: str, options: command.LaunchOptions
    ) -> None:
        self._config, self._path, self._options = config, path, options
        self._made = self._heard = False
        self.unheard = ""
        """Why the last status was not to be had; empty if it was."""
        self.until = math.inf
        """Time of the monotonic clock after which only `end` does anything."""

    def begin(self) -> None:
        """Create everything, after asking. Raises RehearsalOverError if that fails, and
        ConfigError, before anything is made, if it is there already."""
        name, on = self._config.launch.name, self._options.on
        if not command.asker(self._options.yes)(
            f"make the machines of {name} on {on}?"
        ):
            raise RehearsalOverError("nothing was made: nobody said yes")
        if there := "; ".join(self._submitter("status").left()):
            raise ConfigError(
                f"{there}: a rehearsal of this name goes on, or has left it; "
                f"{self._deletes()}, or give another --launch.name"
            )
        self._made = True
        try:
            self._act("create")
        except (ConfigError, SecurityError):  # Nothing is asked of the cloud before.
            self._made = False
            raise

    def status(self) -> dict[str, Any]:
        """Return the run's status; nothing while nobody answers."""
        found: dict[str, Any] = {}
        self.unheard = ""
        try:
            found = self._submitter("status").status()
            self._heard = True
        except CommandError as error:
            self.unheard = f"the last look at it failed: {error}"
        return found

    def strike(self, who: str) -> None:
        """Stop a part and start it again."""
        self._act("stop", only=(who,))
        self._act("run", only=(who,))

    def end(self) -> tuple[Path, str]:
        """Stop it, copy its records where the engine can, delete all of it; return
        where the records are, and the engine's list of what is left. The disk stays
        if the records are still on it alone."""
        self.until = math.inf  # Whatever has come is given back.
        folder = command.folder_of(self._config, self._path) / "results"
        if not self._made:
            return folder, f"{NOTHING}, since nothing was made"
        gke = self._options.on == "gke"
        self._ends("stop")
        disk = gke and (not self._heard or self._ends("results"))
        for pause_s in (*PAUSES_S, None):
            if self._ends("delete", disk=disk) or pause_s is None:
                break
            logger.warning(
                "not all of it was deleted: what the cloud is still at, such as a "
                "creation that was broken off, is awaited; the next attempt is in %g "
                "s. A second Ctrl-C leaves it all: then %s",
                pause_s,
                self._deletes(),
            )
            with contextlib.suppress(KeyboardInterrupt):  # The next one comes at once.
                time.sleep(pause_s)
        try:
            left = "; ".join(self._submitter("status").left())
        except CommandError as error:
            left = f"nobody knows: {error}"
        told = f"{NOTHING}, by the engine's list"
        if left:
            told = f"{left}; {self._deletes()}"
        if is_bucket(checkpoints := self._config.placement.checkpoints):
            told += f"; snapshots are in {checkpoints}"
        return folder, told

    def _ends(self, action: command.Action, **how: Any) -> bool:
        """Return whether the action was carried out: the next one comes all the
        same."""
        try:
            self._act(action, **how)
        except (RehearsalOverError, ConfigError, SecurityError, OSError) as error:
            logger.warning("%s", error)
        except KeyboardInterrupt:
            logger.warning("interrupted; what was made is deleted all the same")
        else:
            return True
        return False

    def _deletes(self) -> str:
        """Return the line that deletes all of it."""
        return (
            f"`diloco launch {self._path} --on {self._options.on} --launch.name "
            f"{self._config.launch.name} --action delete --disk` deletes it"
        )

    def _submitter(self, action: command.Action) -> Any:
        options = dataclasses.replace(self._options, action=action)
        return command.submitter_of(self._config, self._path, options)

    def _act(self, action: Any, **how: Any) -> None:
        how = {"action": action, "yes": True, **how}
        options = dataclasses.replace(self._options, **how)
        if command.run(self._config, self._path, options, until=self.until):
            raise RehearsalOverError(f"`diloco launch --action {action}` failed")


# ---- the run ------------------------------------------------------------------------


class Drive:
    """Leads a run through its parts."""

    def __init__(
        self,
        engine: Here | Launched,
        config: Config,
        console: Console,
        plan: Plan | None,
    ) -> None:
        self.engine, self._config, self._console = engine, config, console
        self._heard, self._reach_s = False, math.inf
        if plan:  # A coordinator has no address before it has written what it drew.
            first = plan.run.first_start
            self._reach_s = REACH_S + first.draw_seconds + first.write_seconds
        self.struck: list[dict[str, Any]] = []
        """Kills so far, as lines of `chaos.jsonl`."""

    def run(self, limit_s: float) -> None:
        """Do all parts. Raises RehearsalOverError once the time is over, and what the
        engine raises."""
        sync, names = self._config.run.sync, tuple(self._config.islands)
        self.engine.until = time.monotonic() + limit_s

        def steps(status: dict[str, Any], name: str) -> int:
            own = status["islands"].get(name, {})
            return int(own["steps"]) if own.get("state") == "training" else 0

        with bar(self._console, "rehearsal") as told:
            say(self._console, "islands join")
            self.engine.begin()
            status = self._wait(lambda s: all(steps(s, name) > 1 for name in names))
            told(0.3)
            say(self._console, "all islands train: nothing is struck for a while")
            until = time.monotonic() + QUIET_S
            enough = QUIET_CYCLES * sync.cycle
            least = {name: steps(status, name) + enough for name in names}
            status = self._wait(
                lambda s: (
                    all(steps(s, name) >= least[name] for name in names)
                    and time.monotonic() >= until
                )
            )
            told(0.5)
            # The one whose work is missed least.
            name = min(names, key=lambda n: self._config.islands[n].batch_size)
            life = status["islands"][name]["incarnation"]
            self._strike(name)
            again = sync.cycle + sync.overlap
            status = self._wait(
                lambda s: (
                    steps(s, name) >= again and s["islands"][name]["incarnation"] > life
                )
            )
            told(0.75)
            merges = status["merges"] + sync.fragments
            self._strike(COORDINATOR)
            self._wait(
                lambda s: s["merges"] >= merges and all(steps(s, n) for n in names)
            )
            told(1.0)

    def _strike(self, who: str) -> None:
        say(self._console, f"{who} is killed, and comes back")
        line = {"time": time.time(), "who": (who,), "kind": "kill"}
        self.struck.append({**line, "seconds": 0.0, "missed": []})
        self.engine.strike(who)

    def _wait(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first status of which that holds."""
        heard, told = time.monotonic(), False
        reach_s = REACH_S if self._heard else self._reach_s
        while not ((status := self.engine.status()).get("islands") and holds(status)):
            now, why = time.monotonic(), self.engine.unheard
            if not why:
                heard, reach_s, self._heard = now, REACH_S, True
            elif not told:
                told = True
                text = "the coordinator does not answer, and is awaited"
                if math.isfinite(reach_s):
                    text += f" for {reach_s / 60:.3g} minutes"
                say(self._console, f"{text}; {why}")
            if now - heard >= reach_s:
                silent = f"no coordinator answered for {reach_s / 60:.3g} minutes"
                raise RehearsalOverError(f"{silent}; {why}")
            if now >= self.engine.until:
                over = ("its time was over", why)
                raise RehearsalOverError("; ".join(filter(None, over)))
            time.sleep(self.engine.look_s)
        self._heard = True
        return status
