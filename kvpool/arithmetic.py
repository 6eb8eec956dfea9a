"""Memory arithmetic of a paged KV cache (docs/design.md, section 10), and the meter of its waste."""

from __future__ import annotations


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, bytes_per_value: int) -> int:
    """Bytes of KV for one token. layers: those with attention; the 2 is for key and value."""
    return 2 * layers * kv_heads * head_dim * bytes_per_value


def num_blocks(memory_bytes: int, block_size: int, bytes_per_token: int) -> int:
    """How many whole blocks of `block_size` tokens fit into `memory_bytes`.

    With the length of a sequence for a block size it says how many sequences fit that reserve so much each.
    """
    return max(0, memory_bytes) // (block_size * bytes_per_token)


class WasteMeter:
    """Time-weighted waste: unused slots over all slots of the distinct blocks that are held.

    held_seconds, used_seconds: slots times the seconds for which they were held, and those with KV.
    """

    def __init__(self) -> None:
        self.held_seconds = 0.0
        self.used_seconds = 0.0

    def sample(self, duration: float, held_slots: int, used_slots: int) -> None:
        """For `duration` seconds the held blocks had `held_slots` slots, `used_slots` of them with KV."""
        if duration < 0 or not 0 <= used_slots <= held_slots:
            raise ValueError(f"not a sample: {duration} s, {used_slots} used of {held_slots} held slots")
        self.held_seconds += duration * held_slots
        self.used_seconds += duration * used_slots

    @property
    def waste(self) -> float:
        """From 0 to 1; 0 while nothing was held."""
        return 1.0 - self.used_seconds / self.held_seconds if self.held_seconds else 0.0
