"""The state of a run for people and programs: the status, the alerts in it, the
summary at the end, and the port from which Prometheus collects numbers.

The port answers `GET /metrics`. On loopback it is plain HTTP; on any other address
mutual TLS, with the certificates of the run. A request reads a snapshot that the lead's
thread made anyway, on a thread of its own: it waits for nothing, and nothing waits for
it.
"""

from __future__ import annotations

import contextlib
import http
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from diloco_jax import run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, DataConfig
from diloco_jax.config.placement import Deadlines
from diloco_jax.coordinator.holding.holder import FragmentHolder
from diloco_jax.coordinator.lead import Lead
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.snapshots import SnapshotWriter
from diloco_jax.coordinator.watchdog import DiskNeed, DiskWait, Watchdog
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.data.source import Shares
from diloco_jax.doctor import written_per_s
from diloco_jax.files import json_number, write_json, write_text
from diloco_jax.hardware.machines import MeasuredValue, Measurements
from diloco_jax.hardware.tpus import slice_of
from diloco_jax.models.flops import analytic_flops
from diloco_jax.observability import measures
from diloco_jax.observability.exported import Snapshot, families
from diloco_jax.observability.metrics import Metrics
from diloco_jax.protocol.coordinator import ending, leases, ledger
from diloco_jax.protocol.coordinator.ledger import Totals
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.messages import Measures
from diloco_jax.wire import addresses
from diloco_jax.wire.bulk import BulkConnection
from diloco_jax.wire.bulk_server import Acceptor
from diloco_jax.wire.peers import IdleWatch
from diloco_jax.wire.tls import Peers, TlsFiles

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

TRIAL_BYTES = 16 << 20
"""Bytes by which a rehearsed run measures its disk: seconds, on a very slow one."""
SKIPPED_STEPS = 10
"""Skipped steps from which on there is an alert, while the loss is not finite."""


def status(
    config: PolicyConfig,
    state: State,
    roster: Roster,
    *,
    seconds: float,
    alerts: list[str],
    now: float,
) -> dict[str, Any]:
    """Return what `diloco status` shows: JSON-compatible. `seconds` since the run
    began."""
    phase = "flushing" if state.phase in ("stopping", "flushing") else state.phase
    totals = _totals(config, state, roster)
    islands = {
        name: {
            **_island_status(state, roster, name, of, now),
            "tokens_merged": of.merged,
        }
        for name, of in totals.items()
    }
    lost: Counter[str] = Counter()
    for of in totals.values():
        lost.update(of.lost)
    up, down = "bytes_up_per_second", "bytes_down_per_second"
    return {
        "run_id": config.run_id,
        "term": state.term,
        "phase": phase,
        **_progress(
            config, state, [*alerts, *_awaited(config, state), *_skipping(roster)]
        ),
        "seconds": seconds,
        "tokens_merged": sum(of.merged for of in totals.values()),
        "tokens_lost": dict(lost),
        "goodput": measures.goodput(_measures(roster, totals, now)),
        "merged_model": roster.watched(),
        up: sum(island[up] for island in islands.values()),
        down: sum(island[down] for island in islands.values()),
        "islands": islands,
    }


def write(
    workdir: Path,
    config: Config,
    lead: Lead,
    roster: Roster,
    *,
    begun_unix: float,
    over_unix: float,
    digest: str,
) -> None:
    """Write `summary.json` and `measured.json`, unless an earlier life of the
    coordinator wrote them after the end.

    Args:
      begun_unix: start of the run, in unix seconds.
      over_unix: end of the run if it was over before this life; else 0.
      digest: of the global parameters.
    """
    left = workdirs.read_summary(workdir)
    if over_unix and left.get("parameters_digest") == digest:
        return
    now = over_unix or time.time()
    result = summary(
        lead.config,
        lead.state,
        roster,
        wall_seconds=now - begun_unix,
        alerts=[*lead.journal.alerts, *missing(config, roster)],
        now=now,
    )
    result["parameters_digest"] = digest
    if not any(member.own_data for member in roster.members.values()):
        result |= rows_by_source(config.run.data, lead.state)
    result["ignored_messages"] = dict(lead.journal.ignored_messages)
    found = measurements(config, roster, lead.config.run_id)
    if config.placement.rehearse:
        rate = MeasuredValue(
            value=written_per_s(workdir, TRIAL_BYTES),
            origin=f"run {lead.config.run_id}, {TRIAL_BYTES >> 20} MiB at its end",
        )
        found = msgspec.structs.replace(found, disk_write_bytes_per_s=rate)
    write_json(msgspec.to_builtins(found), workdir / run_files.MEASURED)
    write_json(result, workdir / run_files.SUMMARY)


