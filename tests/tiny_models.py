"""Tiny random models of many architectures, targets made of them, and the texts they write.

The models' weights are large and their texts wander over the vocabulary, so that a wrong mask, position or cache
column shows in the next token. Shape letters: T positions, H hidden, O outputs, I inputs.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from gguf import GGMLQuantizationType, dequantize, quantize
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_cli.acceptance.random_streams import Stream, draw
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.model import attention as grouped
from medusa_cli.model.loading.load import make_target
from medusa_cli.model.target import Target

VOCAB = 97
WINDOW = 8
NUM_NEW = 24
SPARE = 8  # tokens of the known text past NUM_NEW: a draft may look ahead of the end
PROMPT_LENGTHS = (5, 17, 11)


@dataclass(frozen=True)
class Architecture:
    """A model type of the library with the settings that make it tiny, and the attention it has."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    attentions: tuple[str, ...] = ("eager", "sdpa", "grouped")


_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    # A tied matrix makes many a random model repeat its last token for ever; some below are tied all the same.
    "tie_word_embeddings": False,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}
_OLD = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 96,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
}

ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture("llama", _GROUPED),
        Architecture("mistral", {**_GROUPED, "sliding_window": WINDOW}),
        Architecture("mixtral", {**_GROUPED, "num_local_experts": 4, "sliding_window": None}),
        Architecture("qwen2", {**_GROUPED, "tie_word_embeddings": True}),
        Architecture("qwen3", _GROUPED),
        Architecture("qwen3_moe", {**_GROUPED, **_EXPERTS, "num_experts": 4}),
        Architecture("gemma", _GROUPED),
        Architecture("gemma2", {**_GROUPED, **_SLIDING}, ("eager",)),
        Architecture("gemma3_text", {**_GROUPED, **_SLIDING}),
        Architecture("gpt_oss", {**_GROUPED, **_SLIDING, "num_local_experts": 4}, ("eager",)),
        Architecture("smollm3", {**_GROUPED, "no_rope_layers": [1, 0]}),
        Architecture("olmo2", _GROUPED),
        Architecture("cohere", {**_GROUPED, "tie_word_embeddings": True}),
        Architecture("granite", {**_GROUPED, "logits_scaling": 4.0, "tie_word_embeddings": True}),
        Architecture("granite_swa", {**_GROUPED, **_SLIDING}, ("eager",)),
        Architecture("starcoder2", {**_GROUPED, "sliding_window": WINDOW}),
        Architecture("stablelm", {**_GROUPED, "partial_rotary_factor": 0.5}),
        Architecture("phi", {**_GROUPED, "partial_rotary_factor": 0.5}),
        Architecture("phi3", {**_GROUPED, "sliding_window": WINDOW, "pad_token_id": 0}),
        Architecture("gpt_neox", {**_COMMON, "rotary_pct": 0.5}),
        Architecture("gptj", {**_OLD, "rotary_dim": 4}),
        Architecture("gpt2", _OLD),
        Architecture("opt", {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 24}),
        Architecture("falcon", {**_COMMON, "multi_query": True, "alibi": False}, ("eager", "sdpa")),
        Architecture(
            "deepseek_v3",
            {
                **_COMMON,
                "num_key_value_heads": 4,
                "q_lora_rank": 16,
                "kv_lora_rank": 8,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 12,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                **_EXPERTS,
            },
        ),
    )
}


@functools.cache
def tiny_model(name: str, **changes: Any) -> Any:
    """A model of this architecture with eager attention, in eval mode; shared, so never changed by a test."""
    return made_of(ARCHITECTURES[name], **changes)


def made_of(architecture: Architecture, **changes: Any) -> Any:
    """A model as `tiny_model` gives, of its own."""
    model = _built(_config_of(architecture, **changes), "eager")
    rng = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            # Gains and biases move a little; matrices are large enough for sharp attention.
            numbers = 1.5 * noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else parameter + 0.1 * noise
            parameter.copy_(numbers)
    return model


def tiny_config_of(name: str, **changes: Any) -> Any:
    """The config of such a model."""
    return _config_of(ARCHITECTURES[name], **changes)


def _config_of(architecture: Architecture, **changes: Any) -> Any:
    settings = {**architecture.settings, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **changes}
    return AutoConfig.for_model(architecture.model_type, **settings)


