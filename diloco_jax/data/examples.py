"""The spans of text, learned or not, of a JSON object or a row of a table, as tokens.

Chats are written as the template beside a tokenizer writes them, as `transformers`
renders it. Learned is what stands between the template's generation marks. Of a
template without marks it is what follows a chat that was cut before an answer and asks
for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.data.pictures import (
    BYTE_MARK,
    BYTE_TOKEN,
    COLUMNS,
    PLACE,
    RowPictures,
    given,
)
from diloco_jax.data.tokenizers import CONFIG, NAMING, Tokenizer, read_beside, refusing
from diloco_jax.errors import ConfigError
from diloco_jax.files import parse_json

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

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Tell if it writes a content that is a list of parts, and none that is text,
        as those of models with pictures do."""

        def writes(content: object) -> bool:
            with contextlib.suppress(ValueError):
                said = [{"role": "user", "content": content}]
                return PROBE in self._written(said, {}, False)
            return False

        return not writes(PROBE) and writes(_parts(PROBE))

    def _render(self, messages: Messages, given: Given, asks: bool = False) -> str:
        if self.takes_parts:
            messages = [{**m, "content": _parts(m["content"])} for m in messages]
        return self._written(messages, given, asks)

    def _written(self, messages: Messages, given: Given, asks: bool) -> str:
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


def _parts(content: str | None) -> list[dict[str, str]] | None:
    """Return a content as parts, text and pictures."""
    if content is None:
        return None
    texts = [{"type": "text", "text": text} for text in content.split(PLACE)]
    parts = [part for text in texts for part in ({"type": "image"}, text)][1:]
    return [part for part in parts if part.get("text") != ""] or texts[:1]


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
    turn has an end of its own. `cut`: see `Template.write`. `pictures`: their files, in
    the order of their places in the text.
    """

    spans: list[Passage]
    ends: bool = True
    chat: bool = False
    cut: int = 0
    pictures: tuple[bytes, ...] = ()


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
    pictures: RowPictures | None = None
    """The way in which pictures are written; None: they are left out."""

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
        wanted = (self.text_field, "prompt", "completion", "messages", *BESIDE)
        pictures = COLUMNS if self.pictures else ()
        return [name for name in known if name in (*wanted, *pictures)]

    def read(self, found: Mapping[str, Any]) -> Example:
        """Return the document of one object, with `PLACE` for each picture: at the
        beginning if no text has it. Raise ValueError if it has none of the forms.
        """
        ahead = PLACE * (len(given(found)) if self.pictures else 0)
        if isinstance(text := found.get(self.text_field), str):
            return Example([Passage(text if PLACE in text else ahead + text, True)])
        prompt, completion = found.get("prompt"), found.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            prompt = prompt if PLACE in prompt + completion else ahead + prompt
            return Example([Passage(prompt, False), Passage(completion, True)])
        if isinstance(messages := found.get("messages"), list):
            said = [
                _cleaned(message, self.pictures is not None) for message in messages
            ]
            if ahead and said and not any(PLACE in (m["content"] or "") for m in said):
                first = next((m for m in said if m["role"] == "user"), said[0])
                first["content"] = ahead + (first["content"] or "")
            return self._chat(said, found)
        raise ValueError(
            f"its fields are {_fields(found)}; it needs {self.text_field!r}, or "
            f"'prompt' and 'completion', all text, or a list of 'messages'"
        )

    def _chat(self, messages: Messages, found: Mapping[str, Any]) -> Example:
        given = {
            name: parse_json(value) if isinstance(value, str) else value
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


AROUND = ("<fake_token_around_image><global-img>", "<fake_token_around_image>")
"""Words of Idefics3's tokenizers before and after a picture."""


def pictures_for(
    tokenizer: Tokenizer, tokens: int, sequence_length: int, most: int = 0
) -> RowPictures:
    """Return the way in which rows have pictures.

    Args:
      tokens: placeholders of a picture.
      sequence_length: T.
      most: pictures of a row; 0 = as many as fit.

    Raises:
      ConfigError: a picture is longer than a row; the tokenizer has no placeholder.
    """
    if tokens > sequence_length:
        raise ConfigError(
            f"--picture-tokens = {tokens} is more than --sequence-length = "
            f"{sequence_length}: no row has room for a picture; raise the latter"
        )
    text, token = BYTE_MARK, BYTE_TOKEN
    if tokenizer.files:
        found = tokenizer.token_of(PLACE)
        marked = all(
            tokenizer.token_of(w) is not None for w in re.findall(WORD, AROUND[0])
        )
        text = PLACE.join(AROUND) if marked else PLACE
        if found is None or list(tokenizer.encode([f"a{text}a"])[0]).count(found) != 1:
            raise ConfigError(
                f"--tokenizer: {tokenizer.name} has no word {PLACE} that is a token "
                f"wherever it stands, as the place of a picture; add it to the "
                f"tokenizer (added_tokens), or give that of a model with pictures"
            )
        token = found
    fit = sequence_length // tokens
    return RowPictures(
        most=min(most or fit, fit), tokens=tokens, token=token, text=text
    )


