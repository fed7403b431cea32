"""Trains one of the two built-in models on the classic-books corpus and writes its folder.

    python benchmarks/train_builtin.py --model dense --minutes 70 --out workers/models/builtin/dense

Data and tokenizer come from builtin_data.py, sizes and models from builtin_model.py, evaluation and
model card from builtin_card.py.
Killed and started again with the same arguments, it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import math
import tempfile
import time
from pathlib import Path

import builtin_card as card
import builtin_data as data
import torch
from builtin_model import PRESETS, TiedLoss, build_model
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

SEED = 1


def prepare(corpus: Path, work: Path) -> PreTrainedTokenizerFast:
    """The tokenizer and the token streams, made once and kept in the work folder.

    Two trainings that start at the same time wait for one another here.
    """
    done = work / "prepared"
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            print("reading the corpus, training the tokenizer, writing token streams", flush=True)
            books = data.books_of(data.read_text(corpus / "train.txt.xz"))
            tokenizer = data.train_tokenizer(books)
            tokenizer.save_pretrained(work / "tokenizer")
            data.write_streams(books, tokenizer, work, SEED)
            done.touch()
    return AutoTokenizer.from_pretrained(work / "tokenizer")


class Trainer:
    """One model, its optimizer and its clock. The learning rate follows elapsed time / budget."""

    def __init__(self, args: argparse.Namespace, sampler: data.Sampler) -> None:
        self.args, self.sampler = args, sampler
        self.preset = PRESETS[args.preset]
        self.model = build_model(getattr(self.preset, args.model), args.bf16, SEED)
        self.model.to(args.device)
        # Padding is the mark that texts begin with: transformers would keep gradients from it.
        self.model.get_input_embeddings().padding_idx = None
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.model, self.preset.weight_decay),
            lr=self.preset.peak_lr,
            betas=self.preset.betas,
            fused=True,
        )
        self.core = torch.compile(self.model.model) if args.compile else self.model.model
        self.checkpoint = args.work / f"{args.model}-{args.preset}.pt"
        self.step = self.tokens = 0
        self.elapsed_s = 0.0
        self.started = datetime.date.today().isoformat()
        if self.checkpoint.exists():
            self._load()

    def run(self) -> None:
        """Trains until the time budget is used up."""
        budget_s = self.args.minutes * 60
        mean_loss, last_print, last_save = None, 0.0, time.monotonic()
        tokens_then, elapsed_then = self.tokens, self.elapsed_s
        self.model.train()
        if self.elapsed_s < budget_s:
            self._warm_up()
        while self.elapsed_s < budget_s:
            begin = time.monotonic()
            share = self.elapsed_s / budget_s
            loss = self._one_step(share)
            mean_loss = loss if mean_loss is None else 0.98 * mean_loss + 0.02 * loss
            self.elapsed_s += time.monotonic() - begin
            if time.monotonic() - last_print > self.args.print_s:
                rate = (self.tokens - tokens_then) / (self.elapsed_s - elapsed_then)
                tokens_then, elapsed_then = self.tokens, self.elapsed_s
                last_print = time.monotonic()
                print(
                    f"step {self.step:6d}  {self.tokens / 1e6:8.2f} M tokens  loss {mean_loss:.3f}"
                    f"  lr {self._lr(share):.2e}  {rate:,.0f} tokens/s"
                    f"  ETA {(budget_s - self.elapsed_s) / 60:.1f} min",
                    flush=True,
                )
            if time.monotonic() - last_save > self.args.save_s:
                self._save()
                last_save = time.monotonic()
        self._save()

    def _warm_up(self) -> None:
        """Compiles both window lengths before the clock starts, so that the schedule is honest."""
        for length in (self.preset.seq_len, data.CONTEXT):
            rows = max(1, self.preset.micro_tokens // length)
            part = self.sampler.batch(0, rows, length).to(self.args.device)
            self._losses(part)[0].backward()
            self.optimizer.zero_grad(set_to_none=True)

    def _lr(self, share: float) -> float:
        warm = self.preset.warmup_share
        if share < warm:
            return self.preset.peak_lr * max(share / warm, 0.01)
        return self.preset.peak_lr * (0.51 + 0.49 * math.cos(math.pi * (share - warm) / (1 - warm)))

    def _one_step(self, share: float) -> float:
        preset, device = self.preset, self.args.device
        length = preset.seq_len if share < 1 - preset.long_share else data.CONTEXT
        tokens = preset.tokens_per_step // (2 if share < preset.half_step_share else 1)
        rows, micro = tokens // length, max(1, preset.micro_tokens // length)
        batch = self.sampler.batch(self.step, rows, length).to(device)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(share)
        total = 0.0
        for part in batch.split(micro):
            loss, balance = self._losses(part)
            ((loss + preset.balance_weight * balance) * (len(part) / rows)).backward()
            total += loss.item() * len(part) / rows
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += rows * length
        return total

    def _losses(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        moe = self.args.model == "moe"
        extra = {"output_router_logits": True} if moe else {}
        with torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.bf16):
            out = self.core(input_ids=part[:, :-1], use_cache=False, **extra)
        hidden = out.last_hidden_state.flatten(0, 1)
        hidden = hidden.to(torch.bfloat16) if self.args.bf16 else hidden
        weight = self.model.get_input_embeddings().weight
        loss = TiedLoss.apply(hidden, weight, part[:, 1:].flatten(), self.preset.loss_chunk)
        if not moe:
            return loss, 0.0
        # Layer by layer: over all layers at once, as transformers does it, a layer may starve an
        # expert as long as another layer overuses the expert of the same number.
        experts = self.model.config.num_local_experts
        parts = [load_balancing_loss_func((one,), experts, 2) for one in out.router_logits]
        return loss, torch.stack(parts).mean()

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counts": (self.step, self.tokens, self.elapsed_s, self.started),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.elapsed_s, self.started = state["counts"]
        print(f"going on from step {self.step}", flush=True)


def _parameter_groups(model: PreTrainedModel, weight_decay: float) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("dense", "moe"), required=True)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="cpu")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time budget")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/classics"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "penstock-train")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--print-s", type=float, default=10.0, help="seconds between progress lines"
    )
    parser.add_argument("--save-s", type=float, default=300.0, help="seconds between checkpoints")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = prepare(args.corpus, args.work)
    preset = PRESETS[args.preset]
    trainer = Trainer(args, data.Sampler(args.work, preset.chat_share, tokenizer, SEED))
    trainer.run()
    run = card.Run(
        model=args.model,
        preset=args.preset,
        device=args.device,
        threads=args.threads,
        bf16=args.bf16,
        step=trainer.step,
        tokens=trainer.tokens,
        elapsed_s=trainer.elapsed_s,
        started=trainer.started,
        long_share=preset.long_share,
        chat_share=preset.chat_share,
    )
    card.export(trainer.model, tokenizer, run, args.corpus, args.work, args.out)
    print(f"written to {args.out}", flush=True)


if __name__ == "__main__":
    main()
