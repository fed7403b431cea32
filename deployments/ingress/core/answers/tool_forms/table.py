"""The forms of tool calls by name, and which one a model's answers are read in.

`support_of` decides at the start. Where the form is not known it says so in the log, and a request
that leaves the choice of a call to the model is refused: a call would come back as text.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from penstock.deployments.ingress.core.answers.tool_forms import grammars, json_forms, tagged_forms
from penstock.deployments.ingress.core.answers.tool_forms.form_parser import ToolParser
from penstock.deployments.ingress.core.answers.tool_forms.gemma_forms import (
    Gemma4Parser,
    GemmaParser,
)
from penstock.deployments.ingress.core.answers.tool_forms.harmony import HarmonyParser
from penstock.deployments.ingress.core.answers.tool_forms.template_form import TemplateParser
from penstock.deployments.ingress.core.tools import Toolset
from penstock.workers.errors import ConfigError
from penstock.workers.request import RequestError, SamplingParams
from penstock.workers.text import harmony
from penstock.workers.text.response_template import ResponseTemplate
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.text.tool_forms import AUTO, FORMS, PLAIN, TEMPLATE, form_in, form_named

UNKNOWN = "unknown"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

_UNKNOWN_NOTE = (
    "the chat template renders tools, and the form in which this model writes calls is not known: "
    "requests with tools are refused unless tool_choice forces a call. Set tool_call_parser to the "
    f"form ({', '.join(FORMS)}), or to {PLAIN}, which describes the tools in the system message "
    "and asks for calls in the form of Hermes"
)

log = logging.getLogger("penstock.ingress")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A form in which models write calls.

    `parser`: makes one for an answer, of the tools and an id of the answer. `marks`: texts of the
    form that are special tokens of some models, and must be rendered. `grammar`: of forced calls;
    None: they are forced in the form of Hermes. `has_short_ids`: its templates take ids of nine
    letters and digits only.
    """

    name: str
    parser: Callable[[Toolset, str], ToolParser]
    marks: frozenset[str] = frozenset()
    grammar: grammars.Grammar | None = None
    has_short_ids: bool = False


def _by_names(kind: Callable[[Collection[str], str], ToolParser]) -> Any:
    """A maker of parsers that need the names of the tools only."""
    return lambda toolset, answer_id: kind([tool.name for tool in toolset.tools], answer_id)


def _tagged(name: str, tags: tagged_forms.Tags) -> ToolForm:
    texts = (tags.wrapper, tags.wrapper_end, tags.key, tags.key_end, tags.value, tags.value_end)
    return ToolForm(name, partial(tagged_forms.TaggedParser, tags), frozenset(texts) - {"", ">"})


