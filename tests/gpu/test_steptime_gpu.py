"""On a GPU: the operators of the record StepTime give the eager values, compiled and not. All of it
is the record's own script: its later changes of the root do not reach it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import SMALL_MODEL, Corpus, run_trainer
from steptime import SCRIPT, load_record

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {
    "train_seq_len": 128,
    "model_dim": 128,
    "num_heads": 2,
    "num_kv_heads": 1,
    "num_layers": 3,
    "vocab_size": 512,
}
# Of the runs' own shape, and of ones that fill no block.
SHAPES = [
    {},
    {"model_dim": 192, "num_heads": 3, "num_kv_heads": 1, "train_seq_len": 100, "mlp_mult": 3},
    {"model_dim": 64, "num_heads": 4, "num_kv_heads": 4, "train_seq_len": 33},
]


@pytest.fixture
def record() -> Iterator[ModuleType]:
    module = load_record()
    yield module
    module.OPERATORS = frozenset()


def runtime(record: ModuleType, dtype: torch.dtype) -> object:
    """As its start() makes it, without signals and a process group."""
    made = record.Runtime()
    made.device, made.dtype = torch.device("cuda", torch.cuda.current_device()), dtype
    return made


@pytest.mark.parametrize(
    "dtype, bound", [(torch.bfloat16, 0.02), (torch.float32, 2e-5)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["qkv", "mlp"])
def test_values_and_gradients(
    record: ModuleType, name: str, shape: dict, dtype: torch.dtype, bound: float
) -> None:
    assert torch.get_float32_matmul_precision() == "highest"  # the bound of float32 is not TF32's
    rt, cfg = runtime(record, dtype), record.Config(run_id="x", **shape)
    eager, found = (record.trial(name, form, cfg, rt) for form in record.FORMS[name])
    for a, b in zip(eager, found, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).float().norm() <= bound * a.float().norm()


def loss_and_gradients(record: ModuleType, wrap: Callable) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    cfg = record.Config(run_id="x", **SIZES)
    model = record.GPT(cfg, torch.bfloat16)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=random)
    model = model.cuda()
    model.cast()
    ids = torch.randint(0, cfg.vocab_size, (4, cfg.train_seq_len + 1), generator=random).cuda()
    loss = wrap(model)(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_model(record: ModuleType, compiled: bool) -> None:
    """One graph with the operators; the loss is that without them, gradients to what bfloat16
    leaves of them."""

    def wrap(model: torch.nn.Module) -> Callable:
        return torch.compile(model, dynamic=False, fullgraph=True) if compiled else model

    wanted, lines = loss_and_gradients(record, wrap), []
    log = type("Log", (), {"line": lambda self, text: lines.append(text)})()
    record.use_operators(record.Config(run_id="x", **SIZES), runtime(record, torch.bfloat16), log)
    assert lines == ["operators:mlp+qkv"]
    found = loss_and_gradients(record, wrap)
    assert abs(found[0] - wanted[0]) <= 1e-3 * wanted[0]
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 0.12 * b.norm()  # rounding alone: 0.05 of a gain's, from float32


def test_a_run(corpus: Corpus, tmp_path: Path) -> None:
    sizes = {"MODEL_DIM": 128, "TRAIN_SEQ_LEN": 128, "TRAIN_BATCH_TOKENS": 4096, "TORCH_COMPILE": 1}
    settings = {**SMALL_MODEL, **corpus.env, **sizes, "DEVICE": "cuda", "WARMUP_STEPS": 1}
    fast, plain = (
        run_trainer(tmp_path / word, script=SCRIPT, timeout=500, **settings, OPERATORS=word)
        for word in ("auto", "0")
    )
    assert fast.code == plain.code == 0, fast.err + plain.err
    assert "\noperators:mlp+qkv\n" in fast.text and "\noperators:none\n" in plain.text
    a, b = ([float(value) for value in done.values("train_loss")] for done in (fast, plain))
    assert a[0] == pytest.approx(b[0], abs=1e-3) and a == pytest.approx(b, abs=0.05)
