"""The model under test: a real one, or random weights in the shape of a known one."""

from __future__ import annotations

from dataclasses import dataclass

from eeinfer.bench import report
from eeinfer.config.schema import ModelSettings
from eeinfer.engine.build import Located, Model, Note, device_of, dtype_of, load_model, new_decoder
from eeinfer.exits.files import Base
from eeinfer.model.random_weights import random_weights, shape_config
from eeinfer.model.tokenizer import NoTokenizer
from eeinfer.model.weights import weight_bytes
from eeinfer.runner.memory import check_weights


def locate_random(name: str) -> Located:
    """What stands for a model folder where weights are random; there are no exit heads.

    Raises:
        ConfigError: no shape is known by that name.
    """
    config = shape_config(name)
    return Located(None, config, Base(name, "", config.hidden_size, config.vocab_size, config.num_layers), None)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in memory, and what it is."""

    located: Located
    model: Model

    @property
    def is_random(self) -> bool:
        """Whether its weights are random."""
        return self.located.folder is None

    def describe(self) -> report.Model:
        """The entry `model` of a report."""
        config, decoder, base = self.located.config, self.model.decoder, self.located.base
        return report.Model(
            name=base.name,
            fingerprint=base.fingerprint or None,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            dtype=str(decoder.dtype).removeprefix("torch."),
            weight_bytes=weight_bytes(config, decoder.dtype),
            random_weights=self.is_random,
        )


def load_subject(settings: ModelSettings, located: Located, seed: int, note: Note) -> Subject:
    """Read the weights, or make them up.

    Raises:
        ConfigError: they do not fit this machine.
        ModelError: files that cannot be used.
    """
    if located.folder is not None:
        return Subject(located, load_model(settings, located, note))
    config = located.config
    device, dtype = device_of(settings.device), dtype_of(settings.dtype, config.dtype)
    needed = check_weights(f"--random-weights {located.base.name}", config, dtype, device)
    note(f"making up {needed / 2**30:.1f} GiB of random weights in the shape of {located.base.name}")
    decoder = new_decoder(settings, config, random_weights(config, dtype, device, seed), note)
    return Subject(located, Model(decoder, NoTokenizer()))
