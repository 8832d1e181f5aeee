"""Memory of models that compute attention themselves: how much is planned, and what one forward may then hold.

Such a model is handed whole contexts as arrays and makes scores of its own, one layer at a time:

    bytes of a forward [B, L] over S positions = B · S · (context_bytes + L · query_bytes)

The plan sets aside what all rows need to decode at full length in one forward, but no more than ``TARGET_BYTES``,
and in any case what one row needs for a few queries. If even that is more than a share of the memory, the model
length is lowered. Forwards that would hold more are split, by rows and then by queries.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET_BYTES = {"cpu": 256 << 20, "metal": 1 << 30, "cuda": 2 << 30}
# Queries that one row may compute at once at the full length, where memory allows: fewer make prefills slow.
WISHED_QUERIES = 16
# Of what weights leave, at most: the pool needs the rest.
LARGEST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class ContextCost:
    """Bytes per position of a row's context: for keys and values, and for each query over them."""

    context_bytes: int
    query_bytes: int

    def of(self, rows: int, queries: int, positions: int) -> int:
        return rows * positions * (self.context_bytes + queries * self.query_bytes)

    def queries(self, size: int, positions: int) -> int:
        """Queries of one row that fit into ``size`` bytes; at least one."""
        return max(1, (size // positions - self.context_bytes) // self.query_bytes)


@dataclass(frozen=True, slots=True)
class ContextScratch:
    """What is set aside.

    Attributes:
        cost: of one forward.
        nbytes: that one forward may hold.
        max_len: the longest context for which one row fits.
    """

    cost: ContextCost
    nbytes: int
    max_len: int

    def note(self, max_num_seqs: int, max_len: int) -> str:
        """For people: what of it limits steps, at the model length in force."""
        rows = min(max_num_seqs, max(1, self.nbytes // self.cost.of(1, 1, max_len)))
        return (
            f"this model computes attention itself: a forward copies its rows' contexts, "
            f"{self.cost.of(1, 1, 1):,} bytes a token, within {self.nbytes / 2**20:,.0f} MiB: "
            f"{rows} of {max_num_seqs} sequences of {max_len:,} tokens side by side; "
            "--max-num-seqs and --max-model-len change it"
        )


def plan_context_scratch(
    cost: ContextCost, device_kind: str, max_num_seqs: int, max_len: int, room: int
) -> ContextScratch:
    """Scratch for sequences of ``max_len`` tokens, or of as many as fit.

    Args:
        cost: of a forward.
        device_kind: key of ``TARGET_BYTES``.
        max_num_seqs: rows of a decode, at most.
        max_len: the model length that is wished for.
        room: bytes that weights and the buffer cache leave.
    """
    limit = max(0, int(room * LARGEST_SHARE))
    wished = min(cost.of(max_num_seqs, 1, max_len), TARGET_BYTES[device_kind])
    nbytes = min(limit, max(wished, cost.of(1, WISHED_QUERIES, max_len)))
    return ContextScratch(cost, nbytes, min(max_len, nbytes // cost.of(1, 1, 1)))
