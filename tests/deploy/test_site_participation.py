"""Participation with sites: a server asks cohorts that it draws, and takes no trace."""

from __future__ import annotations

import pytest

from fedxl import UserError
from tests.deploy.federated import config, deployed

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_server_takes_no_trace(tmp_path):
    (tmp_path / "trace.json").write_text('{"rounds": [["a"]]}')
    experiment = config("fedxl2", participation="trace", trace=str(tmp_path / "trace.json"))
    with pytest.raises(UserError, match="participation = 'trace' is for simulations"):
        deployed(tmp_path, experiment)
