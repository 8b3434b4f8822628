"""Tiny random models as the folders and files a user would name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 97
CHAT_TEMPLATE = "{% for message in messages %}w1 {{ message.content }} w2 {% endfor %}"

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}
_OLD = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _OLD,
    "opt": {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {**_COMMON, "alibi": False},
    "bert": _COMMON,
}


def tiny_config(model_type: str = "llama", **changes: Any) -> Any:
    """A config of this type; `changes` go over its settings here."""
    return AutoConfig.for_model(model_type, **{**SETTINGS.get(model_type, _GROUPED), **changes})


def tiny_model(model_type: str = "llama", attention: str = "eager", **changes: Any) -> Any:
    """A random causal language model in float32, the same each time."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def tiny_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Words w0 to w96 are their own tokens; w2 ends a text."""
    core = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w2", pad_token="w0", unk_token="w0")
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny(folder: Path, model_type: str = "llama", chat_template: str | None = None, **changes: Any) -> Path:
    """A whole model folder: config, weights, tokenizer."""
    tiny_model(model_type, **changes).save_pretrained(folder)
    tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder


def save_gguf(
    file: Path, said: Mapping[str, str | float | int] | None = None, tensors: Mapping[str, Any] | None = None
) -> Path:
    """A tiny llama of one layer as a GGUF file, by the rules of that format; `said` and `tensors` are added to it."""
    import gguf

    hidden, heads, inner = 32, 4, 48
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(f"w{number}" for number in range(VOCAB - 2)), "w", "1"])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["w 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (said or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint16}[type(value)]
        add(key, value)
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, numbers)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (VOCAB, hidden),
        **{f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "output_norm": (hidden,),
        "output": (VOCAB, hidden),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
