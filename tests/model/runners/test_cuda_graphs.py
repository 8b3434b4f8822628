"""A forward that was recorded shows what a fresh one shows, whatever came between.

On a CPU, by a recorder that does as a CUDA graph does: it runs the same operations over the same memory.
"""

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.assemble import lay_out_heads
from medusa_cli.contracts import Draft, Seen
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.memory import needed_bytes
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.model.runners import cuda_graphs
from medusa_cli.model.runners.cuda_graphs import MOST_GRAPHS, NODES, Bucket, GraphedForward, Recorded
from medusa_cli.model.target import Target
from medusa_cli.pipeline.generation_workers import Job, Manner, write_here
from medusa_cli.trees.tree import TokenTree
from tests.drafters.test_dynamic_drafter import random_heads
from tests.fakes import DRAFTERS, SHAPES
from tests.real_drafters import REAL
from tests.recorder import on_cpu
from tests.tiny_models import ARCHITECTURES, NUM_NEW, greedy_of, known, prompt_of, target_of, tiny_model

LIMITS = Limits(NUM_NEW)
CPU = torch.device("cpu")


def graphed_target(name: str = "llama", attention: str = "sdpa") -> Target:
    target = target_of(tiny_model(name), attention)
    target.use(GraphedForward(target.at, on_cpu, CPU))
    return target


def graphed(target: Target) -> GraphedForward:
    (forward,) = target.forwards
    return forward


def recorded(target: Target) -> list[Bucket]:
    return list(graphed(target)._recorded)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_draft_gives_the_greedy_text_on_recorded_forwards(drafter: str, shape: str, num_rows: int) -> None:
    target, texts = graphed_target(), known("llama")
    parts = Parts(target, DRAFTERS[drafter](texts.texts, SHAPES[shape]), Greedy())
    found = collect(parts, texts.prompts[:num_rows], LIMITS, max_rows=num_rows)
    assert [each.token_ids for each in found] == texts.wanted(num_rows)
    assert recorded(target)


@pytest.mark.parametrize("drafter", REAL)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_every_drafter_of_ours_gives_the_greedy_text_on_recorded_forwards(name: str, drafter: str) -> None:
    target, texts = graphed_target(name), known(name)
    found = collect(Parts(target, REAL[drafter](target, texts.texts), Greedy()), texts.prompts, LIMITS, max_rows=2)
    assert [each.token_ids for each in found] == texts.wanted(3)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_gives_its_greedy_text_on_recorded_forwards(name: str) -> None:
    texts = known(name)
    for attention in ARCHITECTURES[name].attentions:
        target = graphed_target(name, attention)
        parts = Parts(target, DRAFTERS["random"](texts.texts, SHAPES["dynamic"]), Greedy())
        found = collect(parts, texts.prompts, LIMITS, max_rows=3)
        assert [each.token_ids for each in found] == texts.wanted(3), attention
        assert recorded(target)


def test_one_recording_serves_texts_of_many_lengths_and_every_later_text() -> None:
    target, texts = graphed_target(), known("llama")
    for prompt, answer in zip(texts.prompts, texts.wanted(3), strict=True):
        (found,) = collect(Parts(target, NoDrafter(), Greedy()), [prompt], LIMITS)
        assert found.token_ids == answer
    assert recorded(target) == [Bucket(1, 1, 256)]


def test_keys_that_had_to_move_are_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.decode.rows.AHEAD", 0)  # as for a text that outgrows what it was given
    model = tiny_model("llama", max_position_embeddings=1024)
    prompt = prompt_of(240)
    target = target_of(model, "sdpa")
    target.use(GraphedForward(target.at, on_cpu, CPU))
    (found,) = collect(Parts(target, NoDrafter(), Greedy()), [prompt], Limits(30))
    assert found.token_ids == greedy_of(model, prompt, 30)
    assert recorded(target) == [Bucket(1, 1, 512)], "those of before point to memory that is no longer the cache's"


def test_a_cache_beside_another_one_is_not_recorded_and_both_are_right() -> None:
    target, texts = graphed_target(), known("llama")
    cache = target.new_cache(1, 0)
    target.prefill([texts.prompts[0]], cache)
    (beside,) = collect(Parts(target, NoDrafter(), Greedy()), [texts.prompts[1]], LIMITS)
    assert beside.token_ids == texts.wanted(2)[1]
    assert recorded(target) == []
    draft = Draft(torch.tensor([[texts.answers[0][0]]]), TokenTree.empty())
    assert int(target.verify(draft, cache).logits_BNV[0, 0].argmax()) == texts.answers[0][1]
    assert recorded(target) == [Bucket(1, 1, 256)]


def test_numbers_that_are_not_finite_do_not_outlive_their_text() -> None:
    target, texts = graphed_target(), known("llama")
    cache = target.new_cache(1, 0)
    target.prefill([prompt_of(40)], cache)
    with torch.inference_mode():
        for layer in cache.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.inf)
    del cache, layer
    gc.collect()
    (found,) = collect(Parts(target, NoDrafter(), Greedy()), [texts.prompts[0]], LIMITS)
    assert found.token_ids == texts.wanted(1)[0]
    assert recorded(target)


