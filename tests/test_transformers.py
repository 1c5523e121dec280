"""eeinfer against `transformers` in float32: greedy answers of the real default model, logits of every tiny variant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import PlainLlama, frequencies
from tiny import EOS, LLAMA3, VARIANTS, Loop, Script, load_decoder, sequence
from tiny_families import CONFIGS
from transformers import AutoModelForCausalLM, AutoTokenizer

from eeinfer import LLM, Request, SamplingParams
from eeinfer.core.plan import Draw, Outcome, Pass, Plan
from eeinfer.core.sequence import Sequence
from eeinfer.model.decoder import Decoder
from eeinfer.ops.rope import rotary
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.runner.sampler import sample

NEW_TOKENS = 24
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Tom has 3 boxes with 12 apples each and gives 7 apples away. How many apples are left? Think step by step.",
    "Translate into French: The weather is fine today, and we are going for a walk in the park.",
    "Name three things that one needs to bake bread, and say in a few words what each of them is for. Keep it short.",
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''\n\nComplete this function in Python.",
)


def test_full_equals_greedy_transformers(default_model: Path) -> None:
    """Batched, with so few blocks that sequences are preempted, against one prompt at a time."""
    tokenizer: Any = AutoTokenizer.from_pretrained(default_model)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    prompts = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats
    ]

    sampling = SamplingParams(max_tokens=NEW_TOKENS)
    requests = [Request(str(i), messages=tuple(chat), sampling=sampling) for i, chat in enumerate(chats)]
    options = {"strategy": "full", "dtype": "float32", "device": "cpu", "temperature": 0.0}
    llm = LLM(str(default_model), **options, block_size=4, num_blocks=80, prefix_cache=False)
    outputs = llm.generate(requests)
    assert llm.stats.preemptions > 0
    assert [o.prompt_tokens for o in outputs] == [len(prompt) for prompt in prompts]
    del llm

    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        greedy = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        expected = model.generate(ids, **greedy)[0, len(prompt) :].tolist()
        assert [token.token_id for token in output.tokens] == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tiny_model: Callable[[str], Path]) -> None:
    """All positions of two ragged sequences in one prefill, on scattered blocks."""
    decoder = load_decoder(tiny_model(variant), torch.float32)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 256, (n,), generator=generator) for n in (37, 60)]
    block_size, tables = 8, torch.tensor([[3, 9, 1, 12, 5, 0, 0, 0], [2, 0, 8, 10, 4, 7, 11, 6]])
    config = decoder.config
    cache = torch.zeros(config.num_layers, 2, 13, block_size, config.num_kv_heads, config.head_dim)
    batch = TokenBatch.ragged([range(len(s)) for s in sequences], tables, block_size)
    model, loading = AutoModelForCausalLM.from_pretrained(
        tiny_model(variant), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), "the tiny model has the tensors of its family"
    with torch.inference_mode():
        hidden, _ = decoder.run(range(config.num_layers), decoder.embed(torch.cat(sequences)), batch, cache)
        actual = decoder.logits(hidden).split([len(s) for s in sequences])
        expected = [model(s[None]).logits[0] for s in sequences]
    for a, b in zip(actual, expected, strict=True):
        assert b.std() > 1
        assert (a - b).abs().max() < 1e-4
        assert torch.equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.parametrize("variant", ["gqa", "qwen2-window", "qwen3", "rope-yarn", *CONFIGS])
def test_greedy_tokens_equal_transformers(variant: str, tiny_model: Callable[[str], Path]) -> None:
    """Two sequences decoded together, well beyond the windows of those that have them."""
    decoder = load_decoder(tiny_model(variant), torch.float32)
    sequences = [sequence(str(n), range(n, 2 * n), 14, eos_token_ids=frozenset({EOS})) for n in (5, 12)]
    Loop(decoder).run(sequences)
    model = AutoModelForCausalLM.from_pretrained(tiny_model(variant), dtype=torch.float32, attn_implementation="eager")
    for s in sequences:
        ids = torch.tensor([s.tokens[: s.prompt_tokens]])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 14, "do_sample": False}
        assert model.generate(ids, **options)[0, s.prompt_tokens :].tolist() == s.generated


@pytest.mark.parametrize("rope", [{"rope_theta": 1e5}, {"rope_theta": 1e4, "type": "linear", "factor": 4.0}, LLAMA3])
def test_rotary_frequencies(rope: dict[str, float | str]) -> None:
    """Float32 as in training, to the bit, and close to the same formula in float64."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    actual = rotary(16, float(rope["rope_theta"]), rope | {"rope_type": kind}).frequencies
    assert actual.dtype == torch.float32
    assert torch.equal(actual, frequencies(16, rope))
    plain = float(rope["rope_theta"]) ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    if kind == "default":
        torch.testing.assert_close(actual.double(), plain, rtol=1e-6, atol=0)
    elif kind == "llama3":  # kept, then blended, then divided by 8
        ratio = (plain / actual.double()).tolist()
        assert ratio[0] == pytest.approx(1, rel=1e-6)
        assert 1 < ratio[1] < 8
        assert ratio[-1] == pytest.approx(8, rel=1e-6)


