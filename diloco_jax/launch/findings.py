"""What a rehearsed run tells of each assumption of its plan, from the run's records.

A rehearsed run (`placement.rehearse`) has a quiet time, in which all islands train, and
then two kills: of an island, and of the coordinator. Speeds are those of the quiet
time, by lines of `metrics.jsonl`, of which each island has one a second. Islands add
what they tried before their first step (`Measures.trial`).

A row deviates where a measured value is worse than the assumed one by more than
`SLACK`, or where what must hold does not. Each row judges one cause: what a step takes
is told from what its batch waits for, and a far link from a slow one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from diloco_jax import run_files
from diloco_jax.chaos.measure import measured
from diloco_jax.config import Config
from diloco_jax.faults import COORDINATOR
from diloco_jax.hardware.machines import MeasuredValue, Measurements, machine_of
from diloco_jax.hardware.tpus import peak_flops_per_s, slice_of
from diloco_jax.observability.history import read_history
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape
from diloco_jax.planning.plan import Plan
from diloco_jax.protocol.island.conversation import JOIN_FETCHES
from diloco_jax.workdir import read_summary

Line = Mapping[str, Any]

SLACK = 1.5
"""Factor by which a measured value may be worse than the assumed one."""
LITTLE = 0.1
"""Share of a step for which nobody changes a setting."""
FAR_S = 0.3
"""Round trip beyond that of any two regions of one cloud."""
JOIN_ROUND_TRIPS = 3
"""Round trips of a join besides those of its fragments: TCP, TLS, the first request."""
OF_TRANSFER = 3.0
"""A transfer tells a link's rate if it takes so many times its round trips."""
LEAST_MEMORY = 0.95
"""Share of a chip's memory that its runtime leaves to programs at least."""
EPSILONS = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
NOT_TRIED = "not tried"
ON_CPUS = ", islands on CPUs"
"""End of the origin of what a twin measured."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """One row of the page."""

    what: str
    cause: str
    """Word for programs: what is to blame if the row deviates."""
    island: str = ""
    assumed: str = "-"
    measured: str = NOT_TRIED
    follows: str = "nothing"
    deviates: bool = False

    def found(self, text: str, wrong: str = "", note: str = "nothing") -> Tried:
        """Return the row with what was measured. wrong: what follows if it deviates."""
        return dataclasses.replace(
            self, measured=text, follows=wrong or note, deviates=bool(wrong)
        )

    def __str__(self) -> str:
        what = f"{self.what}, {self.island}" if self.island else self.what
        return f"**{what}**" if self.deviates else what


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quiet:
    """The first and the last line of metrics of an island in the quiet time."""

    first: Line
    last: Line

    def grown(self, field: str) -> float:
        """Return by how much a count or a sum has grown."""
        return float(self.last[field] - self.first[field])

    def per_step(self, field: str) -> float:
        """Return by how much it has grown in a step, on average."""
        return self.grown(field) / self.grown("step")

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step itself: no batch, take or adoption is in them."""
        return self.per_step("time") - self.per_step("stalled_seconds")


