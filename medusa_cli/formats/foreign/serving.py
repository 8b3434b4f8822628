"""How an exported folder is served: the command of the tool that reads it, and the README beside the heads."""

import json
from collections.abc import Sequence
from shlex import quote

from medusa_cli.heads.config import MedusaConfig

MARK = "<!-- written by medusa export -->"  # tells an export from another folder
PLACE = "DIR"  # where this folder is: whoever reads the README knows
_TITLES = {
    "fasterdecoding": "FasterDecoding's Medusa",
    "trtllm": "TensorRT-LLM",
    "tgi": "Text Generation Inference",
    "vllm": "vLLM",
    "medusa2": "FasterDecoding's Medusa, merged",
}
_VERSIONS = {
    "fasterdecoding": "Heads of version 1: each has an output of its own in the file.",
    "trtllm": "Releases that have the speculative decoding mode `medusa`; later ones dropped it.",
    "tgi": "The folder must not be given an `architectures` or a `model_type` in config.json.",
    "vllm": "Releases up to 0.32; later ones read no Medusa heads.",
    "medusa2": "A whole model: it is loaded from this folder, tokenizer included.",
}


def command_for(tool: str, folder: str, config: MedusaConfig, choices: str | None) -> str:
    """The command line.

    folder    where the heads are, or what stands for it; the model is the one that the config names
    choices   TensorRT-LLM's tree
    """
    heads, layers, base, place = config.num_heads, config.num_layers, quote(config.target_name), quote(folder)
    if tool == "vllm":
        settings = json.dumps({"method": "medusa", "model": folder, "num_speculative_tokens": heads})
        return f"vllm serve {base} --speculative-config {quote(settings)}"
    if tool == "tgi":
        return f"text-generation-launcher --model-id {place} --speculate {heads}"
    if tool == "trtllm":
        nodes = len(json.loads(choices or "[]"))
        return (
            f"python convert_checkpoint.py --model_dir {base} --medusa_model_dir {place} --output_dir CHECKPOINT "
            f"--dtype float16 --num_medusa_heads {heads} --num_medusa_layers {layers} --max_medusa_token_len {nodes} "
            "&& trtllm-build --checkpoint_dir CHECKPOINT --speculative_decoding_mode medusa --output_dir ENGINE && "
            f"python run.py --engine_dir ENGINE --tokenizer_dir {base} --temperature 0 --medusa_choices '{choices}'"
        )
    return f"python -m medusa.inference.cli --model {place}"


def how_to_serve(tool: str, config: MedusaConfig, choices: str | None, notes: Sequence[str]) -> str:
    """README.md of the folder."""
    told = "".join(f"- {note}.\n" for note in notes)
    return (
        f"{MARK}\n# Medusa heads as {_TITLES[tool]} reads them\n\n"
        f"{config.num_heads} heads of {config.num_layers} blocks for `{config.target_name}`. {_VERSIONS[tool]}\n\n"
        f"```\n{command_for(tool, PLACE, config, choices)}\n```\n\n`{PLACE}` is this folder.\n"
        + (f"\nWhat became of the heads:\n\n{told}" if told else "")
    )