def test_a_finished_text_gives_its_place_back() -> None:
    target, texts = graphed_target(), known("llama")
    collect(Parts(target, NoDrafter(), Greedy()), [texts.prompts[0]], LIMITS)
    assert graphed(target).arena.is_lent_to(target.new_cache(1, 0)), "the next one's cache has it"


def test_more_nodes_than_are_recorded_run_as_they_are() -> None:
    target = graphed_target()
    cache = target.new_cache(1, 0)
    target.prefill([prompt_of(5)], cache)
    tokens_1N = torch.tensor([prompt_of(NODES[-1] + 1)])
    seen = target.verify(Draft(tokens_1N, TokenTree.chain(NODES[-1])), cache)
    assert seen.logits_BNV.shape[1] == NODES[-1] + 1
    assert recorded(target) == []


def test_the_recordings_used_least_lately_are_forgotten() -> None:
    target = graphed_target()
    cache = target.new_cache(MOST_GRAPHS + 1, 0)
    target.prefill([prompt_of(3)] * (MOST_GRAPHS + 1), cache)
    for rows in range(1, MOST_GRAPHS + 2):
        target.verify(Draft(torch.zeros(rows, 1, dtype=torch.long), TokenTree.empty()), cache)
        target.verify(Draft(torch.zeros(1, 1, dtype=torch.long), TokenTree.empty()), cache)
    assert len(recorded(target)) == MOST_GRAPHS
    assert Bucket(1, 1, 256) in recorded(target)
    assert Bucket(2, 1, 256) not in recorded(target)


@pytest.mark.parametrize(
    ("lengths", "nodes", "wanted"),
    [
        ([0], 1, Bucket(1, 1, 256)),
        ([250, 3], 5, Bucket(2, 8, 512)),
        ([255], 1, Bucket(1, 1, 256)),
        ([2040], 16, Bucket(1, 16, 2304)),
        ([8000], 33, Bucket(1, 48, 8192)),
        ([8190], 33, Bucket(1, 48, 9216)),
    ],
)
def test_buckets_hold_what_is_asked_and_waste_little(lengths: list[int], nodes: int, wanted: Bucket) -> None:
    assert Bucket.of(lengths, nodes) == wanted


def test_the_recorder_refuses_what_a_graph_can_not_hold() -> None:
    number = torch.ones(1)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        on_cpu(lambda: number.item())


def test_the_place_is_as_large_as_one_cache_needs_and_no_product_of_several() -> None:
    target = graphed_target()
    sizes = []
    for rows, columns in ((1, 0), (1, 300), (1, 2000), (3, 100), (2, 90), (3, 300), (1, 2100)):
        cache = target.new_cache(rows, columns)
        target.prefill([[1]] * rows, cache)
        sizes.append(tuple(cache.layers[0].keys.shape[::2]))
        del cache
    assert sizes == [(1, 256), (1, 512), (1, 2048), (3, 256), (2, 256), (3, 512), (1, 2304)]
    a_token = target.cache_bytes_per_token
    assert graphed(target).arena.num_bytes == 2304 * a_token


def test_texts_that_take_turns_with_longer_and_with_more_ones_stay_right() -> None:
    model = tiny_model("llama", max_position_embeddings=1024)
    target, long = target_of(model, "sdpa"), prompt_of(300)
    target.use(GraphedForward(target.at, on_cpu, CPU))
    short = [prompt_of(5), prompt_of(9), prompt_of(7)]
    for prompts in ([long], short, [long], short):
        found = collect(Parts(target, NoDrafter(), Greedy()), prompts, Limits(6), max_rows=3)
        assert [each.token_ids for each in found] == [greedy_of(model, prompt, 6) for prompt in prompts]


def test_what_is_held_for_later_texts_can_be_given_back_and_is_made_anew() -> None:
    target, texts = graphed_target(), known("llama")
    for _ in range(2):
        (found,) = collect(Parts(target, NoDrafter(), Greedy()), [texts.prompts[0]], LIMITS)
        assert found.token_ids == texts.wanted(1)[0]
        assert graphed(target).arena.num_bytes
        target.release()
        assert (graphed(target).arena.num_bytes, recorded(target)) == (0, [])


def test_nothing_is_given_back_while_a_text_is_written() -> None:
    target, texts = graphed_target(), known("llama")
    cache = target.new_cache(1, 0)
    target.prefill([texts.prompts[0]], cache)
    draft = Draft(torch.tensor([[texts.answers[0][0]]]), TokenTree.empty())
    target.verify(draft, cache)
    target.release()
    assert recorded(target) == [Bucket(1, 1, 256)]
    assert int(target.verify(draft, cache).logits_BNV[0, 0].argmax()) == texts.answers[0][1]


