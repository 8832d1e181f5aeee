"""Every flag of ``headrace serve``: what is honoured, what is another spelling, what is refused and why.

A target names where the value goes (``headrace.cli.settings`` builds the configuration from them):
``engine.*`` EngineConfig, ``server.*`` ServerConfig, ``defaults.*`` sampling defaults, ``download.*`` the hub,
``keys.*`` API keys, ``cli.*`` what the command itself needs.
"""

from __future__ import annotations

from headrace.cli.flags import Flag, FlagTable
from headrace.cli.values import (
    FILE,
    HOST,
    JSON_OBJECT,
    KV_BITS,
    ORIGIN,
    OVERFLOW_POLICY,
    choice,
    http_url,
    integer,
    mebibytes,
    number,
    text,
    url_path,
)

_SERVER = (
    Flag(
        "--served-model-name",
        "name of the model in the API",
        "server.served_model_names",
        text("NAME"),
        repeat=True,
    ),
    Flag("--host", "address to listen on", "server.host", HOST, "127.0.0.1"),
    Flag("--port", "port to listen on; 0: a free one, printed at start", "server.port", integer(0, 65535), "8000"),
    Flag("--config", "these flags in a YAML, TOML or JSON file; the command line wins", "cli.config", FILE),
    Flag("--model", "MODEL, in configuration files", "cli.model", text("MODEL")),
    Flag(
        "--root-path",
        "path prefix of a proxy in front, which may strip it or not",
        "server.root_path",
        url_path("PATH"),
    ),
    Flag("--cors-origin", "browser origin allowed to call", "server.cors_origins", ORIGIN, repeat=True),
    Flag("--ssl-certfile", "certificate chain (PEM); needs --ssl-keyfile", "server.ssl_certfile", FILE),
    Flag("--ssl-keyfile", "private key (PEM)", "server.ssl_keyfile", FILE),
    Flag(
        "--log-level",
        "what is logged, at least",
        "server.log_level",
        choice("debug", "info", "warning", "error"),
        "info",
    ),
    Flag(
        "--log-format",
        "one line of text or one JSON object per record",
        "server.log_format",
        choice("text", "json"),
        "text",
    ),
    Flag(
        "--otlp-traces-endpoint",
        "collector that OpenTelemetry traces go to (OTLP over HTTP)",
        "server.otlp_traces_endpoint",
        http_url("URL"),
    ),
    Flag("--enable-metrics", "accepted: /metrics is always on"),
)

_KEYS = (
    Flag("--api-key", "accepted key, or NAME:KEY", "keys.flags", text("[NAME:]KEY"), repeat=True),
    Flag("--api-key-file", "file of such keys, one a line, # for comments", "keys.file", FILE),
    Flag("--rate-limit", "requests a minute and key; 0: no limit", "server.rate_limit_per_min", integer(0), "0"),
    Flag(
        "--prefix-isolation",
        "key: prefixes are not shared between API keys",
        "server.prefix_isolation",
        choice("none", "key"),
        "none",
    ),
    Flag("--insecure", "listen on other than loopback addresses without a key", "server.insecure"),
)

_SCHEDULING = (
    Flag("--continuous-batching", "requests advance together", "engine.continuous_batching", default="on"),
    Flag("--no-continuous-batching", "one request at a time", "engine.continuous_batching", const=False),
    Flag("--max-num-seqs", "sequences running at once, at most", "engine.max_num_seqs", integer(1), "256"),
    Flag("--completion-batch-size", alias_of="--max-num-seqs"),
    Flag("--prefill-step-size", "prompt tokens a step, at most", "engine.prefill_step_size", integer(1), "2048"),
    Flag("--chunked-prefill-tokens", alias_of="--prefill-step-size"),
    Flag(
        "--max-decode-stall-ms",
        "longest pause that a prefill puts into running streams; 0: no bound",
        "engine.max_decode_stall_ms",
        number(0),
        "250",
    ),
    Flag("--stream-interval", "tokens per streamed event", "server.stream_interval", integer(1), "1"),
    Flag("--max-queue", "waiting requests; further ones get 429", "engine.max_queue", integer(0), "64"),
)

_LIMITS = (
    Flag(
        "--max-model-len",
        "prompt and output tokens of a sequence",
        "engine.max_model_len",
        integer(1),
        "the model's, lowered to what memory holds",
    ),
    Flag("--max-tokens", "output tokens when a request names none", "server.max_tokens", integer(1), "32768"),
    Flag("--max-request-tokens", "highest max_tokens accepted", "server.max_request_tokens", integer(1), "32768"),
    Flag("--max-prompt-tokens", "longest prompt accepted", "server.max_prompt_tokens", integer(1)),
    Flag("--queue-timeout", "seconds a request may wait", "server.queue_timeout_s", number(0, above=True), "none"),
    Flag(
        "--timeout",
        "seconds a request may go without progress",
        "server.progress_timeout_s",
        number(0, above=True),
        "300",
    ),
    Flag(
        "--worker-stall-timeout",
        "seconds without a finished step before the worker is replaced",
        "server.worker_stall_timeout_s",
        number(0, above=True),
        "120",
    ),
    Flag(
        "--drain-timeout",
        "seconds that open requests get at shutdown",
        "server.drain_timeout_s",
        number(0),
        "30",
    ),
)

