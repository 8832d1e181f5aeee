"""Reused prefixes at every block and chunk edge, one token before and behind it: as right as computed from cold.

The scripted checkpoint answers wrongly when the trigger's KV is wrong, stale or of another prompt; the trigger
stands in the reused part, at its beginning, in its middle and at its very end.
"""

from __future__ import annotations

import pytest
from local_engine import ASSISTANT, TURN_END, USER, Build, LocalEngine, expected, turn

pytestmark = pytest.mark.slow

WINDOW = 64


def around(*edges: int) -> list[int]:
    return sorted({edge + offset for edge in edges for offset in (-1, 0, 1)})


class Edges:
    """An engine, and the lengths next to its block and chunk edges."""

    def __init__(self, engine: LocalEngine, lengths: list[int]) -> None:
        self.engine = engine
        self.lengths = lengths


SIZES = {
    "block16-chunk64": (16, 64, around(16, 48, 64, 128), "auto"),
    "block32-chunk64": (32, 64, around(32, 64, 96), "auto"),
    "block16-chunk2048": (16, 2048, around(32, 2048), "auto"),
    "block32-chunk2048": (32, 2048, around(32, 2048), "auto"),
    "block16-chunk64-int8": (16, 64, around(16, 64, 128), "int8"),
    "block16-chunk64-int4": (16, 64, around(16, 64, 128), "int4"),
}


@pytest.fixture(scope="module", params=SIZES.values(), ids=SIZES)
def edges(request: pytest.FixtureRequest, local_engine: Build) -> Edges:
    block_size, chunk, lengths, dtype = request.param
    engine = local_engine("plain", block_size=block_size, prefill_step_size=chunk, kv_cache_dtype=dtype)
    return Edges(engine, lengths)


def test_a_shared_beginning_of_any_length_is_reused_to_the_token(edges: Edges) -> None:
    run = edges.engine.run
    for shared in edges.lengths:
        for trigger_at in (1, shared - 1):
            salt = f"{shared}-{trigger_at}"
            (cold,) = run(turn(shared, trigger_at, tail="xyz"), salt=salt)
            warm, other = run(turn(shared, trigger_at, tail="zy"), turn(shared, trigger_at, tail="w"), salt=salt)
            assert cold.tokens == warm.tokens == other.tokens == expected("s05"), salt
            assert [out.cached_tokens for out in (cold, warm, other)] == [0, shared, shared]


def test_an_exact_repeat_computes_one_token(edges: Edges) -> None:
    for length in edges.lengths:
        prompt = turn(length - 2, min(5, length - 3), script="s00")
        cold, *repeats = (edges.engine.run(prompt, salt=f"repeat {length}")[0] for _ in range(3))
        assert cold.tokens == expected("s00") and cold.cached_tokens == 0
        for again in repeats:
            assert again.tokens == cold.tokens and again.cached_tokens == length - 1


def test_an_answer_becomes_part_of_the_next_prompt(edges: Edges) -> None:
    """The second turn continues behind tokens that were sampled, not sent."""
    for length in edges.lengths:
        first, salt = turn(length, 3), f"chat {length}"
        (answer,) = edges.engine.run(first, salt=salt)
        (second,) = edges.engine.run([*first, *answer.tokens, USER, *b"next", TURN_END, ASSISTANT], salt=salt)
        assert answer.tokens == second.tokens == expected("s05")
        assert second.cached_tokens == len(first) + len(answer.tokens) - 1


# -- sliding window ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(16, 64), (32, 2048)], ids=lambda p: f"block{p[0]}-chunk{p[1]}")
def sliding(request: pytest.FixtureRequest, local_engine: Build) -> LocalEngine:
    block_size, chunk = request.param
    return local_engine("swa64", block_size=block_size, prefill_step_size=chunk)


def test_the_window_ends_exactly_where_it_should(sliding: LocalEngine) -> None:
    """Trigger at position 1, n letters behind it: tokens are right while the window reaches the trigger."""
    script = expected("s05")
    lengths = (40, 52, 53, 54, 57, 58, 60, 61, 62, 63, 70)
    prompts = [turn(n + 2, 1) for n in lengths]
    for salt in ("cold", "cold", "other"):  # the second time from the prefix cache
        for n, prompt in zip(lengths, prompts, strict=True):
            (output,) = sliding.run(prompt, salt=salt)
            right = max(0, min(9, 62 - n))
            assert output.tokens[:right] == script[:right], n
            assert right == 9 or output.tokens[right] != script[right], n


@pytest.mark.parametrize("shared", around(32, 64, 128))
def test_reuse_behind_a_window_is_what_cold_gives(sliding: LocalEngine, shared: int) -> None:
    for distance in (1, WINDOW - 12):
        trigger_at = max(1, shared - distance)
        salt = f"{shared}-{distance}"
        (cold,) = sliding.run(turn(shared, trigger_at, tail="x"), salt=salt)
        (warm,) = sliding.run(turn(shared, trigger_at, tail="y"), salt=salt)
        (again,) = sliding.run(turn(shared, trigger_at, tail="y"), salt=salt + " cold")
        assert cold.tokens[:8] == warm.tokens[:8] == again.tokens[:8] == expected("s05")[:8]
        assert warm.tokens == again.tokens
        assert again.cached_tokens == 0 and warm.cached_tokens > 0
