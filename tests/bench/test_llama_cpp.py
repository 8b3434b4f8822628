"""The llama.cpp arm: what it asks of llama.cpp, one stop rule, its errors; and the real one on a tiny random file."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_cli.assemble import DrafterChoice
from medusa_cli.bench import build, llama_cpp
from medusa_cli.bench.baselines import StopRule
from medusa_cli.bench.llama_cpp import LlamaCppArm, gguf_of
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import MissingExtra, TargetError
from medusa_cli.model.loading.load import load_unchecked
from medusa_cli.model.loading.sources import Source
from medusa_cli.util.optional import extra_hint
from tests.cli.harness import run_here
from tests.tiny_folders import save_gguf, save_tiny
from tests.tiny_models import by_whole_forwards

PROMPT = [5, 9, 11]


class FakeLlama:
    """Stands in for the module xllamacpp: writes 20, 21, 22, … by a script and ends where the file says."""

    def __init__(self, script: Sequence[int] = range(20, 60), ends: Sequence[int] = ()) -> None:
        self.script, self.ends = list(script), set(ends)
        self.params: Any = None
        self.asked: list[dict[str, Any]] = []
        self.error: str | None = None
        self.loads = True

    def CommonParams(self) -> Any:  # noqa: N802
        parts = {name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")}
        return SimpleNamespace(**parts)

    def Server(self, params: Any) -> "FakeLlama":  # noqa: N802
        (self.socket,) = params.hostnames
        assert Path(self.socket).parent.stat().st_mode & 0o077 == 0, "nobody else may reach the socket"
        if not self.loads:
            raise RuntimeError("Failed to init server, please check the input params.")
        self.params = params
        return self

    def handle_completions(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        if self.error:
            return {"error": {"code": 400, "message": self.error}}
        wrote: list[int] = []
        for token in self.script[len(asked["prompt"]) - len(PROMPT) :][: asked["max_tokens"]]:
            wrote.append(token)
            if token in self.ends:
                break
        return {"choices": [{"text": "…"}], "__verbose": {"tokens": wrote}}


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    made = FakeLlama()
    monkeypatch.setitem(sys.modules, "xllamacpp", made)
    return made


def _arm(stops: Sequence[int] = (), budget: int = 8, limit: int | None = 64, num_threads: int = 1) -> LlamaCppArm:
    arm = LlamaCppArm(Path("tiny.gguf"), StopRule(frozenset(stops), budget, limit), num_threads)
    arm.make_room(len(PROMPT))
    return arm


# --- what is asked of llama.cpp ---


def test_it_gets_the_ids_of_the_prompt_and_the_threads_of_the_other_arms_and_takes_the_best_token(
    llama: FakeLlama,
) -> None:
    (reply,) = _arm(num_threads=3).generate([PROMPT])
    assert list(reply.token_ids) == list(range(20, 28))
    assert (reply.num_steps, list(reply.kept), list(reply.num_nodes)) == (7, [1] * 7, [1] * 7)
    (asked,) = llama.asked
    assert (asked["prompt"], asked["max_tokens"], asked["cache_prompt"]) == (PROMPT, 8, False)
    assert (asked["samplers"], asked["top_k"], asked["mirostat"]) == (["top_k"], 1, 0)
    assert (llama.params.cpuparams.n_threads, llama.params.cpuparams_batch.n_threads) == (3, 3)
    assert (llama.params.model.path, llama.params.n_gpu_layers) == ("tiny.gguf", 0)


def test_its_context_holds_the_longest_prompt_and_its_reply_and_no_more_than_the_model_takes(llama: FakeLlama) -> None:
    arm = LlamaCppArm(Path("tiny.gguf"), StopRule(frozenset(), 8, 64), 1)
    arm.make_room(40)
    assert llama.params.n_ctx == 48
    arm.make_room(60)
    assert llama.params.n_ctx == 64


def test_it_listens_on_no_port_and_on_nothing_once_it_stands(llama: FakeLlama) -> None:
    _arm()
    assert llama.socket.endswith(".sock")
    assert not Path(llama.socket).parent.exists()


# --- the stop rule ---


def test_it_ends_at_a_stop_id_at_the_budget_and_at_the_context_limit(llama: FakeLlama) -> None:
    llama.ends = {23}
    assert list(_arm(stops=[23]).generate([PROMPT])[0].token_ids) == [20, 21, 22, 23]
    assert list(_arm(budget=2).generate([PROMPT])[0].token_ids) == [20, 21]
    assert list(_arm(limit=len(PROMPT) + 1).generate([PROMPT])[0].token_ids) == [20]


def test_it_goes_on_where_the_file_knows_an_end_that_the_stop_rule_does_not(llama: FakeLlama) -> None:
    llama.ends = {22, 24}
    (reply,) = _arm(stops=[24]).generate([PROMPT])
    assert list(reply.token_ids) == [20, 21, 22, 23, 24]
    assert [asked["cache_prompt"] for asked in llama.asked] == [False, True], "its own text is in the cache"
    assert llama.asked[1]["prompt"] == [*PROMPT, 20, 21, 22]
    assert llama.asked[1]["max_tokens"] == 5


def test_an_end_that_the_file_does_not_know_is_an_error_and_no_unfair_time(llama: FakeLlama) -> None:
    with pytest.raises(TargetError, match="writes on after token 22"):
        _arm(stops=[22]).generate([PROMPT])


# --- errors ---


def test_what_llama_cpp_says_of_a_request_is_passed_on(llama: FakeLlama) -> None:
    arm = _arm()
    llama.error = "Prompt contains invalid tokens"
    with pytest.raises(TargetError, match="wrote no reply: Prompt contains invalid tokens"):
        arm.generate([PROMPT])


def test_a_file_llama_cpp_can_not_load_is_named(llama: FakeLlama) -> None:
    llama.loads = False
    with pytest.raises(TargetError, match=r"can't load tiny\.gguf"):
        _arm()


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(MissingExtra) as caught:
        gguf_of(TargetSettings(model=str(save_gguf(tmp_path / "tiny.gguf"))))
    assert caught.value.hint == extra_hint("llama-cpp")


@pytest.mark.usefixtures("llama")
def test_its_file_is_the_one_the_target_is_loaded_from(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    assert gguf_of(TargetSettings(model=str(file), device="cpu")) == file
    assert gguf_of(TargetSettings(model=str(tmp_path), device="cpu")) == file


@pytest.mark.usefixtures("llama")
def test_a_file_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("tiny", str(tmp_path), "tiny.gguf", tmp_path / "converted")
    monkeypatch.setattr(llama_cpp, "find_source", lambda name: source)
    with pytest.raises(TargetError, match=r"tiny\.gguf is gone: tiny was converted from it"):
        gguf_of(TargetSettings(model="tiny"))


@pytest.mark.usefixtures("llama")
def test_a_target_on_another_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(TargetError, match=r"runs on the CPU, and .*tiny\.gguf on cuda") as caught:
        gguf_of(TargetSettings(model=str(save_gguf(tmp_path / "tiny.gguf")), device="cuda"))
    assert "--device cpu" in caught.value.hint


@pytest.mark.usefixtures("llama")
def test_a_model_that_is_no_gguf_file_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(settings: TargetSettings) -> Any:
        raise AssertionError("the target was loaded first")

    monkeypatch.setattr(build, "load_target", load)
    settings = TargetSettings(model=str(save_tiny(tmp_path / "model")))
    with pytest.raises(TargetError, match=r"runs \.gguf files") as caught:
        build.build_arms(settings, DrafterChoice("ngram"), ["llama-cpp"], 8)
    assert "leave llama-cpp out" in caught.value.hint


def test_more_than_one_text_at_a_time_is_a_usage_error() -> None:
    done = run_here("bench", "--compare", "greedy,llama-cpp", "--batch-size", 2)
    assert done.code == 2
    assert "llama-cpp writes one text at a time" in done.err


# --- the real one ---


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("xllamacpp")
    return save_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(file: Path) -> Any:
    """The target's own model from the same file, in float32. Its random weights are wide: no logits are near a tie."""
    return load_unchecked(TargetSettings(model=str(file), dtype="float32", device="cpu", runner="eager")).model


