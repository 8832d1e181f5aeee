"""Prompts for load: so many words, each prompt different from its first words on.

Prompts that share a beginning would measure a prefix cache, so each one begins with words drawn from a generator
seeded by (seed, index). The same seed gives the same prompts.
"""

from __future__ import annotations

import random

from headrace.bench.load import LoadRequest

_WORD_LIST = (
    "river stone lantern market winter garden engine letter harbour copper meadow signal window bridge pepper "
    "saddle mirror forest candle thunder orchard ribbon anchor valley hammer basket feather island kettle marble "
    "needle oyster pencil quarry rocket shadow tunnel velvet whistle yellow zebra acorn barrel canyon desert "
    "ember falcon glacier hollow ivory jungle kernel ladder magnet nectar onion parade quiver radish sailor "
    "temple umbrella violin walnut beacon cradle dragon elbow fabric goblet hazel insect jacket kitten lemon "
    "mantle nickel olive puzzle rattle silver tailor uncle vessel wagon blanket cactus dolphin envelope fiddle "
    "gravel helmet iceberg jigsaw lizard monsoon notebook octopus paddle quilt raisin spiral trumpet urchin "
    "village willow almond bucket cinnamon dagger eclipse fountain gallery horizon inlet jasmine kayak locket"
)

_TASK = "Write a long story in many sentences that uses all of these words"


def make_prompt(words: int, seed: int, index: int) -> str:
    """A prompt of exactly ``words`` words (at least 14), unlike any other (seed, index)'s."""
    task = _TASK.split()
    known = _WORD_LIST.split()
    picker = random.Random(f"{seed}:{index}")
    chosen = [picker.choice(known) for _ in range(words - len(task))]
    return f"{' '.join(chosen[:2])}: {_TASK}: {' '.join(chosen[2:])}"


def chat_requests(
    model: str, count: int, *, words: int, output_tokens: int, seed: int, extra: dict[str, object] | None = None
) -> list[LoadRequest]:
    """``count`` greedy chat requests, equal in length; ``extra`` fields go into each body.

    ``ignore_eos`` asks for exactly ``output_tokens``; servers that do not know the field may stop sooner.
    """
    return [
        LoadRequest(
            "/v1/chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": make_prompt(words, seed, index)}],
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                **(extra or {}),
            },
        )
        for index in range(count)
    ]
