"""Memory of the pool: bounded, and what is of no use without others goes before them."""

import torch

from medusa_cli.model.cache import Columns
from medusa_cli.prefix.keys import CHUNK, keys_of, seed_of
from medusa_cli.prefix.memory import Memory


def chunk(number: float = 0.0) -> Columns:
    part = torch.full((2, CHUNK, 4), number)
    return Columns({0: (part, part.clone())})


SIZE = chunk().num_bytes
KEYS = [bytes([number]) * 32 for number in range(8)]


def test_a_memory_holds_no_more_than_it_may() -> None:
    memory = Memory(3 * SIZE)
    for key in KEYS:
        assert memory.put(key, chunk())
        assert memory.num_bytes <= 3 * SIZE
    assert [key in memory for key in KEYS] == [False] * 5 + [True] * 3
    assert not Memory(SIZE - 1).put(KEYS[0], chunk())


def test_a_text_is_found_up_to_its_first_gap() -> None:
    memory = Memory(100 * SIZE)
    for place in (0, 1, 3):
        memory.put(KEYS[place], chunk(place))
    found = memory.find(KEYS)
    assert [float(each.layers[0][0][0, 0, 0]) for each in found] == [0, 1]


def test_the_end_of_a_text_goes_before_its_beginning() -> None:
    memory = Memory(4 * SIZE)
    for key in KEYS[:3]:
        memory.put(key, chunk())
    memory.find(KEYS[:3])
    memory.put(KEYS[6], chunk())
    memory.put(KEYS[7], chunk())
    assert [key in memory for key in KEYS[:3]] == [True, True, False]


def test_what_is_forgotten_takes_no_memory() -> None:
    memory = Memory(100 * SIZE)
    memory.put(KEYS[0], chunk())
    memory.forget(KEYS[:2])
    assert (memory.num_bytes, len(memory)) == (0, 0)


def test_a_key_stands_for_all_tokens_before_it_and_for_the_seed() -> None:
    ids = list(range(3 * CHUNK + 5))
    keys = list(keys_of(seed_of("a"), ids))
    assert len(keys) == 3
    other = list(keys_of(seed_of("a"), [1, *ids[1:]]))
    assert not set(keys) & set(other), "the first token is in every key"
    assert list(keys_of(seed_of("a"), ids[: 2 * CHUNK])) == keys[:2]
    assert not set(keys) & set(keys_of(seed_of("b"), ids))
    assert seed_of("ab", "c") != seed_of("a", "bc")
