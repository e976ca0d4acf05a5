"""A reign is later than all before it on a disk, also after the mandate was made anew:
workers on other machines obey the lead with the largest number, which begins with its
reign."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from standby_parts import TIMING

from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.protocol.outposts import first_number, next_number, reign_of
from diloco_jax.protocol.standby import following, primary
from diloco_jax.protocol.standby.events import MandateRead, WriteMandate
from diloco_jax.protocol.standby.mandate import Mandate

AHEAD_S, UNIX_S = 92_786, 1_700_000_000


def begun(led: int) -> Mandate:
    """Return the mandate that A writes where there is none."""
    state = primary.seek(TIMING, "A", "r", "1", led=led)
    state, _ = primary.step(state, Timer(), 0.0)
    nothing = MandateRead(generation="", mandate=None)
    _, (write,) = primary.step(state, nothing, 0.1)
    assert isinstance(write, WriteMandate)
    return write.mandate


def taken_over(mandate: Mandate, led: int) -> Mandate:
    """Return the mandate that B writes in place of this one."""
    state = following.begin(TIMING, "B", empty=False, led=led)
    state, _ = following.step(state, Timer(), 0.0)
    ceded = replace(mandate, in_step="B", ceded=True)
    read = MandateRead(generation="1", mandate=ceded)
    _, (_, write) = following.step(state, read, 0.1)
    assert isinstance(write, WriteMandate)
    return write.mandate


def test_a_new_run_begins_with_reign_1_and_each_take_over_is_one_more() -> None:
    assert begun(led=0).reign == 1
    assert taken_over(begun(led=0), led=0).reign == 2
    assert taken_over(Mandate(run_id="r", holder="A", reign=5), led=2).reign == 6


@pytest.mark.parametrize("last", [(2, 0), (0, 2), (2, 5), (5, 2)])
def test_workers_obey_who_takes_over_a_mandate_that_was_made_anew(
    last: tuple[int, int],
) -> None:
    """It makes no difference who led last, nor that the clock of the next is behind.
    last: reigns of both disks."""
    of_a, of_b = (first_number(reign, UNIX_S) if reign else 0 for reign in last)
    mandate = begun(reign_of(of_a))
    of_a = next_number(of_a, first_number(mandate.reign, UNIX_S + 2 * AHEAD_S))
    mandate = taken_over(mandate, reign_of(of_b))
    of_b = next_number(of_b, first_number(mandate.reign, UNIX_S + AHEAD_S))
    assert of_b > of_a
    mandate = taken_over(mandate, reign_of(of_a))
    assert next_number(of_a, first_number(mandate.reign, UNIX_S)) > of_b


def test_numbers_of_leads_with_workers_on_their_machine_have_no_reign() -> None:
    assert reign_of(next_number(7, 1)) == 0