class Comparison:
    """Compares the records of a run with its plan."""

    def __init__(
        self,
        workdir: Path,
        config: Config,
        plan: Plan | None,
        assumed: Measurements,
        link_gbit_per_s: float,
        struck: Sequence[Line],
        origin: str,
    ) -> None:
        """Read the records; without any, no row was tried.

        Args:
          plan: None where islands name no slices.
          assumed: what was measured before, by which the plan goes.
          struck: the kills, as lines of `chaos.jsonl`.
          origin: of what is measured now.
        """
        self._config, self._plan, self._assumed = config, plan, assumed
        self._link, self._origin = link_gbit_per_s, origin
        self._summary, self._tape = read_summary(workdir), list[Line]()
        self._lives: dict[str, float] = {}
        if (workdir / run_files.TAPE).exists():
            self._tape += read_tape(workdir / run_files.TAPE)
            table = read_history(workdir).lives
            lives = (table[key] for key in ("island", "began", "first_step"))
            for name, began, first in zip(*lives, strict=True):
                self._lives.setdefault(str(name), float(first - began))
        self._outcomes = measured(struck, self._tape, tuple(config.islands))
        self._own = Measurements()
        with contextlib.suppress(OSError, msgspec.DecodeError):
            raw = (workdir / run_files.MEASURED).read_bytes()
            self._own = msgspec.json.decode(raw, type=Measurements)
        platforms = {self._environment(name).get("platform") for name in config.islands}
        if "cpu" in platforms:
            self._origin += ON_CPUS
            self._own = self._own.marked(ON_CPUS)
        until = min((s["time"] for s in struck), default=math.inf)
        lines: list[Line] = []
        with contextlib.suppress(FileNotFoundError):
            lines = [m for m in read_metrics(workdir) if m["time"] < until]
        own = {n: [m for m in lines if m.get("island") == n] for n in config.islands}
        own = {n: [m for m in of if m["kind"] == "island"] for n, of in own.items()}
        self._trials: dict[str, dict[str, float]] = {}
        for name, of in own.items():
            tried: dict[str, float] = self._trials.setdefault(name, {})
            for line in of:
                tried |= line.get("trial", {})
        self._quiet = _quiet(own)
        self._rates: dict[str, dict[str, float]] = {"up": {}, "down": {}}

    def findings(self) -> list[Tried]:
        """Return all rows, cheapest first."""
        of_islands = (
            *(self._devices, self._alike, self._memory, self._step, self._data),
            *(self._exchange, self._round_trip, self._failed, self._way_down),
            *(self._way_up, self._join, self._overlap),
        )
        names = self._config.islands
        rows = [judge(name) for judge in of_islands for name in names]
        return [*rows, self._disk(), *self._kills(), self._books()]

    def measurements(self) -> Measurements:
        """Return what `diloco plan --measured` takes. Call `findings` first."""
        restart = [o.back_s for o in self._outcomes if o.who == COORDINATOR]
        limits = {
            n: t.get("memory_limit_bytes")
            for n, t in self._trials.items()
            # A CPU's memory is not that of the chips for which it stands.
            if not (self._on_cpu(n) and self._config.islands[n].topology)
        }
        medians = {n: q.last["median_step_seconds"] for n, q in self._quiet.items()}
        up, down = (self._rates[way].values() for way in ("up", "down"))
        return msgspec.structs.replace(
            self._own,
            step_seconds={n: self._value(v) for n, v in medians.items() if v}
            or self._own.step_seconds,
            device_memory_bytes={n: self._value(v) for n, v in limits.items() if v},
            link_up_gbit_per_s=self._value(min(up)) if up else None,
            link_down_gbit_per_s=self._value(min(down)) if down else None,
            restart_seconds=self._value(restart[0]) if any(restart) else None,
        )

    def _value(self, value: float | None) -> MeasuredValue:
        return MeasuredValue(value=float(value or 0.0), origin=self._origin)

    # ---- an island ----------------------------------------------------------------

    def _environment(self, name: str) -> Line:
        said = (r for r in self._tape if r["kind"] == "hello" and r["island"] == name)
        found: Line = next(said, {}).get("environment", {})
        return found

    def _on_cpu(self, name: str) -> bool:
        return bool(self._environment(name).get("platform", "cpu") == "cpu")

    def _devices(self, name: str) -> Tried:
        island, here = self._config.islands[name], self._environment(name)
        wanted = f"{island.devices} of {island.topology or 'any kind'}"
        row = Tried("devices", "devices", name, wanted)
        if not here:
            return row
        count, kind, wrong = int(here["devices"]), str(here["device_kind"]), ""
        if count < island.devices:
            wrong = f"set islands.{name}.mesh_* to {count} devices, or take more"
        elif island.topology and not self._on_cpu(name):
            made = slice_of(name, island)
            peak = made.flops_per_s / made.devices
            if not math.isclose(peak_flops_per_s(kind) or 0.0, peak, rel_tol=0.1):
                wrong = f"islands.{name}.topology names other chips than these"
        note = "a CPU stands for the slice" if self._on_cpu(name) else "nothing"
        return row.found(f"{count} of {kind}", wrong, note)

    def _alike(self, name: str) -> Tried:
        """Judge whether it computes as the others do, from the same parameters and
        batch."""
        tried = {n: t for n, t in self._trials.items() if "memory_bytes" in t}
        dtypes = [self._config.islands[n].compute_dtype for n in tried]
        # Half of the digits: sums round in unlike orders on unlike meshes.
        most = max((math.sqrt(EPSILONS[dtype]) for dtype in dtypes), default=0.0)
        wanted = f"as the others', within {most:.2g}"
        row = Tried("one fixed step", "arithmetic", name, wanted)
        if name not in tried or len(tried) < 2:
            return row
        kinds = ("loss", "gradient_length")  # Left out where they are not finite.
        loss, length = (tried[name].get(kind, math.inf) for kind in kinds)
        middles = (
            statistics.median(t.get(kind, math.inf) for t in tried.values())
            for kind in kinds
        )
        ratios = [v / (m or 1.0) for v, m in zip((loss, length), middles, strict=True)]
        off = max(abs(r - 1) if math.isfinite(r) else math.inf for r in ratios)
        which = "" if len(tried) > 2 else "; of two, nobody knows which one is wrong"
        wrong = f"compare flags, versions and machines with the others'{which}"
        text = f"loss {loss:.6g}, gradient {length:.6g}, off by {off:.2g}"
        return row.found(text, "" if off <= most else wrong)

    def _memory(self, name: str) -> Tried:
        known, tried = self._assumed.device_memory_bytes, self._trials[name]
        island, assumed = self._config.islands[name], 0.0
        if name in known:
            assumed = known[name].value
        elif island.topology and not self._on_cpu(name):
            assumed = LEAST_MEMORY * slice_of(name, island).hbm_bytes
        wanted = f"{assumed / 1e9:.4g} GB" if assumed else "-"
        row = Tried("memory of a device", "memory", name, wanted)
        if not tried.keys() >= {"memory_bytes", "memory_limit_bytes"}:
            return row
        limit, used = tried["memory_limit_bytes"], tried["memory_bytes"]
        few = limit < LEAST_MEMORY * assumed or used > limit
        wrong = f"lower islands.{name}.batch_size, or find what else takes it"
        text = f"{limit / 1e9:.4g} GB, {used / 1e9:.3g} used at most"
        return row.found(text, wrong if few else "")

    def _step(self, name: str) -> Tried:
        planned = self._plan.islands[name] if self._plan else None
        own = self._config.islands[name].step_seconds
        assumed = planned.expected_step_seconds if planned else own
        where = f" s, {planned.expected_from}" if planned else " s"
        wanted = f"{assumed:.4g}{where}" if assumed else "-"
        row = Tried("a step", "step", name, wanted)
        if (quiet := self._quiet.get(name)) is None:
            return row
        seconds, text = quiet.step_seconds, f"{quiet.step_seconds:.4g} s"
        generation = self._config.islands[name].topology.partition(":")[0]
        if share := self._own.share_of_peak.get(generation):
            text += f", {share.value:.2f} of peak"
        if self._on_cpu(name) and not own and name not in self._assumed.step_seconds:
            return row.found(text, note="nothing: a CPU stands for the slice")
        if assumed and seconds > SLACK * assumed:
            times = f"{seconds / assumed:.2g} times as long as planned"
            why = "chips that throttle, a high --share, or memory that bounds it"
            return row.found(text, f"{times}: {why}")
        fast = assumed and seconds < assumed / SLACK
        note = "links and disk have more to carry: plan with it" if fast else "nothing"
        return row.found(text, note=note)

    def _data(self, name: str) -> Tried:
        wanted = f"below {LITTLE:.0%} of a step"
        row = Tried("wait for a batch", "data", name, wanted)
        if (quiet := self._quiet.get(name)) is None:
            return row
        seconds = quiet.per_step("data_seconds")
        wrong = "a faster disk for the data (launch.data), or `diloco data prepare`"
        slow = seconds > LITTLE * quiet.step_seconds
        return row.found(f"{seconds:.3g} s a step", wrong if slow else "")

    def _exchange(self, name: str) -> Tried:
        row = Tried("takes and adoptions of a cycle", "take", name)
        if (quiet := self._quiet.get(name)) is None:
            return row
        steps = self._config.run.sync.cycle
        stalled = quiet.per_step("stalled_seconds") - quiet.per_step("data_seconds")
        stalled = max(0.0, stalled)
        share = stalled / quiet.step_seconds
        return row.found(f"{steps * stalled:.3g} s, {share:.1%} of its steps")

    def _overlap(self, name: str) -> Tried:
        """Return the row of a trace, which no program reads yet."""
        why = "no collectives overlap on a CPU"
        if not self._on_cpu(name):
            why = f"type `diloco profile {name} --coordinator HOST:PORT`, and look"
        return Tried("overlap of collectives", "overlap", name, follows=why)

    # ---- its link -------------------------------------------------------------------

    def _round_trip(self, name: str) -> Tried:
        wanted = f"below {FAR_S:g} s"
        row = Tried("round trip", "latency", name, wanted)
        if (seconds := self._trials[name].get("round_trip_seconds")) is None:
            return row
        wrong = "farther than two regions: raise sync.overlap_steps, or look for a VPN"
        return row.found(f"{seconds:.3g} s", wrong if seconds > FAR_S else "")

    def _failed(self, name: str) -> Tried:
        row = Tried("broken transfers", "loss", name, "none")
        if (quiet := self._quiet.get(name)) is None:
            return row
        failed = int(quiet.last["transfers_failed"])
        wrong = "the link loses or damages bytes: `ping`, `iperf3`, the island's log"
        text = f"{failed} in {quiet.grown('time'):.0f} s"
        return row.found(text, wrong if failed else "")

    def _way_down(self, name: str) -> Tried:
        tried, fragments = self._trials[name], self._config.run.sync.fragments
        seconds, octets = tried.get("join_seconds", 0.0), tried.get("join_bytes", 0.0)
        trips = JOIN_ROUND_TRIPS + fragments // JOIN_FETCHES
        return self._way("down", name, seconds, octets, trips)

    def _way_up(self, name: str) -> Tried:
        if (quiet := self._quiet.get(name)) is None:
            return self._way("up", name, 0.0, 0.0, 0)
        records = [
            r["record"]["kind"]
            for r in self._tape
            if r["kind"] == "island" and r["island"] == name
            if quiet.first["time"] < r["time"] <= quiet.last["time"]
        ]
        hosts = max(1, self._config.islands[name].hosts)  # They send side by side.
        seconds = quiet.grown("microseconds_up") / 1e6 / hosts
        takes = records.count("took")  # A round trip each.
        return self._way("up", name, seconds, quiet.grown("bytes_up"), takes)

    def _way(
        self, way: str, name: str, seconds: float, octets: float, trips: int
    ) -> Tried:
        """Judge a link's rate, and note it if it can be told. trips: round trips in
        these seconds."""
        known: MeasuredValue | None = getattr(self._assumed, f"link_{way}_gbit_per_s")
        assumed = known.value if known else self._link
        wanted = f"{assumed:.4g} Gbit/s"
        row = Tried(f"link {way}", "link", name, wanted)
        if not seconds or not octets:
            return row
        waited = trips * self._trials[name].get("round_trip_seconds", 0.0)
        if seconds < OF_TRANSFER * waited:
            least = f"{8 * octets / seconds / 1e9:.3g} Gbit/s or more"
            return row.found(least, note=f"{octets / 1e6:.3g} MB are too few to tell")
        rate = self._rates[way][name] = 8 * octets / (seconds - waited) / 1e9
        wrong = "plan with it: `diloco plan` lists codecs and cycles that it carries"
        return row.found(f"{rate:.4g} Gbit/s", wrong if rate < assumed / SLACK else "")

    def _join(self, name: str) -> Tried:
        row = Tried("a join, hello to first step", "join", name)
        if self._plan:
            fetch_s = self._plan.run.first_start.fetch_seconds
            text = f"a compiler, and {fetch_s:.3g} s of a link"
            row = dataclasses.replace(row, assumed=text)
        seconds = self._lives.get(name, math.nan)
        return row.found(f"{seconds:.3g} s") if math.isfinite(seconds) else row

    # ---- the run -------------------------------------------------------------------

    def _disk(self) -> Tried:
        known, launch = self._assumed.disk_write_bytes_per_s, self._config.launch
        assumed = known.value if known else 0.0
        if not known and launch.project:  # Else it is that of this machine.
            assumed = machine_of(launch.coordinator_machine).disk_bytes_per_s
        wanted = f"{assumed / 1e6:.4g} MB/s" if assumed else "-"
        row = Tried("the coordinator's disk", "disk", "", wanted)
        if (found := self._own.disk_write_bytes_per_s) is None:
            return row
        wrong = "raise launch.coordinator_disk_gb or placement.snapshot_every_s"
        slow = found.value < assumed / SLACK
        return row.found(f"{found.value / 1e6:.4g} MB/s", wrong if slow else "")

    def _kills(self) -> Iterator[Tried]:
        """Yield what a kill of an island cost, and one of the coordinator."""
        held = self._config.placement.outage_budget_s
        if self._plan:
            held = self._plan.run.outage.held_seconds
        kinds = {
            False: ("a kill, and a return", "return", "merged again"),
            True: ("a restart of the coordinator", "restart", f"within {held:.0f} s"),
        }
        rows = {
            led: Tried(what, cause, "", wanted)
            for led, (what, cause, wanted) in kinds.items()
        }
        for outcome in self._outcomes:
            led = outcome.who == COORDINATOR
            text = f"{outcome.who} back {_s(outcome.back_s)}, merged "
            text += f"{_s(outcome.merged_s)}, {outcome.tokens_lost:,} tokens lost"
            wrong = ""
            if outcome.merged_s is None:
                wrong = f"see the log of {outcome.who}"
            elif led and (outcome.back_s or 0.0) > held:
                wrong = "raise placement.outage_budget_s above it"
            rows[led] = rows[led].found(text, wrong)
        yield from rows.values()

    def _books(self) -> Tried:
        wanted = "computed = merged + lost + carried + in flight"
        row = Tried("the books", "books", "", wanted)
        if not (summary := self._summary):
            return row
        wrong = [
            who
            for who, of in {"the run": summary, **summary["islands"]}.items()
            if of["tokens_computed"] != sum(_parts(of))
        ]
        parts = " + ".join(f"{part:,}" for part in _parts(summary))
        text = f"{summary['tokens_computed']:,} = {parts}"
        follows = f"not so for {', '.join(wrong)}: keep the tape, and report it"
        return row.found(text, follows if wrong else "")


