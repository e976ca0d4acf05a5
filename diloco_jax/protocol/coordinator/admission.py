"""Admission: which islands are let in, and the messages to those that are not.

An island enters as a new incarnation, as a known one that returns, or as one that
joined before the coordinator lost its state. Its name is in the config, or an operator
let it in (`steering.py`).
"""

from __future__ import annotations

from msgspec.structs import replace

from diloco_jax.protocol.coordinator import claims
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.messages import Hello, Refused
from diloco_jax.protocol.values import LEAD, lead_of


def refusal(config: PolicyConfig, state: State, event: Hello) -> Refused | None:
    """Return the reason to refuse an island; None if it may join."""
    code = message = ""
    known = state.islands.get(event.island)
    resumes = known is not None and known.incarnation == event.incarnation
    term = state.term
    if event.run_id not in ("", config.run_id):
        code = "run_id"
        message = (
            f"this coordinator serves run {config.run_id}, the island belongs to run "
            f"{event.run_id}; check the coordinator's address, or start the island "
            f"again"
        )
    elif event.fingerprint != config.fingerprint:
        code = "config"
        message = (
            f"the run's config has fingerprint {config.fingerprint}, the island's "
            f"{event.fingerprint}; start it with the run's config.json"
        )
    elif message := unknown(config, event.island, state.admitted):
        code = "unknown_island"
    elif message := _other_batch(config, event) or _other_lead(config, event):
        code = "config"
    elif known is not None and event.incarnation < known.incarnation:
        code = "fenced"
        message = (
            f"island {event.island!r} is incarnation {known.incarnation} now, this "
            f"is {event.incarnation}; stop this process. If none of yours is "
            f"{known.incarnation}, its key is stolen: revoke that, and start this one "
            f"with a new key and --incarnation {known.incarnation + 1}"
        )
    elif state.phase == "done" or (
        state.phase != "running" and not resumes and not is_carrying(state, event)
    ):
        code = "finished"
        message = (
            f"the run is {state.phase}: it has its {config.total_tokens} tokens; for "
            f"more, start its coordinator with --resume and a higher total_tokens"
        )
    elif known is not None and resumes:
        if known.status == "gone":
            code = "fenced"
            message = (
                f"incarnation {event.incarnation} of island {event.island!r} has "
                f"ended; start it again with incarnation {event.incarnation + 1}"
            )
        elif known.session != event.session:
            code = "name_in_use"
            message = (
                f"the name {event.island!r} is in use by another process with the "
                f"same incarnation {event.incarnation}; choose another name, or "
                f"replace that process by starting incarnation {event.incarnation + 1}"
            )
    elif known is not None and (message := _fruitless(config, known)):
        code = "no_progress"
    elif event.term >= term:
        code = "other_term"
        message = (
            f"incarnation {event.incarnation} of island {event.island!r} was let in by "
            f"another coordinator of this run, in its term {event.term}, whose state "
            f"is lost; this one, in term {term}, does not know it; start it again with "
            f"incarnation {event.incarnation + 1}"
        )
    elif is_carrying(state, event) and (wrong := claims.wrong_carried(state, event)):
        code = "claims"
        message = wrong_claim(event.island, event.incarnation, wrong)
    if not code:
        return None
    return Refused(code=code, message=message)


def unknown(config: PolicyConfig, name: str, also: tuple[str, ...] = ()) -> str:
    """Explain why an island of that name is not let in; empty if it may be. also:
    those that an operator let in."""
    if config.admitted is None or name in config.admitted or name in also:
        return ""
    return (
        f"the coordinator's config has no island {name!r}, only "
        f"{', '.join(map(repr, (*config.admitted, *also)))}; let it in with `diloco "
        f"admit {name} --coordinator HOST:PORT`, or add it there to islands, or its "
        f"name to placement.admit, and start the coordinator again: the run goes on"
    )


def with_admitted(state: State, name: str, *, admitted: bool) -> State:
    """Return the state with an island let in by an operator, or no longer; recovery
    applies this too."""
    others = tuple(other for other in state.admitted if other != name)
    return replace(state, admitted=(*others, name) if admitted else others)


def wrong_claim(name: str, incarnation: int, wrong: str) -> str:
    """Return the message to an island whose claim cannot be true."""
    return (
        f"incarnation {incarnation} of island {name!r} claims the impossible: {wrong}; "
        f"its unmerged steps are lost, start it again with incarnation "
        f"{incarnation + 1}"
    )


def _fruitless(config: PolicyConfig, known: Island) -> str:
    """Explain why no further incarnation of the island is let in; empty if it may be.
    The last one counts if it was not heard to end."""
    unheard = known.status != "gone" and not known.steps
    failures = known.fruitless + unheard
    if not config.fruitless_starts or failures < config.fruitless_starts:
        return ""
    return (
        f"island {known.name!r} failed {failures} times in a row before its first step "
        f"(placement.fruitless_starts = {config.fruitless_starts}); its logs say why. "
        f"Put that right, and start the coordinator again with a higher number: the "
        f"run goes on"
    )


def _other_batch(config: PolicyConfig, event: Hello) -> str:
    if config.admitted is None:
        return ""
    sequences = config.admitted.get(event.island) or event.sequences_per_step
    tokens = sequences * config.sequence_length
    if (event.sequences_per_step, event.tokens_per_step) == (sequences, tokens):
        return ""
    return (
        f"island {event.island!r} says that its steps have {event.sequences_per_step} "
        f"sequences and {event.tokens_per_step} tokens, but the coordinator's config "
        f"(islands.{event.island}.batch_size, sequence_length) says {sequences} "
        f"and {tokens}; start both with one config"
    )


def _other_lead(config: PolicyConfig, event: Hello) -> str:
    hosts = config.hosts.get(event.island)
    if hosts is None and event.lead in (0, LEAD):
        return ""  # The config does not say how many hosts it has.
    lead = lead_of(hosts or 1)
    if event.lead == lead:
        return ""
    return (
        f"island {event.island!r} says that its takes come {event.lead} boundaries "
        f"late, but it has {hosts or 1} hosts in the coordinator's config "
        f"(islands.{event.island}.hosts), with which that is {lead}; start both with "
        f"one config"
    )


def ahead(config: PolicyConfig, state: State, event: Hello) -> str:
    """Explain in which way the island knows of a later state of this run; empty if it
    does not. Versions are durable before any island has them."""
    if event.run_id != config.run_id or unknown(config, event.island, state.admitted):
        return ""  # It is refused.
    if event.term > state.term:
        return f"in term {event.term}, and this coordinator in term {state.term}"
    for fragment, version in zip(state.fragments, event.versions, strict=False):
        if version > fragment.version:
            return (
                f"at version {tuple(version)} of fragment {fragment.index}, and this "
                f"coordinator at {tuple(fragment.version)}"
            )
    return ""


def is_carrying(state: State, event: Hello) -> bool:
    """Tell whether the island joined before the coordinator lost its state."""
    return 0 < event.term < state.term
