"""The page at `/`: one document made of the files in `page/`, with headers that let it run nothing else."""

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

_PLACES = {
    "style": re.compile(r'<link rel="stylesheet" href="([\w.]+)">'),
    "script": re.compile(r'<script src="([\w.]+)"></script>'),
}


@dataclass(frozen=True)
class Page:
    """A document and the headers it is sent with."""

    html: str
    headers: dict[str, str]


def make_page() -> Page:
    """The page with its styles and scripts inside; a browser runs those alone, known by their hashes."""
    folder = files("medusa_cli") / "serve" / "page"
    html = (folder / "index.html").read_text(encoding="utf-8")
    allowed: dict[str, list[str]] = {"style": [], "script": []}
    for tag, place in _PLACES.items():

        def inside(found: re.Match[str], tag: str = tag) -> str:
            text = "\n" + (folder / found[1]).read_text(encoding="utf-8")
            allowed[tag].append(_hash_of(text))
            return f"<{tag}>{text}</{tag}>"

        html = place.sub(inside, html)
    return Page(html, _headers(" ".join(allowed["style"]), " ".join(allowed["script"])))


def _headers(styles: str, scripts: str) -> dict[str, str]:
    policy = (
        f"default-src 'none'; style-src {styles}; script-src {scripts}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
