"""Native kernels against torch: the same numbers up to rounding, and the same bits whatever runs beside a row."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import learned_kv, learned_tensors, load_decoder
from torch import Tensor
from torch.nn import functional as F

from eeinfer.engine.build import head_on
from eeinfer.engine.self_test import kernel_test
from eeinfer.errors import ConfigError
from eeinfer.exits.completion import complete
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.model.families import ModelConfig
from eeinfer.model.native import native
from eeinfer.model.random_weights import random_weights
from eeinfer.ops.logit_stats import logit_stats
from eeinfer.ops.native import build
from eeinfer.ops.native.kernels import HEAD_SIZES, NativeLayers, NativeStats, PackedLinear
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.ops.unavailable import Unavailable

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def folder(built: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001 - it must be built
    """Where it is."""
    return tmp_path_factory.getbasetemp() / "native"


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 40), columns=st.integers(1, 200), pairs=st.integers(1, 80), seed=st.integers(0, 2**31))
def test_products_are_torchs(built: ctypes.CDLL, rows: int, columns: int, pairs: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, 2 * pairs, generator=draw).bfloat16() for n in (rows, columns))
    found = PackedLinear(built, w)(x)
    exact = F.linear(x.double(), w.double())
    # One rounding to 8 bits, and float32 sums.
    assert torch.all((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5 * pairs)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), columns=st.integers(1, 100), pairs=st.integers(1, 40), in_place=st.booleans())
def test_rows_of_a_packed_matrix_are_what_they_were(
    built: ctypes.CDLL, data: st.DataObject, columns: int, pairs: int, in_place: bool
) -> None:
    w = torch.randn(columns, 2 * pairs).bfloat16()
    packed = PackedLinear(built, w.clone(), in_place=in_place)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, columns - 1), min_size=1, max_size=9)))
    assert torch.equal(packed.rows(rows), F.embedding(rows, w))


@pytest.mark.parametrize("vocab_size", [64, 50])  # without and with padding
@pytest.mark.parametrize("tied", [True, False])
def test_weights_may_be_packed_where_they_lie(folder: Path, vocab_size: int, tied: bool) -> None:
    config = replace(_config(**PLAIN, intermediate_size=70), vocab_size=vocab_size, tied=tied)
    weights = [random_weights(config, torch.bfloat16, CPU, 0) for _ in range(2)]
    memory = weights[1].output.data_ptr()
    kept, packed = (
        Decoder(config, own, native(config, own, folder, keep_plain=keep))
        for own, keep in zip(weights, (True, False), strict=True)
    )
    tokens = torch.arange(vocab_size)
    hidden, batch, cache = _ragged(config, [list(range(vocab_size))], 16, 0)
    assert torch.equal(kept.embed(tokens), packed.embed(tokens))
    runs = [d.run(range(3), d.embed(tokens), batch, cache.clone())[0] for d in (kept, packed)]
    assert torch.equal(*runs)
    assert torch.equal(*(d.logits(hidden) for d in (kept, packed)))
    assert weights[1].qkv.is_meta
    assert weights[1].lm_head.is_meta
    assert weights[1].embedding.is_meta == tied
    assert packed.native is not None
    held = packed.native.layers._held[0]["output"]
    assert held is not None
    assert held.data_ptr() == memory, "it has to be in memory once"
    assert (packed.device, packed.dtype) == (CPU, torch.bfloat16)


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 30), row=st.integers(0, 29), seed=st.integers(0, 2**31))
def test_a_row_of_a_product_does_not_depend_on_the_others(built: ctypes.CDLL, rows: int, row: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, 96, generator=draw).bfloat16() for n in (rows, 70))
    linear, row = PackedLinear(built, w), row % rows
    assert torch.equal(linear(x)[row], linear(x[row : row + 1])[0])


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 6), size=st.integers(2, 300), spread=st.floats(0, 30), seed=st.integers(0, 2**31))
def test_statistics_of_logits_are_torchs(built: ctypes.CDLL, rows: int, size: int, spread: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, size, generator=draw) * spread).round().bfloat16()  # rounded: many are equal
    logits[0, size // 2] = -torch.inf
    stats = NativeStats(built)
    found, expected = stats(logits, second=True, mean=True), logit_stats(logits, second=True, mean=True)
    assert torch.equal(found.argmax, expected.argmax)
    for name in ("largest", "second", "log_sum_exp", "mean"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-4)
    assert torch.equal(stats.largest(logits)[0], expected.largest)
    assert torch.equal(stats.largest(logits)[1], expected.argmax)
    for row in range(rows):
        alone = stats(logits[row : row + 1], second=True, mean=True)
        assert torch.equal(alone.log_sum_exp[0], found.log_sum_exp[row])
        assert torch.equal(alone.mean[0], found.mean[row])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that forking with threads is risky is the point
def test_threads_and_forked_processes_may_call_at_once(built: ctypes.CDLL) -> None:
    x, w = torch.randn(9, 256).bfloat16(), torch.randn(4000, 256).bfloat16()
    linear, stats = PackedLinear(built, w), NativeStats(built)
    expected = linear(x)
    largest = stats.largest(expected)[0]
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: (linear(x), stats.largest(expected)[0]), range(40)))
        if (child := os.fork()) == 0:  # has this process's memory, but not its worker threads
            signal.alarm(60)  # ends a child that waits for them
            again = linear(x)
            torch.set_num_threads(1)  # torch's own threads are gone too
            os._exit(0 if torch.equal(again, expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(1)
    for product, top in found:
        assert torch.equal(product, expected)
        assert torch.equal(top, largest)


def test_logits_that_are_nan_show(built: ctypes.CDLL) -> None:
    logits = torch.randn(3, 40).bfloat16()
    logits[1, 7] = torch.nan
    stats = NativeStats(built)
    found = stats(logits, second=True, mean=True)
    for values in (found.largest, found.second, found.log_sum_exp, found.mean, stats.largest(logits)[0]):
        assert values.isnan().tolist() == [False, True, False]
    logits[1] = -torch.inf
    assert stats.largest(logits)[0].tolist()[1] == -torch.inf, "a row of nothing but -inf is no answer either"


SHAPES = st.fixed_dictionaries(
    {
        "head_dim": st.sampled_from(HEAD_SIZES),
        "num_kv_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 3, 4, 5, 13]),
        "hidden_size": st.sampled_from([32, 62, 96]),
        "intermediate_size": st.sampled_from([30, 64, 130]),
        "qkv_bias": st.booleans(),
        "output_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "qk_norm": st.booleans(),
    }
)


PLAIN = {
    "head_dim": 32,
    "num_kv_heads": 1,
    "group": 2,
    "hidden_size": 32,
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
}


def _config(**shape: int) -> ModelConfig:
    group = shape.pop("group")
    return ModelConfig(
        num_layers=3,
        vocab_size=50,
        num_heads=shape["num_kv_heads"] * group,
        max_position=512,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling={"rope_type": "default"},
        tied=True,
        dtype="bfloat16",
        **shape,  # type: ignore[arg-type]
    )


def _pair(config: ModelConfig, folder: Path, seed: int) -> tuple[Decoder, Decoder]:
    """The same model, computed by torch and natively."""
    weights = random_weights(config, torch.bfloat16, CPU, seed)
    for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias"):
        if (bias := getattr(weights, name)) is not None:
            bias.normal_()
    made = native(config, weights, folder, keep_plain=True)
    return Decoder(config, weights), Decoder(config, weights, made)


def _spans(draw: st.DrawFn) -> list[list[int]]:
    """Positions of some sequences' tokens: each begins somewhere, and is as long as it likes; a replay leaves gaps."""
    parts = st.tuples(st.integers(0, 70), st.integers(1, 40), st.integers(1, 3))
    drawn = draw(st.lists(parts, min_size=1, max_size=4))
    return [list(range(start, start + count * step, step)) for start, count, step in drawn]


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, spans=st.composite(_spans)(), block_size=st.sampled_from([1, 7, 16]), seed=st.integers(0, 2**31))
def test_layers_are_torchs(
    folder: Path, shape: dict[str, int], spans: list[list[int]], block_size: int, seed: int
) -> None:
    config = _config(**shape)
    torch_decoder, native_decoder = _pair(config, folder, seed)
    hidden, batch, cache = _ragged(config, spans, block_size, seed)
    caches = cache.clone(), cache.clone()
    expected, before = torch_decoder.run(range(3), hidden, batch, caches[0])
    found, found_before = native_decoder.run(range(3), hidden, batch, caches[1])
    _close(found, expected)
    _close(found_before, before)
    _close(caches[1], caches[0])
    for own, reference in zip(
        *(d.project_kv(1, hidden, batch.positions) for d in (native_decoder, torch_decoder)), strict=True
    ):
        _close(own, reference)


