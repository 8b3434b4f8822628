"""A target so small that its hidden states can be written by hand: a place's state names the tokens that follow."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from medusa_cli.heads.config import MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.model.target import Target
from medusa_cli.train.checkpoint import Checkpoints, RunIdentity, TrainLog
from medusa_cli.train.corpus import Corpus, Examples
from medusa_cli.train.events import Event, Outlets
from medusa_cli.train.joint.loop import JointTexts
from medusa_cli.train.loop import Sets
from medusa_cli.train.store import Sample
from medusa_cli.train.texts import Texts
from tests.tiny_models import target_of, tiny_model

HIDDEN, VOCAB, HEADS = 16, 50, 3
PROMPT = 5  # tokens of a text's prompt

MakeHeads = Callable[..., MedusaHeads]
MakeSample = Callable[..., Sample]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def output_weight() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def make_heads(output_weight: torch.Tensor) -> MakeHeads:
    def make(
        *,
        draft_ids: Sequence[int] | None = None,
        own_output: bool = False,
        output_bias: bool = False,
        num_layers: int = 1,
    ) -> MedusaHeads:
        ids = torch.arange(VOCAB) if draft_ids is None else torch.tensor(draft_ids)
        config = MedusaConfig(
            num_heads=HEADS,
            num_layers=num_layers,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            draft_vocab=len(ids),
            own_output=own_output,
            output_bias=output_bias,
            target_name="tiny",
            target_fingerprint="abc",
        )
        bias = torch.linspace(-1, 1, VOCAB) if output_bias else None
        return MedusaHeads.fresh(config, ids, output_weight, bias)

    return make


@pytest.fixture
def make_sample() -> MakeSample:
    """A sample of random ids whose hidden states depend on the token at the place alone."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))

    def make(key: str, ids: Sequence[int], supervised: Sequence[bool] | None = None) -> Sample:
        return Sample(key, list(ids), table[torch.tensor(ids)], list(supervised or [True] * len(ids)))

    return make


@pytest.fixture
def corpus(make_sample: MakeSample) -> Corpus:
    """Twelve texts of 30 tokens, each counting up by one from another start, after a prompt of four."""
    samples = []
    for start in range(12):
        ids = [(start * 4 + place) % VOCAB for place in range(30)]
        samples.append(make_sample(f"text-{start}", ids, [place >= 4 for place in range(30)]))
    return Corpus.from_samples(samples)


@pytest.fixture
def sets(corpus: Corpus) -> Sets:
    every = torch.arange(VOCAB)
    return Sets(Examples.of(corpus, range(10), every, HEADS), Examples.of(corpus, range(10, 12), every, HEADS))


@pytest.fixture
def target() -> Target:
    return target_of(tiny_model("llama"))


@pytest.fixture
def texts(target: Target) -> JointTexts:
    """Eight texts as the data stage stores them: the prompt's last token and an answer, with the states they had."""
    rng = np.random.default_rng(0)
    samples, prompts = [], {}
    for number in range(8):
        ids = rng.integers(target.vocab_size, size=PROMPT + 8 + number).tolist()
        hidden_TH = target.hidden([ids])[0]
        answer = ids[PROMPT - 1 :]
        key = f"text-{number}"
        samples.append(Sample(key, answer, hidden_TH[PROMPT - 1 :], [False, *[True] * (len(answer) - 1)]))
        prompts[key] = ids[:PROMPT]
    corpus = Corpus.from_samples(samples)
    every = torch.arange(target.vocab_size)
    return JointTexts(*(Texts(Examples.of(corpus, part, every, HEADS), prompts) for part in (range(6), range(6, 8))))


class Run:
    """A run folder and everything it heard."""

    def __init__(self, folder: Path, recipe: str = "recipe", fingerprint: str = "abc") -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.checkpoints = Checkpoints(folder, RunIdentity(recipe, fingerprint))
        self.outlets = Outlets(self.events.append, TrainLog(folder))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    return lambda name="run", **identity: Run(tmp_path / name, **identity)


@pytest.fixture
def largest_tensor() -> Callable[[Callable[[], object]], int]:
    """Elements of the largest tensor any operation makes while a function runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not func.is_view and "zeros_like" not in str(func):
                self.elements = max(self.elements, result.numel())
            return result

    def measure(function: Callable[[], object]) -> int:
        with Largest() as mode:
            function()
        return mode.elements

    return measure


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