def _cleaned(message: Any, pictures: bool = False) -> dict[str, Any]:
    """Return a message without empty fields, its content as one text; None stands for
    that of a call of tools. Raise ValueError if it has no role, or no such content.
    pictures: it may have some."""
    found = message if isinstance(message, dict) else {}
    kept = {name: value for name, value in found.items() if value is not None}
    content = kept.get("content")
    if isinstance(content, list):
        parts = [_text_of(part, pictures) for part in content]
        content = 0 if None in parts else "".join(map(str, parts))
    is_call = content is None and kept.get("tool_calls")
    if not isinstance(kept.get("role"), str) or not (
        isinstance(content, str) or is_call
    ):
        raise ValueError("a message needs a role and a content, both text")
    return {**kept, "content": content}


def _text_of(part: Any, pictures: bool) -> str | None:
    """Return a part of a message's content as text, None if it is none. pictures: one
    of the type "image" is `PLACE`."""
    found = part if isinstance(part, dict) else {}
    if pictures and found.get("type") == "image":
        return PLACE
    text = found.get("text")
    return None if text is None else str(text)


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


TRAILING = 4
"""Tokens at the end of a text among which one that ends it is looked for."""


class Tokenised(NamedTuple):
    """A document, or a piece of one. Both [n]: tokens, int32, and whether the
    prediction of each counts, bool. `pictures`: where each is kept, and its length."""

    tokens: np.ndarray
    learned: np.ndarray
    pictures: tuple[tuple[int, int], ...] = ()


def tokenise(
    some: Sequence[Example], tokenizer: Tokenizer, reader: Reader
) -> Iterator[Tokenised]:
    """Yield the tokens of documents, with those that begin and end one.

    The spans of a document are one text for the tokenizer: many put a space before
    whatever they are given. A token is learned if a character of it is.
    """
    end = tokenizer.end
    ends = {end, reader.turn_end} - {None}
    texts, flags = [], []
    for example in some:
        spans = example.spans
        texts.append("".join(span.text for span in spans))
        sizes = [len(span.text) for span in spans]
        flags.append(np.repeat([span.learned for span in spans], sizes).astype(bool))
    mixed = [bool(flag.any() and not flag.all()) for flag in flags]
    placed = iter(tokenizer.encode_placed([*itertools.compress(texts, mixed)]))
    alike = iter(tokenizer.encode([*itertools.compress(texts, ~np.array(mixed))]))
    for example, flag, is_mixed in zip(some, flags, mixed, strict=True):
        if is_mixed:
            found, places = next(placed)
            tokens, (begin, stop) = np.array(found, np.int32), np.array(places).T
            before = np.concatenate([[0], np.cumsum(flag)])
            begin = np.minimum(begin, len(flag) - 1)
            learned = before[np.maximum(stop, begin + 1)] > before[begin]
        else:
            tokens = next(alike)
            learned = np.full(len(tokens), flag.any())
        if (pictures := reader.pictures) and example.pictures:
            # The word is one token, and becomes all placeholders of the picture.
            places = tokens == (tokenizer.token_of(PLACE) or 0)
            times = np.where(places, pictures.tokens, 1)
            tokens = np.repeat(np.where(places, pictures.token, tokens), times)
            learned = np.repeat(learned & ~places, times)
        start = tokenizer.start
        if not start and end is not None and learned[:1].all():
            start = (end,)  # The first token, too, is predicted from something.
        if start and tuple(tokens[: len(start)]) == start:
            learned[: len(start)] = False  # The text has them already.
        else:
            tokens = np.concatenate([np.array(start, np.int32), tokens])
            learned = np.concatenate([np.zeros(len(start), bool), learned])
        wants = example.ends and not _has_ended(tokens, ends, tokenizer)
        if wants and end is not None:
            tokens = np.append(tokens, np.int32(end))
            learned = np.append(learned, flag[-1:].any())
        yield Tokenised(tokens, learned)


def _has_ended(tokens: np.ndarray, ends: set[int | None], tokenizer: Tokenizer) -> bool:
    """Tell if one of these tokens ends a document, but for spaces after it."""
    last = tokens[:0:-1][:TRAILING].tolist()
    at = next((n for n, token in enumerate(last) if token in ends), None)
    return at is not None and not tokenizer.decode(last[:at]).strip()
