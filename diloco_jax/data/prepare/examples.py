"""The spans of text, learned or not, of a JSON object or a row of a table."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.data.prepare.templates import (
    ASSISTANT,
    WORD,
    Messages,
    Template,
    template_beside,
)
from diloco_jax.data.tokenizers.tokenizer import Tokenizer
from diloco_jax.errors import ConfigError

TURNS = {
    "chatml": "<|im_start|>{role}\n{content}<|im_end|>\n",
    "llama3": "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
    "gemma3": "<start_of_turn>{role}\n{content}<end_of_turn>\n",
}
"""Turns of a chat by the names of models that were trained on them."""
ROLES = {"gemma3": {"user": "user", ASSISTANT: "model"}}
"""The only roles of such a model, with its own names for them."""
TRIMMED = ("llama3", "gemma3")
"""Turns whose models never saw spaces around a message."""
CALLS = ("tool_calls", "function_call", "tool_call_id")
UNWRITTEN = (*CALLS, "name", "reasoning_content", "thinking")
"""Fields of a message that a turn has no place for."""
KEYWORDS = "chat_template_kwargs"
BESIDE = ("tools", "documents", KEYWORDS)
"""Fields beside the messages that a template is given, the last one's own by name."""
WEIGHTS = ("weight", "train", "training")
"""Fields by which a message of the assistant is learned, or not."""


class Passage(NamedTuple):
    """A part of a document. `learned`: predictions of its tokens count in the loss."""

    text: str
    learned: bool


class Example(NamedTuple):
    """A document.

    `ends`: the token that ends documents follows it. A chat has none where its last
    turn has an end of its own. `cut`: see `Template.write`.
    """

    spans: list[Passage]
    ends: bool = True
    chat: bool = False
    cut: int = 0


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
    template: Template | None = None
    """It writes chats in place of the turn."""
    turn_end: int | None = None
    """The token that ends an answer, if the tokenizer has one for that."""
    adds_end: bool = False
    """Chats end with the token that ends documents."""
    unfit: str = ""
    """The fault of a turn with words that the tokenizer lacks."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a turn has no place for role or content."""
        for place in ("{role}", "{content}"):
            if self.text.count(place) != 1:
                raise ConfigError(
                    f"--turn: the turn {self.turn!r} has {self.text.count(place)} "
                    f"places {place}, and needs one; or give one of {', '.join(TURNS)}"
                )

    @property
    def text(self) -> str:
        """The turn as a text."""
        return TURNS.get(self.turn, self.turn)

    @property
    def writes(self) -> str:
        """How chats are written, for a manifest."""
        return self.template.name if self.template else self.turn

    def columns(self, known: list[str]) -> list[str]:
        """Return the columns of a table that `read` needs."""
        wanted = (self.text_field, "prompt", "completion", "messages")
        return [name for name in known if name in (*wanted, *BESIDE)]

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
            return self._chat([_cleaned(message) for message in messages], found)
        raise ValueError(
            f"its fields are {_fields(found)}; it needs {self.text_field!r}, or "
            f"'prompt' and 'completion', all text, or a list of 'messages'"
        )

    def _chat(self, messages: Messages, found: Mapping[str, Any]) -> Example:
        given = {
            name: json.loads(value) if isinstance(value, str) else value
            for name in BESIDE
            if (value := found.get(name))
        }
        wanted = [_is_learned(message) for message in messages]
        if self.template is None:
            return Example(self._turns(messages, wanted, given), self.adds_end, True)
        if not isinstance(more := given.pop(KEYWORDS, {}), dict):
            raise ValueError(f"its {KEYWORDS} are no object")
        given |= more
        text, learned, cut = self.template.write(messages, wanted, given)
        edges = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(text)]
        places = [(begin, end) for begin, end in itertools.pairwise(edges) if end]
        spans = [Passage(text[b:e], bool(learned[b])) for b, e in places]
        return Example(spans, self.adds_end, True, cut)

    def _turns(
        self, messages: Messages, wanted: Sequence[bool], given: Mapping[str, Any]
    ) -> list[Passage]:
        """Return the spans of messages that are written one after the other."""
        lost = [name for m in messages for name in UNWRITTEN if m.get(name)]
        if lost := [*lost, *given]:
            raise ValueError(
                f"it has {', '.join(dict.fromkeys(lost))}, for which the turn "
                f"{self.turn!r} has no place; leave that out, or give a tokenizer with "
                f"a chat_template"
            )
        roles, spans = ROLES.get(self.turn), list[Passage]()
        if roles and [m["role"] for m in messages[:2]] == ["system", "user"]:
            # The model has no such role: its template joins the two.
            first = f"{messages[0]['content']}\n\n{messages[1]['content'].strip()}"
            messages = [{**messages[1], "content": first}, *messages[2:]]
            wanted = wanted[1:]
        for message, want in zip(messages, wanted, strict=True):
            role, content = message["role"], message["content"]
            if roles and role not in roles:
                raise ValueError(
                    f"the turn {self.turn!r} has the roles {', '.join(roles)}, and a "
                    f"system before the first user; found the role {role!r}"
                )
            name = roles[role] if roles else role
            if self.turn in TRIMMED:
                content = content.strip()
            head, tail = self.text.replace("{role}", name).split("{content}")
            learned = want and role == ASSISTANT
            spans += [Passage(head, False), Passage(content + tail, learned)]
        return spans


