"""Bounds of a control message; the decoder names the field that breaks one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from wire_support import hello, report

from diloco_jax.protocol import messages
from diloco_jax.protocol.messages import Record
from diloco_jax.wire import bulk
from diloco_jax.wire.bulk import decoded
from diloco_jax.wire.errors import RemoteProtocolError

NAN, INF = float("nan"), float("inf")


def decode(message: messages.Message, **changed: Any) -> Any:
    fields = {**msgspec.to_builtins(message), **changed}
    return decoded(bulk.from_island, msgspec.msgpack.encode(fields), "p")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("island", ""),
        ("island", "../../etc/x"),
        ("island", "a\nERROR it burns"),
        ("island", "a\n"),
        ("island", "a" * 65),
        ("session", "s" * 129),
        ("incarnation", -1),
        ("incarnation", 2**64 - 1),
        ("steps", 2**48 + 1),
        ("tokens_per_step", 0),
        ("tokens_per_step", 2**40 + 1),
        ("term", 2**20 + 1),
        ("step_seconds", NAN),
        ("step_seconds", INF),
        ("environment", {"x": msgspec.msgpack.Ext(1, b"")}),
        ("environment", {"x": {}}),
        ("environment", {"x": INF}),
        ("environment", {"x": "y" * (16 * 1024 + 1)}),
        ("environment", {str(i): i for i in range(65)}),
        ("environment", {1: 2}),
        ("island_config", {"x": b""}),
        ("run", {"a": {"b": {"c": {"d": 1}}}}),
        ("run", {"a": {"b": [[[1]]]}}),
        ("outstanding", [{"fragment": -1}]),
    ],
)
def test_a_hello_that_cannot_be_is_not_understood(field: str, value: Any) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"\$\.{field}|key in `\$"):
        decode(hello(), **{field: value})


LISTS: dict[str, tuple[list[Any], list[Any]]] = {
    "losses_by_source": (
        [1.5] * messages.MAX_SOURCES,
        [1.5] * (messages.MAX_SOURCES + 1),
    ),
    "short": (["disk", "memory"], ["disk", "memory", "disk"]),
}
"""Fields of measures that are lists: as long as they may be, and one longer."""
SCALARS = [field for field in messages.Measures.__struct_fields__ if field not in LISTS]


@pytest.mark.parametrize("field", LISTS)
def test_lists_of_measures_are_bounded_by_their_length(field: str) -> None:
    longest, too_long = LISTS[field]
    decode(report(1), measures={field: longest})
    refused = rf"length <= {len(longest)} - at `\$\.measures\.{field}`"
    with pytest.raises(RemoteProtocolError, match=refused):
        decode(report(1), measures={field: too_long})


@pytest.mark.parametrize("field", SCALARS)
def test_measures_are_bounded_and_only_losses_may_be_nan(field: str) -> None:
    whole = isinstance(getattr(messages.Measures(), field), int)
    for value in (-1, 2**63) if whole else (-1.0, NAN, INF, 1e300):
        measures = {field: value}
        if field in ("loss", "eval_loss", "watched_loss", "adoption_loss"):
            decode(report(1), measures=measures)
            continue
        with pytest.raises(RemoteProtocolError, match=rf"\$\.measures\.{field}"):
            decode(report(1), measures=measures)


def test_records_and_text_are_bounded() -> None:
    record = msgspec.to_builtins(Record(seq=1, kind="took", step=1))
    decode(report(1), records=[record] * messages.MAX_RECORDS)
    with pytest.raises(RemoteProtocolError, match=r"\$\.records"):
        decode(report(1), records=[record] * (messages.MAX_RECORDS + 1))
    for field, value in (("step", -1), ("seq", 2**60), ("start", -5), ("tick", -2)):
        with pytest.raises(RemoteProtocolError, match=rf"records\[0\]\.{field}"):
            decode(report(1), records=[{**record, field: value}])
    goodbye = messages.Goodbye(reason="failed", text="x" * messages.MAX_TEXT)
    assert decode(goodbye) == goodbye
    with pytest.raises(RemoteProtocolError, match=r"\$\.text"):
        decode(goodbye, text="x" * (messages.MAX_TEXT + 1))


def test_the_longest_report_fits_a_control_message() -> None:
    large = 2**48
    record = Record(
        seq=large,
        kind="reopened",
        step=large,
        fragment=1000,
        tick=large,
        start=large,
        stop=large,
        value=-(2**62),
    )
    longest = msgspec.structs.replace(
        report(large), records=(record,) * messages.MAX_RECORDS
    )
    assert len(bulk.encode(longest)) < bulk.MAX_CONTROL_BYTES
