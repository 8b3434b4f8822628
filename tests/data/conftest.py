"""Small tokenizers with the chat templates of several families."""

from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>"]

_CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are kind<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Ends a turn with no token of its own; a new turn begins with a special token.
_BARE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
)
# As Qwen 3: an empty block before the last answer only.
_THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Says how long the chat is in its first line, so no rendering is a prefix of another.
_COUNTED = (
    "{{ messages | length }} messages\n{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TAGGED = (
    "{{ messages | length }} messages\n{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)


# Says that the assistant spoke, not what.
_DEAF = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] != 'assistant' %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# Reads a message as parts only, as templates of models that see pictures do.
_PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As DeepSeek R1: opens a turn with <think>, and keeps of an answer what follows the thoughts.
_R1 = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '<|im_start|>' + message.content }}"
    "{% else %}{{ '<|im_end|>' + message.content.split('</think>')[-1] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|><think>\n' }}{% endif %}"
)
# Ends a turn with a token that the tokenizer calls a word.
_TURNS = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '<|turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


TEMPLATES = {
    "parts": _PARTS,
    "r1": _R1,
    "turns": _TURNS,
    "adds": "{{ messages[0].content + 1 }}",
    "includes": "{% include 'other.jinja' %}",
    "broken": "{% for message in messages %}",
    "divides": "{{ 1 / 0 }}",
    "deep": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "chatml": _CHATML,
    "inst": _INST,
    "bare": _BARE,
    "thinking": _THINKING,
    "counted": _COUNTED,
    "tagged": _TAGGED,
    "deaf": _DEAF,
    None: None,
}


@pytest.fixture(scope="session")
def backend() -> str:
    """A byte-level tokenizer that puts <s> before what it is given, as JSON."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, special_tokens=SPECIALS)
    inner.train_from_iterator(["What is the answer? The answer is blue. user assistant system [INST] [/INST]"], trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    return inner.to_str()


Make = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture
def make(backend: str) -> Make:
    """A tokenizer with the chat template of this name, and these special tokens."""

    def make(template: str | None, eos: str = "<|im_end|>", pad: str = "<pad>") -> PreTrainedTokenizerFast:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(backend), bos_token="<s>", eos_token=eos, pad_token=pad
        )
        tokenizer.chat_template = TEMPLATES[template]
        return tokenizer

    return make


@pytest.fixture
def learnt() -> Callable[..., list[str]]:
    """The runs of learnt text in a sample."""

    def learnt(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], supervised: Sequence[bool]) -> list[str]:
        runs: list[list[int]] = []
        for index, token in enumerate(ids):
            if supervised[index]:
                if not index or not supervised[index - 1]:
                    runs.append([])
                runs[-1].append(token)
        return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]

    return learnt
