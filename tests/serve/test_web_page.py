"""The page as it is sent: one document that runs nothing but itself. What it does is tested in a browser."""

import base64
import hashlib
import re

import pytest

from medusa_cli.serve.policy import Policy, digest_of
from tests.serve.conftest import Served, serving


@pytest.fixture
def page(served: Served) -> str:
    with served.client() as client:
        return client.get("/").text


def test_the_page_is_one_document_without_addresses_of_others(page: str) -> None:
    assert page.startswith("<!doctype html>")
    assert page.count("<style>") == 1
    assert page.count("<script>") == 4
    assert not re.search(r"<(link|script|img|iframe)[^>]+(src|href)=\"(?!data:)", page)
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[\w./]*", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "names of things, which nobody asks for"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|localStorage", page)


def test_a_browser_is_told_to_run_what_is_in_it_and_nothing_else(served: Served, page: str) -> None:
    with served.client() as client:
        headers = client.get("/").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    for tag in ("style", "script"):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert policy[f"{tag}-src"].split() == [f"'sha256-{each}'" for each in hashes]
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["content-type"] == "text/html; charset=utf-8"


def test_the_page_needs_no_key_and_no_model() -> None:
    with serving(Policy(keys=[digest_of("first")])) as served, served.client() as client:
        assert client.get("/").status_code == client.head("/").status_code == 200
        assert client.get("/v1/models").status_code == 401
        served.state.service = None
        assert client.get("/").status_code == 200


def test_the_page_can_be_left_out() -> None:
    with serving(Policy(has_page=False)) as served, served.client() as client:
        assert client.get("/").status_code == 404
        assert client.get("/").json()["error"]["message"]
