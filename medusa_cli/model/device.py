"""Device and dtype of a target: those asked for, or what this machine is best at. Needs no model."""

import torch

from medusa_cli.errors import TargetError

IN_INTEGERS = "int8"  # the dtype whose linear layers multiply in integers


def choose_device(wanted: str) -> torch.device:
    """`auto` is the first GPU, else the CPU."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda"):
        present = torch.cuda.device_count()
        index = int(wanted.partition(":")[2] or 0)
        if index >= present:
            raise TargetError(
                f"device {wanted} is not there: torch sees {present} CUDA devices", "use --device cpu, or auto"
            )
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise TargetError("device mps is not there: this torch or this machine has none", "use --device cpu, or auto")
    return torch.device(wanted)


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the machine multiplies matrices in it, else float32."""
    if wanted == IN_INTEGERS:
        if device.type != "cpu":
            raise TargetError(f"dtype int8 runs on a CPU, not on {device}", "use --device cpu, or another dtype")
        return torch.float32  # of all that isn't a product with weights
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "cpu" and torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    return torch.float32
