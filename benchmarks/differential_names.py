"""The renames of a refactoring: the one file to edit before old and new are compared.

A recording is in the words of the commit that made it. Replay brings every recorded
value into the words of this checkout, in this order:

1. `NAMES` renames modules and classes, `FIELDS` the fields of a class;
2. `REWRITES` is for whatever is more than a new name, such as an effect that became a
   message: a function by *new* class name, from the recorded value to one or more;
3. `NEW_RESULTS` is the same for the values that this checkout returns, where both
   sides can only meet in the middle (one message to each island for one effect).

A call of a port (see `Hooked`) is a value, too, of the class `ports.PORT.METHOD` and
with `arguments` = [positional ones, those by name].

`FUNCTIONS` and `CLASSES` say what is recorded and replayed: by a name that stays, all
places where it has been, the newest first. Something that has no place any more is
listed as not compared, unless `REPLACED` has a function that does as it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple


class Call(NamedTuple):
    """The call as this checkout did it, for rewrites to look at."""

    name: str
    arguments: Sequence[Any]
    result: Any


Value = dict[str, Any]
"""An object as JSON: its fields, and its class (module.Class, without `diloco_jax.`)
at the key ""."""
Rewrite = Callable[[Value, Call], Value | list[Value]]

E, M = "protocol.coordinator.events.", "protocol.messages."
NAMES: Mapping[str, str] = {
    "policy.values": "protocol.values",
    "protocol.island.stopping": "protocol.island.boundary",
    "protocol.island.status": "protocol.island.reporting",
    "policy.records": "protocol.records",
    "policy.records.Refused": "protocol.records.DeltaRefused",
    "policy.events": "protocol.coordinator.events",
    "policy.state": "protocol.coordinator.state",
    "policy.gathering": "protocol.new_term.gathering",
    "policy.offers": "protocol.new_term.events",
    "policy.offers.Lost": E + "Disconnected",
    "policy.offers.Arrived": "protocol.new_term.events.AnchorArrived",
    "policy.offers.Tick": E + "Timer",
    "policy.events.Hello": M + "Hello",
    "policy.events.Report": M + "Report",
    "policy.events.Goodbye": M + "Goodbye",
    "wire.messages": "protocol.messages",
    "config.RunConfig": "config.run.RunConfig",
    "config.ModelConfig": "config.model.ModelConfig",
    "config.DataConfig": "config.data.DataConfig",
    "config.InnerConfig": "config.inner.InnerConfig",
    "config.OuterConfig": "config.outer.OuterConfig",
    "config.SyncConfig": "config.sync.SyncConfig",
}
"""Old module or class to new one: {"policy.events.AskTake": "protocol.messages.Ask"}.
The longest that fits counts."""
FIELDS: Mapping[str, Mapping[str, str | None]] = {
    "policy.events.Goodbye": {"said": "text"},
    "policy.state.PolicyConfig": {
        "awaits_alike": "grace_window",
        "scale_partial_merges": "partial_merges",
    },
}
"""By old class, old field to new one; None: there is no such field any more."""


def _said(value: Value, call: Call) -> Value:
    """An event that was a message and its sender at once."""
    if "island" not in value:
        return value
    who = {name: value.pop(name) for name in ("island", "session")}
    return {"": E + "Said", **who, "message": value}


def _heard(value: Value, call: Call) -> Value:
    report = {"": M + "Report", "phase": "training", "steps": 0, "step_seconds": 0.0}
    return {**value, "": E + "Said", "message": report}


def _offered(value: Value, call: Call) -> Value:
    differences = value.pop("differences")
    more = {"fingerprint": "", "tokens_per_step": 1}
    hello = {**value, "": M + "Hello", **more}
    offered = {"": "protocol.new_term.events.Offered", "hello": hello}
    return {**offered, "differences": differences}


def _chosen(value: Value, call: Call) -> Value:
    """Two settings that were flags of their own are those of the config."""
    if isinstance(value["grace_window"], bool):
        value["grace_window"] = "alike" if value["grace_window"] else "overlap"
        value["partial_merges"] = "scaled" if value["partial_merges"] else "full"
    return value


REWRITES: Mapping[str, Rewrite] = {
    "protocol.coordinator.state.PolicyConfig": _chosen,
    M + "Report": _said,
    M + "Goodbye": _said,
    "protocol.new_term.events.Heard": _heard,
    "protocol.new_term.events.Offer": _offered,
}

TOLD = {
    M + "TakeRequest": "AskTake",
    M + "ResendRequest": "AskResend",
    M + "TakeVerdict": "TellVerdict",
    M + "Granted": "Grant",
    M + "Progress": "Progress",
    M + "Stop": "StopStepping",
    M + "MayLeave": "LetGo",
}
"""Messages to the effects that they were."""


def _effects(call: Call) -> Sequence[Any]:
    return call.result[1]


def _island(session: str, call: Call) -> str:
    """Return the island of a session: the event's, or one before or after it."""
    event = call.arguments[2]
    event = getattr(event, "hello", event)
    if getattr(event, "session", None) == session:
        return event.island
    for state in (call.arguments[1], call.result[0]):
        for name, island in getattr(state, "islands", {}).items():
            if island.session == session:
                return name
        for name, member in getattr(state, "members", {}).items():
            if member.offer.session == session:
                return name
    raise KeyError(session)


