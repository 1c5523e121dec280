"""`tune-heads --method distill`, from prompts to a folder of heads: answers, states, heads, gates, figures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from eeinfer.config.load import Loaded
from eeinfer.engine.build import load_model, locate
from eeinfer.errors import ConfigError, EeinferError
from eeinfer.exits.files import HeadsFile, save_heads
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.model.store import home
from eeinfer.training.answers import digest
from eeinfer.training.auto import candidates, propose
from eeinfer.training.distill import distill, spread
from eeinfer.training.gates import with_gates
from eeinfer.training.job import Job, locked, new_accelerator
from eeinfer.training.judge import Judged, costs_of, figures, fit_temperature, predict
from eeinfer.training.learned_kv import errors, with_learned_kv
from eeinfer.training.least_squares import check_exits, check_norm, solve
from eeinfer.training.modules import TrainableHead, initial_tensors
from eeinfer.training.options import Options
from eeinfer.training.output import prepare, write_settings
from eeinfer.training.prompts import data_record, read_requests, split
from eeinfer.training.states import pieces
from eeinfer.training.traces import Answered

_TEMPERATURE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Tuned:
    """The figures on dev and, if there are further prompts, on those at the thresholds that dev chose."""

    dev: Judged
    other: Judged | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the caller of `tune` asked for."""

    prompts: Path | BinaryIO
    num_prompts: int | None
    judged_prompts: Path | None
    exits: tuple[int, ...] | None
    output: Path
    options: Options
    resume: bool


def tune(
    resolve: Callable[[Path | None], Loaded],
    *,
    prompts: Path | BinaryIO,
    exits: Sequence[int] | None,
    output: Path,
    num_prompts: int | None,
    note: Callable[[str], None],
    options: Options,
    work: Path | None = None,
    judge: Path | None = None,
    resume: bool = True,
) -> Tuned | None:
    """Train a head and a gate for each exit, and write them to `output` with thresholds and figures.

    Under `accelerate launch` every process calls this alike.

    Args:
        resolve: loads the settings (see `LLM.from_loaded`); answers are always at full depth.
        prompts: JSONL of prompts, as a file or an open binary stream.
        exits: layers executed, increasing; None: those that `eeinfer.training.auto` proposes.
        output: folder to write; made if missing.
        num_prompts: only the first so many.
        note: called with one-line notices.
        options: what is trained, and how long.
        work: folder of answers, states and checkpoints; None: in the model store.
        judge: further prompts, on which the heads are only judged.
        resume: go on from a checkpoint of the same run, if there is one.

    Returns:
        The figures; None in the processes of a launch other than the first.

    Raises:
        EeinferError: settings, model or prompts cannot be used.
    """
    settings = resolve(None).settings
    located = locate(settings.model, note)
    if exits is not None:
        check_exits(exits, located.config.num_layers)
    check_norm(located.config)
    options.check(located.config.hidden_size, located.config.intermediate_size)
    accelerator = new_accelerator(settings, located)
    if accelerator.num_processes > 1 and not isinstance(prompts, Path):
        raise ConfigError("--prompts -: several processes cannot read one standard input; give a file")
    first = accelerator.is_main_process
    job = Job(resolve, settings, located, accelerator, work or home() / "training", note if first else _silent)
    asked = _Asked(prompts, num_prompts, judge, None if exits is None else tuple(exits), output, options, resume)
    if first:
        prepare(output)
    with locked(job.work) if first else nullcontext():
        tuned = _tune(job, asked)
    accelerator.end_training()
    return tuned


def _tune(job: Job, asked: _Asked) -> Tuned | None:
    requests = read_requests(asked.prompts, asked.num_prompts, job.note)
    others = [] if asked.judged_prompts is None else read_requests(asked.judged_prompts, None, job.note)
    answers, other_answers = job.answers(requests), job.answers(others)
    splits = split(answers, gates=asked.options.gate_width > 0)
    if not all(splits.values()):
        raise EeinferError(f"{len(answers)} answered prompts are too few to fit and judge heads; give some hundreds")
    if asked.judged_prompts and not other_answers:
        raise EeinferError(f"--judge {asked.judged_prompts}: no prompt there can be answered; give another file")
    decoder = load_model(job.settings.model, job.located, job.note, keep_plain=True).decoder
    exits = asked.exits or _proposed(job, asked.options, decoder, splits)
    states = job.states(decoder, splits, exits)
    specs = _specs(asked.options, exits, decoder)
    heads = _train(job, asked, decoder, specs, states, job.states_folder(splits, exits).name)
    if not job.accelerator.is_main_process:
        return None
    heads = _warmed(decoder, heads, states["dev"])
    if gate := _gate(asked.options, decoder):
        job.note(
            f"training {len(heads.specs)} gates, with {states['gate'].shape[1]} tokens that the heads have not seen"
        )
        heads = with_gates(decoder, heads, states, gate, job.settings.sampling.seed)
    costs = costs_of(decoder, heads)
    dev = figures(predict(decoder, heads, states["dev"]), costs)
    other = None
    if other_answers:
        found = job.states_here(decoder, {"judge": other_answers}, exits)["judge"]
        chosen = {name: turn.thresholds for name, turn in dev.joint.items()}
        other = figures(predict(decoder, heads, found), costs, chosen)
    tuned = Tuned(dev, other)
    header = _header(job, asked.options, decoder, states["train"].shape[1]) | data_record(requests, answers)
    if rank := asked.options.completion_rank:
        thresholds = dev.joint[dev.measure].thresholds
        heads = with_learned_kv(decoder, heads, splits["train"], thresholds, rank)
        header["completion"] = _completion_errors(job, decoder, heads, splits["dev"], thresholds)
    _write(job, asked.output, heads, tuned, header)
    return tuned


