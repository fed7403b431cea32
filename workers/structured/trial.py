"""The helper process that compiles a client's grammar for the first time.

`python -m penstock.workers.structured.trial` reads one JSON object a line, {"kind", "text",
"lenient"}, and writes one a line: {"grammar": what the library compiles} or {"error": the reason}.
A grammar is compiled here first, by the same code and under the same limits as in the worker, on a
smaller stack, with a memory limit, and with a parent that kills the process after a second. So a
grammar that crashes the compiler, exhausts memory or never ends harms this process only. Imports
little besides llguidance, to start fast.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from penstock.workers.structured_spec import WHITE_SPACE, with_ascii_classes

MAX_MEMORY_BYTES = 1 << 30
STACK_BYTES = 1 << 20  # the worker's threads have 2 MiB or more
# A token by its id in the model's vocabulary; here one of the few control tokens stands for it.
_TOKEN = re.compile(r"<\[\d{1,9}\]>")
_STAND_IN = "<[258]>"


def limits() -> LLParserLimits:
    """The limits of compiling one grammar, and of each step in the engine."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # some 20 ms
        step_lexer_fuel=100_000,  # some 7 ms
        step_max_items=50_000,  # some 3 ms
        max_lexer_states=20_000,  # some 1 kB each
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def library_grammar(kind: str, text: str, lenient: bool) -> str:
    """The specification as a grammar of the library. Raises ValueError, or the library's errors."""
    if kind in ("json_object", "json_schema"):
        schema = text if kind == "json_schema" else '{"type": "object"}'
        options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(with_ascii_classes(text))
    if kind == "choice":
        quoted = (json.dumps(each, ensure_ascii=False) for each in json.loads(text))
        return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
    return LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text)


def problem(matcher: LLMatcher) -> str | None:
    """Why a new matcher cannot be used, as a message for the client; None if it can."""
    if not matcher.is_error():
        matcher.compute_bitmask()  # detects, among others, that no text can match
    if not matcher.is_error():
        return None
    why = matcher.get_error().replace("<non-verbose/>", "").strip()
    if why == "NoExtensionBias":
        return "no text can match"
    return " ".join(why.partition(";")[0].split())[:300]


def answer(message: dict[str, Any], tokenizer: LLTokenizer) -> dict[str, str]:
    try:
        grammar = library_grammar(message["kind"], message["text"], message["lenient"])
    except Exception as error:  # also of the library's own Python code
        return {"error": " ".join(str(error).split())[:300] or "it cannot be read"}
    trial = _TOKEN.sub(_STAND_IN, grammar)
    found = problem(LLMatcher(tokenizer, trial, log_level=0, limits=limits()))
    return {"grammar": grammar} if found is None else {"error": found}


def serve() -> None:
    tokenizer = LLTokenizer("byte")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), tokenizer)), flush=True)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
