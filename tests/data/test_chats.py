"""Chats: the words of their template, and what is learned of them."""

import dataclasses
import json
import re
from datetime import date
from pathlib import Path

import chat_templates
import make_tokenizers
import pytest
from prepare_support import write_lines

from diloco_jax import cli
from diloco_jax.config import ConfigError
from diloco_jax.data.examples import (
    Reader,
    Template,
    reader_for,
    template_beside,
    tokenise,
)
from diloco_jax.data.prepared import read_manifest
from diloco_jax.data.tokenizers import Bytes, open_tokenizer

SYSTEM = {"role": "system", "content": "be brief"}
CHAT = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": " a1\n"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]
WORDS = (("bos_token", "<s>"), ("eos_token", "</s>"))
CALL = {"function": {"name": "add", "arguments": {"ü": "<1>"}}}
CALLS = [
    CHAT[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    CHAT[3],
]
LLAMA_DAY = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 29 Nov 2026\n\n"
)


def template(source, **named):
    sources = named or {"default": source}
    return Template("folder/", tuple(sources.items()), WORDS, "2026-11-29")


def shown(spans):
    """The text of spans, with what is learned in brackets."""
    return "".join(f"[{s.text}]" if s.learned else s.text for s in spans)


def chat(source, messages, **fields):
    reader = Reader(template=template(source))
    return reader.read({"messages": messages, **fields})


def llama(role, text):
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}"


def chatml(role, text):
    return f"<|im_start|>{role}\n{text}"


def gemma(role, text):
    return f"<start_of_turn>{role}\n{text}"


Q1, A1 = chatml("user", "q1<|im_end|>\n"), chatml("assistant", "[ a1\n<|im_end|>\n]")
Q2, A2 = chatml("user", "q2<|im_end|>\n"), chatml("assistant", "[a2<|im_end|>\n]")
THOUGHT = chatml("assistant", "[<think>\n\n</think>\n\na2<|im_end|>\n]")


@pytest.mark.parametrize(
    ("source", "messages", "want"),
    [
        (
            chat_templates.LLAMA,
            [SYSTEM, *CHAT],
            f"{LLAMA_DAY}be brief<|eot_id|>"
            + llama("user", "q1<|eot_id|>")
            + llama("assistant", "[a1<|eot_id|>]")
            + llama("user", "q2<|eot_id|>")
            + llama("assistant", "[a2<|eot_id|>]"),
        ),
        (
            chat_templates.LLAMA,
            CALLS,
            f"{LLAMA_DAY}<|eot_id|>"
            + llama("user", "q1<|eot_id|>")
            + llama("assistant", '[{"name": "add", "parameters": {"ü": "<1>"}}')
            + "<|eot_id|>]"
            + llama("ipython", '"7"<|eot_id|>')
            + llama("assistant", "[a2<|eot_id|>]"),
        ),
        # The empty thought stands before the last answer alone.
        (chat_templates.QWEN, CHAT, Q1 + A1 + Q2 + THOUGHT),
        (
            chat_templates.QWEN,
            CALLS,
            Q1
            + chatml("assistant", '[<tool_call>\n{"name": "add", "arguments": {"ü": ')
            + '"<1>"}}\n</tool_call><|im_end|>\n]'
            + chatml("user", "<tool_response>\n7\n</tool_response><|im_end|>\n")
            + THOUGHT,
        ),
        (
            chat_templates.GEMMA,
            [SYSTEM, *CHAT],
            "<s>"
            + gemma("user", "be brief\n\nq1<end_of_turn>\n")
            + gemma("model", "[a1<end_of_turn>\n]")
            + gemma("user", "q2<end_of_turn>\n")
            + gemma("model", "[a2<end_of_turn>\n]"),
        ),
        # No header asks for an answer here.
        (
            chat_templates.MISTRAL,
            CHAT,
            "<s>[INST] q1[/INST] [a1</s>][INST] q2[/INST] [a2</s>]",
        ),
        (
            chat_templates.SMOLLM,
            CHAT,
            chatml("system", "You are a model named Small<|im_end|>\n")
            + Q1
            + A1
            + Q2
            + A2,
        ),
        (chat_templates.SMOLLM, CHAT[:1], None),
        (chat_templates.MARKED, [SYSTEM, *CHAT], "Q:be briefQ:q1A:[ a1\n</s>]Q:q2A:"),
        (
            chat_templates.PHI,
            CHAT,
            "<|user|>\nq1<|end|>\n<|assistant|>\n[ a1\n<|end|>\n]"
            "<|user|>\nq2<|end|>\n<|assistant|>\n[a2<|end|>\n</s>]",
        ),
    ],
)
def test_answers_of_a_template_are_learned(source, messages, want):
    example = chat(source, messages)
    if want is None:
        assert not any(span.learned for span in example.spans)
    elif source is chat_templates.MARKED:
        assert shown(example.spans) == want + "[a2</s>]"
    else:
        assert shown(example.spans) == want
    assert example.chat
    assert not example.cut


