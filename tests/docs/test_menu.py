"""The menu of the documentation is short, and every page can be reached from it."""

from __future__ import annotations

import os.path
import re

from tests.docs.pages import ROOT

MOST = 20
DOCS = ROOT / "docs"
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "SECURITY.md")  # generate.py brings them onto the site
MENU = re.findall(r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.MULTILINE)


def linked_from(page: str) -> set[str]:
    """Where a page's links lead, as paths below docs/."""
    links = re.findall(r"\]\(([\w./-]+?)(?:#[\w-]*)?\)", (DOCS / page).read_text())
    return {os.path.normpath(os.path.join(os.path.dirname(page), link)).removeprefix("../") for link in links}


def test_the_menu_is_short_and_names_each_page_once():
    assert 0 < len(MENU) <= MOST, f"{len(MENU)} entries: link a page from one that is in the menu"
    assert len({*MENU}) == len(MENU)


def test_every_page_is_in_the_menu_or_linked_from_a_page_that_is():
    reached = {*MENU}.union(*map(linked_from, MENU))
    assert "results/index.md" in reached
    reached |= linked_from("results/index.md")  # one table per study
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | {*OUTSIDE}
    assert pages <= reached, f"link them from a page of the menu: {sorted(pages - reached)}"
