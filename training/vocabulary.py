"""Learn a small vocabulary and write it as `tekken.json`.

Byte-pair merges are learnt from word counts, on words with their leading space, as they are written
in a transcript. Frequent words (digits, numbers, the words of the orders) are counted many times
over, so that each becomes a single token and a fast speaker never outruns the tokens.

    python -m training.vocabulary --banks WORK_DIR --out WORK_DIR/tekken.json
"""

import argparse
import base64
import json
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.clip_bank import ClipBank
from training.prepare_data import REAL_BANK
from training.text import DIGITS, TEENS, TENS

NUM_SPECIAL_TOKENS = 1000
NUM_BYTE_TOKENS = 256
VOCAB_SIZE = 2000
DEFAULT_DELAY_MS = 480
NUM_LEFT_PAD_TOKENS = 32
WHOLE_WORD_KINDS = ("digit", "order")
WHOLE_WORD_WEIGHT = 100_000

# Names that mistral-common looks up; the other special tokens are place holders, as in the 4B.
SPECIAL_TOKEN_NAMES = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    3: "[INST]",
    4: "[/INST]",
    5: "[AVAILABLE_TOOLS]",
    6: "[/AVAILABLE_TOOLS]",
    7: "[TOOL_RESULTS]",
    8: "[/TOOL_RESULTS]",
    9: "[TOOL_CALLS]",
    10: "[IMG]",
    11: "<pad>",
    12: "[IMG_BREAK]",
    13: "[IMG_END]",
    14: "[PREFIX]",
    15: "[MIDDLE]",
    16: "[SUFFIX]",
    17: "[SYSTEM_PROMPT]",
    18: "[/SYSTEM_PROMPT]",
    19: "[TOOL_CONTENT]",
    21: "[ARGS]",
    22: "[CALL_ID]",
    24: "[AUDIO]",
    25: "[BEGIN_AUDIO]",
    32: "[STREAMING_PAD]",
    33: "[STREAMING_WORD]",
    34: "[TRANSCRIBE]",
    35: "[THINK]",
    36: "[/THINK]",
}

# A word with its leading space, then its digits one by one, then anything else.
PATTERN = r" ?[\p{L}']+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def learn_merges(word_counts: Mapping[str, int], num_merges: int) -> list[bytes]:
    """Return the tokens that byte-pair merging adds, in the order of merging.

    Args:
        word_counts: how often each word occurs; words carry their leading space.
        num_merges: tokens to add to the 256 bytes.
    """
    pieces = {word: [bytes([byte]) for byte in word.encode()] for word in word_counts}
    merges: list[bytes] = []
    while len(merges) < num_merges:
        pair_counts: Counter[tuple[bytes, bytes]] = Counter()
        for word, parts in pieces.items():
            for pair in pairwise(parts):
                pair_counts[pair] += word_counts[word]
        if not pair_counts:
            break
        # The smallest pair among equals, so that the result does not depend on hashing.
        best = min(pair_counts, key=lambda pair: (-pair_counts[pair], pair))
        merged = best[0] + best[1]
        if merged not in merges:
            merges.append(merged)
        for word, parts in pieces.items():
            if merged in word.encode():
                pieces[word] = _merge(parts, best)
    return merges


def _merge(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """Return `parts` with every occurrence of `pair` joined, from left to right."""
    joined: list[bytes] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def tekken_json(merges: list[bytes]) -> dict[str, Any]:
    """Return the content of `tekken.json` for the bytes and `merges`."""
    tokens = [bytes([byte]) for byte in range(NUM_BYTE_TOKENS)] + merges
    return {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": NUM_SPECIAL_TOKENS + len(tokens),
            "default_num_special_tokens": NUM_SPECIAL_TOKENS,
            "version": "v13",
        },
        "vocab": [
            {
                "rank": rank,
                "token_bytes": base64.b64encode(token).decode(),
                "token_str": token.decode(errors="replace"),
            }
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {
                "rank": rank,
                "token_str": SPECIAL_TOKEN_NAMES.get(rank, f"<SPECIAL_{rank}>"),
                "is_control": True,
            }
            for rank in range(NUM_SPECIAL_TOKENS)
        ],
        "audio": {
            "sampling_rate": 16000,
            "frame_rate": 12.5,
            "chunk_length_s": None,
            "transcription_format": "streaming",
            "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
            "transcription_delay_ms": DEFAULT_DELAY_MS,
            "streaming_look_ahead_ms": 2.5,
            "streaming_look_back_ms": 52.5,
            "streaming_n_left_pad_tokens": NUM_LEFT_PAD_TOKENS,
        },
    }


def main() -> None:
    """Parse the command line and write `tekken.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--banks", type=Path, required=True, help="folder with the clip banks")
    parser.add_argument("--out", type=Path, required=True, help="tekken.json to write")
    args = parser.parse_args()

    counts: Counter[str] = Counter()
    whole = {*DIGITS, *TEENS, *TENS, "hundred", "thousand"}
    for clip in ClipBank.open(args.banks, REAL_BANK):
        if clip.split == "train":
            words = [word.text for word in clip.words]
            counts.update(words)
            if clip.kind in WHOLE_WORD_KINDS:
                whole.update(words)
    weighted = {f" {word}": count for word, count in counts.items()}
    weighted |= {f" {word}": WHOLE_WORD_WEIGHT for word in whole}
    num_merges = VOCAB_SIZE - NUM_SPECIAL_TOKENS - NUM_BYTE_TOKENS
    merges = learn_merges(weighted, num_merges)
    args.out.write_text(json.dumps(tekken_json(merges)))
    missing = sorted(word for word in whole if f" {word}".encode() not in merges)
    print(f"{len(merges)} merges; {len(whole)} whole words, of them in pieces: {missing}")


if __name__ == "__main__":
    main()
