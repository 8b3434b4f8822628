"""Where heads are: a folder, a hub id, or what comes with the package. Loads no heads and imports no torch."""

from pathlib import Path

from medusa_cli.config.parts import HEADS
from medusa_cli.errors import FormatError
from medusa_cli.util.hub import settle_reach
from medusa_cli.util.paths import expanded

DESCRIPTION = "heads.json"
LONGEST_NAME = 200  # a longer one is no file name
SHIPPED = Path(__file__).parents[1] / "heads" / "shipped"


def find_heads(heads: str | None, model: str, kind: str | None = None) -> Path | None:
    """The folder of the heads named, or of those that come with the package for this model; None when it has none.

    kind    of those that come with the package; None: the usual one
    model   an alias; a folder or hub id has no shipped heads. Raises FormatError when heads are named and not there.
    """
    if heads is None:
        folder = SHIPPED / model / (kind or next(iter(HEADS)))
        alias = "/" not in model and len(model) <= LONGEST_NAME
        return folder if alias and (folder / DESCRIPTION).is_file() else None
    folder = expanded(heads)
    if not heads.strip() or len(heads) > LONGEST_NAME:
        raise FormatError(f"no heads are named '{heads[:60]}'", "give a folder or a hub id, or leave out --heads")
    if folder.is_dir():
        return folder
    if _is_hub_id(heads):
        return _from_hub(heads)
    raise FormatError(
        f"no heads at {folder.absolute()}: no such folder", "train some (medusa train-heads), or check the path"
    )


def _is_hub_id(text: str) -> bool:
    return text.count("/") == 1 and not text.startswith((".", "/", "~"))


def _from_hub(name: str) -> Path:
    """Download a heads folder, or use what was downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    settle_reach()
    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FormatError(
            f"no heads at {name}: no such folder, and the hub did not give it ({type(error).__name__})",
            "check the name; HF_HUB_OFFLINE=1 uses only what was downloaded before",
        ) from error
