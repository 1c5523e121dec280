"""Exit heads: the formula of each kind, and files that are read strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eeinfer.errors import HeadsError
from eeinfer.exits.files import (
    CONFIG_NAME,
    TENSORS_NAME,
    Base,
    HeadsFile,
    has_heads,
    heads_fingerprint,
    load_heads,
    save_heads,
)
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitHead, ExitSpec, build_head
from eeinfer.exits.learned_kv import LearnedKVSpec

D, V, EPS = 6, 11, 1e-5
BASE = Base("tiny", "sha256:" + "ab" * 32, D, V, num_layers=12)
SPECS = (
    ExitSpec(2, "shared"),
    ExitSpec(4, "norm", temperature=1.5),
    ExitSpec(6, "linear"),
    ExitSpec(8, "linear", rank=2, completion=LearnedKVSpec(rank=2, layers=3, kv_heads=1, head_dim=4)),
    ExitSpec(10, "linear", tied=False),
    ExitSpec(11, "mlp", rank=2, intermediate=5, gate=GateSpec(3)),
)
FORMS = (
    ExitSpec(2, "shared"),
    ExitSpec(2, "norm"),
    ExitSpec(2, "linear"),
    ExitSpec(2, "linear", rank=3),
    ExitSpec(2, "mlp", intermediate=7),
    ExitSpec(2, "mlp", rank=3, intermediate=7),
)
every_form = pytest.mark.parametrize("spec", FORMS, ids=lambda spec: f"{spec.kind}-{spec.rank}")
Edit = Callable[[dict[str, Any]], None]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensors_of(spec: ExitSpec) -> dict[str, Tensor]:
    return {
        name: normal(*shape, seed=100 * spec.layers_executed + i)
        for i, (name, shape) in enumerate(sorted(spec.tensor_shapes(D, V).items()))
    }


def rms(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps), row by row."""
    return torch.stack([row / ((row @ row) / len(row) + EPS) ** 0.5 for row in x])


HIDDEN, VOCABULARY, FINAL = normal(5, D, seed=1), normal(V, D, seed=2), normal(D, seed=3)


def head(spec: ExitSpec, own: dict[str, Tensor]) -> ExitHead:
    built = build_head(spec, own, final_norm=lambda h: rms(h) * FINAL, vocabulary=lambda x: x @ VOCABULARY.T, eps=EPS)
    assert built.layers_executed == spec.layers_executed
    return built


def logits(spec: ExitSpec, own: dict[str, Tensor]) -> Tensor:
    return head(spec, own).logits(HIDDEN)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# Formulas


def test_shared() -> None:
    close(logits(ExitSpec(2, "shared"), {}), rms(HIDDEN) * FINAL @ VOCABULARY.T)


def test_norm() -> None:
    own = tensors_of(spec := ExitSpec(2, "norm"))
    close(logits(spec, own), rms(HIDDEN) * own["norm.weight"] @ VOCABULARY.T)


def test_linear() -> None:
    own = tensors_of(spec := ExitSpec(2, "linear"))
    mapped = torch.stack([own["linear.weight"] @ row for row in rms(HIDDEN)])
    close(logits(spec, own), rms(mapped) * own["norm.weight"] @ VOCABULARY.T)


def test_linear_of_low_rank() -> None:
    own = tensors_of(spec := ExitSpec(2, "linear", rank=3))
    product = own["linear.up.weight"] @ own["linear.down.weight"]
    mapped = torch.stack([product @ row for row in rms(HIDDEN)])
    close(logits(spec, own), rms(mapped) * own["norm.weight"] @ VOCABULARY.T)


@pytest.mark.parametrize("rank", [None, 3])
def test_mlp(rank: int | None) -> None:
    own = tensors_of(spec := ExitSpec(2, "mlp", rank, intermediate=7))
    matrix = own["linear.weight"] if rank is None else own["linear.up.weight"] @ own["linear.down.weight"]
    mapped = []
    for x in rms(HIDDEN):
        z = x * own["mlp_norm.weight"]
        a, u = own["mlp.gate_proj.weight"] @ z, own["mlp.up_proj.weight"] @ z
        mapped.append(matrix @ x + own["mlp.down_proj.weight"] @ (a / (1 + torch.exp(-a)) * u))
    close(logits(spec, own), rms(torch.stack(mapped)) * own["norm.weight"] @ VOCABULARY.T)


