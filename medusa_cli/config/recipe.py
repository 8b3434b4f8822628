"""A run as typed settings: what there is, what each may be, and its default.

This file knows no model and no torch. Defaults live here and nowhere else.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

from medusa_cli.config.parts import defaults_of, head_kinds, looks_back
from medusa_cli.config.settings import Settings
from medusa_cli.errors import RecipeError


def _steering(name: str) -> tuple[str, ...]:
    """The openings or topics that come with the package."""
    file = Path(__file__).parents[1] / "data" / "steering.yaml"
    return tuple(yaml.safe_load(file.read_text(encoding="utf-8"))[name])


COLDEST = 1e-6  # logits divided by less are no numbers any more
NEW_TOKENS = 256  # of one text, where nobody says how many


class TargetSettings(Settings):
    """Which model, and how it is held."""

    model: str = Field("smollm2-135m", title="An alias, a hub id, a folder or a .gguf file.")
    revision: str | None = Field(None, title="Branch, tag or commit of a model on the hub.")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto", title="Number format of the weights; int8: products in integers, on a CPU."
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$",
        title="Where the model runs.",
        description="auto, cpu, cuda, cuda:N or mps",
    )
    runner: Literal["auto", "eager", "packed", "blocks", "compiled", "graphs"] = Field(
        "auto", title="How a forward is launched."
    )
    attention: Literal["auto", "eager", "sdpa", "grouped"] = Field("auto", title="Kernel of the tree attention.")
    device_map: Literal["one", "auto"] = Field("one", description="auto spreads the layers over all GPUs there are")
    quantize: Literal["none", "4bit", "8bit"] = Field(
        "none", description="how linear layers are held: 4bit in NF4 (bitsandbytes), 8bit in int8 (torchao)"
    )

    @model_validator(mode="after")
    def _device_is_open(self) -> "TargetSettings":
        if self.device_map == "auto" and self.device not in ("auto", "cuda"):
            raise ValueError(f"spreads the layers by device_map auto, and names device {self.device}: leave one out")
        return self

    @model_validator(mode="after")
    def _has_integers(self) -> "TargetSettings":
        if self.dtype == "int8" and (self.quantize != "none" or self.device_map == "auto"):
            what = f"quantize {self.quantize}" if self.quantize != "none" else "device_map auto"
            raise ValueError(f"asks for dtype int8, whose layers are our own, and for {what}: leave one out")
        if self.dtype == "int8" and self.runner in ("eager", "packed", "graphs"):
            raise ValueError(
                f"asks for dtype int8 and for the {self.runner} runner, which can't: use blocks, compiled or auto"
            )
        return self

    @model_validator(mode="after")
    def _layers_can_be_laid_out(self) -> "TargetSettings":
        if self.runner not in ("auto", "eager") and (self.quantize != "none" or self.device_map == "auto"):
            what = f"quantize {self.quantize}" if self.quantize != "none" else "device_map auto"
            raise ValueError(f"asks for {what}, and for the {self.runner} runner, which can't: leave one out")
        return self


def _is_kind(name: str) -> str:
    """Heads of this program or of a package that is there."""
    if name not in head_kinds():
        raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, head_kinds()))})
    return name


class HeadsSettings(Settings):
    """The shape of the heads."""

    type: Annotated[str, AfterValidator(_is_kind)] = Field(
        "medusa", description="hydra heads also see the guesses before theirs: better guesses, dearer drafts"
    )
    options: dict[str, int | float | str | bool] = Field(
        default_factory=dict, description="settings that a kind of heads has alone, as {rank: 8}"
    )
    num_heads: int = Field(4, ge=1, le=16, title="Heads: guesses ahead.")
    num_layers: int = Field(1, ge=1, le=8, title="Blocks a head.")
    draft_vocab: int = Field(8192, ge=0, title="Tokens the heads can guess; 0: all.")
    sees_root: bool = Field(True, description="show the heads the token that is already decided")
    stored: Literal["float32", "bfloat16", "float16"] = "float16"
    own_output: bool = Field(False, description="give the heads an output matrix of their own")
    start_from: str | None = Field(
        None, description="a folder or hub id of heads to go on from, of any kind and number, for the same hidden size"
    )


class DataSettings(Settings):
    """Where prompts and answers come from."""

    dataset: str = Field(
        "self", title="Training text.", description="self, a file (.jsonl, .json, .parquet, .txt) or a hub id"
    )
    dataset_split: str = Field("train", title="Split of a hub data set.")
    dataset_config: str | None = Field(None, description="configuration of a hub data set that has several")
    streaming: bool = Field(False, title="Read a hub data set row by row.")
    on_bad_row: Literal["skip", "fail"] = Field("skip", title="What a row that can't be used does.")
    answers_from: str = Field(
        "auto",
        title="Who answers the prompts.",
        description="auto: the data's own answers, and the target's where it has none; self: the target's; "
        "or the URL of a server that speaks OpenAI's chat completions",
    )
    server_model: str | None = Field(None, description="the name the server serves it by; none: the only one there")
    server_temperature: float = Field(0.0, ge=0, le=2)
    server_timeout: float = Field(300.0, gt=0, description="seconds to wait for a word of the server")
    server_tries: int = Field(6, ge=1, description="times a request is sent before the run stops")
    num_samples: int = Field(2000, ge=1, title="Samples to use.")
    max_seq_length: int = Field(512, ge=16, title="Tokens of prompt and answer.")
    max_prompt_tokens: int = Field(96, ge=1, description="longest prompt the target writes for itself")
    max_answer_tokens: int = Field(192, ge=1)
    prompt_temperature: float = Field(1.0, ge=COLDEST)
    prompt_top_p: float = Field(0.95, gt=0, le=1)
    rows: int = Field(96, ge=1, description="rows decoded side by side while the target writes; requests in flight")
    workers: int = Field(1, ge=1, description="processes that write side by side, each with a copy of the model")
    held_out: float = Field(0.03, gt=0, lt=0.5, description="share of the samples kept for measuring")
    max_disk_gb: float | None = Field(None, gt=0, description="gigabytes of hidden states; none: what is free")
    openings: tuple[str, ...] = Field(
        default_factory=lambda: _steering("openings"),
        min_length=1,
        description="task openings that steer the prompts the target writes",
    )
    topics: tuple[str, ...] = Field(
        default_factory=lambda: _steering("topics"), min_length=1, description="put where an opening says {topic}"
    )

    @field_validator("answers_from")
    @classmethod
    def _check_answers_from(cls, value: str) -> str:
        """The value without what its URL may end in, or RecipeError, which doesn't repeat a URL: it may hold a key."""
        return value if value in ("auto", "self") else _server_url(value)

    @property
    def server(self) -> str | None:
        """The URL of the server that answers, if one does."""
        return None if self.answers_from in ("auto", "self") else self.answers_from

    @property
    def target_answers(self) -> bool:
        """Whether the target answers, as far as can be told before the data is seen: it may hold prompts alone."""
        return self.answers_from == "self" or (self.dataset == "self" and self.server is None)