_MEMORY = (
    Flag(
        "--gpu-memory-utilization",
        "share of the device's working set to plan with",
        "engine.memory_utilization",
        number(0, 1, above=True),
        "0.90",
    ),
    Flag(
        "--memory-headroom",
        "share of physical memory left to others",
        "engine.memory_headroom",
        number(0, 1, below=True),
        "0.20",
    ),
    Flag("--kv-memory-mb", "size of the KV pool", "engine.kv_memory_bytes", mebibytes(), "what the plan leaves"),
    Flag("--max-cache-blocks", "size of the KV pool in blocks", "engine.max_cache_blocks", integer(1)),
    Flag("--block-size", "token positions per KV block", "engine.block_size", integer(1, 1024), "16 or 32"),
    Flag("--paged-cache-block-size", alias_of="--block-size"),
    Flag("--use-paged-cache", "accepted: the KV cache is always paged"),
    Flag("--enable-prefix-cache", "keep KV for prefixes", "engine.enable_prefix_cache", default="on"),
    Flag("--disable-prefix-cache", "forget KV at once", "engine.enable_prefix_cache", const=False),
    Flag("--cache-memory-mb", "cap on KV that nobody uses now", "engine.prefix_cache_bytes", mebibytes(0)),
    Flag(
        "--cache-memory-percent",
        "the same, as a share of the KV pool",
        "engine.prefix_cache_share",
        number(0, 1),
        "0.20",
    ),
    Flag(
        "--kv-cache-dtype",
        "how KV is held; int8 takes half of 16 bits, int4 a quarter",
        "engine.kv_cache_dtype",
        choice("auto", "int8", "int4"),
        "auto, that is the dtype of the weights",
    ),
    Flag("--kv-cache-quantization", "same as --kv-cache-dtype int8", "kv.quantize"),
    Flag("--kv-cache-quantization-bits", "8: int8, 4: int4", "engine.kv_cache_dtype", KV_BITS),
)

_MODEL = (
    Flag(
        "--dtype",
        "of weights and KV",
        "engine.dtype",
        choice("auto", "float16", "bfloat16", "float32"),
        "auto, that is float32 on CPU, elsewhere the checkpoint's",
    ),
    Flag(
        "--keep-quantized",
        "packed weights stay packed, with no plain ones beside them",
        "engine.keep_quantized",
        default="by device",
    ),
    Flag("--dequantize", "unpack weights at load, keep no packed ones", "engine.keep_quantized", const=False),
    Flag("--chat-template", "Jinja file instead of the model's own", "server.chat_template_file", FILE),
    Flag("--revision", "branch, tag or commit of a hub model", "download.revision", text("REV")),
    Flag("--offline", "never use the network", "download.offline"),
    Flag("--download-timeout", "seconds without a byte", "download.timeout_s", number(0, above=True), "30"),
    Flag("--download-retries", "further attempts", "download.retries", integer(0), "3"),
)

_ANSWERS = (
    Flag(
        "--tool-call-parser",
        "how tool calls are read: a name, auto or none",
        "server.tool_call_parser",
        text("NAME"),
        "auto, that is by the chat template",
    ),
    Flag(
        "--reasoning-parser",
        "how thinking is read: a name, auto or none",
        "server.reasoning_parser",
        text("NAME"),
        "auto, that is by the chat template",
    ),
    Flag(
        "--default-thinking-token-budget",
        "tokens of thinking per answer when a request names none",
        "server.thinking_token_budget",
        integer(1),
    ),
    Flag("--enable-auto-tool-choice", "accepted: calls are read whenever a request declares tools"),
    Flag(
        "--response-store-mb",
        "room for stored answers of /v1/responses; 0: none is stored",
        "server.response_store_mb",
        integer(0),
        "256",
    ),
    Flag(
        "--response-store-file",
        "where they are",
        "server.response_store_file",
        text("FILE"),
        "in the user's state folder",
    ),
)

_DEFAULTS = (
    Flag("--default-temperature", "0: greedy", "defaults.temperature", number(0, 2)),
    Flag("--default-top-p", "1: off", "defaults.top_p", number(0, 1, above=True)),
    Flag("--default-top-k", "0: off", "defaults.top_k", integer(0)),
    Flag("--default-min-p", "0: off", "defaults.min_p", number(0, 1)),
    Flag("--default-presence-penalty", "0: off", "defaults.presence_penalty", number(-2, 2)),
    Flag("--default-repetition-penalty", "1: off", "defaults.repetition_penalty", number(0.01, 100)),
    Flag(
        "--default-chat-template-kwargs",
        "variables for the chat template",
        "server.chat_template_kwargs",
        JSON_OBJECT,
    ),
)

