"""A ticket permits what the lead said, to whom it said it, and for as long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from diloco_jax.protocol.messages import (
    Published,
    ResendRequest,
    Stop,
    TakeRequest,
    TakeVerdict,
    Welcome,
)
from diloco_jax.protocol.tickets import (
    KEY_BYTES,
    Checker,
    Permit,
    make,
    of_anchor,
    stamped,
)
from diloco_jax.protocol.values import Version

KEY = bytes([1]) * KEY_BYTES
TAKE = Permit("r", "a", 3, 5, 77)
FETCH = TAKE._replace(of=Version(1, 7))
UNTIL = 2e9


@pytest.mark.parametrize("permit", [TAKE, FETCH])
def test_a_ticket_counts_until_its_end(permit) -> None:
    ticket = make(KEY, permit, UNTIL)
    check = Checker(KEY)
    assert check.flaw(ticket, permit, UNTIL - 1) == ""
    assert check.flaw(ticket, permit, UNTIL) == ""
    assert check.flaw(ticket, permit, UNTIL + 0.01) == "expired"


@given(
    st.builds(
        Permit,
        st.text(max_size=3),
        st.text(max_size=3),
        st.integers(0, 4),
        st.integers(0, 6),
        st.integers(0, 80) | st.builds(Version, st.integers(0, 80), st.integers(0, 8)),
    )
)
def test_a_ticket_permits_nothing_else(other: Permit) -> None:
    for permit in (TAKE, FETCH):
        flaw = Checker(KEY).flaw(make(KEY, permit, UNTIL), other, 0.0)
        assert flaw == ("" if other == permit else "forged")


def test_fields_do_not_run_together() -> None:
    ticket = make(KEY, TAKE._replace(run_id="ra", island=""), UNTIL)
    assert Checker(KEY).flaw(ticket, TAKE, 0.0) == "forged"


@given(st.binary(max_size=30))
def test_no_other_bytes_are_a_ticket(ticket: bytes) -> None:
    flaw = Checker(KEY).flaw(ticket, TAKE, 0.0)
    assert flaw == ("forged" if len(ticket) == 24 else "malformed")


@given(st.integers(0, 24 * 8 - 1))
def test_no_bit_of_it_may_change(bit: int) -> None:
    ticket = bytearray(make(KEY, TAKE, UNTIL))
    ticket[bit // 8] ^= 1 << bit % 8
    assert Checker(KEY).flaw(bytes(ticket), TAKE, 0.0) == "forged"


TOLD = [
    TakeRequest(fragment=5, tick=77),
    ResendRequest(fragment=5, tick=77),
    Published(fragment=5, version=Version(1, 7)),
    TakeVerdict(
        fragment=5, tick=70, verdict="pending", reason="", version=Version(1, 7)
    ),
]


@pytest.mark.parametrize("message", TOLD, ids=lambda message: type(message).__name__)
def test_a_message_has_the_ticket_for_what_it_asks_for(message) -> None:
    told = stamped(KEY, message, TAKE._replace(fragment=0, of=0), UNTIL)
    permit = TAKE if isinstance(message, TakeRequest | ResendRequest) else FETCH
    assert Checker(KEY).flaw(told.ticket, permit, UNTIL) == ""
    assert replace(told, ticket=b"") == message


def test_a_welcome_has_a_ticket_for_every_fragment() -> None:
    versions = (Version(1, 3), Version(1, 7))
    welcome = Welcome(run_id="r", term=1, resumed=False, versions=versions)
    told = stamped(KEY, welcome, TAKE, UNTIL)
    for fragment, (version, ticket) in enumerate(
        zip(versions, told.tickets, strict=True)
    ):
        permit = TAKE._replace(fragment=fragment, of=version)
        assert Checker(KEY).flaw(ticket, permit, UNTIL) == ""
    assert stamped(KEY, Stop(), TAKE, UNTIL) == Stop()


def test_a_fenced_incarnation_has_no_ticket_any_more() -> None:
    check = Checker(KEY)
    check.fence("a", 4)
    check.fence("a", 2)
    check.fence("b", 9)
    assert check.flaw(make(KEY, TAKE, UNTIL), TAKE, 0.0) == "fenced"
    later = TAKE._replace(incarnation=4)
    assert check.flaw(make(KEY, later, UNTIL), later, 0.0) == ""


def test_a_ticket_ends_by_the_clock_of_the_lead_that_made_it() -> None:
    """Machines have clocks of their own, which began at other times."""
    other = bytes([2]) * KEY_BYTES
    check = Checker(KEY, ahead_s=1e6)
    assert check.flaw(make(KEY, TAKE, UNTIL), TAKE, UNTIL + 1e6) == ""
    assert check.flaw(make(KEY, TAKE, UNTIL), TAKE, UNTIL + 1e6 + 1) == "expired"
    check.renew(other, ahead_s=-5.0)
    assert check.flaw(make(other, TAKE, UNTIL), TAKE, UNTIL - 4) == "expired"
    assert check.flaw(make(other, TAKE, UNTIL), TAKE, UNTIL - 5) == ""
    assert check.flaw(make(KEY, TAKE, UNTIL), TAKE, UNTIL + 1e6) == ""


def test_a_line_that_is_dialled_again_leaves_the_tickets_of_the_lead_before() -> None:
    other = bytes([2]) * KEY_BYTES
    check = Checker(KEY)
    for _ in range(3):
        check.renew(other)
    assert check.flaw(make(KEY, TAKE, UNTIL), TAKE, 0.0) == ""


def test_a_lead_that_slept_and_dials_again_has_tickets_that_count() -> None:
    """Its clock stood still meanwhile, so the worker's is further ahead."""
    check = Checker(KEY)
    slept_s = 100_000.0
    told = make(KEY, TAKE, UNTIL)
    assert check.flaw(told, TAKE, UNTIL + slept_s) == "expired"
    check.renew(KEY, ahead_s=slept_s)
    assert check.flaw(told, TAKE, UNTIL + slept_s) == ""
    assert check.flaw(told, TAKE, UNTIL + slept_s + 1) == "expired"


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="31 bytes, expected 32"):
        make(KEY[:31], TAKE, UNTIL)


def test_a_ticket_that_ends_early_permits_nothing() -> None:
    ticket, check = make(KEY, TAKE, UNTIL), Checker(KEY)
    assert check.flaw(ticket, TAKE, 1e9) == ""
    for length in range(len(ticket)):
        assert check.flaw(ticket[:length], TAKE, 1e9) == "malformed"
        assert check.flaw(ticket[length + 1 :], TAKE, 1e9) == "malformed"


def test_the_ticket_of_an_anchor_is_that_of_no_version() -> None:
    """Versions of a term begin with 0."""
    assert of_anchor(3) < Version(3, 0)
    assert of_anchor(3) > Version(2, 1 << 30)
