"""The self-check passes where our forward is the library's, and finds each way in which it is not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import TargetError
from medusa_cli.model import attention as grouped
from medusa_cli.model.loading import self_check as self_check_file
from medusa_cli.model.loading.load import make_target
from medusa_cli.model.loading.self_check import CheckResult, checked, self_check
from medusa_cli.model.masks import tree_masks
from medusa_cli.model.runners import stock
from medusa_cli.model.runners.stock import StockForward
from medusa_cli.model.target import Target
from medusa_cli.trees.tree import TokenTree
from tests.tiny_folders import tiny_model, tiny_tokenizer

WINDOW = 8
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
WINDOWED = [("mistral", {"sliding_window": WINDOW}), ("phi3", {"sliding_window": WINDOW}), ("gemma3_text", ALTERNATING)]


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))


def target_of(model_type: str = "llama", attention: str = "eager", runner: str = "eager", **changes: Any) -> Target:
    name = grouped.register() if attention == "grouped" else attention
    return wrapped(tiny_model(model_type, name, **changes), runner)


def wrapped(model: Any, runner: str = "eager") -> Target:
    return make_target(model, tiny_tokenizer(), TargetSettings(model="tiny", runner=runner, device="cpu"))


@pytest.mark.parametrize("attention", ["eager", "sdpa", "grouped"])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("opt", {}),
        ("qwen3", {}),
        ("cohere", {}),
        ("mixtral", {"num_local_experts": 4}),
        *WINDOWED,
    ],
)
def test_a_sound_model_passes_far_under_the_bound(model_type: str, changes: dict[str, Any], attention: str) -> None:
    result = self_check(target_of(model_type, attention, **changes))
    assert result.ok
    assert result.max_difference < result.bound / 50
    assert result.past_window


def test_a_sound_model_with_capped_logits_passes() -> None:
    assert self_check(target_of("gemma2", **ALTERNATING)).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sound_model_passes_in_half_precision(dtype: torch.dtype) -> None:
    assert self_check(wrapped(tiny_model("llama").to(dtype))).ok


def test_packed_weights_pass() -> None:
    assert self_check(target_of(runner="packed")).ok


def test_a_boolean_mask_is_found_under_eager_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers#29525: eager attention adds True and False as numbers
    def boolean(*args: Any) -> dict[str, torch.Tensor]:
        return {kind: mask == 0 for kind, mask in tree_masks(*args).items()}

    monkeypatch.setattr(stock, "tree_masks", boolean)
    assert not self_check(target_of()).ok
    assert self_check(target_of(attention="sdpa")).ok


@pytest.mark.parametrize(("model_type", "changes"), WINDOWED)
def test_a_lost_window_is_found(model_type: str, changes: dict[str, Any]) -> None:
    target = target_of(model_type, **changes)
    target.stock.kinds = dict.fromkeys(target.kinds)
    assert not self_check(target).ok


def test_a_window_off_by_one_is_found() -> None:
    target = target_of("mistral", sliding_window=WINDOW)
    target.stock.kinds = {"sliding_attention": WINDOW + 1}
    assert not self_check(target).ok


def test_nodes_that_see_their_siblings_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def chained(tree: TokenTree, *rest: Any) -> dict[str, torch.Tensor]:
        return tree_masks(TokenTree.chain(tree.num_nodes - 1), *rest)

    monkeypatch.setattr(stock, "tree_masks", chained)
    assert not self_check(target_of()).ok


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "falcon"])
def test_columns_taken_for_positions_are_found(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StockForward, "positions", lambda self, tree, place: place.columns_BN)
    assert not self_check(target_of(model_type)).ok


def test_a_model_deaf_to_positions_is_found() -> None:
    # what MPT and BLOOM are, had they a parameter of that name
    model = tiny_model()
    heard = model.forward

    def deaf(input_ids: Any, position_ids: Any = None, **rest: Any) -> Any:
        return heard(input_ids, **rest)

    model.forward = deaf
    assert not self_check(wrapped(model)).ok


def test_a_model_that_looks_ahead_by_itself_is_found() -> None:
    model = tiny_model()
    heard = model.forward

    def ahead(input_ids: Any, position_ids: Any = None, **rest: Any) -> Any:
        length = input_ids.shape[1]
        rest.setdefault("attention_mask", torch.zeros(1, 1, length, length))
        return heard(input_ids, position_ids=position_ids, **rest)

    model.forward = ahead
    assert not self_check(wrapped(model)).ok


def test_numbers_that_are_none_fail_with_the_reason() -> None:
    target = target_of()
    with torch.no_grad():
        target.model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    assert not self_check(target).ok
    with pytest.raises(TargetError, match="tiny can't be used: its logits are not finite in float32") as caught:
        checked(target)
    assert "damaged" in caught.value.hint
    assert "--dtype" not in caught.value.hint, "it is float32 already"


def test_a_forward_that_fails_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no kernel\nfor trees")

    monkeypatch.setattr(target.model, "forward", fails)
    with pytest.raises(TargetError, match=r"tiny \(llama\) can't verify a tree: .* no kernel for trees"):
        self_check(target)


@pytest.mark.parametrize("positions", [2, 3, 4, 5])
def test_a_context_of_a_few_tokens_is_checked_with_what_fits(positions: int) -> None:
    result = self_check(target_of("gpt2", n_positions=positions))
    assert result.ok
    assert result.num_tokens == positions


def test_a_context_of_one_token_has_no_room_to_write() -> None:
    with pytest.raises(TargetError, match="context of 1 token"):
        self_check(target_of("gpt2", n_positions=1))


def test_the_check_stays_within_a_short_context() -> None:
    result = self_check(target_of("gpt2", n_positions=10))
    assert result.ok
    assert result.num_tokens == 10


def test_a_window_longer_than_the_check_is_said_to_be_unreached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check_file, "LONG", 30)
    result = self_check(target_of("mistral", sliding_window=40))
    assert result.ok
    assert not result.past_window


def test_rounding_that_hits_one_text_only_does_not_refuse_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = iter([3.0, 1e-7])
    monkeypatch.setattr(self_check_file, "_largest_difference", lambda *args: next(differences))
    assert self_check(target_of()) == CheckResult(1e-7, self_check_file.BOUNDS["float32"], True, 28, True, uncrossed=[])


# --- remembered ---


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one name with each check that really runs."""
    runs: list[str] = []

    def run(target: Target) -> CheckResult:
        runs.append(target.name)
        return self_check(target)

    monkeypatch.setattr(self_check_file, "self_check", run)
    return runs


