"""Every command of the documentation, those in sentences included, is one that its program's parser takes."""

from __future__ import annotations

import pytest

from tests.docs.forms import well_formed
from tests.docs.pages import LANGUAGES, ROOT, Block, blocks, commands, hidden, mentions, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_well_formed(page, monkeypatch):
    told = "is shown as indented text; put it into a block that begins with ```bash"
    assert not hidden(page), f"{page}: {hidden(page)[0].strip()!r} {told}"
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: a block is one of {', '.join(LANGUAGES)}"
    shown = [line for block in blocks(page) if block.language == "bash" for line in commands(block)]
    for text, where in [*shown, *mentions(page)]:
        try:
            well_formed(text.replace(" ...", ""), monkeypatch)
        except (AssertionError, SystemExit, ValueError) as error:
            pytest.fail(f"{where}: `{text}` is not a command that runs: {error}", pytrace=False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fedxl reprot runs", "no command 'reprot'"),
        ("fedxl report runs --htlm page.html", "No such option"),
        ("fedxl deploy init hospitals --sites a,b --port many", "many"),
        ("fedxl algorithms all", "unexpected extra argument"),
        ("for x in resume halt; do\nfedxl $x runs/a\ndone", "no command 'halt'"),
        ("python benchmarks/gone.py", "no file"),
        ("python benchmarks/executors.py --fast", "takes 0 argument"),
        ("python -m studies tables", "no command 'tables'"),
        ("python -m studies paper table1 --budgets quick", "No such option"),
        ("make tests", "has no tests"),
        ("make test-flower FLOWER=1", "has no FLOWER"),
        ("pip install 'fedxl[flow]'", "no extra"),
        ("pytest tests/gone.py", "no file"),
        ("docker run -v a:b fedxl:cpu trian c.toml", "no command 'trian'"),
        ("podman run fedxl", "no parser"),
    ],
)
def test_what_is_wrong_is_noticed(text, told, monkeypatch):
    with pytest.raises(AssertionError, match=f"(?i){told}"):
        well_formed(text, monkeypatch)


def test_an_unknown_argument_of_a_script_is_noticed(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        well_formed("python benchmarks/engines.py --places 2", monkeypatch)
    assert "unrecognized arguments" in capsys.readouterr().err


def test_a_line_goes_on_after_a_backslash_and_a_loop_is_one_line():
    text = (
        "fedxl report runs \\\n    --markdown   # a table\nfor x in a b; do\n    fedxl resume $x\ndone\n# a comment\n"
    )
    found = [line.text for line in commands(Block("page", 1, "bash", text))]
    assert found == ["fedxl report runs --markdown", "for x in a b; do\nfedxl resume $x\ndone"]
