"""`import medusa_cli as medusa`: what it writes is what `medusa generate` writes; a tiny model, and heads for it."""

import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, StoppingCriteria

import medusa_cli as medusa
from tests.cli.harness import ROOT, Medusa

PROMPTS = ["Write a story about the sea.", "What is it?", "A user of the assistant, and what else there may be"]
SAMPLED = {"temperature": 1.3, "top_p": 0.9, "seed": 5}


@pytest.fixture
def fast(tiny: Path, heads: Path) -> medusa.Medusa:
    return medusa.load(str(tiny), heads=heads, dtype="float32", speculate="on")


@pytest.fixture
def hf_model(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)


@pytest.fixture
def attached(hf_model: Any, tiny: Path, heads: Path) -> medusa.Medusa:
    return medusa.attach(hf_model, AutoTokenizer.from_pretrained(tiny), heads=heads, speculate="on")


@pytest.fixture
def inputs(tiny: Path) -> dict[str, torch.Tensor]:
    """Prompts of three lengths, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    return {
        name: found
        for name, found in tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left").items()
        if name in ("input_ids", "attention_mask")
    }


def test_importing_it_loads_nothing_heavy_and_names_all_there_is() -> None:
    program = (
        "import sys, medusa_cli as medusa; heavy = {'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy; assert set(medusa.__all__) <= set(dir(medusa)); medusa.MedusaError;"
        "assert 'torch' not in sys.modules; medusa.load; assert 'torch' in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert all(getattr(medusa, name) is not None for name in medusa.__all__)
    with pytest.raises(AttributeError, match="no attribute 'generate'"):
        medusa.generate  # noqa: B018


def test_a_wheel_says_that_it_is_typed_and_holds_the_page(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    assert subprocess.run(build, cwd=ROOT, capture_output=True).returncode == 0
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "medusa_cli/py.typed" in names
    assert {Path(name).suffix for name in names if "/serve/page/" in name} == {".html", ".css", ".js"}


@pytest.mark.parametrize("options", [{}, SAMPLED, {"stop": "e"}, {"ignore_eos": True, "repetition_penalty": 1.3}])
def test_texts_are_those_of_the_command_line(
    options: dict[str, Any], fast: medusa.Medusa, generate: Medusa, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    flags = [
        part
        for name, value in options.items()
        for part in ((f"--{name.replace('_', '-')}",) if value is True else (f"--{name.replace('_', '-')}", value))
    ]
    wanted = generate("--prompt-file", file, "--json", *flags).document
    replies = fast.generate(PROMPTS, max_new_tokens=40, **options)
    named = ("text", "token_ids", "finish_reason", "num_steps", "tokens_per_step")
    assert [vars(reply) for reply in replies] == [{name: one[name] for name in named} for one in wanted]


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_a_stream_joins_to_the_reply(options: dict[str, Any], fast: medusa.Medusa) -> None:
    (reply,) = fast.generate(PROMPTS[0], max_new_tokens=40, **options)
    pieces = list(fast.stream(PROMPTS[0], max_new_tokens=40, **options))
    assert "".join(pieces) == reply.text
    assert len(pieces) > 1


def test_messages_are_a_prompt_and_a_string_is_what_a_user_says(fast: medusa.Medusa) -> None:
    said = [{"role": "user", "content": PROMPTS[0]}]
    with_system = [{"role": "system", "content": "user"}, *said]
    alone = fast.generate(said, max_new_tokens=8)
    assert alone == fast.generate(PROMPTS[0], max_new_tokens=8) == fast.generate([said], max_new_tokens=8)
    assert fast.generate([PROMPTS[0], with_system], max_new_tokens=8)[1] != alone[0]
    assert fast.generate([], max_new_tokens=8) == []


def test_a_stream_closed_early_frees_its_row_and_others_go_on(fast: medusa.Medusa) -> None:
    (wanted,) = fast.generate(PROMPTS[1], max_new_tokens=40)
    other = fast.stream(PROMPTS[1], max_new_tokens=40)
    stream = fast.stream(PROMPTS[0], max_new_tokens=200, ignore_eos=True)
    begun = next(other) + (next(stream) and "")
    assert fast.stats().rows == 2
    stream.close()
    assert fast.stats().rows == 1
    assert begun + "".join(other) == wanted.text
    assert fast.stats().rows == 0


def test_streams_read_in_turn_and_threads_write_what_each_writes_alone(fast: medusa.Medusa) -> None:
    wanted = [fast.generate(prompt, max_new_tokens=30, **SAMPLED)[0].text for prompt in PROMPTS]
    streams, texts = [fast.stream(prompt, max_new_tokens=30, **SAMPLED) for prompt in PROMPTS], ["", "", ""]
    while any(pieces := [next(stream, "") for stream in streams]):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts == wanted
    found: dict[int, str] = {}

    def write(index: int) -> None:
        found[index] = "".join(fast.stream(PROMPTS[index], max_new_tokens=30, **SAMPLED))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(3)] == wanted


def test_a_step_that_breaks_off_loses_what_was_in_it_and_nothing_after(
    fast: medusa.Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wanted,) = fast.generate(PROMPTS[1], max_new_tokens=20)
    other = fast.stream(PROMPTS[0], max_new_tokens=200, ignore_eos=True)
    next(other)
    with monkeypatch.context() as patch:
        patch.setattr("medusa_cli.decode.engine.Engine.step", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fast.generate(PROMPTS[1], max_new_tokens=20)
    with pytest.raises(medusa.DataError, match="the text is lost"):
        list(other)
    assert fast.generate(PROMPTS[1], max_new_tokens=20) == [wanted]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"temperature": -1.0}, medusa.RecipeError, "temperature"),
        ({"temperature": 1.0, "top_p": 2.0}, medusa.RecipeError, "top_p"),
        ({"max_new_tokens": 0}, medusa.RecipeError, "max_new_tokens"),
        ({"stop": ""}, medusa.RecipeError, "empty stop string"),
        ({"best_of": 3}, TypeError, "best_of"),
    ],
)
def test_options_that_mean_nothing_are_named(
    options: dict[str, Any], error: type[Exception], match: str, fast: medusa.Medusa
) -> None:
    with pytest.raises(error, match=match):
        fast.generate(PROMPTS, **options)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [("  ", "empty"), ([{"role": "user"}], "neither text nor messages"), ("\ud800", "halves"), (3, "neither")],
)
def test_prompts_that_cannot_be_asked_are_refused(prompt: Any, match: str, fast: medusa.Medusa) -> None:
    with pytest.raises(medusa.DataError, match=match):
        fast.stream(prompt)


def test_what_cannot_be_loaded_is_said_in_errors_of_ours(tiny: Path) -> None:
    with pytest.raises(medusa.TargetError, match="unknown model"):
        medusa.load("no-such-model")
    with pytest.raises(medusa.RecipeError, match="target.colour"):
        medusa.load(str(tiny), colour="blue")
    with pytest.raises(medusa.RecipeError, match="batch_size"):
        medusa.load(str(tiny), dtype="float32", batch_size=0)


def test_an_attached_model_writes_the_same_and_keeps_its_own_ways(
    fast: medusa.Medusa, hf_model: Any, inputs: dict[str, torch.Tensor], tiny: Path, heads: Path
) -> None:
    before = hf_model.generate(**inputs, max_new_tokens=20, do_sample=False)
    places = {name: parameter.data_ptr() for name, parameter in hf_model.named_parameters()}
    asks = {name: parameter.requires_grad for name, parameter in hf_model.named_parameters()}
    attached = medusa.attach(hf_model, AutoTokenizer.from_pretrained(tiny), heads=heads)
    assert [one.token_ids for one in attached.generate(PROMPTS, max_new_tokens=20)] == [
        one.token_ids for one in fast.generate(PROMPTS, max_new_tokens=20)
    ]
    assert places == {name: parameter.data_ptr() for name, parameter in hf_model.named_parameters()}
    assert asks == {name: parameter.requires_grad for name, parameter in hf_model.named_parameters()}
    assert torch.equal(before, hf_model.generate(**inputs, max_new_tokens=20, do_sample=False))
    hf_model.train()
    with pytest.raises(medusa.TargetError, match="training mode"):
        attached.generate(PROMPTS[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 60, "max_new_tokens": None},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
        {"eos_token_id": list(range(0, 300, 7)), "pad_token_id": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(0, 300, 7)), "pad_token_id": 2},
    ],
)
def test_transformers_generate_gives_the_same_ids_through_ours(
    options: dict[str, Any], attached: medusa.Medusa, hf_model: Any, inputs: dict[str, torch.Tensor]
) -> None:
    asked = {"do_sample": False, "max_new_tokens": 24, **options}
    wanted = hf_model.generate(**inputs, **asked)
    assert torch.equal(hf_model.generate(**inputs, **asked, custom_generate=attached.custom_generate), wanted)


def test_transformers_sampling_is_repeated_by_its_seed_and_follows_its_settings(
    attached: medusa.Medusa, hf_model: Any, inputs: dict[str, torch.Tensor]
) -> None:
    def drawn(seed: int, **options: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        asked = {"do_sample": True, "max_new_tokens": 24, **options}
        return hf_model.generate(**inputs, **asked, custom_generate=attached.custom_generate)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    greedy = hf_model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert torch.equal(drawn(3, top_k=1), greedy), "the best token alone"
    assert torch.equal(drawn(3, min_p=1.0), greedy), "so too where the library's own processors do it"
    assert len(drawn(4, num_return_sequences=2)) == 2 * len(PROMPTS)


class _Mine(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class _End(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.ones(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"max_time": 3.0}, "max_time"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"logits_processor": LogitsProcessorList([_Mine()])}, "_Mine"),
        ({"stopping_criteria": [_End()]}, "_End"),
        ({"prefix_allowed_tokens_fn": lambda *_: [1]}, "PrefixConstrained"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(
    options: dict[str, Any], match: str, attached: medusa.Medusa, hf_model: Any, inputs: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(medusa.RecipeError, match=match):
        hf_model.generate(**inputs, max_new_tokens=4, custom_generate=attached.custom_generate, **options)


def test_padding_on_the_right_and_another_model_are_refused(
    attached: medusa.Medusa, hf_model: Any, tiny: Path, inputs: dict[str, torch.Tensor]
) -> None:
    right = {name: one.flip(1) for name, one in inputs.items()}
    with pytest.raises(medusa.RecipeError, match="padding on the left"):
        hf_model.generate(**right, max_new_tokens=4, custom_generate=attached.custom_generate)
    with pytest.raises(medusa.RecipeError, match="another model"):
        AutoModelForCausalLM.from_pretrained(tiny).generate(
            **inputs, max_new_tokens=4, custom_generate=attached.custom_generate
        )


@pytest.fixture
def page(tiny: Path, heads: Path) -> Callable[[], list[str]]:
    """The page's examples; the tiny model and its heads stand in for the names of real ones, nothing else differs."""
    stands_in = {
        '"smollm2-135m"': repr(str(tiny)),
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': repr(str(tiny)),
        '"runs/mine"': repr(str(heads)),
    }

    def examples() -> list[str]:
        found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)
        for name, folder in stands_in.items():
            assert any(name in example for example in found), name
            found = [example.replace(name, folder) for example in found]
        return found

    return examples


def test_the_examples_of_the_page_run(page: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for example in page():
        exec(compile(example, "docs/python.md", "exec"), names)
    assert "unknown model 'no-such-model'" in capsys.readouterr().out


def test_the_page_tells_every_option_and_its_default() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    rows = {name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)}
    assert set(medusa.Options.__annotations__) <= rows