@functools.cache
def counting_model(period: int, sure: float = 4.0) -> Any:
    """A llama that mostly writes t + 1 after token t, and 0 after period - 1: soon its text repeats itself.

    At `sure` = 4 it never does otherwise.
    """
    model = copy.deepcopy(tiny_model("llama"))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.05)
        layer.mlp.down_proj.weight.mul_(0.05)
    directions_TH = torch.nn.functional.normalize(model.model.embed_tokens.weight[:period], dim=1)
    model.lm_head.weight.zero_()
    model.lm_head.weight[:period] = sure * directions_TH.roll(1, 0)
    return model


@functools.cache
def quantised_model() -> Any:
    """A llama whose linear layers hold what a Q4_1 file would give back; the output matrix is Q8_0."""
    model = copy.deepcopy(tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            kind = GGMLQuantizationType.Q8_0 if name == "lm_head" else GGMLQuantizationType.Q4_1
            module.weight.copy_(on_grid(module.weight, kind))
    return model


def on_grid(weight_OI: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """The weight as a file of this kind gives it back."""
    return torch.from_numpy(dequantize(quantize(weight_OI.detach().numpy(), kind), kind))


def target_of(
    model: Any, attention: str = "eager", runner: str = "eager", tokenizer: Any = None, dtype: str = "float32"
) -> Target:
    """A target over a copy of the model with this attention, wrapped as `load_target` does."""
    mine = _built(model.config, grouped.register() if attention == "grouped" else attention)
    mine.load_state_dict(model.state_dict())
    mine.generation_config = copy.deepcopy(model.generation_config)
    return make_target(mine, tokenizer, TargetSettings(model="tiny", dtype=dtype, device="cpu", runner=runner))


def _built(config: Any, attention: str) -> Any:
    """A model of its own, config included."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random ids."""
    rng = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB, (length,), generator=rng).tolist()


def greedy_of(model: Any, prompt: Sequence[int], num_new: int) -> list[int]:
    """The new ids of the library's own greedy generation, one forward a token and the library's cache."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def by_whole_forwards(model: Any, prompt: Sequence[int], num_new: int) -> list[int]:
    """The new ids of greedy decoding that reads the whole text anew for every token, and knows no end."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_new):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def final_hidden(model: Any, ids: Sequence[int]) -> Tensor:
    """What the library's plain forward over one text gives to the output matrix [T, H]."""
    seen = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(torch.tensor([list(ids)]))
    hook.remove()
    return seen[0][0]


@dataclass(frozen=True)
class Known:
    """Prompts, and the greedy text after each: NUM_NEW tokens and SPARE more."""

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def texts(self) -> list[list[int]]:
        """Prompt and answer together, as the drafters below want them."""
        return [[*prompt, *answer] for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    def wanted(self, num_rows: int, num_new: int = NUM_NEW) -> list[list[int]]:
        """What decoding must give for the first rows."""
        return [list(answer[:num_new]) for answer in self.answers[:num_rows]]


@functools.cache
def known(name: str, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> Known:
    """Prompts of these lengths and what `transformers` writes after them with eager attention."""
    prompts = tuple(tuple(prompt_of(length)) for length in lengths)
    answers = tuple(tuple(greedy_of(tiny_model(name), prompt, NUM_NEW + SPARE)) for prompt in prompts)
    return Known(prompts, answers)


SEED = 5
SAMPLED = (0.8, 0.9, 0)  # temperature, top-p, top-k


@functools.cache
def sampled(name: str, settings: tuple[float, float, int] = SAMPLED) -> Known:
    """Prompts, and what the library's forward and warpers alone draw after them, one token after the other."""
    prompts = tuple(tuple(prompt_of(length)) for length in PROMPT_LENGTHS)
    return Known(prompts, tuple(_sampled(name, key, prompt, settings) for key, prompt in enumerate(prompts)))


def _sampled(name: str, key: int, prompt: Sequence[int], settings: tuple[float, float, int]) -> tuple[int, ...]:
    temperature, top_p, top_k = settings
    warpers = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(temperature)])
    warpers += [hf.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    ids = torch.tensor([list(prompt)])
    for number in Stream(SEED, key).numbers(0, NUM_NEW + SPARE):
        p_1V = warpers(ids, tiny_model(name)(ids).logits[:, -1].float()).softmax(-1)
        token = int(draw(p_1V, torch.tensor([number], dtype=torch.float64)))
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    return tuple(ids[0, len(prompt) :].tolist())
