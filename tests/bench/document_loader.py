"""A plain loader of packed documents, with what the last records' loaders do:

A batch is one row of tokens, with the positions at which documents begin. A thread loads the next
shard whole; another one prepares batches, two ahead: it widens tokens, finds the documents, and
scans each new shard for first tokens. What does not fill a step at a shard's end is dropped.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

BOS = 1  # the first token of each document
MULTIPLE = 64  # of the number of positions, so that few shapes are compiled


class DocumentLoader:
    """Yields (x, y, starts): int64 (tokens,) twice, and int32 positions, padded with `tokens`."""

    def __init__(self, paths, rank, ranks, tokens, max_tokens):
        self.paths = paths  # an endless iterator
        self.rank = rank
        self.ranks = ranks
        self.tokens = tokens
        self.max_tokens = max_tokens  # a longer document is cut
        self.shards = ThreadPoolExecutor(1)
        self.batches = ThreadPoolExecutor(1)
        self.next_shard = self.shards.submit(load_shard, next(paths))
        self.open_next()
        self.ready = [self.batches.submit(self.prepare) for _ in range(2)]

    def open_next(self):
        self.shard = self.next_shard.result()
        self.next_shard = self.shards.submit(load_shard, next(self.paths))
        self.first_tokens = np.flatnonzero(self.shard == BOS)
        self.cursor = self.first_tokens[0]

    def prepare(self):
        length = self.tokens + 1
        if self.cursor + self.ranks * length > len(self.shard):
            self.open_next()
        first = self.cursor + self.rank * length
        self.cursor += self.ranks * length
        part = torch.from_numpy(self.shard[first : first + length].astype(np.int64))
        low, high = np.searchsorted(self.first_tokens, (first, first + self.tokens))
        starts = cut(self.first_tokens[low:high] - first, self.tokens, self.max_tokens)
        return part[:-1].clone(), part[1:].clone(), starts

    def __iter__(self):
        while True:
            batch = self.ready.pop(0).result()
            self.ready.append(self.batches.submit(self.prepare))
            yield tuple(part.clone() for part in batch)  # the upload

    def close(self):
        self.batches.shutdown()
        self.shards.shutdown()


def load_shard(path):
    return np.fromfile(path, "<u2", offset=1024)


def cut(first_tokens, tokens, max_tokens):
    """The starts of all segments: documents, cut every `max_tokens`, and the first position."""
    starts = []
    ends = [*first_tokens.tolist(), tokens]
    begin = 0
    for end in ends:
        starts += range(begin, end, max_tokens)
        begin = end
    padded = -(-(len(starts) + 1) // MULTIPLE) * MULTIPLE
    starts += [tokens] * (padded - len(starts))
    return torch.tensor(starts, dtype=torch.int32)
