"""Prefix pools by name: what `--prefix-pool` says becomes memory, and a store behind it where one is named."""

import logging
import re
from dataclasses import dataclass

from medusa_cli.contracts import Drafter
from medusa_cli.decode.prefixes import Prefixes
from medusa_cli.errors import DataError
from medusa_cli.model.target import Target
from medusa_cli.prefix.memory import Memory
from medusa_cli.prefix.pool import PrefixPool

logger = logging.getLogger(__name__)

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
DEFAULT_MEMORY = "1GB"
HINT = "write memory:2GB, redis://host:6379, both by a comma, or none"


@dataclass(frozen=True)
class PoolSettings:
    """What a prefix pool is to be.

    most_bytes   of this process
    url          of the server that shares chunks; None: nobody else has them
    secret       of those who share them
    lifetime_s   of a chunk on the server
    """

    most_bytes: int
    url: str | None = None
    secret: bytes | None = None
    lifetime_s: float = 86400.0

    @classmethod
    def of(cls, words: str, secret: bytes | None = None, lifetime_s: float = 86400.0) -> "PoolSettings | None":
        """As the command line writes it; None for `none`. Raises DataError."""
        if words == "none":
            return None
        most_bytes, url = bytes_of(DEFAULT_MEMORY), None
        for part in words.split(","):
            kind, _, size = part.partition(":")
            if kind == "memory":
                most_bytes = bytes_of(size)
            elif kind in ("redis", "rediss", "unix") and size.startswith("//"):
                url = part
            else:
                raise DataError(f"--prefix-pool: {_without_password(part)!r} is no pool", HINT)
        return cls(most_bytes, url, secret, lifetime_s)

    def open(self, target: Target, drafter: Drafter) -> Prefixes:
        """The pool of this target. Raises DataError for an address that is none, MissingExtra without the package."""
        memory = Memory(self.most_bytes)
        prefixes = Prefixes(target, drafter.taps, PrefixPool(memory))
        if self.url is not None:
            from medusa_cli.prefix.redis_store import RedisStore
            from medusa_cli.prefix.values import Values

            store = RedisStore(self.url, Values(prefixes.layout, self.secret), self.lifetime_s)
            prefixes.pool = PrefixPool(memory, store, logger.warning)
        return prefixes


def bytes_of(words: str) -> int:
    """Of a size as people write it: 2GB, 512M. Raises DataError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", words.strip(), re.IGNORECASE)
    size = float(found[1]) * UNITS[found[2].upper()] if found else 0.0
    if not 1 <= size < 2**50:
        raise DataError(f"--prefix-pool: {words!r} is no size", HINT)
    return int(size)


def _without_password(url: str) -> str:
    return re.sub(r"//.*@", "//…@", url)
