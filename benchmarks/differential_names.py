"""What a refactoring renamed: the one file to edit before old and new are compared.

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
from typing import Any, NamedTuple


class Call(NamedTuple):
    """What a rewrite may look at: the call as this checkout did it."""

    name: str
    arguments: Sequence[Any]
    result: Any


Value = dict[str, Any]
"""An object as JSON: its fields, and its class (module.Class, without `diloco_jax.`)
at the key ""."""
Rewrite = Callable[[Value, Call], Value | list[Value]]

NAMES: Mapping[str, str] = {}
"""Old module or class to new one: {"policy.events.AskTake": "protocol.messages.Ask"}.
The longest that fits counts."""
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

    places: tuple[str, ...]
    ports: tuple[str, ...] = ()


FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "step": ("policy.policy.step",),
    "next_deadline": ("policy.policy.next_deadline",),
    "initial": ("policy.state.initial",),
    "recover": ("policy.recovery.recover",),
    "new_term.begin": ("policy.gathering.begin",),
    "new_term.step": ("policy.gathering.step",),
    "new_term.next_deadline": ("policy.gathering.next_deadline",),
    "new_term.first_state": ("policy.gathering.first_state",),
}
CLASSES: Mapping[str, Hooked] = {
    "Mailbox": Hooked(("island.mailbox.Mailbox",)),
    "Inbound": Hooked(("island.network.inbound.Inbound",), ports=("targets",)),
    "LiveDecisions": Hooked(("island.decisions.LiveDecisions",), ports=("save_due",)),
    "Ahead": Hooked(("island.decisions.Ahead",)),
    "Pace": Hooked(("island.pace.Pace",)),
    "Books": Hooked(("island.books.Books",)),
    "Boundary": Hooked(
        ("island.boundary.Boundary",), ports=("arrays", "data", "outgoing")
    ),
}
EVENTS = ("step", "new_term.step")
"""Functions whose calls are events, and whose results are effects."""
STATES = ("policy.state.State", "policy.gathering.Gathering")
"""What is remembered between calls: never compared, only handed on. All names that
these classes have had."""
CONSTANTS = ("policy.state.PolicyConfig", "config.RunConfig")
"""What is the same in many calls, and written once. Likewise."""
PLAY_SEED = ("simulation.faults.play.play_seed",)
LOAD_CONFIG = ("loading.load_config",)
OVERRIDES: Mapping[str, str] = {}
"""Options of `diloco emulate`, old to new, for emulations of this checkout."""
