"""What a site has released in private training: counted in its own file before it answers, over all runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedxl import UserError
from fedxl.algorithms.private import ByExample
from fedxl.data.tables.prepare import Number, Preparation
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.provision.settings import SiteFile, SiteSettings
from fedxl.deploy.site import requests
from fedxl.engine.simulator import Simulator
from fedxl.training.privacy import Releases, epsilon_of
from tests.data.tables import frame, write_sites
from tests.deploy.federated import InProcess, config, copied, deployed, site_file
from tests.deploy.test_private_sites import Keeping, experiment
from tests.deploy.test_tables_at_sites import TABLE

pytestmark = pytest.mark.usefixtures("impatient")
ROUNDS, OTHER = 2, "f" * 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Keeping:
    """Sites after a private run of which they answered all rounds, the warm-up included."""
    folder = tmp_path_factory.mktemp("account")
    carrier = Keeping(folder)
    deployed(folder, experiment(cohort=0, rounds=ROUNDS), carrier)
    return carrier


def account(site: SiteFile) -> dict[str, float]:
    return json.loads((site.state / "epsilon.json").read_text())["training"]


def limited(folder: Path, epsilon: float, delta: float = 1e-5) -> SiteFile:
    return site_file(folder, 0, training_epsilon=epsilon, training_delta=delta)


def in_run(asked: Envelope, run: str) -> Envelope:
    return Envelope({**asked.facts, "run": run}, asked.tensors)


def test_each_site_counts_what_the_server_states_for_the_one_that_counts_most(trained):
    stated = json.loads((trained.sites["100"].folder.parent / "server" / "run" / "run.json").read_text())["privacy"]
    settings = ByExample(0.2, 2.0, 1.0)
    worst = max(value for site in trained.sites.values() for value in account(site).values())
    # The server counts every site as if it had missed the warm-up, too.
    assert worst <= Releases(stated["gradients"], stated["scores"]).squared_mu(settings) <= 1.3 * worst
    assert all(list(account(site)) == [trained.asked[0].facts["run"]] for site in trained.sites.values())
    assert stated["epsilon"] >= epsilon_of(worst, 1e-5) * (1 - 1e-9)


def test_every_run_adds_and_a_round_that_is_asked_again_does_not(tmp_path, trained):
    mine = site_file(tmp_path, 0)
    totals = []
    for run in ("a" * 16, "b" * 16):
        for asked in trained.asked:
            for _ in range(2):
                requests.train(mine, copied(in_run(asked, run)))
                totals.append(sum(account(mine).values()))
    assert totals[::2] == totals[1::2]
    assert totals == sorted(totals)
    [one] = account(trained.sites["100"]).values()
    assert account(mine) == {"a" * 16: one, "b" * 16: one}


def train_all(mine: SiteFile, trained: Keeping, run: str) -> None:
    for asked in trained.asked:
        requests.train(mine, copied(in_run(asked, run)))


def test_the_log_says_what_has_been_spent(tmp_path, trained, caplog):
    train_all(limited(tmp_path, 1000.0), trained, "a" * 16)
    spent = epsilon_of(*account(trained.sites["100"]).values(), 1e-5)
    said = [record.getMessage() for record in caplog.records if "epsilon" in record.getMessage()]
    assert said[-1] == f"epsilon {spent:.3g} spent here so far, of training_epsilon 1000"
    assert len(said) == ROUNDS


def test_above_its_limit_a_site_refuses_before_it_answers_whatever_the_run_is_called(tmp_path, trained):
    [whole] = account(trained.sites["100"]).values()
    mine = limited(tmp_path, epsilon_of(1.5 * whole, 1e-5))
    train_all(mine, trained, "a" * 16)
    told = r"epsilon \S+ at delta 1e-05; its site\.toml allows \S+ \(training_epsilon\)"
    with pytest.raises(UserError, match=rf"with this answer, training here would have spent {told}"):
        train_all(mine, trained, OTHER)
    assert sum(account(mine).values()) <= 1.5 * whole
    answered = json.loads((mine.state / OTHER / "answered.json").read_text())
    assert len(answered) < len(trained.asked)
    (mine.state / "epsilon.json").write_text(json.dumps({"training": {OTHER: "none"}}))
    with pytest.raises(UserError, match=r"epsilon\.json; its owner must correct or remove it"):
        requests.train(mine, trained.asked[-1])


def test_an_answer_that_a_crash_cut_off_has_been_counted(tmp_path, trained, monkeypatch):
    mine = site_file(tmp_path, 0)
    with monkeypatch.context() as broken:
        broken.setattr(Simulator, "run_round", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            requests.train(mine, copied(trained.asked[0]))
    before = account(mine)
    assert all(value > 0 for value in before.values())
    requests.train(mine, copied(trained.asked[0]))
    assert account(mine) == before


def test_curves_and_training_keep_their_accounts_in_one_file(tmp_path, trained):
    mine = site_file(tmp_path, 0)
    mine.state.mkdir(parents=True)
    (mine.state / "epsilon.json").write_text('{"spent": "3"}')
    requests.train(mine, copied(trained.asked[0]))
    assert json.loads((mine.state / "epsilon.json").read_text())["spent"] == "3"


def test_a_site_with_a_limit_trains_with_noise_alone(tmp_path):
    carrier = InProcess(tmp_path)
    carrier.sites["100"] = limited(tmp_path, 5.0)
    with pytest.raises(UserError, match=r"trains with differential privacy alone \(training_epsilon\); set dp_clip"):
        deployed(tmp_path, config("fedxl2", rounds=1, cohort=0), carrier, minimum=4)


def test_settings_are_checked():
    for wrong, why in [
        ({"training_epsilon": -1.0}, "training_epsilon must be finite and not negative"),
        ({"training_epsilon": float("inf")}, "training_epsilon must be finite and not negative"),
        ({"training_delta": 0.0}, r"training_delta must lie in \(0, 1\)"),
        ({"batch": -1}, "batch must not be negative"),
    ]:
        with pytest.raises(UserError, match=why):
            SiteSettings(name="a", **wrong)


# Tables: means of columns have no noise.


def at_tables(folder: Path, **changes: object) -> InProcess:
    """Four sites with tables."""
    carrier = InProcess(folder)
    for number, path in enumerate(write_sites(folder / "data", frame())):
        own, data = site_file(folder, number), {**TABLE, "path": path, **changes}
        carrier.sites[str(100 + number)] = SiteFile(replace(own.settings, part=0, summary=True), data, own.folder)
    return carrier


def test_tables_are_trained_on_in_private_by_a_preparation_of_other_rows(tmp_path):
    private = replace(experiment(cohort=0, rounds=1), data={})
    carrier = at_tables(tmp_path)
    with pytest.raises(UserError, match="columns must not be scaled by their own means"):
        deployed(tmp_path, private, carrier)
    assert not (tmp_path / "server" / "run" / "preparation.json").exists()
    columns = (Number("age", 50.0, 10.0), Number("dose", 1e6, 1.0))
    public = Preparation(columns, label="sick", positive="yes", negative="no")
    (tmp_path / "public.json").write_text(public.to_text())
    given = {"preparation": str(tmp_path / "public.json"), "columns": ["age", "dose"]}
    carrier = at_tables(tmp_path / "given", **given)
    found = deployed(tmp_path / "given", private, carrier)
    assert found.history[-1]["privacy"]["condition"] == "if no preparation of a table was made from private rows"


def test_a_site_refuses_a_private_request_whose_preparation_is_of_summaries(tmp_path, monkeypatch):
    """Whatever the server makes of them: this one does not refuse itself."""
    carrier = at_tables(tmp_path)
    monkeypatch.setattr("fedxl.deploy.server.serve.require_given", lambda algorithm, fitted: None)
    with pytest.raises(UserError, match=r"fewer than 1 updates.*columns must not be scaled by their own means"):
        deployed(tmp_path, replace(experiment(cohort=0, rounds=1), data={}), carrier, minimum=1)
    own = carrier.sites["100"]
    careful = SiteFile(replace(own.settings, training_epsilon=1.0), own.data, own.folder)
    with pytest.raises(UserError, match=r"this site limits what training tells \(training_epsilon\); name a prep"):
        requests.hello(careful)
