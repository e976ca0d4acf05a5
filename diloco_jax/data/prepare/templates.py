"""Chats as the template beside a tokenizer writes them, as `transformers` renders it.

Learned is what stands between the template's generation marks. Of a template without
marks it is what follows a chat that was cut before an answer and asks for it.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diloco_jax.data.tokenizers.beside import (
    CONFIG,
    NAMING,
    read_beside,
    refusing,
)
from diloco_jax.data.tokenizers.tokenizer import Tokenizer
from diloco_jax.errors import ConfigError

TEMPLATE = "chat_template.jinja"
WORD = r"<[^<>\s{}]+>|\[/?[^\[\]\s{}]+\]"
"""A word of a turn, as tokenizers have them for it: <|im_end|>, [INST]."""
ASSISTANT = "assistant"
MARK, PROBE = f"\0{uuid.uuid4().hex}", f"probe{uuid.uuid4().hex}"
"""Texts that no chat has: around what a model generates, and in place of an answer."""

Messages = Sequence[dict[str, Any]]
Given = Mapping[str, Any]
"""Fields of a row that a template is given beside its messages, such as `tools`."""


@dataclasses.dataclass(frozen=True)
class Template:
    """The templates of a folder by name, one of which is "default"."""

    folder: str
    sources: tuple[tuple[str, str], ...]
    words: tuple[tuple[str, str], ...]
    """The tokenizer's own, such as bos_token, which every template is given."""
    day: str = ""
    """The day that a template tells; empty for one that does not."""

    @property
    def name(self) -> str:
        """The template's name in a manifest, which tells it from others."""
        found = repr((self.sources, self.words)).encode()
        return f"template {hashlib.sha256(found).hexdigest()[:16]}"

    @property
    def tail(self) -> str:
        """The text that follows an answer; empty if that cannot be told."""
        said = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": PROBE}]
        return self._try(said, {}).partition(PROBE)[2]

    def write(
        self, messages: Messages, wanted: Sequence[bool], given: Given
    ) -> tuple[str, np.ndarray, int]:
        """Return a chat as text; whether each character is learned, bool [n]; and the
        number of answers that are not, since words of them, or of what they answer, are
        left out once others follow.

        wanted: whether each message is learned where the assistant says it.

        Raises ValueError, in the template's own words, if it refuses the chat.
        """
        parts = self._render(messages, given).split(MARK)
        text, cuts = "".join(parts), 0
        learned = np.repeat(np.arange(len(parts)) % 2 > 0, [len(p) for p in parts])
        marked = _compiled(self._source(given), self.day)[1]
        for number, (message, want) in enumerate(zip(messages, wanted, strict=True)):
            if message["role"] != ASSISTANT or want == marked:
                continue
            begin, end, cut = self._turn(messages, given, number, text)
            learned[begin:end] = want and not cut
            cuts += want and cut
            if want and cut and number == len(messages) - 1:
                # Its question was written otherwise: it is learned after that.
                prompt = self._try(messages[:number], given, asks=True)
                space = text[len(text[:begin].rstrip()) : begin]
                ahead = prompt.removesuffix(space) + space
                text, cuts = ahead + text[begin:], cuts - 1
                learned = np.arange(len(text)) >= len(prompt)
        return text, learned, cuts

    def _turn(
        self, messages: Messages, given: Given, number: int, text: str
    ) -> tuple[int, int, bool]:
        """Return the place of an answer in a chat's text, and whether words of it, or
        of what it answers, are left out there."""
        ahead, behind = messages[:number], messages[number + 1 :]
        prompt = self._try(ahead, given, asks=True)
        said = self._try([*ahead, messages[number]], given)
        asks = "add_generation_prompt" in self._source(given) and prompt != ""
        asks = asks and text.startswith(prompt)
        if asks and said.startswith(prompt) and text.startswith(said):
            return len(prompt), len(said), False
        # The template writes the turn, or what is before it, otherwise now.
        bare = {"role": ASSISTANT, "content": PROBE}
        for probe in (bare, {**messages[number], **bare}):
            among = self._try([*ahead, probe, *behind], given)
            head, found, rest = among.partition(PROBE)
            last = self._try([*ahead, probe], given).partition(PROBE)[2]
            stop = len(text) - len(rest)
            fits = found and text.startswith(head) and text.endswith(rest)
            if fits and len(head) <= stop:
                begin, end = len(prompt if asks else head), stop + _shared(last, rest)
                cut = said != "" and _words(said) != _words(text[:end])
                asked = _words(text[:begin]).startswith(_words(prompt))
                return begin, end, cut or not asked
        raise ValueError(
            f"what the template of {self.folder} writes of message {number} cannot be "
            f"told; put {{% generation %}} marks into the template, or give --turn"
        )

    def _source(self, given: Given) -> str:
        found = dict(self.sources)
        return found.get("tool_use" if given.get("tools") else "", found["default"])

    def _try(self, messages: Messages, given: Given, asks: bool = False) -> str:
        """Return a part of a chat as text without marks; empty if it is refused."""
        try:
            return self._render(messages, given, asks).replace(MARK, "")
        except ValueError:
            return ""

    def _render(self, messages: Messages, given: Given, asks: bool = False) -> str:
        made, _ = _compiled(self._source(given), self.day)
        values = {"tools": None, "documents": None, **dict(self.words), **given}
        values |= {"messages": messages, "add_generation_prompt": asks}
        try:
            return str(made.render(values))
        except Exception as error:  # A template may raise anything.
            raise ValueError(
                f"the template of {self.folder} refuses it: {error or repr(error)}"
            ) from error


