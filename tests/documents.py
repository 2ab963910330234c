"""The code blocks of the documents: fenced and indented ones, with the mark that may precede them.

A block that no test covers has `<!-- not tested: REASON -->` on the line before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
NAMES: Final = (
    "README.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "bench/README.md",
    "models/demo/MODEL_CARD.md",
    "tests/README.md",
    "training/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")),
)
DOCUMENTS: Final = tuple(ROOT / name for name in NAMES if (ROOT / name).exists())
SAMPLE: Final = "models/demo/sample.wav"

_MARK: Final = re.compile(r"<!-- not tested: (.+) -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One code block: where it stands, its language ("sh" where it is indented) and its text."""

    document: str
    line: int
    language: str
    text: str
    why_untested: str | None = None

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}"

    def with_values(self, **values: str) -> str:
        """Return the text with the sample, the address or the key of a test in place of its own."""
        text = self.text
        for name, value in {"sample": SAMPLE, "address": "localhost:8000", "key": '"none"'}.items():
            text = text.replace(value, values.get(name, value))
        return text


def blocks_of(document: str, text: str) -> list[Block]:
    """Read a document's code blocks, in order."""
    lines = text.splitlines()
    blocks = []
    index = 0
    mark: str | None = None
    while index < len(lines):
        line, first = lines[index], index
        language = "sh"
        if fence := re.fullmatch(r"```(\w*)", line):
            language = fence[1]
            index = lines.index("```", first + 1) + 1
            body = lines[first + 1 : index - 1]
        elif line.startswith("    ") and (first == 0 or not lines[first - 1].strip()):
            while index < len(lines) and (lines[index].startswith("    ") or not lines[index]):
                index += 1
            body = [line[4:] for line in lines[first:index]]
        else:
            index += 1
            if line.strip():
                found = _MARK.fullmatch(line)
                mark = found[1] if found else None
            continue
        blocks.append(
            Block(
                document=document,
                line=first + 1,
                language=language,
                text="\n".join(body).strip("\n") + "\n",
                why_untested=mark,
            )
        )
        mark = None
    return blocks


BLOCKS: Final = tuple(
    block
    for path in DOCUMENTS
    for block in blocks_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
)


def in_language(language: str, *imports: str) -> list[Block]:
    """Return the blocks without a mark in a language, of those with one of these imports."""
    return [
        block
        for block in BLOCKS
        if block.why_untested is None
        and block.language == language
        and (not imports or any(_imports(block.text, name) for name in imports))
    ]


def _imports(text: str, name: str) -> bool:
    return re.search(rf"^(from|import) {re.escape(name)}\b", text, re.MULTILINE) is not None
