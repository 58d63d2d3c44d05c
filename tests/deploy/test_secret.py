"""Secret seeds: made once, kept for this user alone, the same for every process and after a crash."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedxl import UserError, files
from fedxl.deploy.storage import SEED_FILE, kept_seed

RUN = "0123456789abcdef"


def test_a_seed_is_made_once_for_each_run_and_site(tmp_path):
    seeds = [kept_seed(tmp_path / site / run / SEED_FILE) for site in "ab" for run in (RUN, RUN[::-1])]
    assert len(set(seeds)) == 4
    assert seeds == [kept_seed(tmp_path / site / run / SEED_FILE) for site in "ab" for run in (RUN, RUN[::-1])]
    assert all(2**127 <= seed < 2**128 for seed in seeds)


def test_it_is_for_its_user_alone_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        kept_seed(tmp_path / "state" / RUN / SEED_FILE)
    finally:
        os.umask(old)
    folder = tmp_path / "state" / RUN
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_processes_that_ask_at_once_get_one_seed(tmp_path, monkeypatch):
    drawn = [bytes([n]) * 32 for n in range(8)]
    monkeypatch.setattr(os, "urandom", lambda count: drawn.pop())
    with ThreadPoolExecutor(8) as several:  # flock tells file descriptors apart, so threads do for processes
        assert len(set(several.map(lambda _: kept_seed(tmp_path / RUN / SEED_FILE), range(8)))) == 1


def test_a_crash_while_it_is_written_leaves_none_and_the_next_one_holds(tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(UserError, match=r"cannot write to .*: No space left on device"):
            kept_seed(tmp_path / RUN / SEED_FILE)
    assert not (tmp_path / RUN / SEED_FILE).exists()
    assert kept_seed(tmp_path / RUN / SEED_FILE) == kept_seed(tmp_path / RUN / SEED_FILE)


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_file_that_holds_none_is_not_replaced(tmp_path, content):
    kept_seed(tmp_path / RUN / SEED_FILE)
    path = tmp_path / RUN / SEED_FILE
    files.write_atomically(path, content)
    with pytest.raises(UserError, match=r"private\.seed holds \d+ bytes, not the 32 of a secret seed"):
        kept_seed(tmp_path / RUN / SEED_FILE)
    assert path.read_bytes() == content


def test_all_but_the_highest_bit_is_the_systems(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    assert kept_seed(tmp_path / "zero") == 2**127
    monkeypatch.setattr(os, "urandom", lambda count: b"\xff" * count)
    assert kept_seed(tmp_path / "ones") == 2**128 - 1