def test_an_answer_that_lost_its_thinking_is_not_learned():
    thinking = {"role": "assistant", "content": "<think>\nhm\n</think>\n\na1"}
    example = chat(chat_templates.QWEN, [CHAT[0], thinking, *CHAT[2:]])
    want = Q1 + chatml("assistant", "a1<|im_end|>\n") + Q2 + THOUGHT
    assert (shown(example.spans), example.cut) == (want, 1)
    alone = chat(chat_templates.QWEN, [CHAT[0], thinking])
    said = "[<think>\nhm\n</think>\n\na1<|im_end|>\n]"
    assert shown(alone.spans) == Q1 + chatml("assistant", said)
    field = {"role": "assistant", "content": "a1", "reasoning_content": "hm"}
    assert shown(chat(chat_templates.QWEN, [CHAT[0], field]).spans).endswith(said)


def test_an_answer_follows_what_the_model_is_asked():
    # This template has the system's words in the last question alone.
    example = chat(chat_templates.MISTRAL, [SYSTEM, *CHAT])
    want = "<s>[INST] q1[/INST] a1</s>[INST] be brief\n\nq2[/INST][ a2</s>]"
    assert (shown(example.spans), example.cut) == (want, 1)


@pytest.mark.parametrize("source", ["LLAMA", "QWEN", "GEMMA", "MISTRAL", "MARKED", ""])
@pytest.mark.parametrize("field", [{"weight": 0}, {"train": False}, {"training": 0}])
def test_messages_of_no_weight_are_not_learned(source, field):
    messages = [CHAT[0], {**CHAT[1], **field}, CHAT[2], {**CHAT[3], "weight": 1}]
    reader = Reader(template=template(getattr(chat_templates, source or "LLAMA")))
    if not source:
        reader = Reader()
    spans = reader.read({"messages": messages}).spans
    learned = "".join(span.text for span in spans if span.learned)
    assert "a2" in learned
    assert "a1" not in learned
    assert "a1" in "".join(span.text for span in spans)


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        ("GEMMA", CHAT[1:], r"folder/ refuses it: Conversation roles must alternate"),
        ("MISTRAL", CALLS, "Conversation roles must alternate"),
        (
            "LLAMA",
            [CHAT[0], {**CALLS[1], "tool_calls": [CALL, CALL]}],
            "Only single tool-calls at once!",
        ),
        ("{{ ().__class__.__mro__ }}", CHAT, "refuses it: .* unsafe"),
        ("{{ messages.append(1) }}", CHAT, "refuses it: .*'append' .* is unsafe"),
        ("{{ messages[0].content + 1 }}", CHAT, "refuses it: can only concatenate str"),
        ("{% for m in messages %}{{ loop.last }}{% endfor %}", CHAT, "generation"),
        ("", CHAT, "chat_template_kwargs are no object"),
    ],
)
def test_a_template_refuses_in_its_own_words(source, messages, words):
    more = {} if source else {"chat_template_kwargs": "[1]"}
    with pytest.raises(ValueError, match=words):
        chat(getattr(chat_templates, source, source), messages, **more)


def test_a_template_is_given_what_stands_beside_the_messages():
    source = (
        "{% if thinking %}{{ thinking }} {% endif %}{% for tool in tools or [] %}"
        "{{ tool | tojson }}{{ tool | tojson(indent=1) }}{% endfor %}"
        "{{ pad_token }}{{ bos_token }}"
    )
    fields = {
        "tools": json.dumps([{"ü": "<"}]),
        "chat_template_kwargs": '{"thinking": 3}',
    }
    example = chat(source, CHAT[:1], **fields)
    assert shown(example.spans) == '3 {"ü": "<"}{\n "ü": "<"\n}<s>'
    two = template("", default="plain", tool_use="with tools")
    for tools, want in ((None, "plain"), ([CALL], "with tools")):
        reader = Reader(template=two)
        assert shown(reader.read({"messages": CHAT[:1], "tools": tools}).spans) == want


