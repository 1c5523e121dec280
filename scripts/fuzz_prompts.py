"""Feeds the reader of prompt files with lines that hypothesis makes up, and what it lets through to a tokenizer.

Lines are objects with known and unknown fields of any JSON type, plausible requests, and bytes cut, flipped and spliced
out of both. Nothing may be raised but RequestError; every line that is not blank must give one entry.

    python scripts/fuzz_prompts.py --lines 100000
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny import VOCAB, write_model  # noqa: E402 - the path is set above

from eeinfer.core.request import Request  # noqa: E402
from eeinfer.engine.encode import encode  # noqa: E402
from eeinfer.engine.prompt_file import FIELDS, ROLES, LineError, error_line, read_prompt_file  # noqa: E402
from eeinfer.errors import EeinferError, RequestError  # noqa: E402
from eeinfer.model.tokenizer import Tokenizer  # noqa: E402

LINES_A_FILE = 20
FILES_A_TURN = 250

TEXT = st.text(max_size=30) | st.sampled_from(
    ["", "</s>", "<s>", "😀", "\ud83d", "\0", "a\u2028b", "{{ 1 }}", "\ufeff"]
)
NUMBER = st.integers() | st.floats() | st.sampled_from([0, -1, 1, 2**63, 10**400, -0.0])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(ROLES) | TEXT, "content": TEXT | JSON})
PLAUSIBLE = st.fixed_dictionaries(
    {},
    optional={
        "prompt": TEXT,
        "messages": st.lists(MESSAGE, max_size=3) | JSON,
        "id": TEXT | NUMBER,
        "max_tokens": NUMBER,
        "temperature": NUMBER,
        "seed": NUMBER,
        "stop": TEXT | st.lists(TEXT, max_size=3),
    },
)
GOOD_CHAT = st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": TEXT})
GOOD_SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 300),
    "temperature": st.floats(0, 5),
    "seed": st.integers(0, 2**63 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=2),
}
GOOD = st.fixed_dictionaries({"prompt": TEXT}, optional=GOOD_SAMPLING) | st.fixed_dictionaries(
    {"messages": st.lists(GOOD_CHAT, min_size=1, max_size=3)}, optional=GOOD_SAMPLING
)
ANY_FIELDS = st.dictionaries(st.sampled_from([*FIELDS, "category", "role"]) | TEXT, JSON, max_size=5)


def as_line(value: Any) -> bytes:
    """JSON with and without escapes, so that half surrogate pairs come in both ways."""
    return json.dumps(value, ensure_ascii=len(str(value)) % 2 == 0).encode("utf-8", "surrogatepass")


OBJECT = (PLAUSIBLE | ANY_FIELDS | JSON).map(as_line)


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A line with a piece cut out, and other bytes in its place."""
    line = draw(OBJECT | GOOD.map(as_line))
    start = draw(st.integers(0, len(line)))
    stop = draw(st.integers(start, len(line)))
    return line[:start] + draw(st.binary(max_size=6) | OBJECT) + line[stop:]


LINE = st.one_of(
    GOOD.map(as_line), OBJECT, mangled(), st.binary(max_size=40), st.sampled_from([b"", b"\r", b" ", b"[" * 5000])
)


def main() -> None:
    """Ends with an exception at the first line that does what it must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(write_model(Path(folder) / "model", "gqa"), VOCAB)

        for turn in range(chosen.seed, chosen.seed + -(-chosen.lines // (LINES_A_FILE * FILES_A_TURN))):
            fuzz(turn, tokenizer, counts)
    print(", ".join(f"{name} {count:,}" for name, count in counts.most_common()))


def fuzz(turn: int, tokenizer: Tokenizer, counts: Counter[str]) -> None:
    """Files of one turn. Hypothesis remembers what it has tried, so that one turn for all would fill the memory."""

    @seed(turn)
    @settings(
        max_examples=FILES_A_TURN,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(LINE, min_size=LINES_A_FILE, max_size=LINES_A_FILE))
    def one_file(lines: list[bytes]) -> None:
        check(lines, tokenizer, counts)

    one_file()


def check(lines: list[bytes], tokenizer: Tokenizer, counts: Counter[str]) -> None:
    """Read a file of these lines, and encode what is good in it."""
    content = b"\n".join(lines)
    wanted = [i for i, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1) if line.strip()]
    counts["lines"] += len(lines)
    try:
        entries = read_prompt_file(io.BytesIO(content))
    except EeinferError:
        assert not wanted or content.startswith((b"\xff\xfe", b"\xfe\xff")), "only UTF-16 is refused as a whole"
        counts["refused as a whole"] += len(lines)
        return
    assert [line_of(entry) for entry in entries] == wanted
    good = [entry for entry in entries if isinstance(entry, Request)]
    assert len({entry.id for entry in good}) == len(good), "an id twice"
    for entry in entries:
        counts[outcome(entry, tokenizer)] += 1


def line_of(entry: Request | LineError) -> int | None:
    """The number of its line."""
    return entry.line


def outcome(entry: Request | LineError, tokenizer: Tokenizer) -> str:
    """What becomes of a line."""
    if isinstance(entry, LineError):
        assert entry.message.startswith(f"line {entry.line}: ")
        json.dumps(error_line(entry), ensure_ascii=False).encode()
        return "bad lines"
    try:
        tokens = encode(entry, tokenizer, VOCAB)
    except RequestError:
        return "refused by tokenizer or template"
    assert tokens
    assert all(0 <= token < VOCAB for token in tokens)
    return "good requests"


if __name__ == "__main__":
    main()
