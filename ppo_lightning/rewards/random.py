"""`random`: 0 or 1 by a fair coin that depends on nothing but the text: the floor that a reward must beat."""

from __future__ import annotations

import hashlib
from typing import Any

from ppo_lightning.rewards import register


@register("random", needs_label=False)
def random(response: str, label: Any = None, key: str = "") -> float:
    """The same (response, label, key) gives the same value in every process; `key` carries a seed or a
    place."""
    text = f"{key}\0{label}\0{response}".encode("utf-8", "surrogatepass")
    return float(hashlib.blake2b(text, digest_size=1).digest()[0] & 1)
