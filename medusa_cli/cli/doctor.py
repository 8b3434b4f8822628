"""`medusa doctor`: what this machine and this model are like, and whether the model can verify trees at all."""

import math
import os
import platform
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli import __version__
from medusa_cli.cli import options
from medusa_cli.cli.console import Console
from medusa_cli.util.phases import Phases

if TYPE_CHECKING:
    import torch

    from medusa_cli.config.recipe import TargetSettings
    from medusa_cli.model.loading.self_check import CheckResult
    from medusa_cli.model.target import Target


def command(
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    target: options.Target,
    heads: options.Heads = None,
    threads: options.Threads = None,
    config: options.Config = None,
    output: options.Output,
) -> None:
    """Say what this machine and a model are like, and check that the model can verify trees."""
    from medusa_cli.config.loading import load_recipe

    flag = target["target.model"]
    if name is not None and flag not in (None, name):
        raise typer.BadParameter(f"MODEL is {name} and --model is {flag}; give one")
    settings = load_recipe(config, (), target | {"target.model": flag if name is None else name}).target
    console = output.console
    phases = Phases("the command line")
    # said before the model is looked for: a report of what failed needs it
    versions = _versions(phases)
    _show(console, "versions", ", ".join(f"{package} {version}" for package, version in versions.items()))
    document = {"versions": versions, **_examine(settings, heads, console, phases)}
    console.print_json(document, output.output_json)
    if not document["self_check"]["ok"] or document["template_error"]:
        raise typer.Exit(1)


def _examine(settings: "TargetSettings", heads: str | None, console: Console, phases: Phases) -> dict[str, Any]:
    """Load, describe and check the model; prints as it goes and returns the document."""
    from dataclasses import asdict

    from medusa_cli.assemble import adapter_of, find_heads
    from medusa_cli.errors import TargetError
    from medusa_cli.model.loading.load import load_unchecked
    from medusa_cli.model.loading.self_check import require, self_check
    from medusa_cli.util.busy import Meter

    meter = Meter()
    with console.waiting(f"loading {settings.model}"):
        target = load_unchecked(settings, adapter_of(find_heads(heads, settings.model)), phases)
    phases("heads")
    found = _heads(heads, target)
    start = phases.seconds()
    document = {**_machine(settings, target), **_model(target), "heads": found, "start": start}
    if target.identity.adapter:
        document["adapter"] = str(target.identity.adapter)
    for label, text in _lines(document).items():
        _show(console, label, text)
    if console.verbose:
        _show(console, "start", _start(start))
    console.info("self-check: a tree and each of its paths …")
    result = self_check(target)
    document["self_check"] = asdict(result)
    contention = meter.read()
    document["contention"] = contention.document()
    _show(console, "machine", contention.in_words())
    _show(console, "self-check", _verdict(result))
    try:
        require(target, result)
    except TargetError as error:
        document["self_check"]["error"] = error.message
        console.error(error)
    document["template_error"] = _template_error(target, console)
    return document


def _template_error(target: "Target", console: Console) -> str | None:
    """Why the model can't read what its chat template makes of a short prompt, told; None when it can."""
    from medusa_cli.data.conversations import Message
    from medusa_cli.decode.chat import ids_of
    from medusa_cli.errors import MedusaError

    try:
        target.check_ids([ids_of(target, [Message("user", "Hi")])])
    except MedusaError as error:
        console.error(error)
        return error.message
    return None


def _start(seconds: dict[str, float]) -> str:
    """Where the time of the start went."""
    return f"{sum(seconds.values()):.1f} s of CPU: " + ", ".join(f"{name} {each:.2f}" for name, each in seconds.items())


def _versions(phases: Phases) -> dict[str, str]:
    """Versions of what the result may depend on."""
    phases("importing torch")
    import torch

    phases("importing transformers")
    import transformers

    return {
        "medusa": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _machine(settings: "TargetSettings", target: "Target") -> dict[str, Any]:
    """Where and how the model runs."""
    import torch

    from medusa_cli.model.runners.kinds import why_no_blocks
    from medusa_cli.model.runners.select import could_compile
    from medusa_cli.util.busy import SPINNING, how_threads_wait

    device = target.device
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "threads_wait": how_threads_wait(os.environ) or SPINNING,
        "dtype": target.dtype_name,
        "dtype_reason": _why_dtype(settings.dtype, device, target.dtype),
        "attention": target.identity.attention,
        "runner": target.identity.runner,
        "no_kernels": why_no_blocks(),
        "could_compile": settings.runner == "auto" and could_compile(target),
    }


