"""`medusa models`: the names that stand for models, which of them have heads, and what is on this machine."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from medusa_cli.cli import options
from medusa_cli.formats.places import DESCRIPTION, SHIPPED


def command(output: options.Output) -> None:
    """List the names --model knows, which of them have heads that ship, and which are on this machine."""
    console = output.console
    document = [*_known()]
    rows = [
        (row["name"], row["source"], ", ".join(row["heads"]) or "-", "yes" if row["here"] else "-") for row in document
    ]
    console.table(("name", "source", "heads", "here"), rows, spare=("here",))
    console.info("--model takes these, any owner/name on the hub, a folder or a .gguf file")
    console.print_json(document, output.output_json)


def _known() -> Iterator[dict[str, Any]]:
    """A row for each alias; those that come as packages first."""
    from medusa_cli.model.loading.sources import known_names

    names = known_names()
    for name, entry in names["embedded"].items():
        there = importlib.util.find_spec(entry["package"]) is not None
        yield {"name": name, "source": f"package {entry['package']}", "heads": _shipped(name), "here": there}
    for name, hub_id in sorted(names["hub"].items()):
        yield {"name": name, "source": hub_id, "heads": _shipped(name), "here": _is_downloaded(hub_id)}


def _shipped(name: str) -> list[str]:
    """Kinds of heads that come with the package for this model."""
    return sorted(file.parent.name for file in (SHIPPED / name).glob(f"*/{DESCRIPTION}"))


def _is_downloaded(hub_id: str) -> bool:
    """Whether the hub's cache on this machine has the model's config."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)