_EMBEDDINGS = (
    Flag(
        "--embedding-model",
        "model for /v1/embeddings (as MODEL), in a worker of its own",
        "side.embedding",
        text("MODEL"),
        "the main model's hidden states",
    ),
    Flag(
        "--rerank-model",
        "model for /v1/rerank, likewise",
        "side.reranker",
        text("MODEL"),
        "cosines of embeddings",
    ),
    Flag(
        "--embedding-max-length",
        "tokens of an input to embed or rerank, at most",
        "server.embedding_max_length",
        integer(1),
        "what the model takes",
    ),
    Flag(
        "--embedding-overflow-policy",
        "longer inputs are refused (the default), or lose their end",
        "server.embedding_truncates",
        OVERFLOW_POLICY,
    ),
)

_ONE_MODEL = "one server holds one model now; start one server per model"
_NO_SPECULATION = "speculative decoding is not built; leave it out, output is the same without it"
_LOSSY = "it drops prompt tokens, so answers change; use --prefill-step-size and --max-decode-stall-ms"
_PREFIX_CACHE = "use --cache-memory-mb (a cap in bytes) or --disable-prefix-cache"
_NO_IMAGES = "images, video and audio are not built; leave it out for text models"

_REFUSED: dict[str, str] = {
    "--models-config": _ONE_MODEL,
    "--memory-budget-gb": _ONE_MODEL + "; --gpu-memory-utilization and --kv-memory-mb bound its memory",
    "--auto-unload-idle-seconds": _ONE_MODEL,
    "--lazy-load-model": "the model is loaded at start; GET /ready tells when it can answer",
    "--adapter": "LoRA adapters are not built; fuse the adapter into the model",
    "--mcp-config": "MCP tools are not built; run the tools in the client",
    "--trust-remote-code": "code from checkpoints is never run; leave it out",
    "--ssd-cache-dir": "KV on disk is not built; use --cache-memory-mb",
    "--ssd-cache-max-gb": "KV on disk is not built; use --cache-memory-mb",
    "--warm-prompts": "warming from a file is not built; send the prompts once after start",
    "--draft-model": _NO_SPECULATION,
    "--num-draft-tokens": _NO_SPECULATION,
    "--ngram-speculation": _NO_SPECULATION,
    "--enable-mtp": _NO_SPECULATION,
    "--mtp-num-draft-tokens": _NO_SPECULATION,
    "--mtp-optimistic": "it accepts tokens unverified, so answers change; leave it out",
    "--prefill-batch-size": "short prompts prefill together up to --prefill-step-size tokens; use that",
    "--kv-cache-quantization-group-size": "the size of a layer's heads decides it (64, or 32); leave it out",
    "--kv-cache-min-quantize-tokens": "with --kv-cache-dtype int8 or int4 every token's KV is; leave it out",
    "--max-kv-size": "dropping old KV changes answers; use --max-model-len",
    "--no-memory-aware-cache": _PREFIX_CACHE,
    "--prefix-cache-size": _PREFIX_CACHE,
    "--prefix-trie-cache": "prefixes are shared by block hashes, always; " + _PREFIX_CACHE,
    "--prefix-trie-cache-size": _PREFIX_CACHE,
    "--prefix-trie-cache-memory-mb": "use --cache-memory-mb",
    "--simple-engine": "there is one engine; use --no-continuous-batching for one request at a time",
    "--specprefill": _LOSSY,
    "--specprefill-threshold": _LOSSY,
    "--specprefill-keep-pct": _LOSSY,
    "--specprefill-backbone-pct": _LOSSY,
    "--specprefill-draft-model": _LOSSY,
    "--mllm": _NO_IMAGES,
    "--mllm-prefill-step-size": "use --prefill-step-size",
    "--mllm-draft-model": _NO_SPECULATION,
    "--mllm-draft-kind": _NO_SPECULATION,
    "--mllm-draft-block-size": _NO_SPECULATION,
    "--default-mllm-draft": _NO_SPECULATION,
    "--max-audio-upload-mb": _NO_IMAGES,
    "--max-tts-input-chars": _NO_IMAGES,
}

SERVE_FLAGS = FlagTable.of(
    {
        "server": _SERVER,
        "keys": _KEYS,
        "scheduling": _SCHEDULING,
        "limits": _LIMITS,
        "memory": _MEMORY,
        "model": _MODEL,
        "answers": _ANSWERS,
        "embeddings": _EMBEDDINGS,
        "defaults for fields that a request leaves out (default: generation_config.json's)": _DEFAULTS,
        "not available": tuple(Flag(name, refused=advice) for name, advice in _REFUSED.items()),
    }
)