def test_folders_hold_the_traits_they_are_named_for(
    tiny_model: Callable[[str], Path], plain: Callable[..., PlainLlama]
) -> None:
    assert len(list(tiny_model("sharded").glob("*.safetensors"))) == 3
    assert "lm_head.weight" not in plain("tied-mqa").weights
    assert "model.layers.0.mlp.up_proj.bias" in plain("biases").weights
    assert plain("head-dim-12").head_dim * plain("head-dim-12").heads != 32
    assert "model.layers.0.self_attn.q_proj.bias" in plain("qwen2").weights
    assert "model.layers.0.self_attn.o_proj.bias" not in plain("qwen2").weights
    assert "model.layers.0.self_attn.k_norm.weight" in plain("qwen3").weights


# The sampler, against the distribution it draws from


def test_draws_follow_the_tempered_distribution() -> None:
    """Chi-square over 20,000 seeded draws of one sequence each; 20.5 is the 0.999 quantile for 5 degrees of freedom."""
    logits, temperature, count = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -torch.inf, -0.5]), 0.7, 20_000
    draws = [Sequence("r", [1], 1, frozenset(), temperature, seed).draw() for seed in range(count)]
    tokens = sample(logits.expand(count, -1), draws)
    weights = [2.718281828459045 ** (x / temperature) for x in logits.tolist()]
    expected = torch.tensor(weights, dtype=torch.float64) * count / sum(weights)
    observed = torch.bincount(tokens, minlength=len(logits)).double()
    assert observed[5] == 0, "a token without probability"
    possible = expected > 0
    assert ((observed - expected)[possible] ** 2 / expected[possible]).sum() < 20.5


def test_exits_draw_at_the_temperature_of_each_request(tiny_decoder: Callable[..., Decoder]) -> None:
    """Rows that leave at an exit draw from that exit's logits, with their own temperature and seed."""
    decoder = tiny_decoder("gqa")
    script = Script(lambda s, index, _: 0.9 if (index + int(s.request_id)) % 2 else 0.1)
    loop = Loop(decoder, script.exits(decoder, [3]), script, max_num_seqs=5)
    unlikely = []

    def check(plan: Plan, outcome: Outcome) -> None:
        if isinstance(plan, Pass) and plan.stage == 0:
            for row, logits, verdict in zip(plan.rows, script.logits, outcome, strict=True):
                if verdict.token is not None and row.draw.temperature:
                    assert verdict.token == int(sample(logits[None], [row.draw]))
                    unlikely.append(verdict.token != int(logits.argmax()))
                elif verdict.token is not None:
                    assert verdict.token == int(logits.argmax())

    loop.after = check
    loop.run([sequence(str(i), [i, i + 1], 12, temperature=0.5 * i, seed=i) for i in range(5)])
    assert sum(unlikely) > len(unlikely) / 4 > 4


def test_draws_along_one_sequence_follow_the_distribution_too() -> None:
    """The draws of one seed, token after token, are as good as those of many seeds. 16.3: 0.999 quantile, 3 degrees."""
    count, logits = 8_000, torch.tensor([0.0, 0.0, 0.0, 0.0])
    s = Sequence("r", [1], count, frozenset(), 1.0, seed=5)
    draws: list[Draw] = []
    for _ in range(count):
        draws.append(s.draw())
        s.tokens.append(0)
    observed = torch.bincount(sample(logits.expand(count, -1), draws), minlength=4).double()
    assert ((observed - count / 4) ** 2 / (count / 4)).sum() < 16.3


def test_seeded_answers_do_not_depend_on_their_batch(make_llm: Callable[..., LLM]) -> None:
    """Own seeds, the run's seed, and a greedy request among them; alone, together and in reverse."""
    sampling = [SamplingParams(max_tokens=10, temperature=1.0, seed=seed) for seed in (1, 2, None)]
    sampling.append(SamplingParams(max_tokens=10, temperature=0.0))
    requests = [Request(str(i), prompt_token_ids=(5, 6, 7), sampling=s) for i, s in enumerate(sampling)]
    answers = [
        {o.id: [t.token_id for t in o.tokens] for batch in batches for o in make_llm().generate(batch)}
        for batches in ([requests], [requests[::-1]], [[request] for request in requests])
    ]
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(answer) for answer in answers[0].values()}) == 4
    other = make_llm(seed=1).generate(requests)
    changed = {o.id: [t.token_id for t in o.tokens] != answers[0][o.id] for o in other}
    assert changed == {"0": False, "1": False, "2": True, "3": False}, "the run's seed counts where a request has none"