def measurements(config: Config, roster: Roster, run_id: str) -> Measurements:
    """Return what `diloco plan --measured` takes from a run: the median step of each
    island's newest incarnation, the share of peak that it is on a TPU, and the longest
    first compilation."""
    run, steps, shares = config.run, dict[str, MeasuredValue](), {}
    compiled = {n: m.first_compile_seconds for n, m in roster.members.items()}
    for name, member in sorted(roster.members.items()):
        seconds, island = member.current.median_step_seconds, config.islands.get(name)
        if not seconds or island is None:
            continue
        origin = f"run {run_id}, {member.current.steps} steps of {name}"
        steps[name] = MeasuredValue(value=seconds, origin=origin)
        if island.topology and not run.model.factory:
            found = slice_of(name, island)
            rows = member.tokens_per_step / run.sequence_length
            flops = rows * analytic_flops(run.model, run.sequence_length)
            share = MeasuredValue(
                value=flops / seconds / found.flops_per_s, origin=origin
            )
            # A step that is faster than the peak was not made on that slice.
            if share.value <= 1:
                shares[found.generation.name] = share
    longest = max(compiled, key=lambda name: compiled[name], default="")
    return Measurements(
        step_seconds=steps,
        share_of_peak=shares,
        compile_seconds=MeasuredValue(
            value=compiled[longest], origin=f"run {run_id}, {longest}"
        )
        if compiled.get(longest)
        else None,
    )


def summary(
    config: PolicyConfig,
    state: State,
    roster: Roster,
    *,
    wall_seconds: float,
    alerts: list[str],
    now: float,
) -> dict[str, Any]:
    """Return `summary.json` without the evaluation of the flushed parameters. Its
    `phase` is "done", or "stopped" if the run was before its end."""
    totals = _totals(config, state, roster)
    all_measures = _measures(roster, totals, now)
    sums = [roster.measures(name) for name in totals]
    return {
        "run_id": config.run_id,
        "term": state.term,
        "phase": "done" if state.phase == "done" else "stopped",
        **_progress(config, state, alerts),
        **_token_fields(ledger.run_totals(config, state)),
        "tokens_merged_by_fragment": ledger.merged_by_fragment(state),
        "tokens_predicted": sum(s.tokens_predicted for s in sums) or None,
        "goodput": measures.goodput(all_measures),
        "compute_goodput": measures.compute_goodput(all_measures),
        "uptime": measures.uptime(all_measures, wall_seconds),
        "wall_seconds": wall_seconds,
        "parameters": config.parameters,
        "merged_model": roster.watched(),
        "bytes_up": sum(s.bytes_up for s in sums),
        "bytes_down": sum(s.bytes_down for s in sums),
        "bytes_join": sum(s.bytes_join for s in sums),
        "islands": {
            name: {
                **_token_fields(of),
                **_island_summary(state, roster, name, of),
                "away_seconds": roster.failures.away_seconds(name, now),
            }
            for name, of in totals.items()
        },
        "failures": [one.told(now - wall_seconds) for one in roster.failures],
    }


def rows_by_source(data: DataConfig, state: State) -> dict[str, Any]:
    """Return the field of `summary.json` with the rows of each folder of a mixture that
    the run has trained on; nothing if there is no mixture."""
    if not data.sources:
        return {}
    shares = Shares(data.weights)
    counts = [shares.drawn(*span) for span in leases.trained(state)]
    totals = map(sum, zip(*counts, strict=True)) if counts else [0] * len(data.sources)
    return {"rows_by_source": dict(zip(data.sources, totals, strict=True))}


def missing(config: Config, roster: Roster) -> list[str]:
    """Return alerts for islands of the config that never made a step in the run."""
    return [
        f"island {name} never made a step: see its log"
        for name in config.islands
        if name not in roster.members or not roster.measures(name).steps
    ]