@every_form
def test_gate(spec: ExitSpec) -> None:
    gated = replace(spec, gate=GateSpec(4))
    own = tensors_of(gated)
    expected = []
    for x in rms(HIDDEN):
        inner = (own["gate.0.weight"] @ x + own["gate.0.bias"]).clamp_min(0)
        expected.append(1 / (1 + torch.exp(-(own["gate.2.weight"][0] @ inner + own["gate.2.bias"][0]))))
    gate = head(gated, own).gate
    assert gate is not None
    close(gate(HIDDEN), torch.stack(expected))
    assert torch.equal(logits(gated, own), logits(spec, own)), "a gate does not change the logits"
    assert head(spec, own).gate is None


def test_gate_with_a_shortlist() -> None:
    spec = ExitSpec(2, "shared", gate=GateSpec(4, tokens=7))
    own = {name.removeprefix("gate."): tensor for name, tensor in tensors_of(spec).items()}
    expected = []
    for u in rms(HIDDEN @ own["down.weight"].T):
        p = (own["shortlist.weight"] @ u + own["shortlist.bias"]).softmax(dim=0)
        inner = (own["0.weight"] @ u + own["0.bias"]).clamp_min(0)
        odds = own["odds.weight"][0] * torch.log(p.max() / (1 - p.max()))
        logit = odds + own["tokens.weight"][0] @ p + own["2.weight"][0] @ inner + own["2.bias"][0]
        expected.append(1 / (1 + torch.exp(-logit)))
    gate = head(spec, tensors_of(spec)).gate
    assert gate is not None
    close(gate(HIDDEN), torch.stack(expected))


@pytest.mark.parametrize("sizes", [GateSpec(4), GateSpec(4, tokens=7)])
def test_a_gate_of_narrow_numbers_is_computed_in_float32(sizes: GateSpec) -> None:
    spec = ExitSpec(2, "shared", gate=sizes)
    own = {name: tensor.bfloat16() for name, tensor in tensors_of(spec).items()}
    hidden = HIDDEN.bfloat16()
    gate, wide = head(spec, own).gate, head(spec, {name: tensor.double() for name, tensor in own.items()}).gate
    assert gate is not None
    assert wide is not None
    assert gate(hidden).dtype is torch.float32
    torch.testing.assert_close(gate(hidden), wide(hidden).float(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(gate(hidden), gate(hidden).bfloat16().float()), "or nothing was rounded in this test"


@every_form
@pytest.mark.parametrize("sizes", [GateSpec(4), GateSpec(4, tokens=7)])
def test_a_row_does_not_depend_on_the_others(spec: ExitSpec, sizes: GateSpec) -> None:
    """Bitwise beside other companions; elsewhere in the batch, or alone, up to how a matrix product orders its sums."""
    gated = replace(spec, gate=sizes)
    built = head(gated, tensors_of(gated))
    assert built.gate is not None
    for run in (built.logits, built.gate):
        together = run(HIDDEN)
        for i in range(len(HIDDEN)):
            others = normal(5, D, seed=9 + i)
            others[i] = HIDDEN[i]
            assert torch.equal(run(others)[i], together[i])
        order = [3, 1, 4, 0, 2]
        close(run(HIDDEN[order]), together[order])
        close(torch.cat([run(HIDDEN[i : i + 1]) for i in range(len(HIDDEN))]), together)


@pytest.mark.parametrize("kind", ["shared", "norm", "linear", "mlp"])
def test_untied(kind: str) -> None:
    tied = ExitSpec(2, kind, intermediate=7 if kind == "mlp" else None)  # type: ignore[arg-type]
    untied = replace(tied, tied=False)
    own = tensors_of(untied)
    matrix = own["lm_head.weight"]
    weights = {name: tensor for name, tensor in own.items() if name != "lm_head.weight"}
    # VOCABULARY has full column rank, so that the tied logits give the features back.
    features = logits(tied, weights) @ torch.linalg.pinv(VOCABULARY).T
    torch.testing.assert_close(logits(untied, own), features @ matrix.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature_divides(temperature: float) -> None:
    plain, scaled = ExitSpec(2, "norm"), ExitSpec(2, "norm", temperature=temperature)
    own = tensors_of(plain)
    close(logits(scaled, own), logits(plain, own) / temperature)


def test_tensor_shapes() -> None:
    assert [sorted(spec.tensor_shapes(D, V).items()) for spec in SPECS] == [
        [],
        [("norm.weight", (D,))],
        [("linear.weight", (D, D)), ("norm.weight", (D,))],
        [
            ("completion.down.weight", (2, D)),
            ("completion.scale", (2, 3, 1)),
            ("completion.up.bias", (24,)),
            ("completion.up.weight", (24, 2)),
            ("linear.down.weight", (2, D)),
            ("linear.up.weight", (D, 2)),
            ("norm.weight", (D,)),
        ],
        [("linear.weight", (D, D)), ("lm_head.weight", (V, D)), ("norm.weight", (D,))],
        [
            ("gate.0.bias", (3,)),
            ("gate.0.weight", (3, D)),
            ("gate.2.bias", (1,)),
            ("gate.2.weight", (1, 3)),
            ("linear.down.weight", (2, D)),
            ("linear.up.weight", (D, 2)),
            ("mlp.down_proj.weight", (D, 5)),
            ("mlp.gate_proj.weight", (5, D)),
            ("mlp.up_proj.weight", (5, D)),
            ("mlp_norm.weight", (D,)),
            ("norm.weight", (D,)),
        ],
    ]


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    heads = HeadsFile(SPECS, tuple(tensors_of(spec) for spec in SPECS))
    save_heads(tmp_path, BASE, heads, header={"method": "test"}, results=[{"agreement": 0.5}] * len(SPECS))
    return tmp_path


def edit_config(folder: Path, edit: Edit) -> None:
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text(encoding="utf-8"))
    edit(config)
    path.write_text(json.dumps(config), encoding="utf-8")


def edit_tensors(folder: Path, edit: Edit) -> None:
    tensors: dict[str, Any] = load_file(folder / TENSORS_NAME)
    edit(tensors)
    save_file(tensors, folder / TENSORS_NAME)


def refused(folder: Path, *words: str, base: Base = BASE) -> None:
    with pytest.raises(HeadsError) as caught:
        load_heads(folder, base)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_round_trip(folder: Path) -> None:
    assert has_heads(folder)
    heads = load_heads(folder, BASE)
    assert heads.specs == SPECS
    for spec, own in zip(heads.specs, heads.tensors, strict=True):
        expected = tensors_of(spec)
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], expected[name]) for name in own)


