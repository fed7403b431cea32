"""The evaluation in a model card: held-out perplexity, use of experts, samples."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tools.builtin_models import data

SLICE_TOKENS = 4096
EDGE_POSITIONS = 512


@torch.no_grad()
def token_nll(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """-log p of every token but the first, fp32, in windows of CONTEXT that do not see each
    other and all begin with the first token: entry i was predicted from i % CONTEXT + 1 tokens."""
    tokens = torch.tensor(ids, device=model.device)
    parts = []
    for start in range(0, len(ids) - 1, data.CONTEXT):
        part = tokens[start : start + data.CONTEXT + 1].clone()
        part[0] = tokens[0]
        logits = model(input_ids=part[None, :-1], use_cache=False).logits[0].float()
        parts.append(torch.nn.functional.cross_entropy(logits, part[1:], reduction="none").cpu())
    return torch.cat(parts)


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, corpus: Path
) -> dict[str, dict[str, float]]:
    """Held-out perplexity of both books per token, word and byte, near the start and the end of the
    window, and of the book's first SLICE_TOKENS tokens, which a test repeats."""
    table = {}
    for book in data.HELDOUT_BOOKS:
        ids, num_bytes, num_words = data.heldout_tokens(corpus, book, tokenizer)
        nll = token_nll(model, ids)
        position = torch.arange(len(nll)) % data.CONTEXT
        early, late = position < EDGE_POSITIONS, position >= data.CONTEXT - EDGE_POSITIONS
        table[book] = {
            "tokens": len(nll),
            "perplexity": round(nll.mean().exp().item(), 3),
            "perplexity_early": round(nll[early].mean().exp().item(), 3),
            "perplexity_late": round(nll[late].mean().exp().item(), 3),
            "perplexity_word": round(math.exp(nll.sum().item() / num_words), 1),
            "bits_per_byte": round(nll.sum().item() / num_bytes / math.log(2), 4),
            "perplexity_slice": round(nll[:SLICE_TOKENS].mean().exp().item(), 3),
        }
        print(book, table[book], flush=True)
    return table


@torch.no_grad()
def expert_use(model: PreTrainedModel, ids: list[int]) -> list[list[float]]:
    """The share of the choices of each layer that falls to each of its experts, [layers][experts],
    over the first SLICE_TOKENS ids."""
    tokens = torch.tensor(ids[:SLICE_TOKENS], device=model.device).view(-1, data.CONTEXT)
    out = model.model(input_ids=tokens, use_cache=False, output_router_logits=True)
    shares = []
    for logits in out.router_logits:
        chosen = logits.topk(model.config.num_experts_per_tok, dim=-1).indices.flatten()
        counts = torch.bincount(chosen, minlength=model.config.num_local_experts)
        shares.append([round(count / len(chosen), 4) for count in counts.tolist()])
    return shares


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """The prompt and one continuation of at most 100 tokens, special tokens shown."""
    torch.manual_seed(0)
    bare = prompt.removeprefix(data.END_OF_TEXT)  # which the tokenizer writes
    ids = tokenizer(bare, return_tensors="pt").to(model.device)
    out = model.generate(**ids, do_sample=True, temperature=0.8, top_p=0.95, max_new_tokens=100)
    return tokenizer.decode(out[0])
