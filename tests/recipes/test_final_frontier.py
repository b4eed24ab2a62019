"""Recipes of the records of 27 and 29 April 2026: each against a plain reference.

The references are written from what these records do, in words.
"""

import itertools
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinyruns
import torch
import verify
from running import log_of, write_split
from test_records_of_april import Reference, with_random_weights
from tiny import config_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

pytestmark = pytest.mark.timeout(300)
Run = Callable[..., Any]


def module_of(run: Any) -> Any:
    return sys.modules[type(run).__module__]


def results(run: Any) -> tuple[Any, ...]:
    """Losses, score and artifact of a whole run."""
    run.train()
    run.export_and_score()
    losses = [event["train_loss"] for event in run.log.events if event["event"] == "step"]
    [score] = [event for event in run.log.events if event["event"] == "score"]
    return losses, score["val_loss"], score["val_bpb"], Path("final_model.int8.ptz").read_bytes()


@pytest.mark.parametrize("name", ["byte_sidecar", "documents"])
def test_off_it_is_the_root_to_the_digit(name: str, run_of: Run) -> None:
    assert results(run_of((name,))) == results(run_of())


def faults(found: list[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Those that verify.py has found."""
    assert {name for name, _, _ in found} >= {"resume", "ranks", "replicas", "trained"}
    return [(name, text) for name, kind, text in found if kind == "FAULT"]


# --- byte_sidecar -----------------------------------------------------------------------------


@pytest.fixture
def with_bytes(data: SimpleNamespace, tmp_path: Path) -> SimpleNamespace:
    """The same data, and the bytes of its validation tokens: 0 to 5, not those of the table."""
    folder = tmp_path / "with_bytes"
    shutil.copytree(data.folder, folder)
    numbers = np.random.default_rng(1).integers(0, 6, len(data.val))
    numbers[data.val < 4] = 0  # control tokens
    write_split(folder, "val_bytes", numbers, [])
    return SimpleNamespace(env={"DATA_PATH": str(folder)}, numbers=numbers, folder=folder)


@pytest.mark.parametrize("stride", [0, 8])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_per_byte_have_the_bytes_beside_the_targets(
    stride: int, ranks: int, run_of: Run, with_bytes: SimpleNamespace
) -> None:
    names = ("byte_sidecar", "sliding_window") if stride else ("byte_sidecar",)
    settings = {"BYTE_SIDECAR": 1, "GRAD_ACCUM_STEPS": 8 // ranks} | with_bytes.env
    settings |= {"EVAL_STRIDE": stride} if stride else {}
    if ranks > 1:
        runs, together = run_of(names, ranks=ranks, **settings)
        scores = together.run(lambda rank: runs[rank].evaluate("x", runs[rank].scorer))
    else:
        runs = [run_of(names, **settings)]
        scores = [runs[0].evaluate("x", runs[0].scorer)]
    targets = (600 - 1) // 32 * 32
    in_bytes = with_bytes.numbers[1 : targets + 1].sum()
    for nats, bpb, _ in scores:
        assert bpb == pytest.approx(nats * targets / np.log(2) / in_bytes, rel=1e-12)
    made = module_of(runs[0]).made_of_run(runs[0])
    assert "fineweb_val_bytes_000000.bin" in made, "its checksum decides the score"


def test_rejects_bytes_of_other_tokens(
    script: Callable, data: SimpleNamespace, with_bytes: SimpleNamespace
) -> None:
    module = script("byte_sidecar")
    env = data.env | with_bytes.env | {"VOCAB_SIZE": 260, "DEVICE": "cpu", "BYTE_SIDECAR": 1}
    config = config_of(module, **env, TRAIN_SEQ_LEN=32, TRAIN_BATCH_TOKENS=2048)
    assert module.find_faults(config, {})[0] == []
    path = f"{with_bytes.folder.resolve()}/fineweb_val_bytes_*.bin"
    write_split(with_bytes.folder, "val_bytes", with_bytes.numbers[1:], [])
    wanted = f"{path}: shards end after [1999] tokens, the others [2000]: get the bytes of these"
    assert module.find_faults(config, {})[0] == [f"{wanted} shards"]
    write_split(with_bytes.folder, "val_bytes", np.roll(with_bytes.numbers, 1), [])
    runtime = module.Runtime(config, {})
    with pytest.raises(module.RunError, match=r"tokens 0 to 1984: [1-5] bytes for control token 1"):
        module.Validation(config, runtime, log_of(module), None)
    (with_bytes.folder / "fineweb_val_bytes_000000.bin").unlink()
    [fault] = module.find_faults(config, {})[0]
    assert "no fineweb_val_bytes_*.bin" in fault
    on_gpu = replace(config, val_bytecount_device="cuda")
    faults, _ = module.find_faults(on_gpu, {})
    assert "VAL_BYTECOUNT_DEVICE=cuda: set cpu, for BYTE_SIDECAR=1" in faults


@pytest.mark.slow
def test_verify_finds_no_fault_in_bytes_beside(
    script: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the table's bytes in the file, so that the score can be computed by hand."""
    make_data, with_validation = tinyruns.make_data, tinyruns.Lab.with_validation
    name = "fineweb_val_bytes_000000.bin"

    def with_bytes(folder: Path, *arguments: int) -> int:
        total = make_data(folder, *arguments)
        path = str(folder / "tiny.model")
        table = script().byte_table(path, Path(path).read_bytes())
        tokens = tinyruns.read_shard(folder / "fineweb_val_000000.bin")
        counts = np.zeros(len(tokens), int)
        for i, (x, y) in enumerate(zip(tokens[:-1], tokens[1:], strict=True), 1):
            counts[i] = table.bytes_of(np.array([[x]]), np.array([[y]]))
        tinyruns.write_shard(folder / name, counts)
        return total

    def with_part(lab: Any, part: slice) -> Path:
        folder = with_validation(lab, part)
        tinyruns.write_shard(folder / name, tinyruns.read_shard(folder / name)[part])
        return folder

    monkeypatch.setattr(tinyruns, "make_data", with_bytes)
    monkeypatch.setattr(tinyruns.Lab, "with_validation", with_part)
    file = script("byte_sidecar").__file__
    assert faults(list(verify.verdicts(file, {"BYTE_SIDECAR": 1}))) == []


# --- documents --------------------------------------------------------------------------------

DOCUMENTS = {"DOC_TOKEN": 1, "DOC_MAX": 24, "DOC_ENDS": 200}
LAYERS = {"NUM_LAYERS": 5, "NUM_HEADS": 4, "NUM_KV_HEADS": 2}
STACK = {
    "layer_scale": {"LAYER_SCALE": 1},
    "parallel_residuals": {"PARALLEL_START": 3},
    "skip_gates": {"SKIP_GATES": 1},
    "loop": {"LOOP_START": 1, "LOOP_END": 2, "LOOP_COUNT": 2},
    "xsa": {"XSA_LAST_N": 5},
    "partial_rope": {"ROPE_DIMS": 4},
    "leaky_relu2": {"LEAKY_SLOPE": 0.5},
}


def settings_of_stack() -> dict[str, Any]:
    return {name: value for settings in STACK.values() for name, value in settings.items()}


def rows_of_documents(rows: int, length: int) -> Tensor:
    """Tokens from 4 on; a 1 begins a document, also twice in a row and as the last token."""
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(4, 260, (rows, length), generator=random)
    for row in tokens:
        row[torch.randint(length, (length // 12,), generator=random)] = 1
    tokens[0, 40:42] = 1
    tokens[-1, -1] = 1
    tokens[-1, 7:80] = torch.arange(7, 80) + 100  # longer than three times DOC_MAX
    return tokens


def segments_of(row: list[int], longest: int) -> list[tuple[int, int]]:
    """Where a segment begins and ends: token by token."""
    starts: list[int] = []
    for i, token in enumerate(row):
        if i == 0 or token == 1 or i - starts[-1] == longest:
            starts.append(i)
    return list(itertools.pairwise([*starts, len(row)]))


@pytest.mark.parametrize("names", [(), tuple(STACK)], ids=["alone", "stack"])
def test_packed_logits_are_those_of_each_document_alone(names: tuple, run_of: Run) -> None:
    """In rows longer than TRAIN_SEQ_LEN; each document alone in the reference, in float64."""
    settings = LAYERS | DOCUMENTS | (settings_of_stack() if names else {})
    run = run_of(("documents", *names), **settings)
    model = with_random_weights(run)
    tokens = rows_of_documents(2, 96)
    reference = Reference(model, run.config)
    for model.looping in (False, True) if names else (False,):
        with torch.no_grad():
            logits = model.logits(tokens).double()
        for row, found in zip(tokens, logits, strict=True):
            parts = segments_of(row.tolist(), 24)
            assert len(parts) > 4
            for start, end in parts:
                wanted = reference.logits(row[start:end], model.looping)
                torch.testing.assert_close(found[start:end], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("ranks", "micro_steps", "width"), [(1, 8, 256), (2, 1, 256), (4, 4, 128)])
def test_training_rows_are_whole_spans(
    ranks: int, micro_steps: int, width: int, script: Callable, data: SimpleNamespace
) -> None:
    """A step's spans have 256 targets; in 16 micro-batches each has half of one."""
    module = script("documents")
    settings = {"TRAIN_SEQ_LEN": 32, "TRAIN_BATCH_TOKENS": 2048, "VOCAB_SIZE": 260} | data.env
    config = config_of(module, **settings, **DOCUMENTS, GRAD_ACCUM_STEPS=micro_steps)
    device = torch.device("cpu")
    parts: dict[int, list[Tensor]] = {}
    for rank in range(ranks):
        plan = module.BatchPlan.train(config, rank, ranks, step=1)
        overlap = module.Overlap.of(config, "train", device)
        shards = module.Shards(config, "train")
        with module.closing(module.Pipeline(shards, plan, overlap, device)) as batches:
            for micro_step in range(micro_steps):
                batch = next(batches)
                assert batch.x.shape == (2048 // width // ranks // micro_steps, width)
                parts[micro_step * ranks + rank] = [batch.x.clone(), batch.y.clone()]
    in_order = [parts[number] for number in sorted(parts)]
    x, y = (torch.cat(each).view(8, 256) for each in zip(*in_order, strict=True))
    spans = torch.from_numpy(data.train[2056 : 2056 + 8 * 257].astype(np.int64)).view(8, 257)
    assert torch.equal(x, spans[:, :-1]) and torch.equal(y, spans[:, 1:])


def most_parts(tokens: np.ndarray, width: int) -> int:
    """Of the micro-batches of one row of `width` tokens: the largest number of segments less 1."""
    rows = [tokens[i : i + width] for i in range(0, len(tokens) - width, width + 1)]
    return max(len(segments_of(row.tolist(), 24)) for row in rows) - 1


def test_too_many_documents_are_named_and_never_joined(
    run_of: Run, data: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many as there are, it runs; with one less, it ends before a step on them."""
    used = data.train[: 6 * 8 * 257]
    most = most_parts(used, 256)
    settings = DOCUMENTS | {"GRAD_ACCUM_STEPS": 8, "DOC_ENDS": most}
    run = run_of(("documents",), **settings, VAL_TOKENS=33)
    run.train()
    few = run_of(("documents",), **settings | {"DOC_ENDS": most - 1}, VAL_TOKENS=33)
    named = rf"DOC_ENDS={most - 1}: rows \d+ to \d+, which are one micro-batch, have {most} parts"
    with pytest.raises(module_of(few).RunError, match=named):
        few.train()
    monkeypatch.setattr(module_of(run), "attend_one_by_one", attend_by_mask)
    tokens = torch.full((1, 24), 9)
    with torch.no_grad():
        for count in most, most + 1:
            tokens[0, 1 : count + 1] = 1
            assert run.model.logits(tokens).isnan().all() == (count > most)


@pytest.mark.parametrize("names", [(), tuple(STACK)], ids=["alone", "stack"])
def test_documents_are_one_compiled_graph(
    names: tuple, run_of: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the loop over segments, which stands for a kernel: here it is a mask."""
    run = run_of(("documents", *names), **DOCUMENTS, **(settings_of_stack() if names else {}))
    model = with_random_weights(run)
    module = module_of(run)
    monkeypatch.setattr(module, "attend_one_by_one", attend_by_mask)
    tokens = rows_of_documents(2, 96)
    with torch.no_grad():
        eager = model(tokens, tokens)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens, tokens), eager)
        torch.testing.assert_close(compiled(tokens.flip(0), tokens.flip(0)), eager)


def attend_by_mask(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
    place = torch.arange(len(q))
    segment = torch.bucketize(place, ends, right=True)
    mask = (segment[:, None] == segment) & (place[:, None] >= place)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return y[0].transpose(0, 1)


def test_the_kernel_gets_all_segments(script: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors of shapes alone: what reaches the kernel, and that gradients come back."""
    module = script("documents")
    settings = {"MODEL_DIM": 64, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "TRAIN_SEQ_LEN": 32}
    config = config_of(module, **settings, NUM_LAYERS=2, VOCAB_SIZE=260, DOC_TOKEN=1, DOC_ENDS=20)
    seen: list[tuple] = []
    kernel = module.varlen_attn

    def noted(*arguments: Any, **more: Any) -> Tensor:
        seen.append((*arguments, more))
        return kernel(*arguments, **more)

    monkeypatch.setattr(module, "varlen_attn", noted)
    monkeypatch.setattr(module, "attend_one_by_one", module.attend_packed)  # as on CUDA
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = module.GPT(config, torch.bfloat16)
        tokens = torch.zeros(2, 128, dtype=torch.int64)
        model(tokens, tokens).backward()
        assert model.blocks[0].attn.c_q.weight.grad.shape == (64, 64)
    assert len(seen) == 2
    for q, k, v, ends, its, *longest, more in seen:
        assert (q.shape, k.shape, v.shape) == ((256, 4, 16), (256, 2, 16), (256, 2, 16))
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert ends is its and ends.shape == (2 + 20 + 1,) and ends.dtype == torch.int32
        assert longest == [32, 32] and more == {"window_size": (-1, 0), "enable_gqa": True}


def test_rejects_what_documents_cannot_have(
    script: Callable, data: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("documents")
    settings = {"TRAIN_SEQ_LEN": 32, "TRAIN_BATCH_TOKENS": 2048, "VOCAB_SIZE": 260, "DOC_TOKEN": 1}
    config = config_of(module, **settings, **data.env, DOC_MAX=33)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert module.find_faults(config, {})[0] == ["DOC_MAX=33: set 0 to 32"]
    monkeypatch.setattr(module, "varlen_attn", None)
    faults, _ = module.find_faults(replace(config, doc_max=32), {})
    words = "has no attention for it: install 2.11 to 2.13"
    assert faults == [f"DOC_TOKEN=1: torch {torch.__version__} {words}"]
    assert module.find_faults(replace(config, doc_max=32, device="cpu"), {})[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), tuple(STACK)], ids=["alone", "stack"])
def test_verify_finds_no_fault_in_documents(names: tuple, script: Callable) -> None:
    settings = {"DOC_TOKEN": 1}
    if names:
        settings |= settings_of_stack() | {"LOOP_END": 1, "PARALLEL_START": 2}
    file = script("documents", *names).__file__
    assert faults(list(verify.verdicts(file, settings, quick=True))) == []
