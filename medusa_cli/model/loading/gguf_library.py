"""The library's reader of .gguf files: read once what it reads over and over, and without its bar."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import modeling_gguf_pytorch_utils as library


@contextmanager
def read_once() -> Iterator[None]:
    """Inside, each .gguf file is parsed once, its names are mapped once, and no bar is drawn.

    The library parses a file anew for its config, its tokenizer and its weights, some seconds each, since every word of
    the vocabulary is an array; and it builds the table of names anew for each module of the model. No setting of it
    hides its bar. Files must not change inside.
    """
    import gguf  # numpy's and its own tables: for who reads such a file

    with ExitStack() as replaced:
        replaced.enter_context(_replaced(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)))
        replaced.enter_context(_replaced(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)))
        replaced.enter_context(_replaced(library, "tqdm", lambda tensors, **_: tensors))
        yield


@contextmanager
def _replaced(module: Any, name: str, other: Any) -> Iterator[None]:
    """A name of a module stands for something else."""
    before = getattr(module, name)
    setattr(module, name, other)
    try:
        yield
    finally:
        setattr(module, name, before)