def test_lines_of_blocks_alone_are_none():
    source = "{% for m in messages %}\n  {% if 1 %}\n{{ m.content }}\n  {% endif %}\n"
    example = chat(source + "{% endfor %}\n", [CHAT[0], CHAT[2]])
    assert shown(example.spans) == "q1\nq2\n"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": [{"type": "image"}]}, "needs a role and a content, both text"),
        ({"content": None}, "needs a role and a content"),
        ({"content": "a", "weight": 0.5}, "weight = 0.5; it is 0 or 1"),
        ({"content": None, "tool_calls": []}, "needs a role and a content"),
        ({"content": None, "tool_calls": [CALL]}, "it has tool_calls, for which"),
        ({"content": "a", "reasoning_content": "b"}, "it has reasoning_content, for"),
        ({"content": "a", "name": "Ann"}, "it has name, for which the turn 'chatml'"),
    ],
)
def test_what_a_turn_cannot_write_is_refused(message, said):
    with pytest.raises(ValueError, match=said):
        Reader().read({"messages": [{"role": "assistant", **message}]})
    with pytest.raises(ValueError, match="it has tools, for which"):
        Reader().read({"messages": CHAT, "tools": [CALL]})


def test_texts_in_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": None}]
    found = {"messages": [{"role": "user", "content": parts}]}
    assert shown(Reader(turn="{role}:{content}").read(found).spans) == "user:ab"


def test_gemma_has_no_system():
    reader = Reader(turn="gemma3")
    want = (
        gemma("user", "be brief\n\nq1<end_of_turn>\n")
        + gemma("model", "[a1<end_of_turn>\n]")
        + gemma("user", "q2<end_of_turn>\n")
        + gemma("model", "[a2<end_of_turn>\n]")
    )
    assert shown(reader.read({"messages": [SYSTEM, *CHAT]}).spans) == want
    for role in ("system", "tool", "model"):
        messages = [*CHAT, {"role": role, "content": "x"}]
        with pytest.raises(
            ValueError, match=f"'gemma3' has .* found the role '{role}'"
        ):
            reader.read({"messages": messages})


# ---- templates of folders --------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": "{{ eos_token }}!"},
        {"chat_template": [{"name": "default", "template": "{{ eos_token }}!"}]},
        {"chat_template": "older", "eos_token": {"content": "</s>"}},
    ],
)
def test_a_folder_brings_its_template(settings, tmp_path):
    path = make_tokenizers.make_json(tmp_path)
    settings = {"eos_token": "</s>", **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if settings["chat_template"] == "older":
        (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}!")
    tokenizer = open_tokenizer(path)
    reader = reader_for(tokenizer)
    assert shown(reader.read({"messages": CHAT[:1]}).spans) == "</s>!"
    assert reader.writes.startswith("template ")
    assert reader_for(tokenizer, turn="llama3").writes == "llama3"


def test_a_template_that_cannot_be_read_is_named(tmp_path):
    path = make_tokenizers.make_json(tmp_path)
    assert template_beside(open_tokenizer(path)) is None
    assert reader_for(Bytes()) == Reader()
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template.jinja cannot write a chat"):
        reader_for(open_tokenizer(path))
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>", "chat_template": 5}'
    )
    with pytest.raises(ConfigError, match=r"tokenizer_config.json cannot write a chat"):
        reader_for(open_tokenizer(path))


