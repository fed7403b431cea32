"""The helper process that meets a client's grammar first.

`python -m penstock.workers.structured.trial`: one JSON object a line comes in, {"kind", "text",
"lenient"}; one a line goes out: {"grammar": what the library compiles} or {"error": why not}. A
grammar is compiled here first for trial, by the same code and under the same limits as in the
worker, on a smaller stack, under a cap of memory, and with a parent that kills it after a second.
What crashes, swells or hangs the compiler does it here.

Knows nothing of models, tokenizers or requests; imports little beside llguidance.
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

from penstock.workers.structured_spec import WHITE_SPACE

MAX_MEMORY_BYTES = 1 << 30
STACK_BYTES = 1 << 20  # the worker's threads have 2 MiB or more
# A token by its id in the model's vocabulary; here one of the few control tokens stands for it.
_TOKEN = re.compile(r"<\[\d{1,9}\]>")
_STAND_IN = "<[258]>"


def limits() -> LLParserLimits:
    """What one grammar may cost the compiler, and each step of it the engine."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # some 20 ms
        step_lexer_fuel=100_000,  # some 7 ms
        step_max_items=50_000,  # some 3 ms
        max_lexer_states=20_000,  # some 1 kB each
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def library_grammar(kind: str, text: str, lenient: bool) -> str:
    """The specification in the library's own form. Raises ValueError, or whatever it raises."""
    if kind in ("json_object", "json_schema"):
        schema = text if kind == "json_schema" else '{"type": "object"}'
        options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        quoted = (json.dumps(each, ensure_ascii=False) for each in json.loads(text))
        return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
    return LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text)


def problem(matcher: LLMatcher) -> str | None:
    """Why a fresh matcher cannot be used, in words for the client."""
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds out, among others, that nothing can match
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
