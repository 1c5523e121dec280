"""Text to tokens and back: special tokens, chat templates in a sandbox, streams by whole characters, stop strings."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from eeinfer.core.request import Request, SamplingParams
from eeinfer.engine.engine import _Answer
from eeinfer.errors import ModelError, RequestError
from eeinfer.model.tokenizer import TextStream, Tokenizer

SPECIAL = ("<s>", "</s>")
USER = ({"role": "user", "content": "ab"},)
quick = settings(max_examples=200, deadline=None, database=None, derandomize=True)


def byte_level(*merges: tuple[str, str]) -> FastTokenizer:
    """GPT-2's kind: every byte is a token; with SPECIAL first and a processor that adds <s>."""
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    fast = FastTokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=list(merges)))
    fast.add_special_tokens(list(SPECIAL))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return fast


def byte_fallback() -> FastTokenizer:
    """Llama 2's kind: words with ▁, bytes as <0xNN> where a character is unknown."""
    vocabulary = [*SPECIAL, "<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "▁b", "a", "b", "!"]
    fast = FastTokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(vocabulary)},
            merges=[("▁", "a"), ("▁", "b")],
            byte_fallback=True,
            unk_token="<unk>",  # noqa: S106 - no password
        )
    )
    fast.add_special_tokens([*SPECIAL, "<unk>"])
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast


def write(folder: Path, fast: FastTokenizer | None = None, **files: Any) -> Path:
    """A folder with a tokenizer; `files` are JSON files by their stem."""
    (fast or byte_level()).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    for name, content in ({"tokenizer_config": config} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def with_template(folder: Path, template: Any) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    return Tokenizer(write(folder, tokenizer_config=config), 300)


def rendered(folder: Path, template: str, messages: Sequence[dict[str, Any]] = USER) -> str:
    tokenizer = with_template(folder, template)
    assert tokenizer._template is not None
    return tokenizer._template.render(messages)


# Encoding


@pytest.mark.parametrize(("text", "count"), [("ab", 1), ("<s>ab", 1), ("<s>", 1), ("", 1), ("a<s>b", 2)])
def test_begin_of_sequence_once(tmp_path: Path, text: str, count: int) -> None:
    ids = Tokenizer(write(tmp_path), 300).encode(text)
    assert ids[0] == 0
    assert ids.count(0) == count


def test_no_begin_of_sequence_where_the_model_wants_none(tmp_path: Path) -> None:
    fast = byte_level()
    fast.post_processor = processors.ByteLevel()
    tokenizer = Tokenizer(write(tmp_path, fast), 300)
    assert 0 not in tokenizer.encode("ab")
    assert tokenizer.encode("<s>ab").count(0) == 1


def test_a_template_that_brings_its_own_begin_of_sequence(tmp_path: Path) -> None:
    ids = with_template(tmp_path, "{{ bos_token }}{{ messages[0].content }}").encode_chat(USER)
    assert ids[0] == 0
    assert ids.count(0) == 1
    ids = with_template(tmp_path, "{{ messages[0].content }}").encode_chat(USER)
    assert 0 not in ids


@pytest.mark.parametrize("which", ["truncation", "padding"])
def test_what_training_left_in_the_file_does_not_cut_or_pad_prompts(tmp_path: Path, which: str) -> None:
    fast = byte_level()
    if which == "truncation":
        fast.enable_truncation(max_length=4)
    else:
        fast.enable_padding(length=20, pad_id=1, pad_token="</s>")  # noqa: S106 - no password
    tokenizer = Tokenizer(write(tmp_path, fast), 300)
    assert len(tokenizer.encode("abcdefgh")) == 9


# Files


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    folder, size = write(tmp_path), byte_level().get_vocab_size()
    Tokenizer(folder, size)
    with pytest.raises(ModelError, match=rf"tokenizer.json has {size} tokens.* {size - 1}"):
        Tokenizer(folder, size - 1)


def test_a_token_beyond_the_model_is_refused(tmp_path: Path) -> None:
    """Few tokens, but one with a number that the model has no embedding for."""
    words = {"<unk>": 0, "a": 1, "b": 40}
    fast = FastTokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - no password
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(write(tmp_path, fast), 10)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff", b'{"version": "1.0"}'])
def test_an_unusable_tokenizer_names_its_file(tmp_path: Path, content: bytes | None) -> None:
    path = write(tmp_path) / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path, 300)


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "config"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_an_unusable_config_names_its_file(tmp_path: Path, name: str, content: bytes) -> None:
    path = write(tmp_path) / f"{name}.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"{name}\.json"):
        Tokenizer(tmp_path, 300)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [5, 7]}, "config": {"eos_token_id": 6}}, {5, 7}),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 6}}, {0}),
        ({"generation_config": {"temperature": 1}, "config": {"eos_token_id": 6}}, {6}),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [6]}}, {6}),
        ({}, {1}),
        ({"tokenizer_config": {"eos_token": "<s>"}}, {0}),
        ({"tokenizer_config": {}}, set()),
        ({"tokenizer_config": {"eos_token": None}}, set()),
    ],
)
def test_which_tokens_end_an_answer(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    assert Tokenizer(write(tmp_path, **files), 300).eos_token_ids == expected


@pytest.mark.parametrize("name", ["generation_config", "config"])
@pytest.mark.parametrize("value", ["</s>", [1, "</s>"], 1.5, True, {}])
def test_an_end_that_is_no_token_id_names_its_file(tmp_path: Path, name: str, value: object) -> None:
    """It would never be met, and every answer would run to its limit."""
    files: dict[str, Any] = {name: {"eos_token_id": value}}
    folder = write(tmp_path, **files)
    with pytest.raises(ModelError, match=rf"{name}\.json.*eos_token_id"):
        Tokenizer(folder, 300)


# Chat templates


def test_a_template_sees_what_hugging_face_templates_expect(tmp_path: Path) -> None:
    template = """{{ bos_token }}{% for m in messages %}
    {%- if m['role'] == 'skip' %}{% continue %}{% endif %}
[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}
{% endfor %}
  {% if add_generation_prompt %}
[assistant]
{%- endif %}"""
    messages = [{"role": "user", "content": " hi "}, {"role": "skip", "content": ""}, {"role": "x", "content": "é<&"}]
    assert rendered(tmp_path, template, messages) == "<s>[user]hi</s>\n[x]é<&</s>\n[assistant]"
    assert rendered(tmp_path, "{{ messages | tojson }}") == '[{"role": "user", "content": "ab"}]'
    assert rendered(tmp_path, "{{ {'é': '<'} | tojson(indent=1) }}") == '{\n "é": "<"\n}'


def test_strftime_now(tmp_path: Path) -> None:
    before = datetime.now().astimezone().strftime("%Y-%m-%d")
    found = rendered(tmp_path, "{{ strftime_now('%Y-%m-%d') }}")
    assert found in {before, datetime.now().astimezone().strftime("%Y-%m-%d")}


def test_raise_exception_is_the_requests_fault(tmp_path: Path) -> None:
    template = "{% if not messages[0].ok %}{{ raise_exception('roles alternate') }}{% endif %}"
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(RequestError, match="roles alternate"):
        tokenizer.encode_chat(USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
    ],
)
def test_the_sandbox_holds(tmp_path: Path, template: str) -> None:
    messages = ({"role": "user", "content": "ab"},)
    with pytest.raises(RequestError):
        with_template(tmp_path, template).encode_chat(messages)
    assert messages == USER


@pytest.mark.parametrize("hidden", ["''.__class__", "strftime_now.__globals__", "'{0.__class__}'.format(messages)"])
def test_what_the_sandbox_hides_is_not_there(tmp_path: Path, hidden: str) -> None:
    assert rendered(tmp_path, f"[{{{{ {hidden} }}}}]") == "[]"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 + messages[0].content }}",
        "{{ messages[0].content.index('z') }}",
        "{{ {}['x'].y }}",
        "{{ 1 // (messages | length - 1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ '{} {}'.format(1) }}",
    ],
)
def test_whatever_a_template_stumbles_over_fails_the_request_only(tmp_path: Path, template: str) -> None:
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(RequestError, match="chat template"):
        tokenizer.encode_chat(USER)


def test_generation_marks_are_seen_through(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "a{% generation %}{{ messages[0].content }}{% endgeneration %}z")
    assert tokenizer._template is not None
    assert tokenizer._template.render([{"role": "user", "content": "bc"}]) == "abcz"