def _skipping(roster: Roster) -> list[str]:
    """Return alerts for islands whose steps change nothing at the moment. Their tokens
    count as computed, so no other number shows it."""
    sums = {name: roster.measures(name) for name in sorted(roster.members)}
    return [
        f"island {name} makes steps that change nothing, since their loss or gradient "
        f"is not finite: stop the run; lower inner.learning_rate or look at the data"
        for name, measures in sums.items()
        if measures.skipped_steps >= SKIPPED_STEPS
        and json_number(measures.loss) is None
    ]


def _awaited(config: PolicyConfig, state: State) -> list[str]:
    """Return an alert that says why a run that has its tokens does not end."""
    names = ending.awaited(state) if state.phase == "stopping" else ()
    here = {name for name, one in state.islands.items() if one.status != "absent"}
    away = [name for name in names if name not in here]  # Or not yet in this term.
    if not away:
        return []
    return [
        f"the run has its tokens; for up to {config.lease_s:g} s it waits for "
        f"{', '.join(away)}, away with steps that can still be merged"
    ]


def _progress(config: PolicyConfig, state: State, alerts: list[str]) -> dict[str, Any]:
    """Return what both status and summary say about the run as a whole."""
    return {
        "tokens": state.progress_tokens,
        "total_tokens": config.total_tokens,
        "progress": min(1.0, state.progress_tokens / config.total_tokens),
        "merges": sum(fragment.merges for fragment in state.fragments),
        "versions": [list(fragment.version) for fragment in state.fragments],
        "alerts": alerts,
    }


def _totals(config: PolicyConfig, state: State, roster: Roster) -> dict[str, Totals]:
    """Return the tokens of each island that was ever let in."""
    return {
        name: ledger.island_totals(config, state, name)
        for name in sorted(state.islands)
        if name in roster.members
    }


def _measures(
    roster: Roster, totals: dict[str, Totals], now: float
) -> list[measures.IslandMeasure]:
    return [
        roster.measure(name, of.computed - of.carried, of.merged, now, of.carried)
        for name, of in totals.items()
    ]


def _island_status(
    state: State, roster: Roster, name: str, totals: Totals, now: float
) -> dict[str, Any]:
    island, member = state.islands[name], roster.members[name]
    sums = roster.measures(name)
    # An island without a version of some fragment has not adopted it yet.
    adopted = member.adopted
    everything = len(adopted) == len(state.fragments)
    newest = state.fragments
    lags = [newest[f].version.number - version for f, version in adopted.items()]
    if island.status == "live":
        shown: str = "quarantined" if island.quarantined else island.phase
    else:
        shown = island.status
    speed = up = down = 0.0
    if island.status == "live":
        up, down = member.bytes_per_second
        # Earlier incarnations may have had other batches.
        if own := member.current.median_step_seconds:
            speed = island.tokens_per_step / own
    return {
        "state": shown,
        "incarnation": island.incarnation,
        "steps": island.steps,
        "tokens": island.computed_tokens,
        "tokens_per_second": speed,
        **_measured(sums),
        "eval_loss": json_number(sums.eval_loss),
        "learning_rate": sums.learning_rate,
        "participation": _participation(totals),
        "version": min(adopted.values()) if everything else 0,
        "lag": max(0, *lags) if lags else None,
        "short": list(sums.short) if island.status == "live" else [],
        "programs_left": sums.programs_left if island.status == "live" else 0,
        "fragments_left": sums.fragments_left if island.status == "live" else 0,
        "silent_seconds": now - member.last_sign if member.last_sign else None,
        "bytes_up_per_second": up,
        "bytes_down_per_second": down,
    }


def _island_summary(
    state: State, roster: Roster, name: str, totals: Totals
) -> dict[str, Any]:
    sums = roster.measures(name)
    return {
        "tokens_merged_by_fragment": ledger.merged_by_fragment(state, name),
        "tokens_per_step": state.islands[name].tokens_per_step,
        **_measured(sums),
        "steps": sums.steps,
        "max_step_gap_seconds": sums.max_step_gap_seconds,
        "step_seconds": sums.step_seconds_total,
        "eval_seconds": sums.eval_seconds,
        "compile_seconds": sums.compile_seconds,
        "joins": state.islands[name].joins,
        "resumed": roster.members[name].resumed,
        "incarnation": state.islands[name].incarnation,
        "data": "own" if roster.members[name].own_data else "leased",
        "participation": _participation(totals),
        "contributions": totals.merges_in,
        "bytes_join": sums.bytes_join,
    }


