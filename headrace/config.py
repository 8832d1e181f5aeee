"""Configuration, frozen and validated once; built from the command line in ``headrace.cli`` only."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is started with (sent to it as JSON).

    Attributes:
        model: folder of safetensors or path of a ``.gguf`` file, already on this machine.
        dtype: how weights and KV are computed: "auto" (float32 on CPU, the checkpoint's own elsewhere) or a name.
        keep_quantized: True: packed weights stay packed and no others are held; False: dequantize; None: choose by
            device and memory.
        max_num_seqs: sequences that run at once, at most.
        max_model_len: prompt + output tokens per sequence; None: the model's, lowered to what memory holds.
        block_size: token positions per KV block; None: by device.
        max_cache_blocks: exact number of usable blocks; None: from the memory plan.
        kv_memory_bytes: size of the KV pool; None: from the memory plan.
        memory_utilization: share of the device's working set that may be planned.
        memory_headroom: share of physical memory left to everybody else.
        kv_cache_dtype: "auto", "int8" or "int4".
        enable_prefix_cache: keep blocks of finished requests for later ones.
        prefix_cache_bytes: cap on KV that only the prefix cache holds; None: ``prefix_cache_share`` of the pool.
        prefix_cache_share: see above.
        prefill_step_size: prompt tokens per step, at most.
        max_decode_stall_ms: longest pause that a prefill chunk may put between two tokens of a running stream;
            0 or None: no bound.
        max_queue: requests waiting, at most; further ones are refused.
        continuous_batching: False: one request at a time.
        compile: whether the decode step is compiled; None: by device.
        replaces: this worker takes the place of one that was ready: it may use half of the headroom, and have a
            smaller pool than was asked for, rather than not start while memory is short.
    """

    model: str
    dtype: str = "auto"
    keep_quantized: bool | None = None
    max_num_seqs: int = 256
    max_model_len: int | None = None
    block_size: int | None = None
    max_cache_blocks: int | None = None
    kv_memory_bytes: int | None = None
    memory_utilization: float = 0.90
    memory_headroom: float = 0.20
    kv_cache_dtype: str = "auto"
    enable_prefix_cache: bool = True
    prefix_cache_bytes: int | None = None
    prefix_cache_share: float = 0.20
    prefill_step_size: int = 2048
    max_decode_stall_ms: float | None = 250.0
    max_queue: int = 64
    continuous_batching: bool = True
    compile: bool | None = None
    replaces: bool = False


class ApiKey(msgspec.Struct, frozen=True):
    """One accepted key; ``name`` is what metrics and fairness use."""

    name: str
    secret: str


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults for fields a request leaves out: flags first, then generation_config.json, then these."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0


class SideModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model beside the main one, in a worker of its own; ``name`` is what requests call it."""

    name: str
    engine: EngineConfig


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway is started with.

    ``prefix_isolation``: "none": all keys share prefixes; "key": a key shares with itself only, so that nobody
    learns from the time to the first token what others have sent.

    ``tool_call_parser``, ``reasoning_parser``: a name, "auto" (by the chat template) or "none".

    ``thinking_token_budget``: tokens of thinking per answer for requests that name none.

    ``embedding``, ``reranker``: models beside the main one for ``/v1/embeddings`` and ``/v1/rerank``; None: the
    main model's hidden states, and the embeddings, serve. ``embedding_max_length``: tokens of an input at most,
    None: what the model takes; ``embedding_truncates``: longer inputs lose their end instead of being refused.

    ``otlp_traces_endpoint``: URL that OpenTelemetry traces go to; None: there are none.

    ``response_store_mb``: room for the stored answers of ``/v1/responses``, 0: none is stored; they are in
    ``response_store_file``, None: in the user's state folder.
    """

    engine: EngineConfig
    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[ApiKey, ...] = ()
    rate_limit_per_min: int = 0
    prefix_isolation: str = "none"
    insecure: bool = False
    max_tokens: int = 32768
    max_request_tokens: int = 32768
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 32 * 1024 * 1024
    queue_timeout_s: float | None = None
    progress_timeout_s: float = 300.0
    worker_stall_timeout_s: float = 120.0
    drain_timeout_s: float = 30.0
    stream_interval: int = 1
    defaults: dict[str, float | int] = {}
    chat_template_file: str | None = None
    chat_template_kwargs: dict[str, object] = {}
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    thinking_token_budget: int | None = None
    embedding: SideModel | None = None
    reranker: SideModel | None = None
    embedding_max_length: int | None = None
    embedding_truncates: bool = False
    response_store_mb: int = 256
    response_store_file: str | None = None
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    log_level: str = "info"
    log_format: str = "text"
    otlp_traces_endpoint: str | None = None
