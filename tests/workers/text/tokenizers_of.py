"""Small tokenizers of every kind that the supported families use, saved as checkpoints have them.

Trained here on a few lines, so they are small and many characters have no token of their own.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The penstock is a gated channel that feeds water to turbines, and it's well kept.",
    "Der Fluß fließt über die Brücke; naïve façade, œuvre, Ångström.",
    "def f(x):\n    return x ** 2  # squares\n\n\tdone",
    "水门 打开 了。 こんにちは 世界。 Привет, мир! 1234567890",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_level() -> Tokenizer:
    """As Qwen and Llama 3: byte-level BPE with NFC and a splitting pattern of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pattern = Regex(r"'s|'t|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As Llama 2, Mistral and Mixtral: SentencePiece-like BPE, unknown characters in bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        TEXT[:1],
        BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False),
    )
    learned = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned[1:]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [
        (token[:n], token[n:])
        for token in learned
        for n in range(1, len(token))
        if token[:n] in vocab and token[n:] in vocab and token != "<unk>"
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _word_piece() -> Tokenizer:
    """No decoder LLM has this; it stands for decoders that are not known."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "metaspace": _metaspace,
    "word_piece": _word_piece,
}


@functools.cache
def checkpoint(kind: str, chat_template: str | None = CHATML) -> Path:
    """A folder with the tokenizer files of a checkpoint, written by transformers."""
    folder = Path(tempfile.mkdtemp(prefix=f"penstock-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder
