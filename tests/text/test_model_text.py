"""A model's text side from its files: tokenizer, templates, end tokens, defaults (cases B96, B101)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from support import scripted

from headrace.errors import InvalidRequest, ModelFileError, StartupError
from headrace.text import model_text
from headrace.text.model_text import ModelText

Folder = Callable[[str], Path]
USER = [{"role": "user", "content": "<|s05|>"}]


@pytest.fixture
def folder(scripted_folder: Folder, tmp_path: Path) -> Path:
    """A private copy of the small files (weights are not read here)."""
    target = tmp_path / "model"
    shutil.copytree(scripted_folder("plain"), target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


def edit(path: Path, **fields: object) -> None:
    """Change fields of a JSON file; None removes one."""
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **fields}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def render(model: ModelText) -> str:
    return model.chat_template.render(USER).text


def test_scripted_checkpoint(scripted_folder: Folder) -> None:
    model = model_text.load(scripted_folder("plain"))
    words = scripted.vocabulary()
    assert model.tokenizer.vocab_size == words.size
    assert model.max_length == scripted.CONTEXT
    assert model.model_type == "llama"
    assert model.sampling_defaults == {}
    assert len(model.chat_template.render(USER).token_ids) == scripted.expected_prompt_tokens("<|s05|>") == 4


@pytest.mark.parametrize("variant", ["plain", "eos_config", "eos_generation", "eos_tokenizer"])
def test_end_tokens_from_any_one_file(scripted_folder: Folder, variant: str) -> None:
    words = scripted.vocabulary()
    assert words.added["<|im_end|>"] in model_text.load(scripted_folder(variant)).end_token_ids


def test_end_tokens_of_a_nested_configuration(folder: Path) -> None:
    edit(
        folder / "config.json", eos_token_id=None, text_config={"eos_token_id": 65, "max_position_embeddings": 77}
    )
    edit(folder / "generation_config.json", eos_token_id=[66, 99999])
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|eos|>"})
    model = model_text.load(folder)
    assert model.end_token_ids == {65, 66, scripted.vocabulary().added["<|eos|>"]}
    assert model.max_length == 77


def test_another_models_tokenizer_is_refused(folder: Path) -> None:
    """Whose end tokens the model cannot sample; one that merely knows a few tokens more is not."""
    ends = sorted(model_text.load(folder).end_token_ids)
    edit(folder / "config.json", vocab_size=ends[-1])
    assert model_text.load(folder).end_token_ids == set(ends)
    edit(folder / "config.json", vocab_size=ends[0])
    with pytest.raises(ModelFileError, match=rf"tokenizer.json: .*{ends[0]}.* {ends[0]} tokens \(vocab_size\)"):
        model_text.load(folder)


# -- chat templates (B96) ------------------------------------------------------------------------------


def test_template_only_in_its_own_file(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text(scripted.chat_template())
    assert len(model_text.load(folder).chat_template.render(USER).token_ids) == 4


def test_its_own_file_wins(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from the file")
    edit(folder / "chat_template.json", chat_template="from json")
    assert render(model_text.load(folder)) == "from the file"
    (folder / "chat_template.jinja").unlink()
    assert render(model_text.load(folder)) == "from json"
    assert render(model_text.load(folder, chat_template_file=_written(folder / "mine", "mine"))) == "mine"


def _written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_named_templates(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    template = model_text.load(folder).chat_template
    assert template.render(USER).text == "plain"
    assert template.render(USER, tools=[{"function": {"name": "f"}}]).text == "tools"
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "rag"}])
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: chat_template"):
        model_text.load(folder)


def test_no_template(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    model = model_text.load(folder)
    with pytest.raises(InvalidRequest, match="no chat template"):
        render(model)
    assert model.tokenizer.encode("abc", parse_special=True) == [97, 98, 99]


def test_broken_templates_are_named(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="{{ x")
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: .*line 1"):
        model_text.load(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja"):
        model_text.load(folder)
    with pytest.raises(StartupError, match="--chat-template"):
        model_text.load(folder, chat_template_file=str(folder / "absent"))
    with pytest.raises(StartupError, match="the file is empty"):
        model_text.load(folder, chat_template_file=_written(folder / "mine", " \n"))


# -- numbers -------------------------------------------------------------------------------------------


def test_sampling_defaults(folder: Path) -> None:
    edit(
        folder / "generation_config.json",
        **{
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 20,
            "min_p": None,
            "repetition_penalty": 1,
            "do_sample": True,
        },
    )
    defaults = model_text.load(folder).sampling_defaults
    assert defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.0}
    edit(folder / "generation_config.json", top_k=-1)
    assert "top_k" not in model_text.load(folder).sampling_defaults


@pytest.mark.parametrize(("field", "value"), [("temperature", "hot"), ("top_p", 1.5), ("eos_token_id", "x")])
def test_senseless_numbers_are_named(folder: Path, field: str, value: object) -> None:
    edit(folder / "generation_config.json", **{field: value})
    with pytest.raises(ModelFileError, match=r"generation_config\.json"):
        model_text.load(folder)


# -- tokenizer files -----------------------------------------------------------------------------------


def test_missing_and_broken_tokenizers_are_named(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text('{"model": 5}')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: not a tokenizer"):
        model_text.load(folder)
    path.unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: missing"):
        model_text.load(folder)
    (folder / "tokenizer.model").touch()
    with pytest.raises(ModelFileError, match=r"tokenizer\.model alone is not enough"):
        model_text.load(folder)


def test_tokens_that_only_the_configuration_knows(folder: Path) -> None:
    size = scripted.vocabulary().size
    new = {str(size): {"content": "<|new|>", "special": True}, str(size + 1): {"content": "<plain>"}}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=new)
    edit(folder / "added_tokens.json", **{"<old>": size + 2})
    tokenizer = model_text.load(folder).tokenizer
    assert tokenizer.encode("<|new|><plain><old>", parse_special=True) == [size, size + 1, size + 2]
    assert tokenizer.encode("<|new|>", parse_special=False) == list(b"<|new|>")
    assert tokenizer.vocab_size == size + 3
    for wrong in ({str(size + 5): {"content": "<|new|>"}}, {"97": {"content": "b"}}, {"x": {"content": "y"}}):
        edit(folder / "tokenizer_config.json", added_tokens_decoder=wrong)
        with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
            model_text.load(folder)


def test_tokens_with_a_role_are_special(folder: Path) -> None:
    edit(
        folder / "special_tokens_map.json",
        additional_special_tokens=["<|s05|>"],
        bos_token={"content": "<|user|>"},
    )
    edit(folder / "tokenizer_config.json", add_bos_token=True)
    tokenizer = model_text.load(folder).tokenizer
    words = scripted.vocabulary()
    assert tokenizer.is_special(words.added["<|s05|>"])
    assert not tokenizer.is_special(words.added["<|s04|>"])
    assert tokenizer.encode("a", parse_special=True) == [words.added["<|user|>"], 97]
    assert tokenizer.named["bos_token"] == "<|user|>"


def test_saved_truncation_is_off(folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    edit(folder / "tokenizer.json", truncation=truncation)
    assert len(model_text.load(folder).tokenizer.encode("x" * 100, parse_special=True)) == 100


# -- GGUF ----------------------------------------------------------------------------------------------


def test_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tokens = [*scripted.byte_characters(), "ab", "<|end|>", "<|turn|>", "<|eom|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(258)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 259)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_string("tokenizer.chat_template", "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}")
    writer.add_string("tokenizer.chat_template.tool_use", "tools")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = model_text.load(path)
    assert model.end_token_ids == {257, 258, 259}
    assert (model.max_length, model.model_type) == (512, "llama")
    assert model.sampling_defaults == {"temperature": 0.5}
    assert model.chat_template.render([{"role": "user", "content": "x<|turn|>"}]).token_ids == [
        258,
        *(scripted.byte_characters().index(char) for char in "x<|turn|>"),
    ]
    assert model.chat_template.render(USER, tools=[{"function": {"name": "f"}}]).text == "tools"
