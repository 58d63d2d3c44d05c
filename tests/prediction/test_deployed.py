"""The run folder of a server with sites predicts and exports like any other."""

from __future__ import annotations

import numpy as np
import pytest

from fedxl import UserError
from fedxl.data.digits import digits
from fedxl.prediction import predictor
from fedxl.prediction.export import export
from tests.deploy.federated import DATA, config, deployed


def test_a_servers_run_predicts_and_is_exported(tmp_path):
    pytest.importorskip("flwr", reason="needs fedxl[flower]")
