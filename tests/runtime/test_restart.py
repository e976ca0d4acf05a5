"""A coordinator that was killed comes back from its workdir, and nothing goes back."""

from __future__ import annotations

import jax.numpy as jnp
from runtime_support import (
    PATIENCE_S,
    await_message,
    client,
    coordinator,
    hello,
    make_config,
    placed,
    report,
    took,
    upload_start,
)

from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.protocol import messages


def encoded_delta(store, fragment: int) -> bytes:
    """A delta of one value everywhere, in int8."""
    codec, pieces = get_codec("int8"), store.plan.fragments[fragment]
    arrays = [codec.encode(jnp.full(p.shape, 0.25)) for p in pieces]
    return bytes(PayloadLayout.of(codec, pieces).pack(arrays))


def anchors(store, versions) -> list[bytes]:
    sources = [store.fetch(f, version, None) for f, version in enumerate(versions)]
    return [b"".join(bytes(b) for b in source.buffers) for source in sources]


def test_a_killed_coordinator_comes_back_at_the_versions_it_published(text, tmp_path):
    config = placed(make_config(text, quorum=1), time_budget_s=PATIENCE_S)
    own = hello(config)
    with (
        coordinator(config, tmp_path, killed=True) as service,
        client(service.address) as island,
    ):
        stream = island.open_control(own)
        run_id, begun = stream.welcome.run_id, stream.welcome.versions
        first = anchors(service.holder.store, begun)
        stream.send(report(2))
        take = await_message(stream, messages.TakeRequest)
        stream.send(report(2, took(take, seq=1, steps=2)))
        payload = encoded_delta(service.holder.store, take.fragment)
        island.transfers.upload(upload_start(own, run_id, take, len(payload)), payload)
        published = await_message(stream, messages.Published)
        versions = [published.version, begun[1]]
        before = anchors(service.holder.store, versions)
        assert (take.fragment, before[0] == first[0]) == (0, False)

    with (
        coordinator(config, tmp_path, init=False) as service,
        client(service.address) as island,
    ):
        assert anchors(service.holder.store, versions) == before
        back = hello(config, run_id=run_id, phase="training", steps=2)
        stream = island.open_control(back)
        assert (stream.welcome.run_id, stream.welcome.resumed) == (run_id, True)
        assert list(stream.welcome.versions) == versions
        stream.send(report(4))
        assert await_message(stream, messages.TakeRequest).tick > take.tick