def _server_url(text: str) -> str:
    """The URL that /chat/completions is put behind, or RecipeError."""
    try:
        url = urlsplit(text)
        whole = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        (url.hostname or "").encode("idna")
    except ValueError:  # a port that is no number, brackets that don't close, a host of no characters
        whole = False
    if not whole or any(character.isspace() for character in text):
        raise RecipeError(
            "data.answers_from is neither auto, self nor the URL of a server", "for example http://localhost:8000/v1"
        )
    if url.username is not None or url.query or url.fragment:
        raise RecipeError(
            "data.answers_from: the URL holds more than host and path, perhaps a password",
            "a run records its URL: give it without, and a key in the environment as OPENAI_API_KEY",
        )
    return text.rstrip("/").removesuffix("/chat/completions").rstrip("/")


class LossSettings(Settings):
    """What a wrong guess costs: how much each of three figures counts."""

    ce: float = Field(1.0, ge=0, description="cross-entropy of the token that was written")
    l1: float = Field(0.0, ge=0, description="how far the heads' chances are from the target's own, added up")
    kl: float = Field(0.0, ge=0, description="KL of the heads' chances from the target's own")

    @model_validator(mode="after")
    def _something_counts(self) -> "LossSettings":
        if not self.ce + self.l1 + self.kl:
            raise ValueError("leaves nothing to learn: ce, l1 and kl are all 0")
        return self

    @property
    def teacher(self) -> bool:
        """Whether the target's own chances are asked for."""
        return self.l1 + self.kl > 0


class TrainSettings(Settings):
    """How the heads learn."""

    epochs: float = Field(2.0, gt=0, title="Passes over the data.")
    max_steps: int | None = Field(None, ge=1, title="Stop after this many steps.")
    batch_size: int = Field(2048, ge=1, title="Places learnt from in a step.")
    learning_rate: float = Field(2e-3, gt=0, title="Peak learning rate.")
    warmup_ratio: float = Field(0.03, ge=0, lt=1, title="Share of warm-up steps.")
    weight_decay: float = Field(0.0, ge=0)
    head_decay: float = Field(
        0.8,
        gt=0,
        le=1,
        description="weight of head k's loss is head_decay ** k; an adapter feels it, heads with AdamW learn alike",
    )
    micro_batch_size: int | None = Field(
        None, ge=1, description="positions of a step learnt from at once, to bound memory; none: the whole step"
    )
    loss_chunk: int = Field(512, ge=1, description="positions projected to the draft vocabulary at once")
    eval_steps: int = Field(100, ge=1, title="Evaluate every N steps.")
    save_steps: int = Field(100, ge=1, title="Save every N steps.")
    decode_steps: int = Field(200, ge=0, title="Decode held-out prompts every N steps; 0: never.")
    patience: int | None = Field(None, ge=1, title="Stop after N decodes without a better one; keep the best heads.")
    report_to: Literal["none", "wandb"] = Field("none", title="Send curves.")
    losses: LossSettings = LossSettings()
    place_share: float = Field(
        1.0, gt=0, le=1, description="share of the places that an epoch learns from, drawn anew for each"
    )
    clip: float | None = Field(None, gt=0, description="gradients of a larger norm are brought down to it; none: never")
    states: Literal["stored", "rerun"] = Field(
        "stored",
        description="states of inner layers: kept on the disk, or the target is run again for each step; "
        "for heads that see such states",
    )

    @model_validator(mode="after")
    def _patience_sees_decodes(self) -> "TrainSettings":
        if self.patience is not None and not self.decode_steps:
            raise ValueError("has patience with decodes, and decode_steps 0, which makes none: leave one out")
        return self


