"""The record LeakyReLU^2 + legal TTT + Parallel Muon: its numbers, its recipe end to end."""

import dataclasses
import importlib.util
import io
import itertools
import json
import lzma
import math
import pickle
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, clean_environment, free_port, run_trainer

FOLDER = ROOT / "records/track_non_record_16mb/2026-11-21_LeakyReLU2_LegalTTT_ParallelMuon_Pipeline"
SCRIPT = FOLDER / "train_gpt.py"
# The published command line, variable by variable.
COMMAND_LINE = """
    NUM_LAYERS=11 BIGRAM_VOCAB_SIZE=1536 XSA_LAST_N=4 EMA_ENABLED=1 EMA_DECAY=0.997 SWA_ENABLED=1
    SWA_EVERY=50 ROPE_DIMS=16 LN_SCALE=1 LATE_QAT=1 LATE_QAT_THRESHOLD=0.15 VE_ENABLED=1 VE_DIM=128
    VE_LAYERS=9,10 TTT_ENABLED=1 TTT_LR=0.002 TTT_EPOCHS=3 TTT_CHUNK_TOKENS=32768
    TTT_FREEZE_BLOCKS=0 TTT_MOMENTUM=0.9 TTT_BATCH_SEQS=32 TTT_GRAD_CLIP=1.0 MUON_WD=0.04
    ADAM_WD=0.04 MATRIX_LR=0.025 SCALAR_LR=0.025 TIED_EMBED_LR=0.035 MUON_MOMENTUM=0.99
    MUON_MOMENTUM_WARMUP_START=0.92 MUON_MOMENTUM_WARMUP_STEPS=1500 WARMDOWN_ITERS=3500
    ITERATIONS=9000 MAX_WALLCLOCK_SECONDS=600 EVAL_STRIDE=64 SEED=1337
"""
PUBLISHED = dict(item.split("=", 1) for item in COMMAND_LINE.split())
# Small, but every part works; matrices of the MLP have 69,632 elements,
# so they are stored in six bits.
TINY = {
    "NUM_LAYERS": 3,
    "MODEL_DIM": 64,
    "NUM_HEADS": 4,
    "NUM_KV_HEADS": 2,
    "MLP_MULT": 17,
    "VOCAB_SIZE": 300,
    "VE_LAYERS": "1,2",
    "XSA_LAST_N": 2,
    "BIGRAM_VOCAB_SIZE": 64,
    "BIGRAM_DIM": 16,
    "VE_DIM": 16,
    "ROPE_DIMS": 8,
    "TRAIN_SEQ_LEN": 32,
    "EVAL_SEQ_LEN": 32,
    "TRAIN_BATCH_TOKENS": 1024,
    "VAL_BATCH_SIZE": 2048,
    "GRAD_ACCUM_STEPS": 1,
    "WARMUP_STEPS": 1,
    "ITERATIONS": 12,
    "WARMDOWN_ITERS": 6,
    "VAL_TOKENS": 1025,
    "MAX_WALLCLOCK_SECONDS": 0,
    "EVAL_STRIDE": 16,
    "TTT_CHUNK_TOKENS": 256,
    "TTT_ENABLED": 1,
    "TTT_EPOCHS": 2,
    "TTT_LR": 0.05,
    "EMA_DECAY": 0.8,
    "DEVICE": "cpu",
    "TORCH_COMPILE": 0,
}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("leaky_record", SCRIPT)
    module = sys.modules["leaky_record"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = load()


def config(**settings: object) -> "record.Config":
    cfg, faults = record.Config.from_environment({k: str(v) for k, v in settings.items()})
    assert not faults, faults
    return cfg


def tiny(**settings: object) -> "record.Config":
    return config(**{**TINY, **settings})


def model_of(
    cfg: "record.Config", dtype: torch.dtype = torch.float32, scramble: float = 0.0
) -> "record.GPT":
    """A model from the seed; scramble: noise on all weights, as at the start many are zero."""
    torch.manual_seed(cfg.seed)
    model = record.GPT(cfg, dtype)
    with torch.no_grad():
        for p in model.parameters():
            p += scramble * torch.randn_like(p)
    return model


def batch(cfg: "record.Config", rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(
        0, cfg.vocab_size, (rows, cfg.train_seq_len + 1), generator=torch.Generator().manual_seed(5)
    )
    return ids[:, :-1], ids[:, 1:]


@pytest.fixture
def run(corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a Run on the corpus, in this process, with settings; its log in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    logs = []

    def make(**settings: object) -> "record.Run":
        cfg = tiny(**corpus.env, **settings)
        logs.append(record.RunLog(f"run{len(logs)}", True))
        return record.Run(cfg, record.Runtime(), logs[-1])

    yield make
    for log in logs:
        log.streams[log.path].close()
        log.streams[log.events].close()


# --- the specification's numbers ------------------------------------------------------------------


@pytest.fixture(scope="module")
def full() -> "record.GPT":
    """The record's model at its own size; without weights, only shapes."""
    with torch.device("meta"):
        return record.GPT(config(**{**PUBLISHED, "LATE_QAT": 0}), torch.bfloat16)


def test_parameters_and_dtypes_of_the_record(full: "record.GPT") -> None:
    assert record.parameters(full) == 26_928_220
    by_dtype = {
        dtype: sum(p.numel() for p in full.parameters() if p.dtype == dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert by_dtype == {torch.float32: 26_076_252, torch.bfloat16: 851_968}
    shapes = {name: tuple(t.shape) for name, t in full.state_dict().items()}
    assert shapes["qo_bank"] == (22, 512, 512) and shapes["kv_bank"] == (22, 256, 512)
    assert shapes["mlp_up_bank"] == (11, 1536, 512) and shapes["mlp_down_bank"] == (11, 512, 1536)
    assert shapes["bigram.embed.weight"] == (1536, 128) and shapes["ve_shared.proj.weight"] == (
        256,
        128,
    )
    assert [i for i, block in enumerate(full.blocks) if block.attn.xsa] == [7, 8, 9, 10]


def test_export_classes_of_the_record(full: "record.GPT", monkeypatch: pytest.MonkeyPatch) -> None:
    elements = {"int6": [], "int8": [], "passthrough": []}

    def counted(kind: str):
        return lambda t: (
            elements[kind].append(t.numel()) or (torch.zeros(1, dtype=torch.int8), torch.zeros(1))
        )

    monkeypatch.setattr(record, "quantize_int6", counted("int6"))
    monkeypatch.setattr(record, "quantize", counted("int8"))
    monkeypatch.setattr(lzma, "compress", lambda data, preset: data)
    state = {name: torch.empty(t.shape) for name, t in full.state_dict().items()}
    file = torch.load(io.BytesIO(record.pack(state, config(**PUBLISHED))), weights_only=True)
    elements["passthrough"] = [
        file["w"][name].numel() for name, how in file["m"].items() if how == "passthrough"
    ]
    assert {kind: (len(sizes), sum(sizes)) for kind, sizes in elements.items()} == {
        "int6": (66, 25_952_256),
        "int8": (3, 851_968),
        "passthrough": (52, 123_996),
    }
    assert {how if how == "passthrough" else how["type"] for how in file["m"].values()} == set(
        elements
    )
    assert "blocks.10.attn.c_k.weight" in file["m"] and "blocks.0.mlp.fc.weight.q" in file["w"]
    assert all(
        file["w"][name].dtype == torch.float16
        for name, how in file["m"].items()
        if how == "passthrough"
    )


def test_windows_and_chunks_of_the_record() -> None:
    cfg, targets = config(**PUBLISHED), 62_021_632  # FineWeb's val split
    sliding = record.WindowPlan(cfg, record.Runtime(), targets, seq_len=2048, stride=64)
    assert len(sliding.windows) == 969_088 == sum(piece.counted for piece in sliding.pieces)
    plan = record.WindowPlan(
        cfg, record.Runtime(), targets, seq_len=2048, stride=64, chunk_tokens=32_768
    )
    windows = [sum(piece.counted for piece in scored) for scored, _ in plan.chunks]
    assert len(windows) == 1893 and sum(windows) == 969_088
    assert (windows[0], set(windows[1:-1]), windows[-1]) == (481, {512}, 415)
    assert {len(trained) for _, trained in plan.chunks[:-1]} == {3} and plan.chunks[-1][1] == []
    assert {len(piece.rows) for piece in plan.chunks[5][1]} == {16}
    eighth = record.WindowPlan(
        cfg,
        record.Runtime(rank=3, world_size=8),
        targets,
        seq_len=2048,
        stride=64,
        chunk_tokens=32_768,
    )
    assert [(len(p.rows), p.share) for p in eighth.chunks[5][1]] == [(2, 1 / 8)] * 3
    assert {len(piece.rows) for scored, _ in eighth.chunks[1:] for piece in scored} == {
        32
    }  # one compiled graph


def test_published_command_line_is_accepted_whole() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--print-config"],
        capture_output=True,
        text=True,
        cwd=FOLDER,
        env=clean_environment(**PUBLISHED, MUON_BETA2=0.95),
    )
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert set(map(str.lower, PUBLISHED)) == {
        k for k, v in values.items() if v["source"] == "environment"
    }
    assert values["ema_decay"]["value"] == 0.997 and values["ve_layers"]["value"] == "9,10"
    assert record.foreign_names({**PUBLISHED, "MUON_BETA2": "0.95"})[0] == []


def test_learning_rate_follows_steps_or_the_clock() -> None:
    cap = config(MAX_WALLCLOCK_SECONDS=100, WARMDOWN_ITERS=10)
    assert record.lr_multiplier(cap, 0, 0.0) == 1.0
    # 95 steps in 95 s: a step takes 1 s, 10 steps of warm-down are 10 s, 5 s remain
    assert record.lr_multiplier(cap, 95, 95_000.0) == pytest.approx(0.5)
    steps = config(MAX_WALLCLOCK_SECONDS=0, WARMDOWN_ITERS=10, ITERATIONS=100)
    assert [record.lr_multiplier(steps, n, 0.0) for n in (0, 89, 95, 100)] == [1.0, 1.0, 0.5, 0.0]
    momentum = config(**PUBLISHED)
    assert [round(record.muon_momentum(momentum, n), 6) for n in (0, 750, 1500, 9000)] == [
        0.92,
        0.955,
        0.99,
        0.99,
    ]


# --- model ----------------------------------------------------------------------------------------


def test_loss_at_the_start_is_that_of_a_guess() -> None:
    cfg = tiny(VOCAB_SIZE=300)
    assert model_of(cfg)(*batch(cfg)).item() == pytest.approx(math.log(300), abs=0.02)


def test_initial_values_are_those_of_bfloat16() -> None:
    model = model_of(tiny(), torch.bfloat16)
    assert model.bigram.scale.item() == pytest.approx(0.050048828, abs=1e-9)
    assert model.ve_shared.scale.item() == pytest.approx(0.10009766, abs=1e-8)
    assert torch.equal(model.smear["gate"].sigmoid(), torch.full((64,), 0.5))
    up = model.mlp_up_bank[1].float()
    assert torch.allclose(up.T @ up, torch.eye(64), atol=0.02)
    assert (
        not model.qo_bank[3:].any()
        and not model.mlp_down_bank.any()
        and not model.bigram.embed.weight.any()
    )
    assert model.bigram.proj.weight.any() and model.ve_shared.embed.weight.any()


def test_xsa_leaves_nothing_along_the_own_value() -> None:
    torch.manual_seed(0)
    y, v = torch.randn(2, 5, 8, 16), torch.randn(2, 5, 4, 16)
    rest = record.without_own_value(y, v)
    along = (rest.unflatten(2, (4, 2)) * v.unsqueeze(3)).sum(-1)
    assert along.abs().max() < 1e-5 and (rest - y).abs().max() > 0.1
    for head in range(8):  # query head j belongs to KV head j // 2
        own, part = v[:, :, head // 2], y[:, :, head]
        unit = own / own.norm(dim=-1, keepdim=True)
        assert torch.allclose(
            rest[:, :, head], part - (part * unit).sum(-1, keepdim=True) * unit, atol=1e-5
        )


def test_rotary_base_stretches_beyond_1024() -> None:
    model = model_of(tiny(ROPE_DIMS=16))
    for length, base in ((1024, 10_000.0), (2048, 22_081.8)):
        table = model.rotary(length, torch.device("cpu"))
        angle = 7 * base ** (-2 * torch.arange(8) / 16)
        assert table.shape == (2, length, 1, 8)
        assert torch.allclose(table[:, 7, 0], torch.stack((angle.cos(), angle.sin())), atol=1e-4)
    q = torch.randn(1, 4, 2, 32)
    rotated = model.blocks[0].attn.rotated(q, model.rotary(4, q.device))
    assert torch.equal(rotated[..., 16:], record.rms_norm(q)[..., 16:])
    assert torch.equal(rotated[:, 0], record.rms_norm(q)[:, 0])
    assert not any(
        torch.equal(rotated[:, 1:, head], record.rms_norm(q)[:, 1:, head]) for head in range(2)
    )


def test_bigrams_hash_both_tokens() -> None:
    ids = torch.tensor([[5, 9, 5, 9], [1023, 0, 1023, 7]])
    expected = [
        [
            1535,
            (36313 * 9 ^ 27191 * 5) % 1535,
            (36313 * 5 ^ 27191 * 9) % 1535,
            (36313 * 9 ^ 27191 * 5) % 1535,
        ],
        [1535, (27191 * 1023) % 1535, (36313 * 1023) % 1535, (36313 * 7 ^ 27191 * 1023) % 1535],
    ]
    assert record.bigram_ids(ids, 1536).tolist() == expected


OPTIONAL = {"GATED_ATTENTION": 1, "VALUE_RESIDUAL": 1, "DTG_ENABLED": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        OPTIONAL,
        {
            "LN_SCALE": 0,
            "BIGRAM_VOCAB_SIZE": 0,
            "VE_ENABLED": 0,
            "XSA_LAST_N": 0,
            "ROPE_DIMS": 0,
            "TIE_EMBEDDINGS": 0,
        },
    ],
)
def test_no_score_depends_on_what_comes_later(settings: dict[str, int]) -> None:
    cfg = tiny(**settings)
    model, (x, y) = model_of(cfg, scramble=0.1), batch(cfg)
    other = x.clone()
    other[:, 20:] = (other[:, 20:] + 7) % 300
    with torch.no_grad():
        a, b = model.nats(x, y), model.nats(other, y)
    assert torch.equal(a[:, :20], b[:, :20]) and not torch.equal(a[:, 20:], b[:, 20:])
    assert model(x, y).item() != model(x, y.roll(1)).item()


def test_optional_modules_start_as_they_should_and_learn() -> None:
    cfg = tiny(**OPTIONAL)
    model = model_of(cfg, scramble=0.1)
    model(*batch(cfg)).backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []
    fresh = model_of(cfg)
    assert {
        fresh.blocks[0].attn.attn_gate.bias.mean().item(),
        fresh.blocks[0].dtg_gate.bias.item(),
    } == {4.0, 2.0}


def test_both_forms_of_the_square_are_one_value_in_bfloat16() -> None:
    x = batch(tiny())
    losses = [
        model_of(tiny(MLP_FUSED_FORM=form), torch.bfloat16, scramble=0.1).nats(*x)
        for form in (0, 1)
    ]
    assert torch.equal(*losses)


def test_negative_side_keeps_a_quarter_of_the_square() -> None:
    cfg = tiny(NUM_LAYERS=1, VE_ENABLED=0, XSA_LAST_N=0)
    block = record.Block(cfg, 0)
    up, down, zero = torch.zeros(2, 64), torch.zeros(64, 2), torch.zeros(64, 64)
    up[0, 0], up[1, 0], down[3, 0], down[4, 1] = 1.0, -1.0, 1.0, 1.0
    x = torch.zeros(1, 1, 64)
    x[..., 0] = 8.0  # rms norm of one channel out of 64: 8
    w = record.Matrices(zero, zero[:32], zero[:32], zero, up, down)
    out, _ = block(x, x, w, model_of(cfg).rotary(1, x.device), 0, None)
    assert out[0, 0, 3].item() == pytest.approx(64, rel=1e-4) and out[
        0, 0, 4
    ].item() == pytest.approx(16, rel=1e-4)


def test_late_qat_reaches_the_weights_that_are_exported_and_only_while_learning() -> None:
    cfg = tiny(LATE_QAT=1)
    model, (x, y) = model_of(cfg, scramble=0.3), batch(cfg)
    plain, other = model(x, y).item(), model_of(cfg, scramble=0.3)
    with torch.no_grad():
        for bank in other.banks():
            for matrix in bank:
                scale = (matrix.abs().amax(-1) / 31).clamp(min=1 / 31).half().float()[:, None]
                matrix.copy_((matrix / scale).round() * scale)
    model.qat.fill_(1.0)
    loss = model(x, y)
    assert (
        loss.item() == pytest.approx(other(x, y).item(), abs=1e-6)
        and abs(loss.item() - plain) > 1e-4
    )
    with torch.no_grad():
        assert model(x, y).item() == pytest.approx(plain, abs=1e-6)
    loss.backward()
    assert all(bank.grad.any() for bank in model.banks())
    assert model_of(tiny(LATE_QAT=0)).qat is None


@pytest.mark.slow
def test_the_model_is_one_graph_and_switching_qat_on_compiles_nothing() -> None:
    cfg = tiny(LATE_QAT=1, **OPTIONAL)
    model, (x, y) = model_of(cfg, torch.bfloat16, scramble=0.1), batch(cfg)
    loss_of = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager")
    stats = torch._dynamo.utils.counters["stats"]
    first, graphs = loss_of(x, y), stats["unique_graphs"]
    first.backward()
    model.qat.fill_(1.0)
    second = loss_of(x, y)
    assert stats["unique_graphs"] == graphs and second.item() != first.item()
    assert second.item() == pytest.approx(model(x, y).item(), rel=1e-5)


# --- optimizers -----------------------------------------------------------------------------------


def test_newton_schulz_makes_nearly_orthogonal_and_keeps_zero() -> None:
    torch.manual_seed(1)
    singular = torch.linalg.svdvals(record.newton_schulz(torch.randn(3, 96, 32), 5, torch.float32))
    assert singular.min() > 0.6 and singular.max() < 1.25
    assert not record.newton_schulz(torch.zeros(2, 8, 4), 5, torch.float32).any()


def test_optimizer_groups() -> None:
    cfg = tiny()
    model = model_of(cfg)
    optimizers = record.Optimizers(model, cfg, record.Runtime(), 8)
    banks = (model.mlp_up_bank, model.mlp_down_bank, model.qo_bank, model.kv_bank)
    assert [shard.bank is bank for shard, bank in zip(optimizers.muon, banks, strict=True)] == [
        True
    ] * 4
    assert [(g["base_lr"], g["weight_decay"]) for g in optimizers.adam.param_groups] == [
        (0.035, 0.04),
        (0.025, 0.04),
    ]
    inside = sum(values.numel() for values in optimizers.values)
    assert inside == record.parameters(model)  # no parameter is left out
    untied = tiny(TIE_EMBEDDINGS=0)
    groups = record.Optimizers(model_of(untied), untied, record.Runtime(), 8).adam.param_groups
    assert [(g["base_lr"], g["weight_decay"]) for g in groups] == [
        (0.6, 0.04),
        (0.025, 0.04),
        (0.008, 0.0),
    ]


def test_a_muon_step_is_the_formula() -> None:
    cfg = tiny(MATRIX_LR=0.1, MUON_WD=0.5)
    bank = torch.nn.Parameter(torch.randn(3, 12, 4))
    shard, before, average = (
        record.Shard(bank, cfg, record.Runtime()),
        bank.detach().clone(),
        torch.zeros(3, 12, 4),
    )
    for step in range(2):
        bank.grad.copy_(torch.randn(3, 12, 4))
        average = 0.9 * average + bank.grad
        update = record.newton_schulz(bank.grad + 0.9 * average, 5, torch.float32)
        before = before * (1 - 0.05 * 0.5) - 0.05 * 3**0.5 * update
        shard.scatter()
        shard.orthogonalize(0.9)
        with torch.no_grad():
            shard.apply(0.05)
        assert torch.allclose(bank, before, atol=1e-5), step


STEPS = """
    import sys, torch, torch.distributed as dist
    sys.path.insert(0, sys.argv[1])
    import os, train_gpt as record
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cfg, faults = record.Config.from_environment(os.environ)
    rt = record.Runtime(rank, world)
    rt.start(cfg, os.environ)
    torch.manual_seed(3)
    model = record.GPT(cfg, torch.float32)
    optimizers = record.Optimizers(model, cfg, rt, record.Control.FIELDS + 2 * world)
    for step in range(3):
        for values, grads in zip(optimizers.values, optimizers.grads):
            draws = torch.randn(6, *grads.shape, generator=torch.Generator().manual_seed(step))
            grads.copy_(sum(draws[i] for i in range(6) if i % world == rank) / 6)
        for flat in (optimizers.flat.grads, optimizers.tables.grads):
            rt.all_reduce(flat, "reduction")
        optimizers.step(0.7, 0.9)
    if rank == 0: torch.save(model.state_dict(), sys.argv[2])
    rt.close()
"""


def distributed(folder: Path, ranks: int, code: str, *args: object, **settings: object) -> None:
    (folder / "job.py").write_text(textwrap.dedent(code))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--nnodes=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{free_port()}",
        str(folder / "job.py"),
        str(FOLDER),
    ]
    done = subprocess.run(
        [*command, *map(str, args)],
        env=clean_environment(**{**TINY, **settings}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr.replace("OMP_NUM_THREADS", "")


@pytest.mark.slow
def test_sharded_steps_equal_the_local_one(tmp_path: Path) -> None:
    """Three layers over two ranks: the MLP banks are padded,
    and one rank has a slice that is none."""
    states = []
    for ranks in (1, 2):
        distributed(tmp_path, ranks, STEPS, tmp_path / f"{ranks}.pt", MODEL_DIM=32)
        states.append(torch.load(tmp_path / f"{ranks}.pt"))
    for name, t in states[0].items():
        assert torch.allclose(t, states[1][name], atol=2e-5), name


def test_a_gather_is_awaited_behind_the_next_newton_schulz(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, seen = tiny(), []
    optimizers = record.Optimizers(model_of(cfg), cfg, record.Runtime(), 8)

    def noting(name):
        call = getattr(record.Shard, name)

        def noted(self, *args):
            seen.append((name, optimizers.muon.index(self)))
            return call(self, *args)

        return noted

    for name in ("scatter", "orthogonalize", "apply"):
        monkeypatch.setattr(record.Shard, name, noting(name))
    monkeypatch.setattr(optimizers.adam, "step", lambda: seen.append(("adam", 0)))
    optimizers.step(1.0, 0.9)
    assert seen == [
        ("scatter", 0),
        ("scatter", 1),
        ("scatter", 2),
        ("scatter", 3),
        ("adam", 0),
        ("orthogonalize", 0),
        ("orthogonalize", 1),
        ("apply", 0),
        ("orthogonalize", 2),
        ("apply", 1),
        ("orthogonalize", 3),
        ("apply", 2),
        ("apply", 3),
    ]


def test_clipping_limits_the_local_gradient() -> None:
    cfg = tiny(GRAD_CLIP_NORM=0.3)
    optimizers = record.Optimizers(model_of(cfg), cfg, record.Runtime(world_size=1), 8)
    for grads in optimizers.grads:
        grads.normal_()
    before = [grads.clone() for grads in optimizers.grads]
    optimizers.clip()
    norm = math.sqrt(sum(grads.double().square().sum().item() for grads in optimizers.grads))
    assert norm == pytest.approx(0.3, rel=1e-3)
    assert torch.allclose(
        before[0] / before[0].norm(), optimizers.grads[0] / optimizers.grads[0].norm(), atol=1e-6
    )
    optimizers.clip()
    assert math.sqrt(
        sum(g.double().square().sum().item() for g in optimizers.grads)
    ) == pytest.approx(norm, rel=1e-4)


class Lines(list):
    line = list.append


@pytest.mark.parametrize(
    "settings, text, expected",
    [
        (
            {},
            "ema:applying EMA weights",
            lambda w: 0.8**6 * w[0] + sum(0.2 * 0.8 ** (6 - i) * w[i] for i in range(1, 7)),
        ),
        ({"EMA_ENABLED": 0}, "", lambda w: w[6]),
        (
            {"EMA_ENABLED": 0, "SWA_ENABLED": 1, "SWA_EVERY": 2},
            "swa:applying SWA weights n=2",
            lambda w: (w[4] + w[6]) / 2,
        ),
        (
            {"LAWA_ENABLED": 1, "LAWA_K": 2, "LAWA_FREQ": 2},
            "lawa:applying LAWA averaging k=2",
            lambda w: (w[4] + w[6]) / 2,
        ),
        ({"LAWA_ENABLED": 1, "LAWA_FREQ": 4, "EMA_ENABLED": 0}, "", lambda w: w[6]),
    ],
)
def test_averages_do_what_their_settings_say(settings: dict, text: str, expected) -> None:
    """Six steps; the learning rate's factor is below 0.2 from step 4 on."""
    weights = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(7)]
    values, log = [weights[0].clone()], Lines()
    averages = record.Averages(tiny(**settings), values)
    for step in range(1, 7):
        values[0].copy_(weights[step])
        averages.update(step, 0.5 if step < 4 else 0.1, log)
    assert averages.apply() == text
    assert torch.allclose(values[0], expected(weights), atol=1e-6)
    assert log == (["swa:start step:4"] if "SWA_ENABLED" in settings else [])


# --- artifact -------------------------------------------------------------------------------------


def test_six_bits_take_the_best_of_five_clips() -> None:
    torch.manual_seed(2)
    t = 3 * torch.randn(8, 5000)
    t[0, 0] = 400.0  # an outlier: the whole range would waste the codes of its row
    q, scale = record.quantize_int6(t)
    assert q.dtype == torch.int8 and scale.dtype == torch.float16 and q.abs().max() == 31
    errors = []
    for share in (0.999, 0.9995, 0.9999, 0.99999, 1.0):
        s = (torch.quantile(t.abs(), share, dim=1) / 31).clamp(min=1 / 31).half().float()[:, None]
        errors.append((t - (t / s).round().clamp(-31, 31) * s).square().mean().item())
    assert (t - record.dequantize(q, scale)).square().mean().item() == pytest.approx(
        min(errors), rel=1e-6
    )
    small = record.quantize_int6(0.003 * torch.randn(4, 300))
    assert not small[0].any() and torch.equal(
        small[1], torch.full((4,), 1 / 31).half()
    )  # the floor


def test_artifact_round_trip_is_strict() -> None:
    cfg = tiny()
    model = model_of(cfg, scramble=0.5)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    data = record.pack(state, cfg)
    back = record.unpack(data, state)
    model.load_state_dict(back, strict=True)
    assert back.keys() == state.keys()
    for name, t in state.items():
        large = name.startswith("mlp")  # 69,632 elements a layer; the others are stored in float16
        expected = (
            torch.stack([record.dequantize(*record.quantize_int6(m)) for m in t])
            if large
            else t.half().float()
        )
        assert torch.equal(back[name], expected), name
    assert (back["mlp_up_bank"] - state["mlp_up_bank"]).abs().mean() < 0.05
    file = torch.load(io.BytesIO(lzma.decompress(data)), weights_only=True)
    assert file["m"]["blocks.2.mlp.fc.weight"] == {"type": "int6"}


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def evil() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": Evil(), "m": {}}, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def packed() -> bytes:
    return record.pack(model_of(tiny()).state_dict(), tiny())


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("change", ["cut", "noise", "bomb", "pickle", "missing", "shape", "evil"])
def test_damaged_and_hostile_artifacts_are_one_line(
    change: str, packed: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    file = torch.load(io.BytesIO(lzma.decompress(packed)), weights_only=True)
    if change == "missing":
        del file["w"]["smear.gate"]
    if change == "shape":
        file["w"]["smear.gate"] = torch.zeros(63)
    torch.save(file, buffer := io.BytesIO())
    data = {
        "cut": lambda: packed[:-200],
        "noise": lambda: b"noise" * 99,
        "bomb": lambda: lzma.compress(bytes(64 << 20), preset=0),
        "pickle": lambda: lzma.compress(pickle.dumps(Evil())),
        "evil": lambda: lzma.compress(evil()),
    }.get(change, lambda: lzma.compress(buffer.getvalue(), preset=0))()
    with pytest.raises(record.RunError, match="the artifact cannot be loaded: .+") as error:
        record.unpack(data, model_of(tiny()).state_dict())
    assert "\n" not in str(error.value) and "executed" not in capsys.readouterr().out


# --- windows and test-time training ---------------------------------------------------------------


def scored_targets(plan: "record.WindowPlan", piece: "record.Piece") -> list[int]:
    return [
        t
        for row in list(piece.rows)[len(piece.rows) - piece.counted :]
        for t in range(*(row * plan.stride + edge for edge in plan.counted(row)))
    ]


def trained_targets(plan: "record.WindowPlan", piece: "record.Piece") -> list[int]:
    return [
        t for row in piece.rows for t in range(row * plan.stride, row * plan.stride + plan.seq_len)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("targets", [1024, 1000, 250])
def test_a_chunk_trains_on_just_the_targets_it_has_scored(world_size: int, targets: int) -> None:
    plans = [
        record.WindowPlan(
            tiny(TTT_EPOCHS=1),
            record.Runtime(rank, world_size),
            targets,
            seq_len=32,
            stride=16,
            chunk_tokens=160,
        )
        for rank in range(world_size)
    ]
    seen = set()
    for c in range(len(plans[0].chunks)):
        scored = [
            t for plan in plans for piece in plan.chunks[c][0] for t in scored_targets(plan, piece)
        ]
        trained = [
            t for plan in plans for piece in plan.chunks[c][1] for t in trained_targets(plan, piece)
        ]
        steps = {len(plan.chunks[c][1]) for plan in plans}
        assert len(steps) == 1  # every rank takes part in every reduction
        for step in range(steps.pop()):
            assert sum(plan.chunks[c][1][step].share for plan in plans) == pytest.approx(1)
        if c + 1 < len(plans[0].chunks):
            assert sorted(scored) == sorted(trained) == list(range(160 * c, 160 * c + 160))
        else:
            assert trained == [] and set(scored) == set(range(160 * c, targets))
        seen |= set(scored)
    assert seen == set(range(targets))


def reference(run: "record.Run", plan: "record.WindowPlan") -> float:
    """The mean nats of sliding windows, written out:
    each window alone, its last `stride` targets."""
    tokens = np.concatenate(
        [np.fromfile(p, "<u2", offset=1024) for p in run.validation.shards.paths]
    ).astype(np.int64)
    total, count = 0.0, 0
    for start in range(0, plan.targets, plan.stride):
        length = min(plan.seq_len, plan.targets - start)
        x, y = (torch.from_numpy(tokens[start + i : start + i + length])[None] for i in (0, 1))
        with torch.no_grad():
            nats = run.model.nats(x, y)[0, max(length - plan.stride, 0) if start else 0 :]
        total, count = total + nats.double().sum().item(), count + len(nats)
    return total / count


def scrambled(run: "record.Run") -> "record.Run":
    torch.manual_seed(11)
    for values in run.optimizers.values:
        values += 0.05 * torch.randn_like(values)
    return run


def test_sliding_windows_score_what_a_plain_loop_scores(run) -> None:
    r = scrambled(run())
    plan = record.WindowPlan(r.cfg, r.rt, r.validation.tokens - 1, seq_len=32, stride=16)
    val_loss, val_bpb, _ = record.score_windows(r, plan, "sliding")
    assert val_loss == pytest.approx(reference(r, plan), abs=1e-6)
    tokens = np.concatenate([np.fromfile(p, "<u2", offset=1024) for p in r.validation.shards.paths])
    targets = [t for piece in plan.pieces for t in scored_targets(plan, piece)]
    size = sum(
        int(r.validation.table.count(tokens[t : t + 1], tokens[t + 1 : t + 2])) for t in targets
    )
    assert val_bpb == pytest.approx(val_loss * len(targets) / math.log(2) / size, rel=1e-9)


def learning_plan(r: "record.Run", **settings: object) -> "record.WindowPlan":
    return record.WindowPlan(
        dataclasses.replace(r.cfg, **settings),
        r.rt,
        r.validation.tokens - 1,
        seq_len=32,
        stride=16,
        chunk_tokens=256,
    )


def test_learning_rate_zero_is_sliding_evaluation(run) -> None:
    r = scrambled(run(TTT_LR=0))
    whole = record.WindowPlan(r.cfg, r.rt, r.validation.tokens - 1, seq_len=32, stride=16)
    sliding = record.score_windows(r, whole, "sliding")
    plan = learning_plan(r)
    learned = record.score_windows(r, plan, "ttt", record.Learner(r, plan))
    assert learned[:2] == pytest.approx(sliding[:2], rel=1e-12)


def test_no_target_is_trained_on_before_it_is_scored(run) -> None:
    """What the model computes, in order: every target in a pass that learns has a recorded score,
    and the scores are those of a loop that scores a chunk first.
    With the order swapped both fail."""
    r = scrambled(run())
    plan, scored = learning_plan(r), set()
    pieces, nats_of, loss_of = iter(plan.pieces), r.nats_of, r.loss_of

    def scoring(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        piece = next(pieces)
        assert piece.counted and len(x) == len(piece.rows)
        scored.update(scored_targets(plan, piece))
        return nats_of(x, y)

    def learning(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        piece = next(pieces)
        assert not piece.counted and set(trained_targets(plan, piece)) <= scored
        return loss_of(x, y)

    r.nats_of, r.loss_of = scoring, learning
    before = [values.clone() for values in r.optimizers.values]
    first = record.score_windows(r, plan, "ttt", record.Learner(r, plan))[0]
    assert next(pieces, None) is None and len(scored) == r.validation.tokens - 1
    assert not torch.equal(before[0], r.optimizers.values[0])
    for values, old in zip(r.optimizers.values, before, strict=True):
        values.copy_(old)
    r.nats_of, r.loss_of = nats_of, loss_of
    assert first == pytest.approx(plain_ttt(r, plan), abs=1e-6)


def plain_ttt(r: "record.Run", plan: "record.WindowPlan") -> float:
    """Score-first training, written out on one rank: mean nats of all targets."""
    tokens = np.concatenate(
        [np.fromfile(p, "<u2", offset=1024) for p in r.validation.shards.paths]
    ).astype(np.int64)
    tokens, cfg = torch.from_numpy(tokens), r.cfg
    T, stride, size, targets = 32, 16, 256, plan.targets
    sgd = torch.optim.SGD(r.model.parameters(), lr=1.0, momentum=cfg.ttt_momentum)
    starts = [s for s in range(0, targets, stride) if s == 0 or targets - s >= stride]
    first = {s: s + (max(min(T, targets - s) - stride, 0) if s else 0) for s in starts}
    total, count, chunks = 0.0, 0, -(-targets // size)
    for chunk in range(chunks):
        for s in (s for s in starts if first[s] // size == chunk):
            end = min(s + T, targets)
            with torch.no_grad():
                nats = r.model.nats(tokens[None, s:end], tokens[None, s + 1 : end + 1])[
                    0, first[s] - s :
                ]
            total, count = total + nats.double().sum().item(), count + len(nats)
        for _ in range(cfg.ttt_epochs if chunk + 1 < chunks else 0):
            r.optimizers.zero()
            begin = chunk * size
            rows = tokens[begin : begin + size], tokens[begin + 1 : begin + size + 1]
            r.model(*(part.view(-1, T) for part in rows)).backward()
            torch.nn.utils.clip_grad_norm_(r.model.parameters(), cfg.ttt_grad_clip)
            sgd.param_groups[0]["lr"] = (
                cfg.ttt_lr * 0.5 * (1 + math.cos(math.pi * chunk / (chunks - 1)))
            )
            sgd.step()
    return total / count


@pytest.mark.parametrize("when", ["scoring", "learning"])
def test_a_signal_ends_test_time_training_behind_its_chunk(run, when: str) -> None:
    """Told while the second chunk is scored or trained on:
    no step has less than all its reductions."""
    r = scrambled(run())
    plan, reduced, scored = learning_plan(r), [], []
    learner, nats_of, all_reduce = record.Learner(r, plan), r.nats_of, r.rt.all_reduce
    third = len(plan.chunks[0][0]) + len(plan.chunks[1][0]) // 2

    def scoring(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scored.append(len(x))
        if when == "scoring" and len(scored) > third:
            r.rt.signum = 15
        return nats_of(x, y)

    def reducing(tensor: torch.Tensor, place: str) -> torch.Tensor:
        reduced.append(place)
        if when == "learning" and reduced.count("ttt") == 2:
            r.rt.signum = 15
        return all_reduce(tensor, place)

    r.nats_of, r.rt.all_reduce = scoring, reducing
    with pytest.raises(record.Halt) as halt:
        record.score_windows(r, plan, "ttt", learner)
    assert halt.value.args == (15,)
    steps = reduced.count("reduction") / len(r.optimizers.grads)
    chunks = 1 if when == "scoring" else 2
    assert (
        reduced.count("ttt") == chunks + 1
        and reduced[-1] == "ttt"
        and len(scored) < plan.num_batches()
    )
    assert steps == sum(len(trained) for _, trained in plan.chunks[:chunks])


def test_frozen_blocks_keep_their_vectors_and_banks_learn(run) -> None:
    r = scrambled(run(TTT_FREEZE_BLOCKS=2))
    before = {name: t.clone() for name, t in r.model.state_dict().items()}
    plan = learning_plan(r)
    record.score_windows(r, plan, "ttt", record.Learner(r, plan))
    changed = {name for name, t in r.model.state_dict().items() if not torch.equal(t, before[name])}
    assert not any(name.startswith(("blocks.0.", "blocks.1.")) for name in changed)
    assert {"blocks.2.resid_mix", "qo_bank", "mlp_down_bank", "tok_emb.weight"} <= changed


# --- whole runs -----------------------------------------------------------------------------------


def finished(corpus: Any, folder: Path, ranks: int = 0, **settings: object) -> Any:
    done = run_trainer(folder, ranks=ranks, script=SCRIPT, **{**corpus.env, **TINY, **settings})
    assert done.code == 0, done.err[-3000:]
    return done


@pytest.fixture(scope="module")
def whole(corpus: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finished(
        corpus,
        tmp_path_factory.mktemp("whole"),
        LATE_QAT=1,
        LATE_QAT_THRESHOLD=0.5,
        GRAD_CLIP_NORM=0,
        RUN_ID="whole",
        VAL_LOSS_EVERY=6,
    )


def test_the_log_has_every_line_of_the_specification(whole: Any) -> None:
    exact = r"val_loss:\d\.\d{8} val_bpb:\d\.\d{8} partial_val:1"
    patterns = [
        r"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=\S+",
        r"train_loader:dataset:data train_shards:3",
        r"val_loader:shards pattern=\S+ tokens:1024 partial_val:1",
        r"model_params:\d+",
        r"mtp_num_heads:0 mtp_loss_weight:0.2 mtp_params:0",
        r"XSA:last_2 active_layers:\[1, 2\]",
        r"world_size:1 grad_accum_steps:1",
        r"sdp_backends:.+",
        r"attention_mode:gqa num_heads:4 num_kv_heads:2.*",
        r"tie_embeddings:True embed_lr:0.035 head_lr:0.0 matrix_lr:0.025 scalar_lr:0.025",
        r"train_batch_tokens:1024 train_seq_len:32 iterations:12 warmup_steps:1 "
        r"max_wallclock_seconds:0\.000",
        r"seed:1337",
        r"train_io:prefetch:True .*",
        r"val_io:overlap:True .*",
        r"warmup_step:1/1",
        r"step:0/12 val_loss:5\.\d{4} val_bpb:.*",
        r"step:1/12 train_loss:\d\.\d{4} train_time:\d+ms .*",
        r"late_qat:enabled step:10 scale:0\.3333",
        r"step:12/12 val_loss:.*",
        r"timing_train_loop_ms:.*",
        r"input: .*",
        r"peak memory allocated: \d+ MiB reserved: \d+ MiB",
        r"ema:applying EMA weights",
        r"DIAGNOSTIC post_ema val_loss:\d\.\d{4} val_bpb:\d\.\d{4} eval_time:\d+ms partial_val:1",
        r"Serialized model: \d+ bytes",
        r"Code size: \d+ bytes",
        r"Serialized model int6\+lzma: \d+ bytes",
        r"Total submission size int6\+lzma: \d+ bytes",
        r"final_int6_roundtrip val_loss:\d\.\d{4} val_bpb:\d\.\d{4} eval_time:\d+ms partial_val:1",
        rf"final_int6_roundtrip_exact {exact}",
        r"final_int6_sliding_window val_loss:\d\.\d{4} val_bpb:\d\.\d{4} stride:16 "
        r"eval_time:\d+ms partial_val:1",
        rf"final_int6_sliding_window_exact {exact}",
        rf"final_int8_zlib_roundtrip_exact {exact}",
        r"ttt_sliding:start chunks=4 chunk_tokens=256 total_windows=64 stride=16 "
        r"ttt_lr=0.05 ttt_epochs=2 freeze_blocks=2",
        r"ttt_sliding:params unfrozen=\d+ frozen=520",
        r"  ttt_chunk \[1/4\] bpb=\d\.\d{6} time=\d+\.\ds eta:\d+s",
        r"  ttt_chunk \[4/4\] bpb=\d\.\d{6} time=\d+\.\ds eta:0s",
        r"ttt_sliding:done val_loss=\d\.\d{6} val_bpb=\d\.\d{6} elapsed=\d+\.\ds",
        r"legal_ttt val_loss:\d\.\d{4} val_bpb:\d\.\d{4} eval_time:\d+ms partial_val:1",
        rf"legal_ttt_exact {exact}",
    ]
    lines, position = whole.text.splitlines(), 0
    for pattern in patterns:  # in this order
        found = next(
            (i for i in range(position, len(lines)) if re.fullmatch(pattern, lines[i])), None
        )
        assert found is not None, f"no line {pattern} after line {position}"
        position = found + 1
    code, artifact = (
        len(SCRIPT.read_bytes()),
        (whole.folder / "final_model.int6.ptz").stat().st_size,
    )
    assert f"Total submission size int6+lzma: {code + artifact} bytes" in whole.text
    assert whole.log_path.read_text(encoding="utf-8").startswith(SCRIPT.read_text(encoding="utf-8"))


def scores(done: Any) -> list[tuple[str, ...]]:
    """What must be equal: losses, checksums, exact scores."""
    pattern = (
        r"^(?:step:\S+|\w+_exact) (?:train_loss|val_loss):\S+|data_crc:\w+|val_bpb:\S+|bpb=\S+"
    )
    return re.findall(pattern, done.text, re.MULTILINE)


def test_training_learns_and_the_last_number_of_ttt_is_the_score(whole: Any) -> None:
    losses = [float(x) for x in re.findall(r"train_loss:(\S+)", whole.text)]
    assert losses[-1] < losses[0] - 0.5
    last = re.search(r"ttt_chunk \[4/4\] bpb=(\S+)", whole.text).group(1)
    assert f"val_bpb={last}" in whole.text and float(last) == pytest.approx(
        float(re.search(r"legal_ttt_exact .*val_bpb:(\S+)", whole.text).group(1)), abs=1e-6
    )


OFF = {
    "TRAIN_PREFETCH": 0,
    "TRAIN_COPY_STREAM": 0,
    "VAL_PREFETCH": 0,
    "VAL_COPY_STREAM": 0,
    "GPU_PREFETCH": 1,
}


def test_overlap_on_and_off_and_both_mlp_forms_are_identical(
    corpus: Any, whole: Any, tmp_path: Path
) -> None:
    same = {"LATE_QAT": 1, "LATE_QAT_THRESHOLD": 0.5, "GRAD_CLIP_NORM": 0, "VAL_LOSS_EVERY": 6}
    off = finished(corpus, tmp_path, **same, **OFF, MLP_FUSED_FORM=0)
    assert len(scores(whole)) > 30 and scores(off) == scores(whole)


def test_two_ranks_train_and_score_as_one(corpus: Any, whole: Any, tmp_path: Path) -> None:
    """The chunk's eight sequences divide by two; what differs is the order of sums."""
    two = finished(
        corpus,
        tmp_path,
        ranks=2,
        LATE_QAT=1,
        LATE_QAT_THRESHOLD=0.5,
        GRAD_CLIP_NORM=0,
        VAL_LOSS_EVERY=6,
    )
    assert re.findall(r"data_crc:\w+", two.text) == re.findall(r"data_crc:\w+", whole.text)
    for word in ("train_loss:", "val_loss:", "bpb="):
        ours, theirs = (
            [float(x) for x in re.findall(rf"\b{word}(\d\S+)", done.text)] for done in (whole, two)
        )
        assert len(ours) == len(theirs) > 1 and ours == pytest.approx(theirs, abs=3e-3), word


@pytest.mark.slow
def test_unequal_ranks_do_not_hang(corpus: Any, tmp_path: Path) -> None:
    """One sequence a chunk for two ranks: one of them has nothing to train on,
    and takes every step all the same."""
    settings = {
        "ITERATIONS": 1,
        "WARMUP_STEPS": 0,
        "TTT_CHUNK_TOKENS": 32,
        "VAL_TOKENS": 257,
        "GRAD_CLIP_NORM": 0,
    }
    results = []
    for ranks in (0, 2):
        done = finished(corpus, tmp_path / str(ranks), ranks=ranks, **settings)
        results.append(float(re.search(r"legal_ttt_exact val_loss:(\S+)", done.text).group(1)))
    assert results[0] == pytest.approx(results[1], abs=1e-3)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_ends_the_run(corpus: Any, tmp_path: Path, ranks: int) -> None:
    done = run_trainer(
        tmp_path, ranks=ranks, script=SCRIPT, **{**corpus.env, **TINY, "SCALAR_LR": 1e18}
    )
    assert done.code == 1 and re.search(
        r"train_gpt.py: rank \d: step \d+: loss or gradient not finite: .+", done.err
    )
    assert "not finite" in done.text and not (tmp_path / "final_model.pt").exists()
    assert ranks or "Traceback" not in done.err


def test_a_signal_ends_the_run_with_one_line(corpus: Any, tmp_path: Path) -> None:
    """While it trains: its step is left out on all ranks, so nothing is exported."""
    env = clean_environment(**{**corpus.env, **TINY, "ITERATIONS": 100_000, "RUN_ID": "told"})
    with subprocess.Popen(
        [sys.executable, SCRIPT],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout:
            if line.startswith("step:10/"):
                process.send_signal(signal.SIGTERM)
        error = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert re.fullmatch(r"train_gpt.py: interrupted after step \d+\n", error)
    assert '"status": "interrupted"' in (tmp_path / "logs/told.jsonl").read_text()
    assert not (tmp_path / "final_model.pt").exists()


def test_wrong_settings_are_one_error(corpus: Any, tmp_path: Path) -> None:
    wrong = {
        "VE_LAYERS": ("9,10", "the last layer is 2"),
        "ROPE_DIMS": (32, "set an even number up to 16"),
        "BIGRAM_VOCAB_SIZE": (1, "set 0 or 2"),
        "EVAL_STRIDE": (12, "set a divisor"),
        "TTT_CHUNK_TOKENS": (100, "set a multiple"),
        "EMA_DECY": (1, "did you mean EMA_DECAY"),
        "EVAL_SEQ_LEN": (4096, "no row for each rank"),
    }
    settings = {**corpus.env, **TINY, **{name: value for name, (value, _) in wrong.items()}}
    done = run_trainer(tmp_path, script=SCRIPT, **settings)
    assert done.code == 2 and "Traceback" not in done.err and not (tmp_path / "logs").exists()
    for name, (value, words) in wrong.items():
        assert re.search(rf"^  {name}={value}: .*{words}", done.err, re.MULTILINE), name
    assert "VE_LAYERS=x: set layers" in record.Config.from_environment({"VE_LAYERS": "x"})[1][0]


# --- the folder -----------------------------------------------------------------------------------


def test_help_names_every_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    record.print_help()
    out, settings = capsys.readouterr().out, dataclasses.fields(record.Config)
    for field in settings:
        pattern = rf"^  {field.name.upper()}=(.*?)  \(\w+, (.+?)\) (.+)$"
        line = re.search(pattern, out, re.MULTILINE)
        assert line and line.group(1) == record.shown(field.default), field.name
    assert len(re.findall(r"^  [A-Z]\w+=", out, re.MULTILINE)) == len(settings)


def test_submission_says_what_is_there() -> None:
    submission = json.loads((FOLDER / "submission.json").read_text(encoding="utf-8"))
    assert submission["track"] == "track_non_record_16mb" and submission["date"] == FOLDER.name[:10]
    assert {
        "name",
        "author",
        "github_id",
        "val_loss",
        "val_bpb",
        "bytes_total",
        "bytes_code",
    } <= submission.keys()
    assert submission["bytes_code"] == len(SCRIPT.read_bytes())
    assert submission["bytes_total"] <= 16_000_000
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for item in itertools.chain(
        (f"{k}={v}" for k, v in PUBLISHED.items()), ("26,928,220", "10 shards", "80 shards")
    ):
        assert item in readme, item
