"""A GGUF file against its oracles: token ids, the tokenizer, and perplexity with its codes kept.

    python -m benchmarks.engine.gguf_quality --json out.json            against transformers
    python -m benchmarks.engine.gguf_quality --llama-cpp --json out.json       and llama.cpp
    python -m benchmarks.engine.gguf_quality --parts types --types Q8_0,Q4_K_M --json types.json

Ids: 30 prompts of held-out books, greedy, by the engine; transformers' model, in fp32 and with the
weights as the package gguf decodes them, gives the ids that it chooses behind the same tokens.
Where they differ, the margin is by how much the logit of its choice is above that of ours.

Tokenizer: the ids of llama.cpp for prose, code and other scripts; those of transformers' tokenizer
for the same file beside them.

Perplexity: windows of 1,024 tokens, every token but the first scored, by the engine and by
llama.cpp alike. `kept` is what `--weights auto` serves; `decoded` are the weights that the codes
stand for. With --types, files of other types are made of this one by llama.cpp's quantiser.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import llama_cpp, record
from benchmarks.common.gguf_model import transformers_model
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.evaluation import scoring
from penstock.workers.evaluation.eval_set import cut_windows
from penstock.workers.gguf.header import read_header
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model
from tools.builtin_models import data

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 1024
PARTS = ("ids", "tokenizer", "perplexity", "types")
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 30, 48, 48
CONTEXT_BLOCKS = 160
# How the engine loads a file: the setting `weights`, and the dtype of activations.
LOADS = {
    "decoded, fp32": ("fp32", "fp32"),
    "kept, fp32 activations": ("auto", "fp32"),
    "kept, bf16 activations": ("auto", "bf16"),
    "decoded, bf16": ("bf16", "bf16"),
}
SAMPLES = {
    "prose": "The penstock's gate -- closed since 1897 -- let 3.14 m³/s through; "
    '"enough", he\'d say.',
    "code": "def f(x: int) -> int:\n    return x ** 2  # 0x1F, 1e-9\n\n"
    "\tif (a[10] != b[2]) { i++; }\n",
    "markup": '<div class="a">&nbsp;{"k": [1, 22, 333, 4444]}</div>\r\n\r\n| a | b |\n|---|---|\n',
    "spaces": "  two  spaces\tand\n\n\n   lines  \u00a0 \u3000 end ",
    "German": "Der Fluß fließt über 12 Wehre; naïve Façade, Œuvre, Ångström.",
    "Russian": "Привет, мир! В 1861 году их было 22 500.",
    "Greek": "Η θύρα του αγωγού άνοιξε στις 7:45.",
    "Chinese": "水门在2024年打开了。长江三峡大坝，共34台机组。",
    "Japanese": "水門は午前7時30分に開いた。カタカナとひらがな。",
    "Korean": "수문은 2024년에 열렸습니다.",
    "Arabic": "فُتِحت البوابة في عام ٢٠٢٤ (2024).",
    "Hindi": "द्वार १९४७ में खुला था, 1947.",
    "emoji": "ok 👍🏽 👩‍👩‍👧 🇫🇷 1️⃣2️⃣ ﬁne e\u0301",
    "turns": "<|im_start|>user\nWhat is 12 + 345?<|im_end|>\n<|im_start|>assistant\n",
}


def books(corpus: Path) -> list[str]:
    """The held-out texts."""
    return [data.read_text(corpus / f"heldout-{book}.txt.xz") for book in data.HELDOUT_BOOKS]


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """The engine's answers at temperature 0, all in one batch; the end token ends none."""
    engine = Engine(EngineConfig(num_blocks=2 * CONTEXT_BLOCKS, prefix_cache=False), decoder)
    return scoring.greedy(engine, prompts, num_new)


