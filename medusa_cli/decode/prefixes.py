"""Prefixes: what an engine lends a prompt out of a pool, and what it keeps there of the texts that it reads and writes.

Keys and values of a chunk are those of one target, computed in one way, for one owner: all of it is in the chunk's key.
"""

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version

from medusa_cli.decode.rows import Row
from medusa_cli.model.cache import TreeCache
from medusa_cli.model.target import Target
from medusa_cli.prefix.keys import CHUNK, keys_of, seed_of
from medusa_cli.prefix.pool import PrefixPool
from medusa_cli.prefix.values import Layout


class Prefixes:
    """A pool, as the engine of one target uses it.

    taps   inner layers whose states stand beside the keys, as the drafter wants them
    """

    def __init__(self, target: Target, taps: Sequence[int], pool: PrefixPool) -> None:
        self.pool = pool
        self._target = target
        self._taps = taps
        self._tables = target.tables  # made here: it asks modules, and keys are wanted on other threads too

    def keys(self, ids: Sequence[int], prompt_tokens: int, owner: str) -> Sequence[bytes]:
        """Of each whole chunk of a text; `prompt_tokens` of it are given at once, which picks its rotary table."""
        return list(keys_of(seed_of(self._seed, self._tables.names_table(prompt_tokens), owner), ids))

    def lend(self, cache: TreeCache, place: int, row: Row) -> None:
        """Let a row begin with what the pool holds of its prompt. The last token is left: it decides the first new one.

        A layer that nothing was written to yet is made where inputs go; over several devices it must be there already.
        """
        held, most = cache.lengths[place], len(row.tokens) - 1
        if len(self._target.devices) > 1 and not cache.layers[0].is_initialized:
            return
        chunks = self.pool.find(self.keys(row.tokens[:most], row.prompt_tokens, row.owner))
        self.pool.counts.queries += most // CHUNK * CHUNK
        self.pool.counts.hits += len(chunks) * CHUNK
        for start, chunk in zip(range(0, most, CHUNK), chunks, strict=False):
            if start + CHUNK > held:
                # what another row has lent may end within a chunk
                cache.append_columns(place, chunk.behind(max(0, held - start)), self._target.device)

    def keep(self, cache: TreeCache, place: int, row: Row) -> None:
        """Keep what a row holds in whole chunks that are not in the pool.

        Where tables depend on lengths, of a prompt that was just read alone: writing on may turn all of it anew.
        """
        length = cache.lengths[place]
        if self._tables.vary and length > row.prompt_tokens:
            return
        for start, key in enumerate(self.keys(row.tokens[:length], row.prompt_tokens, row.owner)):
            if key not in self.pool.memory:
                self.pool.put(key, cache.read_columns(place, start * CHUNK, (start + 1) * CHUNK))

    def forget(self, row: Row) -> None:
        """Drop what the pool holds of a prompt: what was read with it can't decide a token."""
        self.pool.forget(self.keys(row.tokens, row.prompt_tokens, row.owner))

    @cached_property
    def layout(self) -> Layout:
        """What chunks look like: found by reading one token."""
        cache = self._target.new_cache(1, 1)
        self._target.prefill([[0]], cache, taps=tuple(self._taps))
        return Layout.of(cache.read_columns(0, 0, 1), CHUNK)

    @cached_property
    def _seed(self) -> bytes:
        """Weights, and how they are used."""
        target = self._target
        identity = target.identity
        how = (identity.runner, identity.attention, target.dtype_name, target.device.type)
        libraries = [version(name) for name in ("torch", "transformers")]
        return seed_of(
            identity.fingerprint, identity.files or "", identity.rows or "", *how, *libraries, str(self._taps)
        )
