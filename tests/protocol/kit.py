"""Shared parts of the protocol's tests: a driver that holds state and time.

`Driver` feeds events to the policy and keeps every effect; the books are checked
after each event. Islands are named "a", "b", ...; 10 tokens and 1 sequence per step.

A *scene* is a text of events and of what they bring, a line each, as `scene` reads it:

    a=2 b=2 -> ask 0:ab
    a/0=2   ->
    b/0=2   -> merge 0: a 0-2, b 0-2

| word | event |
|---|---|
| `a=4`, `a=4:2` | island a reports 4 steps, of 1 s or 2 s each |
| `a/0=4` | a takes fragment 0 at step 4, and its bytes arrive |
| `a/0~4`, `a/0` | the record alone; the bytes of the outstanding take |
| `a/0=4@2` | a takes steps 2 and 3 alone |
| `a/0!` | those bytes are not finite |
| `a/0-reopened` | a has heard of a refusal, and records that (or `dropped`, `reset`) |
| `/0` | the merge under way of fragment 0 is prepared |
| `a.joins`, `a.2` | a says hello and trains; its incarnation 2 says hello |
| `a.stops`, `a.leaves`, `a.away` | a has stopped; says goodbye; its connection broke |
| `a.compiles` | a compiles |
| `a.back`, `a.back=9` | a comes back with the takes that it holds; it has 9 steps |
| `+5` | 5 s pass |
| `crash` | the coordinator is killed and comes back |
| `lost`, `merged`, `open` | asked: tokens by island, lost, merged or in flight |
| `log` | asked: kinds of the durable records since it was asked last |
| `deadline`, `share` | asked: seconds until time alone acts; of the last merge |
| `phases`, `tick`, `status` | asked: of run and fragments; the last one; of islands |
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import decide, ledger
from diloco_jax.protocol.coordinator.islands import Islands
from diloco_jax.protocol.coordinator.recovery import recover
from diloco_jax.protocol.coordinator.state import (
    Account,
    Alert,
    Disconnected,
    Effect,
    Event,
    Fragment,
    Ignored,
    Note,
    Persist,
    PolicyConfig,
    Said,
    State,
    Tell,
    Timer,
    initial,
)
from diloco_jax.protocol.coordinator.takes import quarantine_moved
from diloco_jax.protocol.holding import DeltaArrived, Drop, Merge, MergePrepared
from diloco_jax.protocol.messages import (
    FIRST_VERSION,
    EndReason,
    Goodbye,
    Hello,
    MayLeave,
    Outstanding,
    Phase,
    Prepared,
    Published,
    Record,
    Refusal,
    Refused,
    Report,
    ResendRequest,
    TakeRequest,
    TakeVerdict,
    Version,
)

TOKENS_PER_STEP = 10
NEVER = 10**9


def make_config(**changes: Any) -> PolicyConfig:
    """Two fragments, H = 4, quorum 1; silence is death after 100 s. No tick waits for
    anybody: neither grace nor reunion."""
    defaults: dict[str, Any] = {
        "run_id": "run-1",
        "fingerprint": "f00d",
        "fragment_sizes": (30, 10),
        "steps_per_cycle": 4,
        "overlap_steps": 2,
        "quorum": 1,
        "grace": 0.0,
        "max_staleness": 1,
        "grace_window": "alike",
        "partial_merges": "scaled",
        "total_tokens": NEVER,
        "lease_s": 100.0,
        "reunion_s": 0.0,
        "compile_budget_s": 300.0,
        "outage_budget_s": 30.0,
        "flush_s": 50.0,
    }
    return PolicyConfig(**{**defaults, **changes})


class Heard:
    """A message that was told, as who is told has it."""

    def __init__(self, tell: Tell) -> None:
        self.session, self._message = tell.session, tell.message

    @property
    def island(self) -> str:
        """By its session, which is its name and incarnation."""
        return self.session.rstrip("0123456789")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


def only(effects: Sequence[Any], kind: type[Any]) -> Any:
    """The one effect of that kind, or message that is told."""
    found = of(effects, kind)
    assert len(found) == 1, f"{len(found)} effects of {kind.__name__}: {effects}"
    return found[0]


def of(effects: Sequence[Any], kind: type[Any]) -> list[Any]:
    """All effects of that kind, or messages that are told (`Heard`); of a Drop its
    delta."""
    if kind is Drop:
        return [effect.delta for effect in effects if isinstance(effect, Drop)]
    tells = (effect for effect in effects if isinstance(effect, Tell))
    told = [Heard(tell) for tell in tells if isinstance(tell.message, kind)]
    return [*told, *(effect for effect in effects if isinstance(effect, kind))]


def kinds(effects: Sequence[Any]) -> list[type[Any]]:
    """Return the type of each effect; for a told message, the message's type."""
    return [type(e.message) if isinstance(e, Tell) else type(e) for e in effects]