def test_a_template_tells_the_day(tmp_path):
    path = make_tokenizers.make_json(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(chat_templates.LLAMA)
    reader = reader_for(open_tokenizer(path))
    assert date.fromisoformat(reader.template.day) <= date.today()
    other = dataclasses.replace(reader.template, day="2026-11-30")
    assert other.name == reader.writes
    assert "30 Nov 2026" in other.write(CHAT, [True] * 4, {})[0]
    (tmp_path / "chat_template.jinja").write_text(chat_templates.QWEN)
    assert reader_for(open_tokenizer(path)).template.day == ""
    assert reader_for(open_tokenizer(path)).writes != reader.writes


# ---- tokens ----------------------------------------------------------------------


TURN = "{role}: {content}</s>\n"
MISTRAL = Path(__file__).parents[1] / "weights/published/mistral/tokenizer.json"
"""It puts a space before every text, by its normalizer."""


@pytest.fixture(params=["bytes", "json", "pieces", "mistral"])
def tokenizer(request, tokenizers):
    if request.param == "bytes":
        return Bytes()
    return open_tokenizer(tokenizers.get(request.param, MISTRAL))


def tokenised(tokenizer, objects, turn=""):
    """The documents of objects: tokens, and which are learned."""
    reader = reader_for(tokenizer, turn=turn)
    found = tokenise([reader.read(one) for one in objects], tokenizer, reader)
    return [(one.tokens, one.learned) for one in found]


def test_the_tokens_of_spans_are_those_of_the_text(tokenizer):
    objects = [
        {"prompt": f"Q{n}: naïve 🙂?\nA:", "completion": f"import{n} ü 🙂"}
        for n in range(9)
    ]
    found = tokenised(tokenizer, objects)
    texts = {o["prompt"] + o["completion"] for o in objects}
    for tokens, learned in found:
        inside = tokens[len(tokenizer.start) : -1]
        (text,) = [
            t for t in texts if (tokenizer.encode([t])[0].tolist() == inside.tolist())
        ]
        assert tokens[-1] == tokenizer.end
        assert learned[-1]
        answer = tokenizer.decode(tokens[learned][:-1]).lstrip()
        assert answer == text.partition("A:")[2]
        assert (~learned).sum() + learned.sum() == len(tokens)


RENDERED = "<s>import os</s>"


@pytest.mark.parametrize(
    "found",
    [
        {"text": RENDERED},
        {"text": RENDERED + "\n"},
        {"prompt": "<s>import", "completion": " os</s>"},
        {"text": "import os"},
    ],
)
def test_a_document_has_one_start_and_one_end(found, tokenizers):
    tokenizer = open_tokenizer(tokenizers["json"])
    documents = tokenised(tokenizer, [found])
    for tokens, learned in documents:
        assert tokens.tolist().count(tokenizer.start[0]) == 1
        assert tokens.tolist().count(tokenizer.end) == 1
        assert tokens[0] == tokenizer.start[0]
        assert learned[tokens == tokenizer.end].all()


def test_a_chat_has_one_start_and_an_end_that_is_learned(tmp_path):
    path = make_tokenizers.make_json(tmp_path / "tokenizer")
    (path.parent / "chat_template.jinja").write_text(chat_templates.MISTRAL)
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (path.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = open_tokenizer(path)
    ((tokens, learned),) = tokenised(tokenizer, [{"messages": CHAT[:2]}])
    tokens = tokens.tolist()
    assert tokenizer.decode(tokens) == "[INST] q1[/INST] a1"
    assert (tokens[0], tokens.count(tokenizer.start[0])) == (tokenizer.start[0], 1)
    assert (tokens[-1], tokens.count(tokenizer.end)) == (tokenizer.end, 1)
    said = [token for token, flag in zip(tokens, learned, strict=True) if flag]
    assert said == [*tokenizer.encode([" a1"])[0], tokenizer.end]


@pytest.mark.parametrize("kind", ["json", "pieces"])
def test_a_turn_without_an_end_gets_that_of_documents(kind, tokenizers):
    tokenizer = open_tokenizer(tokenizers[kind])
    found = tokenised(tokenizer, [{"messages": CHAT}] * 2, "[{role}: {content}]")
    assert all(t[-1] == tokenizer.end and learned[-1] for t, learned in found)
    ((tokens, learned),) = tokenised(tokenizer, [{"messages": CHAT}], TURN)
    assert tokens.tolist().count(tokenizer.end) == 4
    assert learned[tokens == tokenizer.end].tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("", "written as 'chatml', and .* no word <.im_start.>, <.im_end.>: each is"),
        ("gemma3", "no word <start_of_turn>, <end_of_turn>"),
        ("<|user|>{role}:{content}", "no word <.user.>"),
        (TURN, ""),
    ],
)
def test_words_that_the_tokenizer_lacks_are_told(
    turn, said, tokenizers, tmp_path, capsys
):
    chats = [
        {"messages": [{**CHAT[0], "content": f"q{n}"}, CHAT[1]]} for n in range(60)
    ]
    write_lines(tmp_path / "chats.jsonl", chats)
    write_lines(tmp_path / "texts.jsonl", [{"text": f"text {n}"} for n in range(60)])
    for name, tells in (("chats", said), ("texts", "")):
        source, words = str(tmp_path / f"{name}.jsonl"), str(tokenizers["json"])
        line = ["data", "prepare", str(tmp_path / name), source, "--tokenizer", words]
        options = ["--turn", turn] if turn else []
        assert cli.main([*line, "--sequence-length", "90", *options]) == 0
        told = capsys.readouterr().err.replace("\n", " ")
        assert re.search(tells, told) if tells else "warning" not in told
    ends = read_manifest(tmp_path / "chats").ends
    assert ends == (() if said else (open_tokenizer(words).end,))
    assert read_manifest(tmp_path / "texts").ends == ()


def test_spaces_have_a_place(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import ByteLevel

    path = make_tokenizers.make_json(tmp_path, start=False)
    raw = Tokenizer.from_file(str(path))
    raw.post_processor = ByteLevel(trim_offsets=True)  # As published models have it.
    raw.save(str(path))
    ((_, places),) = open_tokenizer(path).encode_placed(["a b\n\nc "])
    assert {at for place in places for at in range(*place)} == set(range(7))