class TreeSettings(Settings):
    """The tree fitted after training."""

    size: int | None = Field(None, ge=0, title="Nodes of the tree. [default: what pays most here]")
    max_size: int = Field(63, ge=0)


class LoraSettings(Settings):
    """An adapter of the target that learns together with the heads, once these have learnt alone (Medusa-2)."""

    rank: int = Field(32, ge=1, le=4096)
    alpha: int = Field(16, ge=1, description="what the adapter adds is multiplied by alpha / rank")
    dropout: float = Field(0.05, ge=0, lt=1)
    target_modules: tuple[str, ...] | None = Field(
        None, min_length=1, description="linear layers by name, as [q_proj, v_proj]; none: all but the output matrix"
    )
    epochs: float = Field(1.0, gt=0)
    max_steps: int | None = Field(None, ge=1)
    batch_size: int = Field(8, ge=1, description="whole texts in a step")
    learning_rate: float = Field(1e-4, gt=0, description="of the adapter")
    heads_learning_rate: float = Field(4e-4, gt=0)
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    keep_weight: float = Field(1.0, gt=0, description="how much the target's own predictions count")
    heads_weight: float = Field(0.2, ge=0, description="how much the heads' loss counts for the adapter, in the end")
    heads_warmup: float = Field(1.0, ge=0, le=1, description="share of the steps in which heads_weight is reached")
    gradient_checkpointing: bool = Field(False, description="compute each layer twice, and hold one at a time")


def _with_defaults(given: Any, defaults: Mapping[str, Any]) -> Any:
    """What is given, with defaults where a name is missing, section by section."""
    if not isinstance(given, dict):
        return dict(defaults) if given is None else given
    missing = {name: value for name, value in defaults.items() if name not in given}
    filled = {
        name: _with_defaults(value, defaults[name]) if isinstance(defaults.get(name), dict) else value
        for name, value in given.items()
    }
    return {**filled, **missing}


class Recipe(Settings):
    """Everything a training run needs to know."""

    target: TargetSettings = TargetSettings()
    heads: HeadsSettings = HeadsSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    tree: TreeSettings = TreeSettings()
    lora: LoraSettings | None = None
    seed: int = Field(0, ge=0, lt=2**62, title="Seed of all that is random.")
    output_dir: str = Field("runs/heads", min_length=1, title="The run's folder.")

    @model_validator(mode="before")
    @classmethod
    def _as_its_kind_of_heads_begins(cls, value: Any) -> Any:
        """Defaults of the kind of heads stand in for those of this file, where nothing is said."""
        heads = value.get("heads") if isinstance(value, dict) else None
        kind = heads.get("type") if isinstance(heads, dict) else None
        return _with_defaults(value, defaults_of(kind)) if isinstance(kind, str) else value

    @field_validator("train")
    @classmethod
    def _states_are_seen(cls, train: TrainSettings, info: ValidationInfo) -> TrainSettings:
        heads = info.data.get("heads")
        if heads is not None and train.states != "stored" and not looks_back(heads.type):
            raise ValueError(f"asks for states {train.states}, which {heads.type} heads don't see: leave it out")
        return train

    @field_validator("lora")
    @classmethod
    def _weights_can_be_adapted(cls, lora: LoraSettings | None, info: ValidationInfo) -> LoraSettings | None:
        target = info.data.get("target")
        heads = info.data.get("heads")
        if lora is not None and heads is not None and looks_back(heads.type):
            raise ValueError(f"is given, and {heads.type} heads can't learn beside an adapter: leave it out")
        if lora is None or target is None:
            return lora
        if target.quantize != "none":
            raise ValueError(f"is merged into full weights, and target.quantize is {target.quantize}: leave one out")
        if target.device_map != "one":
            raise ValueError("learns on one device, and target.device_map asks for several: leave one out")
        if target.dtype == "float16":
            raise ValueError("can't learn in target.dtype float16, whose gradients vanish: use bfloat16 or float32")
        return lora
