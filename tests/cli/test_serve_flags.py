"""Every flag of ``serve``: once, wrong, contradicting, refused, misspelt; command line and file alike."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.checkpoint.hub import FetchOptions
from headrace.cli.flags import Flag, UsageError
from headrace.cli.serve import locate, parse, resolve
from headrace.cli.serve_flags import SERVE_FLAGS
from headrace.config import ServerConfig
from headrace.errors import StartupError

HONOURED = [flag for flag in SERVE_FLAGS.flags if not flag.refused]
REFUSED = [flag for flag in SERVE_FLAGS.flags if flag.refused]
NAMES = [flag.name for flag in SERVE_FLAGS.flags]

# a good value that is not the default, by flag
GOOD: dict[str, str] = {
    "--otlp-traces-endpoint": "http://127.0.0.1:4318",
    "--served-model-name": "m",
    "--host": "localhost",
    "--port": "9000",
    "--model": "some/model",
    "--root-path": "/llm/",
    "--cors-origin": "http://localhost:3000",
    "--log-level": "DEBUG",
    "--log-format": "json",
    "--api-key": "alice:secret",
    "--rate-limit": "60",
    "--prefix-isolation": "none",
    "--max-decode-stall-ms": "50",
    "--max-queue": "0",
    "--queue-timeout": "2.5",
    "--gpu-memory-utilization": "0.5",
    "--memory-headroom": "0.1",
    "--cache-memory-percent": "0.3",
    "--kv-cache-dtype": "auto",
    "--kv-cache-quantization-bits": "8",
    "--dtype": "bfloat16",
    "--revision": "main",
    "--embedding-model": ".",
    "--rerank-model": ".",
    "--embedding-overflow-policy": "truncate",
    "--default-temperature": "0.2",
    "--default-top-p": "0.9",
    "--default-top-k": "40",
    "--default-min-p": "0.05",
    "--default-presence-penalty": "-0.5",
    "--default-repetition-penalty": "1.1",
    "--default-chat-template-kwargs": '{"enable_thinking": false}',
}


@pytest.fixture
def good_file(tmp_path: Path) -> Path:
    path = tmp_path / "file.yaml"
    path.write_text("# a key file and an empty configuration at once\n")
    return path


def config_of(*words: str, environment: dict[str, str] | None = None) -> ServerConfig:
    model, values = parse(words)
    return resolve(model or ".", values, environment or {})


def test_where_a_model_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    assert locate(str(file), {}) == (str(file), "tiny")
    assert locate(str(tmp_path) + "/", {}) == (str(tmp_path), tmp_path.name)
    with pytest.raises(StartupError, match="--offline"):
        locate("owner/no-such-model", {"offline": True})
    with pytest.raises(StartupError, match="no such file or folder"):
        locate("./no-such-folder", {})
    with pytest.raises(StartupError, match="--revision"):
        locate(str(tmp_path), {"revision": "main"})


def words_of(flag: Flag, file: Path) -> list[str]:
    if flag.kind is None:
        return [flag.name]
    return [flag.name, str(file) if flag.kind.metavar == "FILE" else GOOD.get(flag.name, "7")]


@pytest.mark.parametrize("flag", HONOURED, ids=lambda flag: flag.name)
def test_every_flag_given_once(flag: Flag, good_file: Path) -> None:
    if flag.name == "--api-key-file":
        good_file.write_text("k\n")
    words = words_of(flag, good_file)
    if flag.name.startswith("--ssl"):
        words = ["--ssl-certfile", str(good_file), "--ssl-keyfile", str(good_file)]
    _, values = parse(words)
    if flag.target:
        assert flag.target in values
    if flag.target.split(".")[0] in ("engine", "server", "defaults"):
        config = config_of(*words)
        section, field = flag.target.split(".")
        holder = config.engine if section == "engine" else config.defaults if section == "defaults" else config
        seen = holder[field] if isinstance(holder, dict) else getattr(holder, field)
        assert seen == values[flag.target]


@pytest.mark.parametrize("flag", REFUSED, ids=lambda flag: flag.name)
@pytest.mark.parametrize("form", ["{}", "{} 4", "{}=4"])
def test_refused_flags_say_what_to_use(flag: Flag, form: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(form.format(flag.name).split())
    line = str(caught.value)
    assert line.startswith(flag.name + " ") and len(line) > len(flag.name) + 30 and "\n" not in line


def test_no_flag_is_in_the_table_twice() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_advice_names_real_flags() -> None:
    for flag in REFUSED:
        for word in flag.refused.replace(";", " ").replace(",", " ").split():
            if word.startswith("--"):
                assert word in NAMES, f"{flag.name} advises {word}"


def test_defaults_in_help_are_the_configuration_s() -> None:
    config = config_of()
    for flag in HONOURED:
        section, _, field = flag.target.partition(".")
        holder = {"engine": config.engine, "server": config, "download": FetchOptions()}.get(section)
        if holder is None or flag.kind is None or not flag.default:
            continue
        value = getattr(holder, field)
        if isinstance(value, int | float):
            assert float(flag.default) == value, flag.name
        elif isinstance(value, str):
            assert flag.default.startswith(value), flag.name


def test_models_beside_the_main_one(tmp_path: Path) -> None:
    for name in ("e", "r"):
        (tmp_path / name).mkdir()
    words = (
        f"--embedding-model {tmp_path}/e --rerank-model {tmp_path}/r --embedding-max-length 1000 --max-num-seqs 7"
    )
    config = config_of(*words.split(), "--dtype", "float16", "--max-cache-blocks", "9")
    assert config.embedding is not None and config.reranker is not None
    assert (config.embedding.name, config.reranker.name) == ("e", "r")
    engine = config.embedding.engine
    assert engine.model == str(tmp_path / "e") and engine.dtype == "float16"
    assert engine.max_cache_blocks is not None and engine.max_cache_blocks * (engine.block_size or 0) > 1000
    assert config.engine.max_cache_blocks == 9 and config.engine.max_num_seqs == 7
    with pytest.raises(StartupError, match="no such file"):
        config_of("--embedding-model", str(tmp_path / "missing"))


def test_the_walk_through_works_word_for_word(tmp_path: Path) -> None:
    line = (
        f"{tmp_path} --served-model-name llama-3b --host 127.0.0.1 --port 8000 --continuous-batching "
        "--use-paged-cache --cache-memory-mb 2048 --max-num-seqs 8 --stream-interval 1 --enable-metrics"
    )
    config = config_of(*line.split())
    assert config.served_model_names == ("llama-3b",)
    assert (config.host, config.port, config.stream_interval) == ("127.0.0.1", 8000, 1)
    assert config.engine.model == str(tmp_path)
    assert config.engine.prefix_cache_bytes == 2048 * 1024 * 1024
    assert (config.engine.max_num_seqs, config.engine.continuous_batching) == (8, True)


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("", "auto"),
        ("--kv-cache-dtype INT4", "int4"),
        ("--kv-cache-quantization", "int8"),
        ("--kv-cache-quantization-bits 8", "int8"),
        ("--kv-cache-quantization --kv-cache-quantization-bits 4", "int4"),
    ],
)
def test_kv_quantization_and_its_other_spellings(words: str, dtype: str) -> None:
    assert config_of(*words.split()).engine.kv_cache_dtype == dtype


@pytest.mark.parametrize(
    "words",
    [
        "--port 70000",
        "--port -1",
        "--port x",
        "--port",
        "--kv-cache-dtype int3",
        "--gpu-memory-utilization 2",
        "--gpu-memory-utilization 0",
        "--gpu-memory-utilization nan",
        "--memory-headroom 1",
        "--max-num-seqs 0",
        "--timeout 0",
        "--stream-interval 0",
        "--dtype float8",
        "--root-path llm",
        "--api-key=",
        "--chat-template no-such-file.jinja",
        "--default-chat-template-kwargs [1]",
        "--default-top-p 0",
        "--default-temperature 2.1",
        "--default-repetition-penalty 0",
        "--cors-origin chat.example",
        "--cors-origin https://chat.example/",
        "--continuous-batching --no-continuous-batching",
        "--enable-prefix-cache --disable-prefix-cache",
        "--keep-quantized --dequantize",
        "--kv-memory-mb 100 --max-cache-blocks 10",
        "--cache-memory-mb 100 --cache-memory-percent 0.1",
        "--disable-prefix-cache --cache-memory-mb 100",
        "--block-size 16 --paged-cache-block-size 32",
        "--kv-cache-quantization-bits 3",
        "--kv-cache-quantization-bits 0",
        "--kv-cache-quantization-bits x",
        "--kv-cache-quantization --kv-cache-dtype auto",
        "--kv-cache-quantization-bits 4 --kv-cache-dtype int8",
        "--max-tokens 100 --max-request-tokens 50",
        "--ssl-certfile pyproject.toml",
        "model-a model-b",
        "model-a --model model-b",
    ],
)
def test_wrong_values_and_contradictions_are_one_line(words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words.split())
    assert str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_value_names_flag_range_and_value() -> None:
    with pytest.raises(UsageError, match=r"^--port must be a whole number from 0 to 65535; got '70000'$"):
        parse(["--port", "70000"])


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--max-num-seq", "--max-num-seqs"),
        ("--prt=1", "--port"),
        ("--kv-cache-type", "--kv-cache-dtype"),
        ("--hlep", "--help"),
    ],
)
def test_unknown_flags_name_the_nearest(word: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {near}\\?"):
        parse(["model", word])


@pytest.mark.parametrize("word", ["--hardware-price", "--temp", "--x"])
def test_a_flag_that_resembles_none_gets_no_advice(word: str) -> None:
    with pytest.raises(UsageError, match=f"^unknown flag {word}$"):
        parse(["model", word, "1"])


def test_flags_may_stand_before_the_model() -> None:
    assert parse(["--port", "1", "m", "--host", "localhost"])[0] == "m"
    assert parse([])[0] is None


def test_a_lower_ceiling_lowers_the_default_output_length() -> None:
    config = config_of("--max-request-tokens", "100")
    assert (config.max_tokens, config.max_request_tokens) == (100, 100)


# -- API keys and addresses ----------------------------------------------------------------------------


def test_keys_from_flags_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team\nbob:b1\n\nbob:b2\n")
    config = config_of("--api-key", "alice:a:x", "--api-key", "sk-plain", "--api-key-file", str(file))
    assert [(key.name, key.secret) for key in config.api_keys] == [
        ("alice", "a:x"),
        ("key-2", "sk-plain"),
        ("bob", "b1"),
        ("bob", "b2"),
    ]


def test_keys_from_the_environment_only_without_flags() -> None:
    environment = {"HEADRACE_API_KEY": "alice:one", "VLLM_API_KEY": "two"}
    assert [key.secret for key in config_of(environment=environment).api_keys] == ["one"]
    assert [key.secret for key in config_of(environment={"VLLM_API_KEY": "two"}).api_keys] == ["two"]
    assert [key.secret for key in config_of("--api-key", "k", environment=environment).api_keys] == ["k"]
    assert config_of(environment={"VLLM_API_KEY": ""}).api_keys == ()


def test_a_name_that_is_given_twice_is_one() -> None:
    names = ("--served-model-name", "a", "--served-model-name", "b", "--served-model-name", "a")
    assert config_of(*names).served_model_names == ("a", "b")
    assert config_of("--cors-origin", "*", "--cors-origin", "null").cors_origins == ("*", "null")


def test_files_of_other_editors(tmp_path: Path) -> None:
    keys, settings = tmp_path / "keys", tmp_path / "c.json"
    keys.write_bytes(b"\xef\xbb\xbfbob:b1\r\n\r\n# x\r\nb2\r\n")
    settings.write_bytes(b'\xef\xbb\xbf{"port": 81}')
    config = config_of("--api-key-file", str(keys), "--config", str(settings))
    assert [(key.name, key.secret) for key in config.api_keys] == [("bob", "b1"), ("key-2", "b2")]
    assert config.port == 81


# A variable that was not set, in NAME:$KEY or $NAME:KEY, must not make a key that others can guess.
@pytest.mark.parametrize(
    "words", [["hunter2", "n:hunter2"], ["has space"], ["schlüssel"], ["alice:"], [":hunter2"]]
)
def test_unusable_keys_are_refused_without_showing_them(words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        config_of(*[part for word in words for part in ("--api-key", word)])
    assert words[0] not in str(caught.value)


def test_an_empty_key_file_is_refused(good_file: Path) -> None:
    with pytest.raises(UsageError, match="holds no key"):
        config_of("--api-key-file", str(good_file))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "my-host"])
def test_a_reachable_address_needs_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="--insecure"):
        config_of("--host", host)
    assert config_of("--host", host, "--api-key", "k").host == host
    assert config_of("--host", host, "--insecure").insecure


def test_isolation_between_keys_needs_keys() -> None:
    with pytest.raises(UsageError, match="--api-key"):
        config_of("--prefix-isolation", "key")
    assert config_of("--prefix-isolation", "key", "--api-key", "k").prefix_isolation == "key"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert config_of("--host", host).api_keys == ()


# -- configuration files ---------------------------------------------------------------------------------


def write(tmp_path: Path, name: str, content: str) -> str:
    path = tmp_path / name
    path.write_text(content)
    return str(path)


YAML = """
model: .
served_model_name: [a, b]
max-num-seqs: 8
disable_prefix_cache: true
enable_metrics: true
default_temperature: 0.5
default_chat_template_kwargs: {enable_thinking: false}
"""
TOML = """
model = "."
served_model_name = ["a", "b"]
max-num-seqs = 8
disable_prefix_cache = true
enable_metrics = true
default_temperature = 0.5
default_chat_template_kwargs = { enable_thinking = false }
"""
JSON = json.dumps(
    {
        "model": ".",
        "served_model_name": ["a", "b"],
        "max-num-seqs": 8,
        "enable_prefix_cache": False,
        "enable_metrics": True,
        "default_temperature": 0.5,
        "default_chat_template_kwargs": {"enable_thinking": False},
    }
)


@pytest.mark.parametrize(("name", "content"), [("c.yaml", YAML), ("c.toml", TOML), ("c.json", JSON)])
def test_a_file_holds_the_same_flags(tmp_path: Path, name: str, content: str) -> None:
    model, values = parse(["--config", write(tmp_path, name, content)])
    config = resolve(model, values, {})
    assert model == "."
    assert config.served_model_names == ("a", "b")
    assert (config.engine.max_num_seqs, config.engine.enable_prefix_cache) == (8, False)
    assert config.defaults == {"temperature": 0.5}
    assert config.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("flag", [f for f in HONOURED if f.name != "--config"], ids=lambda flag: flag.name)
def test_file_and_command_line_agree_on_every_flag(flag: Flag, good_file: Path, tmp_path: Path) -> None:
    words = words_of(flag, good_file)
    if flag.name.startswith("--ssl"):
        words = ["--ssl-certfile", str(good_file), "--ssl-keyfile", str(good_file)]
    settings: dict[str, object] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            value = words[index + 1] if index + 1 < len(words) else "--"
            settings[word.removeprefix("--")] = True if value.startswith("--") else value
    from_file = parse(["--config", write(tmp_path, "c.json", json.dumps(settings))])[1]
    del from_file["cli.config"]
    assert from_file == parse(words)[1]


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "c.yaml", "port: 1\nserved_model_name: [a, b]\nkeep_quantized: true\n")
    config = config_of("--config", file, "--port", "2", "--served-model-name", "c", "--dequantize")
    assert (config.port, config.served_model_names, config.engine.keep_quantized) == (2, ("c",), False)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max_num_seq: 8", "did you mean max_num_seqs"),
        ("port: 70000", "0 to 65535"),
        ("port: true", "takes a value"),
        ("port:", "has no value"),
        ("max_num_seqs: [1, 2]", "takes a value"),
        ("insecure: 'yes'", "true or false"),
        ("use_paged_cache: false", "always paged"),
        ("draft_model: x", "not available"),
        ("config: c.yaml", "cannot name another"),
        ("- a", "one mapping"),
        ("a: [", "cannot be parsed"),
        ("enable_prefix_cache: true\ndisable_prefix_cache: true", "contradict"),
    ],
)
def test_faults_of_a_file_name_it(tmp_path: Path, content: str, says: str) -> None:
    file = write(tmp_path, "c.yaml", content)
    with pytest.raises(UsageError, match=says) as caught:
        parse(["--config", file])
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.yaml"):
        parse(["--config", write(tmp_path, "c.ini", "[a]")])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("c.yaml", "max_num_seqs: 4\nmax-num-seqs: 5\n", "max_num_seqs and max-num-seqs are the same"),
        ("c.json", '{"max-num-seqs": 4, "max_num_seqs": 4}', "max-num-seqs and max_num_seqs are the same"),
        ("c.toml", "max_num_seqs = 4\nmax-num-seqs = 5\n", "max_num_seqs and max-num-seqs are the same"),
        ("c.yaml", "port: 1\nhost: ::1\nport: 2\n", "port is there twice"),
        ("c.json", '{"port": 1, "port": 1}', "port is there twice"),
        ("c.toml", "port = 1\nport = 2\n", "Cannot overwrite"),
        ("c.yaml", "default_chat_template_kwargs: {a: 1, a: 2}\n", "a is there twice"),
        ("c.json", "[" * 100_000, "nested too deeply"),
        ("c.yaml", "[" * 5_000, "nested too deeply"),
    ],
)
def test_a_setting_given_twice_is_not_dropped(tmp_path: Path, name: str, content: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--config", write(tmp_path, name, content)])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_yaml_may_merge_mappings(tmp_path: Path) -> None:
    file = write(tmp_path, "c.yaml", "default_chat_template_kwargs:\n  <<: {a: 1, b: 2}\n  a: 3\n")
    assert config_of("--config", file).chat_template_kwargs == {"a": 3, "b": 2}


def test_a_value_nested_without_end_is_one_line() -> None:
    with pytest.raises(UsageError, match="must be a JSON object"):
        parse(["--default-chat-template-kwargs", "[" * 100_000])


def test_pipes_are_named_as_such(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for flag in ("--api-key-file", "--chat-template", "--config", "--ssl-certfile"):
        with pytest.raises(UsageError, match=r"a regular file.*no pipe"):
            parse([flag, str(pipe)])
    with pytest.raises(UsageError, match="a file that exists"):
        parse(["--api-key-file", str(tmp_path)])


def test_hosts_as_urls_write_them() -> None:
    assert config_of("--host", "[::1]").host == "::1" == config_of("--host", "::1").host
    with pytest.raises(UsageError, match="not empty"):
        parse(["--host", ""])