def test_what_is_written(folder: Path) -> None:
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    assert config["base_model"] == {"name": "tiny", "fingerprint": BASE.fingerprint}
    assert (config["hidden_size"], config["vocab_size"], config["num_layers"]) == (D, V, 12)
    assert config["made_with"] == {"method": "test"}
    assert config["exits"][3] == {
        "layers_executed": 8,
        "kind": "linear",
        "rank": 2,
        "tied": True,
        "temperature": 1.0,
        "intermediate": None,
        "gate": None,
        "completion": {"rank": 2, "layers": 3, "kv_heads": 1, "head_dim": 4},
        "results": {"agreement": 0.5},
    }
    assert config["exits"][5]["intermediate"] == 5
    assert config["exits"][5]["gate"] == {"width": 3, "tokens": None}
    assert set(load_file(folder / TENSORS_NAME)) == {
        f"exits.{i}.{name}" for i, spec in enumerate(SPECS) for name in spec.tensor_shapes(D, V)
    }


def test_bfloat16_and_views_survive(tmp_path: Path) -> None:
    spec = ExitSpec(3, "linear")
    own = {"linear.weight": normal(D, D, seed=4).bfloat16().T, "norm.weight": normal(2 * D, seed=5).bfloat16()[::2]}
    save_heads(tmp_path, BASE, HeadsFile((spec,), (own,)), header={}, results=[{}])
    (found,) = load_heads(tmp_path, BASE).tensors
    assert all(torch.equal(found[name], own[name]) and found[name].dtype is torch.bfloat16 for name in own)


def test_heads_without_tensors_need_no_second_file(tmp_path: Path) -> None:
    specs = (ExitSpec(3, "shared"), ExitSpec(5, "shared", temperature=2.0))
    save_heads(tmp_path, BASE, HeadsFile(specs, ({}, {})), header={}, results=[{}, {}])
    assert load_heads(tmp_path, BASE).specs == specs
    (tmp_path / TENSORS_NAME).unlink()
    assert load_heads(tmp_path, BASE).tensors == ({}, {})


