"""Inner states are noted while the target writes, whoever writes beside, as a fresh reading shows them."""

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.decode.loop import Parts, decode
from medusa_cli.decode.rows import Limits
from medusa_cli.model import prefill
from medusa_cli.pipeline.generation_workers import Job, Manner, write_here
from medusa_cli.pipeline.inner_states import StateRecorder
from medusa_cli.train.text_examples import evened
from tests.attending import states_of
from tests.laws import test_length_law as length_law
from tests.tiny_models import prompt_of, target_of, tiny_model

TAPS = (1, 0, 2)


@pytest.mark.parametrize("rows", [1, 3])
def test_each_text_is_noted_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 6)
    target = target_of(tiny_model("llama"))
    prompts = [prompt_of(length) for length in (9, 3, 14, 1, 7)]
    recorder, ended = StateRecorder(TAPS), 0
    for gain in decode(Parts(target, recorder, Greedy()), prompts, Limits(6), rows):
        if gain.row.finish_reason is not None:
            tokens = gain.row.tokens
            wanted = evened(states_of(target.model, tokens[:-1], TAPS))
            torch.testing.assert_close(recorder.take(tokens).float(), wanted, rtol=0.01, atol=0.01)
            ended += 1
    assert ended == len(prompts)


def test_texts_and_their_states_come_together() -> None:
    target = target_of(tiny_model("llama"))
    jobs = [Job(number, prompt_of(length)) for number, length in enumerate((5, 8))]
    manner = Manner(max_new_tokens=1, max_tokens=None, rows=2, want_hidden=True, taps=TAPS)
    written = list(write_here(target, jobs, manner))
    assert sorted(len(one.taps_TX) for one in written) == [5, 8], "a text of one new token has its prompt's states"
    plain = list(write_here(target, jobs, Manner(max_new_tokens=4, max_tokens=None, rows=2, want_hidden=True)))
    assert all(one.taps_TX is None for one in plain)


@pytest.mark.parametrize("name", length_law.MODELS)
def test_given_texts_are_read_as_they_were_written_across_a_change_of_tables(name: str) -> None:
    target = target_of(length_law.model_of(name))
    (text, *_), (length, *_) = length_law.texts_of(name), length_law.LENGTHS
    recorder = StateRecorder(TAPS)
    gains = decode(Parts(target, recorder, Greedy()), [text[:length]], Limits(length_law.NEW), 1)
    (tokens,) = [gain.row.tokens for gain in gains if gain.row.finish_reason is not None]
    assert tokens == text
    found = target.states([text], [length], TAPS)
    assert found.taps_BNLH is not None
    wanted, last = recorder.take(tokens).float(), len(text) - 1
    torch.testing.assert_close(evened(found.taps_BNLH[0, :last]), wanted, rtol=0.02, atol=0.02)
