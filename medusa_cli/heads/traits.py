"""What of a target besides its weights heads have learnt with: its words, its chat template, its rope, its rows.

Weights of one fingerprint can lie beside another tokenizer or config. Guesses stay exact then, and are seldom right.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, Protocol

from pydantic import Field, JsonValue, model_validator

from medusa_cli.config.settings import Settings

# letters of several scripts, marks that combine, numbers, spaces, code, an address
_PROBES = (
    "The QUICK brown foxes' jumping, isn't it? Übergrößenträger naïvely cost 3,141.59 € (≈ 10²).",
    "e\u0301 ﬁ Ⅷ ＡＢＣ  two  spaces\tand\n\nlines \u00a0",
    "def f(x_1):\n    return {'a': [x_1 ** 2, None]}  # https://example.org/?q=1&r=%20",
    "Жили-были старик со старухой. 機械学習は楽しい。 مرحبا بالعالم नमस्ते 🙂👩‍👩‍👧",
    "internationalization antidisestablishmentarianism 12345678901234567890 aaaaaaaaaaaaaaaa",
)


class Traits(Settings):
    """What was there when the heads were trained. None: the target had no tokenizer, or no such rows.

    words      what each id of the ordinary vocabulary is, as a hash
    added      the same of the tokens that were added to it: special ones mostly
    added_ids  which ids these are, as [first, past the last] each
    size       ids there were; those that a tokenizer got since change nothing
    rules      how text is cut into tokens and joined again, as a hash: normalizer, splitting, and what some texts show
               of merges; None for tokenizers of Python's own
    template   the chat template, as a hash; of nothing where there was none
    rope       the config's rope parameters, by name
    rows       numbers of every row of the embeddings and of the output matrix, as a hash
    """

    words: str | None = None
    added: str | None = None
    added_ids: list[tuple[int, int]] = Field(default_factory=list, max_length=10_000)
    size: int = Field(default=0, ge=0, le=100_000_000)
    rules: str | None = None
    template: str | None = None
    rope: dict[str, JsonValue] = Field(default_factory=dict)
    rows: str | None = None

    @model_validator(mode="after")
    def _runs_ascend(self) -> "Traits":
        ends = [0, *chain.from_iterable(self.added_ids)]
        if any(one > other for one, other in pairwise(ends)):
            raise ValueError("added_ids must be runs of ids that ascend")
        return self


class Traited(Protocol):
    """What traits are read off."""

    @property
    def name(self) -> str:
        """What the target was asked for by."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""

    @property
    def config(self) -> Any:
        """The config of the language model."""

    @property
    def rows(self) -> str | None:
        """A hash over numbers of every row of its embeddings and output matrix."""


def traits_of(target: Traited, then: Traits | None = None) -> Traits:
    """The target's traits as they are now; with those of then, over the ids that were there then."""
    rope = _rope(target.config)
    if target.tokenizer is None:
        return Traits(rope=rope, rows=target.rows)
    tokens = _tokens(target.tokenizer)
    added_ids = list(_ranges(target.tokenizer.added_tokens_decoder)) if then is None else then.added_ids
    size = max(tokens, default=-1) + 1 if then is None else then.size
    past_all = min(size, max(tokens, default=-1) + 1)
    among = set(chain.from_iterable(range(first, min(past, past_all)) for first, past in added_ids))
    known = sorted((id_, token) for id_, token in tokens.items() if id_ < size)
    return Traits(
        words=_digest("\0".join(f"{id_} {token}" for id_, token in known if id_ not in among)),
        added=_digest("\0".join(f"{id_} {token}" for id_, token in known if id_ in among)),
        added_ids=added_ids,
        size=size,
        rules=_rules(target.tokenizer),
        template=_template(target.tokenizer),
        rope=rope,
        rows=target.rows,
    )


def differences(then: Traits, now: Traits) -> list[str]:
    """What is another thing than it was, apart from the words: as the user would name it."""
    named = {
        "added tokens": "added",
        "tokenizer's rules": "rules",
        "chat template": "template",
        "rows of embeddings or output matrix": "rows",
    }
    pairs = ((what, getattr(then, field), getattr(now, field)) for what, field in named.items())
    found = [what for what, before, after in pairs if None not in (before, after) and before != after]
    names = sorted(name for name in then.rope.keys() | now.rope.keys() if then.rope.get(name) != now.rope.get(name))
    return found + [f"{name} ({then.rope.get(name)!r} then, {now.rope.get(name)!r} now)" for name in names]


def _tokens(tokenizer: Any) -> dict[int, str]:
    """Id -> token, added ones included."""
    return {id_: token for token, id_ in tokenizer.get_vocab().items()}


def _ranges(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs of ids that follow each other, as [first, past the last]."""
    ordered = sorted(ids)
    starts = [0, *(place + 1 for place, (one, other) in enumerate(pairwise(ordered)) if other != one + 1)]
    for start, past in pairwise([*starts, len(ordered)] if ordered else []):
        yield ordered[start], ordered[past - 1] + 1


def _template(tokenizer: Any) -> str:
    """A hash of the chat template, or templates."""
    return _digest(json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True, default=str))


def _rules(tokenizer: Any) -> str | None:
    """A hash of the parts that turn text into tokens and back, and of what they make of some texts.

    Merges and scores are too many to be looked at whenever heads are loaded: what they do shows in the ids.
    """
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return None
    parts = [getattr(core, name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    states = [None if part is None else part.__getstate__().decode() for part in parts]
    ids = [core.encode(text, add_special_tokens=False).ids for text in _PROBES]
    return _digest(json.dumps([*states, ids]))


def _rope(config: Any) -> dict[str, JsonValue]:
    """The rope parameters by name; of models with several kinds of layers as `sliding_attention.rope_theta`."""
    named = getattr(config, "rope_parameters", None)
    flat: dict[str, JsonValue] = {}
    for name, value in (named if isinstance(named, Mapping) else {}).items():
        inner = value.items() if isinstance(value, Mapping) else [(None, value)]
        flat.update({name if key is None else f"{name}.{key}": _plain(each) for key, each in inner})
    return flat


def _plain(value: Any) -> JsonValue:
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