def test_heads_without_tensors_bring_none(tmp_path: Path) -> None:
    save_heads(tmp_path, BASE, HeadsFile((ExitSpec(3, "shared"),), ({},)), header={}, results=[{}])
    save_file({"exits.0.norm.weight": torch.ones(D)}, tmp_path / TENSORS_NAME)
    refused(tmp_path, str(tmp_path / TENSORS_NAME), "unexpected tensor exits.0.norm.weight")


def test_defaults_of_an_entry(folder: Path) -> None:
    edit_config(folder, lambda c: c.update(exits=[{"layers_executed": 3, "kind": "shared"}]))
    (folder / TENSORS_NAME).unlink()
    assert load_heads(folder, BASE).specs == (ExitSpec(3, "shared", None, tied=True, temperature=1.0),)


def test_gates_in_the_words_of_older_files(folder: Path) -> None:
    def older(config: dict[str, Any]) -> None:
        for entry in config["exits"][:5]:
            del entry["intermediate"]
            if entry["completion"] is None:
                del entry["completion"]
            entry["gate"] = False
        config["exits"][5]["gate"] = 3  # a width alone

    edit_config(folder, older)
    assert load_heads(folder, BASE).specs == SPECS


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.update(format_version=2), ["format_version is 2", "reads 1"]),
        (lambda c: c.pop("format_version"), ["format_version is None"]),
        (lambda c: c.update(exits=[]), ["`exits`"]),
        (lambda c: c.update(exits={"0": {}}), ["`exits`"]),
        (lambda c: c.pop("exits"), ["`exits`"]),
        (lambda c: c.update(hidden_size=7), ["hidden_size is 7", "tiny has 6"]),
        (lambda c: c.update(vocab_size=12), ["vocab_size is 12", "tiny has 11"]),
        (lambda c: c.pop("base_model"), ["base_model.fingerprint"]),
        (lambda c: c.update(base_model="tiny"), ["base_model.fingerprint"]),
        (lambda c: c["base_model"].pop("fingerprint"), ["base_model.fingerprint"]),
        (lambda c: c["base_model"].update(fingerprint="sha256:" + "cd" * 32), ["another base", "tune-heads"]),
        (lambda c: c["exits"].insert(0, 3), ["exits[0]", "object"]),
        (lambda c: c["exits"][1].update(kind="mlpp"), ["exits[1]", "kind is 'mlpp'", "shared, norm, linear, mlp"]),
        (lambda c: c["exits"][1].pop("kind"), ["exits[1]", "kind is None"]),
        (lambda c: c["exits"][1].update(kind=["norm"]), ["exits[1]", "kind"]),
        (lambda c: c["exits"][2].update(layers=6), ["exits[2]", "unknown keys ['layers']"]),
        (lambda c: c["exits"][2].update(gate=True), ["exits[2]", "gate is True", "null for no gate"]),
        (lambda c: c["exits"][5].update(gate=0), ["exits[5]", "gate is 0", "positive width"]),
        (lambda c: c["exits"][5].update(gate=3.0), ["exits[5]", "gate is 3.0"]),
        (lambda c: c["exits"][5].update(gate="3"), ["exits[5]", "gate is '3'"]),
        (lambda c: c["exits"][5].update(gate={}), ["exits[5]", "gate is {}", "positive width"]),
        (
            lambda c: c["exits"][5].update(gate={"width": 3, "tokens": 0}),
            ["exits[5]", "'tokens': 0", "positive tokens"],
        ),
        (lambda c: c["exits"][5].update(gate={"width": None}), ["exits[5]", "gate is {'width': None}"]),
        (lambda c: c["exits"][5].update(gate={"width": 3, "depth": 2}), ["exits[5]", "'depth': 2"]),
        (lambda c: c["exits"][3].update(completion=2), ["exits[3]", "completion is 2", "null for none"]),
        (lambda c: c["exits"][3]["completion"].update(rank=0), ["exits[3]", "'rank': 0", "positive rank"]),
        (lambda c: c["exits"][3]["completion"].pop("layers"), ["exits[3]", "completion is {", "layers"]),
        (lambda c: c["exits"][3]["completion"].update(layers=4), ["exits[3]", "has 4 layers, but 3 are left"]),
        (
            lambda c: c["exits"][5].update(completion={"rank": 1, "layers": 1, "kv_heads": 1, "head_dim": 4}),
            ["exits[5]", "has 1 layers, but 0 are left"],
        ),
        (lambda c: c["exits"][5].update(intermediate=None), ["exits[5]", "intermediate is None", "for kind mlp"]),
        (lambda c: c["exits"][5].pop("intermediate"), ["exits[5]", "intermediate is None", "for kind mlp"]),
        (lambda c: c["exits"][5].update(intermediate=0), ["exits[5]", "intermediate is 0"]),
        (lambda c: c["exits"][5].update(intermediate=False), ["exits[5]", "intermediate is False"]),
        (lambda c: c["exits"][2].update(intermediate=5), ["exits[2]", "intermediate is 5", "null for other kinds"]),
        (lambda c: c["exits"][0].pop("layers_executed"), ["exits[0]", "layers_executed is None"]),
        (lambda c: c["exits"][0].update(layers_executed=0), ["exits[0]", "layers_executed is 0", "1 … 11"]),
        (lambda c: c["exits"][4].update(layers_executed=12), ["exits[4]", "layers_executed is 12", "1 … 11"]),
        (lambda c: c["exits"][0].update(layers_executed=True), ["exits[0]", "layers_executed is True"]),
        (lambda c: c["exits"][0].update(layers_executed=2.5), ["exits[0]", "layers_executed is 2.5"]),
        (lambda c: c["exits"][0].update(layers_executed=5), ["increasing order", "[5, 4, 6, 8, 10, 11]"]),
        (lambda c: c["exits"][0].update(layers_executed=4), ["without repeats", "[4, 4, 6, 8, 10, 11]"]),
        (lambda c: c["exits"][3].update(rank=0), ["exits[3]", "rank is 0"]),
        (lambda c: c["exits"][3].update(rank="2"), ["exits[3]", "rank is '2'"]),
        (lambda c: c["exits"][1].update(temperature=0), ["exits[1]", "temperature is 0"]),
        (lambda c: c["exits"][1].update(temperature=float("nan")), ["exits[1]", "temperature is nan"]),
        (lambda c: c["exits"][1].update(temperature=float("inf")), ["exits[1]", "temperature is inf"]),
        (lambda c: c["exits"][1].update(temperature=None), ["exits[1]", "temperature is None"]),
        (lambda c: c["exits"][1].update(temperature="1"), ["exits[1]", "temperature is '1'"]),
        (lambda c: c["exits"][1].update(temperature=True), ["exits[1]", "temperature is True"]),
        (lambda c: c["exits"][1].update(temperature=10**400), ["exits[1]", "temperature"]),
        (lambda c: c["exits"][1].update(tied=1), ["exits[1]", "tied is 1"]),
        (lambda c: c["exits"][1].update(tied=None), ["exits[1]", "tied is None"]),
    ],
)
def test_config_errors_name_file_and_key(folder: Path, edit: Edit, words: list[str]) -> None:
    edit_config(folder, edit)
    refused(folder, str(folder / CONFIG_NAME), *words)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("exits.1.norm.weight"), ["exits.1.norm.weight is missing"]),
        (lambda t: t.pop("exits.3.linear.up.weight"), ["exits.3.linear.up.weight is missing"]),
        (lambda t: t.update({"exits.0.norm.weight": torch.ones(D)}), ["unexpected tensor exits.0.norm.weight"]),
        (lambda t: t.update({"exits.6.norm.weight": torch.ones(D)}), ["unexpected tensor exits.6.norm.weight"]),
        (lambda t: t.pop("exits.3.completion.scale"), ["exits.3.completion.scale is missing"]),
        (lambda t: t.update({"exits.3.completion.up.bias": torch.ones(23)}), ["completion.up.bias", "(23,)", "(24,)"]),
        (lambda t: t["exits.3.completion.down.weight"].fill_(float("nan")), ["exits.3.completion.down.weight", "NaN"]),
        (lambda t: t.pop("exits.5.gate.2.bias"), ["exits.5.gate.2.bias is missing"]),
        (lambda t: t.pop("exits.5.mlp_norm.weight"), ["exits.5.mlp_norm.weight is missing"]),
        (lambda t: t.update({"exits.1.gate.0.bias": torch.ones(3)}), ["unexpected tensor exits.1.gate.0.bias"]),
        (lambda t: t.update({"exits.1.mlp.up_proj.weight": torch.ones(5, D)}), ["tensor exits.1.mlp.up_proj.weight"]),
        (lambda t: t.update({"exits.5.gate.0.weight": torch.ones(4, D)}), ["exits.5.gate.0.weight", "(4, 6)"]),
        (lambda t: t.update({"exits.5.gate.2.weight": torch.ones(3)}), ["exits.5.gate.2.weight", "(3,)", "(1, 3)"]),
        (lambda t: t["exits.5.gate.0.bias"].fill_(float("nan")), ["exits.5.gate.0.bias", "NaN"]),
        (lambda t: t.update({"exits.1.norm.weight": torch.ones(D + 1)}), ["exits.1.norm.weight", "(7,)", "(6,)"]),
        (lambda t: t.update({"exits.1.norm.weight": torch.ones(1, D)}), ["exits.1.norm.weight", "(1, 6)"]),
        (lambda t: t["exits.2.linear.weight"].fill_(float("nan")), ["exits.2.linear.weight", "NaN"]),
        (lambda t: t["exits.4.lm_head.weight"].view(-1)[0].fill_(float("inf")), ["exits.4.lm_head.weight"]),
        (lambda t: t.update({"exits.1.norm.weight": torch.ones(D, dtype=torch.int64)}), ["exits.1.norm.weight"]),
        (lambda t: t.update({"exits.1.norm.weight": torch.ones(D).to(torch.float8_e4m3fn)}), ["exits.1.norm.weight"]),
    ],
)
def test_tensor_errors_name_file_and_tensor(folder: Path, edit: Edit, words: list[str]) -> None:
    edit_tensors(folder, edit)
    refused(folder, str(folder / TENSORS_NAME), *words)


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (4, {"tied": True}),
        (3, {"rank": 3}),
        (2, {"kind": "norm"}),
        (3, {"completion": None}),
        (5, {"gate": None}),
        (5, {"gate": False}),
        (5, {"intermediate": 6}),
        (4, {"gate": 3}),
    ],
)
def test_tensors_that_the_config_does_not_describe(folder: Path, index: int, change: dict[str, Any]) -> None:
    edit_config(folder, lambda c: c["exits"][index].update(change))
    refused(folder, str(folder / TENSORS_NAME), f"exits.{index}.")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"exits"', "[" * 100_000, "\ufeff{}"])