def verdicts(effects: Sequence[Any]) -> dict[str, tuple[int, str, str]]:
    """(tick, verdict, reason) by island, as a publish tells them."""
    return {
        told.island: (told.verdict.tick, told.verdict.verdict, told.verdict.reason)
        for told in of(effects, Published)
        if told.verdict is not None
    }


def whose(merge: Merge) -> list[tuple[str, int, int]]:
    """Islands and steps of a merge's deltas, in the order of the sum."""
    return [(c.island, c.start, c.end) for c in merge.contributions]


def merged_islands(merge: Merge) -> list[str]:
    """Whose deltas are in a merge, in the order of the sum."""
    return [c.island for c in merge.contributions]


def notes(effects: Sequence[Effect], kind: str) -> list[dict[str, Any]]:
    """Tape records of that kind."""
    return _lines([e.record for e in of(effects, Note)], kind)


def persisted(effects: Sequence[Effect], kind: str) -> list[dict[str, Any]]:
    """Durable records of that kind."""
    return _lines([e.record for e in of(effects, Persist)], kind)


def _lines(found: Iterable[records.Durable | records.Noted], kind: str) -> list[Any]:
    lines = map(as_written, found)
    return [line for line in lines if line["kind"] == kind]


def as_written(record: records.Durable | records.Noted) -> dict[str, Any]:
    """A line of log or tape as it reads back."""
    line: dict[str, Any] = json.loads(json.dumps(records.line(record)))
    return line


def check_state(state: State) -> None:
    """The books balance; and what a state keeps of its islands and fragments is as if
    each of them was looked at."""
    assert ledger.check(state) == []
    kept, anew = state.islands, Islands(state.islands.values())
    assert kept.standing == anew.standing
    assert kept.computed_tokens == anew.computed_tokens
    assert kept.expiry <= anew.expiry


