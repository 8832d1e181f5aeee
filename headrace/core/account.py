"""How much of its share one API key has used, within one priority."""

from __future__ import annotations


class Account:
    """Balance of a key: tokens it may still use in its turn; negative when it is ahead of its share.

    ``num_live`` counts its sequences that wait or run; the account is forgotten with the last of them.
    """

    __slots__ = ("balance", "key", "num_live", "priority")

    def __init__(self, priority: int, key: str) -> None:
        self.priority = priority
        self.key = key
        self.balance = 0
        self.num_live = 0