def test_a_template_that_does_not_parse_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        with_template(tmp_path, "{% if %}")
    (tmp_path / "chat_template.jinja").write_text("{{ x", encoding="utf-8")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        Tokenizer(tmp_path, 300)


def test_a_template_file_wins_and_must_be_utf8(tmp_path: Path) -> None:
    with_template(tmp_path, "a")
    (tmp_path / "chat_template.jinja").write_text("b", encoding="utf-8")
    tokenizer = Tokenizer(tmp_path, 300)
    assert tokenizer._template is not None
    assert tokenizer._template.render(USER) == "b"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        Tokenizer(tmp_path, 300)


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    assert len(with_template(tmp_path, named).encode_chat(USER)) == 3


@pytest.mark.parametrize("template", [None, [], [{"name": "tool_use", "template": "t"}], ["x"], 5])
def test_without_a_template_messages_are_refused_and_prompts_run(tmp_path: Path, template: Any) -> None:
    tokenizer = with_template(tmp_path, template)
    assert len(tokenizer.encode("ab")) == 3
    with pytest.raises(RequestError, match="no chat template: give `prompt`"):
        tokenizer.encode_chat(USER)


# Streams


def pieces(fast: FastTokenizer, ids: Sequence[int]) -> list[str]:
    stream = TextStream(fast)
    return [stream.push(token) for token in ids]


def token_ids(fast: FastTokenizer, tokens: Sequence[str]) -> list[int]:
    found = [fast.token_to_id(token) for token in tokens]
    assert None not in found
    return [token for token in found if token is not None]


@pytest.mark.parametrize("fast", [byte_level(), byte_fallback()], ids=["byte-level", "byte-fallback"])
def test_a_character_of_several_tokens_comes_with_its_last(fast: FastTokenizer) -> None:
    for text in ("😀", "é", "日本", "👩‍👩‍👧", "a😀b é!"):
        ids = fast.encode(text, add_special_tokens=False).ids
        found = pieces(fast, ids)
        assert "".join(found) == text
        assert not any("\ufffd" in piece for piece in found)
    ids = fast.encode("😀", add_special_tokens=False).ids
    assert [p for p in pieces(fast, ids) if p] == ["😀"]
    assert "".join(pieces(fast, ids[:-1])).strip() == ""


