"""What a refactoring renamed: the one file to edit before old and new are compared.

A recording is in the words of the commit that made it. Replay brings every recorded
value into the words of this checkout, in this order:

1. `NAMES` renames modules and classes, `FIELDS` the fields of a class;
2. `REWRITES` is for whatever is more than a new name, such as an effect that became a
   message: a function by *new* class name, from the recorded value to one or more;
3. `NEW_RESULTS` is the same for the values that this checkout returns, where both
   sides can only meet in the middle (one message to each island for one effect).

`FUNCTIONS` and `CLASSES` say what is recorded and replayed: by a name that stays, the
place where the other commit has it; `NAMES` holds for places, too. Something that is
not here any more is listed as not compared, unless `REPLACED` has a function that does
as it did. All names are without `diloco_jax.`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    """What a rewrite may look at: the call as this checkout did it."""

    name: str
    arguments: Sequence[Any]
    result: Any


Value = dict[str, Any]
"""An object as JSON: its fields, and module and name of its class at the key ""."""
Rewrite = Callable[[Value, Call], Value | list[Value]]

NAMES: Mapping[str, str] = {}
"""Old package, module, class or function to new one, as in {"policy": "protocol",
"policy.events.AskTake": "protocol.messages.TakeRequest"}; the longest that fits."""
FIELDS: Mapping[str, Mapping[str, str | None]] = {}
"""By old class, old field to new one; None: there is no such field any more."""
REWRITES: Mapping[str, Rewrite] = {}
NEW_RESULTS: Mapping[str, Rewrite] = {}
REPLACED: Mapping[str, Callable[..., Any]] = {}
"""Called instead of a function, a class or a method, with its arguments."""


class Hooked(NamedTuple):
    """A class all of whose public methods and properties are recorded, as far as they
    are called from outside. ports: parameters of its constructor that it calls; these
    calls are recorded, too."""

    place: str
    ports: tuple[str, ...] = ()


FUNCTIONS: Mapping[str, str] = {
    "step": "policy.policy.step",
    "next_deadline": "policy.policy.next_deadline",
    "initial": "policy.state.initial",
    "recover": "policy.recovery.recover",
    "new_term.begin": "policy.gathering.begin",
    "new_term.step": "policy.gathering.step",
    "new_term.next_deadline": "policy.gathering.next_deadline",
    "new_term.first_state": "policy.gathering.first_state",
}
CLASSES: Mapping[str, Hooked] = {
    "Mailbox": Hooked("island.mailbox.Mailbox"),
    "Inbound": Hooked("island.network.inbound.Inbound", ports=("targets",)),
    "LiveDecisions": Hooked("island.decisions.LiveDecisions", ports=("save_due",)),
    "Ahead": Hooked("island.decisions.Ahead"),
    "Pace": Hooked("island.pace.Pace"),
    "Books": Hooked("island.books.Books"),
    "Boundary": Hooked(
        "island.boundary.Boundary", ports=("arrays", "data", "outgoing")
    ),
}
EVENTS = ("step", "new_term.step")
"""Functions whose calls are events, and whose results are effects."""
STATES = ("policy.state.State", "policy.gathering.Gathering")
"""Classes of what is remembered between calls: not compared, only handed on."""
CONSTANTS = ("policy.state.PolicyConfig", "config.RunConfig")
"""Classes of what is the same in many calls, and written once."""
PLAY_SEED = "simulation.faults.play.play_seed"
LOAD_CONFIG = "loading.load_config"
OVERRIDES: Mapping[str, str] = {}
"""Options of `diloco emulate`, old to new, for emulations of this checkout."""
