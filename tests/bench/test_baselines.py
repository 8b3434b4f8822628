"""The transformers arms on a tiny random model: neutral settings, one stop rule, steps counted at the door."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_cli.bench.baselines import HfGreedyArm, LoopArm, Reply, StopRule, Stopwatch, Timed
from tests.bench.fakes_bench import FakeClock
from tests.tiny_models import by_whole_forwards


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _arm(model: LlamaForCausalLM, count: int = 12, stops: set[int] | None = None, lookup: int | None = None):
    rule = StopRule(frozenset(stops or ()), count, 128)
    return HfGreedyArm("hf-prompt-lookup" if lookup else "hf-greedy", model, rule, pad_id=0, lookup_tokens=lookup)


PROMPT = [5, 9, 11, 5, 9, 11, 5, 9]


def test_it_writes_what_greedy_decoding_writes_one_token_a_step(model: LlamaForCausalLM) -> None:
    reply = _arm(model).generate([PROMPT])[0]
    assert list(reply.token_ids) == by_whole_forwards(model, PROMPT, 12)
    assert (reply.num_steps, list(reply.kept), list(reply.num_nodes)) == (11, [1] * 11, [1] * 11)


def test_settings_of_the_generation_config_change_nothing_and_are_named(model: LlamaForCausalLM) -> None:
    model.generation_config.update(repetition_penalty=1.9, no_repeat_ngram_size=1, suppress_tokens=list(range(30)))
    before = model.generation_config
    try:
        arm = _arm(model)
        assert list(arm.generate([PROMPT])[0].token_ids) == by_whole_forwards(model, PROMPT, 12)
        assert set(arm.neutralised) == {"repetition_penalty", "no_repeat_ngram_size", "suppress_tokens"}
        assert model.generation_config is before
    finally:
        model.generation_config.update(repetition_penalty=None, no_repeat_ngram_size=None, suppress_tokens=None)
    assert _arm(model).neutralised == {}


def test_it_ends_at_the_shared_stop_ids_and_at_the_context_limit(model: LlamaForCausalLM) -> None:
    wrote = by_whole_forwards(model, PROMPT, 12)
    place = next(n for n in range(2, 12) if wrote[n] not in wrote[:n])
    assert list(_arm(model, stops={wrote[place]}).generate([PROMPT])[0].token_ids) == wrote[: place + 1]
    tight = HfGreedyArm("hf-greedy", model, StopRule(frozenset(), 12, len(PROMPT) + 3), pad_id=0)
    assert list(tight.generate([PROMPT])[0].token_ids) == wrote[:3]


@pytest.mark.parametrize("lookup", [2, 6])
def test_prompt_lookup_writes_the_same_in_fewer_steps_and_every_token_is_accounted_for(
    model: LlamaForCausalLM, lookup: int
) -> None:
    reply = _arm(model, 24, lookup=lookup).generate([PROMPT])[0]
    assert list(reply.token_ids) == by_whole_forwards(model, PROMPT, 24)
    by_prefill = len(reply.token_ids) - sum(reply.kept)
    assert 1 <= by_prefill <= lookup + 1
    assert reply.num_steps == len(reply.kept) == len(reply.num_nodes)
    assert all(1 <= kept <= nodes for kept, nodes in zip(reply.kept, reply.num_nodes, strict=True))


def test_a_second_prompt_gets_what_it_would_get_alone(model: LlamaForCausalLM) -> None:
    arm = _arm(model, lookup=3)
    alone = arm.generate([PROMPT])
    arm.generate([[1, 2, 3]])
    assert arm.generate([PROMPT]) == alone


def test_prompts_written_at_once_get_what_each_gets_alone(model: LlamaForCausalLM) -> None:
    prompts = [PROMPT, [1, 2, 3], [7], [4, 4, 8, 60, 61]]
    wrote = by_whole_forwards(model, PROMPT, 12)
    arm = _arm(model, stops={wrote[5], by_whole_forwards(model, [7], 12)[3]})
    together = arm.generate(prompts)
    for reply, prompt in zip(together, prompts, strict=True):
        (alone,) = arm.generate([prompt])
        assert list(reply.token_ids) == list(alone.token_ids)
        assert (reply.num_steps, list(reply.kept)) == (alone.num_steps, list(alone.kept))
    assert len({len(reply.token_ids) for reply in together}) > 1


def test_the_loop_arm_hands_on_what_its_loop_says() -> None:
    said = Reply([1], "length", 0, [], [])
    assert LoopArm("medusa", lambda prompts: [said] * len(prompts)).generate([[4], [5]]) == [said, said]


def test_a_watch_times_the_named_parts_and_leaves_the_rest_alone() -> None:
    clock = FakeClock()

    class Tree:
        max_depth = 3

    class Draft:
        tree = Tree()

    class Drafter:
        size = 7

        def propose(self, context: Any) -> Draft:
            clock.now += 2.0
            return Draft()

    watch = Stopwatch(clock)
    drafter = Timed(Drafter(), {"propose": "draft"}, watch)
    drafter.propose(None)
    drafter.propose(None)
    assert (watch.seconds["draft"], watch.deepest, drafter.size) == (4.0, 3, 7)
    watch.reset()
    assert (dict(watch.seconds), watch.deepest) == ({}, 0)
