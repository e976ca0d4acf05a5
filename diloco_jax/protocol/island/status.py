"""The one value that an island's hello and its reports are made of."""

from __future__ import annotations

import msgspec

from diloco_jax.protocol.messages import Measures
from diloco_jax.protocol.values import Outstanding, Phase, Version


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The loop posts the first fields, the conversation with the coordinator adds the
    others."""

    phase: Phase = "joining"
    steps: int = 0
    outstanding: tuple[Outstanding, ...] = ()
    versions: tuple[Version, ...] = ()
    """Versions of the anchors, as they are or are about to be."""
    measures: Measures = Measures()

    run_id: str = ""
    """The run that the island is in, known from its first welcome on."""
    term: int = 0
    """The newest term in which this process was welcomed; 0: none yet."""
    sequences_granted: int = 0
    records_through: int = 0
    """Records up to this number are acknowledged."""
    tokens: int = 0
    """Progress of the run, as last heard."""
    next_position: int = 0
    """Up to which data was granted to anybody, as far as was heard."""
