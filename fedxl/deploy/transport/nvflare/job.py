"""The loop that submits FLARE's job until the run has finished."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedxl.deploy import Say
from fedxl.deploy.protocol.envelope import grace
from fedxl.deploy.provision.settings import ServerFile, read_server
from fedxl.deploy.provision.templates import write
from fedxl.deploy.storage import recall
from fedxl.deploy.transport.nvflare.project import ADMIN, NAME, job
from fedxl.errors import UserError, first_line, require

POLL = 2.0
PAUSE = (1.0, 30.0)  # seconds before the job is submitted again: the first time, and at most
MOST_FUTILE = 6  # jobs in a row without a new checkpoint
GONE = 8  # looks in a row that find a process of a running job missing, until the job is aborted
WAITING, ENDED = ("SUBMITTED", "APPROVED", "DISPATCHED"), "FINISHED"  # states of a job


def submit(folder: Path, kit: Path, say: Say) -> ServerFile:
    """Submit the job, and again from the last checkpoint whenever it ends early, until the run has finished.

    A killed process ends FLARE's job for everybody. Raises UserError if the run ends with one, or makes no progress.
    """
    # Loaded when it is needed: `files` needs nothing of FLARE.
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    from fedxl.deploy.transport.nvflare.controller import LOG, OUTCOME

    own, kit = folder.resolve() / "server", kit.resolve()
    server = read_server(own / "server.toml")
    require((kit / "startup").is_dir(), f"{kit} is not the startup kit of FLARE's admin; server/setup.sh creates it")
    current, futile, reached = "", 0, _last_checkpoint(server)
    while True:
        try:
            with closing(new_secure_session(ADMIN, str(kit))) as session:
                current = _active(session) or _submitted(session, server, say)
                ended = _ended(session, current, server.settings.sites, say)
        except UserError:
            raise
        except Exception as error:  # FLARE's errors have no class in common
            ended = f"FLARE's server cannot be reached: {first_line(error)}"
        outcome = recall(own / OUTCOME)
        if outcome.get("job") == current:
            require(not outcome["reason"], str(outcome["reason"]))
            return server
        before, reached = reached, _last_checkpoint(server)
        futile = 0 if reached != before else futile + 1
        told = f"{ended}; {MOST_FUTILE} jobs in a row have finished no round; see {own / LOG} and FLARE's logs"
        require(futile < MOST_FUTILE, told)
        pause = min(PAUSE[0] * 2**futile, PAUSE[1])
        say(f"{ended}; going on from {reached or 'the beginning'} in {pause:g} s")
        time.sleep(pause)


def _last_checkpoint(server: ServerFile) -> str:
    return max((path.stem for path in (server.out / "checkpoints").glob("round-*.safetensors")), default="")


def _running(session: Any) -> set[str]:
    return {each.job_id for each in session.get_system_info().job_info}


def _active(session: Any) -> str:
    """The job that an earlier call has submitted, if it has not ended; ""."""
    running = _running(session)
    for each in session.list_jobs(name_prefix=NAME, reverse=True):
        number, status = str(each["job_id"]), str(each["status"])
        if status in WAITING or (number in running and not status.startswith(ENDED)):
            return number
    return ""


def _submitted(session: Any, server: ServerFile, say: Say) -> str:
    """The number of a new job. It takes no site in later, so sites are waited for: a run begins with all."""
    settings, begun = server.settings, (server.out / "sites.json").exists()
    deadline = time.monotonic() + (grace(settings.deadline) if begun else settings.join)
    while missing := set(settings.sites) - {each.name for each in session.get_system_info().client_info}:
        if time.monotonic() > deadline:
            told = f"{', '.join(sorted(missing))} did not connect within {settings.join:g} s; are they running?"
            require(begun, told)
            break
        time.sleep(POLL)
    with TemporaryDirectory() as place:
        write(Path(place, NAME), job(settings.sites, settings.minimum if begun else len(settings.sites)))
        submitted = str(session.submit_job(str(Path(place, NAME))))
    say(f"submitted job {submitted}")
    return submitted


def _ended(session: Any, current: str, sites: Sequence[str], say: Say) -> str:
    """Wait until the job has ended. Returns how.

    FLARE forgets a job when its server is restarted, and does not notice that a site was. That job is aborted.
    """
    say(f"following job {current}")
    gone = 0
    while gone < 2 * GONE:  # FLARE refuses to abort a job that it has forgotten
        status = str(session.get_job_meta(current)["status"])
        if status.startswith(ENDED):
            return f"job {current} ended with {status}"
        missing = [] if status in WAITING else _missing(session, current, sites)
        gone = gone + 1 if missing else 0
        if gone == GONE:
            say(f"aborting job {current}: not running at {', '.join(missing)}")
            with suppress(Exception):
                session.abort_job(current)
        time.sleep(POLL)
    return f"FLARE has forgotten job {current}"


def _missing(session: Any, current: str, sites: Sequence[str]) -> list[str]:
    """The parties that are there and do not run this job. A site may have been restarted, or may be new."""
    if current not in _running(session):
        return ["the server"]
    idle = [each["client_name"] for each in session.get_client_job_status() or [] if each["status"] == "no_jobs"]
    return [name for name in idle if name in sites]
