"""`eeinfer convert`: a GGUF file or pickled weights into a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from eeinfer.cli.progress import progress_bars


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A GGUF file, or a folder with pytorch_model.bin.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write; it must not be there yet.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"],
        typer.Option(help="Number type of the weights of a GGUF file; pickled weights keep theirs."),
    ] = "bfloat16",
) -> None:
    """Make a Hugging Face folder with safetensors of a GGUF file or of pickled weights, and print it.

    GGUF: Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3 in any quantisation that the gguf package reads, with
    tokenizer and chat template. Pickles are read as tensors alone: no code in them runs.
    """
    from rich.console import Console

    from eeinfer.model.convert import convert as convert_model

    with progress_bars(Console(stderr=True)) as progress:
        convert_model(source, target, dtype=dtype, progress=progress)
    typer.echo(target)
