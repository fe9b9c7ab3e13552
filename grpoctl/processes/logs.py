"""How a process speaks: messages on stderr, from the first of several processes only, without other libraries' chatter."""

from __future__ import annotations

import logging
import sys
from typing import Final

from grpoctl.processes import launcher

QUIET_LOGGERS: Final = ("httpx", "httpcore", "filelock", "fsspec", "urllib3", "botocore", "s3fs", "aiobotocore")


def set_up_logging(*, verbose: bool) -> None:
    """Send messages to stderr, those of chatty libraries only when they are errors."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    level = logging.ERROR if launcher.rank() else logging.DEBUG if verbose else logging.INFO
    logging.getLogger("grpoctl").setLevel(level)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
