"""The numbers of a run that Prometheus collects: their names, units and meanings.

`METRICS` is their one source. The coordinator's metrics port exposes it
(`coordinator/summary.py`), docs/prometheus.md is written from it, and the queries of
the dashboard for Grafana may name nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MOST_ISLANDS = 256
"""Islands that are exposed; beyond it, those that have ended are left out first."""
PHASES = ("running", "flushing", "gathering", "done")
PREFIX = "diloco_"

Value = tuple[tuple[str, ...], float | None]
"""Values of the labels, and the number; None: there is none at present."""


class Readings(NamedTuple):
    """Last readings of the coordinator's machine, in bytes; 0 or nothing where
    the system does not tell."""

    resident: int = 0
    left: int = 0
    whole: int = 0
    free: Mapping[str, int] = {}
    """Free space by the name of the folder: "workdir", "checkpoints"."""

    def named(self) -> dict[str, int]:
        """Return the numbers by their names in `metrics.jsonl`; of several folders the
        one with the least space."""
        return {
            "memory_bytes": self.resident,
            "memory_left_bytes": self.left,
            "memory_whole_bytes": self.whole,
            "disk_free_bytes": min(self.free.values(), default=0),
        }


class Snapshot(NamedTuple):
    """The run as it was at one moment; nothing in it changes any more."""

    version: str
    """Version of this package."""
    status: Mapping[str, Any]
    """See `coordinator/summary.py: status`, with the workers."""
    machine: Readings
    alerts_raised: int
    """Since the coordinator's start."""
    events_waiting: int
    merge: Mapping[str, Any] | None
    """Line of the last merge in metrics.jsonl; None before the first one."""

    @property
    def islands(self) -> dict[str, Mapping[str, Any]]:
        """The islands that are exposed, by name; their number is bounded."""
        found: dict[str, Mapping[str, Any]] = dict(self.status["islands"])
        if len(found) > MOST_ISLANDS:
            ended = [n for n, island in found.items() if island["state"] == "gone"]
            ordered = [n for n in found if n not in set(ended)] + ended
            found = {name: found[name] for name in ordered[:MOST_ISLANDS]}
        return found


class Exported(NamedTuple):
    """One metric, as people and Prometheus know it."""

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    help: str
    labels: tuple[str, ...]
    values: Callable[[Snapshot], Iterable[Value]]


def _of(read: Callable[[Snapshot], float | None]) -> Callable[[Snapshot], list[Value]]:
    return lambda snapshot: [((), read(snapshot))]


def _status(field: str) -> Callable[[Snapshot], list[Value]]:
    return _of(lambda snapshot: snapshot.status[field])


def _merge(field: str) -> Callable[[Snapshot], list[Value]]:
    return _of(lambda s: None if s.merge is None else s.merge[field])


def _watched(field: str) -> Callable[[Snapshot], list[Value]]:
    return _of(lambda s: (s.status["merged_model"] or {}).get(field))


def _info(snapshot: Snapshot) -> Iterator[Value]:
    yield (snapshot.status["run_id"], snapshot.version), 1


def _phases(snapshot: Snapshot) -> Iterator[Value]:
    for phase in PHASES:
        yield (phase,), phase == snapshot.status["phase"]


def _lost(snapshot: Snapshot) -> Iterator[Value]:
    for reason, tokens in snapshot.status["tokens_lost"].items():
        yield (reason,), tokens


def _states(snapshot: Snapshot) -> Iterator[Value]:
    for name, island in snapshot.islands.items():
        yield (name, island["state"]), 1


def _free(snapshot: Snapshot) -> Iterator[Value]:
    for folder, nbytes in snapshot.machine.free.items():
        yield (folder,), nbytes


def _workers(read: Callable[[Any], float]) -> Callable[[Snapshot], Iterator[Value]]:
    def values(snapshot: Snapshot) -> Iterator[Value]:
        for worker in snapshot.status.get("workers", ()):
            yield (str(worker["worker"]),), read(worker)

    return values


def _gauge(
    name: str,
    unit: str,
    help: str,
    values: Callable[[Snapshot], Iterable[Value]],
    *labels: str,
) -> Exported:
    return Exported(PREFIX + name, "gauge", unit, help, labels, values)


def _counter(
    name: str,
    unit: str,
    help: str,
    values: Callable[[Snapshot], Iterable[Value]],
    *labels: str,
) -> Exported:
    return Exported(f"{PREFIX}{name}_total", "counter", unit, help, labels, values)


def _of_islands(
    make: Callable[..., Exported], name: str, unit: str, help: str, field: str
) -> Exported:
    """Return a metric with a value for each island. field: of its status."""

    def values(snapshot: Snapshot) -> Iterator[Value]:
        for island, status in snapshot.islands.items():
            yield (island,), status[field]

    return make(f"island_{name}", unit, help, values, "island")


