"""TreeCache: paths are kept, losers forgotten, rows moved; and only four of its methods change a length."""

import ast
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from medusa_cli.contracts import Verdict
from medusa_cli.model.cache import BLOCK, TreeCache

CPU = torch.device("cpu")
LAYERS, HEADS, WIDTH = 2, 2, 3
PACKAGE = Path(__file__).parents[2] / "medusa_cli"


def write(cache: TreeCache, rows: slice, numbers: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """One forward that writes a number for each node: as keys, and negated as values; what attention reads."""
    cache.place(rows, len(numbers[0]), CPU)
    states = torch.tensor(numbers, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, WIDTH)
    return [cache.update(states + 1000 * layer, -states - 1000 * layer, layer) for layer in range(LAYERS)]


def held(cache: TreeCache, row: int) -> list[int]:
    """The numbers committed in a row, the same in every layer, head, key and value."""
    length = cache.lengths[row]
    for index, layer in enumerate(cache.layers):
        keys, values = layer.keys[row, :, :length], layer.values[row, :, :length]
        numbers = keys[0, :, 0]
        assert torch.equal(keys, numbers[None, :, None].expand_as(keys))
        assert torch.equal(values, -keys)
        assert torch.equal(numbers - 1000 * index, cache.layers[0].keys[row, 0, :length, 0])
    return [int(number) for number in cache.layers[0].keys[row, 0, :length, 0]]


def kept(paths: list[list[int]], counts: list[int] | None = None) -> Verdict:
    """The verdict that keeps these paths, or only the first nodes of them."""
    places = max(map(len, paths))
    counts = counts or [len(path) for path in paths]
    padded = [path + [-1] * (places - len(path)) for path in paths]
    ignored = torch.zeros(len(paths), dtype=torch.long)
    return Verdict(torch.tensor(padded), ignored, ignored, padded, counts)


def filled(texts: list[list[int]], num_rows: int = 0, capacity: int = 0) -> TreeCache:
    """A cache in which the texts are committed."""
    cache = TreeCache(LAYERS, max(num_rows, len(texts)), capacity)
    longest = max(map(len, texts))
    write(cache, slice(0, len(texts)), [text + [999] * (longest - len(text)) for text in texts])
    cache.commit(slice(0, len(texts)), [len(text) for text in texts])
    return cache


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 1, 2, 3], [0, 3], [0, 2, 4], [0, 1, 4]])
def test_a_row_keeps_its_path_in_order(path: list[int]) -> None:
    cache = filled([[1, 2, 3]])
    write(cache, slice(0, 1), [[10, 11, 12, 13, 14]])
    cache.keep(kept([path]))
    assert held(cache, 0) == [1, 2, 3, *(10 + node for node in path)]


