"""The site's pages about formats: the wire's messages, and the tape's lines.

Every table is made of the msgspec types that encode and decode, and of the constants
that bound them.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import typing
from collections.abc import Iterable
from typing import Any

from site_structs import Struct, rows, section

from diloco_jax.config.options import paragraph
from diloco_jax.coordinator import journal
from diloco_jax.observability.tape import SEGMENT_BYTES
from diloco_jax.protocol import messages, records
from diloco_jax.wire import bulk, errors
from diloco_jax.wire.server import SERVICE

METHODS: dict[str, tuple[str, str, str]] = {
    "Control": (
        "a stream: Hello, then Report and at last Goodbye",
        "a stream: Welcome, then whatever the coordinator decides",
        "the island itself",
    ),
    "Status": ("nothing", "the status as JSON", "any certificate"),
    "Config": ("nothing", "the run's config as JSON", "any certificate"),
    "Steer": ("Steer", "what changed, as JSON", "an operator"),
    "Profile": ("ProfileOrder", "where the trace will be, as JSON", "an operator"),
    "Keep": ("CycleRequest", "the cycle that is kept, as JSON", "an operator"),
}
"""Methods of the gRPC service: what is asked, the answer, and who may ask."""

LIFE = """sequenceDiagram
    participant I as island
    participant C as coordinator
    I->>C: Hello
    C->>I: Welcome
    I->>C: FetchRequest, for each fragment (bulk)
    C->>I: FetchStart and the anchor (bulk)
    C->>I: Granted: data to train on
    loop as long as it trains
        I->>C: Report: steps, records, measures
        C->>I: Progress
    end
    C->>I: TakeRequest
    I->>C: UploadStart and the delta (bulk), Report of the take
    C->>I: Published: verdict and new version
    I->>C: FetchRequest for that version (bulk)
    C->>I: Stop, once the run has its tokens
    C->>I: TakeRequest, for the flush
    C->>I: Finished
    I->>C: Goodbye"""
"""Order of the messages, as a diagram of mermaid."""

WIRE_GROUPS: tuple[tuple[str, str, Any], ...] = (
    (
        "From an island",
        "On the control stream, MessagePack, one message each.",
        messages.FromIsland,
    ),
    ("From the coordinator", "On the same stream.", messages.FromCoordinator),
    (
        "From an operator",
        "The requests of the methods Steer and Profile.",
        messages.Steer | messages.ProfileOrder,
    ),
    (
        "Requests for bulk",
        "One opens each transfer on the bulk port. The bytes of an upload follow its "
        "request.",
        bulk.Request,
    ),
    (
        "Answers on the bulk port",
        "The bytes of a fetch, or of a kept file, follow the answer.",
        bulk.Reply,
    ),
)
TAPE_GROUPS: tuple[tuple[str, str, Any], ...] = (
    (
        "Durable lines",
        "They are in the coordinator's log, too, and a restart reads them back from "
        "there. A line is on disk before anybody can see its effect.",
        records.Durable,
    ),
    (
        "Noted lines",
        "The protocol writes them for replay and people. Nothing recovers from them.",
        records.Noted,
    ),
    (
        "The coordinator's own notes",
        "What a coordinator tells of itself, of its merges and of those who come.",
        journal.Note,
    ),
)


def wire() -> str:
    """Return the page about messages, frames, and their limits."""
    return _page(
        f"""
        # Wire protocol

        Write a peer, read a capture, or set up a firewall: what is said between an
        island and its coordinator, made of the types that encode it.

        A coordinator has two ports. Control is gRPC at the port of its address. Bulk
        (deltas, publishes, kept files) is a TCP socket at the next port. Both use
        mutual TLS ([security](../docs/security.md)).

        ## An island's life

        ```mermaid
        {textwrap.indent(LIFE, " " * 8).strip()}
        ```

        ## Control

        The service is `{SERVICE}`. Messages are MessagePack maps; `type` holds the
        name that stands as a heading here. Unknown types, missing fields and values
        out of range end the session. A message to the coordinator has at most
        {bulk.MAX_CONTROL_BYTES >> 10} KiB, any answer at most
        {bulk.MAX_ANSWER_BYTES >> 20} MiB. What one island may send in a second:
        [security](../docs/security.md).

        {rows("method", "request", "answer", "who may ask", of=_methods())}

        A failed call ends with a status of gRPC. The same errors are the `kind` of a
        Failure on the bulk port.

        {rows("error", "status", "meaning", of=_errors())}

        ## Bulk

        A connection carries one transfer after the other. Both kinds of frames have
        little-endian headers.

        {rows("frame", "magic", "header", "holds", of=_frames())}

        - **Upload**: UploadStart, chunks; answered by UploadDone or Failure.
        - **Fetch**: FetchRequest; answered by FetchStart and chunks, or Failure.
        - **Kept file**: CycleRequest; answered by KeptStart and chunks, or Failure.
        - An end that sends anything in the middle of a transfer ends it.
        - A chunk that is damaged or out of order ends the transfer. A fetch goes on
          from the last whole chunk, over a new connection.
        - Payloads are the encoded tiles of a fragment in the plan's order
          ([codecs](../docs/extending.md#a-codec)), or f32 for an anchor.

        With `placement.workers` above 1, uploads and fetches go to the worker of their
        fragment (`Welcome.workers`).
        """,
        WIRE_GROUPS,
        "[Tape format](tape.md): what is written of all this.",
    )


def tape() -> str:
    """Return the page about the lines of a tape."""
    return _page(
        f"""
        # Tape format

        Read a run's tape with a program of your own, and check that nobody changed it:
        every kind of line, made of the types that write it.

        `tape.jsonl` in the workdir has one JSON object a line. A file of
        {SEGMENT_BYTES >> 20} MiB is put aside as `tape.000001.jsonl` and so
        on; `cat tape.*.jsonl tape.jsonl` is the whole.

        {rows("field of every line", "what it is", of=_common())}

        `diloco_jax.observability.tape.read_tape(PATH)` yields the lines, checks the
        chain and names the first line that does not follow. A field that has its
        default is left out. A version is `[term, number]`; steps count from 0 within an
        incarnation, and their intervals are half-open.

        What a run's numbers are: [metrics and summary](../docs/metrics.md). Which
        entries tell where a delta waits:
        [a slow island](../docs/watching.md#an-island-is-slow-or-seldom-merged).
        """,
        TAPE_GROUPS,
        "[Repeat a recorded run](../docs/replay.md).",
    )


def structs_of(hint: Any) -> list[Struct]:
    """Return the members of a union of structs, in their order."""
    return list(typing.get_args(hint)) or [hint]


def _page(text: str, groups: Iterable[tuple[str, str, Any]], then: str) -> str:
    parts = [re.sub(r"^ {8}", "", text, flags=re.M).strip(), ""]
    told: list[Struct] = []
    named: list[type] = []
    for title, about, hint in groups:
        parts += [f"## {title}", "", about, ""]
        for struct in structs_of(hint):
            told.append(struct)
            parts += section(struct, named)
    parts += ["## Values", "", "What the tables above name.", ""]
    for value in named:  # It grows while values name others.
        if value not in told:
            parts += section(value, named)
    return "\n".join([*parts, f"**Next:** {then}", ""])


def _methods() -> list[tuple[str, ...]]:
    return [(f"`{name}`", *told) for name, told in METHODS.items()]


def _errors() -> list[tuple[str, ...]]:
    found = []
    for kind in (
        errors.Refused,
        errors.Busy,
        errors.VersionGone,
        errors.RemoteProtocolError,
        errors.SecurityError,
        errors.ConnectionLost,
    ):
        status, _ = errors.status_of(_made(kind))
        meaning = paragraph(inspect.getdoc(kind).split("\n\n")[0])
        found.append((f"`{kind.__name__}`", f"`{status.name}`", meaning))
    return found


def _made(kind: type[errors.WireError]) -> errors.WireError:
    return kind("", "") if kind is errors.Refused else kind("")


def _frames() -> list[tuple[str, ...]]:
    return [
        (
            "message",
            f"`{bulk.MESSAGE_MAGIC.decode()}`",
            f"{bulk.MESSAGE_HEADER_BYTES} bytes: magic, length u32",
            f"MessagePack, at most {bulk.MAX_MESSAGE_BYTES >> 20} MiB",
        ),
        (
            "chunk",
            f"`{bulk.MAGIC.decode()}`",
            f"{bulk.HEADER_BYTES} bytes: magic, XXH3-64 of its bytes u64, "
            f"their offset in the whole payload u64, length u32",
            f"at most {bulk.CHUNK_BYTES >> 20} MiB of payload",
        ),
    ]


def _common() -> list[tuple[str, str]]:
    return [
        ("`kind`", "the name that stands as a heading here"),
        ("`time`", "unix seconds of the coordinator's clock"),
        (
            "`prev`",
            "first 16 hex digits of the SHA-256 of the line before, without its "
            "newline; empty on the first line",
        ),
    ]
