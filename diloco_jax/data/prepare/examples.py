"""The spans of text, learned or not, of a JSON object or a row of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

TURNS = {
    "chatml": "<|im_start|>{role}\n{content}<|im_end|>\n",
    "llama3": "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
    "gemma3": "<start_of_turn>{role}\n{content}<end_of_turn>\n",
}
"""Turns of a chat by the names of models that were trained on them."""
ROLES = {"gemma3": {"assistant": "model"}}
"""The name that such a model has for a role."""
ASSISTANT = "assistant"


class Passage(NamedTuple):
    """A part of a document. `learned`: predictions of its tokens count in the loss."""

    text: str
    learned: bool


class Example(NamedTuple):
    """A document.

    `ends`: the token that ends documents follows it. A chat has none, since its last
    turn has an end of its own.
    """

    spans: list[Passage]
    ends: bool = True


@dataclasses.dataclass(frozen=True)
class Reader:
    """Turn JSON objects and table rows into documents.

    An object has a text, or a prompt with a completion, or a list of messages, each
    with a role and a content. Every token of a text counts in the loss; otherwise only
    completions and the assistant's messages do.
    """

    text_field: str = "text"
    turn: str = "chatml"
    """A name of `TURNS`, or a text with {role} and {content}."""

    def __post_init__(self) -> None:
        """Raise ValueError if a turn has no place for role or content."""
        for place in ("{role}", "{content}"):
            if self._turn.count(place) != 1:
                raise ValueError(
                    f"the turn {self.turn!r} has {self._turn.count(place)} places "
                    f"{place}, and needs one; or give one of {', '.join(TURNS)}"
                )

    @property
    def _turn(self) -> str:
        return TURNS.get(self.turn, self.turn)

    def columns(self, known: list[str]) -> list[str]:
        """Return the columns of a table that `read` needs."""
        wanted = (self.text_field, "prompt", "completion", "messages")
        return [name for name in known if name in wanted]

    def read(self, found: Mapping[str, Any]) -> Example:
        """Return the document of one object; raise ValueError if it has none of the
        forms.
        """
        if isinstance(text := found.get(self.text_field), str):
            return Example([Passage(text, True)])
        prompt, completion = found.get("prompt"), found.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return Example([Passage(prompt, False), Passage(completion, True)])
        if isinstance(messages := found.get("messages"), list):
            spoken = [span for message in messages for span in self._spoken(message)]
            return Example(spoken, ends=False)
        raise ValueError(
            f"its fields are {_fields(found)}; it needs {self.text_field!r}, or "
            f"'prompt' and 'completion', all text, or a list of 'messages'"
        )

    def _spoken(self, message: Any) -> list[Passage]:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("a message needs a role and a content, both text")
        name = ROLES.get(self.turn, {}).get(role, role)
        head, tail = self._turn.replace("{role}", name).split("{content}")
        if role != ASSISTANT:
            return [Passage(head + content + tail, False)]
        return [Passage(head, False), Passage(content + tail, True)]


def _fields(found: Mapping[str, Any]) -> str:
    """Name fields, with their types where these are not text."""
    shown = [
        str(name) if isinstance(value, str) else f"{name} ({type(value).__name__})"
        for name, value in found.items()
    ]
    return ", ".join(shown) or "none"
