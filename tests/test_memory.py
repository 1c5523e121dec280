"""How many KV blocks: from a fraction of what is free (a container's limit counts) or as many as asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from eeinfer.config.schema import CacheSettings
from eeinfer.errors import ConfigError
from eeinfer.model.families import ModelConfig
from eeinfer.runner import memory

CPU = torch.device("cpu")
MIB = 2**20
CONFIG = ModelConfig(
    num_layers=4,
    hidden_size=64,
    intermediate_size=128,
    vocab_size=100,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    max_position=100,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling={"rope_type": "default"},
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied=True,
    dtype="float32",
)
BLOCK = 2 * 4 * 16 * 2 * 32 * 4  # K and V, layers, tokens, KV heads, head size, bytes


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty control group file system, on a host with 1000 MiB free; this process is in its outermost group."""
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(memory, "_CGROUP", root)
    host(monkeypatch, 1000 * MIB)
    member(monkeypatch, tmp_path, "0::/\n")
    return root


def member(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str) -> None:
    (folder / "self").write_text(lines, encoding="utf-8")
    monkeypatch.setattr(memory, "_PROCESS", folder / "self")


def host(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(memory, "_available", lambda: free)


def v2(root: Path, limit: object, used: object) -> None:
    (root / "memory.max").write_text(f"{limit}\n", encoding="ascii")
    (root / "memory.current").write_text(f"{used}\n", encoding="ascii")


def v1(root: Path, limit: object, used: object) -> None:
    (root / "memory").mkdir()
    (root / "memory" / "memory.limit_in_bytes").write_text(f"{limit}\n", encoding="ascii")
    (root / "memory" / "memory.usage_in_bytes").write_text(f"{used}\n", encoding="ascii")


def blocks(settings: CacheSettings, max_num_seqs: int = 1000, dtype: torch.dtype = torch.float32) -> int:
    return memory.num_blocks(settings, CONFIG, dtype, CPU, max_num_seqs)


# Free memory


def test_without_a_control_group_the_host_counts(cgroup: Path) -> None:
    assert list(cgroup.iterdir()) == []
    assert memory.free_memory(CPU) == 1000 * MIB


@pytest.mark.parametrize("version", [v1, v2])
def test_the_limit_of_the_container_counts(cgroup: Path, version: type) -> None:
    version(cgroup, 300 * MIB, 100 * MIB)
    assert memory.free_memory(CPU) == 200 * MIB


@pytest.mark.parametrize("version", [v1, v2])
def test_a_limit_above_what_the_host_has_does_not(cgroup: Path, version: type) -> None:
    version(cgroup, 9000 * MIB, 100 * MIB)
    assert memory.free_memory(CPU) == 1000 * MIB


def test_no_limit_set(cgroup: Path) -> None:
    v2(cgroup, "max", 100 * MIB)
    v1(cgroup, 9223372036854771712, 100 * MIB)
    assert memory.free_memory(CPU) == 1000 * MIB


def test_a_limit_without_usage_is_ignored(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("1000\n", encoding="ascii")
    assert memory.free_memory(CPU) == 1000 * MIB


def test_nothing_is_free_when_the_limit_is_passed(cgroup: Path) -> None:
    v2(cgroup, 100 * MIB, 101 * MIB)
    assert memory.free_memory(CPU) == 0


def test_page_cache_that_can_be_dropped_is_free(cgroup: Path) -> None:
    """Reading a checkpoint fills the page cache, which counts as usage until somebody needs the memory."""
    v2(cgroup, 300 * MIB, 290 * MIB)
    (cgroup / "memory.stat").write_text(f"anon {80 * MIB}\nfile {210 * MIB}\ninactive_file {200 * MIB}\n", "ascii")
    assert memory.free_memory(CPU) == 210 * MIB


@pytest.mark.parametrize(
    ("lines", "folder"),
    [
        ("0::/a/b\n", "a/b"),
        ("0::/a/b\n", "a"),  # a limit around this group counts as well
        ("0::/a/dbus-:1.2-x@0.service\n", "a/dbus-:1.2-x@0.service"),
        ("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n", "memory/docker/abc"),
        ("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n", "memory/docker"),
    ],
)
def test_the_limit_of_a_group_inside(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, folder: str
) -> None:
    member(monkeypatch, tmp_path, lines)
    place = cgroup / folder
    place.mkdir(parents=True)
    if folder.startswith("memory"):
        (place / "memory.limit_in_bytes").write_text(f"{300 * MIB}\n", encoding="ascii")
        (place / "memory.usage_in_bytes").write_text(f"{100 * MIB}\n", encoding="ascii")
        (place / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {MIB}\n", encoding="ascii")
        assert memory.free_memory(CPU) == 201 * MIB
    else:
        v2(place, 300 * MIB, 100 * MIB)
        assert memory.free_memory(CPU) == 200 * MIB
        v2(cgroup, 150 * MIB, 100 * MIB)  # the tightest counts
        assert memory.free_memory(CPU) == 50 * MIB


def test_without_a_list_of_groups_the_host_counts(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_PROCESS", tmp_path / "none")
    assert list(cgroup.iterdir()) == []
    assert memory.free_memory(CPU) == 1000 * MIB


def test_this_machine() -> None:
    assert 0 < memory.free_memory(CPU) < 2**50


# Blocks


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, BLOCK), (torch.bfloat16, BLOCK // 2)])
def test_bytes_per_block_are_those_of_the_tensor(dtype: torch.dtype, size: int) -> None:
    cache = torch.zeros(4, 2, 1, 16, 2, 32, dtype=dtype)
    assert memory.bytes_per_block(CONFIG, dtype, 16) == cache.nbytes == size


@pytest.mark.parametrize(("fraction", "expected"), [("auto", 5), (1.0, 10), (0.25, 2), (0.1, 1)])
def test_a_fraction_of_what_is_free(cgroup: Path, fraction: float, expected: int) -> None:
    v2(cgroup, 20 * BLOCK, 10 * BLOCK - 1)
    assert blocks(CacheSettings(memory_fraction=fraction)) == expected


def test_never_more_than_can_be_used(cgroup: Path) -> None:
    v2(cgroup, 9000 * MIB, 0)
    assert blocks(CacheSettings(), max_num_seqs=3) == 3 * 7  # 100 positions are 7 blocks
    assert blocks(CacheSettings(block_size=50), max_num_seqs=3) == 3 * 2


def test_as_many_as_asked_for(cgroup: Path) -> None:
    v2(cgroup, 20 * BLOCK, 10 * BLOCK)
    assert blocks(CacheSettings(num_blocks=10), max_num_seqs=1) == 10  # the fraction is not asked


def test_more_than_fit_says_how_many_do(cgroup: Path) -> None:
    v2(cgroup, 20 * BLOCK, 10 * BLOCK)
    with pytest.raises(ConfigError, match=r"cache.num_blocks = 11 needs .* at most 10 fit"):
        blocks(CacheSettings(num_blocks=11))
    assert blocks(CacheSettings(num_blocks=20), dtype=torch.bfloat16) == 20


def test_not_even_one(cgroup: Path) -> None:
    v2(cgroup, 20 * BLOCK, 18 * BLOCK + 1)
    with pytest.raises(ConfigError, match=r"not one KV block .*memory_fraction"):
        blocks(CacheSettings())


def test_messages_count_from_zero(cgroup: Path) -> None:
    v2(cgroup, 10 * BLOCK, 12 * BLOCK)
    with pytest.raises(ConfigError, match="at most 0 fit"):
        blocks(CacheSettings(num_blocks=1))


def test_the_cache_is_zero_and_can_be_written() -> None:
    cache = memory.zeros((2, 3, 5), torch.bfloat16, CPU)
    assert (cache.shape, cache.dtype, cache.device) == ((2, 3, 5), torch.bfloat16, CPU)
    assert not cache.any()
    cache[1, :, 4] = 2.5
    assert cache.sum() == 7.5
    other = memory.zeros((2, 3, 5), torch.bfloat16, CPU)
    assert not other.any()


def test_linux_tells_what_is_available_without_psutil() -> None:
    """Now and then the one is read a moment before the other."""
    assert memory._available() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_the_cache_takes_no_memory_before_it_is_written() -> None:
    before = psutil.Process().memory_info().rss
    cache = memory.zeros((2**30,), torch.float32, CPU)
    assert cache[-1] == 0
    assert psutil.Process().memory_info().rss - before < 2**28


def test_wide_heads_and_types_cost_more(cgroup: Path) -> None:
    v2(cgroup, 16 * BLOCK, 0)
    settings = CacheSettings(memory_fraction=1.0)
    found = [
        memory.num_blocks(settings, config, dtype, CPU, 1000)
        for config, dtype in (
            (CONFIG, torch.float32),
            (replace(CONFIG, num_kv_heads=8), torch.float32),
            (replace(CONFIG, num_layers=8), torch.float32),
            (replace(CONFIG, head_dim=64), torch.float64),
        )
    ]
    assert found == [16, 4, 8, 4]
