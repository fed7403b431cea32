"""A chat template from a file, and variables for it, as the settings name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.request import RequestError
from penstock.workers.settings import plain_object, settings_of
from penstock.workers.text.chat_settings import MAX_TEMPLATE_BYTES, check_template, load_tokenizer
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

TEMPLATE = (
    "{{ bos_token }}{% for each in messages %}[{{ each.role }}]{{ each.content }}{% endfor %}"
    "{% if think %}<think:{{ effort }}>{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
BOS = Tokenizer.load(resolve_model("builtin")).special_tokens["bos_token"]


def written(folder: Path, content: str | bytes) -> str:
    path = folder / "chat.jinja"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def tokenizer(**options: Any) -> Tokenizer:
    return load_tokenizer(resolve_model("builtin"), EngineConfig(**options))


def test_the_file_replaces_the_models_template(tmp_path: Path) -> None:
    path = written(tmp_path, TEMPLATE)
    assert tokenizer(chat_template=path).render_chat(HELLO) == f"{BOS}[user]Hello"
    assert tokenizer(chat_template=path).template_variables == {"think", "effort"}
    own = Tokenizer.load(resolve_model("builtin"))
    assert tokenizer().render_chat(HELLO) == own.render_chat(HELLO) != f"{BOS}[user]Hello"


def test_a_requests_variables_go_first_one_by_one(tmp_path: Path) -> None:
    text = '{"think": true, "effort": "low"}'
    made = tokenizer(chat_template=written(tmp_path, TEMPLATE), default_chat_template_kwargs=text)
    assert made.render_chat(HELLO).endswith("<think:low>")
    assert made.render_chat(HELLO, variables={"effort": "high"}).endswith("<think:high>")
    assert made.render_chat(HELLO, variables={"think": False}).endswith("Hello")
    assert made.render_chat(HELLO).endswith("<think:low>")  # nothing is kept of a request


def test_the_file_runs_in_the_sandbox(tmp_path: Path) -> None:
    for attack in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{% for a in range(10**9) %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    ):
        made = tokenizer(chat_template=written(tmp_path, attack))
        with pytest.raises(RequestError) as refusal:
            made.render_chat(HELLO)
        assert refusal.value.code == "chat_template_error"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{% for %}", r"chat\.jinja: the chat template cannot be read"),
        ("{% if a %}", r"chat\.jinja: the chat template cannot be read"),
        ("(" * 9 + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nests too deep|cannot be read"),
        (b"\xff\xfe", "not a text in UTF-8"),
        (" \n", "is empty"),
        (b" " * (MAX_TEMPLATE_BYTES + 1), "is larger than"),
    ],
)
def test_a_file_that_is_no_template_is_refused(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    options = EngineConfig(chat_template=written(tmp_path, content))
    for check in (check_template, lambda each: load_tokenizer(resolve_model("builtin"), each)):
        with pytest.raises(ConfigError, match=rf"^chat_template .*({message})"):
            check(options)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jinja", tmp_path):
        with pytest.raises(ConfigError, match="there is no such file"):
            check_template(EngineConfig(chat_template=str(path)))


def test_variables_that_the_template_does_not_read_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, TEMPLATE)
    given = '{"enable_thinking": false}'
    options = EngineConfig(chat_template=path, default_chat_template_kwargs=given)
    message = r"^default_chat_template_kwargs\.enable_thinking: .* it has effort, think$"
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(resolve_model("builtin"), options)
    message = r"^default_chat_template_kwargs\.enable_thinking: .* it has .*effort, think$"
    with pytest.raises(ConfigError, match=message):
        check_template(options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[1]", "must be a JSON object"),
        ('{"a": [1]}', "must hold plain values, and a is none"),
        ('{"a": {}}', "must hold plain values, and a is none"),
    ],
)
def test_variables_are_an_object_of_plain_values(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^default_chat_template_kwargs {message}"):
        EngineConfig(default_chat_template_kwargs=text)


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(), plain))
def test_an_object_in_yaml_is_the_same_as_its_text(values: dict[str, Any]) -> None:
    (setting,) = (
        each for each in settings_of(EngineConfig) if each.name == "default_chat_template_kwargs"
    )
    text = setting.parse(values)
    assert plain_object(text) == values
    assert setting.parse(text) == text
    setting.check(text)


def test_what_json_cannot_hold_is_refused() -> None:
    (setting,) = (
        each for each in settings_of(EngineConfig) if each.name == "default_chat_template_kwargs"
    )
    with pytest.raises(ConfigError, match="must be what JSON can hold"):
        setting.parse({"a": object()})