def test_config_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
    refused(folder, str(folder / CONFIG_NAME))


def test_config_that_is_no_utf8_or_no_file(folder: Path) -> None:
    (folder / CONFIG_NAME).write_bytes(b"\xff\xfe{}")
    refused(folder, str(folder / CONFIG_NAME))
    (folder / CONFIG_NAME).unlink()
    assert not has_heads(folder)
    refused(folder, str(folder / CONFIG_NAME), "missing", TENSORS_NAME)
    (folder / CONFIG_NAME).mkdir()
    refused(folder, str(folder / CONFIG_NAME))


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated_tensors(folder: Path, kept: float) -> None:
    path = folder / TENSORS_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept if kept >= 4 else kept * len(whole))])
    refused(folder, str(path), "not a readable safetensors file")


def test_missing_tensor_file(folder: Path) -> None:
    (folder / TENSORS_NAME).unlink()
    refused(folder, str(folder / TENSORS_NAME), "missing", CONFIG_NAME)


def test_another_base_is_refused_by_fingerprint_though_sizes_agree(folder: Path) -> None:
    other = Base("other", "sha256:" + "ef" * 32, D, V, num_layers=12)
    refused(folder, str(folder / CONFIG_NAME), "tiny", "other", "--heads none", base=other)


# Fingerprint


def test_the_fingerprint_is_that_of_both_files(folder: Path) -> None:
    printed = "".join(f"{sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in (CONFIG_NAME, TENSORS_NAME))
    assert heads_fingerprint(folder) == "sha256:" + sha256(printed.encode()).hexdigest()


def test_a_change_in_either_file_changes_the_fingerprint(folder: Path) -> None:
    seen = [heads_fingerprint(folder)]
    edit_config(folder, lambda c: c["exits"][1].update(temperature=1.25))
    seen.append(heads_fingerprint(folder))
    edit_tensors(folder, lambda t: t["exits.1.norm.weight"][0].add_(1))
    seen.append(heads_fingerprint(folder))
    (folder / TENSORS_NAME).unlink()
    seen.append(heads_fingerprint(folder))
    assert len(set(seen)) == 4


def test_no_heads_have_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match=CONFIG_NAME):
        heads_fingerprint(tmp_path)
    (tmp_path / CONFIG_NAME).mkdir()
    with pytest.raises(HeadsError, match=CONFIG_NAME):
        heads_fingerprint(tmp_path)
