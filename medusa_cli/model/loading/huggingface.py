"""The library's loaders, with whatever they raise turned into one TargetError that names the model and the fault."""

import hashlib
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub import errors as hub
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from medusa_cli.errors import TargetError, is_panic
from medusa_cli.model.loading.gguf_library import read_once
from medusa_cli.model.loading.sources import WEIGHTS, Source
from medusa_cli.util.hub import settle_reach
from medusa_cli.util.plain_json import parse_json

Loaded = TypeVar("Loaded")
WEIGHT_FILES = tuple((name, f"{name}.index.json") for name in ("model.safetensors", "pytorch_model.bin"))

_CHECK_FOLDER = "is the folder complete, and does this version of transformers know the architecture?"
_COPY_AGAIN = "copy or download the whole model again"
_COPY_FILE = "is the .gguf file complete? copy or download it again"
_COPY_TOKENIZER = "a tokenizer.json and a tokenizer_config.json belong to the model: copy them into its folder"


class NoSuchAttention(Exception):
    """The architecture does not support the attention implementation asked for."""


def fetch_config(source: Source, revision: str | None) -> Any:
    """The model's config, without what it says on how a forward is run and what it returns: that is for us to say."""

    def load() -> Any:
        config = AutoConfig.from_pretrained(**_where(source, revision))
        config._attn_implementation = config._experts_implementation = None  # and so in the configs within
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is None:
                continue
            part.output_attentions = part.output_hidden_states = False
            part.return_dict = True
        return config

    return _loading(source, "the config", _CHECK_FOLDER, load)


def fetch_tokenizer(source: Source, revision: str | None) -> Any:
    """The model's tokenizer."""
    found = _loading(
        source, "the tokenizer", _COPY_TOKENIZER, lambda: AutoTokenizer.from_pretrained(**_where(source, revision))
    )
    longest = found.model_max_length  # compared with the length of every text
    if not isinstance(longest, int | float):
        raise TargetError(f"{source.name}: model_max_length is {longest!r:.40}, which is no number", _COPY_TOKENIZER)
    return found


def fetch_model(
    source: Source,
    revision: str | None,
    dtype: torch.dtype,
    attention: str,
    placing: Mapping[str, Any] | None = None,
    config: Any = None,
) -> Any:
    """The causal language model, every weight of it from the files.

    placing   what the library is told of where weights go and how they are held; None: in memory, as they are
    config    as `fetch_config` gives it; None: as it is in the files, and the library follows the attention named there

    Raises NoSuchAttention, and TargetError when weights are missing or of other shapes: the library would make up
    random ones.
    """

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            **_where(source, revision),
            **({} if config is None else {"config": config}),
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **(placing or {}),
        )

    try:
        with read_once() if source.gguf_file else nullcontext():
            model, found = _loading(source, "the weights", _COPY_AGAIN, load)
    except TargetError as error:
        if _is_about_attention(error.__cause__, attention):
            raise NoSuchAttention from error
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise error.__cause__ from error
        raise
    _refuse_gaps(source, found)
    return model


def weights_are_here(source: Source, revision: str | None) -> bool:
    """Whether the weights can be loaded without downloading anything."""
    return Path(source.location).exists() or bool(_downloaded(source, revision))


def weights_identity(source: Source, revision: str | None) -> str | None:
    """A hash that changes with the files that the weights are in; None while they are not on this machine.

    It reads no weights: name, size, time of change and inode of each file tell a copy, or one written over, from what
    was there before. What is remembered of a model is asked for by it.
    """
    digest = hashlib.sha256()
    files = [file.resolve() for file in _weight_files(source, revision)]
    for file in files:
        about = file.stat()
        digest.update(f"{file} {about.st_size} {about.st_mtime_ns} {about.st_ino}\n".encode())
    return digest.hexdigest()[:16] if files else None


def _weight_files(source: Source, revision: str | None) -> list[Path]:
    """The files on this machine that weights are in."""
    folder = Path(source.location)
    if source.gguf is not None:
        return [source.gguf]
    if folder.is_dir():
        return sorted(file for pattern in WEIGHTS for file in folder.glob(pattern) if file.is_file())
    return _downloaded(source, revision)


def _downloaded(source: Source, revision: str | None) -> list[Path]:
    """The weights of a hub id that an earlier run downloaded; none unless all of them are here."""

    def cached(name: str) -> str | None:
        found = try_to_load_from_cache(source.location, name, revision=revision)
        return found if isinstance(found, str) else None

    for whole, index in WEIGHT_FILES:
        if file := cached(whole):
            return [Path(file)]
        if listed := cached(index):
            names = sorted(set(parse_json(Path(listed).read_text(encoding="utf-8"))["weight_map"].values()))
            parts = [file for name in names if (file := cached(name))]
            return [Path(part) for part in parts] if len(parts) == len(names) else []
    return []


