"""Which products of a layer run as kernels: decided by costs, made up here."""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx
import pytest

from headrace.runner.products import choice as product_choice
from headrace.runner.products.choice import MEASURED_ROWS, SmallRowsKernel
from headrace.runner.products.kernel_products import KernelProducts
from headrace.runner.products.small_rows import Dense, Form, Product, Way, largest_difference, plain_product
from headrace.runner.products.tiling import Staged, Tiling
from headrace.runner.timing import Cost

US = 1e-6
USUAL = Tiling(1, 1, 8, 2)
FORMS: list[Form] = [("norm", 64, 32, False, "16 bits"), ("residual", 32, 64, False, "16 bits")]


def choices(costs: list[tuple[Cost, Cost]]) -> list[bool]:
    products = SmallRowsKernel(plain_product)
    products._costs = {
        (8, *form): {USUAL: own, None: plain} for form, (own, plain) in zip(FORMS, costs, strict=True)
    }
    products.balance(FORMS)
    return [products._chosen[(8, *form)] is not None for form in FORMS]


def test_a_busy_host_prefers_what_it_starts_quickly() -> None:
    own, plain = Cost(8 * US, 60 * US), Cost(120 * US, 50 * US)
    assert choices([(own, plain), (own, plain)]) == [True, True]


def test_a_busy_device_prefers_what_it_computes_quickly() -> None:
    own, plain = Cost(8 * US, 300 * US), Cost(30 * US, 70 * US)
    assert choices([(own, plain), (own, plain)]) == [False, False]


def test_a_mixture_is_best_where_both_are_busy() -> None:
    small = Cost(8 * US, 10 * US), Cost(60 * US, 8 * US)
    large = Cost(8 * US, 150 * US), Cost(30 * US, 70 * US)
    assert choices([small, large]) == [True, False]


def test_rows_without_all_costs_stay_as_they_were() -> None:
    products = SmallRowsKernel(plain_product)
    products._costs = {(rows, *FORMS[0]): {USUAL: Cost(1, 1), None: Cost(2, 2)} for rows in MEASURED_ROWS}
    products.balance(FORMS)
    assert products._chosen == {}


def test_prompts_take_no_clusters() -> None:
    """MLX would instantiate a graph for each; in recorded steps they cost nothing more."""
    taken: list[Way] = []

    def own(x: mx.array, product: Product) -> mx.array:
        taken.append(product.tiling)
        return plain_product(x, product)

    products, x = SmallRowsKernel(own), mx.ones((8, 64), mx.bfloat16)
    product = Product(Dense(mx.ones((64, 64), mx.bfloat16)))
    staged, cluster = Staged(1, 64, 2, 4, 1), Staged(1, 64, 2, 4, 2)
    for costs, expected in (
        ({cluster: Cost(0, 1), None: Cost(0, 3), staged: Cost(0, 2)}, [cluster, staged]),
        ({cluster: Cost(0, 1), None: Cost(0, 2), staged: Cost(0, 3)}, [cluster]),  # the library's
        ({cluster: Cost(0, 1)}, [cluster]),
    ):
        key = (8, *product.form)
        products._costs[key], products._chosen[key] = dict[Way, Cost](costs), cluster
        taken.clear()
        assert mx.array_equal(products(x, product), products.in_prompts(x, product))
        assert taken == expected


def test_layers_of_zeros_are_no_fault() -> None:
    """A pruned layer's products are compared like any other's, and right ones are used."""
    layers = [(Dense(mx.zeros((64, 64), mx.bfloat16)), None)] * 2
    products = SmallRowsKernel(plain_product)
    products.measure(layers)
    assert products.faults == []
    assert all(key in products._costs for key in products._chosen)
    wrong = SmallRowsKernel(lambda x, product: plain_product(x, product) + 1)
    wrong.measure(layers)
    assert wrong.faults
    assert set(wrong._chosen.values()) == {None}


@pytest.mark.parametrize(
    ("got", "expected", "worst"),
    [(0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (1.0, 2.0, 0.5), (math.nan, 0.0, math.nan)],
)
def test_differences_are_shares_of_the_largest_value(got: float, expected: float, worst: float) -> None:
    assert largest_difference(mx.array([0.0, got]), mx.array([0.0, expected])) == pytest.approx(worst, nan_ok=True)


def test_what_a_layer_takes_has_the_last_word() -> None:
    """Clusters are quickest one by one, slower in a layer; one bucket cannot do without them."""
    staged, cluster = Staged(1, 64, 2, 4, 1), Staged(1, 64, 2, 4, 2)
    costs = {cluster: Cost(0, 1), staged: Cost(0, 2), USUAL: Cost(0, 3), None: Cost(0, 4)}
    products = SmallRowsKernel(plain_product)
    for rows in (1, 8, 32):
        products._costs |= {(rows, *form): dict[Way, Cost](costs) for form in FORMS}
    products._costs[8, *FORMS[0]] = {cluster: Cost(0, 1)}
    asked: list[tuple[int, Way, Way]] = []

    def seconds(rows: int) -> float:
        ways = tuple(products._chosen[rows, *form] for form in FORMS)
        asked.append((rows, *ways))
        return {cluster: 3.0, staged: 2.0, USUAL: 1.0 if rows == 1 else 5.0}[ways[1]]

    products.settle(FORMS, seconds)
    assert [products._chosen[1, *form] for form in FORMS] == [USUAL, USUAL]
    assert [products._chosen[8, *form] for form in FORMS] == [cluster, cluster]
    assert [products._chosen[32, *form] for form in FORMS] == [staged, staged]
    assert len(asked) == len(set(asked)) == 7


@pytest.mark.parametrize(
    ("own", "other", "better"),
    [
        (Cost(1, 5), Cost(3, 4), False),  # the device is the limit, and the other is quicker there
        (Cost(1, 2), Cost(3, 2), True),
        (Cost(1, 6), Cost(4, 2), False),
    ],
)
def test_one_product_alone(own: Cost, other: Cost, better: bool) -> None:
    assert own.beats(other) is better


def test_the_quickest_tiling_that_is_right_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = Dense(mx.random.normal((128, 32)).astype(mx.bfloat16))
    usual, wrong, other = KernelProducts.tilings(32, mx.bfloat16, Product(dense))
    seconds = {None: 9.0, usual: 5.0, wrong: 1.0, other: 3.0}

    def own(x: mx.array, product: Product) -> mx.array:
        return plain_product(x, product) * (2 if product.tiling == wrong else 1)

    def cost(by: partial[mx.array], *_: object) -> Cost:
        return Cost(0.0, seconds.get(by.args[0], 20.0))

    monkeypatch.setattr(product_choice, "_cost", cost)
    products = SmallRowsKernel(own)
    form = products.measure([(dense, None)])
    assert products._chosen[(32, *form)] == other and products._chosen[(1, *form)] is None
    assert f"kernel {wrong}: product 128 x 32 at 32 rows: differs by" in products.note()
    assert any(f"32: {other} (3000000.0 : 9000000.0)" in line for line in products.details())
