"""Damage to a log, as hypothesis chooses it, and the time that reading takes."""

import time
import timeit
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

WORDS = b"\n | 99999999999999999999 | e999 | nan | - | -1 | 0 | val_bpb: | step:1/".split(b" | ")
PUT_IN = st.one_of(st.binary(max_size=3), st.sampled_from([*WORDS, b"=" * 20 + b"\n"]))
EDIT = st.tuples(st.floats(0, 1), PUT_IN, st.integers(0, 30))
DAMAGE = st.tuples(st.lists(EDIT, max_size=12), st.one_of(st.just(1.0), st.floats(0, 1)))
Damage = tuple[list[tuple[float, bytes, int]], float]


def damaged(text: str, damage: Damage) -> bytes:
    """`text` cut at a share of its length, with bytes put in, and others taken out after them."""
    edits, end = damage
    data = text.encode()
    changed = bytearray(data[: int(end * len(data))])
    for place, new, removed in edits:
        at = int(place * len(changed))
        changed[at : at + removed] = new
    return bytes(changed)


def processor_time(work: Callable[..., Any], *arguments: Any) -> float:
    """Of this process, the least of three: others on the machine do not count."""
    times = timeit.repeat(lambda: work(*arguments), timer=time.process_time, repeat=3, number=1)
    return min(times)