def template_beside(tokenizer: Tokenizer) -> Template | None:
    """Return the template of the folder that a tokenizer is in, None if it has none.

    Raises ConfigError, naming the file, for what is no template.
    """
    path = tokenizer.files[0]
    settings = read_beside(path, NAMING[-1]) | read_beside(path, CONFIG)
    file = path.with_name(TEMPLATE)
    with refusing(file if file.is_file() else path.with_name(CONFIG), "write a chat"):
        found = settings.get("chat_template")
        if file.is_file():
            found = file.read_text(encoding="utf-8")
        if not found:
            return None
        if isinstance(found, list):
            found = {one["name"]: one["template"] for one in found}
        sources = {"default": found} if isinstance(found, str) else dict(found)
        for source in (sources["default"], *sources.values()):
            _compiled(source, "")
    words = [
        (name, word.get("content") if isinstance(word, dict) else word)
        for name, word in sorted(settings.items())
        if name.endswith("_token")
    ]
    return Template(
        str(path.parent),
        tuple(sorted(sources.items())),
        tuple((name, word) for name, word in words if isinstance(word, str)),
        str(datetime.date.today()) if "strftime_now" in str(sources) else "",
    )


def _shared(last: str, rest: str) -> int:
    """Return the length of what follows an answer that is last, as far as it stands in
    `rest`, too: all of it, or whole words of turns."""
    same = os.path.commonprefix([last, rest])  # noqa: RUF071
    words = re.match(rf"\s*(?:(?:{WORD})\s*)*", same)
    return words.end() if words and same != last else len(same)


def _words(text: str) -> str:
    """Return a text without the words of turns and without spaces."""
    return re.sub(rf"{WORD}|\s", "", text)


@functools.cache
def _compiled(source: str, day: str) -> tuple[Any, bool]:
    """Compile a template in the sandbox that `transformers` has, with its functions.
    Return it, and whether it has generation marks."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError(
            "a chat_template needs the package jinja2; pip install 'diloco-jax[text]', "
            "or give --turn"
        ) from error
    marked = False

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            nonlocal marked
            marked = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{MARK}{caller()}{MARK}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.fromisoformat(
        day
    ).strftime(form)
    return made.from_string(source), marked
