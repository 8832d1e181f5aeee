"""Products over narrow weights, as a test's argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.runner.cpu.narrow_weights import NarrowProducts


@pytest.fixture(scope="module")
def products() -> NarrowProducts:
    """Those of this processor; skips where their extension cannot be built."""
    from headrace.runner.cpu import products as cpu_products
    from headrace.runner.cpu.narrow_weights import NarrowProducts
    from headrace.runner.kernels import native_extension

    try:
        return NarrowProducts(cpu_products._load())
    except native_extension.ExtensionError as error:
        pytest.skip(f"the extension cannot be built here: {error}")
