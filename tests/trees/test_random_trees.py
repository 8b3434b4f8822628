"""What holds for every tree: hypothesis draws them."""

import ast
import json
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_cli.inspect import render
from medusa_cli.trees.files import parse_tree, read_tree, write_tree
from medusa_cli.trees.tree import Path, TokenTree


@st.composite
def rank_paths(draw: st.DrawFn) -> list[Path]:
    """The paths of a random tree of up to 24 nodes, in random order."""
    paths: list[Path] = []
    for _ in range(draw(st.integers(0, 24))):
        path = (*draw(st.sampled_from([(), *paths])), draw(st.integers(0, 5)))
        if path not in paths and len(path) <= 6:
            paths.append(path)
    return draw(st.permutations(paths))


def _same(tree: TokenTree, paths: Sequence[Path]) -> bool:
    return sorted(tree.paths()) == sorted(paths)


@given(rank_paths())
@settings(deadline=None, max_examples=50)
def test_a_node_sees_the_root_its_ancestors_and_itself_only(paths: list[Path]) -> None:
    tree = TokenTree.from_paths(paths)
    nodes = [(), *tree.paths()]
    for node, sees_N in zip(nodes, tree.ancestors_XNN[0].tolist(), strict=True):
        seen = {other for other, is_seen in zip(nodes, sees_N, strict=True) if is_seen}
        assert seen == {node[:length] for length in range(len(node) + 1)}


@given(rank_paths())
@settings(deadline=None, max_examples=50)
def test_the_depth_of_a_node_is_its_offset_from_the_root(paths: list[Path]) -> None:
    tree = TokenTree.from_paths(paths)
    assert tree.depths_XN[0].tolist() == [0, *(len(path) for path in tree.paths())]
    assert tree.max_depth == max((len(path) for path in paths), default=0)


@given(rank_paths())
@settings(deadline=None, max_examples=50)
def test_parents_come_before_their_children(paths: list[Path]) -> None:
    tree = TokenTree.from_paths(paths)
    assert (tree.parents_XN[0, 1:] < torch.arange(1, tree.num_nodes)).all()


@given(rank_paths())
@settings(deadline=None, max_examples=50)
def test_paths_survive_becoming_a_tree_whatever_their_order(paths: list[Path]) -> None:
    assert _same(TokenTree.from_paths(paths), paths)


@given(rank_paths())
@settings(deadline=None, max_examples=50)
def test_stated_counts_equal_the_rows_of_the_mask(paths: list[Path]) -> None:
    tree = TokenTree.from_paths(paths)
    document = render.to_json(render.node_infos(tree.paths(), None))
    assert document["num_nodes_with_root"] == tree.ancestors_XNN.shape[1] == tree.num_nodes
    assert document["num_nodes"] == len(paths)
    assert sum(document["per_depth"]) == len(paths)
    assert len(document["per_depth"]) == document["max_depth"] == tree.max_depth


@given(rank_paths())
@settings(deadline=None, max_examples=30)
def test_a_tree_written_as_json_or_choices_reads_back_the_same(paths: list[Path]) -> None:
    nodes = render.node_infos(paths, None)
    assert _same(parse_tree(render.to_choices(nodes)), paths)
    assert _same(TokenTree.from_paths(json.loads(json.dumps(render.to_json(nodes)))["paths"]), paths)
    assert _same(TokenTree.from_paths(ast.literal_eval(render.to_choices(nodes))), paths)


@given(rank_paths())
@settings(deadline=None, max_examples=10)
def test_a_tree_file_reads_back_the_same(tmp_path_factory, paths: list[Path]) -> None:
    file = tmp_path_factory.mktemp("trees") / "tree.json"
    write_tree(file, TokenTree.from_paths(paths), {"expected_tokens": 1.5})
    assert _same(read_tree(file), paths)
    assert json.loads(file.read_text())["expected_tokens"] == 1.5
    assert [each.name for each in file.parent.iterdir()] == ["tree.json"]


@given(rank_paths(), st.sampled_from([40, 80, 120]))
@settings(deadline=None, max_examples=30)
def test_a_drawing_has_a_line_for_each_node_with_its_rank_path_under_its_parent(paths: list[Path], width: int) -> None:
    lines = render.to_text(render.node_infos(paths, None), width).splitlines()
    assert lines[0] == "root"
    drawn = []
    for line in lines[1:]:
        trunk, _, rest = line.partition("[")
        path = tuple(ast.literal_eval("[" + rest))
        assert len(trunk) == 3 * len(path)
        assert path[:-1] == () or path[:-1] in drawn
        drawn.append(path)
    assert sorted(drawn) == sorted(paths)