@settings(deadline=None, max_examples=20)
@given(shape=SHAPES, spans=st.composite(_spans)(), seed=st.integers(0, 2**31))
def test_a_token_does_not_depend_on_the_others(
    folder: Path, shape: dict[str, int], spans: list[list[int]], seed: int
) -> None:
    config = _config(**shape)
    _, decoder = _pair(config, folder, seed)
    hidden, batch, cache = _ragged(config, spans, 16, seed)
    together, alone = cache.clone(), cache.clone()
    expected, _ = decoder.run(range(3), hidden, batch, together)
    # The same tokens one by one, as decoding would run them: the last of the sequences first.
    end = len(hidden)
    for span, table in reversed(list(zip(spans, batch.block_tables, strict=True))):
        end -= len(span)
        for i, position in enumerate(span, start=end):
            one = TokenBatch.decode(torch.tensor([position]), table[None], 16)
            found, _ = decoder.run(range(3), hidden[i : i + 1].contiguous(), one, alone)
            assert torch.equal(found[0], expected[i])
    assert end == 0
    assert torch.equal(alone, together)


@settings(deadline=None, max_examples=20)
@given(shape=SHAPES, spans=st.composite(_spans)(), seed=st.integers(0, 2**31))
def test_learned_completion_is_torchs_and_does_not_depend_on_the_others(
    folder: Path, shape: dict[str, int], spans: list[list[int]], seed: int
) -> None:
    config = _config(**shape)
    hidden, batch, cache = _ragged(config, spans, 16, seed)
    caches = []
    for decoder in _pair(config, folder, seed):
        exit_ = head_on(decoder, ExitSpec(1, "shared", completion=learned_kv(config, 1)), learned_tensors(config, 1))
        caches.append(cache.clone())
        complete("learned", decoder, 1, hidden, batch, caches[-1], exit_.learned_kv)
    _close(caches[1], caches[0])
    alone = cache.clone()
    for i in range(len(hidden)):
        one = replace(batch, positions=batch.positions[i : i + 1], slots=batch.slots[i : i + 1])
        complete("learned", decoder, 1, hidden[i : i + 1].contiguous(), one, alone, exit_.learned_kv)
    assert torch.equal(alone, caches[1])