def _real(file: Path, stops: set[int], budget: int) -> LlamaCppArm:
    arm = LlamaCppArm(file, StopRule(frozenset(stops), budget, 64), 1)
    arm.make_room(60)
    return arm


def test_the_real_one_writes_what_the_target_writes_from_unquantised_weights(
    file: Path, model: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    written = by_whole_forwards(model, PROMPT, 12)
    capfd.readouterr()
    arm = _real(file, set(), 12)
    assert list(arm.generate([PROMPT])[0].token_ids) == written
    arm.generate([[7] * 60])
    assert list(arm.generate([PROMPT])[0].token_ids) == written, "nothing of another prompt is left over"
    assert capfd.readouterr() == ("", "")


def test_the_real_one_fills_the_context_to_its_last_place(file: Path) -> None:
    assert len(_real(file, set(), 12).generate([list(range(3, 63))])[0].token_ids) == 4


def test_the_real_one_ends_at_the_end_of_text_or_goes_on_as_the_stop_rule_says(file: Path, model: Any) -> None:
    end, prompt = 2, [47, 9, 11]  # the file's end of text, and a prompt soon followed by it
    written = by_whole_forwards(model, prompt, 12)
    place = written.index(end)
    assert list(_real(file, {end}, 12).generate([prompt])[0].token_ids) == written[: place + 1]
    assert list(_real(file, set(), 12).generate([prompt])[0].token_ids) == written


def test_the_real_one_refuses_a_file_that_is_cut_off(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:9000])
    with pytest.raises(TargetError, match=r"can't load .*cut\.gguf"):
        _real(cut, set(), 12)
