"""Compare what was said with what was heard, word by word."""

import re
from difflib import SequenceMatcher


def words(text: str) -> list[str]:
    """Return the words of a text, without case and punctuation."""
    return re.sub(r"[^\w\s']", "", text).lower().split()


def num_differing(heard: list[str], said: list[str]) -> int:
    """Return how many words are wrong, missing or too many."""
    blocks = SequenceMatcher(None, heard, said, autojunk=False).get_matching_blocks()
    return max(len(heard), len(said)) - sum(block.size for block in blocks)
