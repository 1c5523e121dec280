"""Every kind of bad input, a row each: what the message names, that only what is bad fails, and that nothing crashes.

The rows go through the command line with a real engine on a tiny model: a line that a reader lets through may still be
refused by the tokenizer, the scheduler or the cache.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import BOS, EOS
from torch import Tensor

from eeinfer import LLM, Request, SamplingParams
from eeinfer.cli.app import main
from eeinfer.engine.engine import _Answer
from eeinfer.engine.prompt_file import MAX_LINE_BYTES
from eeinfer.exits.files import CONFIG_NAME, TENSORS_NAME, Base, HeadsFile, save_heads
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.fingerprint import fingerprint
from eeinfer.model.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
TEMPLATE = (
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if messages[0].content == 'break' %}{{ 1 // 0 }}{% endif %}"
    "{{ messages[0].content.replace('nothing', '') }}"
)
Line = bytes | dict[str, Any]
Spoil = Callable[[Path], Any]


class Ended(NamedTuple):
    code: int | str | None
    lines: list[dict[str, Any]]
    err: str


Run = Callable[..., Ended]
Answered = Callable[..., tuple[str, bool]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    """`eeinfer generate ARGUMENTS` in this process, with a prompt file on standard input."""

    def _run(*arguments: str | Path, prompts: bytes = b'{"prompt": "a"}') -> Ended:
        common = ["--prompts", "-", "--device", "cpu", "--num-blocks", "8", "--max-tokens", "2"]
        monkeypatch.setattr(sys, "argv", ["eeinfer", "generate", *common, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompts)))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsysbinary.readouterr()
        assert b"Traceback" not in err
        return Ended(ended.value.code or 0, [json.loads(line) for line in out.splitlines()], err.decode())

    return _run


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model folder to spoil, with a chat template that refuses some messages."""
    folder = shutil.copytree(tiny_model("gqa"), tmp_path / "model")
    edit(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    return folder


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


# Lines of a prompt file: each is an error of its own, and the good lines around it are answered.

LINES: list[tuple[str, Line, Sequence[str]]] = [
    ("invalid UTF-8", b'{"prompt": "caf\xe9"}', ["not UTF-8 at byte 16", "save the file as UTF-8"]),
    ("malformed JSON", b'{"prompt": "a"', ["not JSON at column 15", "one whole object a line"]),
    ("two objects", b'{"prompt": "a"} {"prompt": "b"}', ["not JSON at column 17", "one whole object a line"]),
    ("no object", b'["a"]', ["expected an object such as", "got a list"]),
    ("deeply nested", b'{"prompt": ' + b"[" * 100_000, ["nested too deeply", "a flat object"]),
    ("nested, whole", b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", ["prompt must be text, got a list"]),
    ("endless number", b'{"seed": ' + b"9" * 5000 + b"}", ["not JSON that can be read"]),
    ("unknown field", {"prompt": "a", "max_token": 3}, ["unknown field 'max_token'", "did you mean 'max_tokens'?"]),
    ("repeated field", b'{"prompt": "a", "prompt": "b"}', ["field 'prompt' occurs twice", "keep one"]),
    ("wrong type", {"prompt": 3}, ["prompt must be text, got 3"]),
    ("wrong type of max_tokens", {"prompt": "a", "max_tokens": "9"}, ["max_tokens must be an integer >= 1, got text"]),
    (
        "half a surrogate pair",
        b'{"prompt": "\\ud83d"}',
        ["prompt has half a surrogate pair at character 1", "remove it"],
    ),
    ("both", {"prompt": "a", **user("b")}, ["give prompt or messages, not both"]),
    ("neither", {"id": "x"}, ["give prompt or messages, one of them"]),
    ("null", {"prompt": None}, ["give prompt or messages, one of them"]),
    ("unknown role", {"messages": [{"role": "usr", "content": "a"}]}, ["messages[0]", "'usr'", "did you mean 'user'?"]),
    ("no messages", {"messages": []}, ["messages is empty", "give at least one"]),
    ("unknown field of a message", user("a", nme="b"), ["messages[0]: unknown field 'nme'", "known: role, content"]),
    ("template that raises", user("refuse"), ["chat template refuses these messages: roles must alternate"]),
    ("template that breaks", user("break"), ["chat template refuses these messages", "division"]),
    (
        "empty after templating",
        user("nothing"),
        ["the chat template makes no text of these messages", "give some text"],
    ),
    ("empty prompt", {"prompt": ""}, ["the prompt is empty", "give some text"]),
    ("duplicate id", {"prompt": "a", "id": "good 0"}, ["id 'good 0' is already that of line 1; give it another"]),
    ("longer than the context", {"prompt": "a" * 200}, ["prompt has 200 tokens", "context 160", "shorten the prompt"]),
    ("as long as the context", {"prompt": "a" * 160}, ["prompt has 160 tokens", "context 160", "shorten the prompt"]),
    ("longer than the cache", {"prompt": "a" * 140}, ["needs 9 KV blocks", "the cache has 8", "cache.num_blocks"]),
    ("max_tokens 0", {"prompt": "a", "max_tokens": 0}, ["max_tokens must be an integer >= 1", "got 0"]),
    ("max_tokens negative", {"prompt": "a", "max_tokens": -3}, ["max_tokens must be an integer >= 1", "got -3"]),
    ("max_tokens huge", {"prompt": "a", "max_tokens": 10**30}, ["max_tokens must be an integer >= 1 and < 2**63"]),
    ("max_tokens beyond the context", {"prompt": "abc", "max_tokens": 158}, ["context of 160", "can be at most 157"]),
    ("temperature NaN", b'{"prompt": "a", "temperature": NaN}', ["temperature must be a finite number >= 0, got nan"]),
    ("temperature negative", {"prompt": "a", "temperature": -1}, ["temperature must be a finite number >= 0, got -1"]),
    ("temperature infinite", b'{"prompt": "a", "temperature": 1e999}', ["temperature must be a finite number", "inf"]),
    ("seed negative", {"prompt": "a", "seed": -1}, ["seed must be an integer >= 0", "got -1"]),
    ("stop empty", {"prompt": "a", "stop": ["x", ""]}, ["stop has an empty string", "remove it"]),
    ("stop of another type", {"prompt": "a", "stop": 3}, ["stop must be text or a list of texts, got 3"]),
    (
        "10 MB",
        b'{"prompt": "' + b"a" * 10_000_000 + b'"}',
        [f"more than {MAX_LINE_BYTES:,} bytes", "shorten the prompt"],
    ),
]


def test_a_bad_line_fails_alone_and_says_what_to_change(run: Run, model: Path) -> None:
    raw = []
    for i, (_, line, _) in enumerate(LINES):
        raw += [b'{"prompt": "b", "id": "good %d"}' % i, line if isinstance(line, bytes) else json.dumps(line).encode()]
    ended = run("-m", model, prompts=b"\n".join(raw))
    assert ended.code == 1
    assert f"{len(LINES)} of {2 * len(LINES)} prompts failed; the first: standard input, line 2: not UTF-8" in ended.err
    good, bad = ended.lines[::2], ended.lines[1::2]
    assert all(answer["usage"]["completion_tokens"] for answer in good)
    wrong = []
    for i, ((name, _, words), answer) in enumerate(zip(LINES, bad, strict=True)):
        if answer.get("line") != 2 * i + 2 or any(word not in answer["error"] for word in words):
            wrong.append((name, answer))
    assert wrong == []


# Whole prompt files

FILES: list[tuple[str, bytes, int, Sequence[str]]] = [
    ("empty", b"", 2, ["standard input: no prompts", "write one JSON object a line"]),
    ("blank lines alone", b"\n \r\n\t\n", 2, ["standard input: no prompts"]),
    ("byte order mark alone", b"\xef\xbb\xbf", 2, ["standard input: no prompts"]),
    ("UTF-16", '{"prompt": "a"}'.encode("utf-16"), 2, ["UTF-16", "save it as UTF-8"]),
    ("blank lines", b'\n\n{"prompt": "a"}\n\n{"prompt": "b"}\n\n', 0, []),
    ("CRLF", b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n', 0, []),
    ("byte order mark", b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}', 0, []),
]


@pytest.mark.parametrize(("content", "code", "words"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_whole_files(run: Run, model: Path, content: bytes, code: int, words: Sequence[str]) -> None:
    ended = run("-m", model, prompts=content)
    assert ended.code == code
    assert len(ended.lines) == (2 if code == 0 else 0)
    assert all(word in ended.err for word in words)


# Model folders. `spoil` changes the folder; the message names the file and these words.


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return spoil


def content(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Spoil:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def config(**changes: Any) -> Spoil:
    return lambda folder: edit(folder / "config.json", **changes)


def repeat_tensor(data: bytes) -> bytes:
    """The same header, with its first tensor twice."""
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + length].decode().rstrip()
    name, entry = next((k, v) for k, v in json.loads(header).items() if k != "__metadata__")
    header = f"{header[:-1]}, {json.dumps(name)}: {json.dumps(entry)}}}"
    return struct.pack("<Q", len(header)) + header.encode() + data[8 + length :]


def two_shards(folder: Path) -> None:
    """A tensor that is in both shards."""
    save_file({K_PROJ: load_file(folder / WEIGHTS)[K_PROJ]}, folder / "more.safetensors")
    index = {"weight_map": {K_PROJ: "more.safetensors", "lm_head.weight": WEIGHTS}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


MODELS: list[tuple[str, Spoil, Sequence[str]]] = [
    ("truncated", content(lambda b: b[:-100]), [WEIGHTS, "its header promises", "fetch the model again"]),
    ("truncated header", content(lambda b: b[:20]), [WEIGHTS, "not a complete safetensors", "fetch the model again"]),
    ("corrupt header", content(lambda b: b[:8] + b"]" + b[9:]), [WEIGHTS, "header is damaged", "fetch the model"]),
    ("no safetensors at all", content(lambda _: b"\x80\x02}q\0"), [WEIGHTS, "not a complete safetensors file"]),
    ("missing tensor", weights(lambda t: t.pop(K_PROJ)), [f"tensor {K_PROJ} is missing", "fetch the model again"]),
    (
        "unexpected tensor",
        weights(lambda t: t.update(extra=torch.ones(3))),
        [WEIGHTS, "unexpected tensor extra", "config.json"],
    ),
    ("duplicate tensor", content(repeat_tensor), [WEIGHTS, "occurs twice", "fetch the model again"]),
    ("tensor in two shards", two_shards, [f"tensor {K_PROJ} is also in", "more.safetensors", "remove one"]),
    (
        "wrong shape",
        weights(lambda t: t.update({K_PROJ: torch.ones(8, 32)})),
        [WEIGHTS, K_PROJ, "(8, 32)", "(16, 32)", "config.json"],
    ),
    ("NaN weights", weights(lambda t: t[K_PROJ][3, 4].fill_(torch.nan)), [WEIGHTS, K_PROJ, "holds NaN", "repair"]),
    ("infinite weights", weights(lambda t: t["lm_head.weight"][0].fill_(-torch.inf)), ["lm_head.weight holds NaN"]),
    ("vocabulary", config(vocab_size=200), ["tokenizer.json has 258 tokens", "has 200", "belongs to another model"]),
    ("no tokenizer", lambda f: (f / "tokenizer.json").unlink(), ["tokenizer.json is missing", "needs a tokenizer"]),
    ("broken tokenizer", content(lambda b: b[:-9], "tokenizer.json"), ["tokenizer.json is not a readable tokenizer"]),
    (
        "pickle",
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        ["pickle (pytorch_model.bin)", "can run code", "convert them to safetensors"],
    ),
    (
        "code of its own",
        config(architectures=["MyModel"], auto_map={"AutoModelForCausalLM": "modeling.MyModel"}),
        ["config.json", "'MyModel'", "known are LlamaForCausalLM", "auto_map) is never run"],
    ),
    ("architecture", config(architectures=["BertModel"]), ["config.json", "BertModel", "Qwen2ForCausalLM"]),
    ("RoPE kind", config(rope_scaling={"type": "spiral", "factor": 2}), ["config.json", "'spiral'", "llama3"]),
    ("activation", config(hidden_act="gelu"), ["config.json", "hidden_act is 'gelu'", "'silu'"]),
    ("no JSON", content(lambda _: b"{", "config.json"), ["config.json: cannot be read as JSON", "fetch the model"]),
    ("missing key", lambda f: (f / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}'), [
        "config.json: the key 'num_attention_heads' is missing"
    ]),
    ("broken template", lambda f: edit(f / "tokenizer_config.json", chat_template="{% if %}"), [
        "tokenizer_config.json: the chat template does not parse"
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "words"), [row[1:] for row in MODELS], ids=[row[0] for row in MODELS])
def test_a_bad_model_is_refused_by_name(run: Run, model: Path, spoil: Spoil, words: Sequence[str]) -> None:
    spoil(model)
    ended = run("-m", model)
    assert (ended.code, ended.lines) == (2, [])
    assert [word for word in (str(model), *words) if word not in ended.err] == []


def test_weights_that_do_not_fit_the_number_type_are_not_called_broken(run: Run, model: Path) -> None:
    weights(lambda t: t[K_PROJ][3, 4].fill_(1e6))(model)
    ended = run("-m", model, "--dtype", "float16")
    assert ended.code == 2
    assert f"{K_PROJ} has values beyond float16; pass --dtype float32" in ended.err
    assert run("-m", model, "--dtype", "bfloat16").code == 0


def test_code_of_a_known_architecture_is_not_run_either(run: Run, model: Path) -> None:
    (model / "modeling.py").write_text("raise SystemExit('this ran')")
    config(auto_map={"AutoModelForCausalLM": "modeling.MyLlama"})(model)
    ended = run("-m", model)
    assert ended.code == 0
    assert "names code of its own (auto_map), which is never run" in ended.err


# Exit heads

HEADS: list[tuple[str, Spoil, Sequence[str]]] = [
    ("truncated", content(lambda b: b[:-9], TENSORS_NAME), [TENSORS_NAME, "not a readable safetensors", "again"]),
    ("no tensors", lambda f: (f / TENSORS_NAME).unlink(), [f"{TENSORS_NAME} is missing", CONFIG_NAME]),
    ("duplicate tensor", content(repeat_tensor, TENSORS_NAME), [TENSORS_NAME, "exits.0.norm.weight occurs twice"]),
    ("NaN", lambda f: save_file({"exits.0.norm.weight": torch.full((32,), torch.nan)}, f / TENSORS_NAME), [
        "exits.0.norm.weight holds NaN or infinite values", "make the heads again"
    ]),
    ("wrong shape", lambda f: save_file({"exits.0.norm.weight": torch.ones(31)}, f / TENSORS_NAME), [
        "exits.0.norm.weight", "(31,)", "(32,)"
    ]),
    ("missing tensor", lambda f: save_file({}, f / TENSORS_NAME), ["tensor exits.0.norm.weight is missing"]),
    ("unexpected tensor", lambda f: save_file(
        {"exits.0.norm.weight": torch.ones(32), "x": torch.ones(1)}, f / TENSORS_NAME
    ), ["unexpected tensor x"]),
    ("another base", lambda f: edit(f / CONFIG_NAME, base_model={"name": "other", "fingerprint": "sha256:0"}), [
        CONFIG_NAME, "made for another base: other", "--heads none"
    ]),
    ("another size", lambda f: edit(f / CONFIG_NAME, hidden_size=64), [CONFIG_NAME, "hidden_size is 64", "has 32"]),
    ("no JSON", content(lambda _: b"{", CONFIG_NAME), [CONFIG_NAME, "cannot be read as JSON"]),
    ("another version", lambda f: edit(f / CONFIG_NAME, format_version=9), [CONFIG_NAME, "format_version is 9"]),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "words"), [row[1:] for row in HEADS], ids=[row[0] for row in HEADS])
def test_bad_heads_are_refused_by_name(
    run: Run, model: Path, tmp_path: Path, spoil: Spoil, words: Sequence[str]
) -> None:
    heads = tmp_path / "heads"
    heads.mkdir()
    base = Base("tiny", fingerprint(model), 32, 272, 6)
    file = HeadsFile((ExitSpec(3, "norm"),), ({"norm.weight": torch.ones(32)},))
    save_heads(heads, base, file, header={}, results=[{}])
    assert run("-m", model, "--heads", heads, "--threshold", "0.5").code == 0
    spoil(heads)
    ended = run("-m", model, "--heads", heads, "--threshold", "0.5")
    assert (ended.code, ended.lines) == (2, [])
    assert [word for word in (str(heads), *words) if word not in ended.err] == []


# What is no error, but must not go wrong


@pytest.fixture
def answered(model: Path) -> Answered:
    """The text of an answer of these bytes, a token each, and whether a stop string ended it."""
    tokenizer = Tokenizer(model, 272)
    plain = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # bytes that byte-level vocabularies spell as they are
    others = [byte for byte in range(256) if byte not in plain]
    symbols = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def answer(data: bytes, *stop: str) -> tuple[str, bool]:
        request = Request("bytes", prompt_token_ids=(1,), sampling=SamplingParams(stop=stop))
        found = _Answer(tokenizer.stream(), request)
        tokens = [tokenizer._fast.token_to_id(symbols[byte]) for byte in data]
        return (found.text, True) if any(found.push(token, ends=False) for token in tokens) else (found.text, False)

    return answer


def test_an_emoji_over_several_tokens_never_gives_half_a_character(answered: Answered) -> None:
    data = "a😀b👩‍👧é".encode()
    texts = [answered(data[:n])[0] for n in range(len(data) + 1)]
    whole = [data[:n].decode("utf-8", errors="ignore") for n in range(len(data) + 1)]
    assert texts == whole


def test_a_stop_string_over_several_tokens_ends_the_answer_before_it(answered: Answered) -> None:
    assert answered("ab😀cd".encode(), "b😀c") == ("a", True)
    assert answered("ab😀".encode(), "😀") == ("ab", True)
    assert answered("ab😀".encode()[:-1], "😀") == ("ab", False)


def test_from_python_too_only_the_bad_request_fails(model: Path) -> None:
    bad = [
        Request("surrogate", prompt="\ud83d"),
        Request("turn", messages=({"role": "user", "content": "\ud83d"},)),
        Request("token", prompt_token_ids=(1, 272)),
        Request("nothing"),
    ]
    llm = LLM(str(model), device="cpu", num_blocks=8, max_tokens=2)
    *failed, good = llm.generate([*bad, Request("good", prompt="a")])
    words = ["half a surrogate pair", "half a surrogate pair", "prompt token 272 is outside", "give one of them"]
    assert [word in str(output.error) for word, output in zip(words, failed, strict=True)] == [True] * 4
    assert (good.error, len(good.tokens)) == (None, 2)


def test_special_tokens_written_as_text_are_special_as_in_transformers_and_vllm(model: Path) -> None:
    llm = LLM(str(model), device="cpu", num_blocks=8)
    encode = llm.engine.tokenizer.encode
    assert encode("<s>a</s>") == [BOS, *encode("a"), EOS]
    [output] = llm.generate(["a</s>b"], SamplingParams(max_tokens=2))
    assert output.prompt_tokens == 3
    assert llm.engine.tokenizer.encode_chat(user("</s>")["messages"]) == [EOS]
