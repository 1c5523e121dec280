"""`eeinfer doctor`: findings, and a self-test that notices a machine that computes wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_llm import Run, runner

from eeinfer.engine import machine
from eeinfer.engine.engine import Engine
from eeinfer.engine.self_test import KernelTest, SelfTest, self_test
from eeinfer.model.decoder import Decoder
from eeinfer.ops.unavailable import Unavailable
from eeinfer.runner import model_runner


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("EEINFER_HOME", str(tmp_path / "store"))
    return runner(monkeypatch, capsys)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-tests are passed without running."""
    monkeypatch.setattr("eeinfer.engine.doctor.self_test", lambda *_: SelfTest({2: 1, 6: 1}, None))
    monkeypatch.setattr("eeinfer.engine.doctor.kernel_test", lambda _: KernelTest(0.03, 0.04, invariant=True))
    monkeypatch.setattr("eeinfer.engine.doctor.free_memory", lambda _: 2**32)


def problems(run: Run, *arguments: str) -> dict[str, str]:
    """What is wrong, by finding."""
    ended = run("doctor", "--json", *arguments)
    report = json.loads(ended.out)
    found = {finding["name"]: finding["problem"] for finding in report["findings"] if finding["problem"]}
    assert (ended.code, report["ok"]) == ((1, False) if found else (0, True))
    return found


def test_the_self_test_passes_here_with_exits_and_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    preemptions = []
    step = Engine.step

    def watched(engine: Engine) -> Any:
        preemptions.append(engine.stats.preemptions)
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    outcome = self_test("cpu")
    assert outcome.passed
    assert list(outcome.depths) == [2, 4, 6]
    assert sum(outcome.depths.values()) == 8 * 12
    assert max(preemptions) > 0


