"""Products over narrow weights, as a test's argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.runner.narrow_weights import NarrowProducts


@pytest.fixture(scope="module")
def products() -> NarrowProducts:
    """Those of this processor; skips where their extension cannot be built."""
    from headrace.runner import cpu_products, native_extension
    from headrace.runner.narrow_weights import NarrowProducts

    try:
        return NarrowProducts(cpu_products._load())
    except native_extension.ExtensionError as error:
        pytest.skip(f"the extension cannot be built here: {error}")
