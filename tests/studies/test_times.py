"""Bins of times by the command, on small files in the published format; the attack against counts by hand."""

from __future__ import annotations

import numpy as np

from fedxl.data.inputs import from_times
from fedxl.data.sets import hospitals
from studies import times
from studies.harness import read
from tests.data.test_hospitals import write_brca
from tests.studies.running import command


def test_the_command_trains_with_each_number_of_bins(tmp_path, monkeypatch, capsys):
    for name in ("BRCA_TABLE", "BRCA_SPLIT"):
        monkeypatch.setattr(hospitals, name, getattr(hospitals, name)._replace(sha256=""))
    monkeypatch.setattr(times, "BINS", (0, 5))
    write_brca(tmp_path)
    words = ("times", "--root", str(tmp_path), "--seeds", "1", "--rounds", "1", "--out", str(tmp_path / "out"))
    code, text, err = command(monkeypatch, capsys, *words)
    assert code == 0, err
    rows = read(tmp_path / "out" / "times.jsonl")
    assert {(row.case["data"], row.case["bins"]) for row in rows} == {
        (name, n) for name in times.PLACES for n in (0, 5)
    }
    assert text.count("| exact |") == len(times.PLACES)


def test_a_patient_is_found_if_nobody_else_at_the_hospital_had_the_event_in_the_same_bin():
    north = (np.ones((5, 1)), [10, 10, 10.5, 500, 900], [1, 1, 1, 1, 0])
    south = (np.ones((2, 1)), [500, 10], [1, 0])
    found = times.identified(from_times({"north": north, "south": south}).train)
    assert found[0][:2] == (3 / 5, 1), "10.5, and both of 500, which are at two hospitals"
    assert found[100][:2] == (2 / 5, 3), "10 and 10.5 are between the same public times"
    assert found[0].censored == found[100].censored == 1, "900, and 10 without an event"
    seen = times.identified(from_times({"north": (np.ones((4, 1)), [10, 900, 901, 5], [1, 0, 0, 0])}).train)
    assert (seen[0].censored, seen[5].censored, seen[100].censored) == (1, 1 / 3, 1 / 3), "900 and 901 share a bin"