def _quiet(lines: Mapping[str, Sequence[Line]]) -> dict[str, Quiet]:
    """Return the time in which all islands train, of those with lines enough in it."""
    training = {
        name: [m for m in of if m["phase"] == "training" and m["step"]]
        for name, of in lines.items()
    }
    if not all(training.values()):
        return {}
    begun = max(of[0]["time"] for of in training.values())
    until = min(map(_restarted, lines.values()))
    inside = {
        n: [m for m in of if begun <= m["time"] < until] for n, of in training.items()
    }
    return {
        name: Quiet(first=of[0], last=of[-1])
        for name, of in inside.items()
        if of and of[-1]["step"] > of[0]["step"]
    }


def _restarted(lines: Sequence[Line]) -> float:
    """Return when an island came back with all of its counts at 0; inf if never."""
    pairs = itertools.pairwise(lines)
    return next((m["time"] for a, m in pairs if m["step"] < a["step"]), math.inf)


def _parts(books: Line) -> tuple[int, ...]:
    lost, others = sum(books["tokens_lost"].values()), ("carried", "in_flight")
    return books["tokens_merged"], lost, *(books[f"tokens_{name}"] for name in others)


def _s(seconds: float | None) -> str:
    return "never" if seconds is None else f"after {seconds:.1f} s"


def as_markdown(rows: Sequence[Tried]) -> str:
    """Return the rows as a table."""
    lines = ["| | assumed | measured | what follows |", "|---|---|---|---|"]
    for row in rows:
        texts = (str(row), row.assumed, row.measured, row.follows)
        cells = [text.replace("|", r"\|") for text in texts]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
