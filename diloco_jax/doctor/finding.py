"""The findings of the checks of this machine."""

from __future__ import annotations

import enum

import msgspec

from diloco_jax.errors import ConfigError


class Level(enum.StrEnum):
    """Weight of a finding."""

    OK = "ok"
    NOTE = "note"
    """A run works, and is slower or less safe than it could be."""
    PROBLEM = "problem"
    """Some command fails here."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    what: str
    level: Level
    found: str
    remedy: str = ""
    """The thing to do about it; empty where nothing needs to be done."""


def ok(what: str, found: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(what=what, level=Level.OK, found=found)


def note(what: str, found: str, remedy: str) -> Finding:
    """Return a finding that could be better."""
    return Finding(what=what, level=Level.NOTE, found=found, remedy=remedy)


def problem(what: str, found: str, remedy: str) -> Finding:
    """Return a finding that keeps some command from working."""
    return Finding(what=what, level=Level.PROBLEM, found=found, remedy=remedy)


def refused(what: str, error: ConfigError) -> Finding:
    """Return the problem that commands refuse, with the end of the message as its
    remedy."""
    found, _, remedy = str(error).rpartition("; ")
    return problem(what, found, remedy)
