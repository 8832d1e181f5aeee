"""Flags of ``bench-serve``, and what they must say together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.cli.flags import Flag, FlagTable, UsageError
from headrace.cli.values import FILE, Kind, choice, integer, number, output_file, text

FORMATS = ("table", "json", "csv", "sqlite", "html")


def list_of(one: Kind) -> Kind:
    """Values separated by commas."""

    def parse(value: str) -> object:
        return tuple(one.parse(part.strip()) for part in value.split(","))

    return Kind(f"{one.metavar},…", parse)


def _prompts(value: str) -> object:
    from headrace.bench.prompts import PromptSet

    try:
        return PromptSet.of(value).name
    except ValueError:
        raise ValueError("short, medium, long, thinking or numbers of tokens, separated by commas") from None


def _rate(value: str) -> object:
    return float("inf") if value == "inf" else number(0, above=True).parse(value)


def _boolean(value: str) -> object:
    return choice("true", "false").parse(value) == "true"


def _cost(value: str) -> object:
    from headrace.bench.cost import read_cost

    return read_cost(value)


def _caches(value: str) -> object:
    return choice("cold", "warm").parse(value)


COST = Flag(
    "--cost",
    "cost of tokens: price=…,months=…,watts=…,kwh=…[,utilization=…,tokens_per_s=…,rented=…,rented_tokens_per_s=…]",
    "bench.cost",
    Kind("KEY=X,…", _cost),
)

BENCH_FLAGS = FlagTable.of(
    {
        "server": (
            Flag("--url", "base URL", "bench.url", text("URL"), "http://127.0.0.1:8000"),
            Flag("--model", "name of the model", "bench.model", text("NAME"), "the first one listed"),
            Flag("--api-key", "sent as bearer token", "bench.api_key", text("KEY")),
            Flag("--endpoint", "route to load", "bench.endpoint", choice("chat", "completions"), "chat"),
            Flag("--timeout", "seconds without a byte until a request failed", "bench.timeout",
                 number(0, above=True), "600"),
        ),
        "requests": (
            Flag("--prompts", "built-in sets (short 64, medium 512, long 2048, thinking 256 tokens) or numbers of "
                 "tokens", "bench.prompts", list_of(Kind("SET", _prompts)), "short"),
            Flag("--prompt-tokens", alias_of="--prompts"),
            Flag("--workload", "JSON lines or ShareGPT file, instead of --prompts", "bench.workload", FILE),
            Flag("--max-tokens", "output tokens", "bench.max_tokens", list_of(integer(1)), "256"),
            Flag("--shared-prefix-tokens", "a system prompt of so many tokens, the same for all",
                 "bench.shared_prefix_tokens", integer(0), "0"),
            Flag("--turns", "user turns per conversation", "bench.turns", integer(1), "1"),
            Flag("--ignore-eos", "ask for exactly --max-tokens", "bench.ignore_eos"),
            Flag("--temperature", "of sampling", "bench.temperature", number(0, 2), "0"),
            Flag("--cache", "cold: prompts nobody sent before; warm: sent once, uncounted, before",
                 "bench.cache", list_of(Kind("{cold,warm}", _caches)), "cold"),
            Flag("--seed", "of prompts and arrivals; without it every run has its own", "bench.seed", integer(0)),
        ),
        "load": (
            Flag("--concurrency", "streams in a closed loop", "bench.concurrency", list_of(integer(1)), "1"),
            Flag("--request-rate", "Poisson arrivals per second, inf: all at once", "bench.request_rate",
                 list_of(Kind("RATE", _rate))),
            Flag("--num-requests", "requests per repetition", "bench.num_requests", integer(1),
                 "2 per stream, 10 s of arrivals"),
            Flag("--num-prompts", alias_of="--num-requests"),
            Flag("--repetitions", "runs of every cell, interleaved", "bench.repetitions", integer(1), "1"),
            Flag("--warmup", "uncounted short requests at the beginning", "bench.warmup", integer(0), "2"),
            Flag("--sweep", "vary one axis over its usual values (or those given)", "bench.sweep",
                 choice("concurrency", "prompt", "output")),
        ),
        "objectives": (
            Flag("--slo-ttft-p95-ms", "bound on the time to the first token", "bench.slo_ttft_ms",
                 number(0, above=True)),
            Flag("--slo-itl-p95-ms", "bound on the gap between tokens", "bench.slo_itl_ms", number(0, above=True)),
            Flag("--capacity-envelope", "find the highest load that keeps the bounds (a rate with --request-rate)",
                 "bench.envelope"),
            Flag("--capacity-max", "highest load to try", "bench.capacity_max", number(1), "256"),
            COST,
        ),
        "output": (
            Flag("--format", "what is written", "bench.format", choice(*FORMATS), "table"),
            Flag("--json", "same as --format json", "bench.format", const="json"),
            Flag("--output", "write to this file", "bench.output", output_file("FILE"), "standard output"),
            Flag("--scrape-metrics", "read the server's /metrics meanwhile", "bench.scrape_metrics",
                 Kind("{true,false}", _boolean), "true"),
            Flag("--no-progress", "nothing on standard error while it runs", "bench.progress", const=False),
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What was asked for; fields are named after the flags."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    api_key: str | None = None
    endpoint: str = "chat"
    timeout: float = 600.0
    prompts: tuple[str, ...] = ("short",)
    workload: str | None = None
    max_tokens: tuple[int, ...] = (256,)
    shared_prefix_tokens: int = 0
    turns: int = 1
    ignore_eos: bool = False
    temperature: float = 0.0
    cache: tuple[str, ...] = ("cold",)
    seed: int | None = None
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    num_requests: int | None = None
    repetitions: int = 1
    warmup: int = 2
    sweep: str | None = None
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
    envelope: bool = False
    capacity_max: float = 256.0
    cost: dict[str, float] | None = None
    format: str = "table"
    output: str | None = None
    scrape_metrics: bool = True
    progress: bool = True


def read_settings(values: Mapping[str, Any]) -> BenchSettings:
    """Raises UsageError for what contradicts itself."""
    given = {name.removeprefix("bench."): value for name, value in values.items()}
    _check(given)
    given.update(_swept(given))
    if not given.get("concurrency") and not given.get("request_rate"):
        given["concurrency"] = (1,)
    return BenchSettings(**given)


def _check(given: Mapping[str, Any]) -> None:
    rules: tuple[tuple[bool, str], ...] = (
        ("workload" in given and "prompts" in given, "--workload and --prompts say two things: give one of them"),
        (
            "workload" in given and given.get("shared_prefix_tokens", 0) > 0,
            "--shared-prefix-tokens is for made prompts; a workload's are sent word for word",
        ),
        (
            given.get("turns", 1) > 1 and given.get("endpoint") == "completions",
            "--turns needs the chat route; --endpoint completions has no turns",
        ),
        (
            bool(given.get("envelope")) and not ({"slo_ttft_ms", "slo_itl_ms"} & set(given)),
            "--capacity-envelope needs --slo-ttft-p95-ms or --slo-itl-p95-ms",
        ),
        (bool(given.get("envelope")) and "sweep" in given, "--capacity-envelope and --sweep: give one of them"),
        ("capacity_max" in given and not given.get("envelope"), "--capacity-max belongs to --capacity-envelope"),
        (
            given.get("format") in ("sqlite", "html") and "output" not in given,
            f"--format {given.get('format')} needs --output FILE",
        ),
        (
            given.get("sweep") == "prompt" and "workload" in given,
            "--sweep prompt makes its own prompts: drop --workload",
        ),
    )
    for wrong, line in rules:
        if wrong:
            raise UsageError(line)


def _swept(given: Mapping[str, Any]) -> dict[str, Any]:
    """The swept axis' values; the other axes must have one value each."""
    axis = given.get("sweep")
    if axis is None:
        return {}
    from headrace.bench.cells import SWEEPS

    targets: Mapping[str, tuple[str, Callable[[int], Any]]] = {
        "concurrency": ("concurrency", int),
        "prompt": ("prompts", str),
        "output": ("max_tokens", int),
    }
    loads = len(given.get("concurrency", ())) + len(given.get("request_rate", ()))
    widths = {
        "concurrency": loads,
        "prompt": len(given.get("prompts", ())),
        "output": len(given.get("max_tokens", ())),
    }
    if axis == "concurrency" and "request_rate" in given:
        raise UsageError("--sweep concurrency and --request-rate: give one of them")
    for other, width in widths.items():
        if other != axis and width > 1:
            raise UsageError(f"--sweep {axis} varies one axis; {other} has {width} values: give one")
    target, make = targets[axis]
    return {} if given.get(target) else {target: tuple(make(value) for value in SWEEPS[axis])}
