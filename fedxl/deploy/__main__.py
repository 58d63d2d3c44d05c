"""`python -m fedxl.deploy ROLE FOLDER ...`: one process of a party. `fedxl deploy` starts and supervises them."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from fedxl.deploy import say
from fedxl.errors import UserError

# Imported when needed: the gateway does not need torch, and a site does not need SuperLink.
ROLES: Mapping[str, str] = {
    "superlink": "fedxl.deploy.server.superlink",
    "gateway": "fedxl.deploy.server.gateway_process",
    "app": "fedxl.deploy.server.app",
    "node": "fedxl.deploy.site.node",
    "prepare": "fedxl.deploy.site.cache",
}


def main() -> None:
    role, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    os.umask(0o077)  # every file we write is readable by our user alone
    logging.getLogger("fedxl").addHandler(logging.StreamHandler(sys.stdout))  # not Flower's logger: it is too verbose
    if role != "superlink":  # SuperLink handles SIGTERM itself
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