def disagreements(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[dict[str, Any]]:
    """The places of `answer` where transformers' `model`, behind the same tokens, prefers another
    id. None: its greedy answer is this one."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
    best = logits.argmax(1)
    return [
        {
            "place": place,
            "margin": round((logits[place, best[place]] - logits[place, chosen]).item(), 6),
        }
        for place, chosen in enumerate(answer)
        if best[place] != chosen
    ]


def ids_against_transformers(file: Path, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """For each way to load the file, on how many prompts all ids are the same, and the margins."""
    model = transformers_model(file)
    rows = []
    for name, (weights, dtype) in LOADS.items():
        decoder = load_model(file, weights=weights, dtype=dtype, progress=False)
        answers = greedy(decoder, prompts, ANSWER_TOKENS)
        found = [disagreements(model, *each) for each in zip(prompts, answers, strict=True)]
        places = [each for some in found for each in some]
        rows.append(
            {
                "load": name,
                "prompts": len(prompts),
                "prompts_equal": sum(not some for some in found),
                "tokens": sum(map(len, answers)),
                "tokens_equal": sum(map(len, answers)) - len(places),
                "largest_margin": max((each["margin"] for each in places), default=0.0),
            }
        )
    return rows


def tokenizer_against_llama_cpp(file: Path, texts: dict[str, str]) -> list[dict[str, Any]]:
    """For each text, its ids' number, and whether they are llama.cpp's, ours and transformers'."""
    from transformers import AutoTokenizer

    oracle = llama_cpp.LlamaCpp(file, 512, 1)
    ours = Tokenizer.load(file)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    rows = []
    for name, text in texts.items():
        expected = oracle.ids(text)
        rows.append(
            {
                "text": name,
                "tokens": len(expected),
                "penstock_equal": ours.encode(text, add_special_tokens=False) == expected,
                "transformers_equal": theirs.encode(text, add_special_tokens=False) == expected,
            }
        )
    oracle.close()
    return rows


def engine_nll(decoder: Decoder, windows: Sequence[Sequence[int]]) -> torch.Tensor:
    """-log p of each token of the windows but their first ones, fp64."""
    config = EngineConfig(num_blocks=CONTEXT_BLOCKS, max_num_batched_tokens=512, prefix_cache=False)
    scores = scoring.WindowScores(windows, decoder, None)
    scores.score(Engine(config, decoder), {})
    return torch.from_numpy(scores.nll.reshape(-1))


def llama_nll(file: Path, windows: Sequence[Sequence[int]], threads: int) -> torch.Tensor:
    model = llama_cpp.LlamaCpp(file, WINDOW, threads)
    found = [nll for ids in windows for nll in model.token_nll(ids)]
    model.close()
    return torch.tensor(found, dtype=torch.float64)


def perplexity(
    file: Path,
    loads: Sequence[str],
    windows: Sequence[Sequence[int]],
    threads: int,
    with_llama: bool,
) -> dict[str, Any]:
    """Of one file, in each way to load it: perplexity, and its change in percent against the
    decoded weights in fp32, token by token, with the standard error of that."""
    found: dict[str, torch.Tensor] = {}
    sizes: dict[str, float] = {}
    for name in loads:
        weights, dtype = LOADS[name]
        decoder = load_model(file, weights=weights, dtype=dtype, progress=False)
        found[name] = engine_nll(decoder, windows)
        sizes[name] = round(decoder.weights.num_bytes / 2**20, 1)
    if with_llama:
        found["llama.cpp"] = llama_nll(file, windows, threads)
    base = found["decoded, fp32"]
    rows = []
    for name, nll in found.items():
        change, error = _change(nll, base)
        row = {"run": name, "perplexity": round(nll.mean().exp().item(), 4),
               "change_percent": change, "error_percent": error}  # fmt: skip
        if with_llama:
            row["against_llama_cpp_percent"], _ = _change(nll, found["llama.cpp"])
        rows.append(row | ({"weights_mib": sizes[name]} if name in sizes else {}))
    types = Counter(info.type.name for info in read_header(file).tensors.values()
                    if len(info.shape) == 2)  # fmt: skip
    return {"matrices": dict(types.most_common()), "rows": rows}


def of_types(
    file: Path, types: Sequence[str], windows: Sequence[Sequence[int]], threads: int
) -> list[dict[str, Any]]:
    """The same weights in files of other types: what is kept, and what each costs."""
    rows = []
    for kind in types:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / f"{kind}.gguf"
            llama_cpp.quantize(file, made, kind, threads)
            loads = ["decoded, fp32", "kept, bf16 activations"]
            rows.append({"type": kind, **perplexity(made, loads, windows, threads, True)})
        print(kind, rows[-1]["matrices"])
        _show(rows[-1]["rows"])
    return rows


def _change(nll: torch.Tensor, base: torch.Tensor) -> tuple[float, float]:
    change = nll - base
    error = change.std().item() / math.sqrt(len(change))
    return round(math.expm1(change.mean().item()) * 100, 4), round(error * 100, 4)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    corpus = ROOT.parent / "shared" / "data" / "classics"
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--corpus", type=Path, default=corpus, help="with heldout-BOOK.txt.xz")
    parser.add_argument("--windows", type=int, default=6, help=f"of {WINDOW} tokens (default: 6)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--llama-cpp", action="store_true", help="compare with llama.cpp, too")
    parser.add_argument("--types", default="", help=f"of {', '.join(llama_cpp.FILE_TYPES)}")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    file = resolve_model(args.model)
    tokenizer = Tokenizer.load(file)
    texts = books(args.corpus)
    streams = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    windows = cut_windows(streams, args.windows, WINDOW)
    results: dict[str, Any] = {"file": file.name, "window_tokens": WINDOW, "windows": args.windows}
    parts = args.parts.split(",")
    if "ids" in parts:
        prompts = cut_windows(streams, PROMPTS, PROMPT_TOKENS)
        results["ids"] = ids_against_transformers(file, prompts)
        _show(results["ids"])
    if args.llama_cpp or ("types" in parts and args.types):
        results["llama_cpp"] = llama_cpp.version()
    if "tokenizer" in parts and args.llama_cpp:
        samples = SAMPLES | {"held-out prose": texts[0][:50_000]}
        results["tokenizer"] = tokenizer_against_llama_cpp(file, samples)
        _show(results["tokenizer"])
    if "perplexity" in parts:
        loads = list(LOADS)
        results["perplexity"] = perplexity(file, loads, windows, args.threads, args.llama_cpp)
        _show(results["perplexity"]["rows"])
    if "types" in parts and args.types:
        results["types"] = of_types(file, args.types.split(","), windows, args.threads)
    if args.json:
        record.write(args.json, __file__, results, threads=args.threads)
    return 0


def _show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