def _measured(sums: Measures) -> dict[str, Any]:
    """Return what both status and summary say of an island's measures."""
    return {
        "tokens_predicted": sums.tokens_predicted or None,
        "skipped_steps": sums.skipped_steps,
        "median_step_seconds": sums.median_step_seconds,
        "stalled_seconds": sums.stalled_seconds,
        "loss": json_number(sums.loss),
        "bytes_up": sums.bytes_up,
        "bytes_down": sums.bytes_down,
    }


def _token_fields(totals: Totals) -> dict[str, Any]:
    return {
        "tokens_computed": totals.computed,
        "tokens_merged": totals.merged,
        "tokens_lost": totals.lost,
        "tokens_in_flight": totals.in_flight,
        "tokens_carried": totals.carried,
    }


def _participation(totals: Totals) -> float:
    return measures.participation(totals.merges_in, totals.merges_alive)


REFRESH_S = 0.5
"""Greatest age of what `diloco status` shows, in seconds."""


class Announcer:
    """Makes the status now and then, on the lead's thread; any thread may read it."""

    def __init__(
        self,
        config: Config,
        plan: FragmentPlan,
        workdir: Path,
        *,
        lead: Lead,
        roster: Roster,
        metrics: Metrics,
        holder: FragmentHolder,
        snapshots: SnapshotWriter,
        disk: DiskWait,
        tls: TlsFiles | None,
        begun_unix: float,
    ) -> None:
        """Make the first status, and let Prometheus collect numbers from now on. Raises
        ConfigError if the port for that cannot be bound.

        config: resolved. begun_unix: start of the run in unix seconds."""
        placement = config.placement
        self._lead, self._roster, self._metrics = lead, roster, metrics
        self._holder, self._snapshots, self._disk = holder, snapshots, disk
        self._begun_unix = begun_unix
        need = DiskNeed(config, plan, workdir)
        self._watchdog = Watchdog(
            need.folders,
            placement.time_budget_s,
            compile_budget_s=placement.compile_budget_s,
            needed=need.free,
        )
        self.refresh()
        self._open = contextlib.ExitStack()
        if placement.metrics_bind:
            exporter = Exporter(
                placement.metrics_bind,
                self.snapshot,
                tls=tls,
                insecure=placement.insecure,
                deadlines=placement.deadlines,
            )
            exporter.start()
            self._open.callback(exporter.close)
            told_at = workdir / run_files.METRICS_ADDRESS
            write_text(exporter.url, told_at)
            self._open.callback(told_at.unlink, missing_ok=True)

    def stop(self) -> None:
        """Close the port."""
        self._open.close()

    def due(self, now: float) -> bool:
        """Tell if it is time for another status."""
        return now - self._refreshed >= REFRESH_S

    def refresh(self) -> None:
        """Make another status, and look for what is newly wrong."""
        lead, now, clock = self._lead, time.time(), time.monotonic()
        self._refreshed = clock
        own = [*self._snapshots.alerts(clock), *self._holder.alerts(clock)]
        self._status = status(
            lead.config,
            lead.state,
            self._roster,
            seconds=now - self._begun_unix,
            alerts=[*lead.journal.alerts, *own, *self._metrics.alerts],
            now=now,
        )
        before = self._watchdog.machine
        for wrong in self._watchdog.look(self._status, clock):
            lead.journal.alert(wrong)
        self._wrong = self._watchdog.wrong
        if self._watchdog.machine is not before:
            self._metrics.append({"kind": "machine", "time": now, **self._uses()})

    def shown(self) -> dict[str, Any]:
        """Return the status, with what holds up the next one: a full disk."""
        shown = {**self._status, **self._holder.shown()}
        return {
            **shown,
            "machine": self._uses(),
            "wrong": self._wrong,
            "alerts": [*self._disk.alerts, *shown["alerts"]],
        }

    def snapshot(self) -> Snapshot:
        """Return what Prometheus collects."""
        return Snapshot(
            version=metadata.version("diloco-jax"),
            status=self.shown(),
            machine=self._watchdog.machine,
            alerts_raised=self._lead.journal.alerts_raised,
            events_waiting=self._lead.waiting,
            merge=self._metrics.last_merge,
        )

    def _uses(self) -> dict[str, Any]:
        """Return the bytes of this machine, and what each worker has of its memory."""
        workers = self._holder.shown().get("workers", ())
        return {
            **self._watchdog.machine.named(),
            "workers_memory_bytes": [worker["resident_bytes"] for worker in workers],
        }


