"""Settings: order of the layers, merging, origins, and what the messages say."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eeinfer import LLM
from eeinfer.config.load import Loaded, load_settings
from eeinfer.config.schema import Settings, declared
from eeinfer.config.suggest import did_you_mean
from eeinfer.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


def load(**sources: Any) -> Loaded:
    return load_settings(environ=sources.pop("environ", {}), **sources)


def toml(folder: Path, text: str, name: str = "settings.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(**sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**sources)
    return str(caught.value)


def test_without_sources_the_defaults_hold() -> None:
    loaded = load()
    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"built-in default"}
    assert list(loaded.origins) == list(declared())


def test_each_layer_beats_those_below(tmp_path: Path) -> None:
    layers: dict[str, Any] = {
        "packaged": toml(tmp_path, "[sampling]\nseed = 1\n", "eeinfer.toml"),
        "files": [
            toml(tmp_path, "[sampling]\nseed = 2\n", "a.toml"),
            toml(tmp_path, "[sampling]\nseed = 3\n", "b.toml"),
        ],
        "environ": {"EEINFER_SAMPLING__SEED": "4"},
        "assignments": ["sampling.seed=5", "sampling.seed=6"],
        "flags": {"sampling.seed": 7},
    }
    expected = [
        (1, f"{layers['packaged']} (packaged with the exit heads)"),
        (3, str(layers["files"][1])),
        (4, "environment EEINFER_SAMPLING__SEED"),
        (6, "--set"),
        (7, "argument"),
    ]
    for count, (seed, origin) in enumerate(expected, start=1):
        loaded = load(**dict(list(layers.items())[:count]))
        assert (loaded.settings.sampling.seed, loaded.origins["sampling.seed"]) == (seed, origin)


def test_a_flag_equal_to_the_default_beats_a_file(tmp_path: Path) -> None:
    path = toml(tmp_path, '[batching]\nstrategy = "full"\n')
    loaded = load(files=[path], flags={"batching.strategy": "split"})
    assert loaded.settings.batching.strategy == "split"
    assert loaded.origins["batching.strategy"] == "argument"


def test_tables_merge_and_lists_replace(tmp_path: Path) -> None:
    below = toml(tmp_path, '[exits]\nlayers = [5, 10, 15]\nmeasure = "margin"\n', "a.toml")
    above = toml(tmp_path, "[exits]\nlayers = [20]\n", "b.toml")
    exits = load(files=[below, above]).settings.exits
    assert exits.layers == (20,)
    assert exits.measure == "margin"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("exits.layers", "15,20,24", (15, 20, 24)),
        ("exits.layers", "[15, 20]", (15, 20)),
        ("exits.layers", "15", (15,)),
        ("exits.layers", "auto", "auto"),
        ("exits.threshold", "0.5", 0.5),
        ("exits.threshold", "1", 1.0),
        ("exits.threshold", "inf", math.inf),
        ("exits.threshold", "-inf", -math.inf),
        ("exits.threshold", "0.5, inf", (0.5, math.inf)),
        ("exits.decay", "4", 4.0),
        ("batching.sticky", "true", True),
        ("cache.num_blocks", "512", 512),
        ("model.name", "123", "123"),
        ("model.name", "/data/a,b", "/data/a,b"),
        ("model.name", '"quoted"', "quoted"),
        ("model.device", "cuda:1", "cuda:1"),
    ],
)
def test_text_is_read_as_toml_then_list_then_string(key: str, text: str, value: object) -> None:
    variable = "EEINFER_" + key.replace(".", "__").upper()
    for loaded in (load(environ={variable: text}), load(assignments=[f"{key} = {text}"]), load(flags={key: text})):
        read = loaded.values()[key]
        assert read == value
        assert type(read) is type(value)


@pytest.mark.parametrize(
    ("section", "line", "allowed"),
    [
        ("sampling", 'seed = "3"', "an integer >= 0"),
        ("sampling", "seed = true", "an integer >= 0"),
        ("sampling", "seed = 3.0", "an integer >= 0"),
        ("sampling", "seed = 9223372036854775808", "<= 9223372036854775807"),
        ("sampling", "temperature = -0.1", "a number >= 0 (finite)"),
        ("sampling", "temperature = inf", "a number >= 0 (finite)"),
        ("sampling", "max_tokens = 0", "an integer >= 1"),
        ("sampling", "top_p = 0.0", "a number > 0 and <= 1 (finite)"),
        ("sampling", "top_p = nan", "a number > 0 and <= 1 (finite)"),
        ("sampling", "top_k = -1", "an integer >= 0"),
        ("sampling", "min_p = 1.5", "a number >= 0 and <= 1 (finite)"),
        ("sampling", "repetition_penalty = 0", "a number > 0 (finite)"),
        ("sampling", "presence_penalty = -3", "a number >= -2 and <= 2 (finite)"),
        ("exits", "threshold = nan", "a number (not nan) or a list of numbers (not nan, not empty)"),
        ("exits", "threshold = [0.5, nan]", "not nan"),
        ("exits", "threshold = []", "not empty"),
        ("exits", "decay = -1", "a number >= 0 (finite)"),
        ("exits", "decay = inf", "a number >= 0 (finite)"),
        ("exits", "decay = nan", "a number >= 0 (finite)"),
        ("exits", "layers = [20, 15]", '"auto" or a list of integers >= 1 (not empty, strictly increasing)'),
        ("exits", "layers = [15, 15]", "strictly increasing"),
        ("exits", "layers = 15", "a list of integers"),
        ("exits", "layers = [0, 15]", "integers >= 1"),
        ("exits", 'measure = "maxprob"', 'one of "max-prob", "margin", "entropy", "similarity", "gate"'),
        ("exits", "measure = 1979-05-27", "one of"),
        ("exits", "measure = {a = 1}", "one of"),
        ("batching", "sticky = 1", "true or false"),
        ("cache", "memory_fraction = 1.5", '"auto" or a number > 0 and <= 1'),
        ("model", 'name = ""', "text (not empty)"),
    ],
)
def test_a_wrong_value_names_origin_key_value_and_what_is_allowed(
    tmp_path: Path, section: str, line: str, allowed: str
) -> None:
    path = toml(tmp_path, f"[{section}]\n{line}\n")
    message = refused(files=[path])
    assert message.startswith(f"{path}: {section}.{line.partition(' =')[0]} must be ")
    assert allowed in message
    assert "; got " in message


def test_a_wrong_value_is_refused_even_where_a_higher_layer_would_win(tmp_path: Path) -> None:
    path = toml(tmp_path, "[sampling]\nseed = -1\n")
    assert str(path) in refused(files=[path], flags={"sampling.seed": 1})


def test_wrong_text_is_shown_as_it_was_typed() -> None:
    message = refused(environ={"EEINFER_EXITS__LAYERS": "20,15"})
    assert message.startswith("environment EEINFER_EXITS__LAYERS: exits.layers must be ")
    assert message.endswith("; got '20,15'")
    assert refused(assignments=["sampling.seed=soon"]).startswith("--set: sampling.seed must be an integer")
    assert refused(flags={"sampling.max_tokens": 0}).startswith("argument: sampling.max_tokens must be an integer >= 1")


@pytest.mark.parametrize(
    ("text", "name", "hint"),
    [
        ("[exits]\ntreshold = 0.5\n", "unknown key 'exits.treshold'", "did you mean 'exits.threshold'?"),
        ("[batching]\nmax_tokens = 5\n", "unknown key 'batching.max_tokens'", "did you mean 'sampling.max_tokens'?"),
        ("threshold = 0.5\n", "unknown key 'threshold'", "did you mean 'exits.threshold'?"),
        ("[exit]\nthreshold = 0.5\n", "unknown section 'exit'", "did you mean 'exits'?"),
        ("[zzz]\n", "unknown section 'zzz'", "known: model, exits, batching, cache, sampling"),
        ("[exits]\nqqqq = 1\n", "unknown key 'exits.qqqq'", "known: model.name, "),
        ("exits = 3\n", "exits is a section", "write [exits]"),
    ],
)
def test_an_unknown_name_in_a_file_gets_the_nearest_known(tmp_path: Path, text: str, name: str, hint: str) -> None:
    path = toml(tmp_path, text)
    message = refused(files=[path])
    assert message.startswith(f"{path}: {name}")
    assert hint in message


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("EEINFER_EXITS__TRESHOLD", "EEINFER_EXITS__THRESHOLD"),
        ("EEINFER_EXITS_THRESHOLD", "EEINFER_EXITS__THRESHOLD"),
        ("EEINFER_THRESHOLD", "EEINFER_EXITS__THRESHOLD"),
        ("EEINFER_HOMES", "EEINFER_HOME"),
        ("EEINFER_PROFIL", "EEINFER_PROFILE"),
    ],
)
def test_an_unknown_variable_is_an_error(variable: str, nearest: str) -> None:
    message = refused(environ={variable: "1"})
    assert variable in message
    assert message.endswith(f"did you mean {nearest!r}?")


def test_variables_of_others_and_the_store_are_let_be() -> None:
    assert load(environ={"EEINFER_HOME": "/models", "PATH": "/bin", "NOT_EEINFER_X": "1"}).settings == Settings()


def test_a_bad_assignment_is_an_error() -> None:
    assert refused(assignments=["exits.threshold"]) == "--set exits.threshold: expected section.key=value"
    assert "did you mean 'exits.measure'?" in refused(assignments=["exit.measure=margin"])


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[exits]\nthreshold = = 1\n", "line 2, column 13"),
        ("[exits]\nlayers = [1,\n", "line 3, column 1"),
        ("seed = " + "9" * 5000 + "\n", "line 2, column 1"),
    ],
)
def test_a_syntax_error_has_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    path = toml(tmp_path, text)
    assert refused(files=[path]).startswith(f"{path}, {where}: not valid TOML: ")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert "No such file" in refused(files=[tmp_path / "none.toml"])
    assert "directory" in refused(files=[tmp_path])
    (tmp_path / "latin.toml").write_bytes(b'[model]\nname = "caf\xe9"\n')
    assert "not UTF-8 at byte 19" in refused(files=[tmp_path / "latin.toml"])
    assert "nested too deeply" in refused(files=[toml(tmp_path, "a = " + "[" * 100_000)])


def test_a_byte_order_mark_is_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf[sampling]\r\nseed = 3\r\n")
    assert load(files=[path]).settings.sampling.seed == 3


def test_a_list_of_thresholds_must_match_the_named_exits() -> None:
    message = refused(assignments=["exits.layers=15,20"], flags={"exits.threshold": "0.5,0.6,0.7"})
    assert "exits.threshold has 3 values (argument)" in message
    assert "exits.layers has 2 (--set)" in message
    assert load(assignments=["exits.threshold=0.5,0.6"]).settings.exits.threshold == (0.5, 0.6)


PACKAGED = '[exits]\nlayers = [18, 24]\nmeasure = "max-prob"\nthreshold = [0.8, 0.9]\n'


@pytest.mark.parametrize(
    ("flags", "threshold"),
    [
        ({}, (0.8, 0.9)),
        ({"exits.completion": "copy"}, (0.8, 0.9)),
        ({"exits.layers": [18, 24]}, (0.8, 0.9)),
        ({"exits.measure": "max-prob"}, (0.8, 0.9)),
        ({"exits.layers": [18]}, (0.8,)),
        ({"exits.layers": [24]}, (0.9,)),
        ({"exits.layers": [18, 21]}, math.inf),
        ({"exits.measure": "margin"}, math.inf),
        ({"exits.decay": 0}, (0.8, 0.9)),
        ({"exits.decay": 4}, math.inf),
        ({"model.heads": "none"}, math.inf),
        ({"model.heads": "elsewhere"}, math.inf),
        ({"exits.measure": "margin", "exits.threshold": 0.3}, 0.3),
    ],
)
def test_a_packaged_threshold_holds_for_its_own_exits_measure_decay_and_heads(
    tmp_path: Path, flags: dict[str, Any], threshold: object
) -> None:
    loaded = load(packaged=toml(tmp_path, PACKAGED, "eeinfer.toml"), flags=flags)
    assert loaded.settings.exits.threshold == threshold
    if threshold == math.inf:
        reason = f"built-in default, not the packaged threshold, as argument sets {next(iter(flags))}"
        assert loaded.origins["exits.threshold"] == reason


def test_a_packaged_threshold_holds_when_its_own_folder_is_asked_for(tmp_path: Path) -> None:
    loaded = load(packaged=toml(tmp_path, PACKAGED, "eeinfer.toml"), flags={"model.heads": str(tmp_path)})
    assert loaded.settings.exits.threshold == (0.8, 0.9)


def test_a_packaged_threshold_holds_for_its_own_decay(tmp_path: Path) -> None:
    packaged = toml(tmp_path, PACKAGED + "decay = 4\n", "eeinfer.toml")
    for decay, threshold in ((4, (0.8, 0.9)), (0, math.inf), (2, math.inf)):
        assert load(packaged=packaged, flags={"exits.decay": decay}).settings.exits.threshold == threshold


def test_a_packaged_file_is_validated_too(tmp_path: Path) -> None:
    path = toml(tmp_path, "[exits]\nlayers = [18, 24]\nthreshold = [0.8]\n", "eeinfer.toml")
    assert "exits.threshold has 1 values" in refused(packaged=path)


def test_the_frozen_copy_loads_to_the_same_settings(tmp_path: Path) -> None:
    loaded = load(
        assignments=[
            "exits.layers=15,20",
            "exits.threshold=0.25,-inf",
            'model.name=a "quoted" \\ name',
            "cache.num_blocks=9",
        ]
    )
    for origins in (False, True):
        text = loaded.to_toml(origins=origins)
        assert load(files=[toml(tmp_path, text)]).settings == loaded.settings
    assert tomllib.loads(loaded.to_toml())["exits"]["layers"] == [15, 20]
    assert "layers = [15, 20]                        # --set\n" in loaded.to_toml(origins=True)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_the_presets_load_and_change_something(path: Path) -> None:
    loaded = load(files=[path])
    assert str(path) in loaded.origins.values()
    assert loaded.settings != Settings()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_the_presets_run(path: Path, tiny_model: Callable[[str], Path]) -> None:
    own = {
        "model.name": str(tiny_model("gqa")),
        "exits.layers": (2, 4),
        "sampling.max_tokens": 4,
        "cache.num_blocks": 9,
    }
    llm = LLM.from_loaded(lambda packaged: load(files=[path], flags=own, packaged=packaged), note=lambda _: None)
    assert [len(answer.tokens) for answer in llm.generate(["a", "bcd"])] == [4, 4]


def test_did_you_mean() -> None:
    assert did_you_mean("promt", ["prompt", "id"]) == "; did you mean 'prompt'?"
    assert did_you_mean("xyz", ["prompt", "id"]) == "; known: prompt, id"


def test_every_setting_has_help() -> None:
    assert all(setting.help.endswith(".") for setting in declared().values())


def test_a_packaged_file_at_odds_with_itself_is_named(tmp_path: Path) -> None:
    packaged = toml(tmp_path, "[exits]\nlayers = [18, 21, 24]\nthreshold = [0.8, 0.9]\n", "eeinfer.toml")
    for layers in ([18], [18, 24]):
        with pytest.raises(ConfigError, match=r"threshold has 2 values .*eeinfer\.toml.* but exits.layers has 3"):
            load(packaged=packaged, flags={"exits.layers": layers})