@pytest.mark.parametrize(
    "shape", [{"head_dim": 64, "num_kv_heads": 3, "group": 3}, {"head_dim": 128, "num_kv_heads": 1, "group": 4}]
)
def test_threads_that_share_a_long_prompt_give_its_bits(folder: Path, shape: dict[str, int]) -> None:
    config = _config(
        **shape, hidden_size=64, intermediate_size=64, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False
    )
    _, decoder = _pair(config, folder, 0)
    hidden, batch, cache = _ragged(config, [list(range(400)), [5], list(range(200, 270)), [9, 10]], 16, 0)
    expected, _ = decoder.run(range(3), hidden, batch, cache.clone())
    torch.set_num_threads(2)
    try:
        found, _ = decoder.run(range(3), hidden, batch, cache)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(found, expected)
    last = TokenBatch.decode(batch.positions[399:400], batch.block_tables[:1], 16)
    assert torch.equal(decoder.run(range(3), hidden[399:400], last, cache)[0], expected[399:400])


def _ragged(
    config: ModelConfig, spans: list[list[int]], block_size: int, seed: int
) -> tuple[Tensor, TokenBatch, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    longest = max(span[-1] + 1 for span in spans)
    width = -(-longest // block_size)
    tables = torch.randperm(len(spans) * width, generator=draw).view(len(spans), width)
    sizes = (config.num_layers, 2, len(spans) * width + 1, block_size, config.num_kv_heads, config.head_dim)
    cache = torch.randn(sizes, generator=draw).bfloat16()
    hidden = torch.randn(sum(map(len, spans)), config.hidden_size, generator=draw).bfloat16()
    return hidden, TokenBatch.ragged(spans, tables, block_size), cache


def _close(found: Tensor, expected: Tensor) -> None:
    scale = expected.float().abs().max()
    assert (found.float() - expected.float()).abs().max() <= 0.04 * scale


def test_masked_slots_are_not_read(folder: Path) -> None:
    config = _config(
        head_dim=32, num_kv_heads=1, group=2, hidden_size=32, intermediate_size=64, qkv_bias=False, output_bias=False,
        mlp_bias=False, qk_norm=False,
    )  # fmt: skip
    _, decoder = _pair(config, folder, 0)
    hidden, batch, cache = _ragged(config, [list(range(19))], 16, 0)
    clean = decoder.run(range(3), hidden, batch, cache.clone())[0]
    cache[:] = torch.nan  # all that is read is written by this very batch
    assert torch.equal(decoder.run(range(3), hidden, batch, cache)[0], clean)


def test_nan_stays_with_its_row(folder: Path) -> None:
    config = _config(
        head_dim=32, num_kv_heads=2, group=1, hidden_size=32, intermediate_size=64, qkv_bias=False, output_bias=False,
        mlp_bias=False, qk_norm=False,
    )  # fmt: skip
    _, decoder = _pair(config, folder, 0)
    hidden, batch, cache = _ragged(config, [[3], [8]], 16, 0)
    clean = decoder.run(range(3), hidden, batch, cache.clone())[0]
    hidden[0] = torch.nan
    found = decoder.run(range(3), hidden, batch, cache)[0]
    assert found[0].isnan().all()
    assert torch.equal(found[1], clean[1])


def test_the_test_of_kernels_passes_here_and_notices_wrong_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = kernel_test(folder)
    assert outcome.passed
    assert outcome.error > 0, "the reference is another"
    layer = NativeLayers.layer

    def wrong(layers: NativeLayers, index: int, hidden: Tensor, *rest: Any) -> Tensor:
        out = layer(layers, index, hidden, *rest)
        return hidden + (out - hidden) * 1.05 if index == 1 else out

    def neighbourly(layers: NativeLayers, index: int, hidden: Tensor, *rest: Any) -> Tensor:
        out = layer(layers, index, hidden, *rest)
        return out * 1.004 if len(hidden) > 1 else out

    monkeypatch.setattr(NativeLayers, "layer", wrong)
    assert not kernel_test(folder).passed
    monkeypatch.setattr(NativeLayers, "layer", neighbourly)
    assert not kernel_test(folder).invariant
    assert not kernel_test(folder).passed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head_dim": 48}, "heads of 32, 64, 96, 128, 256, not of 48"),
        ({"norm": "layer"}, "its norms"),
        ({"activation": "gelu"}, "its MLP"),
        ({"windows": (None, 8, None)}, "its sliding window"),
        ({"attention_softcap": 30.0}, "its soft-capped scores"),
        ({"rotary_dim": 16}, "its positions"),
        ({"qk_norm": True, "qk_norm_whole": True}, "its norm of q and k"),
    ],
)
def test_what_the_kernels_do_not_know_is_refused(change: dict[str, object], why: str, tmp_path: Path) -> None:
    plain = _config(
        head_dim=32, num_kv_heads=1, group=2, hidden_size=32, intermediate_size=64, qkv_bias=False, output_bias=False,
        mlp_bias=False, qk_norm=False,
    )  # fmt: skip
    weights = random_weights(plain, torch.bfloat16, CPU, 0)
    with pytest.raises(Unavailable, match=why):
        native(replace(plain, **change), weights, tmp_path, keep_plain=True)  # type: ignore[arg-type]


