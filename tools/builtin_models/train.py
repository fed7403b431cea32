"""Trains one of the two built-in models on the classic-books corpus and writes its folder.

    python -m tools.builtin_models.train --model dense --minutes 70 --out FOLDER

Data and tokenizer come from data.py, sizes and models from model.py, evaluation from evaluation.py,
and the model card from card.py. When it is killed and started again with the same arguments, it
resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import math
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from penstock.kernels import quant
from tools.builtin_models import card, data
from tools.builtin_models.model import PRESETS, Preset, TiedLoss, build_model
from tools.builtin_models.rounding import rounded
from tools.builtin_models.sinks import sink_loss

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
    """One model, its optimizers and its clock. The learning rate follows elapsed time / budget, and
    rises once more for the second training and the third."""

    def __init__(self, args: argparse.Namespace, sampler: data.Sampler) -> None:
        self.args, self.sampler = args, sampler
        self.preset = PRESETS[args.preset]
        self.model = build_model(getattr(self.preset, args.model), args.bf16, SEED)
        self.model.to(args.device)
        # Padding is the mark that texts begin with: transformers would keep gradients from it.
        self.model.get_input_embeddings().padding_idx = None
        self.optimizers = _optimizers(self.model, self.preset)
        self.core = torch.compile(self.model.model) if args.compile else self.model.model
        self.checkpoint = args.work / f"{args.model}-{args.preset}.pt"
        self.step = self.tokens = 0
        self.elapsed_s = 0.0
        self.started = datetime.date.today().isoformat()
        if self.checkpoint.exists():
            self._load()

    def run(self) -> None:
        """Trains until the time budget is used up."""
        budget_s = sum(self._phases())
        means, last_print, last_save = None, 0.0, time.monotonic()
        tokens_then, elapsed_then = self.tokens, self.elapsed_s
        self.model.train()
        if self.elapsed_s < budget_s:
            self._warm_up()
        while self.elapsed_s < budget_s:
            begin = time.monotonic()
            losses = self._one_step(*self._share())
            means = losses if means is None else 0.98 * means + 0.02 * losses
            self.elapsed_s += time.monotonic() - begin
            if time.monotonic() - last_print > self.args.print_s:
                rate = (self.tokens - tokens_then) / (self.elapsed_s - elapsed_then)
                tokens_then, elapsed_then = self.tokens, self.elapsed_s
                last_print = time.monotonic()
                print(
                    f"step {self.step:6d}  {self.tokens / 1e6:8.2f} M tokens  loss {means[0]:.3f}"
                    f"  on the mark {math.exp(-means[1]):.3f}"
                    f"  lr {self._lr(*self._share()):.2e}  {rate:,.0f} tokens/s"
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
            self.model.zero_grad(set_to_none=True)

    def _phases(self) -> list[float]:
        """Seconds of the first, the second and the third training."""
        args = self.args
        return [60 * m for m in (args.minutes, args.second_minutes, args.third_minutes)]

    def _share(self) -> tuple[float, int]:
        """How much of a training is over, by time, and which it is, from 0 on."""
        elapsed_s = self.elapsed_s
        for phase, length_s in enumerate(self._phases()):
            if elapsed_s < length_s:
                return elapsed_s / length_s, phase
            elapsed_s -= length_s
        return 1.0, 2

    def _lr(self, share: float, phase: int) -> float:
        peak = (self.preset.peak_lr, self.preset.second_lr, self.preset.third_lr)[phase]
        warm = self.preset.warmup_share
        if share < warm:
            return peak * max(share / warm, 0.01)
        return peak * (0.51 + 0.49 * math.cos(math.pi * (share - warm) / (1 - warm)))

    def _one_step(self, share: float, phase: int) -> torch.Tensor:
        """One step of the optimizers: the text's loss and the sinks', [2]."""
        preset, device = self.preset, self.args.device
        is_long = self.step % 2 == 0 if phase else share >= 1 - preset.long_share
        length = data.CONTEXT if is_long else preset.seq_len
        half = share < preset.half_step_share and not phase
        tokens = preset.tokens_per_step // (2 if half else 1)
        rows, micro = tokens // length, max(1, preset.micro_tokens // length)
        batch = self.sampler.batch(self.step, rows, length).to(device)
        sink_weight = preset.sink_weight if share >= preset.sink_from else 0.0
        sink_weight = preset.second_sink_weight if phase else sink_weight
        total = torch.zeros(2)
        formats: tuple[quant.WeightFormat | None, ...]
        formats = ("int4", "nf4", None) if phase == 2 else (None,)
        with rounded(self.model, formats[self.step // 2 % len(formats)]):
            for part in batch.split(micro):
                loss, sinks, balance = self._losses(part)
                wanted = loss + sink_weight * sinks + preset.balance_weight * balance
                (wanted * (len(part) / rows)).backward()
                total += torch.tensor([loss.item(), sinks.item()]) * len(part) / rows
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._lr(share, phase)
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += rows * length
        return total

    def _losses(
        self, part: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
        moe = self.args.model == "moe"
        extra = {"output_router_logits": True} if moe else {}
        with torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.bf16):
            out = self.core(
                input_ids=part[:, :-1], use_cache=False, output_hidden_states=True, **extra
            )
            sinks = sink_loss(self.model, out.hidden_states)
        hidden = out.last_hidden_state.flatten(0, 1)
        hidden = hidden.to(torch.bfloat16) if self.args.bf16 else hidden
        weight = self.model.get_input_embeddings().weight
        loss = TiedLoss.apply(  # type: ignore[no-untyped-call]  # torch's stub has no types
            hidden, weight, part[:, 1:].flatten(), self.preset.loss_chunk
        )
        if not moe:
            return loss, sinks, 0.0
        # Layer by layer: over all layers at once, as transformers does it, a layer may starve an
        # expert as long as another layer overuses the expert of the same number.
        experts = self.model.config.num_local_experts
        parts = [load_balancing_loss_func((one,), experts, 2) for one in out.router_logits]
        return loss, sinks, torch.stack(parts).mean()

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "counts": (self.step, self.tokens, self.elapsed_s, self.started),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step, self.tokens, self.elapsed_s, self.started = state["counts"]
        print(f"going on from step {self.step}", flush=True)


def _optimizers(model: PreTrainedModel, preset: Preset) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, norms and a router's or experts' stacks.

    With steps scaled to the size of AdamW's (Liu et al., 2502.16982, section 2.2) one learning rate
    serves both.
    """
    named = list(model.named_parameters())
    hidden = [
        p for name, p in named if p.dim() == 2 and ".layers." in name and ".mlp.gate." not in name
    ]
    taken = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": preset.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(
            hidden,
            lr=preset.peak_lr,
            weight_decay=preset.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(groups, lr=preset.peak_lr, betas=preset.betas, fused=True),
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("dense", "moe"), required=True)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="cpu")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time budget")
    parser.add_argument(
        "--second-minutes", type=float, default=0.0, help="of a second training, at both lengths"
    )
    parser.add_argument(
        "--third-minutes", type=float, default=0.0, help="of a third one, with rounded products"
    )
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
    run = card.TrainingRun(
        model=args.model,
        preset=args.preset,
        device=args.device,
        threads=args.threads,
        bf16=args.bf16,
        step=trainer.step,
        tokens=trainer.tokens,
        elapsed_s=trainer.elapsed_s,
        second_minutes=args.second_minutes,
        third_minutes=args.third_minutes,
        started=trainer.started,
        long_share=preset.long_share,
        sink_weight=preset.sink_weight,
        sink_from=preset.sink_from,
        second_sink_weight=preset.second_sink_weight,
        chat_share=preset.chat_share,
    )
    card.export(trainer.model, tokenizer, run, args.corpus, args.work, args.out)
    print(f"written to {args.out}", flush=True)


if __name__ == "__main__":
    main()