LOSS = "nats per token"
RUN = (
    _gauge("run_info", "", "1; says which run it is", _info, "run_id", "version"),
    _gauge("run_phase", "", "1 for the run's phase, 0 for others", _phases, "phase"),
    _gauge("run_age_seconds", "s", "Time since the run began", _status("seconds")),
    _gauge("run_term", "", "Term of the coordinator's state", _status("term")),
    _gauge("run_tokens", "tokens", "Tokens that are not lost", _status("tokens")),
    _gauge(
        *("run_tokens_wanted", "tokens", "Tokens with which the run ends"),
        _status("total_tokens"),
    ),
    _gauge(
        *("run_tokens_merged", "tokens", "Tokens that are in merges"),
        _status("tokens_merged"),
    ),
    _gauge(
        *("run_tokens_lost", "tokens", "Tokens that no merge will have, by reason"),
        *(_lost, "reason"),
    ),
    _gauge(
        *("run_goodput_ratio", "0 to 1"),
        "Merged tokens over what undisturbed islands would have computed",
        _status("goodput"),
    ),
    _counter("run_merges", "merges", "Merges of all fragments", _status("merges")),
)
MERGES = (
    _gauge("merge_seconds", "s", "Time that the last merge took", _merge("seconds")),
    _gauge(
        *("merge_islands", "islands", "Islands in the last merge"),
        _of(lambda s: None if s.merge is None else len(s.merge["islands"])),
    ),
    _gauge(
        *("merge_share_ratio", "0 to 1"),
        "Part of all tokens per second in the last merge",
        _merge("share"),
    ),
    _gauge("merge_norm", "", "Length of the last merged delta", _merge("norm")),
    _gauge(
        *("merge_cosine", "-1 to 1"),
        "Mean cosine between two deltas of the last merge; none with one island",
        _merge("pairwise_cosine"),
    ),
    _gauge(
        *("merged_model_loss", LOSS),
        "Validation loss of the merged model, with placement.watch_every",
        _watched("eval_loss"),
    ),
    _gauge(
        *("merged_model_cycle", "cycles", "Cycle of that merged model"),
        _watched("cycle"),
    ),
)
_GAUGES = (
    ("incarnation", "", "Number of its process, which rises with every start"),
    ("tokens", "tokens", "Tokens that it has computed"),
    ("tokens_merged", "tokens", "Tokens of it that are in merges"),
    ("tokens_per_second", "tokens/s", "Speed by its median step; 0 when it is away"),
    ("step_seconds", "s", "Median time of a step", "median_step_seconds"),
    ("silent_seconds", "s", "Time since its last report"),
    ("loss", LOSS, "Training loss, mean over its last steps"),
    ("eval_loss", LOSS, "Validation loss, with placement.evaluate_every_steps"),
    ("learning_rate", "", "Learning rate of its last step"),
    (
        *("participation_ratio", "0 to 1", "Part of the merges that it was in"),
        "participation",
    ),
    ("lag_versions", "versions", "Lag of the fragment that lags most", "lag"),
)
_COUNTERS = (
    ("steps", "steps", "Steps of this incarnation"),
    ("skipped_steps", "steps", "Steps that changed nothing: they were not finite"),
    ("stalled_seconds", "s", "Time outside steps and validation"),
    ("sent_bytes", "bytes", "Deltas that it has sent", "bytes_up"),
    ("received_bytes", "bytes", "Publishes that came, without joins", "bytes_down"),
)
ISLANDS = (
    _gauge("island_state", "", "1; its state is a label", _states, "island", "state"),
    *(
        _of_islands(make, name, unit, help, *(field or (name,)))
        for make, rows in ((_gauge, _GAUGES), (_counter, _COUNTERS))
        for name, unit, help, *field in rows
    ),
)
COORDINATOR = (
    _counter(
        *("alerts", "alerts", "Alerts since the coordinator's start"),
        _of(lambda s: s.alerts_raised),
    ),
    _gauge(
        *("coordinator_events_waiting", "events"),
        "Events that wait for the thread of decisions",
        _of(lambda s: s.events_waiting),
    ),
    _gauge(
        *("coordinator_memory_bytes", "bytes", "Memory of the coordinator's process"),
        _of(lambda s: s.machine.resident),
    ),
    _gauge(
        *("machine_memory_left_bytes", "bytes"),
        "Memory that is left on the machine or to its control group",
        _of(lambda s: s.machine.left),
    ),
    _gauge(
        *("machine_memory_bytes", "bytes", "All of that memory"),
        _of(lambda s: s.machine.whole),
    ),
    _gauge(
        *("machine_disk_free_bytes", "bytes"),
        "Free space where the workdir is, and where checkpoints are if elsewhere",
        *(_free, "folder"),
    ),
    _gauge(
        *("worker_up", "", "1 while a worker serves its fragments"),
        *(_workers(lambda worker: float(bool(worker["address"]))), "worker"),
    ),
    _gauge(
        *("worker_memory_bytes", "bytes", "The most memory that a worker has had"),
        *(_workers(lambda worker: worker["memory_bytes"]), "worker"),
    ),
)
GROUPS = {
    "The run": RUN,
    "Merges": MERGES,
    "Islands": ISLANDS,
    "The coordinator and its machine": COORDINATOR,
}
METRICS: tuple[Exported, ...] = tuple(m for group in GROUPS.values() for m in group)


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield every metric with its values, as the client library of Prometheus has
    it."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for metric in METRICS:
        make = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        family = make(metric.name, metric.help, labels=metric.labels)
        for labels, value in metric.values(snapshot):
            if value is not None:
                family.add_metric(labels, value)
        yield family


def table(metrics: Iterable[Exported]) -> str:
    """Return the rows of docs/prometheus.md."""
    rows = ["| name | type | labels | unit | what it is |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        cells = (f"`{metric.name}`", metric.kind, labels, metric.unit, metric.help)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
