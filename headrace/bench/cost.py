"""What tokens cost on hardware of one's own, and after how many hours it has paid for itself. Pure functions.

    owning       = price / (months x 730.5 h)                         per hour of the clock
    electricity  = watts / 1000 x price per kWh                       per hour of work
    per million  = (owning / utilization + electricity) / (tokens per second x 3600) x 10^6
    break-even   = price / (rent x own speed / rented speed - electricity)     hours of work

``utilization`` is the share of its months that the machine works; idle power is not counted. An hour of the rented
accelerator does the work of (rented speed / own speed) hours of one's own, at full load both.
"""

from __future__ import annotations

from dataclasses import dataclass

HOURS_PER_MONTH = 365.25 * 24 / 12


@dataclass(frozen=True, slots=True)
class Hardware:
    """Money in any one currency. ``tokens_per_s``: what it does under load (output tokens, usually)."""

    price: float
    months: float
    watts: float
    price_per_kwh: float
    tokens_per_s: float
    utilization: float = 1.0


@dataclass(frozen=True, slots=True)
class Rented:
    """A rented accelerator; ``tokens_per_s`` None: as fast as one's own."""

    price_per_hour: float
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """``break_even_hours``: None when renting is cheaper for ever, or nothing to compare with was given."""

    per_million_tokens: float
    owning_per_hour: float
    electricity_per_hour: float
    rented_per_million_tokens: float | None = None
    break_even_hours: float | None = None


def owning_per_hour(hardware: Hardware) -> float:
    return hardware.price / (hardware.months * HOURS_PER_MONTH)


def electricity_per_hour(hardware: Hardware) -> float:
    return hardware.watts / 1000 * hardware.price_per_kwh


def per_million_tokens(hardware: Hardware) -> float:
    hourly = owning_per_hour(hardware) / hardware.utilization + electricity_per_hour(hardware)
    return hourly / (hardware.tokens_per_s * 3600) * 1e6


def rented_per_million_tokens(rented: Rented, own_tokens_per_s: float) -> float:
    return rented.price_per_hour / ((rented.tokens_per_s or own_tokens_per_s) * 3600) * 1e6


def break_even_hours(hardware: Hardware, rented: Rented) -> float | None:
    """Hours of work after which the price is earned back; None: never."""
    share = hardware.tokens_per_s / rented.tokens_per_s if rented.tokens_per_s else 1.0
    saved_per_hour = rented.price_per_hour * share - electricity_per_hour(hardware)
    return hardware.price / saved_per_hour if saved_per_hour > 0 else None


def cost_of(hardware: Hardware, rented: Rented | None = None) -> Cost:
    return Cost(
        per_million_tokens(hardware),
        owning_per_hour(hardware),
        electricity_per_hour(hardware),
        rented_per_million_tokens(rented, hardware.tokens_per_s) if rented else None,
        break_even_hours(hardware, rented) if rented else None,
    )


REQUIRED = ("price", "months", "watts", "kwh")
KNOWN = (*REQUIRED, "utilization", "tokens_per_s", "rented", "rented_tokens_per_s")


def read_cost(text: str) -> dict[str, float]:
    """``price=4000,months=36,watts=120,kwh=0.30`` and, at will, the other KNOWN keys.

    Raises ValueError with a phrase that completes "must be …".
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in KNOWN:
            raise ValueError(f"KEY=VALUE pairs with keys of {', '.join(KNOWN)} (unknown: {name!r})")
        try:
            values[name] = float(number)
        except ValueError:
            raise ValueError(f"numbers: {name} is {number!r}") from None
        free = name in ("watts", "kwh", "price")
        if not (values[name] >= 0 if free else values[name] > 0) or values[name] == float("inf"):
            raise ValueError(f"{'at least' if free else 'above'} 0 in {name}")
    if missing := [name for name in REQUIRED if name not in values]:
        raise ValueError(f"complete: {', '.join(missing)} is missing")
    if values.get("utilization", 1.0) > 1:
        raise ValueError("at most 1 in utilization (a share of the time)")
    return values


def cost_from(values: dict[str, float], tokens_per_s: float | None) -> Cost | None:
    """Of ``read_cost``'s values; ``tokens_per_s`` is what was measured, which a given one goes before.

    None when neither is there.
    """
    speed = values.get("tokens_per_s", tokens_per_s)
    if not speed:
        return None
    hardware = Hardware(
        values["price"], values["months"], values["watts"], values["kwh"], speed, values.get("utilization", 1.0)
    )
    rented = Rented(values["rented"], values.get("rented_tokens_per_s")) if "rented" in values else None
    return cost_of(hardware, rented)
