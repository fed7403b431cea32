"""Tokenizer, chat template and token streams for the built-in models.

Reads the classic-books corpus, trains one byte-level BPE on it, writes uint16 token streams of the
books and of the chat samples (chats.py), and draws windows of them for training.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tools.builtin_models.chats import chat_messages

VOCAB_SIZE = 8192
CONTEXT = 2048
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # ids 0, 1, 2
EOS_TOKEN_IDS = (0, 2)
REPEAT_SHARE = 0.35  # of the windows say some of their stretches twice
HELDOUT_BOOKS = ("emma", "great-expectations")

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Contractions, then runs of letters with one leading space or mark, numbers of one to three
# digits, punctuation, whitespace: every character matches some branch, so nothing is lost.
_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_text(path: Path) -> str:
    """The text of an .xz file of the corpus, line ends as "\\n". Raises FileNotFoundError."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def books_of(text: str) -> list[str]:
    """Splits the training text at its document marks."""
    return [book.strip() for book in text.split(END_OF_TEXT) if book.strip()]


def train_tokenizer(books: list[str], sample_bytes: int = 32 << 20) -> PreTrainedTokenizerFast:
    """Byte-level BPE over an even sample of every book (the same share from each one)."""
    total = sum(len(book) for book in books)
    share = min(1.0, sample_bytes / total)
    sample = [book[: max(1, int(len(book) * share))] for book in books]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # One paragraph at a time: a whole book as one string would hold the trainer's lock for long.
    tokenizer.train_from_iterator(
        (part + "\n\n" for book in sample for part in book.split("\n\n")), trainer=trainer
    )
    return wrap_tokenizer(tokenizer)


def wrap_tokenizer(tokenizer: Tokenizer, context: int = CONTEXT) -> PreTrainedTokenizerFast:
    """The transformers face of a trained tokenizer, with its special tokens and template.

    Every text and every conversation begins with the end-of-text mark, as in training.
    """
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B:1",
        special_tokens=[(END_OF_TEXT, 0)],
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def render(messages: Iterable[dict[str, str]]) -> str:
    """The text that CHAT_TEMPLATE renders after the mark, without running the template."""
    return "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)


def write_streams(
    books: list[str], tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int
) -> None:
    """Writes plain.bin (the books) and chat.bin (conversations), uint16, each document after an
    end-of-text mark."""
    folder.mkdir(parents=True, exist_ok=True)
    first = next(chat_messages(books, seed))
    assert END_OF_TEXT + render(first) == tokenizer.apply_chat_template(first, tokenize=False)
    _write(folder / "plain.bin", books, tokenizer, batch=4)
    chats = (render(messages) for messages in chat_messages(books, seed))
    _write(folder / "chat.bin", chats, tokenizer, batch=512)


def _write(
    path: Path, documents: Iterable[str], tokenizer: PreTrainedTokenizerFast, batch: int
) -> None:
    partial = path.with_suffix(".partial")
    backend = tokenizer.backend_tokenizer
    pending: list[str] = []
    with partial.open("wb") as out:

        def flush() -> None:
            for encoding in backend.encode_batch_fast(pending, add_special_tokens=False):
                np.asarray([0, *encoding.ids], dtype=np.uint16).tofile(out)
            pending.clear()

        for document in documents:
            pending.append(document)
            if len(pending) == batch:
                flush()
        flush()
    partial.rename(path)


def heldout_tokens(
    corpus: Path, book: str, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], int, int]:
    """Token ids of a held-out book after one end-of-text mark, its UTF-8 bytes and its words."""
    text = read_text(corpus / f"heldout-{book}.txt.xz")
    encoded = tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids = encoded[0].ids
    return [0, *ids], len(text.encode()), len(text.split())


class Sampler:
    """Draws [rows, length + 1] windows; the draw depends on the step number alone."""

    def __init__(
        self, folder: Path, chat_share: float, tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self.plain = np.memmap(folder / "plain.bin", dtype=np.uint16, mode="r")
        self.chat = np.memmap(folder / "chat.bin", dtype=np.uint16, mode="r")
        self.chat_share, self.seed = chat_share, seed
        breaks = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).endswith("\n\n")]
        self.paragraphs = np.flatnonzero(np.isin(self.plain, breaks))
        self.conversations = np.flatnonzero(self.chat == 0)

    def batch(self, step: int, rows: int, length: int) -> torch.Tensor:
        """int64 [rows, length + 1]: conversations, and books from anywhere or from a paragraph's
        start, each after an end-of-text mark, on which heads can rest as an attention sink."""
        rng = np.random.default_rng((self.seed, step))
        out = np.empty((rows, length + 1), dtype=np.int64)
        for row in out:
            if rng.random() < self.chat_share:
                row[:] = _window(self.chat, rng.choice(self.conversations), length + 1)
            elif rng.random() < 0.5:
                row[:] = _window(self.plain, int(rng.integers(len(self.plain))), length + 1)
            else:
                row[:] = _window(self.plain, rng.choice(self.paragraphs), length + 1)
            row[0] = 0
            if rng.random() < REPEAT_SHARE:
                _repeat(row, rng)
        return torch.from_numpy(out)


def _repeat(row: np.ndarray, rng: np.random.Generator) -> None:
    """Says stretches of the window once more, further on: what teaches heads to look things up."""
    for _ in range(len(row) // 128):
        count = int(rng.integers(8, len(row) // 8))
        source = int(rng.integers(1, len(row) - 2 * count))
        target = int(rng.integers(source + count, len(row) - count + 1))
        row[target : target + count] = row[source : source + count]


def _window(stream: np.ndarray, start: int, length: int) -> np.ndarray:
    start = min(int(start), len(stream) - length)
    return stream[start : start + length].astype(np.int64)
