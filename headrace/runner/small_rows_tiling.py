"""How products of few rows are cut for a GPU: the few tilings that a shape is measured with (``small_rows.py``).

A *tiling* is the constants of one compiled form of the kernel (``small_rows_source.py``). No rule is right for all
shapes and devices, and trying a tiling costs a start some hundredths of a second: a shape has up to three, taken
from sweeps over the shapes of models with 1 and 8 billion weights on an H200. The first is used where nothing was
measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.runner import small_rows_source as source

# Rows of one thread block; blocks of other rows read the same weights from the cache.
BLOCK_ROWS = 32
# Blocks get wider, and read inputs less often, while there are this many: about one per multiprocessor.
LEAST_BLOCKS = 120
# Up to this many blocks start at once on a large GPU when each fills a multiprocessor.
FILLING_BLOCKS = 132
# A product of so many outputs has blocks enough for the widest ones, however few rows there are.
MANY_OUTPUTS = 16384
# Blocks of so few, such as those of an expert router, are narrow and share the inner dimension among many warps.
FEW_OUTPUTS = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """Constants of one compiled form.

    Attributes:
        tiles: of 8 rows.
        wide: tiles of 16 outputs.
        warps: of a block; even.
        deep: chunks of weights that are loaded at once.
        resident: blocks that share a multiprocessor; None: as many as registers allow, see ``bounds``.
        apart: whether the norm is an operation of its own.
    """

    tiles: int
    wide: int
    warps: int
    deep: int
    resident: int | None = None
    apart: bool = False

    def __str__(self) -> str:
        parts = (self.tiles, self.wide, self.warps, self.deep, self.resident or "-")
        return "/".join(map(str, parts)) + (" apart" if self.apart else "")


def tilings(rows: int, outputs: int, *, gated: bool, normed: bool, packed: bool) -> list[Tiling]:
    """Those to try, at least one. ``normed``: there is a norm that the kernel can take along."""
    if packed:
        found = _packed_tilings(rows, outputs, gated=gated, normed=normed)
    else:
        found = _plain_tilings(rows, outputs, gated=gated)
    fitting = [tiling for tiling in found if outputs % (16 * tiling.wide) == 0]
    return list(dict.fromkeys(fitting))


def _packed_tilings(rows: int, outputs: int, *, gated: bool, normed: bool) -> list[Tiling]:
    """Inputs are read as often as there are blocks, from the cache, which is what packed products wait for."""
    tiles = _tiles(rows)
    if not gated and (outputs <= FEW_OUTPUTS or outputs % 32):
        return [Tiling(tiles, 1, 8, 1, 2 if tiles < 4 else 1), Tiling(tiles, 1, 16, 1, 1)]
    if tiles == 1 and (gated or normed or outputs >= MANY_OUTPUTS):
        return [Tiling(1, 4, 4, 1, 3), Tiling(1, 2, 4, 1, 5), Tiling(1, 2, 4, 2, 4)]
    if tiles == 1:
        return [Tiling(1, 2, 4, 2, 4), Tiling(1, 1, 8, 1, 4), Tiling(1, 2, 8, 2, 2)]
    widest = Tiling(tiles, 4, 4, 1, 2)
    other = replace(widest, apart=True) if normed else Tiling(tiles, 4, 8, 1, 1)
    return [widest, other, Tiling(tiles, 2, 4, 1, 2 if tiles == 4 else 3)]


def _plain_tilings(rows: int, outputs: int, *, gated: bool) -> list[Tiling]:
    """Few rows: narrow blocks, many of them. More rows: wider ones, which read the inputs less often."""
    tiles, least = _tiles(rows), 2 if gated else 1
    wide = least
    while tiles > 1 and wide < 4 and outputs % (32 * wide) == 0 and outputs // (32 * wide) >= LEAST_BLOCKS:
        wide *= 2
    together = FILLING_BLOCKS * (2 if tiles * wide == 1 else 1)
    sums = wide if tiles == 1 else wide * BLOCK_ROWS // 8
    warps = 16 if outputs // (16 * wide) <= together and sums <= 8 else 8
    usual = Tiling(tiles, wide, warps, 2 if sums >= 8 else 4)
    if tiles == 1:
        return [usual, Tiling(1, least, 4, 4, 8 // least), Tiling(1, 2, 8, 4)]
    return [usual, Tiling(tiles, 4, 4, 2, 2), Tiling(tiles, 2, 4, 3, 3)]


def _tiles(rows: int) -> int:
    return 1 if rows <= 8 else 2 if rows <= 16 else BLOCK_ROWS // 8


def bounds(warps: int, sums: int, resident: int | None = None) -> str:
    """The part of a header with a block's threads.

    Args:
        warps: of a block.
        sums: tiles of 8 x 16 sums that each warp keeps.
        resident: blocks that shall share a multiprocessor; None: as many as registers allow, by ``sums``.
    """
    return source.BOUNDS.format(threads=warps * 32, blocks=resident or (32 if sums == 1 else 16) // warps)