def test_reading_whole_texts_takes_no_place_from_the_one_that_is_written() -> None:
    target, texts = graphed_target(), known("llama")
    collect(Parts(target, NoDrafter(), Greedy()), [texts.prompts[0]], LIMITS)
    same = [prompt_of(12)] * 4
    assert torch.equal(target.hidden(same), target_of(tiny_model("llama"), "sdpa").hidden(same))
    assert graphed(target).arena.num_bytes == 0, "training that follows has other uses for it"


def test_writing_answers_leaves_no_memory_taken_even_when_it_is_stopped() -> None:
    target, texts = graphed_target(), known("llama")
    manner = Manner(NUM_NEW, None, rows=2)
    jobs = [Job(number, prompt) for number, prompt in enumerate(texts.prompts)]
    written = {one.index: one.token_ids for one in write_here(target, jobs, manner)}
    assert [written[index] for index in range(3)] == texts.wanted(3)
    assert graphed(target).arena.num_bytes == 0
    stopped = write_here(target, jobs, manner)
    next(stopped)
    assert graphed(target).arena.num_bytes
    stopped.close()
    assert graphed(target).arena.num_bytes == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_where_memory_holds_no_recording_texts_are_written_without(wrapped: bool) -> None:
    tried = []

    def full(run: Callable[[], Seen]) -> Recorded:
        tried.append(run().logits_BNV.shape[1])
        if len(tried) < 2:
            return on_cpu(run)
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            if wrapped:  # the end of the recording fails as well
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
            raise

    target, texts = graphed_target(), known("llama")
    target.use(GraphedForward(target.at, full, CPU))
    drafter = DRAFTERS["random"](texts.texts, SHAPES["dynamic"])
    found = collect(Parts(target, drafter, Greedy()), texts.prompts, LIMITS, max_rows=3)
    assert [each.token_ids for each in found] == texts.wanted(3)
    assert len(tried) >= 2
    assert recorded(target) == [], "what was recorded gave its memory back"
    assert len(tried) == 1 + len(graphed(target)._unrecorded), "each is tried once"


def test_ctrl_c_while_recording_leaves_a_target_that_writes_on() -> None:
    interrupts = iter([True])

    def record(run: Callable[[], Seen]) -> Recorded:
        seen = on_cpu(run)
        if next(interrupts, False):
            raise KeyboardInterrupt
        return seen

    target, texts = graphed_target(), known("llama")
    target.use(GraphedForward(target.at, record, CPU))
    with pytest.raises(KeyboardInterrupt):
        collect(Parts(target, NoDrafter(), Greedy()), [texts.prompts[0]], LIMITS)
    assert recorded(target) == []
    (found,) = collect(Parts(target, NoDrafter(), Greedy()), [texts.prompts[0]], LIMITS)
    assert found.token_ids == texts.wanted(1)[0]
    assert recorded(target) == [Bucket(1, 1, 256)]


def test_logits_of_all_recordings_take_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target = graphed_target()
    cache = target.new_cache(3, 0)
    target.prefill([prompt_of(3)] * 3, cache)
    one_node = 4 * (97 + 32)
    monkeypatch.setattr(cuda_graphs, "MOST_BYTES", 4 * one_node)
    for rows in (1, 2, 3):
        target.verify(Draft(torch.zeros(rows, 1, dtype=torch.long), TokenTree.empty()), cache)
    assert recorded(target) == [Bucket(3, 1, 256)]
    target.verify(Draft(torch.zeros(3, 8, dtype=torch.long), TokenTree.chain(7)), cache)
    assert recorded(target) == [Bucket(3, 8, 256)], "one is kept, however large"


@pytest.mark.parametrize(
    ("longest", "nodes", "columns"), [(100, 1, 256), (250, 30, 512), (4000, 60, 4096), (500, 100, 768)]
)
def test_the_guard_of_memory_counts_the_columns_that_are_held(longest: int, nodes: int, columns: int) -> None:
    target = target_of(tiny_model("llama", max_position_embeddings=8192), "sdpa")
    target.use(GraphedForward(target.at, on_cpu, CPU))
    needed = needed_bytes(target, [[1] * (longest - 1)], Limits(1), 2, nodes)
    assert needed.columns == columns
    assert needed.cache == 2 * columns * target.cache_bytes_per_token * 3 // 2
    cache = target.new_cache(2, 0)
    target.prefill([prompt_of(3)] * 2, cache)
    with torch.inference_mode():
        cache.commit(slice(0, 2), [longest - 3] * 2)
        tokens_BN = torch.zeros(2, nodes, dtype=torch.long)
        target.verify(Draft(tokens_BN, TokenTree.chain(nodes - 1)), cache)
    assert graphed(target).arena.num_bytes <= 2 * columns * target.cache_bytes_per_token


def test_heads_stay_as_they_are_beside_recorded_forwards() -> None:
    target = graphed_target()
    target.identity = replace(target.identity, runner="graphs")
    heads = random_heads(target)
    lay_out_heads(heads, target)
    assert heads.packed_block is None, "a GPU has no layouts of the CPU's kernels"
