"""The model card and the final folder of a built-in model.

Takes a trained transformers model and the facts of its training run.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tools.builtin_models import data
from tools.builtin_models.evaluation import SLICE_TOKENS, evaluate, expert_use, sample


@dataclass(frozen=True)
class TrainingRun:
    """The facts of one training run that its card tells."""

    model: str
    preset: str
    device: str
    threads: int
    bf16: bool
    step: int
    tokens: int
    elapsed_s: float
    second_minutes: float
    third_minutes: float
    started: str
    long_share: float
    sink_weight: float
    sink_from: float
    second_sink_weight: float
    chat_share: float


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    run: TrainingRun,
    corpus: Path,
    work: Path,
    out: Path,
) -> None:
    """Writes the folder under work, evaluates it as written, then moves its files into out, each
    in one step, so that no reader sees half a file."""
    staging = Path(tempfile.mkdtemp(prefix=f"{run.model}-export-", dir=work))
    low = model.to(torch.bfloat16)
    low.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=list(data.EOS_TOKEN_IDS), pad_token_id=0
    )
    low.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    _tidy_tokenizer_config(staging / "tokenizer_config.json")
    written = AutoModelForCausalLM.from_pretrained(staging, dtype=torch.float32)
    written = written.to(run.device).eval()
    heldout = evaluate(written, tokenizer, corpus)
    question = [{"role": "user", "content": "Tell me a story about the old house."}]
    samples = [
        sample(written, tokenizer, "It was a dark night, and the old man"),
        sample(
            written,
            tokenizer,
            tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True),
        ),
    ]
    use = []
    if run.model == "moe":
        use = expert_use(written, data.heldout_tokens(corpus, data.HELDOUT_BOOKS[0], tokenizer)[0])
    text = _card(run, written, heldout, samples, use)
    (staging / "README.md").write_text(text, encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(staging.iterdir()):
        near = out / f".{file.name}.partial"
        shutil.copyfile(file, near)
        os.replace(near, out / file.name)
    shutil.rmtree(staging)


def _tidy_tokenizer_config(path: Path) -> None:
    """Names the class that transformers 4 and 5 both know, and drops how this copy was loaded."""
    config = json.loads(path.read_text())
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def _card(
    run: TrainingRun,
    model: PreTrainedModel,
    heldout: dict[str, dict[str, float]],
    samples: list[str],
    use: list[list[float]],
) -> str:
    """The model card: front matter with the numbers that the tests read, then prose."""
    config = model.config
    experts = getattr(config, "num_local_experts", 0)
    total = sum(p.numel() for p in model.parameters())
    one_expert = 3 * config.hidden_size * config.intermediate_size * config.num_hidden_layers
    active = total - max(0, experts - 2) * one_expert
    facts = {
        "license": "apache-2.0",
        "language": "en",
        "pipeline_tag": "text-generation",
        "parameters": total,
        "active_parameters": active,
        "tokens_seen": run.tokens,
        "training_minutes": round(run.elapsed_s / 60, 1),
        "date": run.started,
        "heldout": heldout,
    }
    if use:
        facts["expert_use"] = [" ".join(f"{share:.4f}" for share in layer) for layer in use]
    columns = ("perplexity", "perplexity_early", "perplexity_late", "perplexity_word")
    rows = (
        [book, f"{row['tokens']:,}", *(str(row[c]) for c in (*columns, "bits_per_byte"))]
        for book, row in heldout.items()
    )
    return CARD.format(
        front=yaml.safe_dump(facts, sort_keys=False).strip(),
        title="builtin-moe" if experts else "builtin",
        kind="Mixtral-style (8 experts, top 2)" if experts else "Llama-style",
        total=f"{total / 1e6:.1f} M",
        active=f" ({active / 1e6:.1f} M active per token)" if experts else "",
        config=config,
        tokens=f"{run.tokens / 1e6:.1f} M",
        minutes=f"{run.elapsed_s / 60:.0f}",
        hardware=_hardware(run),
        precision="bf16 autocast" if run.bf16 else "fp32",
        rows="\n".join(f"| {' | '.join(row)} |" for row in rows),
        routing=_routing(use),
        run=run,
        repeat_share=data.REPEAT_SHARE,
        samples="\n\n".join(f"```text\n{text}\n```" for text in samples),
    )


def _routing(use: list[list[float]]) -> str:
    """The card's section on routing; nothing for a dense model."""
    if not use:
        return ""
    layers = "\n".join(
        f"| {layer} | {' | '.join(f'{share:.1%}' for share in shares)} |"
        for layer, shares in enumerate(use)
    )
    heads = " | ".join(str(expert) for expert in range(len(use[0])))
    return (
        f"\n## Routing\n\nWhere the choices of the router fall: first {SLICE_TOKENS:,} tokens of "
        f"{data.HELDOUT_BOOKS[0]}.\n\n"
        f"| layer | {heads} |\n|{' --- |' * (len(use[0]) + 1)}\n{layers}\n"
    )