def test_a_check_runs_once_for_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted(monkeypatch)
    assert checked(target_of()) == checked(target_of())
    assert len(runs) == 1


def test_a_check_runs_again_when_anything_it_depends_on_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted(monkeypatch)
    checked(target_of())
    checked(target_of(attention="sdpa"))
    checked(target_of(runner="packed"))
    checked(target_of(rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    checked(wrapped(tiny_model().to(torch.bfloat16)))
    monkeypatch.setattr(self_check_file.transformers, "__version__", "99.0")
    checked(target_of())
    assert len(runs) == 6


def test_a_failed_check_is_not_remembered_and_names_model_and_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StockForward, "positions", lambda self, tree, place: place.columns_BN)
        with pytest.raises(TargetError, match=r"tiny \(llama\) can't verify a tree: .* by 0\.00\d+ of their spread"):
            checked(target_of())
    assert checked(target_of()).ok


def test_a_damaged_memory_is_checked_again_and_mended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = counted(monkeypatch)
    checked(target_of())
    (file,) = (tmp_path / "home" / "remembered" / "checks").iterdir()
    whole = json.loads(file.read_text())
    spoilt = [{**whole, "value": value} for value in ({"ok": True}, {**whole["value"], "ok": False}, 3)]
    for damage in ('{"value": {"ok"', "[]", *map(json.dumps, spoilt)):
        file.write_text(damage)
        checked(target_of())
    checked(target_of())
    assert len(runs) == 6


def test_where_nothing_can_be_written_the_check_runs_each_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "file"))
    runs = counted(monkeypatch)
    checked(target_of())
    checked(target_of())
    assert len(runs) == 2
