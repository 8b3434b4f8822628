"""The page in a real browser: keys, streams, steps, errors in words; against a real server with a tiny model."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from medusa_cli.decode.engine import Engine
from medusa_cli.serve.policy import Policy, digest_of
from tests.chromium import Browser, browsing, find_chromium
from tests.serve.conftest import Served, serving
from tests.serve.test_api import CHAT
from tests.tiny_folders import CHAT_TEMPLATE
from tests.tiny_models import VOCAB, target_of, tiny_model

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is found: install one, or name it in CHROMIUM")
WRITTEN = "!document.querySelector('.writing') && document.querySelectorAll('.reply').length === {}"
LAST = "[...document.querySelectorAll('.reply .words')].at(-1)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with browsing(CHROMIUM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def tab(browser: Browser) -> Iterator[Browser]:
    """A wide light tab; at the end nothing has been complained about."""
    browser.size(1280, 800)
    browser.prefer("light")
    browser.problems.clear()
    browser.requests.clear()
    yield browser
    assert browser.problems == []


def enter(tab: Browser, served: Served) -> None:
    tab.open(f"{served.url}/")
    tab.wait("document.querySelector('#state').classList.contains('ready')")


def say(tab: Browser, text: str) -> None:
    """Send it with the keyboard, wherever the focus is, and wait for the reply."""
    replies = tab.run("document.querySelectorAll('.reply').length")
    tab.run("document.querySelector('#prompt').focus()")
    tab.type(text)
    tab.press("Enter")
    tab.wait(WRITTEN.format(replies + 1))


def answer_to(served: Served, *contents: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
    asked: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 400}
    return str(served.post(CHAT, asked).json()["choices"][0]["message"]["content"])


def texts(tab: Browser, selector: str) -> list[str]:
    found: list[str] = tab.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")
    return found


def test_a_conversation_with_the_keyboard_alone(tab: Browser, served: Served) -> None:
    enter(tab, served)
    assert tab.run("document.activeElement.id") == "prompt"
    tab.type("w5 w6")
    tab.press("Enter", shift=True)
    assert tab.run("document.querySelectorAll('article').length") == 0, "a new line sends nothing"
    tab.type("w7")
    tab.press("Enter")
    tab.wait(WRITTEN.format(1))
    first = answer_to(served, "w5 w6\nw7")
    assert texts(tab, ".words") == ["w5 w6\nw7", first]
    assert tab.run("document.querySelector('#prompt').value") == ""
    assert tab.run("document.activeElement.id") == "prompt"
    say(tab, "w9")
    assert texts(tab, ".words")[-1] == answer_to(served, "w5 w6\nw7", first, "w9"), "all that was said is sent"
    assert f"The model said: {texts(tab, '.words')[-1]}" == texts(tab, "#said")[0]
    assert all(each.startswith(served.url) for each in tab.requests), "nobody else is asked for anything"
    tab.click("#new")
    assert tab.run("document.querySelectorAll('article').length") == 0


def test_words_are_marked_by_their_steps_and_trees_are_drawn(tab: Browser, served: Served) -> None:
    enter(tab, served)
    say(tab, "w40 w41 w42 w40 w41 w42 w40 w41")
    shown = tab.run(f"""[...{LAST}.querySelectorAll('.step')].map((step) =>
        [step.querySelectorAll('.guess').length, step.querySelectorAll('.own').length])""")
    asked = {"messages": [{"role": "user", "content": "w40 w41 w42 w40 w41 w42 w40 w41"}], "temperature": 0}
    answer = served.post(CHAT, asked | {"max_tokens": 400}).json()
    assert len(shown) > 3
    assert all(own <= 1 for _, own in shown)
    assert sum(guesses + own for guesses, own in shown) <= answer["usage"]["completion_tokens"]
    assert "".join(texts(tab, ".reply .step")) == texts(tab, ".reply .words")[0]
    drawn = []
    for index in range(len(shown)):
        tab.run(f"{LAST}.querySelectorAll('.step')[{index}].click()")
        kinds = ("root", "kept", "own", "lost")
        drawn.append([tab.run(f"document.querySelectorAll('#tree .node.{kind}').length") for kind in kinds])
    with_trees = [(numbers, marks) for numbers, marks in zip(drawn, shown, strict=True) if any(numbers)]
    assert with_trees, "some step guessed"
    for (root, kept, own, _), (guesses, _) in with_trees:
        assert (root, kept, own) == (1, guesses, 1)
    tab.run("document.querySelector('#tree').focus()")
    tab.press("ArrowLeft")
    assert texts(tab, "#step-number")[0].startswith(f"step {len(shown) - 2} of ")
    before = tab.run(f"getComputedStyle({LAST}.querySelector('.step')).backgroundColor")
    tab.click("#show-steps")
    assert tab.run(f"getComputedStyle({LAST}.querySelector('.step')).backgroundColor") != before


def test_without_guesses_the_text_is_the_same(tab: Browser, served: Served) -> None:
    enter(tab, served)
    say(tab, "w5 w6 w7")
    tab.click("#speculate")
    tab.click("#new")
    say(tab, "w5 w6 w7")
    assert texts(tab, ".reply .words") == [answer_to(served, "w5 w6 w7")]
    assert texts(tab, ".guess") == []
    assert texts(tab, "#kept") == ["none made"]
    assert texts(tab, "#per-step") == ["1.00"]


def test_settings_are_sent_and_wrong_ones_are_not(tab: Browser, served: Served) -> None:
    enter(tab, served)
    tab.click("#settings summary")
    for name, value in (("max-tokens", "3"), ("system", "w8"), ("temperature", "1.5"), ("seed", "4")):
        tab.run(f"document.querySelector('#{name}').value = '{value}'")
    say(tab, "w5")
    messages = [{"role": "system", "content": "w8"}, {"role": "user", "content": "w5"}]
    asked = {"messages": messages, "temperature": 1.5, "seed": 4, "max_tokens": 3}
    assert texts(tab, ".reply .words") == [served.post(CHAT, asked).json()["choices"][0]["message"]["content"]]
    assert "most tokens" in texts(tab, ".reply .note")[0]
    tab.run("document.querySelector('#temperature').value = '7'")
    tab.run("document.querySelector('#prompt').focus()")
    tab.type("w5")
    tab.press("Enter")
    assert tab.run("document.activeElement.id") == "temperature", "the field that is wrong"
    assert tab.run("document.querySelectorAll('.user').length") == 1


@pytest.mark.parametrize("way", ["Escape", "click"])
def test_a_reply_is_stopped_and_its_row_is_free(way: str, tab: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (time.sleep(0.15), step(self))[1])
    with serving() as served:
        enter(tab, served)
        tab.click("#speculate")
        tab.type("w5 w6 w7")
        tab.press("Enter")
        tab.wait(f"{LAST}?.querySelectorAll('.step').length > 1")
        assert tab.run("getComputedStyle(document.querySelector('#send')).display") == "none"
        tab.press("Escape") if way == "Escape" else tab.click("#stop")
        tab.wait(WRITTEN.format(1))
        assert texts(tab, ".reply .note") == ["Stopped."]
        assert tab.run("document.activeElement.id") == "prompt"
        ends = time.monotonic() + 10
        while served.worker.stats().rows and time.monotonic() < ends:
            time.sleep(0.02)
        assert served.worker.stats().rows == 0


def test_a_key_is_asked_for_in_words_and_kept_in_the_tab_alone(tab: Browser) -> None:
    with serving(Policy(keys=[digest_of("sesame")])) as served:
        tab.open(f"{served.url}/")
        tab.wait("document.querySelector('#model-name').textContent === 'a key is asked for'")
        tab.run("document.querySelector('#prompt').focus()")
        tab.type("w5")
        tab.press("Enter")
        tab.wait("document.querySelector('.fault')")
        assert texts(tab, ".fault")[0].startswith("The server asks for an API key.")
        assert tab.run("document.querySelector('.fault').getAttribute('role')") == "alert"
        assert tab.run("document.activeElement.id") == "key"
        tab.type("sesame")
        tab.press("Tab")
        tab.wait("document.querySelector('#state').classList.contains('ready')")
        tab.click(".fault button")
        tab.wait(WRITTEN.format(1))
        assert texts(tab, ".reply .words") == [served_answer(served, "w5")]
        assert tab.run("Object.values(sessionStorage)") == ["sesame"]
        assert tab.run("localStorage.length + document.cookie.length") == 0
        assert "sesame" not in tab.run("document.documentElement.outerHTML + location.href")
        tab.problems = [each for each in tab.problems if "401" not in each]  # the browser notes each


def served_answer(served: Served, content: str) -> str:
    asked = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 400}
    answer = served.post(CHAT, asked, headers={"Authorization": "Bearer sesame"})
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_server_that_has_gone_or_breaks_off_is_told_in_words(tab: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    step, broken = Engine.step, threading.Event()

    def breaks(self: Engine) -> Any:
        if broken.is_set() and self.active:
            broken.clear()
            raise RuntimeError("a cable was pulled")
        return step(self)

    monkeypatch.setattr(Engine, "step", breaks)
    with serving() as served:
        enter(tab, served)
        broken.set()
        say(tab, "w5")
        assert texts(tab, ".fault")[0].startswith("The text is lost: a step that it shared with others broke off.")
        tab.click(".fault button")
        tab.wait(WRITTEN.format(1))
        assert texts(tab, ".words") == ["w5", answer_to(served, "w5")], "tried again"
        say(tab, "w5 " * 200)
        assert "maximum context length" in texts(tab, ".fault")[0]
    say(tab, "w6")
    assert texts(tab, ".fault")[-1].startswith("The server can’t be reached.")
    tab.wait("document.querySelector('#model-name').textContent === 'not reachable'")
    tab.problems.clear()  # the browser notes each answer that is an error


def test_markup_is_text_whoever_writes_it(tab: Browser) -> None:
    words = {f"<img/src=x/onerror=alert({number})>": number for number in range(VOCAB - 1)} | {"<end>": VOCAB - 1}
    core = Tokenizer(WordLevel(words, unk_token="<end>"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", unk_token="<end>")
    tokenizer.chat_template = CHAT_TEMPLATE
    with serving(target=target_of(tiny_model("llama"), tokenizer=tokenizer)) as served:
        enter(tab, served)
        said = "<script>alert(1)</script> <img src=x onerror=alert(2)> &amp;"
        say(tab, said)
        mine, reply = texts(tab, ".words")
        assert mine == said
        assert "<img/src=x/onerror=alert(" in reply
        assert tab.run("document.querySelectorAll('#log img, #log script, #tree img').length") == 0
        assert not any(each.endswith("/x") for each in tab.requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_all_of_it_fits_and_can_be_read(width: int, scheme: str, tab: Browser, served: Served) -> None:
    tab.prefer(scheme)
    tab.size(width, 700)
    enter(tab, served)
    say(tab, "w40 w41 w42 w40 w41 w42 w40 w41")
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("document.querySelector('#send').getBoundingClientRect().bottom") <= 700
    assert tab.run("document.querySelector('#log').clientHeight") > 150
    light = tab.run("Number(getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0])") > 127
    assert light == (scheme == "light")
    for field in ("prompt", "temperature", "max-tokens", "seed", "system", "key", "speculate", "show-steps"):
        assert tab.run(f"document.querySelector('#{field}').labels.length") == 1, f"{field} has a label"