def _proposed(job: Job, options: Options, decoder: Decoder, splits: dict[str, list[Answered]]) -> tuple[int, ...]:
    """The exits of the first process: what it measures is not what another one would."""
    depths = candidates(decoder.num_layers)
    states = job.states(decoder, {name: splits[name] for name in ("train", "dev")}, depths)
    found: list[tuple[int, ...]] = [()]
    if job.accelerator.is_main_process:
        specs, rows = _specs(options, depths, decoder), job.settings.batching.max_num_seqs
        found = [propose(decoder, states, specs, gate=_gate(options, decoder), rows=rows, note=job.note)]
    return tuple(broadcast_object_list(found)[0])


def _specs(options: Options, exits: Sequence[int], decoder: Decoder) -> list[ExitSpec]:
    """The forms of the heads, without their gates."""
    config = decoder.config
    usual = min(config.hidden_size, config.intermediate_size)
    width = (options.width or usual) if options.kind == "mlp" else None
    return [ExitSpec(n, options.kind, rank=options.rank, intermediate=width) for n in exits]


def _train(
    job: Job, asked: _Asked, decoder: Decoder, specs: Sequence[ExitSpec], states: dict[str, Tensor], data: str
) -> HeadsFile:
    """The trained heads, in the type that they are stored in; `data` names the states."""
    options, eps, seed = asked.options, decoder.config.norm_eps, job.settings.sampling.seed
    maps, tokens = solve((list(piece.to(decoder.device)) for piece in pieces(states["train"])), eps)
    job.note(f"training {len(specs)} heads on {tokens} tokens, from their least-squares fit")
    start = [initial_tensors(decoder, spec, a) for spec, a in zip(specs, maps, strict=True)]
    modules = [TrainableHead(spec, own, eps) for spec, own in zip(specs, start, strict=True)]
    recipe = asdict(replace(options, gate_width=0))
    for later in ("gate_tokens", "completion_rank"):  # not part of what a checkpoint holds
        del recipe[later]
    folder = job.work / f"run-{digest([data, recipe, seed])}"
    if job.accelerator.is_main_process and not asked.resume:
        shutil.rmtree(folder, ignore_errors=True)
    job.accelerator.wait_for_everyone()
    best = distill(job.accelerator, decoder, modules, states, options, seed, folder, job.note)
    stored = torch.promote_types(decoder.dtype, torch.bfloat16)
    return HeadsFile(tuple(specs), tuple({name: tensor.to(stored) for name, tensor in own.items()} for own in best))


def _warmed(decoder: Decoder, heads: HeadsFile, dev: Tensor) -> HeadsFile:
    """The heads with their temperatures."""
    few = spread(dev, _TEMPERATURE_TOKENS)
    pairs = zip(heads.specs, heads.tensors, strict=True)
    warm = [fit_temperature(decoder, *pair, few[[i, -1]]) for i, pair in enumerate(pairs)]
    return replace(heads, specs=tuple(replace(spec, temperature=t) for spec, t in zip(heads.specs, warm, strict=True)))


def _gate(options: Options, decoder: Decoder) -> GateSpec | None:
    """Sizes of the gates, no larger than the model's."""
    tokens = min(options.gate_tokens, decoder.config.vocab_size)
    width = min(options.gate_width, decoder.config.hidden_size, tokens)
    return GateSpec(width, tokens) if width else None


def _completion_errors(
    job: Job, decoder: Decoder, heads: HeadsFile, answers: Sequence[Answered], thresholds: Sequence[float]
) -> list[dict[str, float]]:
    """Errors of completed KV on held-out answers, as the file of the heads tells them."""
    found = []
    for i, (before, after) in errors(decoder, heads, answers, thresholds).items():
        depth = heads.specs[i].layers_executed
        job.note(f"KV skipped after {depth} layers: squared error {before:.2f} as propagated, {after:.2f} as learned")
        found.append({"layers_executed": depth, "propagate": round(before, 4), "learned": round(after, 4)})
    return found


def _write(job: Job, output: Path, heads: HeadsFile, tuned: Tuned, header: dict[str, Any]) -> None:
    dev = tuned.dev.to_json()
    results = dev.pop("exits")
    header |= {"dev": dev} | ({} if tuned.other is None else {"judged": tuned.other.to_json()})
    save_heads(output, job.located.base, heads, header=header, results=results)
    chosen = tuned.dev.joint[tuned.dev.measure]
    completion = "learned" if any(spec.completion for spec in heads.specs) else None
    layers = [spec.layers_executed for spec in heads.specs]
    write_settings(output, layers, chosen.measure, chosen.thresholds, completion)
    if not any(chosen.leaving):
        job.note(
            "no threshold keeps the precision on enough held-out tokens: all are inf and nothing would leave early; "
            "give more prompts, or choose --threshold yourself"
        )


def _header(job: Job, options: Options, decoder: Decoder, fitted_tokens: int) -> dict[str, Any]:
    sampling = job.settings.sampling
    return {
        "method": "distill",
        **asdict(options),
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "sampling_temperature": sampling.temperature,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "fitted_tokens": fitted_tokens,
    }


def _silent(_: str) -> None:
    """Says nothing: the first process speaks for all."""
