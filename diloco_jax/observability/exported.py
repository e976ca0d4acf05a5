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
    """A counter's ends in `_total`."""
    unit: str
    help: str
    labels: tuple[str, ...]
    values: Callable[[Snapshot], Iterable[Value]]

    @property
    def kind(self) -> Literal["gauge", "counter"]:
        """Type by Prometheus' words."""
        return "counter" if self.name.endswith("_total") else "gauge"


def _metric(
    name: str,
    unit: str,
    help: str,
    values: Callable[[Snapshot], Iterable[Value]],
    *labels: str,
) -> Exported:
    return Exported(PREFIX + name, unit, help, labels, values)


def _of(read: Callable[[Snapshot], float | None]) -> Callable[[Snapshot], list[Value]]:
    return lambda snapshot: [((), read(snapshot))]


def _status(field: str) -> Callable[[Snapshot], list[Value]]:
    return _of(lambda snapshot: snapshot.status[field])


def _merge(field: str) -> Callable[[Snapshot], list[Value]]:
    return _of(lambda s: None if s.merge is None else s.merge[field])


def _watched(field: str) -> Callable[[Snapshot], list[Value]]:
    return _of(lambda s: (s.status["merged_model"] or {}).get(field))


def _islands(field: str) -> Callable[[Snapshot], Iterator[Value]]:
    return lambda s: (((name,), one[field]) for name, one in s.islands.items())


def _workers(read: Callable[[Any], float]) -> Callable[[Snapshot], Iterator[Value]]:
    return lambda s: (
        ((str(worker["worker"]),), read(worker))
        for worker in s.status.get("workers", ())
    )


LOSS = "nats per token"
RUN = (
    _metric(
        *("run_info", "", "1; says which run it is"),
        lambda s: [((s.status["run_id"], s.version), 1)],
        *("run_id", "version"),
    ),
    _metric(
        *("run_phase", "", "1 for the run's phase, 0 for others"),
        lambda s: (((phase,), phase == s.status["phase"]) for phase in PHASES),
        "phase",
    ),
    _metric("run_age_seconds", "s", "Time since the run began", _status("seconds")),
    _metric("run_term", "", "Term of the coordinator's state", _status("term")),
    _metric("run_tokens", "tokens", "Tokens that are not lost", _status("tokens")),
    _metric(
        *("run_tokens_wanted", "tokens", "Tokens with which the run ends"),
        _status("total_tokens"),
    ),
    _metric(
        *("run_tokens_merged", "tokens", "Tokens that are in merges"),
        _status("tokens_merged"),
    ),
    _metric(
        *("run_tokens_lost", "tokens", "Tokens that no merge will have, by reason"),
        lambda s: (((why,), lost) for why, lost in s.status["tokens_lost"].items()),
        "reason",
    ),
    _metric(
        *("run_goodput_ratio", "0 to 1"),
        "Merged tokens over what undisturbed islands would have computed",
        _status("goodput"),
    ),
    _metric("run_merges_total", "merges", "Merges of all fragments", _status("merges")),
)
MERGES = (
    _metric("merge_seconds", "s", "Time that the last merge took", _merge("seconds")),
    _metric(
        *("merge_islands", "islands", "Islands in the last merge"),
        _of(lambda s: None if s.merge is None else len(s.merge["islands"])),
    ),
    _metric(
        *("merge_share_ratio", "0 to 1"),
        "Part of all tokens per second in the last merge",
        _merge("share"),
    ),
    _metric("merge_norm", "", "Length of the last merged delta", _merge("norm")),
    _metric(
        *("merge_cosine", "-1 to 1"),
        "Mean cosine between two deltas of the last merge; none with one island",
        _merge("pairwise_cosine"),
    ),
    _metric(
        *("merged_model_loss", LOSS),
        "Validation loss of the merged model, with placement.watch_every",
        _watched("eval_loss"),
    ),
    _metric(
        *("merged_model_cycle", "cycles", "Cycle of that merged model"),
        _watched("cycle"),
    ),
)
_OF_ISLANDS = (
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
    ("steps_total", "steps", "Steps of this incarnation", "steps"),
    (
        *("skipped_steps_total", "steps"),
        *("Steps that changed nothing: they were not finite", "skipped_steps"),
    ),
    (
        *("stalled_seconds_total", "s", "Time outside steps and validation"),
        "stalled_seconds",
    ),
    ("sent_bytes_total", "bytes", "Deltas that it has sent", "bytes_up"),
    (
        *("received_bytes_total", "bytes", "Publishes that came, without joins"),
        "bytes_down",
    ),
)
"""Name, unit, help, and field of an island's status if it has another name."""
ISLANDS = (
    _metric(
        *("island_state", "", "1; its state is a label"),
        lambda s: (((name, one["state"]), 1) for name, one in s.islands.items()),
        *("island", "state"),
    ),
    *(
        _metric(f"island_{name}", unit, help, _islands(*(field or (name,))), "island")
        for name, unit, help, *field in _OF_ISLANDS
    ),
)
COORDINATOR = (
    _metric(
        *("alerts_total", "alerts", "Alerts since the coordinator's start"),
        _of(lambda s: s.alerts_raised),
    ),
    _metric(
        *("coordinator_events_waiting", "events"),
        "Events that wait for the thread of decisions",
        _of(lambda s: s.events_waiting),
    ),
    _metric(
        *("coordinator_memory_bytes", "bytes", "Memory of the coordinator's process"),
        _of(lambda s: s.machine.resident),
    ),
    _metric(
        *("machine_memory_left_bytes", "bytes"),
        "Memory that is left on the machine or to its control group",
        _of(lambda s: s.machine.left),
    ),
    _metric(
        *("machine_memory_bytes", "bytes", "All of that memory"),
        _of(lambda s: s.machine.whole),
    ),
    _metric(
        *("machine_disk_free_bytes", "bytes"),
        "Free space where the workdir is, and where checkpoints are if elsewhere",
        lambda s: (((folder,), nbytes) for folder, nbytes in s.machine.free.items()),
        "folder",
    ),
    _metric(
        *("worker_up", "", "1 while a worker serves its fragments"),
        *(_workers(lambda worker: float(bool(worker["address"]))), "worker"),
    ),
    _metric(
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
