"""A tiny config of any class in the library's mapping of causal language models.

What is small is decided by a field's name, so that an architecture nobody here has heard of is tried as well. The
thresholds that a text can cross (window, chunk, context) are made so small that a short text crosses them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.differential.odd import ODD, Odd
from tests.tiny_models import VOCAB

HIDDEN, HEADS, WIDTH, CONTEXT, WINDOW = 64, 4, 16, 96, 8
LAYERS, MORE_LAYERS = 2, 4  # more where layers are of several kinds
HALF, WIDER, EXPERTS, FEW = WIDTH // 2, 96, 4, 2

# size -> the names under which configs keep it
_NAMES: tuple[tuple[int, str], ...] = (
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    (
        HIDDEN,
        "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim lru_width "
        "attention_hidden_size input_embedding_size output_embedding_size adapter_in_dim adapter_out_dim "
        "adapter_input_size backbone_hidden_size",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
        "linear_num_heads linear_num_key_heads linear_num_value_heads index_n_heads",
    ),
    (
        WIDTH,
        "head_dim global_head_dim swa_head_dim dim_head d_head attention_head_size kv_channels linear_head_dim "
        "linear_key_head_dim linear_value_head_dim index_head_dim v_head_dim kv_lora_rank q_lora_rank o_lora_rank "
        "hidden_size_per_layer_input laurel_rank gated_norm_rank loop_gate_rank hc_lowrank router_hidden_size",
    ),
    (HALF, "qk_rope_head_dim qk_nope_head_dim rotary_dim"),
    (
        WIDER,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size dim_ff dff "
        "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp shared_experts_intermediate_size "
        "dense_intermediate_size expert_ffn_hidden_size shared_intermediate_size feed_forward_size d_inner "
        "moe_shared_expert_intermediate_size",
    ),
    (EXPERTS, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    (
        FEW,
        "num_experts_per_tok num_experts_per_token moe_topk moe_k n_group num_expert_group num_kv_heads "
        "num_key_value_heads swa_num_key_value_heads",
    ),
    (
        1,
        "topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers "
        "num_nextn_predict_layers moe_layer_start_index num_kv_shared_layers no_rope_layer_interval",
    ),
    (
        CONTEXT,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions "
        "model_max_length max_source_positions rel_extent prompt_length keep_window_size",
    ),
    (
        WINDOW,
        "sliding_window window_size attention_window_size sliding_window_size local_attention "
        "local_attention_window_len attention_chunk_size floor_scale log_scaling_n_floor index_topk",
    ),
)
_DEPTHS = [
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "num_blocks",
]
_SIZES = {name: size for size, names in _NAMES for name in names.split()}
# sizes whose None says that the class finds them by itself, which not every class does
_EVEN_WHERE_NONE = {
    "head_dim",
    "num_key_value_heads",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "n_routed_experts",
}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def model_types() -> list[str]:
    """The names of all architectures that the library loads as causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small config of this type that still has every kind of layer and every threshold; changes go to its text."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**_settings(kind, changes))


def _settings(kind: type[PreTrainedConfig], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What to ask the class for, parts within parts included."""
    odd = ODD.get(kind.model_type, Odd(""))
    whole = kind(**odd.needs)
    parts = {
        name: part for name in kind.sub_configs if isinstance(part := getattr(whole, name, None), PreTrainedConfig)
    }
    settings = {**dict(_shrunk(whole)), **odd.settings, **({} if _text_part(parts) else changes)}
    for name, part in parts.items():
        if name not in odd.settings:
            settings[name] = _settings(type(part), changes if name == _text_part(parts) else {})
            settings[name]["model_type"] = part.model_type
    return settings


def _text_part(parts: Mapping[str, Any]) -> str | None:
    """The part of a composite config that writes text."""
    return next((name for name in parts if name in ("text_config", "decoder")), None)


def _shrunk(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """A small value for each field whose name says a size, and each list that has a value for each layer."""
    fields = {name: value for name, value in config.to_dict().items() if name not in config.sub_configs}
    deep = next((fields[name] for name in _DEPTHS if isinstance(fields.get(name), int)), None)
    lists = {
        name: _kinds(value)
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == deep and not _are_layer_numbers(value)
    }
    depth = MORE_LAYERS if any(len(kinds) > 1 for kinds in lists.values()) else LAYERS
    for name, value in fields.items():
        if name in _TOKENS:
            yield name, _TOKENS[name]
        elif name in lists:
            small = [_small(name, kind) for kind in lists[name]]
            yield name, (small * depth)[:depth]
        elif name in _DEPTHS and value:
            yield name, depth
        elif name == "head_dim" and "qk_rope_head_dim" in fields:  # latent attention: the turned part alone
            yield name, HALF
        elif name == "num_key_value_heads" and value is not None and value == fields.get("num_attention_heads"):
            yield name, HEADS
        elif name in _SIZES and value is None and name in _EVEN_WHERE_NONE:
            yield name, _SIZES[name]
        elif _small(name, value) != value:
            yield name, _small(name, value)


def _small(name: str, value: Any) -> Any:
    """A number that a field's name says to be a size, made small; everything else as it is."""
    is_size = name in _SIZES and isinstance(value, int) and not isinstance(value, bool)
    return min(value, _SIZES[name]) if is_size else value


def _kinds(values: list[Any]) -> list[Any]:
    """Each value once, in the order in which they come."""
    return [value for place, value in enumerate(values) if value not in values[:place]]


def _are_layer_numbers(values: list[Any]) -> bool:
    return values == list(range(len(values)))
