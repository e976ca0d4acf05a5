"""Stripes of deltas of two fragments, for an inbox."""

from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout, plan_fragments
from diloco_jax.protocol.messages import DeltaKey
from diloco_jax.wire.bulk import UploadStart

KEY = DeltaKey("a", 1, 0, 7)


def layout(shape):
    (pieces,) = plan_fragments(
        {"x": shape}, {"x": ("embed",) * len(shape)}, 1
    ).fragments
    return PayloadLayout.of(get_codec("bf16"), pieces)


LAYOUTS = [layout((50,)), layout((64, 64))]  # 100 bytes; 2 x 2 tiles of 2048 bytes


def start(offset=0, length=100, total=100, **other):
    fields = {"island": "a", "incarnation": 1, "fragment": 0, "tick": 7, **other}
    return UploadStart(
        run_id="r", session="s", offset=offset, length=length, total=total, **fields
    )


def put(inbox, stripe, value):
    place = inbox.begin(stripe)
    place[:] = bytes([value]) * stripe.length
    return inbox.end(stripe, place)
