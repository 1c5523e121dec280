"""`eeinfer generate`, with a fake LLM: order, error lines, files, exit codes, marked text, and standard error."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from fake_llm import ROOT, FakeLLM, FakeStats, Run, runner
from rich.console import Console

from eeinfer.cli.prompt_source import prompt_source
from eeinfer.cli.show import SCALE, DepthPainter, shows_colours
from eeinfer.core.request import FinishReason, RequestOutput, TokenRecord
from eeinfer.errors import EeinferError


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "one two three", "id": "a"}', "{", '{"prompt": "fail", "id": "c"}', '{"prompt": "vier fünf"}']
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_answers_come_in_order_with_an_error_line_for_each_failure(run: Run, prompts: Path) -> None:
    ended = run("generate", "--prompts", prompts)
    assert ended.code == 1
    first, bad, failed, last = ended.lines
    assert first == {
        "id": "a",
        "text": "one two three",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
        "exits": {"mean_layers": 26.0, "share": {"18": 0.3333, "30": 0.6667}},
    }
    assert (bad["id"], bad["line"]) == ("line-2", 2)
    assert bad["error"].startswith("line 2: not JSON at column 2")
    assert failed == {"id": "c", "line": 3, "error": "the prompt is too long"}
    assert (last["id"], last["text"]) == ("line-4", "vier fünf")
    assert "fünf" in ended.out
    assert [r.id for r in FakeLLM.built[0].requests] == ["a", "c", "line-4"]


def test_standard_error_has_a_summary_and_a_count_of_failures(run: Run, prompts: Path) -> None:
    notes = run("generate", "--prompts", prompts).err.splitlines()
    assert notes[0] == "loaded"
    told = {words.split()[0]: " ".join(words.split()[1:]) for words in notes[1:-1]}
    assert re.fullmatch(r"load \d+\.\d s, prefill 0\.5 s, decode 1\.5 s", told.pop("time"))
    assert told == {
        "requests": "2 answered (error 1, stop 2), 2 failed",
        "tokens": "5 in 2.0 s, 1.5 tokens/s",
        "layers": "24.0 of 30 a token; left at 18: 40.0%, 30: 60.0%",
        "counters": "made up hits 3",
    }
    assert notes[-1].startswith(f"2 of 4 prompts failed; the first: {prompts}, line 2: not JSON")


def test_stats_are_written_with_every_counter_of_the_engine(run: Run, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "stats.json"
    assert run("generate", "--prompts", prompts, "--stats", file).code == 1
    stats = json.loads(file.read_text(encoding="utf-8"))
    assert stats["requests"] == {
        "total": 4,
        "ok": 2,
        "failed": 2,
        "bad_lines": 1,
        "unanswered": 0,
        "kept": 0,
        "finish_reasons": {"stop": 2, "error": 1},
    }
    assert stats["exit_shares"] == {"18": 0.4, "30": 0.6}
    assert (stats["mean_layers"], stats["num_layers"], stats["tokens_per_second"]) == (24.0, 30, 1.5)
    assert set(stats["seconds"]) == {"load", "prefill", "decode"}
    assert (stats["seconds"]["prefill"], stats["seconds"]["decode"]) == (0.5, 1.5)
    assert stats["counters"] == {field.name: getattr(FakeLLM.built[0].stats, field.name) for field in fields(FakeStats)}


def test_all_answered_is_exit_code_0(run: Run) -> None:
    ended = run("generate", "--prompts", "-", stdin='{"prompt": "a b"}\n')
    assert (ended.code, len(ended.lines)) == (0, 1)
    assert "failed" not in ended.err


def test_bad_lines_alone_load_no_model(run: Run) -> None:
    ended = run("generate", "--prompts", "-", stdin="{\n[]\n")
    assert ended.code == 1
    assert [line["line"] for line in ended.lines] == [1, 2]
    assert FakeLLM.built == []


def test_packaged_prompts_are_the_default_and_num_prompts_takes_the_first(run: Run) -> None:
    ended = run("generate", "--num-prompts", "2")
    lines = (ROOT / "eeinfer" / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    assert [line["id"] for line in ended.lines] == [json.loads(line)["id"] for line in lines]


def test_token_details(run: Run) -> None:
    [line] = run("generate", "--prompts", "-", "--token-details", stdin='{"prompt": "a b"}').lines
    assert line["tokens"] == [
        {"token_id": 0, "text": "a", "layers_executed": 30, "confidence": None},
        {"token_id": 1, "text": " b", "layers_executed": 18, "confidence": 0.9},
    ]


def test_without_exits_nothing_is_said_about_depth(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "exits", ())
    [line] = run("generate", "--prompts", "-", stdin='{"prompt": "a"}').lines
    assert "exits" not in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "exits.treshold=1"], "error: --set exits.treshold=1: unknown key 'exits.treshold'; did you mean"),
        (["--batch", "0"], "error: argument: batching.max_num_seqs must be an integer >= 1; got 0"),
        (["--exits", "20,15"], "error: argument: exits.layers must be "),
        (["-c", "none.toml"], "error: none.toml: cannot read this configuration file: No such file"),
        (["--prompts", "none.jsonl"], "error: none.jsonl: cannot read prompts: No such file"),
        (["--prompts", "-"], "error: standard input: no prompts"),
        (["--strategy", "slit"], "'slit' is not one of"),
        (["--num-prompts", "0"], "--num-prompts"),
    ],
)
def test_when_nothing_ran_the_exit_code_is_2(run: Run, arguments: list[str], message: str) -> None:
    ended = run("generate", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert FakeLLM.built == []


def test_an_output_file_appears_whole_with_its_settings(run: Run, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    ended = run("generate", "--prompts", prompts, "-o", output, "--seed", "3")
    assert (ended.code, ended.out) == (1, "")
    assert [json.loads(line)["id"] for line in output.read_text(encoding="utf-8").splitlines()] == [
        "a",
        "line-2",
        "c",
        "line-4",
    ]
    settings = tomllib.loads((tmp_path / "answers.jsonl.settings.toml").read_text(encoding="utf-8"))
    assert settings["sampling"]["seed"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "answers.jsonl",
        "answers.jsonl.settings.toml",
        "prompts.jsonl",
    ]
    assert run("config", "show", "-c", tmp_path / "answers.jsonl.settings.toml").code == 0


def test_an_output_that_cannot_be_is_refused_before_any_work(run: Run, prompts: Path, tmp_path: Path) -> None:
    content = prompts.read_bytes()
    (tmp_path / "link.jsonl").symlink_to(prompts)
    (tmp_path / "round.jsonl").symlink_to("round.jsonl")
    for output, message in [
        (prompts, "this is the prompt file; name another"),
        (tmp_path / "link.jsonl", "this is the prompt file; name another"),
        (tmp_path, "this is a folder; name a file in it"),
        (tmp_path / "none" / "a.jsonl", "does not exist; create it first"),
        (tmp_path / "round.jsonl", "Too many levels of symbolic links; name another file"),
        (tmp_path / ("n" * 300), "File name too long; name another file"),
    ]:
        for option in ("--output", "--stats"):
            ended = run("generate", "--prompts", prompts, option, output)
            assert ended.code == 2
            assert f"{option} {output}: " in ended.err
            assert message in ended.err
    for name in ("a.jsonl", "a.jsonl.journal", "a.jsonl.settings.toml"):
        ended = run("generate", "--prompts", prompts, "-o", tmp_path / "a.jsonl", "--stats", tmp_path / name)
        assert "the answers go to this file; name another" in ended.err
    (tmp_path / "b.jsonl.settings.toml").mkdir()
    ended = run("generate", "--prompts", prompts, "-o", tmp_path / "b.jsonl")
    assert f"the settings go to {tmp_path / 'b.jsonl.settings.toml'}, which is a folder; move it" in ended.err
    assert prompts.read_bytes() == content
    assert FakeLLM.built == []


def test_standard_error_may_be_closed(run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert run("generate", "--prompts", prompts, "-o", tmp_path / "a.jsonl").code == 1
    assert len((tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()) == 4


def test_standard_input_that_is_closed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(EeinferError, match="standard input is closed; name a file"):
        prompt_source("-")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is played by a device of Linux")
@pytest.mark.parametrize("option", ["--output", "--stats"])
def test_a_full_disk_is_named(run: Run, prompts: Path, option: str) -> None:
    ended = run("generate", "--prompts", prompts, option, "/dev/full")
    assert ended.code == 2
    assert "/dev/full: cannot be written: No space left on device" in ended.err


def test_a_pipe_is_written_to_and_not_replaced(run: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    try:
        assert run("generate", "--prompts", "-", "-o", pipe, stdin='{"prompt": "a"}').code == 0
        assert json.loads(os.read(reader, 10_000))["text"] == "a"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_show_exits_marks_depth_in_plain_text(run: Run, prompts: Path) -> None:
    ended = run("generate", "--prompts", prompts, "--show-exits")
    bad_line = run("generate", "--prompts", prompts).lines[1]["error"]
    assert ended.out.splitlines() == [
        "a  26.0 of 30 layers a token",
        "one‹18: two› three",
        "",
        "line-2",
        f"error: {bad_line}",
        "",
        "c",
        "error: the prompt is too long",
        "",
        "line-4  24.0 of 30 layers a token",
        "vier‹18: fünf›",
        "",
        "layers run:  ‹18:› 40.0%  ‹24:› 0.0%  unmarked 60.0%",
    ]


def test_show_exits_beside_an_output_file(run: Run, prompts: Path, tmp_path: Path) -> None:
    ended = run("generate", "--prompts", prompts, "--show-exits", "-o", tmp_path / "a.jsonl")
    assert "one‹18: two› three" in ended.out
    assert len((tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()) == 4


def test_colours_follow_the_conventions(run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    ended = run("generate", "--prompts", prompts, "--show-exits")
    assert "one\x1b[38;5;162m two\x1b[0m three" in ended.out
    assert "\x1b[38;5;162m■ 18\x1b[0m 40.0%" in ended.out
    assert "\x1b" not in ended.err  # no progress bar in a log file
    monkeypatch.setenv("NO_COLOR", "1")
    assert "one‹18: two› three" in run("generate", "--prompts", prompts, "--show-exits").out


def test_the_scale_is_readable_on_black_and_white() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in SCALE:
        assert (luminance(colour) + 0.05) / 0.05 >= 4
        assert 1.05 / (luminance(colour) + 0.05) >= 4


def test_styles_run_from_vivid_to_plain() -> None:
    painter = DepthPainter((18, 21, 24, 27), 30, coloured=True)
    styles = [painter.style(depth) for depth in (18, 21, 24, 27, 30)]
    assert (styles[0], styles[3], styles[4]) == (SCALE[0], SCALE[-1], "")
    assert len(set(styles)) == 5
    assert DepthPainter((18,), 30, coloured=True).style(18) == SCALE[0]
    assert DepthPainter((18,), 30, coloured=False).style(18) == ""


def test_several_answers_follow_each_other() -> None:
    first, other = (
        RequestOutput("a", text, FinishReason.STOP, 1, (TokenRecord(1, text, depth, 0.9),), index=i)
        for i, (text, depth) in enumerate([("one", 18), ("two", 30)])
    )
    both = replace(first, outputs=(first, other))
    shown = DepthPainter((18,), 30, coloured=False).answer(both).plain
    assert shown == "a  24.0 of 30 layers a token\n‹18:one›\ntwo\n"


def test_an_answer_cannot_drive_the_terminal() -> None:
    tokens = (TokenRecord(0, "[red]\x1b[2J\x07", 30, None), TokenRecord(1, "a\r\n\tb\u00a0", 30, None))
    text = DepthPainter((), 30, coloured=True).answer(RequestOutput("i", "", FinishReason.STOP, 1, tokens))
    assert text.plain == "i  30.0 of 30 layers a token\n[red]\ufffd[2J\ufffda\n\tb\u00a0\n"


def test_a_dumb_terminal_gets_no_colours() -> None:
    assert shows_colours(Console(force_terminal=True, color_system="256", no_color=False))
    assert not shows_colours(Console(force_terminal=True, color_system=None, no_color=False))
    assert not shows_colours(Console(force_terminal=False, color_system="256", no_color=False))


def test_a_marked_line_break_is_shown_inside_its_mark() -> None:
    tokens = tuple(TokenRecord(i, text, 18, 0.9) for i, text in enumerate([".", "\n", "\n"]))
    output = RequestOutput("a", ".\n\n", FinishReason.STOP, 1, (*tokens, TokenRecord(9, "End", 30, None)))
    assert DepthPainter((18,), 30, coloured=False).answer(output).plain.endswith("‹18:.↵↵›\n\nEnd\n")
