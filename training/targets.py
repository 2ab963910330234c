"""What the model should say at every position, from words and their times.

The sequence starts with the prompt. Every word then appears at the first position whose audio time
(see `AudioConfig`) has reached the word's end, the delay included: the token `[STREAMING_WORD]`,
then the word's own tokens. Everything else is `[STREAMING_PAD]`. A word that comes while the last
one is still being written queues behind it:

    delay 480 ms (6 tokens), words " one" ending at 0.30 s and " two" ending at 0.31 s
    position    0    1 ... 38    39   40   41   42   43    44   45    46
    audio time            0 ms   80  160  240  320 ms
    token      <s>  PAD .. PAD  PAD  PAD  PAD  WORD " one" WORD " two" PAD
"""

from collections.abc import Callable, Sequence
from math import ceil

from training.clip_bank import Word
from voxlite.engine.config import BOS_ID, STREAMING_PAD_ID, STREAMING_WORD_ID, AudioConfig

# Times that differ by less than this are equal: 0.24 s is three tokens of 80 ms, not four.
_TIME_TOLERANCE_S = 1e-6


def word_position(audio: AudioConfig, word: Word, num_delay_tokens: int) -> int:
    """Return the position of the word's first token, if nothing queues before it."""
    num_spoken_tokens = ceil((word.end_s - _TIME_TOLERANCE_S) / audio.token_s)
    return audio.num_left_pad_tokens + num_delay_tokens + max(1, num_spoken_tokens)


def target_ids(
    audio: AudioConfig,
    words: Sequence[Word],
    num_delay_tokens: int,
    num_positions: int,
    encode_word: Callable[[str], list[int]],
) -> list[int]:
    """Return the token at each of `num_positions` positions, prompt included.

    Args:
        audio: the paddings.
        words: in the order spoken.
        num_delay_tokens: the delay in tokens of 80 ms.
        num_positions: length of the sequence; what does not fit any more is cut off.
        encode_word: text ids of a word, its leading space included.
    """
    ids = [STREAMING_PAD_ID] * num_positions
    ids[0] = BOS_ID
    next_free = audio.num_prompt_tokens(num_delay_tokens)
    for word in words:
        first = max(next_free, word_position(audio, word, num_delay_tokens))
        word_ids = [STREAMING_WORD_ID, *encode_word(word.text)]
        next_free = first + len(word_ids)
        ids[first:next_free] = word_ids
    return ids[:num_positions]