def test_rows_of_unequal_length_keep_paths_of_unequal_length() -> None:
    cache = filled([[1, 2, 3], [4], [5, 6]])
    write(cache, slice(0, 3), [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    cache.keep(kept([[0, 2, 3], [0], [0, 3]]))
    assert [held(cache, row) for row in range(3)] == [[1, 2, 3, 10, 12, 13], [4, 20], [5, 6, 30, 33]]


def test_a_path_that_is_cut_commits_only_what_is_left_of_it() -> None:
    cache = filled([[1], [2]])
    write(cache, slice(0, 2), [[10, 11, 12, 13], [20, 21, 22, 23]])
    cache.keep(kept([[0, 2, 3], [0, 1, 3]], counts=[2, 0]))
    assert [held(cache, row) for row in range(2)] == [[1, 10, 12], [2]]


@pytest.mark.parametrize("seed", range(5))
def test_any_number_of_steps_leaves_the_text(seed: int) -> None:
    rng = random.Random(seed)
    texts = [[rng.randrange(100) for _ in range(rng.randrange(1, 9))] for _ in range(3)]
    cache = filled(texts)
    for _ in range(30):
        numbers = [[rng.randrange(100) for _ in range(6)] for _ in texts]
        write(cache, slice(0, 3), numbers)
        paths = [[0, *sorted(rng.sample(range(1, 6), rng.randrange(6)))] for _ in texts]
        cache.keep(kept(paths))
        for text, row, path in zip(texts, numbers, paths, strict=True):
            text += [row[node] for node in path]
    assert [held(cache, row) for row in range(3)] == texts


def test_attention_reads_the_committed_columns_and_the_new_nodes() -> None:
    cache = filled([[1, 2, 3], [4]])
    keys, values = write(cache, slice(0, 2), [[10, 11], [20, 21]])[0]
    assert keys.shape == (2, HEADS, 5, WIDTH)
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 10, 11]
    assert keys[1, 0, :3, 0].tolist() == [4, 20, 21]
    assert torch.equal(keys, -values)


def test_a_cache_grows_and_keeps_what_it_holds() -> None:
    cache = filled([list(range(50)), list(range(7))], capacity=60)
    text = list(range(50))
    for start in range(0, 2 * BLOCK, 20):
        new = [start + node for node in range(20)]
        write(cache, slice(0, 2), [new, new])
        cache.commit(slice(0, 2), [20, 0])
        text += new
    assert held(cache, 0) == text
    assert held(cache, 1) == list(range(7))


def test_a_row_copied_over_another_replaces_it() -> None:
    cache = filled([[1, 2, 3], [4], [5, 6]])
    cache.copy_row(2, 0)
    cache.drop(2)
    assert [held(cache, row) for row in range(3)] == [[5, 6], [4], []]
    write(cache, slice(0, 2), [[10, 11], [20, 21]])
    cache.keep(kept([[0, 1], [0]]))
    assert [held(cache, row) for row in range(2)] == [[5, 6, 10, 11], [4, 20]]


def test_rows_join_behind_those_that_are_there() -> None:
    cache = filled([[1, 2, 3], [4]], num_rows=4)
    write(cache, slice(2, 4), [[50, 51, 52], [60, 61, 62]])
    cache.commit(slice(2, 4), [3, 1])
    assert [held(cache, row) for row in range(4)] == [[1, 2, 3], [4], [50, 51, 52], [60]]


def test_a_dropped_row_is_written_from_its_start_again() -> None:
    cache = filled([[1, 2, 3]])
    cache.drop(0)
    write(cache, slice(0, 1), [[7, 8]])
    cache.commit(slice(0, 1), [2])
    assert held(cache, 0) == [7, 8]


def test_writing_nodes_commits_nothing() -> None:
    cache = filled([[1, 2, 3], [4]])
    for _ in range(3):
        write(cache, slice(0, 2), [[10, 11], [20, 21]])
    assert cache.lengths == [3, 1]
    assert [held(cache, row) for row in range(2)] == [[1, 2, 3], [4]]


def test_memory_is_counted_over_all_layers() -> None:
    assert TreeCache(LAYERS, 2, 16).num_bytes() == 0
    # rows x heads x columns x width, keys and values, four bytes each
    assert filled([[1], [2]], capacity=16).num_bytes() == LAYERS * 2 * (2 * HEADS * 16 * WIDTH) * 4


def changes_lengths(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    inner = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
    return any(isinstance(target, ast.Attribute) and target.attr == "lengths" for target in inner)


def test_only_six_methods_of_the_cache_change_lengths() -> None:
    found = {
        f"{file.stem}.{function.name}"
        for file in PACKAGE.rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and changes_lengths(node)
    }
    # `keep` changes them through `commit`, `copy_row` through `copy_prefix`
    changing = {"append_columns", "commit", "copy_prefix", "drop", "shorten"}
    assert found == {f"cache.{name}" for name in ("__init__", *changing)}


@pytest.mark.parametrize(("rows", "columns"), [(2, 6), (5, 8), (2, 40), (4, 6)])
@torch.inference_mode()  # as every forward
def test_another_shape_keeps_what_is_committed_and_nothing_else(rows: int, columns: int) -> None:
    texts = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    cache = filled(texts, num_rows=3)
    write(cache, slice(2, 3), [[999]])
    cache.reshape(rows, columns)
    assert cache.lengths == [4, 6] + [0] * (rows - 2)
    assert [held(cache, row) for row in range(2)] == texts
    assert cache.layers[0].keys.shape == (rows, HEADS, columns, WIDTH)
    assert not any(layer.keys[3:].any() for layer in cache.layers)
    write(cache, slice(0, rows), [[11]] * rows)
    cache.commit(slice(0, rows), [1] * rows)
    assert [held(cache, row)[-1] for row in range(rows)] == [11] * rows


def test_layers_that_write_no_keys_of_their_own_are_passed_over() -> None:
    cache = TreeCache(LAYERS + 1, 2, 8)  # write() reaches all but the last: it reads another layer's keys
    write(cache, slice(0, 1), [[1, 2, 3]])
    cache.commit(slice(0, 1), [3])
    cache.copy_row(0, 1)
    write(cache, slice(0, 2), [[10, 11, 12], [20, 21, 22]])
    cache.keep(kept([[0, 2], [0, 2]]))
    cache.layers.pop()
    assert [held(cache, row) for row in range(2)] == [[1, 2, 3, 10, 12], [1, 2, 3, 20, 22]]