@pytest.mark.parametrize("fast", [byte_level(), byte_fallback()], ids=["byte-level", "byte-fallback"])
def test_special_and_unknown_tokens_have_no_text(fast: FastTokenizer) -> None:
    (a,) = token_ids(fast, "a")
    assert pieces(fast, [0, a, 1, a, 5000, a, 0]) == ["", "a", "", "a", "", "a", ""]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"\xc3\xa9\xffa", "é\ufffda"),
        (b"\xf0\x9f\x98a", "\ufffda"),
        (b"\x80\x80!", "\ufffd\ufffd!"),
    ],
)
def test_bytes_that_are_no_character_are_replaced_once_that_is_certain(data: bytes, expected: str) -> None:
    fast = byte_level()
    names = byte_names()
    assert sorted(names.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert "".join(pieces(fast, token_ids(fast, [names[b] for b in data]))) == expected


def byte_names() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


@pytest.mark.parametrize("tokens", [["<0xC3>", "<0xA9>", "<0xC3>", "▁a"], ["<0x41>", "<0xFF>", "!"]])
def test_a_broken_character_after_a_whole_one_does_not_end_the_run(tokens: list[str]) -> None:
    """Models emit broken bytes now and then. Text that was handed out stays; the rest goes on after it."""
    fast = byte_fallback()
    found = "".join(pieces(fast, token_ids(fast, tokens)))
    assert found.startswith("é" if tokens[0] == "<0xC3>" else "A")
    assert found.endswith("a" if tokens[-1] == "▁a" else "!")


@quick
@given(st.lists(st.integers(0, 264), max_size=14))
@example([3 + 0x41, 3 + 0x80, 260])
def test_no_tokens_break_a_stream(ids: list[int]) -> None:
    for fast in (byte_level(), byte_fallback()):
        found = pieces(fast, [token for token in ids if token < fast.get_vocab_size()])
        assert len(found) == sum(token < fast.get_vocab_size() for token in ids)


@quick
@given(st.text(max_size=20) | st.text("ab !é😀", max_size=20))
def test_streamed_text_is_the_text(text: str) -> None:
    for fast in (byte_level(("a", "b")), byte_fallback()):
        ids = fast.encode(text, add_special_tokens=False).ids
        found, full = "".join(pieces(fast, ids)), fast.decode(ids)
        assert full.startswith(found)
        assert full[len(found) :].strip("\ufffd") == ""  # at the end, a real U+FFFD and half a character look alike


# Stop strings


class Words(TextStream):
    """A stream whose token i is the i-th piece."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def push(self, token: int) -> str:
        return self.words[token]


def answer(words: Sequence[str], *stop: str) -> tuple[_Answer, bool]:
    """The answer after all pieces, or up to the first stop."""
    found = _Answer(Words(words), Request("a", sampling=SamplingParams(stop=stop)))
    return found, any(found.push(i, ends=False) for i in range(len(words)))


@pytest.mark.parametrize(
    ("words", "stop", "text", "kept"),
    [
        (["ab", "cd", "ef"], ["cd"], "ab", ["ab", ""]),
        (["ab", "cd", "ef"], ["bc"], "a", ["a", ""]),
        (["ab", "c", "", "d", "ef"], ["bcde"], "a", ["a", "", "", "", ""]),
        (["ab", "cd"], ["ab"], "", [""]),
        (["abcd"], ["d", "bc"], "a", ["a"]),  # the first to be complete wins, not the first in the list
        (["abcd"], ["abcd", "c"], "ab", ["ab"]),  # nor the one that began first
        (["xaab"], ["aab", "ab"], "x", ["x"]),
        (["aa", "aa"], ["aaa"], "", ["", ""]),
        (["ab", "ab", "ac"], ["abac"], "ab", ["ab", "", ""]),
        (["é", "😀", "x"], ["😀"], "é", ["é", ""]),
        (["ab", "cd"], ["dx", "z"], "abcd", ["ab", "cd"]),
        (["ab", "cd"], [], "abcd", ["ab", "cd"]),
        (["", ""], ["a"], "", ["", ""]),
        (["stop", "!"], ["stop!", "stop"], "", [""]),  # whichever is complete first
    ],
)
def test_stop_strings(words: list[str], stop: list[str], text: str, kept: list[str]) -> None:
    found, stopped = answer(words, *stop)
    assert (found.text, found.pieces) == (text, kept)
    assert stopped == (text != "".join(words))


@quick
@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_against_a_plain_search(words: list[str], stop: list[str]) -> None:
    found, stopped = answer(words, *stop)
    for n in range(len(words) + 1):
        text = "".join(words[:n])
        hits = [(text.index(s) + len(s), i, text.index(s)) for i, s in enumerate(stop) if s in text]
        if hits:
            assert (stopped, found.text, len(found.pieces)) == (True, text[: min(hits)[-1]], n)
            break
    else:
        assert (stopped, found.text, found.pieces) == (False, "".join(words), words)
    assert "".join(found.pieces) == found.text


def test_a_stop_string_across_tokens_of_one_character(tmp_path: Path) -> None:
    fast = byte_level()
    asked = Request("a", sampling=SamplingParams(stop=("é!",)))
    found = _Answer(Tokenizer(write(tmp_path, fast), 300).stream(), asked)
    pushed = [found.push(token, ends=False) for token in fast.encode("caé!x", add_special_tokens=False).ids]
    assert pushed.index(True) == 4
    assert pushed[:4] == [False] * 4


# The default model


def test_default_model_chat_and_end(default_model: Path) -> None:
    tokenizer = Tokenizer(default_model, 49152)
    assert tokenizer.eos_token_ids == {2}
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi <3"}])
    text = tokenizer._fast.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi <3<|im_end|>\n<|im_start|>assistant\n")


def test_default_model_streams_any_tokens(default_model: Path) -> None:
    tokenizer, chance = Tokenizer(default_model, 49152), random.Random(0)  # noqa: S311 - not for secrets
    for _ in range(100):
        ids = [chance.randrange(49152) for _ in range(40)]
        stream, full = tokenizer.stream(), tokenizer._fast.decode(ids)
        found = "".join(stream.push(token) for token in ids)
        assert full.startswith(found)
        assert full[len(found) :].strip("\ufffd") == ""
