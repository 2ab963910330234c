"""Random phrases to be spoken: digit strings, numbers, and orders from the prompt grammar."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import yaml

from training.text import DIGITS, normalize, spell_number

_CHOICE = re.compile(r"\[([^\]]+)\]|\$\w+:(\w+)")

_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth thirtieth"
).split()
_DAYS = "monday tuesday wednesday thursday friday saturday sunday today tomorrow yesterday".split()
_MONTHS = (
    "january february march april may june july august september october november december"
).split()


class OrderGrammar:
    """Draws coffee orders from a grammar file of alternatives `[a, b]` and slots `$type:name`."""

    def __init__(self, path: Path) -> None:
        context = yaml.safe_load(path.read_text())["context"]
        self._templates: list[str] = context["expressions"]["orderDrink"]
        self._slots: dict[str, list[str]] = context["slots"]

    def draw(self, rng: random.Random) -> str:
        """Return one order, every choice uniform."""

        def choose(match: re.Match[str]) -> str:
            alternatives, slot = match.groups()
            choices: list[str] = self._slots[slot] if slot else alternatives.split(",")
            return rng.choice(choices)

        return normalize(_CHOICE.sub(choose, rng.choice(self._templates)))


def draw_digits(rng: random.Random) -> str:
    """Return one to eight digits."""
    return " ".join(rng.choice(DIGITS) for _ in range(rng.randint(1, 8)))


def shuffled_digits(rng: random.Random) -> str:
    """Return each digit once, in any order."""
    return " ".join(rng.sample(DIGITS, len(DIGITS)))


def draw_numbers(rng: random.Random) -> str:
    """Return one to four numbers, ordinals, days or months."""
    draws: list[Callable[[], str]] = [
        lambda: spell_number(rng.randrange(100)),
        lambda: spell_number(rng.randrange(100)),
        lambda: spell_number(rng.randrange(10_000)),
        lambda: rng.choice(_ORDINALS),
        lambda: rng.choice(_DAYS),
        lambda: f"{rng.choice(_MONTHS)} {rng.choice(_ORDINALS)}",
    ]
    return " ".join(rng.choice(draws)() for _ in range(rng.randint(1, 4)))
