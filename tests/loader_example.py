"""Another model on our batches: PYTHONPATH=. python3 tests/loader_example.py FOLDER"""

import sys
from types import SimpleNamespace

import torch
from torch import nn

from train_gpt import BatchPlan, Overlap, Pipeline, Shards

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
config = SimpleNamespace(
    data_path=sys.argv[1],  # fineweb_train_*.bin
    vocab_size=1024,
    train_seq_len=64,
    train_batch_tokens=8 * 4 * 64,  # a step is 8 spans of whole rows: a multiple of 8 x 64
    data_stall_seconds=60.0,
)
runtime = SimpleNamespace(
    rank=0, world_size=1, micro_steps=1, device=device, cuda=device.type == "cuda", signum=0
)
overlap = Overlap(queue=2, copy_stream=True, device_slots=2)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, 64)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, config.vocab_size)

    def forward(self, x, y):
        return nn.functional.cross_entropy(
            self.head(self.lstm(self.embedding(x))[0]).flatten(0, 1), y.flatten()
        )


torch.manual_seed(0)
model = Recurrent().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
batches = Pipeline(Shards(config, "train"), BatchPlan.train(config, runtime), overlap, runtime)
for step in range(20):
    batch = next(batches)  # x and y (rows, train_seq_len), valid until the next one is asked for
    loss = model(batch.x, batch.y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.4f}, {batches.total_wait_ms:.1f} ms of waiting")
batches.close()