def _told(value: Value, call: Call) -> Value | list[Value]:
    """A message that is told, as the effect that it was."""
    session, message = value["session"], value["message"]
    if isinstance(message, list):
        return []  # Of a publish: see `_publish`.
    fields = {name: item for name, item in message.items() if name}
    who = {"island": _island(session, call)}
    if message[""] in TOLD:
        return {"": E + TOLD[message[""]], **who, **fields}
    who["session"] = session
    match message[""].removeprefix(M):
        case "Welcome" if call.name == "new_term.step":
            assert (fields.pop("term"), fields.pop("versions")) == (0, [])
            return {"": "protocol.new_term.events.Admit", **who}
        case "AnchorRequest":
            return {"": "protocol.new_term.events.Ask", **who, **fields}
        case "Welcome":
            assert fields.pop("run_id") == call.arguments[0].run_id
            assert fields.pop("term") == fields["versions"][0]["term"]
            return {"": E + "Welcome", **who, **fields}
        case "Refused":
            return {"": E + "Refuse", **who, **fields}
    return []  # Finished: see `_persisted`.


def _sessions(call: Call) -> set[str]:
    """Return the sessions of islands that had not ended before the event."""
    islands = call.arguments[1].islands.values()
    return {island.session for island in islands if island.status != "gone"}


def _publish(value: Value, call: Call) -> Value:
    """A commit and what each island is told of it were one effect. Verdicts of islands
    that have ended went nowhere."""
    merged = next(
        e.record
        for e in _effects(call)
        if getattr(getattr(e, "record", None), "fragment", None) == value["fragment"]
        and hasattr(e.record, "verdicts")
    )
    told = {
        e.session: (e.message.tick, e.message.verdict, e.message.reason)
        for e in _effects(call)
        if hasattr(e, "message") and type(e.message).__name__ == "Published"
    }
    assert told == {
        island.session: merged.verdicts.get(name, (-1, "none", ""))
        for name, island in call.arguments[1].islands.items()
        if island.status != "gone"
    }
    verdicts = {name: list(verdict) for name, verdict in merged.verdicts.items()}
    return {**value, "": E + "Publish", "verdicts": verdicts}


def _persisted(value: Value, call: Call) -> Value | list[Value]:
    """The end of the run was an effect, not a message to each."""
    if value["record"][""] != "protocol.records.Finished":
        return value
    told = {
        e.session
        for e in _effects(call)
        if hasattr(e, "message") and type(e.message).__name__ == "Finished"
    }
    assert told == _sessions(call)
    return [value, {"": E + "Finish"}]


def _noted(value: Value, call: Call) -> Value | list[Value]:
    """Rewrite a note that only the shell wrote."""
    shell = value["record"][""] == "protocol.records.TurnedAway"
    return [] if shell else value


def _postponed(value: Value, call: Call) -> Value:
    island = _island(value["session"], call)
    return {"": value.pop(""), "island": island, **value}


