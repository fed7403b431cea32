"""Chat samples for training the built-in models, made from the text of the books themselves."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)_]*\s+(?=[\"'“‘A-Z_])")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|St|Esq|Messrs|Mme|M|No|vol|[A-Z])\.$")
_TOPIC = re.compile(r"\b(?:the|a|an|my|his|her|their|our) ([a-z]{4,12})\b")
_NAME = re.compile(r"(?<=[a-z,] )(?:Mr\. |Mrs\. |Miss |Sir |Lady |Captain )?[A-Z][a-z]{3,12}\b")
_SYSTEM = (
    "You are a storyteller.",
    "You write in the manner of an old novel.",
    "You are a helpful assistant.",
)
_CONTINUE = (
    "Continue: {0}",
    "Continue the story: {0}",
    "What happens next? {0}",
    "{0}",
    "Please go on from here.\n\n{0}",
)
# Instruction, and how many sentences its answer has at least and at most.
_ABOUT = (
    ("Write one sentence about {0}.", 1, 1),
    ("Tell me briefly about {0}.", 1, 3),
    ("What do you know about {0}?", 1, 5),
    ("Write a few sentences about {0}.", 2, 5),
    ("Write a paragraph about {0}.", 3, 8),
    ("Tell me a story about {0}.", 6, 24),
    ("Write a long story about {0}.", 14, 40),
)
_MORE = ("Go on.", "And then?", "Continue.", "What happened next?")


def sentences_of(paragraph: str) -> list[str]:
    """Splits a paragraph after sentence ends, keeping titles such as "Mr." with their name."""
    parts: list[str] = []
    start = 0
    for match in _SENTENCE_END.finditer(paragraph):
        piece = paragraph[start : match.end()].strip()
        if not _ABBREVIATION.search(piece):
            parts.append(piece)
            start = match.end()
    parts.append(paragraph[start:].strip())
    return [part for part in parts if part]


def chat_messages(books: list[str], seed: int, rounds: int = 1) -> Iterator[list[dict[str, str]]]:
    """Conversations cut from the books, in a fixed random order of books.

    Four sorts: go on from a passage (also over several turns), write about a thing or a person
    that the answer names, and one speech answered by the next one. Answers run from a few words to
    several hundred; the instruction's wording goes with the length.
    """
    rng = random.Random(seed)
    for _ in range(rounds):
        for index in rng.sample(range(len(books)), len(books)):
            paragraphs = [
                flat
                for part in books[index].split("\n\n")
                if (flat := " ".join(part.split())) and not flat.startswith("#")
            ]
            yield from _book_chats(paragraphs, rng)


def _book_chats(paragraphs: list[str], rng: random.Random) -> Iterator[list[dict[str, str]]]:
    position = rng.randrange(20)
    while position < len(paragraphs) - 8:
        passage = sentences_of("\n".join(paragraphs[position : position + 8]))
        draw = rng.random()
        if draw < 0.35:
            turns = _continuation(passage, rng)
        elif draw < 0.75:
            turns = _about(passage, rng)
        else:
            turns = _speeches(paragraphs[position : position + 8], rng)
        if turns:
            messages = [{"role": "system", "content": rng.choice(_SYSTEM)}]
            messages = messages if rng.random() < 0.2 else []
            for turn, text in enumerate(turns):
                messages.append({"role": ("user", "assistant")[turn % 2], "content": text})
            yield messages
        position += rng.randint(4, 16)


def _join(sentences: list[str]) -> str:
    return " ".join(sentences)


def _length(rng: random.Random) -> int:
    """A number of sentences with a long tail: median about 3, at most 40."""
    return min(40, max(1, round(rng.lognormvariate(1.1, 0.9))))


def _continuation(passage: list[str], rng: random.Random) -> list[str]:
    given = rng.randint(1, 3)
    told = given + _length(rng)
    if len(passage) <= given:
        return []
    turns = [rng.choice(_CONTINUE).format(_join(passage[:given])), _join(passage[given:told])]
    while told < len(passage) and rng.random() < 0.25:
        more = told + _length(rng)
        turns += [rng.choice(_MORE), _join(passage[told:more])]
        told = more
    return turns


def _about(passage: list[str], rng: random.Random) -> list[str]:
    instruction, least, most = rng.choice(_ABOUT)
    answer = passage[: rng.randint(least, most)]
    if len(answer) < least:
        return []
    opening = _join(answer[:2])
    topics = [f"the {word}" for word in _TOPIC.findall(opening)] + _NAME.findall(opening)
    return [instruction.format(rng.choice(topics)), _join(answer)] if topics else []


def _speeches(paragraphs: list[str], rng: random.Random) -> list[str]:
    """The first run of paragraphs that open with a speech, as turns of a conversation."""
    turns: list[str] = []
    for paragraph in paragraphs:
        if paragraph.startswith('"') and paragraph.count('"') % 2 == 0:
            said = [part.strip() for part in paragraph.split('"')[1::2]]
            turns.append(" ".join(said).rstrip(","))
        elif len(turns) >= 2:
            break
        else:
            turns = []
    limit = 2 * rng.choice((1, 1, 2))
    return turns[: min(limit, len(turns) // 2 * 2)]
