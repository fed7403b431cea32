"""Prompts of six kinds for speculation.py: of what is copied much, and of what is not.

Each kind has NUM prompts, which differ in names, numbers and order: no two answers are the same.
"""

from __future__ import annotations

import random

from penstock.workers.structured_spec import StructuredKind, StructuredSpec

NUM = 68
NAMES = ("Anna", "Bela", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas")
TOWNS = ("Alder", "Brück", "Corran", "Dovik", "Elster", "Farrow", "Glenn", "Holt", "Ister", "Jura")
FACTS = (
    "{name} keeps the gate of the dam at {town}, and writes the level of the water in a blue book "
    "every morning at {hour} o'clock.",
    "The turbines of {town} were built in {year} and turn {num} times a minute when the lake is "
    "full.",
    "In spring the river rises by {num} centimetres, and the lower road to {town} is closed until "
    "the end of May.",
    "A pipe of steel, {num} metres long, leads from the lake to the power house below the church.",
    "The old miller {name} says that the water was never as low as in the summer of {year}.",
    "Visitors may see the machines on Sundays between {hour} and five, if they ask {name} before.",
    "The bridge at {town} carries {num} carts a day, most of them with timber from the hills.",
)
TOPICS = (
    "a heat pump", "the water cycle", "inflation", "a black hole", "jazz", "a budget",
    "photosynthesis", "a balanced diet", "the stock market", "a solar eclipse",
    "an operating system", "plate tectonics", "a mortgage", "the immune system", "a sonnet",
    "renewable energy", "a compiler", "the greenhouse effect", "an earthquake", "a marathon",
    "classical music", "a database", "the carbon cycle", "a recession",
)  # fmt: skip
TASKS = (
    "sleep better", "cook rice", "learn to play the guitar", "write a letter of application",
    "prepare for a job interview", "grow tomatoes on a balcony", "save money every month",
    "learn a new language", "train a puppy", "plan a week in the mountains",
    "remove a stain from a shirt", "start a small business", "take good photos at night",
    "bake bread at home", "organise a birthday party", "repair a flat tyre", "study for an exam",
    "reduce waste at home", "write a short story", "paint a room", "choose a laptop",
    "make a good cup of coffee", "build a bookshelf", "keep a diary",
)  # fmt: skip
QUESTIONS = (
    "What is {topic}?", "How do I {task}?", "Why is {topic} important?",
)  # fmt: skip
CODE = '''def mean_of_{noun}(rows, default={num}):
    """The mean {noun} of rows that have one."""
    total = 0
    count = 0
    for row in rows:
        value = row.get("{noun}")
        if value is None:
            continue
        total += value
        count += 1
    if count == 0:
        return default
    return total / count


def largest_{noun}(rows, default={num}):
    """The largest {noun} of rows that have one."""
    best = default
    for row in rows:
        value = row.get("{noun}")
        if value is not None and value > best:
            best = value
    return best
'''
NOUNS = ("level", "flow", "depth", "speed", "price", "weight", "width", "score", "age", "load")
SCHEMA = (
    '{"type": "object", "properties": {"keeper": {"type": "string", "maxLength": 20}, "town": '
    '{"type": "string", "maxLength": 20}, "built_in_year": {"type": "integer"}, '
    '"turns_a_minute": {"type": "integer"}, "is_open_to_visitors": {"type": "boolean"}, '
    '"description": {"type": "string", "maxLength": 160}}, "required": ["keeper", "town", '
    '"built_in_year", "turns_a_minute", "is_open_to_visitors", "description"], '
    '"additionalProperties": false}'
)
SPEC = StructuredSpec(StructuredKind.JSON_SCHEMA, SCHEMA)
KINDS = ("edit", "summary", "code", "json", "chat", "prose")


def prompts(kind: str) -> list[str]:
    """NUM conversations of one message each, in ChatML, and of code the begin of the answer."""
    rng = random.Random(kind)
    begin = "```python\n" if kind == "code" else ""
    return [_chat(_ASK[kind](i, rng)) + begin for i in range(NUM)]


def _chat(message: str) -> str:
    return f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def _text(i: int, rng: random.Random) -> str:
    facts = rng.sample(FACTS, 5)
    return " ".join(
        fact.format(
            name=NAMES[i % 10],
            town=TOWNS[(i + i // 10) % 10],
            hour=rng.randint(7, 11),
            year=rng.randint(1880, 1960),
            num=rng.randint(12, 480),
        )
        for fact in facts
    )


def _edit(i: int, rng: random.Random) -> str:
    return (
        f"Copy this text word by word, but write 'reservoir' instead of 'lake':\n\n{_text(i, rng)}"
    )


def _summary(i: int, rng: random.Random) -> str:
    return f"Summarise this text in two sentences, and quote it:\n\n{_text(i, rng)}"


def _code(i: int, rng: random.Random) -> str:
    code = CODE.format(noun=NOUNS[i % 10], num=rng.randint(0, 9) + 10 * (i // 10))
    return f"Add type hints to this file and return the whole file:\n\n```python\n{code}```"


def _json(i: int, rng: random.Random) -> str:
    return f"Give what this text says as JSON:\n\n{_text(i, rng)}"


def _chat_question(i: int, rng: random.Random) -> str:
    return QUESTIONS[i % 3].format(topic=TOPICS[i // 3], task=TASKS[i // 3])


def _prose(i: int, rng: random.Random) -> str:
    return f"Write a story about {NAMES[i % 10]}, who leaves {TOWNS[(i + i // 10) % 10]} for ever."


_ASK = {
    "edit": _edit,
    "summary": _summary,
    "code": _code,
    "json": _json,
    "chat": _chat_question,
    "prose": _prose,
}
