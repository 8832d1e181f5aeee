"""How products of few rows are cut for a GPU: the few tilings that a shape is measured with (``small_rows.py``).

A *tiling* is the constants of one compiled form of a kernel: of ``small_rows_source.py``, or, *staged*, of
``staged_rows_source.py``. No rule is right for all shapes and devices, and trying a tiling costs a start some
hundredths of a second: a shape has up to three, taken from sweeps over the shapes of models with 1 and 8 billion
weights on an H200, and up to two staged ones. The first is used where nothing was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.runner.products import small_rows_source as source
from headrace.runner.products import staged_rows_source as staged_source

# Rows of one thread block; blocks of other rows read the same weights from the cache.
BLOCK_ROWS = 32
# Blocks get wider, and read inputs less often, while there are this many: about one per multiprocessor.
LEAST_BLOCKS = 120
# Staged blocks share the inner dimension until there are this many.
LEAST_STAGED_BLOCKS = 110
# Up to this many blocks start at once on a large GPU when each fills a multiprocessor.
FILLING_BLOCKS = 132
# A product of so many outputs has blocks enough for the widest ones, however few rows there are.
MANY_OUTPUTS = 16384
# Shared memory of a multiprocessor (compute capability 9.0), and blocks that can be a cluster everywhere.
SHARED_BYTES = 228 << 10
MOST_SPLITS = 8
# Of a block's inputs in shared memory, so that several blocks share a multiprocessor.
MOST_SHARED_BYTES = 80 << 10
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
        shared: whether inputs wait in shared memory. Of one row only, over packed weights.
    """

    tiles: int
    wide: int
    warps: int
    deep: int
    resident: int | None = None
    apart: bool = False
    shared: bool = False

    @property
    def is_cluster(self) -> bool:
        """Whether several blocks read each other's shared memory."""
        return False

    @property
    def constants(self) -> list[tuple[str, int]]:
        """Of the source."""
        return [("MT", self.tiles), ("NT", self.wide), ("W", self.warps), ("DEEP", self.deep)]

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.warps * 32

    def shared_bytes(self, inner: int, bits: int) -> int:
        """Of a row's inputs in shared memory, in whole chunks of codes."""
        chunk = 512 // bits
        return -(-inner // chunk) * chunk * 2 if self.shared else 0

    @property
    def limits(self) -> tuple[int, int, int | None]:
        """Arguments of ``bounds``."""
        return self.warps, self.tiles * self.wide, self.resident

    def blocks(self, rows: int, outputs: int) -> tuple[int, int, int]:
        """Of the grid."""
        return -(-rows // (8 * self.tiles)), outputs // (16 * self.wide), 1

    def __str__(self) -> str:
        parts = (self.tiles, self.wide, self.warps, self.deep, self.resident or "-")
        return "/".join(map(str, parts)) + " apart" * self.apart + " shared" * self.shared


@dataclass(frozen=True, slots=True)
class Staged:
    """Constants of one compiled form of the staged kernel, for which a norm is always an operation of its own.

    Attributes:
        tiles: of 8 rows; one of ``ROW_TILES`` of the source.
        outputs: of a block; a multiple of 64.
        deep: strips of 64 inner positions in a slice.
        stages: slices in shared memory; at least two.
        splits: blocks that share the inner dimension: a cluster, so at most 8.
    """

    tiles: int
    outputs: int
    deep: int
    stages: int
    splits: int

    @property
    def apart(self) -> bool:
        """As that of ``Tiling``."""
        return True

    @property
    def is_cluster(self) -> bool:
        """As that of ``Tiling``."""
        return self.splits > 1

    @property
    def constants(self) -> list[tuple[str, int]]:
        """Of the source."""
        names = ("MT", "BN", "DEEP", "STAGES", "SPLITS")
        values = (self.tiles, self.outputs, self.deep, self.stages, self.splits)
        return list(zip(names, values, strict=True))

    @property
    def threads(self) -> int:
        """Of a block."""
        return 2 * self.outputs

    @property
    def shared_bytes(self) -> int:
        """Of a block: the ring, and in its place at the end the sums in float32."""
        ring = self.stages * self.deep * staged_source.STRIP * 2 * (self.outputs + 8 * self.tiles)
        return max(ring, 8 * self.tiles * (self.outputs + 4) * 4)

    @property
    def limits(self) -> staged_source.Limits:
        """What the kernel is compiled for beside its constants."""
        resident = max(1, min(SHARED_BYTES // (self.shared_bytes + 1024), 1024 // self.threads))
        return staged_source.Limits(self.threads, resident, self.splits, self.shared_bytes)

    def blocks(self, rows: int, outputs: int) -> tuple[int, int, int]:
        """Of the grid."""
        return self.splits, outputs // self.outputs, -(-rows // (8 * self.tiles))

    def takes(self, outputs: int, inner: int) -> bool:
        """Whether weights of this shape can be cut so."""
        return inner % staged_source.STRIP == 0 and outputs % self.outputs == 0

    def __str__(self) -> str:
        return f"staged {self.tiles}/{self.outputs}/{self.deep}/{self.stages}/{self.splits}"


def tilings(rows: int, outputs: int, inner: int, *, gated: bool, normed: bool, packed: bool) -> list[Tiling]:
    """Those to try, at least one. ``normed``: there is a norm that the kernel can take along."""
    if packed:
        found = _packed_tilings(rows, outputs, inner, gated=gated, normed=normed)
    else:
        found = _plain_tilings(rows, outputs, gated=gated)
    fitting = [tiling for tiling in found if outputs % (16 * tiling.wide) == 0]
    return list(dict.fromkeys(fitting))


def staged_tilings(rows: int, outputs: int, inner: int) -> list[Staged]:
    """Those to try with plain weights; there may be none.

    Narrow blocks need fewer splits, wide ones read the inputs less often.
    """
    tiles = next((tiles for tiles in staged_source.ROW_TILES if rows <= 8 * tiles), staged_source.ROW_TILES[-1])
    found = []
    for wide, stages in ((64, 4), (128, 3)):
        splits = 1
        while splits < MOST_SPLITS and outputs // wide * splits < LEAST_STAGED_BLOCKS:
            splits *= 2
        found.append(Staged(tiles, wide, 2, stages, splits))
    return [tiling for tiling in found if tiling.takes(outputs, inner)]


def _packed_tilings(rows: int, outputs: int, inner: int, *, gated: bool, normed: bool) -> list[Tiling]:
    """Inputs are read as often as there are blocks, from the cache, which is what packed products wait for."""
    tiles, many = _tiles(rows), gated or outputs >= MANY_OUTPUTS
    if not gated and (outputs <= FEW_OUTPUTS or outputs % 32):
        return [Tiling(tiles, 1, 8, 1, 2 if tiles < 4 else 1), Tiling(tiles, 1, 16, 1, 1)]
    if rows == 1 and 2 * inner <= MOST_SHARED_BYTES:
        if many:
            cuts = [(2, 4, 2, 4), (2, 2, 3, 7)]
        else:
            cuts = [(1, 8, 4, 2), (1, 16, 1, 2), (1, 16, 4, 1) if outputs <= 16 * FILLING_BLOCKS else (1, 8, 3, 3)]
        return [Tiling(1, *cut, shared=True) for cut in cuts]
    if tiles == 1 and many:
        cuts = [(2, 4, 2, 4), (2, 2, 2, 8), (2, 4, 2, 4) if normed else (4, 4, 1, 3)]
        return [Tiling(1, *cut, apart=normed and place < 2) for place, cut in enumerate(cuts)]
    if tiles == 1:
        cuts = [(2, 16, 2, 1), (1, 8, 1, 3) if normed else (1, 16, 2, 1), (1, 8, 2, 3) if normed else (1, 8, 4, 2)]
        return [Tiling(1, *cut, apart=normed) for cut in cuts]
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
