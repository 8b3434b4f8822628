"""Ways to learn from the same texts, taking turns: states that are kept, and a target that reads anew at every step.

Each arm has heads of its own with the same start, optimizer, learning rate and batches of whole texts:

stored      a step of the training loop: states from the disk, the narrowed vocabulary, projected in pieces
rerun       the same step, but the frozen target reads the batch's texts for it each time
plain       as Medusa's own training script: the target reads the texts, each head's logits over the whole vocabulary
            are one tensor, and autograd finds the gradient (the output matrix is shared and frozen here as well)
stored-all  as stored, over the whole vocabulary: what it loses must be what plain loses, as rerun must lose as stored

Shape letters: N examples, B of them in a batch, K heads, H hidden, R texts read at once, T places, V vocabulary.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from medusa_cli.config.recipe import Recipe, TrainSettings
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.model.clock import now
from medusa_cli.model.target import Target
from medusa_cli.pipeline.run import fresh_heads
from medusa_cli.train import loop
from medusa_cli.train.checkpoint import TrainState
from medusa_cli.train.corpus import NOT_ASKED, Corpus, Examples, choose_draft_ids
from medusa_cli.train.loss import Scores, score
from medusa_cli.train.parallel import ALONE

ARMS = ("stored", "rerun", "plain", "stored-all")
SAME_LOSS = {"rerun": "stored", "plain": "stored-all"}
FROM_STORE = ("stored", "stored-all")


class Reread:
    """Stands where a corpus has its hidden states: the target reads the texts each time some are asked for.

    model  a transformers causal LM; what its base model gives is what its output matrix takes
    """

    def __init__(self, model: Any, corpus: Corpus) -> None:
        self._model = model
        self._corpus = corpus

    @torch.no_grad()
    def __getitem__(self, places_B: NDArray[np.int64]) -> NDArray[np.float32]:
        """hidden [B, H] at these places, from one forward over the texts they are in."""
        offsets_S = self._corpus.offsets_S
        samples, row_B = np.unique(self._corpus.sample_of(places_B), return_inverse=True)
        starts, ends = offsets_S[samples], offsets_S[samples + 1]
        ids_RT = np.zeros((len(samples), int((ends - starts).max())), np.int64)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            ids_RT[row, : end - start] = self._corpus.ids_T[start:end]
        # Padding is on the right, where nothing that is asked for can see it: no mask, so that attention takes its
        # fastest path. The output matrix is left out: nobody wants the target's own logits.
        out = self._model.base_model(torch.from_numpy(ids_RT).to(self._model.device), use_cache=False)
        hidden_RTH: torch.Tensor = out.last_hidden_state
        column_B = torch.from_numpy(places_B - starts[row_B]).to(hidden_RTH.device)
        return hidden_RTH[torch.from_numpy(row_B).to(hidden_RTH.device), column_B].float().cpu().numpy()


@dataclass(frozen=True)
class Arm:
    """Heads that learn, their optimizer, and the examples they learn from."""

    name: str
    state: TrainState
    examples: Examples

    def step(self, number: int, rows_B: NDArray[np.int64], settings: TrainSettings) -> float:
        """Learn these examples, at a constant rate; their loss."""
        if self.name == "plain":
            return _plain_step(self.state, self.examples, rows_B, settings)
        batch = loop.Batch(number, rows_B, settings.learning_rate)
        return float(loop.learn_batch(self.state, self.examples, batch, settings, ALONE).loss)


def _plain_step(state: TrainState, examples: Examples, rows_B: NDArray[np.int64], settings: TrainSettings) -> float:
    """What one would write first: logits of all places at once, cross_entropy, backward."""
    heads, device = state.heads, state.heads.weight.device
    state.optimizer.zero_grad(set_to_none=True)
    inputs_BI = heads.inputs(examples.hidden(rows_B, device), examples.paths(rows_B, device))
    labels_BK = examples.labels(rows_B, device).clamp(min=NOT_ASKED)
    blocks_BKH = heads.block_forward(inputs_BI)
    loss = torch.zeros((), device=device)
    for head in range(heads.config.num_heads):
        output, labels_B = heads.projection(head), labels_BK[:, head]
        logits_BV = output.logits(blocks_BKH[:, head])
        total = F.cross_entropy(logits_BV, labels_B, ignore_index=NOT_ASKED, reduction="sum")
        loss = loss + settings.head_decay**head * total / (labels_B != NOT_ASKED).sum().clamp(min=1)
    torch.autograd.backward(loss)
    state.optimizer.step()
    return float(loss.detach())


@dataclass(frozen=True)
class Batches:
    """Whole texts, cut into batches of about one length each so that little is padding; examples by batch."""

    rows: list[NDArray[np.int64]]

    @classmethod
    def of(cls, examples: Examples, texts: int, seed: int) -> "Batches":
        """Batches of so many texts in a random order."""
        sample_N = examples.corpus.sample_of(examples.places_N)
        samples = np.unique(sample_N)
        lengths = np.diff(examples.corpus.offsets_S)[samples]
        by_length = samples[np.argsort(lengths, kind="stable")]
        batches = [by_length[start : start + texts] for start in range(0, len(by_length), texts)]
        order = np.random.default_rng(seed).permutation(len(batches))
        return cls([np.flatnonzero(np.isin(sample_N, batches[index])) for index in order])

    def at(self, step: int) -> NDArray[np.int64]:
        """The examples of a step, from 0 on; one epoch is like the next."""
        return self.rows[step % len(self.rows)]


@dataclass(frozen=True)
class Steps:
    """What an arm's steps took and lost, and the places each of them learnt from.

    processor_seconds  of all threads: what busy neighbours change least; it tells nothing of a GPU's work
    """

    places: list[int]
    seconds: list[float]
    processor_seconds: list[float]
    losses: list[float]

    @property
    def rate(self) -> float:
        """Places a second, the median step's."""
        return statistics.median(n / s for n, s in zip(self.places, self.seconds, strict=True))