PATH = "/metrics"
REQUESTS_AT_ONCE = 4
"""Connections that are answered at once, of four times as many."""
REQUESTS_EACH = 2
"""Connections with one certificate."""


class Exporter:
    """Serve the numbers of one run from `start` to `close`."""

    def __init__(
        self,
        bind: str,
        snapshot: Callable[[], Snapshot],
        *,
        tls: TlsFiles | None,
        insecure: bool,
        deadlines: Deadlines,
    ) -> None:
        """Raise ConfigError if `bind` must not go without TLS, or cannot be bound.

        snapshot: returns the run as it was a moment ago; called on any thread. Beside
        it this process's own CPU, memory and files are collected, by the names that
        Prometheus's libraries give them."""
        from prometheus_client import CollectorRegistry, ProcessCollector

        addresses.require_tls(bind, tls=tls is not None, insecure=insecure)
        host, _ = addresses.parse_address(bind)
        tls = None if addresses.is_loopback(host) else tls
        listener = addresses.listen(addresses.resolve(bind))
        self.is_local = addresses.is_loopback(listener.getsockname()[0])
        """True if only this machine can ask."""
        at = addresses.format_address(host, listener.getsockname()[1])
        self.url = f"{'https' if tls is not None else 'http'}://{at}{PATH}"
        """The address at which the numbers are, with the port that was bound."""
        self._limit_s = deadlines.connect_s
        self._peers = Peers(tls.folder if tls is not None else None)
        self._watch = IdleWatch("diloco-metrics-watch")
        self._acceptor = Acceptor(
            "diloco-metrics",
            listener,
            tls,
            self._answer,
            deadlines,
            most=4 * REQUESTS_AT_ONCE,
            most_each=REQUESTS_EACH,
            threads=REQUESTS_AT_ONCE,
            idle_s=self._limit_s,
        )
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._snapshot = snapshot

    def start(self) -> None:
        """Answer from now on."""
        self._acceptor.start()
        logger.info("metrics for Prometheus are at %s", self.url)

    def close(self) -> None:
        """Answer no longer, and close the port."""
        self._acceptor.stop()
        self._watch.close(1.0)

    def _answer(self, connection: BulkConnection) -> None:
        """Answer one request of a peer that may ask."""
        with self._watch.guard(self._limit_s, connection.cut):
            self._peers.identify(connection.certificate)
            _Handler(connection.end, connection.peer, self)  # type: ignore[arg-type]
            connection.part()

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers of the run, for the registry."""
        return families(self._snapshot())

    def page(self) -> bytes:
        """Return all numbers, as Prometheus reads them."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class _Handler(BaseHTTPRequestHandler):
    server: Exporter  # type: ignore[assignment]
    server_version, sys_version = "diloco", ""

    def do_GET(self) -> None:
        """Answer one request."""
        from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

        host, kind = self.headers.get("host", ""), "text/plain"
        if self.server.is_local and not _names_this_machine(host):
            # A page of elsewhere whose name is made to lead here (DNS rebinding) asks
            # under its own name.
            text = f"ask for localhost or 127.0.0.1, not for {host[:80]!r}\n"
            status, body = http.HTTPStatus.FORBIDDEN, text.encode()
        elif self.path.partition("?")[0] != PATH:
            text = f"there is {PATH} alone\n"
            status, body = http.HTTPStatus.NOT_FOUND, text.encode()
        else:
            kind = CONTENT_TYPE_PLAIN_0_0_4
            status, body = http.HTTPStatus.OK, self.server.page()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-content-type-options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: Prometheus asks every few seconds."""


def _names_this_machine(host: str) -> bool:
    """Tell if a Host header is loopback's address or localhost, with a port or
    without."""
    name, colon, port = host.rpartition(":")
    name = name if colon and port.isdigit() else host
    return addresses.is_loopback(name.removeprefix("[").removesuffix("]").lower())
