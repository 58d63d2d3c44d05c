"""A site's end: passes each task to `answer`, and its reply back."""

from __future__ import annotations

import os
from pathlib import Path

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fedxl.deploy.site.requests import answer

CONTENT = "content"  # the key of a message's bytes, in requests and replies


class FedxlExecutor(Executor):  # type: ignore[misc]
    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        os.umask(0o077)
        reply = make_reply(ReturnCode.OK)
        reply[CONTENT] = b"".join(answer(own_file(fl_ctx, "site.toml"), task_name, shareable.get(CONTENT, b"")))
        return reply


def own_file(fl_ctx: FLContext, name: str) -> Path:
    """A file of this party's own local folder, to which a job cannot write."""
    return Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_site_config_dir(), name).resolve()
