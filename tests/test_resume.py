"""`eeinfer generate` that is interrupted and resumed: with a fake LLM, and a real one that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_llm import ROOT, FakeLLM, Run, runner
from tiny import write_model

from eeinfer import LLM, Request, SamplingParams
from eeinfer.cli.app import INTERRUPTED, main
from eeinfer.cli.interrupt import Interrupts
from eeinfer.core.sequence import Status
from eeinfer.engine.engine import Stats

PROMPTS = [
    '{"prompt": "one two", "id": "a"}',
    "{",
    '{"prompt": "fail", "id": "c"}',
    '{"prompt": "four"}',
    '{"prompt": "5"}',
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Ctrl-C, pressed so often, after so many answers."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background of a script

    def plan(after: int | None, times: int = 1) -> None:
        monkeypatch.setattr(FakeLLM, "interrupt_after", after)
        monkeypatch.setattr(FakeLLM, "interrupts", times)

    yield plan
    signal.signal(signal.SIGINT, before)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("times", "kept"), [(1, 2), (2, 1)])
def test_once_finishes_what_runs_twice_stops_at_once(
    run: Run, prompts: Path, tmp_path: Path, stop: Callable[..., None], times: int, kept: int
) -> None:
    output = tmp_path / "answers.jsonl"
    whole = tmp_path / "whole.jsonl"
    assert run("generate", "--prompts", prompts, "-o", whole).code == 1
    output.write_text("of an earlier run\n")
    stop(1, times)
    ended = run("generate", "--prompts", prompts, "-o", output, "--stats", tmp_path / "stats.json")
    assert ended.code == 130
    assert f"stopped early; {kept} answers are in {output}.journal; go on with --resume" in ended.err
    assert ("stopping: answers in progress are finished" in ended.err) == (times == 1)
    assert output.read_text() == "of an earlier run\n"
    assert json.loads((tmp_path / "stats.json").read_text())["requests"]["unanswered"] == 4 - kept

    stop(None)
    refused = run("generate", "--prompts", prompts, "-o", output)
    assert refused.code == 2
    assert f"an interrupted run left {kept} answers in {output}.journal" in refused.err
    resumed = run("generate", "--prompts", prompts, "-o", output, "--resume", "--stats", tmp_path / "stats.json")
    assert resumed.code == 1
    assert f"{kept} answers are in {output}.journal; {4 - kept} to be made" in resumed.err
    assert [r.id for r in FakeLLM.built[-1].requests] == ["a", "c", "line-4", "line-5"][kept:]
    assert output.read_bytes() == whole.read_bytes()
    assert "2 of 5 prompts failed" in resumed.err, "failures of the interrupted run count"
    requests = json.loads((tmp_path / "stats.json").read_text())["requests"]
    assert (requests["kept"], requests["unanswered"], requests["finish_reasons"]) == (kept, 0, {"stop": 3, "error": 1})
    assert not list(tmp_path.glob("*answers.jsonl.[jl]*"))


def test_answers_to_batch_lines_and_several_to_a_prompt_are_kept_too(
    run: Run, tmp_path: Path, stop: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(name: str, prompt: str, **more: object) -> str:
        body = {"prompt": prompt, "temperature": 1, **more}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})

    lines = [
        '{"prompt": "one two", "id": "n", "n": 3, "temperature": 1}',
        call("o", "one", n=2),
        call("bad", "one", n=0),
        call("f", "fail"),
        call("p", "one two"),
        '{"prompt": "four", "n": 2, "temperature": 1}',
    ]
    prompts, output, whole = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    prompts.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr("eeinfer.engine.openai_batch.time", lambda: 7)
    assert run("generate", "--prompts", prompts, "-o", whole).code == 1
    stop(3, 2)
    assert run("generate", "--prompts", prompts, "-o", output).code == 130
    stop(None)

    prompts.write_text("\n".join(lines).replace('"n": 3', '"n": 4'), encoding="utf-8")
    refused = run("generate", "--prompts", prompts, "-o", output, "--resume")
    assert refused.code == 2
    assert "prompts hash was" in refused.err
    prompts.write_text("\n".join(lines), encoding="utf-8")
    resumed = run("generate", "--prompts", prompts, "-o", output, "--resume", "--stats", tmp_path / "stats.json")
    assert resumed.code == 1
    assert [r.id for r in FakeLLM.built[-1].requests] == ["p", "line-6"]
    assert output.read_bytes() == whole.read_bytes()
    assert "2 of 6 prompts failed; the first: " in resumed.err
    bad, failed = (json.loads(output.read_text().splitlines()[i])["response"] for i in (2, 3))
    assert [bad["status_code"], failed["status_code"]] == [400, 400]
    requests = json.loads((tmp_path / "stats.json").read_text())["requests"]
    assert requests == {
        "total": 6,
        "ok": 4,
        "failed": 2,
        "bad_lines": 1,
        "unanswered": 0,
        "kept": 3,
        "finish_reasons": {"stop": 4, "length": 4, "error": 1},
    }


def test_a_run_that_fails_before_its_first_answer_leaves_nothing(
    run: Run, tmp_path: Path, stop: Callable[..., None]
) -> None:
    stop(0, 2)
    assert run("generate", "--prompts", "-", "-o", tmp_path / "a.jsonl", stdin='{"prompt": "a"}').code == 130
    assert list(tmp_path.iterdir()) == []


def test_to_standard_output_what_is_finished_is_written(run: Run, prompts: Path, stop: Callable[..., None]) -> None:
    stop(1)
    ended = run("generate", "--prompts", prompts)
    assert ended.code == 130
    assert [line["id"] for line in ended.lines] == ["a", "line-2", "c"]


def test_ctrl_c_after_the_last_request_has_started_loses_nothing(
    run: Run, prompts: Path, tmp_path: Path, stop: Callable[..., None]
) -> None:
    stop(3)
    ended = run("generate", "--prompts", prompts, "-o", tmp_path / "a.jsonl")
    assert ended.code == 1, "all are answered, one failed"
    assert ids(tmp_path / "a.jsonl") == ["a", "line-2", "c", "line-4", "line-5"]


def test_when_all_answers_are_there_no_model_is_loaded(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "answers.jsonl"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        ended = run("generate", "--prompts", prompts, "-o", output)
    assert ended.code == 2
    assert f"{output}: No space left on device; 4 answers are in {output}.journal; mend that and" in ended.err
    assert len(FakeLLM.built) == 1
    assert run("generate", "--prompts", prompts, "-o", output, "--resume").code == 1
    assert len(FakeLLM.built) == 1
    assert len(ids(output)) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--max-tokens", "9"], "config sampling.max_tokens was 256, is 9"),
        (
            ["--batch", "3", "--strategy", "full"],
            'strategy was "split", is "full"; config batching.max_num_seqs was 32, ',
        ),
        (["--num-prompts", "4"], "prompts count was 5, is 4; prompts hash was "),
        (["-m", "other/model"], 'model was "sha256:of-smollm2-135m-instruct", is "sha256:of-other/model"'),
        (["--token-details"], "token_details was false, is true"),
    ],
)
def test_resume_with_anything_else_is_refused_before_the_model_is_loaded(
    run: Run, prompts: Path, tmp_path: Path, stop: Callable[..., None], change: list[str], message: str
) -> None:
    output = tmp_path / "answers.jsonl"
    stop(1)
    run("generate", "--prompts", prompts, "-o", output)
    content = Path(f"{output}.journal").read_bytes()
    ended = run("generate", "--prompts", prompts, "-o", output, "--resume", *change)
    assert ended.code == 2
    assert message in ended.err
    assert f"--resume: {output}.journal was made by another run: " in ended.err
    assert len(FakeLLM.built) == 1
    assert Path(f"{output}.journal").read_bytes() == content


def test_resume_with_another_tokenizer_or_template_is_refused(
    run: Run, prompts: Path, tmp_path: Path, stop: Callable[..., None]
) -> None:
    model, output = write_model(tmp_path / "model", "gqa"), tmp_path / "answers.jsonl"
    command = ("generate", "-m", model, "--strategy", "full", "--prompts", prompts, "-o", output)
    stop(1)
    assert run(*command).code == 130
    stop(None)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    ended = run(*command, "--resume")
    assert ended.code == 2
    assert 'another run: files chat_template.jinja was null, is "sha256:' in ended.err
    (model / "chat_template.jinja").unlink()
    assert run(*command, "--resume").code == 1, "all are answered, one failed"
    assert len(ids(output)) == 5


def test_resume_needs_a_file_and_says_when_there_is_nothing(run: Run, prompts: Path, tmp_path: Path) -> None:
    assert "--resume: answers on standard output leave nothing" in run("generate", "--resume").err
    assert "is a device or a pipe" in run("generate", "--resume", "-o", "/dev/null").err
    assert (
        f"--output {prompts}: this is the prompt"
        in run("generate", "--prompts", prompts, "--resume", "-o", prompts).err
    )
    assert FakeLLM.built == []
    ended = run("generate", "--prompts", prompts, "--resume", "-o", tmp_path / "a.jsonl")
    assert ended.code == 1
    assert f"no answers in {tmp_path}/a.jsonl.journal yet; 4 to be made" in ended.err


def test_bad_lines_alone_do_not_resume_another_run(
    run: Run, prompts: Path, tmp_path: Path, stop: Callable[..., None]
) -> None:
    stop(1)
    run("generate", "--prompts", prompts, "-o", tmp_path / "a.jsonl")
    ended = run("generate", "--prompts", "-", "-o", tmp_path / "a.jsonl", "--resume", stdin="{")
    assert ended.code == 2
    assert "holds answers, but these prompts are bad lines only" in ended.err
    assert (tmp_path / "a.jsonl.journal").is_file()


# A real engine


def test_drain_finishes_what_has_started_preempted_requests_among_it(make_llm: Callable[..., LLM]) -> None:
    requests = [Request(str(i), prompt="abcdefgh"[: i + 2], sampling=SamplingParams(ignore_eos=True)) for i in range(8)]
    undisturbed = {output.id: output for output in make_llm(max_tokens=20).generate(requests)}
    llm = make_llm(max_tokens=20, num_blocks=16)  # 4 requests of up to 7 blocks do not fit
    started: list[str] = []

    def step(stats: Stats) -> None:
        if stats.preemptions and not started:
            started.extend(s.request_id for s in llm.engine.scheduler.live if s.depths)
            waiting = [s for s in llm.engine.scheduler.live if s.status is Status.WAITING]
            assert any(s.depths for s in waiting), "one was preempted"
            llm.drain()

    outputs = llm.generate(requests, on_step=step)
    assert {output.id for output in outputs} >= set(started)
    assert 0 < len(outputs) < len(requests)
    assert outputs == [undisturbed[output.id] for output in outputs]
    assert [output.id for output in llm.generate([requests[-1]])] == ["7"], "a drained engine takes new requests"


def test_drain_finishes_all_sequences_of_a_request_that_has_started(make_llm: Callable[..., LLM]) -> None:
    sampling = SamplingParams(n=3, temperature=1.0, ignore_eos=True)
    requests = [Request(name, prompt="abc", sampling=sampling) for name in ("first", "second", "third")]
    undisturbed = make_llm(max_tokens=5).generate(requests)
    llm = make_llm(max_tokens=5, max_num_seqs=4)
    assert (
        llm.generate(requests, on_step=lambda stats: llm.drain() if stats.generated_tokens else None) == undisturbed[:2]
    )
    llm.engine.scheduler.check()


def test_ctrl_c_before_the_first_step_and_the_third_time_is_not_waited_for() -> None:
    drained: list[bool] = []
    interrupts = Interrupts(lambda: drained.append(True), lambda _: None)
    with pytest.raises(KeyboardInterrupt), interrupts.watched():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupts = Interrupts(lambda: drained.append(True), lambda _: None)
    with interrupts.watched():
        interrupts.step()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert not drained
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts(pytest.fail, pytest.fail).watched():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_killed_and_interrupted_runs_end_in_the_file_of_an_undisturbed_one(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, whole, output = tmp_path / "prompts.jsonl", tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    lines = [json.dumps({"prompt": f"{'x' * (i % 7)} {i}", "temperature": i % 2}) for i in range(240)]
    prompts.write_text("\n".join([*lines, "{"]), encoding="utf-8")
    common = ["generate", "-m", str(tiny_model("gqa")), "--prompts", str(prompts), "--num-blocks", "64", "--batch", "4"]
    common += ["--strategy", "full", "--dtype", "float32", "--device", "cpu", "--max-tokens", "6", "--output"]

    def here(*arguments: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["eeinfer", *common, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    def elsewhere(number: int, above: int) -> int:
        """Send a signal when so many answers are there. Returns the exit code."""
        arguments = [sys.executable, "-m", "eeinfer", *common, str(output), "--resume"]
        with subprocess.Popen(arguments, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
            while answers_in(output) < above and process.poll() is None:
                time.sleep(0.002)
            process.send_signal(number)
        return process.returncode

    environment = {name: value for name, value in os.environ.items() if "__" not in name}
    assert here(str(whole)) == 1, "a line is bad"
    assert elsewhere(signal.SIGKILL, 30) == -signal.SIGKILL
    killed = answers_in(output)
    assert elsewhere(signal.SIGINT, killed + 30) == INTERRUPTED
    assert killed < answers_in(output) < 240, "it went on, and stopped"
    assert here(str(output), "--resume") == 1
    assert output.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("*answers*")) == ["answers.jsonl", "answers.jsonl.settings.toml"]


def answers_in(output: Path) -> int:
    path = Path(f"{output}.journal")
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0