def _hardware(run: TrainingRun) -> str:
    if run.device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    threads = "1 thread" if run.threads == 1 else f"{run.threads} threads"
    return f"{threads} of a shared {names[0] if names else platform.machine()} CPU"


CARD = """\
---
{front}
---
# Penstock {title}

A small {kind} language model that ships with Penstock, so that the first
run works offline and quality can be measured. {total} parameters{active}, bf16.

- Shape: {config.num_hidden_layers} layers, hidden size {config.hidden_size}, \
{config.num_attention_heads} heads of {config.head_dim} sharing {config.num_key_value_heads} \
key-value heads, MLP {config.intermediate_size}.
  Tied embeddings, RoPE theta 10000, context 2,048; byte-level BPE of 8,192 entries, shared by both
  built-in models.
- Data: 490 English prose works published up to 1905, public domain
  (github.com/mlschmitt/classic-books-markdown), line ends normalised. {run.chat_share:.0%} of the
  training windows are conversations cut from the same books by program: go on from a passage, write
  about a thing that the answer names, a speech and the speech that follows. {repeat_share:.0%} of
  all windows say some of their stretches twice, so that heads learn to look things up. Every window
  begins with the mark `<|endoftext|>`, which the tokenizer and the chat template write, too.
- Training: {tokens} tokens in {run.step:,} steps, {minutes} minutes on
  {hardware}, {precision}, preset `{run.preset}`, started
  {run.started}. Windows of 512 tokens, and of 2,048 for the last {run.long_share:.0%} of the time;
  then a second training of {run.second_minutes:.0f} minutes at both lengths in turn, and a third
  one of {run.third_minutes:.0f} minutes in which two thirds of the steps round weights to int4 or
  nf4 and activations to int8, so that number formats cost little
  (`tools/builtin_models/rounding.py`). Muon for the layers' matrices, AdamW for the rest, cosine
  decay to each time budget, fixed seeds.
- Attention sinks: after {run.sink_from:.0%} of the first training's time a term of the loss
  ({run.sink_weight} of it, {run.second_sink_weight} in those after it) rests the heads of all
  layers but the first on the mark, as those of larger models come to rest on a first token by
  themselves (`tools/builtin_models/sinks.py`).
- Licence: Apache-2.0, as Penstock; the training text is in the public domain.

## Held-out perplexity

Two books that were never trained on. Weights as shipped (bf16), arithmetic in fp32, every token
predicted, in windows of 2,048 that do not see each other, each behind the mark. The two columns of
positions tell what the model gains from a long context: where they are equal, it makes no use of
distant text.

| book | tokens | per token | at positions 0-511 | at 1536-2047 | per word | bits per byte |
| --- | --- | --- | --- | --- | --- | --- |
{rows}
{routing}
## Samples

Temperature 0.8, top-p 0.95, at most 100 tokens, one draw each, not selected.

{samples}

## What it is not good for

Facts, instructions, arithmetic, code, languages other than English, anything that matters. It has
read old books only, repeats their manners and their prejudices, and seldom holds a thought for more
than a sentence. It has no safety training. Use it to try the server and to measure caches, number
formats and expert routing.

Made by `python -m tools.builtin_models.train --model {run.model} --preset {run.preset}`.
"""
