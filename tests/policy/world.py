"""A miniature world around the policy: islands, connections, crashes, lost messages.

Islands are those of `island_process.py`; arrays do not exist. Messages on a connection
come in order and late, deltas take their own time, and all of it is lost when the
connection breaks. The coordinator writes snapshots and a log, dies between any two
effects and recovers from them. `World` checks its invariants at every effect.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from island_process import Process

from diloco_jax.config import AdoptRule
from diloco_jax.policy import ledger, policy
from diloco_jax.policy.events import (
    AskResend,
    AskTake,
    DeltaArrived,
    Disconnected,
    DropDelta,
    Effect,
    Event,
    Finish,
    Grant,
    Merge,
    MergeComputed,
    Persist,
    Progress,
    Publish,
    Refuse,
    Report,
    StopStepping,
    TellVerdict,
    Timer,
    Version,
    Welcome,
)
from diloco_jax.policy.recovery import recover
from diloco_jax.policy.state import PolicyConfig, State, initial

Key = tuple[str, int, int, int]
"""Island, incarnation, fragment, tick: which take."""

TICK_S = 0.25
"""Time goes on in steps of this."""


class World:
    """Runs it all; `run` once with faults, once without."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        names = "abcd"[: rng.choice([2, 3, 3, 4])]
        fragments = rng.choice([1, 2, 3, 5])
        self.config = PolicyConfig(
            run_id="run",
            fingerprint="f",
            fragment_sizes=tuple(rng.randint(1, 9) for _ in range(fragments)),
            steps_per_cycle=rng.choice([4, 7, 12]),
            overlap_steps=2,
            quorum=rng.choice([1, 1, 2]),
            grace=rng.choice([0.0, 0.8]),
            max_staleness=rng.choice([0, 1, 1, 2]),
            total_tokens=0,
            lease_s=10.0,
            compile_budget_s=30.0,
            outage_budget_s=8.0,
            flush_s=30.0,
        )
        self.rule: AdoptRule = rng.choice(["rebase", "overwrite"])
        self.sizes = {n: (rng.randint(1, 20), rng.randint(1, 3)) for n in names}
        self.speeds = {n: rng.choice([0.5, 1.0, 1.0, 6.0]) for n in names}
        rate = sum(self.sizes[n][0] / self.speeds[n] for n in names)
        self.config = dataclasses.replace(
            self.config, total_tokens=int(rate * rng.choice([30, 60, 90]))
        )
        self.now = 0.0
        self.clock_offset = 1000.0
        self.faults = True
        self.finished = False
        self.incarnations = dict.fromkeys(names, 0)
        self.processes: list[Process] = []
        self.starts: list[tuple[float, str]] = [(0.0, n) for n in names]
        # The coordinator: what is in memory, and what is on disk.
        self.state: State | None = initial(self.config)
        self.restart_at = 0.0
        self.log: list[dict[str, Any]] = []
        self.snapshots: list[tuple[int, State]] = [(0, self.state)]
        self.inbox: set[Key] = set()
        self.merging: list[tuple[float, Merge]] = []
        self.connections: dict[str, Process] = {}
        # What the invariants are about.
        self.takes: dict[Key, tuple[int, int, Version]] = {}
        self.merged: dict[Key, tuple[int, int]] = {}
        self.merge_counts = [0] * fragments
        self.published = [Version()] * fragments
        self.durable_versions = [Version()] * fragments
        self.spans: dict[tuple[str, int], list[range]] = {}
        self.holders: set[tuple[str, int]] = set()
        self.progress = 0

    # ---- time and chance ----------------------------------------------------------

    @property
    def coordinator_now(self) -> float:
        return self.now + self.clock_offset

    def chance(self, probability: float) -> bool:
        return self.faults and self.rng.random() < probability

    def soon(self, longest_s: float = 1.0) -> float:
        return self.now + self.rng.random() * longest_s

    def run(self, seconds: float) -> None:
        """Until the run is finished, at most for so long."""
        end = self.now + seconds
        while self.now < end and not self.finished:
            self.now += TICK_S
            self.break_something()
            self.start_processes()
            for process in list(self.processes):
                self.run_process(process)
            self.run_coordinator()

    def heal(self) -> None:
        """No faults from here on; who is down comes back."""
        self.faults = False

    # ---- faults -------------------------------------------------------------------

    def break_something(self) -> None:
        if self.chance(0.01):
            self.crash_coordinator()
        if self.chance(0.003):
            self.clock_offset += self.rng.uniform(5, 40)
        if self.state is not None and self.rng.random() < 0.03:
            self.snapshots = [*self.snapshots[-1:], (len(self.log), self.state)]
        for process in list(self.processes):
            if self.chance(0.01):
                self.disconnect(process, silently=self.chance(0.5))
            if self.chance(0.004):
                if not self.chance(0.4):  # Otherwise it goes on, fenced by the next.
                    self.disconnect(process, silently=self.chance(0.5))
                    self.processes.remove(process)
                self.starts.append((self.soon(20), process.name))

    def disconnect(self, process: Process, *, silently: bool) -> None:
        if process.link is None:
            return
        process.link = None
        process.reconnect_at = self.soon(15)
        if self.connections.get(process.name) is process:
            del self.connections[process.name]
        if not silently and self.state is not None:
            self.step(Disconnected(island=process.name, session=process.session))

    def crash_coordinator(self) -> None:
        self.state = None
        self.inbox, self.merging, self.connections = set(), [], {}
        self.restart_at = self.soon(15)
        for process in self.processes:
            if process.link is not None:
                process.link = None
                process.reconnect_at = self.soon(15)

    def start_processes(self) -> None:
        due = [name for at, name in self.starts if at <= self.now]
        self.starts = [(at, name) for at, name in self.starts if at > self.now]
        for name in due:
            self.incarnations[name] += 1
            self.processes.append(
                Process(self, name, self.incarnations[name], self.speeds[name])
            )

    # ---- islands ------------------------------------------------------------------

    def run_process(self, process: Process) -> None:
        link = process.link
        if link is None:
            if self.now >= process.reconnect_at and self.state is not None:
                process.connect()
        else:
            while process.link is link and link.up and link.up[0][0] <= self.now:
                event = link.up.popleft()[1]
                self.from_island(process, event)
                if isinstance(event, Report) and self.chance(0.1):
                    self.from_island(process, event)
            for due in [d for d in link.deltas if d[0] <= self.now]:
                link.deltas.remove(due)
                self.delta_here(due[1])
            while process.link is link and link.down and link.down[0][0] <= self.now:
                process.receive(link.down.popleft()[1])
            for fetch in [f for f in link.fetches if f[0] <= self.now]:
                link.fetches.remove(fetch)
                newest = process.arrivals.get(fetch[1], Version())
                process.arrivals[fetch[1]] = max(newest, fetch[2])
        if process.ended:
            self.processes.remove(process)
            if self.connections.get(process.name) is process:
                del self.connections[process.name]
            current = self.incarnations[process.name] == process.incarnation
            if current and not self.finished and self.running:
                self.starts.append((self.soon(5), process.name))
            return
        if self.now >= process.next_step_at:
            process.next_step_at = self.now + process.speed
            process.boundary()
        if self.now >= process.report_at:
            process.report()

    @property
    def running(self) -> bool:
        return self.state is None or self.state.phase == "running"

    def from_island(self, process: Process, event: Event) -> None:
        if self.state is None:
            return
        self.step(event, process)

    def delta_here(self, event: DeltaArrived) -> None:
        key = (event.island, event.incarnation, event.fragment, event.tick)
        if self.state is None or key in self.inbox:
            return
        self.inbox.add(key)
        self.step(event)

    def taken(self, process: Process, take: Any) -> None:
        key = (process.name, process.incarnation, take.fragment, take.tick)
        assert key not in self.takes, "one tick was taken twice"
        self.takes[key] = (take.start, take.end, take.base)

    # ---- the coordinator ----------------------------------------------------------

    def run_coordinator(self) -> None:
        if self.state is None:
            if self.now >= self.restart_at:
                self.recover()
            return
        for due in [m for m in self.merging if m[0] <= self.now]:
            if due in self.merging:
                self.merging.remove(due)
                self.merge_done(due[1])
        if self.state is None:
            return
        deadline = policy.next_deadline(self.state, self.coordinator_now - TICK_S)
        if deadline is not None and deadline <= self.coordinator_now:
            self.step(Timer())

    def recover(self) -> None:
        used = self.rng.randrange(len(self.snapshots))
        # A newer one that was not used belongs to a course of events that never was.
        self.snapshots = self.snapshots[: used + 1]
        index, snapshot = self.snapshots[-1]
        self.clock_offset = self.rng.uniform(10, 10_000)
        self.state = recover(
            self.config, snapshot, self.log[index:], self.coordinator_now
        )
        self.check_state()
        for fragment in self.state.fragments:
            assert fragment.version == self.durable_versions[fragment.index]

    def merge_done(self, merge: Merge) -> None:
        for c in merge.contributions:
            self.inbox.discard((c.island, c.incarnation, merge.fragment, c.tick))
        self.step(
            MergeComputed(fragment=merge.fragment, version=merge.version, digest="")
        )

    def step(self, event: Event, process: Process | None = None) -> None:
        assert self.state is not None
        self.state, effects = policy.step(
            self.config, self.state, event, self.coordinator_now
        )
        self.check_state()
        for effect in effects:
            if self.chance(0.0005):
                self.crash_coordinator()
                return
            self.carry_out(effect, process)

    def carry_out(self, effect: Effect, process: Process | None) -> None:
        match effect:
            case Persist():
                self.persist(effect.record)
            case Merge():
                self.check_merge(effect)
                self.merging.append((self.soon(3), effect))
            case Welcome():
                assert process is not None
                self.connections[effect.island] = process
                self.tell(effect.island, effect)
            case Refuse():
                for other in self.processes:
                    if other.session == effect.session and other.link is not None:
                        other.link.down.append((self.soon(), effect))
            case Publish():
                assert self.durable_versions[effect.fragment] == effect.version
                assert self.published[effect.fragment] < effect.version
                self.published[effect.fragment] = effect.version
                for name in list(self.connections):
                    self.tell(name, effect)
            case Grant():
                holder = next(h for h in self.holders if h[0] == effect.island)
                assert range(*effect.span) in self.spans[holder], "not durable yet"
                self.tell(effect.island, effect)
            case DropDelta():
                key = (effect.island, effect.incarnation, effect.fragment, effect.tick)
                self.inbox.discard(key)
            case Finish():
                self.finished = True
            case AskTake() | AskResend() | TellVerdict() | Progress() | StopStepping():
                if isinstance(effect, Progress):
                    assert effect.tokens >= 0
                self.tell(effect.island, effect)

    def tell(self, name: str, effect: Effect) -> None:
        process = self.connections.get(name)
        if process is not None and process.link is not None:
            link = process.link
            last = link.down[-1][0] if link.down else self.now
            link.down.append((max(last, self.soon()), effect))

    def persist(self, record: dict[str, Any]) -> None:
        self.log.append(record)
        holder = (record.get("island", ""), record.get("incarnation", 0))
        match record["kind"]:
            case "joined":
                self.spans[holder] = []
                self.holders.add(holder)
                name, incarnation = holder
                self.inbox = {
                    k for k in self.inbox if k[0] != name or k[1] >= incarnation
                }
            case "left":
                self.holders.discard(holder)
            case "granted":
                new = range(record["start"], record["stop"])
                for other in self.holders:
                    for span in self.spans[other]:
                        assert new.stop <= span.start or span.stop <= new.start
                assert record["offset"] == sum(map(len, self.spans[holder]))
                self.spans[holder].append(new)
            case "merged":
                self.book(record)

    # ---- invariants ---------------------------------------------------------------

    def book(self, record: dict[str, Any]) -> None:
        fragment, version = record["fragment"], Version(*record["version"])
        assert version == self.durable_versions[fragment].next()
        self.durable_versions[fragment] = version
        self.merge_counts[fragment] += 1
        for c in record["contributions"]:
            key = (c["island"], c["incarnation"], fragment, c["tick"])
            assert key not in self.merged, "a take was merged twice"
            assert self.takes[key] == (
                c["start"],
                c["end"],
                Version(*c["base"]),
            )
            for other, (start, end) in self.merged.items():
                if other[:3] == key[:3]:
                    assert end <= c["start"] or c["end"] <= start, "steps merged twice"
            self.merged[key] = (c["start"], c["end"])

    def check_merge(self, merge: Merge) -> None:
        assert self.state is not None
        assert merge.version > self.published[merge.fragment]
        counted = len(merge.contributions)
        assert merge.final or counted >= self.config.quorum
        names = [c.island for c in merge.contributions]
        assert names == sorted(set(names))
        assert names
        for c in merge.contributions:
            assert (c.island, c.incarnation, merge.fragment, c.tick) in self.inbox
            assert c.steps > 0
            island = self.state.islands[c.island]
            assert island.incarnation == c.incarnation
            assert island.status != "gone"
            assert c.base.term == merge.version.term
            lag = merge.version.number - 1 - c.base.number
            assert lag <= self.config.max_staleness, "stale"

    def check_state(self) -> None:
        assert self.state is not None
        wrong = ledger.check(self.config, self.state)
        assert not wrong, wrong
        for fragment in self.state.fragments:
            for name, account in fragment.accounts.items():
                take = account.take
                if take is not None and take.end is not None:
                    assert account.start == take.start <= take.end
                    assert take.end <= self.state.islands[name].steps
