"""An island and a coordinator that lost its state."""

import queue

import coordinator_says as says
import numpy as np
from link_support import WAIT_S, Coordinator, encoded, serve, wait_for_news

from diloco_jax.protocol import messages
from diloco_jax.protocol.values import Version
from diloco_jax.wire.errors import Busy, Refused


def test_a_coordinator_that_lost_its_state_begins_a_new_term(
    stack, coordinator, link, mailbox, wanted
):
    assert mailbox.status().term == 1
    assert mailbox.decide().term == 0
    says.take(mailbox, 0, 3)
    coordinator.welcome_versions, coordinator.term = (), 0
    coordinator.server.stop(0.1)
    server, _ = serve(stack, coordinator, bind=coordinator.address)
    coordinator.hellos.get(timeout=WAIT_S)
    coordinator.hellos.get(timeout=WAIT_S)
    coordinator.session.send(messages.AnchorRequest(fragment=1))
    seen = [wait_for_news(mailbox)]
    while not seen[-1].anchors and len(seen) < 3:
        seen.append(wait_for_news(mailbox))  # The take that was asked for is news, too.
    assert seen[-1].anchors == (messages.AnchorRequest(fragment=1),)
    assert {decision.term for decision in seen} == {0}
    assert mailbox.status().term == 1
    successor = Coordinator()
    successor.welcome_versions, successor.term = (Version(2, 4),), 2
    server.hand_over(successor)
    successor.hellos.get(timeout=WAIT_S)
    assert wanted.get(timeout=WAIT_S) == (0, Version(2, 4), b"")
    assert mailbox.decide().term == 2
    status = mailbox.status()
    assert (status.term, status.run_id) == (2, "r")


def test_an_anchor_is_sent_ahead_and_once(coordinator, sender):
    coordinator.upload_errors = [Busy("later")]
    sender.put(0, 4, encoded(1.0))
    assert coordinator.failed.get(timeout=WAIT_S).tick == 4
    sender.put_anchor(0, Version(1, 7), encoded(2.0)[:1])
    uploads = [coordinator.uploads.get(timeout=WAIT_S) for _ in range(2)]
    by_version = {start.version: payload for start, payload in uploads}
    assert by_version == {
        None: np.ones(38, np.float32).tobytes(),
        Version(1, 7): np.full(32, 2.0, np.float32).tobytes(),
    }
    coordinator.upload_errors = [Refused("gathering", "not asked for")]
    sender.put_anchor(0, Version(1, 8), encoded(3.0)[:1])
    assert coordinator.failed.get(timeout=WAIT_S).version == Version(1, 8)
    sender.resend(messages.ResendRequest(fragment=0, tick=4))
    assert coordinator.uploads.get(timeout=WAIT_S)[0].tick == 4


def test_an_anchor_has_the_ticket_of_its_request(coordinator, sender):
    sender.permit(0, 4, b"of a take")
    sender.put_anchor(0, Version(1, 7), encoded(2.0)[:1], b"of the request")
    assert coordinator.uploads.get(timeout=WAIT_S)[0].ticket == b"of the request"


def test_a_delta_that_nobody_takes_holds_up_no_anchor_and_no_other_delta(
    sender, monkeypatch
):
    """A worker has lost fragment 0; the anchor for it comes by the same thread."""
    sent, tries = queue.SimpleQueue(), queue.SimpleQueue()

    def upload(start, payload):
        if (start.fragment, start.version) == (0, None):
            tries.put(start)
            raise Busy("fragment 0 was lost here")
        sent.put((start.fragment, start.version))
        return len(payload)

    monkeypatch.setattr(sender._transfers, "upload", upload)
    sender.put(0, 4, encoded(1.0))
    for _ in range(2):
        assert tries.get(timeout=WAIT_S).tick == 4
    sender.put(1, 5, encoded(2.0))
    assert sent.get(timeout=WAIT_S) == (1, None)
    sender.put_anchor(0, Version(1, 7), encoded(2.0)[:1])
    assert sent.get(timeout=WAIT_S) == (0, Version(1, 7))
    assert tries.get(timeout=WAIT_S).tick == 4
    sender.forget(0, 4)
