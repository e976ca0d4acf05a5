"""The states of a primary and of a standby, and every legal move, as tables.

A primary's state says what the mandate may say of its standby. In `loading`, and from
`proving` to `parting`, nothing is visible that the standby has not answered for,
because the mandate may call it in step. docs/design/standby.md draws the tables.
"""

from __future__ import annotations

from typing import Literal

from diloco_jax.protocol.coordinator.machines import StateMachine

PrimaryState = Literal[
    "seeking",
    "loading",
    "alone",
    "copying",
    "proving",
    "naming",
    "in_step",
    "parting",
    "over",
]
StandbyState = Literal["apart", "dialled", "copying", "following", "claiming", "over"]

PRIMARY: StateMachine[PrimaryState] = StateMachine(
    "primary",
    {
        "seeking": {"win": "alone", "resume": "loading", "step down": "over"},
        "loading": {"show": "parting", "step down": "over"},
        "alone": {"attach": "copying", "step down": "over"},
        "copying": {"come near": "proving", "lose": "alone", "step down": "over"},
        "proving": {"catch up": "naming", "lose": "alone", "step down": "over"},
        "naming": {"confirm": "in_step", "lose": "parting", "step down": "over"},
        "in_step": {"lose": "parting", "step down": "over"},
        "parting": {"confirm": "alone", "step down": "over"},
        "over": {},
    },
)

STANDBY: StateMachine[StandbyState] = StateMachine(
    "standby",
    {
        "apart": {"dial": "dialled", "claim": "claiming", "retire": "over"},
        "dialled": {
            "be accepted": "copying",
            "lose": "apart",
            "claim": "claiming",
            "retire": "over",
        },
        "copying": {
            "finish": "following",
            "lose": "apart",
            "claim": "claiming",
            "retire": "over",
        },
        "following": {"lose": "apart", "claim": "claiming", "retire": "over"},
        "claiming": {"fail": "apart", "take over": "over"},
        "over": {},
    },
)

STANDBY_MACHINES: tuple[StateMachine[str], ...] = (PRIMARY, STANDBY)  # type: ignore[assignment]

GATED = ("loading", "proving", "naming", "in_step", "parting")
"""States in which only what the standby has answered for is visible."""

FOLLOWED = ("copying", "proving", "naming", "in_step")
"""States in which a standby follows, and is parted if it is silent. In the others it is
only the node that the mandate may still name."""