@pytest.mark.parametrize("module", ["attention", "completion"])
def test_the_self_test_notices_wrong_arithmetic(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """In float32 alone, as a broken kernel would be."""
    if module == "attention":
        plain = Decoder.attend

        def broken(own: Decoder, projected: torch.Tensor, *rest: Any) -> torch.Tensor:
            out = plain(own, projected, *rest)
            return out * 1.05 if out.dtype == torch.float32 else out

        monkeypatch.setattr(Decoder, "attend", broken)
    else:
        store = model_runner.ModelRunner.run

        def forgets(runner: Any, plan: Any) -> Any:
            if type(plan).__name__ == "Complete" and runner.decoder.dtype == torch.float32:
                return model_runner.Outcome([])
            return store(runner, plan)

        monkeypatch.setattr(model_runner.ModelRunner, "run", forgets)
    outcome = self_test("cpu")
    assert not outcome.passed
    assert outcome.difference
    assert outcome.difference.startswith("request ")


def test_without_early_exits_the_self_test_proves_nothing() -> None:
    assert not SelfTest({6: 192}, None).passed


@pytest.mark.usefixtures("healthy")
def test_a_healthy_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    ended = run("doctor")
    assert ended.code == 0
    assert [line[:4] for line in ended.out.splitlines()] == ["ok  "] * 10
    assert f"torch {torch.__version__.partition('+')[0]}" in ended.out
    assert "none found; native kernels need a C++ compiler" in ended.out
    assert "none yet, run `eeinfer pull`" in ended.out
    assert problems(run) == {}


@pytest.mark.usefixtures("healthy")
def test_what_is_wrong_is_found_and_told(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EEINFER_EXITS__TRESHOLD", "1")
    assert "did you mean 'EEINFER_EXITS__THRESHOLD'" in problems(run)["settings"]
    monkeypatch.delenv("EEINFER_EXITS__TRESHOLD")
    assert "not a device" in problems(run, "--device", "toaster")["device"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EEINFER_HOME", str(tmp_path / "file" / "store"))
    assert "set EEINFER_HOME" in problems(run)["model store"]
    monkeypatch.setenv("EEINFER_HOME", str(tmp_path))
    monkeypatch.setattr("eeinfer.engine.doctor.free_memory", lambda _: 2**20)
    assert "little memory" in problems(run)["memory"]
    monkeypatch.setattr("eeinfer.engine.doctor.free_memory", lambda _: 2**32)
    monkeypatch.setattr("eeinfer.engine.doctor.self_test", lambda *_: SelfTest({2: 1, 6: 1}, "request 3: 1@2 for 5@6"))
    assert "request 3: 1@2 for 5@6" in problems(run)["self-test"]
    ended = run("doctor")
    assert "FAIL  self-test" in ended.out


@pytest.mark.usefixtures("healthy")
def test_the_backend_is_the_one_of_the_settings(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(_: Path) -> None:
        raise Unavailable("no compiler")

    monkeypatch.setattr("eeinfer.engine.doctor.load", unavailable)
    assert problems(run, "--device", "cpu") == {}
    wrong = "model.kernels is native: no compiler; use auto or torch"
    asked = ("--device", "cpu", "--set", "model.kernels=native")
    assert problems(run, *asked) == {"attention backend": wrong, "linear backend": wrong}
    out = run("doctor", "--device", "cpu", "--set", "model.kernels=torch").out
    assert "no compiler" not in out
    assert out.count("model.kernels is torch") == 2
    assert "kernel test" not in out, "they are not used"


@pytest.mark.usefixtures("healthy")
def test_native_kernels_that_are_used_are_tested(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eeinfer.engine.doctor.load", lambda _: None)
    out = run("doctor", "--device", "cpu").out
    assert "off by 3.0% (at most 1.2 times torch's own 4.0%); a row's bits are its own" in out
    for wrong in (KernelTest(0.05, 0.04, invariant=True), KernelTest(0.03, 0.04, invariant=False)):
        monkeypatch.setattr("eeinfer.engine.doctor.kernel_test", lambda _, wrong=wrong: wrong)
        assert "set model.kernels to torch" in problems(run, "--device", "cpu")["kernel test"]


@pytest.mark.usefixtures("healthy")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests interpret Triton kernels only where there is no GPU")
def test_triton_kernels_are_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed here; it is for Linux alone")
    asked = ("--device", "cpu", "--set", "model.kernels=triton")
    assert problems(run, *asked) == {}
    shown = run("doctor", *asked).out
    assert "triton kernels, and torch (scaled_dot_product_attention" in shown
    assert "linear backend: torch (torch.nn.functional.linear" in " ".join(shown.split())
    monkeypatch.setattr("eeinfer.model.triton.find_spec", lambda _: None)
    why = "triton is not installed; it comes with torch's builds for CUDA"
    wrong = f"model.kernels is triton: {why}; use auto or torch"
    assert problems(run, *asked) == {"attention backend": wrong, "linear backend": wrong}


def test_an_installation_that_does_not_load_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eeinfer.engine.doctor", None)  # importing it is an ImportError
    assert "install eeinfer and torch again" in problems(run)["installation"]


def test_features_are_read_from_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert machine.cpu_features() is None
    two = "processor : 0\nmodel name : Chip: 9\nflags : fpu avx2 amx_tile amx_bf16\n" * 2
    (tmp_path / "cpuinfo").write_text(two)
    assert machine.cpu_features() == ["avx2", "amx_tile", "amx_bf16"]
    assert machine.cpu_name() == "Chip: 9"
    (tmp_path / "cpuinfo").write_text("processor : 0\nFeatures : fp asimd i8mm\n")
    assert machine.cpu_features() == ["asimd", "i8mm"]


def test_a_compiler_that_does_not_run_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, body in (("cc", "echo 'cc 12.2'; echo more"), ("gcc", "exit 1"), ("nvcc", "echo a; echo 'release 13.0'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    found = machine.compilers()
    assert {name: found[name] for name in ("cc", "nvcc")} == {"cc": "cc 12.2", "nvcc": "release 13.0"}
    assert "gcc" not in found
