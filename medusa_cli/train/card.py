"""The model card of a heads folder, and the machine-readable account of how it came about.

README.md is for people and for the hub; provenance.json holds the same facts as data. This file knows no torch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from medusa_cli.errors import TrainingError
from medusa_cli.train.measure import Accuracy
from medusa_cli.util.files import write_atomically
from medusa_cli.util.markdown import table_of

_SHOWN_PATHS = 64


@dataclass(frozen=True)
class Provenance:
    """How the heads came about.

    base         the target's name; revision: its hub revision, None for a folder; fingerprint: of its weights
    licence      the target's licence, None when it doesn't say
    command      the command line that made the heads
    recipe       every setting, nested as in a recipe file
    data         counts by name: samples, tokens, supervised tokens and the like
    answers      who wrote the text that is learnt, and how: names, numbers, and mappings of both
    versions     package versions by name
    adapter      how far an adapter moved the target, by name; None without one
    """

    base: str
    revision: str | None
    fingerprint: str
    licence: str | None
    command: str
    recipe: Mapping[str, Any]
    data: Mapping[str, int]
    answers: Mapping[str, Any]
    versions: Mapping[str, str]
    adapter: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FittedTree:
    """The tree stored with the heads: rank paths, the dynamic shape used instead if any, and expected tokens a step."""

    paths: Sequence[Sequence[int]]
    dynamic: str | None
    expected_tokens: float


def write_card(folder: Path, provenance: Provenance, accuracy: Accuracy, tree: FittedTree, training: str = "") -> None:
    """Write README.md and provenance.json to `folder`, atomically. Raises TrainingError when it takes no files.

    training   how the heads learnt, as Markdown
    """
    try:
        write_atomically(folder / "provenance.json", json.dumps(asdict(provenance), indent=2) + "\n")
        write_atomically(folder / "README.md", render_card(provenance, accuracy, tree, training))
    except OSError as error:
        raise TrainingError(
            f"can't write the model card to {folder}: {error}", "free some space and run the same command again"
        ) from error


def render_card(provenance: Provenance, accuracy: Accuracy, tree: FittedTree, training: str = "") -> str:
    """The text of README.md, with the header the Hugging Face hub reads."""
    parts = [
        _header(provenance),
        f"# Medusa heads for {provenance.base}",
        f"{accuracy.num_heads} heads that guess the tokens after next of `{provenance.base}`, so that one forward of "
        "the model can decide several tokens. They are of no use with another model: the weights' fingerprint is "
        f"`{provenance.fingerprint}`, and loading checks it.",
        _base(provenance),
        *([_adapter(provenance.adapter)] if provenance.adapter else []),
        "## Accuracy\n\n" + _accuracy_table(accuracy),
        "## Tree\n\n" + _tree(tree),
        *(["## Training\n\n" + training] if training else []),
        "## Data\n\n" + table_of(("what", "count"), [(name, f"{n:,}") for name, n in provenance.data.items()]),
        "## Answers\n\n" + table_of(("what", "value"), list(_flat(provenance.answers))),
        f"## Command\n\n```\n{provenance.command}\n```",
        "## Recipe\n\n```yaml\n" + yaml.safe_dump(_plain(provenance.recipe), sort_keys=False) + "```",
        "## Licence\n\n" + _licence(provenance),
    ]
    return "\n\n".join(parts) + "\n"


def _header(provenance: Provenance) -> str:
    """The hub's metadata block."""
    fields: dict[str, Any] = {"base_model": provenance.base, "tags": ["medusa", "speculative-decoding"]}
    if provenance.licence:
        fields["license"] = provenance.licence
    text: str = yaml.safe_dump(fields, sort_keys=False)
    return f"---\n{text}---"


def _base(provenance: Provenance) -> str:
    """Which model, which revision, which packages."""
    rows = [
        ("base model", provenance.base),
        ("revision", provenance.revision or "none (a local folder or file)"),
        ("fingerprint", provenance.fingerprint),
        *provenance.versions.items(),
    ]
    return table_of(("what", "value"), rows)


def _adapter(moved: Mapping[str, Any]) -> str:
    """What the adapter changed, and what that brought."""
    rows = [
        ("parameters", f"{moved['parameters']:,}"),
        ("perplexity before", f"{moved['perplexity_before']:.3f}"),
        ("perplexity after", f"{moved['perplexity_after']:.3f}"),
        ("same best token", f"{moved['agreement']:.1%}"),
        ("tokens a step before", f"{moved['tokens_before']:.2f}"),
        ("tokens a step after", f"{moved['tokens_after']:.2f}"),
    ]
    return (
        "## Adapter\n\nThe heads belong to the model with the adapter in `adapter/` merged into its weights "
        "(`peft.PeftModel.from_pretrained` loads it), and what is decoded with them is that model's text, not the base "
        f"model's. Measured on {moved['places']:,} places of held-out text. Tokens a step are those of the best tree "
        "of 16 nodes, before with the heads that had learnt alone.\n\n" + table_of(("what", "value"), rows)
    )


def _accuracy_table(accuracy: Accuracy) -> str:
    """Plain and conditional accuracy of each head, and what the words mean."""
    rows = []
    for head in range(accuracy.num_heads):
        plain, conditional = accuracy.plain[head], accuracy.conditional[head]
        figures = (plain[0], sum(plain[:5]), conditional[0], sum(conditional[:5]), accuracy.coverage[head])
        rows.append((f"{head + 1}", *(f"{figure:.3f}" for figure in figures)))
    names = ("head", "plain top-1", "plain top-5", "conditional top-1", "conditional top-5", "coverage")
    return (
        f"Measured on {accuracy.source}, at {accuracy.positions:,} places. Plain: the head's guess is the model's own "
        "token. Conditional: the same, where the best guesses of all earlier heads were right. Coverage: the share of "
        "the model's tokens that are in the draft vocabulary. Text of another kind is guessed less well.\n\n"
        + table_of(names, rows)
    )


def _tree(tree: FittedTree) -> str:
    """The tree's size, what it should bring, and its first paths."""
    if tree.dynamic:
        return (
            f"A tree of its own for every step, `{tree.dynamic}`: at most so many nodes without the root, each of at "
            f"least so much chance by the heads' own belief; {tree.expected_tokens:.2f} tokens a step expected, the "
            f"bonus token included. The best fixed tree has {len(tree.paths)} nodes (`--tree tree.json`)."
        )
    if not tree.paths:
        return "No tree pays on this machine: the heads are stored with the empty tree, which is plain decoding."
    shown = " ".join("-".join(map(str, path)) for path in tree.paths[:_SHOWN_PATHS])
    more = f" and {len(tree.paths) - _SHOWN_PATHS} more" if len(tree.paths) > _SHOWN_PATHS else ""
    depth = max(len(path) for path in tree.paths)
    return (
        f"{len(tree.paths)} nodes without the root ({len(tree.paths) + 1} with it), {depth} deep; "
        f"{tree.expected_tokens:.2f} tokens a step expected, the bonus token included.\n\n`{shown}`{more}"
    )


def _licence(provenance: Provenance) -> str:
    """What may be done with the heads follows from what may be done with the model."""
    stated = f"is under {provenance.licence}" if provenance.licence else "states no licence here"
    return (
        f"The heads were trained on the hidden states of `{provenance.base}`, which {stated}. Treat them as a "
        "derivative of it, and mind the licence of the training text if it was not written by the model."
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values as texts, inner mappings under their outer name."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}: ")
        else:
            shown = f"{value:,.2f}" if isinstance(value, float) else "none" if value is None else str(value)
            yield f"{prefix}{name}", shown.replace("|", "\\|")


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
