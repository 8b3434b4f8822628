"""Drawings of trees."""

import xml.etree.ElementTree as ElementTree

import pytest

from medusa_cli.inspect import render
from medusa_cli.inspect.render import NodeInfo
from medusa_cli.plots import tree as tree_plot
from medusa_cli.trees.build import best_tree, expected_tokens

ACCURACY_KR = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.1]]
PATHS = [(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0)]


@pytest.fixture
def nodes() -> list[NodeInfo]:
    return render.node_infos(PATHS, ACCURACY_KR)


def test_a_node_tells_its_acceptance_its_probability_and_its_share(nodes: list[NodeInfo]) -> None:
    by_path = {node.path: node for node in nodes}
    assert by_path[(0, 1)].acceptance == 0.2
    assert by_path[(0, 1)].probability == pytest.approx(0.5 * 0.2)
    assert sum(node.share or 0 for node in nodes) == pytest.approx(1)
    assert by_path[(0,)].share == pytest.approx(0.5 / (0.5 + 0.2 + 0.06 + 0.1 + 0.2 + 0.08))


def test_the_nodes_add_what_the_tree_is_expected_to_gain() -> None:
    tree = best_tree(ACCURACY_KR, 12)
    assert render.gain(render.node_infos(tree.paths(), ACCURACY_KR)) == pytest.approx(
        expected_tokens(tree, ACCURACY_KR) - 1
    )


def test_the_drawing_shows_each_path_under_its_parent(nodes: list[NodeInfo]) -> None:
    assert render.to_text(nodes, 80).splitlines() == [
        "                  acceptance  reached   share",
        "root",
        "├─ [0]                 0.500    0.500   43.9%  ████████████████████████",
        "│  ├─ [0,0]            0.400    0.200   17.5%  █████████▋",
        "│  │  └─ [0,0,0]       0.300    0.060    5.3%  ██▉",
        "│  └─ [0,1]            0.200    0.100    8.8%  ████▊",
        "└─ [1]                 0.200    0.200   17.5%  █████████▋",
        "   └─ [1,0]            0.400    0.080    7.0%  ███▉",
    ]


@pytest.mark.parametrize("size", [0, 1, 16, 63])
def test_a_drawing_fits_eighty_columns(size: int) -> None:
    accuracy_KR = [[0.9, 0.05, 0.02, 0.01]] * 8
    nodes = render.node_infos(best_tree(accuracy_KR, size).paths(), accuracy_KR)
    assert max(len(line) for line in render.to_text(nodes, 80).splitlines()) <= 80


def test_unmeasured_nodes_are_drawn_without_numbers() -> None:
    nodes = render.node_infos(PATHS, None)
    assert render.to_text(nodes, 80).splitlines()[:3] == ["root", "├─ [0]", "│  ├─ [0,0]"]
    assert render.gain(nodes) is None
    assert render.to_json(nodes)["expected_tokens"] is None


def test_counts_are_stated_with_and_without_the_root(nodes: list[NodeInfo]) -> None:
    assert render.counts(nodes) == "6 nodes, 7 with the root; depth 3"
    assert render.counts(nodes[:1]) == "1 node, 2 with the root; depth 1"
    assert render.counts([]) == "0 nodes, 1 with the root; depth 0"


def test_choices_list_short_paths_first(nodes: list[NodeInfo]) -> None:
    assert render.to_choices(nodes) == "[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]"


def test_the_graph_has_an_edge_to_every_node(nodes: list[NodeInfo]) -> None:
    dot = render.to_dot(nodes)
    assert dot.count("->") == 6
    assert '"[0]" -> "[0,1]"' in dot
    assert dot.count("{") == dot.count("}") == 1


def test_the_svg_is_well_formed_and_shows_every_node_inside_its_frame(nodes: list[NodeInfo]) -> None:
    root = ElementTree.fromstring(tree_plot.to_svg(nodes))
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 7
    for circle in circles:
        assert 0 < float(circle.get("cx", "nan")) < float(root.get("width", "nan"))
        assert 0 < float(circle.get("cy", "nan")) < float(root.get("height", "nan"))
    words = " ".join(element.text or "" for element in root.iter())
    assert "6 nodes, 7 with the root; depth 3 · 2.14 tokens a step expected" in words
    assert "43.9%" in words


def test_no_two_nodes_are_placed_on_each_other(nodes: list[NodeInfo]) -> None:
    spots = tree_plot.lay_out(nodes).spots
    assert len({(spot.x, spot.y) for spot in spots}) == len(spots)
    assert all(spot.x > spot.from_x for spot in spots if spot.node)


@pytest.mark.parametrize("paths", [[], [(3,)], PATHS])
def test_every_tree_has_pictures_with_or_without_numbers(paths: list[tuple[int, ...]]) -> None:
    nodes = render.node_infos(paths, None)
    ElementTree.fromstring(tree_plot.to_svg(nodes))
    assert len(tree_plot.lay_out(nodes).spots) == len(paths) + 1


def test_the_png_is_a_png(nodes: list[NodeInfo]) -> None:
    pytest.importorskip("matplotlib")
    assert tree_plot.to_png(nodes).startswith(b"\x89PNG")