@dataclass(frozen=True)
class Trial:
    """Everything the arms did, and what the heads of two of them are worth on texts that none has learnt."""

    steps: Mapping[str, Steps]
    held_out: Mapping[str, Scores]


def arms_of(recipe: Recipe, target: Target, model: Any, corpus: Corpus, learnt: Sequence[int]) -> dict[str, Arm]:
    """The arms at their common start. `model` is the target in stock modelling code."""
    every, size = torch.arange(target.real_vocab), recipe.heads.draft_vocab
    narrow = choose_draft_ids(corpus, learnt, size=size, real_vocab=target.real_vocab)
    reread = Corpus(cast(Any, Reread(model, corpus)), corpus.ids_T, corpus.supervised_T, corpus.offsets_S, corpus.keys)
    arms = {}
    for name in ARMS:
        ids_W = narrow if name in ("stored", "rerun") else every
        heads = fresh_heads(recipe, target, ids_W)
        if name != "plain":
            heads.pack_output()  # as the training loop does
        state = TrainState(heads, loop.make_optimizer(heads, recipe.train), {})
        source = corpus if name in FROM_STORE else reread
        arms[name] = Arm(name, state, Examples.of(source, learnt, heads.draft_ids, heads.config.num_heads))
    return arms


def race(recipe: Recipe, arms: Mapping[str, Arm], held_out: Examples, texts: int, steps: int) -> Trial:
    """So many steps of every arm, in turns, each step begun by another; one step before them warms up."""
    # which places ask something depends on the texts alone, so the batches are the same places in every vocabulary
    batches = Batches.of(arms["stored"].examples, texts, recipe.seed)
    taken = {name: Steps([], [], [], []) for name in arms}
    names = list(arms)
    for step in range(steps + 1):
        rows_B = batches.at(step)
        for name in names[step % len(names) :] + names[: step % len(names)]:
            device = arms[name].state.heads.weight.device
            begun, begun_here = now(device), time.process_time()
            loss = arms[name].step(step + 1, rows_B, recipe.train)
            seconds, seconds_here = now(device) - begun, time.process_time() - begun_here
            taken[name].losses.append(loss)
            if step:
                taken[name].seconds.append(seconds)
                taken[name].processor_seconds.append(seconds_here)
                taken[name].places.append(len(rows_B))
    judge = arms["stored"].state.heads
    scores = {"stored": _scores(judge, held_out, recipe.train)}
    _take_weights(judge, arms["plain"].state.heads)
    return Trial(taken, {**scores, "plain": _scores(judge, held_out, recipe.train)})


def _scores(heads: MedusaHeads, examples: Examples, settings: TrainSettings) -> Scores:
    """What these heads lose on all the examples, over the narrowed vocabulary."""
    rows_B, device = np.arange(len(examples)), heads.weight.device
    inputs_BI = heads.inputs(examples.hidden(rows_B, device), examples.paths(rows_B, device))
    labels_BK = examples.labels(rows_B, device)
    return score(heads, inputs_BI, labels_BK, head_decay=settings.head_decay, chunk=settings.loss_chunk)


@torch.no_grad()
def _take_weights(heads: MedusaHeads, others: MedusaHeads) -> None:
    """Give heads of one draft vocabulary the learnt weights of another's."""
    learnt = dict(others.named_parameters())
    for name, parameter in heads.named_parameters():
        parameter.copy_(learnt[name])
