"""The lists of what is not run as it stands are true: each entry concerns a line, and each named test is there."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from fedxl.algorithms import protocol
from tests.docs.accounts import BLOCKS_ELSEWHERE, ELSEWHERE, NOT_RUN, SHORTER
from tests.docs.pages import ROOT, blocks, commands, pages
from tests.docs.running import entry_of

BLOCKS = [block for page in pages() for block in blocks(page)]
LINES = [line.text for block in BLOCKS if block.language == "bash" for line in commands(block)]


@pytest.mark.parametrize("pattern", [*SHORTER, *ELSEWHERE, *NOT_RUN])
def test_an_entry_concerns_a_line(pattern):
    assert any(re.fullmatch(pattern, line) for line in LINES), f"no page has such a line any more: remove {pattern!r}"


@pytest.mark.parametrize("entry", BLOCKS_ELSEWHERE)
def test_an_entry_concerns_a_block(entry):
    assert any(entry_of(block, entry) for block in BLOCKS), f"no page has such a block any more: remove {entry!r}"


@pytest.mark.parametrize("name", sorted({*ELSEWHERE.values(), *BLOCKS_ELSEWHERE.values()}))
def test_a_named_test_is_there(name):
    file, _, function = name.partition("::")
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_no_line_is_accounted_for_twice():
    for line in LINES:
        found = [pattern for table in (ELSEWHERE, NOT_RUN) for pattern in table if re.fullmatch(pattern, line)]
        assert len(found) <= 1, f"{line!r}: {found}"


def test_the_contract_in_the_design_is_the_protocols():
    """The methods that docs/design.md shows are those that an algorithm of your own must add, all of them."""
    (block,) = [block for block in BLOCKS if block.page == "docs/design.md" and block.language == "python"]
    shown = {node.name: [arg.arg for arg in node.args.args] for node in ast.parse(block.text).body}
    raising = [
        name
        for kind in (protocol.Phase, protocol.Algorithm)
        for name, it in vars(kind).items()
        if inspect.isfunction(it) and "NotImplementedError" in it.__code__.co_names
    ]
    assert set(shown) == set(raising)
    for name, arguments in shown.items():
        assert arguments == [*inspect.signature(getattr(protocol.Algorithm, name)).parameters]
