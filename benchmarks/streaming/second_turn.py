"""The second turn of an endless conversation: tokens that are computed, and time to the first.

One engine in this process, no server. A text of each length is the first prompt; its answer and a
new question are the second. With the prefix cache, what the sinks and the window of the first turn
still hold need not be computed again; without, all of it is. Ids of both are compared. The answers
take turns, so that what is compared lies a moment apart.

    python -m benchmarks.streaming.second_turn --model smollm2 --json out.json
    python -m benchmarks.streaming.second_turn --lengths 2000,8000 --window 1024
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import record
from penstock.deployments.cli.tables import aligned
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams

BLOCK_SIZE = 16
ANSWER, QUESTION = 64, 32  # tokens of the first answer and of the second question
NEW = 16  # tokens of the second answer


class Conversation:
    """Two turns of one text on an engine of its own."""

    def __init__(self, decoder: Decoder, window: int, *, prefix_cache: bool):
        config = EngineConfig(
            num_blocks=4 * (window // BLOCK_SIZE + 64),
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=512,
            prefix_cache=prefix_cache,
        )
        self.engine = Engine(config, decoder)
        self.window = window
        self.count = 0

    def turn(self, prompt: Sequence[int], num_new: int) -> tuple[list[int], int, float]:
        """Ids, tokens of the prompt that were computed, and seconds to the first token."""
        self.count += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=num_new, ignore_eos=True, context_policy="sink_window",
            sinks=4, window=self.window, roll=128,
        )  # fmt: skip
        start = time.perf_counter()
        self.engine.add(Request(f"r{self.count}", tuple(prompt), params))
        ids: list[int] = []
        first_s = num_cached = 0.0
        while self.engine.has_work():
            for delta in self.engine.step():
                first_s = first_s or time.perf_counter() - start
                ids += delta.token_ids
                num_cached = delta.num_cached_tokens
        return ids, len(prompt) - int(num_cached), first_s


def measure(decoder: Decoder, length: int, window: int, rounds: int) -> dict[str, Any]:
    """One row: of the second turn with and without the prefix cache, medians of `rounds`."""
    seen: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
    generator = torch.Generator().manual_seed(length)
    equal = True
    for _ in range(rounds):
        vocab = decoder.config.vocab_size
        text = torch.randint(3, vocab, (length,), generator=generator).tolist()
        question = torch.randint(3, vocab, (QUESTION,), generator=generator).tolist()
        answers = []
        for cached in (True, False):
            conversation = Conversation(decoder, window, prefix_cache=cached)
            answer, _, _ = conversation.turn(text, ANSWER)
            ids, computed, first_s = conversation.turn([*text, *answer, *question], NEW)
            seen[cached].append((computed, first_s))
            answers.append(ids)
        equal &= answers[0] == answers[1]
    row: dict[str, Any] = {"prompt": length + ANSWER + QUESTION, "window": window, "equal": equal}
    for cached, name in ((True, "cached"), (False, "plain")):
        row[f"{name}_computed"] = int(statistics.median(each[0] for each in seen[cached]))
        row[f"{name}_first_s"] = statistics.median(each[1] for each in seen[cached])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="1500,4000,16000", help="tokens of the first prompt")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    decoder = load_model(args.model, progress=False)
    rows = [
        measure(decoder, int(length), args.window, args.rounds)
        for length in tqdm(args.lengths.split(","), unit="length")
    ]
    head = ("prompt", "computed", "first token", "without the cache", "first token", "ids")
    shown = [
        (
            str(row["prompt"]), str(row["cached_computed"]),
            f"{1e3 * row['cached_first_s']:.0f} ms", str(row["plain_computed"]),
            f"{1e3 * row['plain_first_s']:.0f} ms", "equal" if row["equal"] else "DIFFER",
        )
        for row in rows
    ]  # fmt: skip
    print("\n".join(aligned([head, *shown])))
    if args.json is not None:
        record.write(args.json, __file__, {"rows": rows}, threads=args.threads)


if __name__ == "__main__":
    main()
