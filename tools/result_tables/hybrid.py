"""Table of models with linear attention: time of a prompt and of a token, beside transformers."""

from __future__ import annotations

from tools.result_files import Result, fixed, markdown


def hybrid(result: Result) -> str:
    found = {(r["prompt"], r["kind"], r["program"]): r for r in result.figures["rows"]}
    head = ["tokens of the prompt", "layers, three of four"]
    programs = list(dict.fromkeys(program for _, _, program in found))
    for program in programs:
        head += [f"{program}: first token", "a token"]
    rows = []
    for prompt, kind in dict.fromkeys(key[:2] for key in found):
        cells = [f"{prompt:,}", kind]
        for program in programs:
            row = found[prompt, kind, program]
            cells += [fixed(row["first_ms"], 0, " ms"), fixed(row["token_ms"], 1, " ms")]
        rows.append(cells)
    return markdown(head, rows)
