"""The key that servers ask for: from the environment, never a setting, so it can't reach a manifest."""

from __future__ import annotations

import os
from typing import Final

API_KEY: Final = "GRPOCTL_SERVER_API_KEY"
"""Environment variable with the bearer token."""


def authorization() -> dict[str, str]:
    """Return the header that carries the key, none without one."""
    key = os.environ.get(API_KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}