def reader_for(
    tokenizer: Tokenizer, text_field: str = "text", turn: str = ""
) -> Reader:
    """Return the reader of documents for a tokenizer. An empty turn is the template
    beside it, or else ChatML.

    Raises ConfigError for a template that cannot be read, or a turn without places.
    """
    reader = Reader(text_field, turn or "chatml")
    if not tokenizer.files:
        return reader  # A byte is a token, and there are no words.
    template = None if turn else template_beside(tokenizer)
    tail = template.tail if template else reader.text.partition("{content}")[2]
    ends = [tokenizer.token_of(word) for word in re.findall(WORD, tail)]
    end = next((end for end in ends if end is not None), None)

    def lacks(text: str) -> list[str]:
        return [w for w in re.findall(WORD, text) if tokenizer.token_of(w) is None]

    unfit, lacking = "", lacks(reader.text)
    if lacking and template is None:
        fit = [f"--turn {name}" for name, text in TURNS.items() if not lacks(text)]
        unfit = (
            f"chats are written as {reader.turn!r}, and {tokenizer.name} has no word "
            f"{', '.join(dict.fromkeys(lacking))}: each is several tokens; give "
            f"{' or '.join(fit) or 'a text of words that it has for --turn'}, or a "
            f"tokenizer with a chat_template"
        )
    return dataclasses.replace(
        reader, template=template, turn_end=end, adds_end=end is None, unfit=unfit
    )


def _cleaned(message: Any) -> dict[str, Any]:
    """Return a message without empty fields, its content as one text; None stands for
    that of a call of tools. Raise ValueError if it has no role, or no such content."""
    found = message if isinstance(message, dict) else {}
    kept = {name: value for name, value in found.items() if value is not None}
    content = kept.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text", 0) if isinstance(part, dict) else 0 for part in content
        ]
        content = "".join(map(str, parts)) if 0 not in parts else 0
    is_call = content is None and kept.get("tool_calls")
    if not isinstance(kept.get("role"), str) or not (
        isinstance(content, str) or is_call
    ):
        raise ValueError("a message needs a role and a content, both text")
    return {**kept, "content": content}


def _is_learned(message: Mapping[str, Any]) -> bool:
    """Tell if a message counts where the assistant says it, as its fields have it."""
    found = {name: message[name] for name in WEIGHTS if name in message}
    for name, value in found.items():
        if value not in (0, 1):
            raise ValueError(f"a message has {name} = {value!r}; it is 0 or 1")
    return all(found.values())


def _fields(found: Mapping[str, Any]) -> str:
    """Name fields, with their types where these are not text."""
    shown = [
        str(name) if isinstance(value, str) else f"{name} ({type(value).__name__})"
        for name, value in found.items()
    ]
    return ", ".join(shown) or "none"
