"""A pool of KV-cache blocks: a free list, and how many tables hold each block.

In and out: block ids. It knows nothing of tensors, windows or sessions: any block serves anybody.
"""

from __future__ import annotations


class BlockPool:
    """Own `num_blocks` blocks; each is free, or held by one table or, shared, by several."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"{num_blocks=}: at least 1 is needed")
        self._ref_counts = [0] * num_blocks
        # The block freed last is taken first: its memory is in use already.
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_held_blocks(self) -> int:
        return len(self._ref_counts) - len(self._free)

    def ref_count(self, block: int) -> int:
        """Return how many tables hold a block."""
        return self._ref_counts[block]

    def allocate(self) -> int | None:
        """Take a block off the free list; None where it is empty."""
        if not self._free:
            return None
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Let another table hold a block that one holds already."""
        assert self._ref_counts[block] > 0, block
        self._ref_counts[block] += 1

    def free(self, block: int) -> bool:
        """Give back one table's hold on a block. Return whether it was the last one."""
        assert self._ref_counts[block] > 0, block
        self._ref_counts[block] -= 1
        if self._ref_counts[block] > 0:
            return False
        self._free.append(block)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless the blocks on the free list are those that nobody holds."""
        unheld = [block for block, count in enumerate(self._ref_counts) if count == 0]
        assert sorted(self._free) == unheld, (sorted(self._free), unheld)
