"""Split of a vocabulary over CTAs: the one file of logp that reads the number of tokens.

No bit depends on it: states are exact sums (exact.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Few(NamedTuple):
    """A tile of few tokens; the fields are those of `config.FewConfig`."""

    tile_m: int
    tile_n: int = 64
    tile_k: int = 128
    ctas_per_sm: int = 2


#: For up to tile_m tokens: the tiles of gemm's few-row kernel on heads of such sizes.
FEW = (Few(8), Few(16), Few(32), Few(64))
#: Where neither a second accumulator, an entropy's sums nor a softcap want its registers.
FEW_PLAIN = (*FEW, Few(128, 128, 64, 1))

#: Runs of a vocabulary that a launch may cut it in: a state of each goes to memory.
MOST_RUNS = 32
#: A run's start and end, in tiles.
_OF_RUN = 0.1


def runs(tokens: int, rows: int, tile: tuple[int, int], workers: int) -> int:
    """Runs of the vocabulary such that ``workers`` finish at about the same time.

    Args:
        tokens, rows: Of a launch: T, and the rows of the head.
        tile: Tokens and rows of the head that a worker takes at once.
        workers: Clusters that run at a time.
    """
    groups, tiles = -(-tokens // tile[0]), -(-rows // tile[1])

    def waves(count: int) -> float:
        return -(-groups * count // workers) * (-(-tiles // count) + _OF_RUN)

    # The fewest of those that are as fast.
    return min(range(1, min(tiles, max(MOST_RUNS, workers // groups)) + 1), key=waves)


def few(tokens: int, plain: bool) -> Few | None:
    """The tile for so many tokens; None where `runs` of wide tiles are faster or the only way.

    ``plain``: one accumulator, no entropy and no softcap, which leave registers for wider ones.
    """
    choices = FEW_PLAIN if plain else FEW
    return next((tile for tile in choices if tokens <= tile.tile_m), None)
