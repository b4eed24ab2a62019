"""A plain loader of packed documents, which works as the loaders of the last records do.

loader.py compares it with the pipeline of train_gpt.py. A batch is one row of tokens, together with
the positions at which documents begin. One thread reads the next shard as a whole. Another thread
prepares two batches ahead: it converts uint16 tokens to int64, finds where documents begin in the
batch, and scans each new shard for first tokens of documents. Tokens at the end of a shard that do
not fill a step of all ranks are dropped.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

BOS = 1  # the first token of each document
MULTIPLE = 64  # the number of positions is a multiple of it, so that few shapes are compiled


class DocumentLoader:
    """Yield (x, y, starts) without end.

    x and y are int64 tensors of shape (tokens,). starts are the int32 positions in the batch at
    which segments begin, padded with the value `tokens`. `paths` is an endless iterator of shard
    files. Segments longer than `max_tokens` are cut.
    """

    def __init__(self, paths, rank, ranks, tokens, max_tokens):
        self.paths = paths
        self.rank = rank
        self.ranks = ranks
        self.tokens = tokens
        self.max_tokens = max_tokens
        self.shards = ThreadPoolExecutor(1)
        self.batches = ThreadPoolExecutor(1)
        self.next_shard = self.shards.submit(load_shard, next(paths))
        self.open_next()
        self.ready = [self.batches.submit(self.prepare) for _ in range(2)]

    def open_next(self):
        """Make the shard that was read ahead the current one, and begin to read the next one."""
        self.shard = self.next_shard.result()
        self.next_shard = self.shards.submit(load_shard, next(self.paths))
        self.first_tokens = np.flatnonzero(self.shard == BOS)
        self.cursor = self.first_tokens[0]

    def prepare(self):
        """Return the next batch of this rank: (x, y, starts)."""
        length = self.tokens + 1
        if self.cursor + self.ranks * length > len(self.shard):
            self.open_next()
        first = self.cursor + self.rank * length
        self.cursor += self.ranks * length
        part = torch.from_numpy(self.shard[first : first + length].astype(np.int64))
        low, high = np.searchsorted(self.first_tokens, (first, first + self.tokens))
        starts = cut_segments(self.first_tokens[low:high] - first, self.tokens, self.max_tokens)
        return part[:-1].clone(), part[1:].clone(), starts

    def __iter__(self):
        while True:
            batch = self.ready.pop(0).result()
            self.ready.append(self.batches.submit(self.prepare))
            yield tuple(part.clone() for part in batch)  # the clone stands for the upload

    def close(self):
        self.batches.shutdown()
        self.shards.shutdown()


def load_shard(path):
    """Return all tokens of a shard as uint16."""
    return np.fromfile(path, "<u2", offset=1024)


def cut_segments(first_tokens, tokens, max_tokens):
    """Return the int32 positions at which segments begin, padded with the value `tokens`.

    A segment begins at position 0, at each position in `first_tokens`, and after every `max_tokens`
    tokens of a longer document.
    """
    starts = []
    ends = [*first_tokens.tolist(), tokens]
    begin = 0
    for end in ends:
        starts += range(begin, end, max_tokens)
        begin = end
    padded_length = -(-(len(starts) + 1) // MULTIPLE) * MULTIPLE
    starts += [tokens] * (padded_length - len(starts))
    return torch.tensor(starts, dtype=torch.int32)