def test_other_number_types_stay_with_torch(tiny_model: Callable[[str], Path], make_llm: Callable[..., object]) -> None:
    decoder = load_decoder(tiny_model("gqa"), torch.float32)
    with pytest.raises(Unavailable, match=r"bfloat16, and the model is in torch\.float32"):
        native(decoder.config, decoder.weights, tiny_model("gqa"), keep_plain=True)
    with pytest.raises(ConfigError, match=r"model.kernels = 'native'.*use auto or torch"):
        make_llm(kernels="native")


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: build.CPU_FLAGS)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Unavailable, match=r"no C\+\+ compiler; install g\+\+ or set CXX") as caught:
        build.load(tmp_path)
    assert caught.value.fixable


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: no headers' >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "cpu_flags", lambda: build.CPU_FLAGS)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(Unavailable, match=r"c\+\+ failed: kernels.cpp:1: error: no headers"):
        build.load(tmp_path / "built")
    assert list((tmp_path / "built").iterdir()) == [], "nothing half made stays"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "CXX=.*not a program here; set it to a C\\+\\+ compiler"),
        ("exit 1", "failed: it ended with 1 and said nothing"),
        ("exit 0", "cannot be made or loaded"),
    ],
)
def test_a_cxx_that_compiles_nothing_is_named(
    script: str | None, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "c++"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setattr(build, "cpu_flags", lambda: build.CPU_FLAGS)
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(Unavailable, match=why) as caught:
        build.load(tmp_path / "built")
    assert caught.value.fixable
    assert not list((tmp_path / "built").glob("*")), "nothing that cannot be loaded stays"


def test_cxx_may_hold_arguments_and_a_damaged_library_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, some_library = tmp_path / "c++", Path(_ctypes.__file__)
    # Stands for a compiler: it "builds" a library that is there, and keeps its arguments.
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments\nfor last; do :; done\ncp {some_library} "$last"\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    monkeypatch.setattr(build, "cpu_flags", lambda: build.CPU_FLAGS)
    monkeypatch.setenv("CXX", f"{program} --with arguments")
    kept = tmp_path / f"kernels-{build._digest(build.compiler())}.so"
    kept.write_bytes(b"half")
    build.load(tmp_path)
    (call,) = (tmp_path / "arguments").read_text(encoding="utf-8").splitlines()
    assert call.split()[:2] == ["--with", "arguments"]
    assert kept.read_bytes() == some_library.read_bytes()


def test_a_cpu_without_the_instructions_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: build.CPU_FLAGS - {"avx512_bf16"})
    with pytest.raises(Unavailable, match="this CPU has no avx512_bf16") as caught:
        build.load(tmp_path)
    assert not caught.value.fixable
