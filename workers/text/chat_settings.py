"""The tokenizer of a model with the chat template and the variables that the settings name."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from penstock.workers.config import ModelOptions
from penstock.workers.errors import ConfigError
from penstock.workers.settings import Plain, plain_object
from penstock.workers.text.chat_template import ChatTemplate
from penstock.workers.text.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20  # the largest real one is some tens of KiB


def load_tokenizer(folder: str | Path, options: ModelOptions) -> Tokenizer:
    """The tokenizer in `folder`. Raises ConfigError, for a setting naming it."""
    source = _read_template(options)
    if source is not None:
        _compiled(source, options)
    variables = _variables(options)
    tokenizer = Tokenizer.load(folder, chat_template=source, variables=variables)
    if variables and not tokenizer.has_chat_template:
        raise ConfigError("default_chat_template_kwargs: this model has no chat template")
    _check_names(variables, tokenizer.template_variables)
    return tokenizer


def check_template(options: ModelOptions) -> None:
    """Raise ConfigError for what is wrong with the settings, as far as no model is needed."""
    source = _read_template(options)
    if source is not None:
        _check_names(_variables(options), _compiled(source, options).variables)


def _read_template(options: ModelOptions) -> str | None:
    if options.chat_template is None:
        return None
    path = Path(options.chat_template).expanduser()
    try:
        content = path.read_bytes() if path.is_file() else None
        if content is not None and len(content) <= MAX_TEMPLATE_BYTES:
            return content.decode()
    except OSError as error:
        raise ConfigError(f"chat_template {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"chat_template {path} is not a text in UTF-8") from None
    if content is None:
        raise ConfigError(f"chat_template {path}: there is no such file; name one with Jinja")
    raise ConfigError(f"chat_template {path} is larger than {MAX_TEMPLATE_BYTES} bytes")


def _compiled(source: str, options: ModelOptions) -> ChatTemplate:
    """Without the model's special tokens, which it may therefore name as its variables."""
    if not source.strip():
        raise ConfigError(f"chat_template {options.chat_template} is empty")
    try:
        return ChatTemplate(source, {})
    except ConfigError as error:
        raise ConfigError(f"chat_template {options.chat_template}: {error}") from None


def _variables(options: ModelOptions) -> dict[str, Plain | None]:
    given = options.default_chat_template_kwargs
    return {} if given is None else plain_object(given)


def _check_names(variables: Collection[str], known: Collection[str]) -> None:
    for name in variables:
        if name not in known:
            there = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise ConfigError(
                f"default_chat_template_kwargs.{name}: the chat template has no such variable; "
                f"{there}"
            )