class Driver:
    """A policy under test. Every method that feeds an event returns its effects."""

    def __init__(self, config: PolicyConfig | None = None, **changes: Any) -> None:
        self.config = config or make_config(**changes)
        self.state: State = initial(self.config)
        self.now = 1000.0
        self.effects: list[Effect] = []
        """But for what was `ignored`."""
        self.ignored: list[Ignored] = []
        self.log: list[records.Durable] = []
        """As it reads back."""
        self._read = 0
        self._seq: dict[tuple[str, int], int] = {}
        self._held: dict[str, dict[int, Outstanding]] = {}
        """Takes that islands hold, by fragment: no verdict on them is final."""

    # ---- events -----------------------------------------------------------------

    def feed(self, event: Event) -> list[Effect]:
        """One event; the books must balance after it."""
        self.state, effects = decide.step(self.config, self.state, event, self.now)
        check_state(self.state)
        self.ignored += of(effects, Ignored)
        effects = [effect for effect in effects if not isinstance(effect, Ignored)]
        self.effects += effects
        written = [as_written(e.record) for e in of(effects, Persist)]
        self.log += map(records.from_log, written)
        return effects

    def hello(self, name: str, incarnation: int = 1, **fields: Any) -> list[Effect]:
        defaults: dict[str, Any] = {
            "session": f"{name}{incarnation}",
            "run_id": self.config.run_id,
            "fingerprint": self.config.fingerprint,
            "tokens_per_step": TOKENS_PER_STEP,
            "sequences_per_step": 1,
            "records_through": self._seq.get((name, incarnation), 0),
        }
        return self.feed(
            Hello(island=name, incarnation=incarnation, **{**defaults, **fields})
        )

    def join(self, *names: str, step_seconds: float = 1.0) -> None:
        """Says hello and begins to train."""
        for name in names:
            self.hello(name)
        for name in names:
            self.report(name, 0, step_seconds=step_seconds)

    def report(
        self,
        name: str,
        steps: int | None = None,
        *records: Record,
        phase: Phase | None = None,
        step_seconds: float = 1.0,
    ) -> list[Effect]:
        """From the current session; training, and no further, unless told."""
        island = self.state.islands[name]
        if phase is None:
            phase = "stopped" if island.phase == "stopped" else "training"
        report = Report(
            phase=phase,
            steps=island.steps if steps is None else steps,
            step_seconds=step_seconds,
            records=records,
        )
        return self.feed(Said(island=name, session=island.session, message=report))

    def reports(self, **steps: int) -> list[Effect]:
        """Islands report these steps, one after the other."""
        return [e for name, step in steps.items() for e in self.report(name, step)]

    def goodbye(self, name: str, reason: EndReason = "stopped") -> list[Effect]:
        session = self.state.islands[name].session
        goodbye = Goodbye(reason=reason, text="bye")
        return self.feed(Said(island=name, session=session, message=goodbye))

    def disconnect(self, name: str) -> list[Effect]:
        session = self.state.islands[name].session
        return self.feed(Disconnected(island=name, session=session))

    def arrive(
        self,
        name: str,
        fragment: int,
        tick: int | None = None,
        refusal: Refusal = "",
        norm: float = 0.0,
    ) -> list[Effect]:
        """The bytes of the outstanding take (or that of `tick`)."""
        incarnation = self.state.islands[name].incarnation
        if tick is None:
            tick = self.tick_of(name, fragment)
        return self.feed(
            DeltaArrived(
                island=name,
                incarnation=incarnation,
                fragment=fragment,
                tick=tick,
                refusal=refusal,
                norm=norm,
            )
        )

    def computed(self, fragment: int) -> list[Effect]:
        """The merge under way is done."""
        version = self.fragment(fragment).version.next()
        for delta in self.fragment(fragment).merging:
            self._held.get(delta.island, {}).pop(fragment, None)
        return self.feed(
            MergePrepared(
                fragment=fragment,
                version=version,
                prepared=Prepared(digest="d1", payload_bytes=1),
            )
        )

    def wait(self, seconds: float) -> list[Effect]:
        """Time passes, and a timer fires at the end of it."""
        self.now += seconds
        return self.feed(Timer())

    def crash(self, snapshot: State | None = None, skip: int = 0) -> None:
        """The coordinator is killed and comes back: from a snapshot, and all durable
        records but the first `skip`."""
        state = initial(self.config) if snapshot is None else snapshot
        self.state = recover(self.config, state, self.log[skip:], self.now)
        check_state(self.state)

    # ---- an island's part -------------------------------------------------------

    def record(self, name: str, kind: Any, step: int, **fields: Any) -> Record:
        """The next record of the island's current incarnation."""
        key = (name, self.state.islands[name].incarnation)
        self._seq[key] = self._seq.get(key, 0) + 1
        return Record(seq=self._seq[key], kind=kind, step=step, **fields)

    def take(
        self,
        name: str,
        fragment: int,
        step: int,
        *,
        base: Version | None = None,
        start: int | None = None,
        arrive: bool = True,
        norm: float = 0.0,
        rate_sum: float | None = None,
    ) -> list[Effect]:
        """The island takes what it was asked for, reports it and sends its bytes."""
        account = self.account(name, fragment)
        assert account.take is not None
        tick = account.take.tick
        start = account.start if start is None else start
        record = self.record(
            name,
            "took",
            step,
            fragment=fragment,
            tick=tick,
            start=start,
            rate_sum=step - start if rate_sum is None else rate_sum,
            version=self.fragment(fragment).version if base is None else base,
        )
        self._held.setdefault(name, {})[fragment] = Outstanding(
            fragment=fragment,
            tick=tick,
            start=start,
            end=step,
            base=record.version,
            seq=record.seq,
        )
        steps = max(step, self.state.islands[name].steps)
        effects = self.report(name, steps, record)
        if arrive:
            effects += self.arrive(name, fragment, tick, norm=norm)
        return effects

    def takes(self, fragment: int, **steps: int) -> list[Effect]:
        """Islands take at these steps, one after the other."""
        return [
            e for name, step in steps.items() for e in self.take(name, fragment, step)
        ]

    def merge(self, fragment: int, **takes: int) -> list[Effect]:
        """Islands take at these steps, and what is closed by that is merged."""
        effects = self.takes(fragment, **takes)
        assert of(effects, Merge)
        return effects + self.computed(fragment)

    def play(self, words: str) -> str:
        """Feed the event of each word of a scene; return what they brought."""
        return brought([e for word in words.split() for e in self._word(word)])

    def asked_for(self, what: str) -> str:
        """Answer a word of a scene that is no event; empty if it is one."""
        islands = self.state.islands
        match what:
            case "phases":
                fragments = [fragment.phase for fragment in self.state.fragments]
                return " ".join([self.state.phase, *fragments])
            case "tick":
                return str(self.state.tick)
            case "deadline":
                due = decide.next_deadline(self.state, self.now)
                return "none" if due is None else f"{due - self.now:g}"
            case "share":
                return f"{of(self.effects, Merge)[-1].share:.4g}"
            case "log":
                new, self._read = self.log[self._read :], len(self.log)
                return " ".join(as_written(line)["kind"] for line in new) or "nothing"
            case "status":
                found = [f"{name} {island.status}" for name, island in islands.items()]
            case "merged":
                found = [f"{n} {self.totals(n).merged}" for n in islands]
            case "open":
                found = [f"{n} {self.totals(n).in_flight}" for n in islands]
            case "lost":
                lost = {name: self.totals(name).lost for name in islands}
                found = [f"{n} {k} {v}" for n in lost for k, v in lost[n].items()]
            case _:
                return ""
        return ", ".join(found) or "nothing"

    def _word(self, word: str) -> list[Effect]:
        name, sign, what = re.fullmatch(r"([a-z]*)([=./+]?)(.*)", word).groups()
        match sign, what:
            case "", _:
                self.crash()
                return []
            case "+", _:
                return self.wait(float(what))
            case "=", _:
                steps, *step_s = what.split(":")
                seconds = float(step_s[0]) if step_s else 1.0
                return self.report(name, int(steps), step_seconds=seconds)
            case ".", "joins":
                return self.hello(name) + self.report(name, 0)
            case ".", "stops":
                return self.report(name, phase="stopped")
            case ".", "compiles":
                return self.report(name, phase="compiling")
            case ".", "leaves":
                return self.goodbye(name)
            case ".", "away":
                return self.disconnect(name)
            case ".", "quarantined":
                self.state = quarantine_moved(self.state, name, quarantined=True)
                return []
            case ".", _ if what.startswith("back"):
                return self.back(name, *map(int, what.split("=")[1:]))
            case ".", _:
                self._held.pop(name, None)
                return self.hello(name, int(what))
        index, how, rest = re.fullmatch(r"(\d+)([=~!-]?)(.*)", what).groups()
        return self._of_fragment(name, int(index), how, rest)

    def _of_fragment(self, name: str, index: int, how: str, rest: str) -> list[Effect]:
        """The event of a word with a fragment."""
        if not name:
            assert self.fragment(index).phase == "merging", index
            return self.computed(index)
        if how in ("=", "~"):
            step, *start = map(int, rest.split("@"))
            begin = start[0] if start else None
            return self.take(name, index, step, start=begin, arrive=how == "=")
        held = self._held.get(name, {}).get(index)
        tick = self.tick_of(name, index) if held is None else held.tick
        if how != "-":
            return self.arrive(name, index, tick, "non_finite" if how else "")
        self._held.get(name, {}).pop(index, None)
        steps = self.state.islands[name].steps
        record = self.record(name, rest, steps, fragment=index, tick=tick)
        return self.report(name, steps, record)

    def back(self, name: str, steps: int | None = None) -> list[Effect]:
        """A hello of an incarnation that comes back, with the takes that it holds."""
        island = self.state.islands[name]
        fields = {
            "steps": island.steps if steps is None else steps,
            "phase": "training" if island.phase == "joining" else island.phase,
            "outstanding": tuple(self._held.get(name, {}).values()),
        }
        return self.hello(name, island.incarnation, **fields)

    # ---- looking ----------------------------------------------------------------

    def fragment(self, index: int) -> Fragment:
        return self.state.fragments[index]

    def account(self, name: str, fragment: int) -> Account:
        return self.fragment(fragment).accounts[name]

    def tick_of(self, name: str, fragment: int) -> int:
        """Return the facts of the outstanding take."""
        take = self.account(name, fragment).take
        assert take is not None
        return take.tick

    def held(self, name: str, fragment: int, start: int, end: int) -> Outstanding:
        """The outstanding take, as a hello tells it."""
        return Outstanding(
            fragment=fragment,
            tick=self.tick_of(name, fragment),
            start=start,
            end=end,
            base=self.fragment(fragment).version,
            seq=self._seq.get((name, self.state.islands[name].incarnation), 0),
        )

    def totals(self, name: str) -> ledger.Totals:
        return ledger.island_totals(self.config, self.state, name)


