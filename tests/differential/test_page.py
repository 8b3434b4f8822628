"""The page says what the lines say, and what it says can be written with is read back from it."""

from tests.differential.compare import Case, Finding
from tests.differential.page import BEGIN, documented, page

FINDINGS = [
    Finding(Case("llama", "as it comes", "auto", "packed"), "equal", compared=1760, distinct=30),
    Finding(Case("llama", "rope longrope", "auto", "packed"), "refused", "llama (llama) has a table"),
    Finding(Case("llama", "window", "auto", "packed"), "unbuilt", "ValueError: no such setting"),
    Finding(Case("bloom", "as it comes", "auto", "packed"), "refused", "bloom (bloom) takes no position ids"),
    Finding(Case("bloom", "as it comes", "eager", "eager"), "refused", "bloom (bloom) takes no position ids"),
    Finding(Case("mistral", "as it comes", "auto", "packed"), "differs", "mismatch", 1760, 40),
]


def test_the_page_counts_tokens_and_names_reasons() -> None:
    text = "".join(page([finding.as_json() for finding in FINDINGS]))
    assert "3 architectures, 2 of them written with" in text
    assert "**3,520 tokens compared, 40 differ**" in text
    assert "| llama | 1 | 1,760 | 0 | rope longrope: has a table |" in text
    assert "| mistral | 1 | 1,760 | 40 | DIFFERS: mismatch |" in text
    assert "| bloom | takes no position ids |" in text


def test_what_can_be_written_with_is_read_back() -> None:
    assert documented(BEGIN + "".join(page([finding.as_json() for finding in FINDINGS]))) == {"llama", "mistral"}
