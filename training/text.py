"""How words are written: lower case, no punctuation, numbers spelled out.

One convention for every source, so that the model never has to guess between "12", "Twelve," and
"twelve". Apostrophes stay ("i'd"); everything else that is not a letter separates words.
"""

import re

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = (
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

_NUMBER = re.compile(r"\d+")
_NOT_A_WORD = re.compile(r"[^a-z']+")


def spell_number(number: int) -> str:
    """Spell a number below a million, as American English says it (no "and").

    Raises:
        ValueError: the number is negative or too large.
    """
    if not 0 <= number < 1_000_000:
        raise ValueError(f"{number=} is outside 0 to 999,999")
    if number < 10:
        return DIGITS[number]
    if number < 20:
        return TEENS[number - 10]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f" {DIGITS[ones]}" if ones else "")
    for unit, name in ((1_000, "thousand"), (100, "hundred")):
        if number >= unit:
            count, rest = divmod(number, unit)
            return f"{spell_number(count)} {name}" + (f" {spell_number(rest)}" if rest else "")
    raise AssertionError("unreachable: every range above is handled")


def normalize(text: str) -> str:
    """Write `text` by the convention above.

    Numbers with up to three digits are read as numbers, longer ones digit by digit.
    """

    def spell(match: re.Match[str]) -> str:
        digits = match.group()
        if len(digits) <= 3 and not (len(digits) > 1 and digits.startswith("0")):
            return f" {spell_number(int(digits))} "
        return " " + " ".join(DIGITS[int(digit)] for digit in digits) + " "

    spelled = _NUMBER.sub(spell, text.lower().replace("’", "'"))
    words = (word.strip("'") for word in _NOT_A_WORD.split(spelled))
    return " ".join(word for word in words if word)
