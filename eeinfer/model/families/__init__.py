"""Families: what a decoder is made of, read from a Hugging Face `config.json`, and where its tensors are.

A family is traits of one decoder (`ModelConfig`) with a table of tensor names. The decoder chooses its parts from the
traits when it is built; nothing branches on a family's name afterwards. A new family is a row of `FAMILIES`, and at
most one small module that reads its config.
"""

from eeinfer.model.families.table import FAMILIES, model_config
from eeinfer.model.families.traits import ModelConfig, TensorNames

__all__ = ["FAMILIES", "ModelConfig", "TensorNames", "model_config"]
