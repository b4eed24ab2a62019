"""The loader with a model of yours: python3 tools/loader_example.py FOLDER

FOLDER has shards fineweb_train_*.bin. Reading and uploading run ahead in the background.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent))
from train_gpt import BatchPlan, Config, Overlap, Pipeline, Shards

# A step is 8 spans of whole rows: TRAIN_BATCH_TOKENS is a multiple of 8 x TRAIN_SEQ_LEN.
config = Config(data_path=sys.argv[1], train_seq_len=64, train_batch_tokens=2048)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
plan = BatchPlan.train(config, rank=0, ranks=1)
batches = Pipeline(Shards(config, "train"), plan, Overlap.of(config, "train", device), device)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, 64)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, config.vocab_size)

    def forward(self, x, y):
        logits = self.head(self.lstm(self.embedding(x))[0])  # (B, T, vocabulary)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


torch.manual_seed(0)
model = Recurrent().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(20):
    batch = next(batches)  # x and y (B, T), valid until the next one is asked for
    loss = model(batch.x, batch.y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(
        f"step {step + 1}: loss {loss.item():.4f}, waited for input {batches.total_wait_ms:.1f} ms"
    )
batches.close()
