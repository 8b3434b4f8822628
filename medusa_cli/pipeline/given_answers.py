"""Answers that the target did not write: it reads them, right-padded, for its hidden states and their likelihood."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from medusa_cli.data.conversations import Conversation, Counts
from medusa_cli.data.tokens import Tokens, tokenize
from medusa_cli.pipeline.data_context import Gathered, Stage, open_store
from medusa_cli.pipeline.perplexity import perplexity, warning_of
from medusa_cli.pipeline.planning.disk import check_states
from medusa_cli.train.store import Sample
from medusa_cli.train.text_examples import evened

READ_TOKENS = 4096  # tokens of one forward


def tokenized(stage: Stage, conversations: Iterable[Conversation], counts: Counts) -> list[Tokens]:
    """These conversations as the recipe wants them, counted; raises as `tokenize`."""
    bad, longest = stage.recipe.data.on_bad_row, stage.longest_text
    tokenizer, ends = stage.target.tokenizer, stage.target.stop_ids
    return list(tokenize(tokenizer, conversations, max_length=longest, counts=counts, on_bad_row=bad, ends=ends))


def read_answers(stage: Stage, samples: Mapping[str, Tokens], whose: str) -> Gathered:
    """The store of these samples by key, in read/, with a warning when the target would hardly say such answers.

    whose   whose answers they are, in that warning

    Raises TargetError before the first forward when a token has no embedding, and TrainingError when the disk is too
    small for the states.
    """
    store = stage.folder / "read"
    keep_states(stage, samples, store)
    figure = perplexity(stage.target, list(samples.values()))
    unlikely = warning_of(figure, whose)
    account = {"template": stage.template, "perplexity": figure}
    return Gathered(store, by_target=False, answers=account, warnings=[unlikely] if unlikely else [])


def keep_states(stage: Stage, samples: Mapping[str, Tokens], folder: Path) -> None:
    """Hidden states of every sample that has none yet; longest first, so that a batch wastes little.

    Where an earlier pass stopped, its batches are read again as they were cut: a state's last bits depend on the batch.
    """
    target, inner = stage.target, stage.inner
    taps = inner.taps if inner is not None and inner.width else ()
    target.check_ids(sample.ids for sample in samples.values())
    with open_store(stage, folder) as store:
        done = set(store.keys)
        queue = sorted(samples.items(), key=lambda pair: -len(pair[1].ids))
        if not all(key in done for key, _ in queue[: len(done)]):  # those done are not the first of this pass
            queue = [(key, sample) for key, sample in queue if key not in done]
        check_states(stage, folder, sum(len(sample.ids) for key, sample in queue if key not in done))
        tokens, count = 0, len(done)
        stage.on_progress("reading", count, len(samples), 0)
        while queue:
            size = max(1, READ_TOKENS // len(queue[0][1].ids))
            batch, queue = queue[:size], queue[size:]
            if all(key in done for key, _ in batch):
                continue
            rows = [sample.ids for _, sample in batch]
            # of several answers the last was written after a longer prompt; one reading can be right for one of them
            prompts = [sample.supervised.index(True) for _, sample in batch]
            states = target.states(rows, prompts, taps)
            for row, (key, sample) in enumerate(batch):
                if key in done:
                    continue
                length = len(sample.ids)
                taps_TX = None if states.taps_BNLH is None else evened(states.taps_BNLH[row, :length])
                store.append(Sample(key, sample.ids, states.hidden_BNH[row, :length], sample.supervised, taps_TX))
                tokens += length
                count += 1
            stage.on_progress("reading", count, len(samples), tokens)
        store.sync()
