"""Progress where it is shown: in a notebook, for which a module stands in, on a terminal and in a log."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console
from rich.errors import LiveError
from rich.live import Live

from fedxl import progress
from tests.conftest import seen_at_a_terminal
from tests.training.test_result import fitted


@pytest.fixture
def cells(monkeypatch) -> list[list[str]]:
    """What a notebook has shown: of each output its states, one after the other."""
    found: list[list[str]] = []

    def display(it, display_id=False):
        assert display_id is True
        states = [it._repr_html_()]
        found.append(states)
        return SimpleNamespace(update=lambda now: states.append(now._repr_html_()))

    shell = ModuleType("IPython")
    shell.get_ipython = lambda: SimpleNamespace(kernel=object())
    home = ModuleType("IPython.display")
    home.display = display
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", home)
    monkeypatch.setattr(progress, "UPDATE_EVERY", 0.0)
    return found


def test_a_notebook_sees_one_output_that_changes(cells, capsys, monkeypatch):
    with progress.progress("reading <b>", 3) as advance:
        advance(1)
        advance(2)
    ((first, *_, last),) = cells
    assert 'value="1" max="3"' in first
    assert 'value="3" max="3"' in last
    assert "reading &lt;b&gt; 3 of 3" in last
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "UPDATE_EVERY", 1e9)
    with progress.progress("done at once", 3) as advance:
        advance(3)
    assert len(cells) == 1


def test_fit_shows_its_rounds_and_the_metric_that_selects(cells, capsys):
    result = fitted()
    out, err = capsys.readouterr()
    assert (err, "executor: " in out) == ("", True), "a notebook paints stderr red"
    ((first, *_, last),) = cells
    assert "round 0 of 4" in first
    assert f"round 4 of 4, validation auroc {result.history[-1]['validation']['auroc']:.4f}" in last
    fitted(progress=False)
    assert len(cells) == 1


def test_where_nothing_shows_it_fit_is_silent_unless_asked(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    fitted()
    assert "round" not in capsys.readouterr().err
    fitted(progress=True)
    assert "round 2 of 4, validation auroc 0." in capsys.readouterr().err


def test_fit_has_a_bar_on_a_terminal():
    script = "from tests.training.test_result import fitted; fitted()"
    shown = seen_at_a_terminal([sys.executable, "-c", script], COLUMNS="120")
    assert b"4/4" in shown
    assert b"validation auroc" in shown


def test_a_terminal_that_shows_something_else_is_left_to_it(monkeypatch):
    def taken(self, refresh=False):
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr(Live, "start", taken)
    console = Console(force_terminal=True, file=io.StringIO())
    with progress.display("round", 3, console=console) as update:
        update(2, "")
    assert "round" not in console.file.getvalue()


def test_time_left_of_what_was_resumed():
    now = progress.State("round", 10, start=4, done=7)
    now.began -= 30.0
    assert str(now) == "round 7 of 10, about 30 s left"
