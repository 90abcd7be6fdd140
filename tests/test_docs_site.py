"""The documentation site has every page and every public name, builds without a warning, and asks no other host."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import hf_dcsgd

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def navigation() -> list[str]:
    def pages(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [page for part in (node.values() if isinstance(node, dict) else node) for page in pages(part)]  # type: ignore[attr-defined]

    return pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def test_every_page_is_in_the_navigation() -> None:
    assert sorted(navigation()) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    told = re.findall(r"^::: hf_dcsgd\.(\w+)$", (DOCS / "reference" / "python.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(told) == sorted(name for name in hf_dcsgd.__all__ if name != "__version__")


def test_every_place_of_the_paper_exists() -> None:
    table = (DOCS / "paper.md").read_text(encoding="utf-8").split("\n## ")[0]
    places = re.findall(r"`((?:clipping|ghost|privacy)[\w.]+)`", table)
    assert len(places) > 10
    for place in places:
        parts = place.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found: object = importlib.import_module(".".join(["hf_dcsgd", *parts[:cut]]))
            except ModuleNotFoundError:
                continue
            break
        for name in parts[cut:]:
            found = getattr(found, name)


class Fetched(HTMLParser):
    """What a browser would load for a page, without being clicked at."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag != "a":
            self.addresses += [
                value for name, value in attributes if name in ("src", "srcset", "href", "data") and value
            ]


@pytest.mark.slow
def test_it_builds_without_a_warning_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "HF_HUB_OFFLINE": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(navigation())
    for page in pages:
        text = page.read_text(encoding="utf-8")
        seen = Fetched()
        seen.feed(text)
        assert not [address for address in seen.addresses if re.match(r"(https?:)?//", address)], page
        assert "<!-- include" not in text
        assert "<!-- help" not in text
    for style in tmp_path.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)]*", style.read_text(encoding="utf-8")), style