NEW_RESULTS: Mapping[str, Rewrite] = {
    E + "Tell": _told,
    E + "Commit": _publish,
    E + "Persist": _persisted,
    E + "Note": _noted,
    E + "Drop": lambda value, call: {
        "": E + "DropDelta",
        **{name: item for name, item in value["delta"].items() if name},
    },
    # What a new incarnation frees was the shell's doing.
    E + "Forget": lambda value, call: [],
    # What makes no move was not said before.
    E + "Ignored": lambda value, call: [],
    M + "Published": lambda value, call: [],
    "protocol.new_term.events.Postpone": _postponed,
}


def _books(versions: Sequence[Any], rule: Any) -> Any:
    from diloco_jax.core.adopt import RULES
    from diloco_jax.protocol.island.books import Books

    named = isinstance(rule, str)
    facts = RULES.find(rule) if named else SimpleNamespace(**rule.fields)
    return Books(versions, facts)


def _pace(run: Any, goal: Any, warm: bool = False) -> Any:
    from diloco_jax.island.pace import Pace
    from diloco_jax.protocol.island.boundary import Goal

    if isinstance(goal, int):
        goal = Goal(total_tokens=run.total_tokens, tokens_per_step=goal)
    return Pace(run, goal, warm=warm)


def _share_done(pace: Any, *facts: int) -> float:
    return pace._goal.share_done(*facts)


REPLACED: Mapping[str, Callable[..., Any]] = {
    "Books.__init__": _books,
    "Pace.__init__": _pace,
    "Pace.share_done": _share_done,
}
"""Called instead of a function, a class or a method, with its arguments."""


class Hooked(NamedTuple):
    """A class all of whose public methods and properties are recorded, as far as they
    are called from outside. ports: parameters of its constructor that it calls; these
    calls are recorded, too."""

    places: tuple[str, ...]
    ports: tuple[str, ...] = ()


FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "step": (
        "protocol.coordinator.decide.step",
        "policy.policy.step",
    ),
    "next_deadline": (
        "protocol.coordinator.decide.next_deadline",
        "policy.policy.next_deadline",
    ),
    "initial": ("protocol.coordinator.state.initial", "policy.state.initial"),
    "recover": ("protocol.coordinator.recovery.recover", "policy.recovery.recover"),
    "new_term.begin": ("protocol.new_term.gathering.begin", "policy.gathering.begin"),
    "new_term.step": ("protocol.new_term.gathering.step", "policy.gathering.step"),
    "new_term.next_deadline": (
        "protocol.new_term.gathering.next_deadline",
        "policy.gathering.next_deadline",
    ),
    "new_term.first_state": (
        "protocol.new_term.gathering.first_state",
        "policy.gathering.first_state",
    ),
}
HALF = "protocol.island."
# Where these were before, they had other arguments: of what they decided then, calls of
# books and pace are compared.
CLASSES: Mapping[str, Hooked] = {
    "Conversation": Hooked((HALF + "conversation.Conversation",)),
    "Fetching": Hooked((HALF + "fetching.Fetching",)),
    "Reporting": Hooked((HALF + "reporting.Reporting",)),
    "Ahead": Hooked((HALF + "decision.Ahead",)),
    "Pace": Hooked(("island.pace.Pace",)),
    "Books": Hooked((HALF + "books.Books", "island.books.Books")),
    "Boundary": Hooked(
        (HALF + "boundary.Boundary",),
        ports=("arrays", "incoming", "outgoing", "data"),
    ),
}
EVENTS = ("step", "new_term.step")
"""Functions whose calls are events, and whose results are effects."""
STATES = (
    "protocol.coordinator.state.State",
    "protocol.new_term.gathering.Gathering",
    "policy.state.State",
    "policy.gathering.Gathering",
)
"""Classes remembered between calls, under all names they have had. They are never
compared, only handed on."""
CONSTANTS = (
    "protocol.coordinator.state.PolicyConfig",
    "policy.state.PolicyConfig",
    "config.run.RunConfig",
    "config.RunConfig",
)
"""Classes that are the same in many calls and written once, under all names."""
PLAY_SEED = ("simulation.faults.play.play_seed",)
LOAD_CONFIG = ("config.loading.load_config", "loading.load_config")
OVERRIDES: Mapping[str, str] = {}
"""Options of `diloco emulate`, old to new, for emulations of this checkout."""
