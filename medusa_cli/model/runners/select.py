"""The runner that a target gets: the one asked for, or what `auto` finds to be the quickest here.

A runner is a layout of the linear layers (model/runners/kinds.py), and for some a forward over a few nodes of its own.
"""

import logging
from dataclasses import replace
from typing import Any

import torch

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import TargetError
from medusa_cli.kernels.native import CannotCompile
from medusa_cli.kernels.packed import can_pack
from medusa_cli.model import attention
from medusa_cli.model.device import IN_INTEGERS
from medusa_cli.model.runners import compiled
from medusa_cli.model.runners.autotune import is_quicker, quickest_layout, try_steps
from medusa_cli.model.runners.cuda_graphs import GraphedForward, on_cuda
from medusa_cli.model.runners.kinds import RUNNERS, why_no_blocks
from medusa_cli.model.target import Target
from medusa_cli.util.paths import say_once

NOT_COMPILED = (
    "the compiled runner, most often the quickest, isn't built here: --runner compiled builds it once, in minutes, and "
    "runner auto takes it from then on where it is quicker"
)

logger = logging.getLogger(__name__)


def runner_for(model: Any, settings: TargetSettings, fingerprint: str) -> str:
    """The runner asked for, or what `auto` finds. Raises TargetError for one that can't be."""
    if settings.quantize != "none" or settings.device_map != "one":
        return "eager"
    weight = model.get_input_embeddings().weight
    wanted = choose_runner(settings.runner, weight.device, weight.dtype)
    if wanted != "auto":
        return wanted
    if settings.dtype == IN_INTEGERS:
        return "compiled" if is_compiled(model) else "blocks"
    return "compiled" if is_compiled(model) else quickest_layout(model, fingerprint, blocks=why_no_blocks() is None)


def choose_runner(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """`auto` stays as it is where layers can be replaced, to be found out; on a GPU it is graphs, else eager."""
    if wanted != "auto" and RUNNERS[wanted].packs and not can_pack(device, dtype):
        raise TargetError(f"the {wanted} runner needs float32 on a CPU, not {dtype} on {device}", "use --runner eager")
    if wanted == "graphs" and device.type != "cuda":
        raise TargetError(f"the graphs runner needs a CUDA device, not {device}", "use --runner auto")
    if wanted != "auto" or can_pack(device, dtype):
        return wanted
    return "graphs" if device.type == "cuda" else "eager"


def is_compiled(model: Any) -> bool:
    """Whether an earlier run compiled the forward of models like this one on this machine."""
    if model.config._attn_implementation != attention.NAME:
        return False
    try:
        return compiled.is_built(compiled.folder_of(model))
    except CannotCompile:
        return False


def could_compile(target: Target) -> bool:
    """Whether `--runner compiled` may be had, and nobody asked for it on this machine: `auto` can't weigh it yet."""
    runner = RUNNERS[target.identity.runner]
    if not runner.packs or runner.without is not None or not target.attends_natively:
        return False
    try:
        return not compiled.is_built(compiled.folder_of(target.model))
    except CannotCompile:
        return False


def attach_forward(target: Target, *, by_measurement: bool) -> None:
    """Give the target the forward that its runner has of its own, if any. Raises TargetError where that can't be.

    by_measurement   leave it out again where it can't be recorded, or steps are quicker without
    """
    attach = {"compiled": attach_compiled, "graphs": attach_graphs}.get(target.identity.runner)
    if attach is not None and target.tables.vary:
        if not by_measurement:
            raise TargetError(
                f"the {target.identity.runner} runner can't run {target.name}: its rotary table changes with the "
                "length of each text, and a program knows one",
                "use --runner auto",
            )
        _leave_out_forward_of(target.identity.runner, target)
    elif attach is not None:
        attach(target, by_measurement=by_measurement)


def attach_compiled(target: Target, *, by_measurement: bool = False) -> None:
    """Compile the target's forward over a few nodes, unless an earlier run did. Raises TargetError where it can't.

    by_measurement   leave it out again where steps are quicker without
    """
    if not target.attends_natively:
        raise TargetError(
            f"the compiled runner can't run {target.name}: its attention ({target.identity.attention}) has no kernel",
            "use --runner auto",
        )

    try:
        forward = compiled.CompiledForward(target.stock, compiled.build(target.model, target.mask_mapping))
        target.use(forward)
        keep = not by_measurement or is_quicker(target, "compiled", forward)
    # compilers and loaders of any origin run here, on modelling code of any origin, and fail in their own ways
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        if not by_measurement:
            raise TargetError(f"the compiled runner can't run {target.name}: {reason}", "use --runner auto") from error
        say_once(f"steps are slower than they could be: the compiled program of {target.name} can't be run: {reason}")
        keep = False
    if not keep:
        _leave_out_forward_of("compiled", target)


def attach_graphs(target: Target, *, by_measurement: bool = False) -> None:
    """Record the target's forwards over a few nodes from now on. Raises TargetError where that can't be.

    by_measurement   leave it out again where it can't be, or steps are quicker without
    """
    forward = GraphedForward(target.at, on_cuda(target.device), target.device)
    target.use(forward)
    try:
        try_steps(target)
        keep = not by_measurement or is_quicker(target, "graphs", forward)
    except RuntimeError as error:
        if not by_measurement:
            reason = " ".join(str(error).split())[:200]
            raise TargetError(
                f"the graphs runner can't run {target.name}: {reason}", "use --runner auto, or eager"
            ) from error
        logger.info("no CUDA graphs of %s: %s", target.name, error)
        keep = False
    if not keep:
        _leave_out_forward_of("graphs", target)


def _leave_out_forward_of(runner: str, target: Target) -> None:
    """The stock forward alone, and the runner that it is then."""
    target.use()
    without = RUNNERS[runner].without
    assert without is not None
    target.identity = replace(target.identity, runner=without)
