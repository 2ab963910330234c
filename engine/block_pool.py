"""A pool of KV-cache blocks: which are free, reserved for a session, or held by one.

In: reservations and allocations by block id. Out: runs of neighbouring block ids. It knows nothing
of tensors, windows or sessions. A reservation is one contiguous run, so that a session's window can
be read in place (two slices at most, see `kv_cache_manager.BlockTable`).
"""

from __future__ import annotations

from typing import Final

from voxlite.engine.errors import Overloaded

_FREE: Final = 0
_RESERVED: Final = 1
_HELD: Final = 2


class BlockPool:
    """Own `num_blocks` blocks; each is free, reserved or held.

    free --reserve--> reserved --allocate--> held --free--> reserved --cancel--> free
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"{num_blocks=}: at least 1 is needed")
        self._states = bytearray(num_blocks)

    @property
    def num_blocks(self) -> int:
        return len(self._states)

    @property
    def num_free_blocks(self) -> int:
        return self._states.count(_FREE)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks promised to a session and not in use by it now."""
        return self._states.count(_RESERVED)

    @property
    def num_held_blocks(self) -> int:
        return self._states.count(_HELD)

    def reserve(self, num_blocks: int) -> range:
        """Reserve a contiguous run of blocks, the lowest that fits.

        Raises:
            Overloaded: no run of that length is free.
        """
        first = self._states.find(bytes(num_blocks))
        if first < 0:
            raise Overloaded(
                f"{num_blocks} KV-cache blocks in a row are needed, {self.num_free_blocks} of "
                f"{self.num_blocks} are free"
            )
        reservation = range(first, first + num_blocks)
        self._move(reservation, _FREE, _RESERVED)
        return reservation

    def cancel(self, reservation: range) -> None:
        """Give back a reservation, none of whose blocks is held."""
        self._move(reservation, _RESERVED, _FREE)

    def allocate(self, blocks: range) -> None:
        """Turn reserved blocks into held ones."""
        self._move(blocks, _RESERVED, _HELD)

    def free(self, blocks: range) -> None:
        """Turn held blocks back into reserved ones."""
        self._move(blocks, _HELD, _RESERVED)

    def is_held(self, block: int) -> bool:
        return self._states[block] == _HELD

    def _move(self, blocks: range, before: int, after: int) -> None:
        states = self._states[blocks.start : blocks.stop]
        assert states.count(before) == len(blocks), (blocks, before, bytes(states))
        self._states[blocks.start : blocks.stop] = bytes([after]) * len(blocks)
