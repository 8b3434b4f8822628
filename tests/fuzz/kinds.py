"""The kinds of files that a user can hand in."""

from tests.fuzz.folders import BENCH_FOLDER, RUN_FOLDER
from tests.fuzz.foreign import FOREIGN
from tests.fuzz.heads import ADAPTER, HEADS, HEADS_WEIGHTS, TREE
from tests.fuzz.kind import Kind, run
from tests.fuzz.models import make_gguf, of_a_gguf, of_a_model
from tests.fuzz.texts import DATA, RECIPE

KINDS: dict[str, Kind] = {
    "config": of_a_model({"config.json": "json"}),
    "generation_config": of_a_model({"generation_config.json": "json"}),
    "tokenizer_config": of_a_model({"tokenizer_config.json": "json", "chat_template.jinja": "text"}),
    "tokenizer": of_a_model({"tokenizer.json": "json"}),
    "weights": of_a_model({"model.safetensors": "safetensors"}),
    "gguf": Kind(make_gguf, {"model.gguf": "binary"}, lambda folder, _: run(*of_a_gguf(folder, "")), of_a_gguf),
    "heads_weights": HEADS_WEIGHTS,
    "heads": HEADS,
    "adapter": ADAPTER,
    "tree": TREE,
    "recipe": RECIPE,
    "data": DATA,
    "bench": BENCH_FOLDER,
    "run": RUN_FOLDER,
    **FOREIGN,
}