def _where(source: Source, revision: str | None) -> dict[str, Any]:
    """What every loader is told. Code that comes with a model is never run, and never asked about."""
    if not Path(source.location).exists():
        settle_reach()
    names: dict[str, Any] = {"pretrained_model_name_or_path": source.location, "trust_remote_code": False}
    if revision:
        names["revision"] = revision
    if source.gguf_file:
        names["gguf_file"] = source.gguf_file
    return names


def _refuse_gaps(source: Source, found: dict[str, Any]) -> None:
    """Refuse weights the files don't hold."""
    missing = sorted(found["missing_keys"])
    if missing:
        others = sorted(found["unexpected_keys"])
        instead = f"; {others[0]} is there and belongs nowhere" if others else ""
        raise TargetError(
            f"{source.name} lacks {len(missing)} of its weights: {_listed(missing)}{instead}",
            f"{_COPY_AGAIN}; config.json must be the one of these weights",
        )
    if found["mismatched_keys"]:
        name, stored, wanted = min(found["mismatched_keys"])
        raise TargetError(
            f"{source.name}: {name} has shape {list(stored)}, and config.json wants {list(wanted)}",
            f"{_COPY_AGAIN}; config.json must be the one of these weights",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:2]) + (", …" if len(names) > 2 else "")


def _is_about_attention(error: BaseException | None, attention: str) -> bool:
    """Architectures that look their attention up in a table of their own fail with its name."""
    text = str(error)
    unknown = isinstance(error, KeyError) and error.args == (attention,)
    return unknown or "attn_implementation" in text or "does not support an attention" in text


def _loading(source: Source, what: str, hint: str, load: Callable[[], Loaded]) -> Loaded:
    """Run one of the library's loaders."""
    try:
        return load()
    # tokenizers raises bare Exceptions and panics, safetensors and huggingface_hub direct children of Exception
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        text = " ".join(str(error).split())
        told = _from_hub(source, error) or _of_pickles(source, error) or _in_words(source, text)
        if told is None:
            hint = _COPY_FILE if source.gguf_file else hint
            hint = f"remove {source.location}: it is made anew" if source.is_converted else hint
            told = TargetError(f"can't load {what} of {source.name}: {text[:200] or type(error).__name__}", hint)
        raise told from error


def _from_hub(source: Source, error: BaseException) -> TargetError | None:
    """What went wrong on the way to the hub, if that is it."""
    if Path(source.location).exists():
        return None
    name = source.location if source.location == source.name else f"{source.name} ({source.location})"
    causes = tuple(type(cause) for cause in _causes(error))

    def caused_by(kind: type[Exception]) -> bool:
        return any(issubclass(cause, kind) for cause in causes)

    if caused_by(hub.GatedRepoError):
        hint = f"accept its terms at huggingface.co/{source.location}, then log in with: hf auth login"
        return TargetError(f"{name} is gated: its owner decides who may load it", hint)
    if caused_by(hub.RevisionNotFoundError):
        return TargetError(f"{name} has no such revision on the hub", "name a branch, tag or commit with --revision")
    if caused_by(hub.HFValidationError) or caused_by(hub.RepositoryNotFoundError):
        hint = "check the name; for a private model log in with: hf auth login"
        return TargetError(f"there is no folder {name}, and no such model on the hub", hint)
    if caused_by(hub.LocalEntryNotFoundError) or caused_by(hub.OfflineModeIsEnabled) or caused_by(ConnectionError):
        hint = "connect and try again (unset HF_HUB_OFFLINE if it is set), or name a folder"
        return TargetError(f"{name} was never downloaded to this machine, and the hub can't be reached", hint)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _of_pickles(source: Source, error: BaseException) -> TargetError | None:
    """What is wrong with weights in a .bin file. The library's own advice is to load them as they are, unsafely."""
    refused = next((cause for cause in _causes(error) if isinstance(cause, pickle.UnpicklingError)), None)
    if refused is None:
        return None
    if "Unsupported operand" in str(refused):
        return TargetError(f"the weights of {source.name} are damaged: its .bin file is none of torch's", _COPY_AGAIN)
    return TargetError(
        f"the weights of {source.name} are a pickle that asks for more than numbers, which could run any code",
        "take the .safetensors files of this model; if there are none, don't trust this copy",
    )


def _in_words(source: Source, text: str) -> TargetError | None:
    """The library's longer speeches, said shortly."""
    if "does not recognize this architecture" in text:
        kind = re.search(r"model type `([^`]*)`", text)
        return TargetError(
            f"{source.name} is of an architecture transformers {transformers.__version__} does not know"
            + (f": {kind[1]}" if kind else ""),
            "if the architecture is new: pip install --upgrade transformers",
        )
    if "trust_remote_code" in text:
        return TargetError(
            f"{source.name} needs program code of its own, which this program does not run",
            "use a model of an architecture that transformers itself holds",
        )
    return None