def brought(effects: Sequence[Effect]) -> str:
    """What effects say to islands and holders, in their order, as a scene has it."""
    said: list[tuple[str, str]] = []
    for effect in effects:
        match effect:
            case Tell(session=session, message=TakeRequest(fragment=f)):
                said.append((f"ask {f}:", session.rstrip("0123456789")))
            case Tell(session=session, message=ResendRequest(fragment=f)):
                said.append((f"resend {f}:", session.rstrip("0123456789")))
            case Tell(session=session, message=TakeVerdict(verdict=how, reason=why)):
                said.append((f"{how} {why}".strip() + ":", session[:-1]))
            case Tell(session=session, message=Published(verdict=told)):
                if told is not None and told.verdict != "merged":
                    what = f"publish {told.verdict} {told.reason}".strip()
                    said.append((f"{what}:", session[:-1]))
            case Tell(session=session, message=MayLeave()):
                said.append(("may leave:", session[:-1]))
            case Tell(session=session, message=Refused(code=code)):
                said.append((f"out {code}:", session))
            case Merge(fragment=f, final=final):
                deltas = ", ".join(f"{name} {a}-{b}" for name, a, b in whose(effect))
                said.append((f"{'flush' if final else 'merge'} {f}: ", deltas))
            case Drop(delta=delta):
                said.append((f"drop {delta.fragment}:", delta.island))
            case Note(record=records.Skipped(fragment=f, why=why)):
                said.append((f"skip {f}: ", why))
            case Alert(text=text):
                clause = re.split("[:;]", text)[0]
                said.append((f"alert {textwrap.shorten(clause, 56)}", ""))
            case Persist(record=records.Finished()):
                said.append(("finished", ""))
    grouped = itertools.groupby(said, key=lambda pair: pair[0])
    return "; ".join(what + "".join(who for _, who in pairs) for what, pairs in grouped)