HERMES = ToolForm(
    "hermes",
    _by_names(json_forms.HermesParser),
    frozenset(("<tool_call>", "</tool_call>")),
    lambda toolset, _: toolset.spec(),
)
_BY_NAME: Mapping[str, ToolForm] = MappingProxyType(
    {
        form.name: form
        for form in (
            HERMES,
            ToolForm(
                "llama3_json",
                _by_names(json_forms.Llama3Parser),
                frozenset((json_forms.PYTHON_TAG,)),
                grammars.llama3,
            ),
            ToolForm(
                "mistral",
                _by_names(json_forms.MistralParser),
                frozenset((json_forms.TOOL_CALLS, json_forms.CALL_ID, json_forms.ARGS)),
                grammars.mistral,
                has_short_ids=True,
            ),
            _tagged("qwen3_coder", tagged_forms.QWEN),
            _tagged("seed_oss", tagged_forms.SEED),
            _tagged("minimax_m2", tagged_forms.MINIMAX),
            _tagged("glm45", tagged_forms.GLM),
            ToolForm(
                "phi4",
                _by_names(json_forms.PhiParser),
                frozenset((json_forms.PHI_OPEN, json_forms.PHI_CLOSE)),
                grammars.phi4,
            ),
            ToolForm(
                "granite",
                _by_names(json_forms.GraniteParser),
                frozenset((json_forms.PHI_OPEN, "<tool_call>", "</tool_call>")),
                grammars.granite,
            ),
            ToolForm(
                "functiongemma",
                _by_names(GemmaParser),
                frozenset((GemmaParser.opener, GemmaParser.closer, GemmaParser.quote)),
            ),
            ToolForm(
                "gemma4",
                _by_names(Gemma4Parser),
                frozenset((Gemma4Parser.opener, Gemma4Parser.closer, Gemma4Parser.quote)),
            ),
            ToolForm(
                "harmony",
                _by_names(HarmonyParser),
                frozenset(harmony.TOKENS),
                grammars.harmony,
            ),
        )
    }
)


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How one model is given tools, and how its calls are read.

    `form` None: it is not known. `is_plain`: the tools are described in the system message, since
    the chat template renders none, or because the operator says so. `note`: what an operator should
    know of that.
    """

    form: ToolForm | None
    is_plain: bool
    note: str = ""

    @property
    def name(self) -> str:
        """As clients are told: that of the form, plain, or unknown."""
        if self.is_plain:
            return PLAIN
        return UNKNOWN if self.form is None else self.form.name

    def check(self, toolset: Toolset) -> None:
        """Raise RequestError if calls could come back as text."""
        if self.form is None and not toolset.must_call:
            raise RequestError(
                "tools: the form in which this model writes tool calls is not known here, so that "
                "calls would come back as text. A forced call works (tool_choice required, or one "
                "function by name). For calls that the model chooses, the server needs the setting "
                f"tool_call_parser: {PLAIN}, or one of {', '.join(FORMS)}",
                param="tools",
                code="unsupported_parameter",
            )

    def parser(self, toolset: Toolset, answer_id: str) -> ToolParser:
        """A parser of one answer."""
        return self._form_for(toolset).parser(toolset, answer_id)

    def marks(self, toolset: Toolset) -> frozenset[str]:
        """Tokens that must be rendered so that calls are found."""
        return self._form_for(toolset).marks

    def params(
        self, params: SamplingParams, toolset: Toolset, tokenizer: Tokenizer
    ) -> SamplingParams:
        """`params`, whose structured output, where a call is forced, is a call in the form."""
        form = self._form_for(toolset)
        if not toolset.must_call or form is HERMES or form.grammar is None:
            return params
        return replace(params, structured=form.grammar(toolset, tokenizer))

    def for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """A conversation whose ids of calls the chat template takes."""
        if self.form is None or not self.form.has_short_ids or self.is_plain:
            return list(messages)
        return [_with_short_ids(message) for message in messages]

    def _form_for(self, toolset: Toolset) -> ToolForm:
        form = self.form
        if form is None or (toolset.must_call and form.grammar is None):
            return HERMES
        return form


def support_of(setting: str, tokenizer: Tokenizer) -> ToolSupport:
    """What `tool_call_parser` and the chat template say. Raises ConfigError.

    It logs what an operator should know, once.
    """
    support = _support(form_named(setting), setting, tokenizer)
    if support.note:
        log.log(logging.INFO if support.form else logging.WARNING, "%s", support.note)
    return support


def _support(name: str, setting: str, tokenizer: Tokenizer) -> ToolSupport:
    if not tokenizer.has_chat_template:
        return ToolSupport(HERMES, is_plain=True)
    if name == PLAIN:
        return ToolSupport(HERMES, True, "tools are described in the system message")
    if not tokenizer.renders_tools:
        if name not in (AUTO, HERMES.name):
            raise ConfigError(
                f"tool_call_parser {setting}: the chat template of this model renders no tools; "
                "name one that does with chat_template, or leave tool_call_parser at auto, with "
                "which the tools are described in the system message"
            )
        note = "the chat template renders no tools: they are described in the system message"
        return ToolSupport(HERMES, True, note)
    found: str | None = name
    if name == AUTO:
        found = form_in(tokenizer.chat_template or "")
        if found is None and tokenizer.response_template is not None:
            found = TEMPLATE
    if found is None:
        return ToolSupport(None, False, _UNKNOWN_NOTE)
    return ToolSupport(_form(found, tokenizer), False, f"tool calls are read in the form {found}")


def _form(name: str, tokenizer: Tokenizer) -> ToolForm:
    """Raises ConfigError."""
    if name != TEMPLATE:
        return _BY_NAME[name]
    if tokenizer.response_template is None:
        raise ConfigError(
            f"tool_call_parser {TEMPLATE}: tokenizer_config.json of this model has none; leave the "
            "setting at auto"
        )
    template = ResponseTemplate(tokenizer.response_template)

    def parser(toolset: Toolset, answer_id: str) -> ToolParser:
        tools = [tool.as_json() for tool in toolset.tools]
        names = [tool.name for tool in toolset.tools]
        return TemplateParser(lambda: template.reader(tools), names, answer_id)

    return ToolForm(TEMPLATE, parser, tokenizer.special_texts)


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    changed = dict(message)
    if isinstance(call_id := message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(call_id)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short(call.get("id") or "")} for call in calls]
    return changed


def _short(call_id: str) -> str:
    """An id of nine letters and digits; the same for the same id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]
