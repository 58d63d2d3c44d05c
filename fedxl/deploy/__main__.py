"""`python -m fedxl.deploy ROLE FOLDER ...`: one process of a party. `fedxl deploy` starts and watches them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from fedxl.errors import UserError

# Imported when needed: a gateway has no use for torch, nor a site for SuperLink.
ROLES: Mapping[str, str] = {
    "superlink": "fedxl.deploy.server.link",
    "gateway": "fedxl.deploy.server.door",
    "app": "fedxl.deploy.server.app",
    "node": "fedxl.deploy.site.node",
}


def say(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)


def main() -> None:
    role, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    os.umask(0o077)  # whatever we write is for our user alone
    logging.getLogger("fedxl").addHandler(logging.StreamHandler(sys.stdout))  # ours alone: Flower says too much
    if role != "superlink":  # which has a way of its own
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    run: Callable[..., None] = import_module(ROLES[role]).main
    try:
        run(folder, say, *sys.argv[3:])
    except UserError as error:
        print(f"fedxl: {error}", flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