def scene(d: Driver, text: str) -> None:
    """Play the lines of a scene. What one without an arrow brings is not looked at; a
    line that begins with ; goes on with what the one before brings."""
    for line in re.sub(r"\n *;", ";", text.strip()).splitlines():
        words, arrow, expected = line.partition("->")
        found = d.asked_for(words.strip()) or d.play(words)
        assert not arrow or found == expected.strip(), line.strip()


def scenes(text: str) -> Any:
    """Parametrize a test by the scenes of a text: a title, and lines that are indented.
    The first line says how the scene begins, for `begun`."""
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        if line[0] != " ":
            found[line] = []
        elif not line.strip().startswith("#"):
            found[list(found)[-1]].append(line.strip())
    rows = [(first, "\n".join(lines)) for first, *lines in found.values()]
    return pytest.mark.parametrize(("first", "text"), rows, ids=found)


def begun(first: str, **ways: Callable[..., Driver]) -> Driver:
    """Begin a scene: a way of those, islands, and settings as `quorum=2`."""
    way, *words = first.split()
    names = [word for word in words if "=" not in word]
    settings = dict(word.split("=") for word in words if "=" in word)
    changes = {key: ast.literal_eval(value) for key, value in settings.items()}
    return ways[way](*names, **changes)


def joined(*names: str, **changes: Any) -> Driver:
    """Islands that train, in a run with these settings."""
    d = Driver(**changes)
    d.join(*names)
    return d


def pair(*names: str, **changes: Any) -> Driver:
    """Islands that train; there is one fragment, with a tick every two steps."""
    return joined(*names, **{"fragment_sizes": (5,), "steps_per_cycle": 2, **changes})


def asked(effects: Sequence[Effect]) -> dict[int, list[str]]:
    """Islands asked to take, by fragment."""
    found: dict[int, list[str]] = {}
    for ask in of(effects, TakeRequest):
        found.setdefault(ask.fragment, []).append(ask.island)
    return found


def took(seq: int, fragment: int, tick: int, start: int, step: int) -> Record:
    """A record of a take against the first version."""
    return Record(
        seq=seq,
        kind="took",
        step=step,
        fragment=fragment,
        tick=tick,
        start=start,
        version=FIRST_VERSION,
    )