def _why_dtype(wanted: str, device: "torch.device", dtype: "torch.dtype") -> str:
    """Why `choose_dtype` took this one."""
    import torch

    if wanted != "auto":
        return "as asked for"
    if device.type == "cuda":
        return "this GPU multiplies matrices in it" if dtype == torch.bfloat16 else "this GPU has no bfloat16"
    if dtype == torch.bfloat16:
        return "this CPU multiplies matrices in it (AMX)"
    return "this machine has no fast bfloat16"


def _model(target: "Target") -> dict[str, Any]:
    """What the model is and what it needs."""
    from medusa_cli.model.weights import held_bytes, num_weights

    layer_types = getattr(target.config, "layer_types", None)
    kinds = (
        Counter(layer_types)
        if layer_types and len(target.kinds) > 1
        else dict.fromkeys(target.kinds, target.num_layers)
    )
    return {
        "model": target.name,
        "architecture": target.config.model_type,
        "fingerprint": target.fingerprint,
        "parameters": num_weights(target),
        "weights_bytes": held_bytes(target),
        "layers": [{"kind": kind, "count": count, "window": target.kinds.get(kind)} for kind, count in kinds.items()],
        "cache": "tree cache, full length",
        "cache_bytes_per_token": target.cache_bytes_per_token,
        "context_limit": target.context_limit,
        "vocabulary": target.vocab_size,
        "known_tokens": target.real_vocab,
        "stop_ids": {id_: target.tokenizer.convert_ids_to_tokens(id_) for id_ in sorted(target.stop_ids)},
        "chat_template": bool(getattr(target.tokenizer, "chat_template", None)),
    }


def _heads(heads: str | None, target: "Target") -> str | None:
    """The folder of the heads named or known, once they are found to fit. Raises FormatError and HeadsMismatch."""
    from medusa_cli.assemble import find_heads
    from medusa_cli.registry import read_heads

    folder = find_heads(heads, target.name)
    if folder is None:
        return None
    read_heads(folder, target)
    return str(folder)


def _lines(document: dict[str, Any]) -> dict[str, str]:
    """Label -> sentence."""
    from medusa_cli.model.runners.select import NOT_COMPILED

    stops = ", ".join(f"{id_} {token}" for id_, token in document["stop_ids"].items())
    adapter = " with the heads' adapter" if "adapter" in document else ""
    named = f"{document['model']}{adapter} ({document['architecture']})"
    return {
        "model": f"{named}, {_metric(document['parameters'])} parameters",
        "device": f"{document['device']} ({document['device_name']}), {document['threads']} "
        + ("thread" if document["threads"] == 1 else "threads"),
        "dtype": f"{document['dtype']}: {document['dtype_reason']}",
        "threads wait": document["threads_wait"],
        "forward": f"attention {document['attention']}, runner {document['runner']}",
        "kernels": f"none, so steps are slower: {document['no_kernels']}"
        if document["no_kernels"]
        else "compiled here",
        **({"quicker": NOT_COMPILED} if document["could_compile"] else {}),
        "layers": ", ".join(_layers(layer) for layer in document["layers"]),
        "memory": f"weights {_metric(document['weights_bytes'])}B",
        "cache": f"{document['cache']}, {_metric(document['cache_bytes_per_token'])}B a token",
        "context": f"{document['context_limit']:,} tokens" if document["context_limit"] else "no limit",
        "vocabulary": f"{document['vocabulary']:,} rows, {document['known_tokens']:,} known to the tokenizer",
        "stop ids": stops or "none: texts end at their budget only",
        "chat template": "yes" if document["chat_template"] else "no: prompts are taken as plain text",
        "heads": document["heads"] or "none known: train some with medusa train-heads, or name them with --heads",
    }


def _layers(layer: dict[str, Any]) -> str:
    """24 full attention."""
    window = f" (window {layer['window']})" if layer["window"] else ""
    return f"{layer['count']} {layer['kind'].replace('_', ' ')}{window}"


def _metric(count: float) -> str:
    """1234567 -> 1.23 M."""
    units = ("", "k", "M", "G", "T")
    power = min(int(math.log10(max(count, 1)) // 3), len(units) - 1)
    return f"{count / 1000**power:.3g} {units[power]}"


def _verdict(result: "CheckResult") -> str:
    """The outcome in words, with its number and bound."""
    reach = "" if result.past_window else "; the sliding window is longer and was not reached"
    if result.uncrossed:
        reach += f"; not reached, since it would take too long here: {', '.join(result.uncrossed)}"
    return (
        f"{'passed' if result.ok else 'FAILED'}: tree and path logits differ by {result.max_difference:.2g} of their "
        f"spread, rounding explains {result.bound:g} ({result.num_tokens} tokens{reach})"
    )


def _show(console: Console, label: str, text: str) -> None:
    """One line of the report."""
    console.say(f"{label:<14} {text}", indent=15)
