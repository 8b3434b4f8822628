"""What shrinking by a field's name gets wrong, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Odd:
    """Settings of one config class that its fields' names don't give.

    why       what fails without them
    settings  said to the class
    needs     without these the class can't even be made at its own size
    """

    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)


_ASSISTANT = Odd(
    "a part with own rules: no embeddings for each layer, all layers share keys",
    {
        "backbone_hidden_size": 64,
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 64,
            "hidden_size_per_layer_input": 0,
            "vocab_size": 97,
            "vocab_size_per_layer_input": 0,
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "intermediate_size": 96,
            "sliding_window": 8,
        },
    },
    {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
)

ODD: Mapping[str, Odd] = {
    "cohere_compass_text": Odd(
        "rope_parameters of each kind of layer have no default",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "rope_parameters": {"sliding_attention": _PLAIN_ROPE, "full_attention": _PLAIN_ROPE},
        },
    ),
    "dbrx": Odd(
        "its attention wants rope_theta and clip_qkv, which its config doesn't hold",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96},
        },
    ),
    "dory": Odd(
        "its config counts each layer twice, and its parts must add up",
        {
            "num_hidden_layers": 4,
            "n_input_layers": 1,
            "n_recurrent_layers": 2,
            "n_output_layers": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "dots1": Odd("n_shared_experts has no default", {"n_shared_experts": 1}),
    "gemma4_assistant": _ASSISTANT,
    "lfm2_moe": Odd("layer_types has no default", {"layer_types": ["full_attention", "conv"]}),
    "mamba2": Odd("heads times their width must be hidden_size times expand", {"num_heads": 8, "head_dim": 16}),
    "reformer": Odd(
        "a causal model only as a decoder; axial positions are factors of the context",
        {"is_decoder": True, "axial_pos_embds": False},
    ),
    "xmod": Odd("wants to be told the language", {"default_language": "en_XX"}),
}
