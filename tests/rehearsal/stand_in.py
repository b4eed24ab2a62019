"""Run a script unchanged, except for the model's arithmetic, which would take too long on a CPU.

Real are the settings, shards, readers, plans, the communication between ranks, checkpoints, packing
and logs. Replaced by stand-ins are the logits (only of 64 tokens, so that every module is called),
the losses, the orthogonalization of Muon, and the low-rank matrices (one number each). The loss of
a target is 1 + (3 * input + target) % 16 / 16 nats. Rank 0 writes to stages.jsonl how long each
stage took, and its peak memory in MiB.

Two environment variables change what a run does: with REHEARSED_STEP=N, rank 0 writes to
checksum.json the checksum of the training sequences of step N, counted from 0, as the readers of
all ranks return them after training. With STEP_SECONDS=S, each step takes S seconds longer.
"""

import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

BEGUN = time.perf_counter()
sys.argv = sys.argv[1:]
spec = importlib.util.spec_from_file_location("rehearsed", sys.argv[0])
trainer: Any = importlib.util.module_from_spec(spec)
sys.modules["rehearsed"] = trainer
spec.loader.exec_module(trainer)
torch, run_class = trainer.torch, trainer.Trainer
real_logits, make_run, train_run = trainer.GPT.logits, run_class.__init__, run_class.train
train_one_step = run_class.train_step


def write_stage(stage: str, size: str, begun: float) -> None:
    """Append a stage that began at `begun` to stages.jsonl."""
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
    row = {"stage": stage, "size": size, "s": time.perf_counter() - begun, "mib": peak}
    with open("stages.jsonl", "a", encoding="utf-8") as file:
        print(json.dumps(row), file=file)


def timed(stage: str, owner: Any, name: str, size: Callable[..., str]) -> None:
    """Make rank 0 write a stage for each call of the function `name` of the script or a class.

    `size` makes the text of the column "size" from the result and the arguments. A script that does
    not have the function is left as it is.
    """
    real = getattr(owner, name, None)

    @functools.wraps(real)
    def call(*arguments: Any, **named: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
        begun = time.perf_counter()
        result = real(*arguments, **named)
        write_stage(stage, size(result, *arguments), begun)
        return result

    if real and os.environ["RANK"] == "0":
        setattr(owner, name, call)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def nats_of(x: Any, y: Any) -> Any:
    check_order(x, y)
    return torch.where(y < 0, 0.0, 1 + ((3 * x + y) & 15) / 16)


def check_order(x: Any, y: Any) -> None:
    """Raise AssertionError unless each target is the input at the next place with a target."""
    follows = (y[:, :-1] == x[:, 1:]) | (y[:, :-1] < 0) | (y[:, 1:] < 0)
    assert x.shape == y.shape and bool(follows.all()), "a target is not the next input"


def forward(model: Any, x: Any, y: Any) -> Any:
    """Return a training loss whose gradients are zero, after checks of x and y."""
    if segments := getattr(model, "segments", None):
        cos, _ = segments.find(x, model.cos, model.sin, model.dtype)
        assert not cos.isnan().any(), f"{tuple(x.shape)}: more segments than room for them"
    check_order(x, y)
    assert 0 <= int(x.min()) <= int(x.max()) < len(model.tok_emb.weight)
    return 5.0 + 0.0 * sum(p.sum() for p in model.parameters())


def mean_nats(model: Any, x: Any, y: Any) -> Any:
    mean = nats_of(x, y).sum(dtype=torch.float64) / (y >= 0).sum()
    return mean + 0.0 * model.skip_weights.flatten()[0] if torch.is_grad_enabled() else mean


def document_nats(model: Any, adapters: Any, x: Any, y: Any) -> Any:
    return nats_of(x, y) + 0.0 * adapters.pairs[0][0].sum()


def draw(adapters: Any, documents: int, seed: int) -> Any:
    adapters.shapes = [(1, 1)]
    return real_draw(adapters, 1, seed)


def make(run: Any, config: Any, *more: Any) -> None:
    """Make a Trainer with random weights, also for tensors that start at zero.

    Random weights give an estimate of the packed size, because every row has a scale of its own.
    The smallest size of a quantized tensor is lowered in a narrow model, so that the same tensors
    are quantized as at full width.
    """
    make_run(run, config, *more)
    trainer.KEEP_FLOAT_MAX_NUMEL = int(trainer.KEEP_FLOAT_MAX_NUMEL * (config.model_dim / 512) ** 2)
    for model in filter(None, (run.model, getattr(run, "average", None))):
        random = torch.Generator().manual_seed(7)
        for t in model.state_dict().values():
            if t.numel() > trainer.KEEP_FLOAT_MAX_NUMEL:
                t.normal_(std=0.03, generator=random)


def train(run: Any) -> None:
    if run.runtime.rank == 0:
        write_stage("start", f"{(bytes_read() - IMPORTED) >> 20} MiB read", BEGUN)
    train_run(run)
    if step := os.environ.get("REHEARSED_STEP"):
        crc = read_step(run, int(step))
        if run.runtime.rank == 0:
            Path("checksum.json").write_text(json.dumps(crc), encoding="utf-8")


def read_step(run: Any, step: int) -> int:
    """Return the checksum of the sequences of a step, as the readers of all ranks return them."""
    steps_done, run.step = run.step, step
    with closing(run.batches()) as batches:
        crc = sum(batch.summary for batch in islice(batches, run.runtime.micro_steps))
    run.step = steps_done
    return sum(run.runtime.gather(crc)) % 2**32


def train_step(run: Any, batches: Any) -> None:
    train_one_step(run, batches)
    time.sleep(float(os.environ.get("STEP_SECONDS", "0")))


def newest_checkpoint_size(*_: Any) -> str:
    file = max(Path("checkpoints").rglob("*.pt"), key=os.path.getmtime)
    return f"{file.stat().st_size:,} bytes"


trainer.GPT.forward, trainer.mean_nats, trainer.document_nats = forward, mean_nats, document_nats
trainer.GPT.logits = lambda model, tokens: real_logits(model, tokens[:1, :64])
trainer.newton_schulz = lambda x, iterations, dtype, *more: x.to(dtype)
run_class.__init__, run_class.train, run_class.train_step = make, train, train_step
timed("warm-up", trainer, "warm_up", lambda _, run: f"{run.config.warmup_steps} steps")
timed(
    "step", run_class, "train_step", lambda _, run, b: f"{run.config.train_batch_tokens:,} tokens"
)
timed("checkpoint", trainer, "save_checkpoint", newest_checkpoint_size)
timed("resume", trainer, "resume", newest_checkpoint_size)
timed("validation", run_class, "validate", lambda _, run: f"{run.validation.targets:,} targets")
timed("GPTQ", trainer, "quantize_by_inputs", lambda found, *_: f"{len(found)} matrices")
timed("packing", trainer, "pack", lambda packed, *_: f"{len(packed[0]):,} bytes")
timed("documents", trainer, "find_documents", lambda found, *_: f"{len(found):,} documents")
timed(
    "export, score", run_class, "export_and_score", lambda _, r: f"{r.data.val.ends[-1]:,} tokens"
)
if hasattr(trainer, "Adapters"):
    real_draw, trainer.Adapters.draw = trainer.Adapters.draw, draw
if hasattr(trainer, "PhasedTTT"):
    timed(
        "SGD",
        trainer.PhasedTTT,
        "train_on_documents",
        lambda _, run, known, *w: f"{len(known):,} documents",
    )
IMPORTED = bytes_read()
code = trainer.main(sys.argv[1:], os.environ)
sys.stdout.flush()
os._exit(code)
