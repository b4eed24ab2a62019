"""The record LeakyReLU^2 + legal TTT + Parallel Muon: its numbers, its recipe end to end.

What the parts must be is written out here a second time, in plain loops and formulas.
"""

import ast
import dataclasses
import importlib.util
import io
import json
import lzma
import math
import operator
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Finished, clean_environment, free_port, run_trainer

FOLDER = ROOT / "records/track_non_record_16mb/2026-11-21_LeakyReLU2_LegalTTT_ParallelMuon_Pipeline"
SCRIPT = FOLDER / "train_gpt.py"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
FINEWEB_TARGETS = 62_021_632  # of FineWeb's validation split
# Small, but every part works; matrices of the MLP have 69,632 elements, so they are stored in six
# bits, and the last chunk of test-time training is shorter than the others.
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
    "VAL_TOKENS": 993,
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


def command(number: int) -> dict[str, str]:
    """The settings of a command that the README shows."""
    text = re.findall(r"(?ms)^```\n((?:\w+=\S+ ).*?)```", README)[number].replace("\\\n", "")
    return dict(word.split("=", 1) for word in shlex.split(text) if re.match(r"[A-Z_0-9]+=", word))


PUBLISHED, SMALL = command(0), command(1)


def config(**settings: object) -> "record.Config":
    values, faults = record.read_config({k: str(v) for k, v in settings.items()})
    assert not faults, faults
    return values


def tiny(**settings: object) -> "record.Config":
    return config(**{**TINY, **settings})


def runtime(rank: int = 0, world_size: int = 1, **settings: object) -> "record.Runtime":
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return record.Runtime(tiny(**settings), ranks)


def model_of(
    values: "record.Config", dtype: torch.dtype = torch.float32, noise: float = 0.0
) -> "record.GPT":
    """A model from the seed; with noise on all weights, as at the start many are zero."""
    torch.manual_seed(values.seed)
    model = record.GPT(values, dtype)
    with torch.no_grad():
        for p in model.parameters():
            p += noise * torch.randn_like(p)
    return model


def some_batch(values: "record.Config") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = 2, values.train_seq_len + 1
    ids = torch.randint(0, values.vocab_size, shape, generator=generator)
    return ids[:, :-1], ids[:, 1:]


@pytest.fixture
def trainer(corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a Trainer on the corpus, in this process, with settings and with noise on weights."""
    monkeypatch.chdir(tmp_path)

    def make(**settings: object) -> "record.Trainer":
        values = tiny(**corpus.env, **settings)
        made = record.Trainer(values, record.Runtime(values, {}), record.RunLog("run"))
        torch.manual_seed(11)
        for weights in made.optimizers.values:
            weights += 0.05 * torch.randn_like(weights)
        return made

    return make


# The published numbers.


@pytest.fixture(scope="module")
def full() -> "record.GPT":
    """The record's model at its own size; without weights, only shapes."""
    with torch.device("meta"):
        return record.GPT(config(**PUBLISHED), torch.bfloat16)


def test_parameters_and_dtypes_of_the_record(full: "record.GPT") -> None:
    sizes = {torch.float32: 0, torch.bfloat16: 0}
    for p in full.parameters():
        sizes[p.dtype] += p.numel()
    assert sizes == {torch.float32: 26_076_252, torch.bfloat16: 851_968}
    assert len(list(full.parameters())) == 4 + 55  # banks; what is reduced as a few vectors
    shapes = {name: tuple(t.shape) for name, t in full.state_dict().items()}
    assert shapes["qo_bank"] == (22, 512, 512) and shapes["kv_bank"] == (22, 256, 512)
    assert shapes["mlp_up_bank"] == (11, 1536, 512) and shapes["mlp_down_bank"] == (11, 512, 1536)
    assert shapes["bigram.embed.weight"] == (1536, 128)
    assert shapes["ve_shared.proj.weight"] == (256, 128)
    assert [i for i, block in enumerate(full.blocks) if block.attn.xsa] == [7, 8, 9, 10]
    assert "26,928,220" in README and sum(sizes.values()) == 26_928_220
    rows = record.Config().bigram_vocab_size - full.config.bigram_vocab_size
    more = rows * full.config.bigram_dim
    assert (
        f"default of {record.Config().bigram_vocab_size} there are {26_928_220 + more:,}" in README
    )


def test_what_the_readme_points_at_is_there() -> None:
    table = README.split("| to find |")[1].split("##")[0]
    names = re.findall(r"`([\w.]+)`", table)
    assert len(names) > 10 and all(operator.attrgetter(name)(record) for name in names)


def test_the_artifact_has_the_published_order_of_tensors(full: "record.GPT") -> None:
    """Of equal tensors, this order made the published size: with another it is about 1 kB more."""
    layers, expected = range(11), ["skip_weights"]
    for parts in (("attn.c_q", "attn.proj"), ("attn.c_k", "attn.c_v"), ("mlp.fc",), ("mlp.proj",)):
        expected += [f"blocks.{i}.{part}.weight" for i in layers for part in parts]
    expected += ["tok_emb.weight", "bigram.scale", "bigram.embed.weight", "bigram.proj.weight"]
    expected += ["smear.gate"]
    small = "attn_scale", "mlp_scale", "resid_mix", "attn.q_gain"
    expected += [f"blocks.{i}.{name}" for i in layers for name in small]
    expected += ["ve_shared.scale", "ve_shared.embed.weight", "ve_shared.proj.weight"]
    expected += ["ve_layer_scales.0", "ve_layer_scales.1"]
    unbanked = record.unbanked(full.state_dict())
    assert list(unbanked) == expected
    assert unbanked["blocks.3.attn.c_v.weight"].shape == (256, 512)


def test_export_classes_of_the_record(full: "record.GPT", monkeypatch: pytest.MonkeyPatch) -> None:
    """How many tensors, and elements, go into six bits, eight bits, float16."""
    found = {"int6": [0, 0], "int8": [0, 0], "passthrough": [0, 0]}

    def counting(kind: str) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        def quantize(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found[kind][0] += 1
            found[kind][1] += t.numel()
            return torch.zeros(1, dtype=torch.int8), torch.zeros(1)

        return quantize

    monkeypatch.setattr(record, "quantize_int6", counting("int6"))
    monkeypatch.setattr(record, "quantize", counting("int8"))
    state = {name: torch.zeros(t.shape) for name, t in full.state_dict().items()}
    raw = lzma.decompress(record.pack(state, config(**PUBLISHED)))
    file = torch.load(io.BytesIO(raw), weights_only=True)
    for name, how in file["m"].items():
        if how == "passthrough":
            found["passthrough"][0] += 1
            found["passthrough"][1] += file["w"][name].numel()
            assert file["w"][name].dtype == torch.float16
    assert found == {
        "int6": [66, 25_952_256],
        "int8": [3, 851_968],
        "passthrough": [52, 123_996],
    }


def test_windows_and_chunks_of_the_record() -> None:
    values = config(**PUBLISHED)
    sliding = record.WindowPlan(values, runtime(), FINEWEB_TARGETS, 64)
    assert len(sliding.windows) == 969_088 == sum(map(len, sliding.in_order))
    assert sum(map(sliding.num_counted, sliding.in_order)) == FINEWEB_TARGETS + 1984
    plan = record.WindowPlan(values, runtime(), FINEWEB_TARGETS, 64, 32_768)
    windows = [sum(map(len, chunk.scored)) for chunk in plan.chunks]
    assert len(windows) == 1893 and sum(windows) == 969_088
    assert (windows[0], set(windows[1:-1]), windows[-1]) == (481, {512}, 415)
    assert {len(chunk.trained) for chunk in plan.chunks[:-1]} == {3}
    assert plan.chunks[-1].trained == []
    assert {len(rows) for rows, _ in plan.chunks[5].trained} == {16}
    eighth = record.WindowPlan(values, runtime(3, 8), FINEWEB_TARGETS, 64, 32_768)
    assert [(len(rows), share) for rows, share in eighth.chunks[5].trained] == [(2, 1 / 8)] * 3


def test_the_published_command_is_that_of_the_readme_and_accepted() -> None:
    """With the two settings that did nothing in the published script, and here do, off."""
    published = """
        NUM_LAYERS=11 BIGRAM_VOCAB_SIZE=1536 XSA_LAST_N=4 EMA_ENABLED=1 EMA_DECAY=0.997
        SWA_EVERY=50 ROPE_DIMS=16 LN_SCALE=1 LATE_QAT_THRESHOLD=0.15 VE_ENABLED=1 VE_DIM=128
        VE_LAYERS=9,10 TTT_ENABLED=1 TTT_LR=0.002 TTT_EPOCHS=3 TTT_CHUNK_TOKENS=32768
        TTT_FREEZE_BLOCKS=0 TTT_MOMENTUM=0.9 TTT_BATCH_SEQS=32 TTT_GRAD_CLIP=1.0 MUON_WD=0.04
        ADAM_WD=0.04 MATRIX_LR=0.025 SCALAR_LR=0.025 TIED_EMBED_LR=0.035 MUON_MOMENTUM=0.99
        MUON_MOMENTUM_WARMUP_START=0.92 MUON_MOMENTUM_WARMUP_STEPS=1500 WARMDOWN_ITERS=3500
        ITERATIONS=9000 MAX_WALLCLOCK_SECONDS=600 EVAL_STRIDE=64 SEED=1337
        SWA_ENABLED=0 LATE_QAT=0
    """
    paths = {"DATA_PATH", "TOKENIZER_PATH"}
    shown = {f"{name}={value}" for name, value in PUBLISHED.items() if name not in paths}
    assert shown == set(published.split())
    done = subprocess.run(
        [sys.executable, SCRIPT, "--print-config"],
        capture_output=True,
        text=True,
        env=clean_environment(**PUBLISHED, MUON_BETA2=0.95, MTP_NUM_HEADS=0),
    )
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["ve_layers"] == "9,10" and values["bigram_vocab_size"] == 1536
    assert values["late_qat"] is values["swa_enabled"] is False and values["ema_enabled"] is True


def published_rate(values: "record.Config", step: int, elapsed_ms: float) -> float:
    """The published schedule, from the time that had passed when the step began."""
    left_ms = max(1e3 * values.max_wallclock_seconds - elapsed_ms, 0.0)
    warmdown_ms = values.warmdown_iters * elapsed_ms / max(step, 1)
    return left_ms / max(warmdown_ms, 1e-9) if left_ms <= warmdown_ms else 1.0


@pytest.mark.slow
@pytest.mark.parametrize("step_ms", [650.0, 83.5, 20_000.0])
def test_a_capped_run_has_the_published_rates_from_its_first_step(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, step_ms: float
) -> None:
    """At 650 ms a step the warm-down is longer than the cap: step 1 has 0.26 of the rate."""
    run = trainer(MAX_WALLCLOCK_SECONDS=600, WARMDOWN_ITERS=3500, ITERATIONS=24, TTT_ENABLED=0)
    rates = []
    monkeypatch.setattr(record.Clock, "now_ms", lambda clock: step_ms * run.step)
    step_of = run.optimizers.step

    def noting(lr_scale: float, momentum: float) -> None:
        rates.append(lr_scale)
        step_of(lr_scale, momentum)

    monkeypatch.setattr(run.optimizers, "step", noting)
    run.train()
    del rates[:1]  # the priming step
    expected = [published_rate(run.config, n, step_ms * n) for n in range(24)]
    assert rates == pytest.approx(expected, rel=1e-6)
    if step_ms == 650:
        assert rates[0] == 1 and rates[1] == pytest.approx(0.2635, abs=1e-4)


def test_learning_rate_and_momentum_by_steps() -> None:
    steps = config(MAX_WALLCLOCK_SECONDS=0, WARMDOWN_ITERS=10, ITERATIONS=100)
    rates = [record.lr_multiplier(steps, step, 0.0) for step in (0, 89, 95, 100)]
    assert rates == [1.0, 1.0, 0.5, 0.0]
    momenta = [record.muon_momentum(config(**PUBLISHED), step) for step in (0, 750, 1500, 9000)]
    assert momenta == pytest.approx([0.92, 0.955, 0.99, 0.99])


# The model.


OPTIONAL = {"GATED_ATTENTION": 1, "VALUE_RESIDUAL": 1, "DTG_ENABLED": 1}
PLAIN = {"LN_SCALE": 0, "BIGRAM_VOCAB_SIZE": 0, "VE_ENABLED": 0, "XSA_LAST_N": 0}
PLAIN |= {"ROPE_DIMS": 0, "TIE_EMBEDDINGS": 0}


@pytest.mark.parametrize("settings", [{}, OPTIONAL, PLAIN])
def test_no_score_depends_on_what_comes_later(settings: dict[str, int]) -> None:
    values = tiny(**settings)
    model, (x, y) = model_of(values, noise=0.1), some_batch(values)
    other = x.clone()
    other[:, 20:] = (other[:, 20:] + 7) % 300
    with torch.no_grad():
        one, two = model.nats(x, y), model.nats(other, y)
    assert torch.equal(one[:, :20], two[:, :20]) and not torch.equal(one[:, 20:], two[:, 20:])


@pytest.mark.parametrize("settings", [{}, OPTIONAL, PLAIN])
def test_every_parameter_learns_and_the_first_loss_is_a_guess(settings: dict[str, int]) -> None:
    values = tiny(**settings)
    loss = model_of(values)(*some_batch(values))
    assert loss.item() == pytest.approx(math.log(300), abs=0.02)
    model = model_of(values, noise=0.1)
    model(*some_batch(values)).backward()
    assert [name for name, p in model.named_parameters() if not p.grad.any()] == []


def test_initial_values_are_those_of_bfloat16() -> None:
    model = model_of(tiny(**OPTIONAL), torch.bfloat16)
    assert model.bigram.scale.item() == pytest.approx(0.050048828, abs=1e-9)
    assert model.ve_shared.scale.item() == pytest.approx(0.10009766, abs=1e-8)
    assert torch.equal(model.smear["gate"].sigmoid(), torch.full((64,), 0.5))
    up = model.mlp_up_bank[1].float()
    assert torch.allclose(up.T @ up, torch.eye(64), atol=0.02)
    assert not model.qo_bank[3:].any() and not model.mlp_down_bank.any()
    assert not model.bigram.embed.weight.any() and model.bigram.proj.weight.any()
    assert model.blocks[0].attn.attn_gate.bias.mean().item() == 4.0
    assert model.blocks[0].dtg_gate.bias.item() == 2.0


def test_xsa_leaves_nothing_along_the_own_value() -> None:
    torch.manual_seed(0)
    y, v = torch.randn(2, 5, 8, 16), torch.randn(2, 5, 4, 16)
    rest = record.without_own_value(y, v)
    for head in range(8):  # query head j belongs to KV head j // 2
        own, part = v[:, :, head // 2], y[:, :, head]
        unit = own / own.norm(dim=-1, keepdim=True)
        expected = part - (part * unit).sum(-1, keepdim=True) * unit
        assert torch.allclose(rest[:, :, head], expected, atol=1e-5)


def test_rotary_base_stretches_beyond_1024_and_turns_the_first_channels() -> None:
    model = model_of(tiny(ROPE_DIMS=16, MODEL_DIM=128))
    for length, base in ((1024, 10_000.0), (2048, 22_081.8)):
        cos, sin = model.rotary(length, torch.device("cpu"))
        angle = 7 * base ** (-2 * torch.arange(8) / 16)
        assert cos.shape == (length, 1, 8)
        assert torch.allclose(cos[7, 0], angle.cos(), atol=1e-4)
        assert torch.allclose(sin[7, 0], angle.sin(), atol=1e-4)
    q = torch.randn(1, 4, 2, 32)
    turned = model.blocks[0].attn.rotated(q, model.rotary(4, q.device))
    normed = record.rms_norm(q)
    assert torch.equal(turned[..., 16:], normed[..., 16:])
    assert torch.equal(turned[:, 0], normed[:, 0])
    assert not torch.isclose(turned[:, 1:, :, :16], normed[:, 1:, :, :16]).all(-1).any()


def test_bigrams_hash_both_tokens() -> None:
    ids = torch.tensor([[5, 9, 5, 9], [1023, 0, 1023, 7]])
    expected = [[1535], [1535]]
    for row, tokens in zip(expected, ids.tolist(), strict=True):
        row += [(36313 * now ^ 27191 * before) % 1535 for before, now in pairwise(tokens)]
    assert record.bigram_ids(ids, 1536).tolist() == expected


def test_the_negative_side_keeps_a_quarter_of_the_square() -> None:
    """And both forms of the square are one value in bfloat16."""
    values = tiny(NUM_LAYERS=1, VE_ENABLED=0, XSA_LAST_N=0)
    up, down, zero = torch.zeros(2, 64), torch.zeros(64, 2), torch.zeros(64, 64)
    up[0, 0], up[1, 0], down[3, 0], down[4, 1] = 1.0, -1.0, 1.0, 1.0
    matrices = record.Matrices(zero, zero[:32], zero[:32], zero, up, down)
    x = torch.zeros(1, 1, 64)
    x[..., 0] = 8.0  # rms norm of one channel out of 64: 8
    rotary = model_of(values).rotary(1, x.device)
    out, _ = record.Block(values, 0)(x, x, matrices, rotary, 0, None)
    assert out[0, 0, 3:5].tolist() == pytest.approx([64, 16], rel=1e-4)
    forms = []
    for form in (0, 1):
        model = model_of(tiny(MLP_FUSED_FORM=form), torch.bfloat16, noise=0.1)
        forms.append(model.nats(*some_batch(values)))
    assert torch.equal(*forms)


def test_late_qat_reaches_the_weights_that_are_exported_and_only_while_learning() -> None:
    values = tiny(LATE_QAT=1)
    model, batch = model_of(values, noise=0.3), some_batch(values)
    plain, rounded = model(*batch).item(), model_of(values, noise=0.3)
    with torch.no_grad():
        for bank in rounded.banks():
            scale = (bank.abs().amax(-1, keepdim=True) / 31).clamp(min=1 / 31).half().float()
            bank.copy_((bank / scale).round() * scale)
    model.qat.fill_(1.0)
    loss = model(*batch)
    assert loss.item() == pytest.approx(rounded(*batch).item(), abs=1e-6)
    assert abs(loss.item() - plain) > 1e-4
    with torch.no_grad():
        assert model(*batch).item() == pytest.approx(plain, abs=1e-6)
    loss.backward()
    assert all(bank.grad.any() for bank in model.banks())
    assert model_of(tiny()).qat is None


@pytest.mark.slow
def test_the_model_is_one_graph_and_switching_qat_on_compiles_nothing() -> None:
    values = tiny(LATE_QAT=1, **OPTIONAL)
    model, batch = model_of(values, torch.bfloat16, noise=0.1), some_batch(values)
    loss_of = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager")
    stats = torch._dynamo.utils.counters["stats"]
    first, graphs = loss_of(*batch), stats["unique_graphs"]
    first.backward()
    model.qat.fill_(1.0)
    second = loss_of(*batch)
    assert stats["unique_graphs"] == graphs and second.item() != first.item()
    assert second.item() == pytest.approx(model(*batch).item(), rel=1e-5)


# The optimizers.


@pytest.mark.parametrize(
    ("tied", "groups"),
    [
        (1, [(0.035, 0.04), (0.025, 0.04)]),
        (0, [(0.6, 0.04), (0.025, 0.04), (0.008, 0.0)]),
    ],
)
def test_every_parameter_is_in_one_group(tied: int, groups: list[tuple[float, float]]) -> None:
    values = tiny(TIE_EMBEDDINGS=tied)
    model = model_of(values)
    optimizers = record.Optimizers(model, values, runtime())
    found = [(group["base_lr"], group["weight_decay"]) for group in optimizers.adam.param_groups]
    assert found == groups
    banks = [model.mlp_up_bank, model.mlp_down_bank, model.qo_bank, model.kv_bank]
    assert all(a.bank is b for a, b in zip(optimizers.muon.shards, banks, strict=True))
    trained = sum(weights.numel() for weights in optimizers.values)
    assert trained == sum(p.numel() for p in model.parameters())
    tables = optimizers.adam.param_groups[0]["params"][0].numel()
    assert tables == 300 * 64 + 64 * 16 + 300 * 16


def test_a_muon_step_is_the_formula() -> None:
    torch.manual_seed(1)
    bank = torch.nn.Parameter(torch.randn(3, 12, 4))
    muon = record.ParallelMuon([bank], tiny(MUON_WD=0.5), runtime())
    expected, average = bank.detach().clone(), torch.zeros(3, 12, 4)
    for _ in range(2):
        bank.grad.copy_(torch.randn(3, 12, 4))
        average = 0.9 * average + bank.grad
        update = record.newton_schulz(bank.grad + 0.9 * average, 5)
        expected = expected * (1 - 0.05 * 0.5) - 0.05 * 3**0.5 * update
        muon.begin()
        with torch.no_grad():
            muon.step(0.05, 0.9)
        assert torch.allclose(bank, expected, atol=1e-5)
    singular = torch.linalg.svdvals(record.newton_schulz(torch.randn(3, 96, 32), 5))
    assert singular.min() > 0.6 and singular.max() < 1.25


STEPS = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
import train_gpt as record
config, faults = record.read_config(os.environ)
runtime = record.Runtime(config, os.environ)
runtime.start(os.environ)
torch.manual_seed(3)
model = record.GPT(config, torch.float32)
optimizers = record.Optimizers(model, config, runtime)
for step in range(3):
    generator = torch.Generator().manual_seed(step)
    for gradients in optimizers.grads:
        draws = torch.randn(12, *gradients.shape, generator=generator)
        gradients.copy_(draws[runtime.rank :: runtime.world_size].sum(0) / 12)
    optimizers.reduce_tables()
    runtime.all_reduce(optimizers.small.gradients)
    optimizers.step(0.7, 0.9)
torch.save(model.state_dict(), f"{sys.argv[2]}/{runtime.world_size}_{runtime.rank}.pt")
"""


@pytest.mark.slow
def test_two_and_four_ranks_step_as_one(tmp_path: Path) -> None:
    """Three layers: two and four ranks pad the banks of three, and the last rank of four has
    only padding of them."""
    (tmp_path / "job.py").write_text(STEPS)
    states = {}
    for ranks in (1, 2, 4):
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--nnodes=1"]
        launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
        done = subprocess.run(
            [sys.executable, *launcher, str(tmp_path / "job.py"), str(FOLDER), str(tmp_path)],
            env=clean_environment(**{**TINY, "MODEL_DIM": 32}),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        states[ranks] = [torch.load(tmp_path / f"{ranks}_{rank}.pt") for rank in range(ranks)]
    one = states[1][0]
    for ranks in (2, 4):
        for name, expected in one.items():
            assert torch.allclose(states[ranks][0][name], expected, atol=2e-5), (ranks, name)
            for other in states[ranks][1:]:
                assert torch.equal(states[ranks][0][name], other[name]), (ranks, name)


def test_collectives_run_under_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scatters under AdamW; a gather is awaited behind the next bank's Newton-Schulz."""
    values, seen = tiny(), []
    optimizers = record.Optimizers(model_of(values), values, runtime())

    def noting(name: str) -> None:
        call = getattr(record.BankShard, name)

        def noted(shard: Any, *arguments: float) -> None:
            seen.append(f"{name}{optimizers.muon.shards.index(shard)}")
            call(shard, *arguments)

        monkeypatch.setattr(record.BankShard, name, noted)

    for name in ("scatter", "orthogonalize", "apply"):
        noting(name)
    adam_step = optimizers.adam.step
    monkeypatch.setattr(optimizers.adam, "step", lambda: seen.append("adam") or adam_step())
    optimizers.step(1.0, 0.9)
    expected = "scatter0 scatter1 scatter2 scatter3 adam orthogonalize0 orthogonalize1 apply0 "
    expected += "orthogonalize2 apply1 orthogonalize3 apply2 apply3"
    assert seen == expected.split()


@pytest.mark.parametrize("ranks", [1, 4])
def test_clipping_limits_each_ranks_own_gradient(ranks: int) -> None:
    """To a part of the limit, as the gradient is that of a part of the loss."""
    values = tiny(GRAD_CLIP_NORM=0.3)
    optimizers = record.Optimizers(model_of(values), values, runtime(0, ranks))

    def norm() -> float:
        return math.sqrt(sum(grad.double().square().sum().item() for grad in optimizers.grads))

    for gradients in optimizers.grads:
        gradients.normal_()
    before = optimizers.grads[0] / norm()
    optimizers.clip()
    assert norm() == pytest.approx(0.3 / ranks, rel=1e-3)
    assert torch.allclose(optimizers.grads[0] / norm(), before, atol=1e-6)
    short = [gradients.mul_(0.5).clone() for gradients in optimizers.grads]
    optimizers.clip()
    assert all(torch.equal(a, b) for a, b in zip(optimizers.grads, short, strict=True))


def ema_of(weights: list[torch.Tensor]) -> torch.Tensor:
    mean = weights[0]
    for weight in weights[1:]:
        mean = 0.8 * mean + 0.2 * weight
    return mean


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({}, "ema:applying EMA weights", ema_of),
        ({"EMA_ENABLED": 0}, "", lambda w: w[6]),
        (
            {"EMA_ENABLED": 0, "SWA_ENABLED": 1, "SWA_EVERY": 2},
            "swa:applying SWA weights n=2",
            lambda w: (w[4] + w[6]) / 2,
        ),
        (
            {"SWA_ENABLED": 1, "SWA_EVERY": 2},
            "swa:applying SWA weights n=2",
            lambda w: (ema_of(w[:5]) + ema_of(w)) / 2,
        ),
        (
            {"LAWA_ENABLED": 1, "LAWA_K": 2, "LAWA_FREQ": 2},
            "lawa:applying LAWA averaging k=2",
            lambda w: (w[4] + w[6]) / 2,
        ),
        ({"LAWA_ENABLED": 1, "LAWA_FREQ": 4, "EMA_ENABLED": 0}, "", lambda w: w[6]),
    ],
)
def test_averages_do_what_their_settings_say(
    settings: dict, text: str, expected: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps; the learning rate's factor is below 0.2 from step 4 on."""
    monkeypatch.chdir(tmp_path)
    weights = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(7)]
    values, log = [weights[0].clone()], record.RunLog("averages")
    averages = record.Averages(tiny(**settings), values, log)
    for step in range(1, 7):
        values[0].copy_(weights[step])
        averages.update(step, 0.5 if step < 4 else 0.1)
    assert averages.apply() == text
    assert torch.allclose(values[0], expected(weights), atol=1e-6)
    started = log.path.read_text() if log.path.exists() else ""
    assert started == ("swa:start step:4\n" if "SWA_ENABLED" in settings else "")


# The artifact.


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
    error = (t - q.float() * scale.float()[:, None]).square().mean().item()
    assert error == pytest.approx(min(errors), rel=1e-6)
    codes, floor = record.quantize_int6(0.003 * torch.randn(4, 300))
    assert not codes.any() and torch.equal(floor, torch.full((4,), 1 / 31).half())


def test_artifact_round_trip_is_strict() -> None:
    model = model_of(tiny(), noise=0.5)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    back = record.unpack(record.pack(state, tiny()), state)
    model.load_state_dict(back, strict=True)
    for name, t in state.items():
        expected = t.half().float()
        if name.startswith("mlp"):  # 69,632 elements a layer; the others are stored in float16
            coded = [record.quantize_int6(matrix) for matrix in t]
            expected = torch.stack([q.float() * scale.float()[:, None] for q, scale in coded])
        assert torch.equal(back[name], expected), name


@pytest.mark.parametrize("change", ["cut", "noise", "bomb", "missing", "shape"])
def test_damaged_artifacts_are_one_line(change: str) -> None:
    state = model_of(tiny()).state_dict()
    whole = record.pack(state, tiny())
    file = torch.load(io.BytesIO(lzma.decompress(whole)), weights_only=True)
    if change == "missing":
        del file["w"]["smear.gate"]
    file["w"]["smear.gate" if change == "shape" else "other"] = torch.zeros(63)
    torch.save(file, buffer := io.BytesIO())
    data = lzma.compress(buffer.getvalue(), preset=0)
    data = {"cut": whole[:-200], "noise": b"noise" * 99}.get(change, data)
    if change == "bomb":
        data = lzma.compress(bytes(64 << 20), preset=0)
    with pytest.raises(record.RunError, match="no artifact of this model: .+") as error:
        record.unpack(data, state)
    assert "\n" not in str(error.value)


def test_over_the_cap_is_an_error_at_the_end(trainer: Callable[..., Any]) -> None:
    """After the score, which is printed all the same; to the byte."""
    run = trainer(TTT_ENABLED=0, EVAL_STRIDE=0)
    data, problems = run.export(0)
    assert not any(problems)
    assert not any(run.export(16_000_000 - len(data))[1])
    problem = run.export_and_score(16_000_000)
    assert re.fullmatch(r"artifact \d+ \+ code 16000000 = \d+ bytes, \d+ over the cap .+", problem)
    assert "final_int6_roundtrip_exact val_loss:" in Path("logs/run.txt").read_text()


# Windows and test-time training.


def counted_targets(plan: "record.WindowPlan", rows: range) -> list[int]:
    """Of a batch, by the plan."""
    found = []
    for row in rows:
        first, end = plan.counted(row, rows.step)
        found += range(row * plan.stride + first, row * plan.stride + end)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("targets", [1024, 992, 256])
def test_a_chunk_trains_on_just_the_targets_it_has_scored(world_size: int, targets: int) -> None:
    """With eight ranks a chunk of five sequences leaves some without any: they take part."""
    ranks = [runtime(rank, world_size) for rank in range(world_size)]
    plans = [record.WindowPlan(tiny(TTT_EPOCHS=1), rank, targets, 16, 160) for rank in ranks]
    chunks = len(plans[0].chunks)
    for number in range(chunks):
        scored, trained = [], []
        for plan in plans:
            for rows in plan.chunks[number].scored:
                scored += counted_targets(plan, rows)
            for rows, _ in plan.chunks[number].trained:
                trained += counted_targets(plan, rows)
        begin = 160 * number
        assert {len(plan.chunks[number].trained) for plan in plans} == {number + 1 < chunks}
        if number + 1 < chunks:
            assert sorted(scored) == sorted(trained) == list(range(begin, begin + 160))
            shares = [plan.chunks[number].trained[0][1] for plan in plans]
            assert sum(shares) == pytest.approx(1)
        else:
            assert trained == [] and set(scored) == set(range(begin, targets))


def validation_tokens(run: "record.Trainer") -> torch.Tensor:
    paths = run.validation.shards.paths
    tokens = np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths])
    return torch.from_numpy(tokens.astype(np.int64))


def plain_ttt(run: "record.Trainer", chunk_tokens: int) -> tuple[float, float]:
    """Score-first training, written out on one rank: (mean nats, bits a byte)."""
    values, tokens, table = run.config, validation_tokens(run), run.validation.byte_table
    seq_len, stride, targets = 32, 16, run.validation.tokens
    sgd = torch.optim.SGD(run.model.parameters(), lr=1.0, momentum=values.ttt_momentum)
    total, count, size, chunks = 0.0, 0, 0, math.ceil(targets / chunk_tokens)
    windows = {}  # by chunk: (start, first counted, end)
    for start in range(0, targets, stride):
        end = min(start + seq_len, targets)
        first = max(end - stride, start) if start else 0
        windows.setdefault(first // chunk_tokens, []).append((start, first, end))
    for chunk in range(chunks):
        for start, first, end in windows[chunk]:
            with torch.no_grad():
                nats = run.model.nats(tokens[None, start:end], tokens[None, start + 1 : end + 1])
            total, count = total + nats[0, first - start :].double().sum().item(), count + end
            count -= first
            size += int(table.count(tokens[first:end].numpy(), tokens[first + 1 : end + 1].numpy()))
        for _ in range(values.ttt_epochs if chunk + 1 < chunks else 0):
            run.optimizers.zero_grad()
            begin = chunk * chunk_tokens
            x, y = (tokens[begin + i : begin + i + chunk_tokens].view(-1, seq_len) for i in (0, 1))
            run.model(x, y).backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), values.ttt_grad_clip)
            cosine = math.cos(math.pi * chunk / (chunks - 1))
            sgd.param_groups[0]["lr"] = values.ttt_lr * 0.5 * (1 + cosine)
            sgd.step()
    return total / count, total / math.log(2) / size


def learning(run: "record.Trainer") -> tuple["record.WindowPlan", "record.Learner"]:
    plan = record.WindowPlan(run.config, run.runtime, run.validation.tokens, 16, 256)
    return plan, record.Learner(run, plan)


def test_sliding_windows_and_learning_nothing_score_what_a_plain_loop_scores(
    trainer: Callable[..., Any],
) -> None:
    run = trainer(TTT_LR=0)
    whole = record.WindowPlan(run.config, run.runtime, run.validation.tokens, 16)
    sliding = record.score_and_learn(run, whole)[:2]
    assert sliding == pytest.approx(plain_ttt(run, run.validation.tokens), rel=1e-6)
    learned = record.score_and_learn(run, *learning(run))[:2]
    assert learned == pytest.approx(sliding, rel=1e-9)


def test_no_target_is_trained_on_before_it_is_scored(trainer: Callable[..., Any]) -> None:
    """What the model computes, in order: every target of a pass that learns has a recorded score,
    and the scores are those of a loop that scores a chunk first.
    With the order swapped both fail."""
    run = trainer(TTT_FREEZE_BLOCKS=0)
    plan, learner = learning(run)
    batches, scored, nats_of, loss_of = iter(plan.in_order), set(), run.nats, run.loss

    def scoring(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scored.update(counted_targets(plan, next(batches)))
        assert not torch.is_grad_enabled()
        return nats_of(x, y)

    def learns(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        targets = counted_targets(plan, next(batches))
        assert len(targets) == (y >= 0).sum() and set(targets) <= scored
        return loss_of(x, y)

    before = run.optimizers.snapshot()
    run.nats, run.loss = scoring, learns
    found = record.score_and_learn(run, plan, learner)[:2]
    assert next(batches, None) is None and len(scored) == run.validation.tokens
    assert not torch.equal(before[0], run.optimizers.values[0])
    run.optimizers.restore(before)
    assert found == pytest.approx(plain_ttt(run, 256), rel=1e-6)


@pytest.mark.parametrize("when", ["scoring", "learning"])
def test_a_signal_ends_test_time_training_behind_its_chunk(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Told while the second chunk is scored or trained on: every step has all its reductions."""
    run = trainer()
    plan, learner = learning(run)
    steps, nats_of, step_of, told = [], run.nats, learner.step, iter(range(99))

    def scoring(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if when == "scoring" and next(told) == len(plan.chunks[0].scored):
            run.runtime.signum = 15
        return nats_of(x, y)

    def stepping(*arguments: Any) -> None:
        steps.append(arguments)
        if when == "learning" and len(steps) == len(plan.chunks[0].trained) + 1:
            run.runtime.signum = 15
        step_of(*arguments)

    run.nats = scoring
    monkeypatch.setattr(learner, "step", stepping)
    with pytest.raises(record.HaltError) as halt:
        record.score_and_learn(run, plan, learner)
    assert halt.value.args == (15,)
    chunks = 1 if when == "scoring" else 2
    assert len(steps) == sum(len(chunk.trained) for chunk in plan.chunks[:chunks])


def test_frozen_blocks_keep_their_vectors_and_banks_learn(trainer: Callable[..., Any]) -> None:
    run = trainer(TTT_FREEZE_BLOCKS=2)
    before = {name: t.clone() for name, t in run.model.state_dict().items()}
    record.score_and_learn(run, *learning(run))
    after = run.model.state_dict()
    changed = {name for name, t in after.items() if not torch.equal(t, before[name])}
    assert not any(name.startswith(("blocks.0.", "blocks.1.")) for name in changed)
    assert {"blocks.2.resid_mix", "qo_bank", "mlp_down_bank", "tok_emb.weight"} <= changed


# Whole runs.


# Ranks clip their own gradients, so without it training is the same for any number of ranks.
WHOLE = {"LATE_QAT": 1, "LATE_QAT_THRESHOLD": 0.5, "GRAD_CLIP_NORM": 0, "VAL_LOSS_EVERY": 6}
WHOLE |= {"TTT_GRAD_CLIP": 0, "TTT_LR": 0.01}
OFF = {"TRAIN_PREFETCH": 0, "TRAIN_COPY_STREAM": 0, "VAL_PREFETCH": 0, "VAL_COPY_STREAM": 0}


def finished(corpus: Any, folder: Path, ranks: int = 0, **settings: object) -> Finished:
    settings = {**corpus.env, **TINY, **settings}
    done = run_trainer(folder, ranks=ranks, script=SCRIPT, **settings)
    assert done.code == 0, done.err[-3000:]
    return done


@pytest.fixture(scope="module")
def whole(corpus: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    return finished(corpus, tmp_path_factory.mktemp("whole"), **WHOLE)


def scores(done: Finished) -> list[tuple[str, str]]:
    """What must be equal: losses, checksums, scores."""
    names = "train_loss|val_loss|val_bpb|bpb|data_crc|scale"
    return re.findall(rf"\b({names})[:=](?!enabled)(\S+)", done.text)


def test_the_log_has_every_line_of_the_specification(whole: Finished) -> None:
    exact = r"val_loss:\d\.\d{8} val_bpb:\d\.\d{8} partial_val:1"
    timed = r"val_loss:\d\.\d{4} val_bpb:\d\.\d{4} eval_time:\d+ms partial_val:1"
    patterns = [
        r"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=\S+",
        r"train_loader:dataset:data train_shards:3",
        r"val_loader:shards pattern=\S+ tokens:992 partial_val:1",
        r"model_params:\d+",
        r"XSA:last_2 active_layers:\[1, 2\]",
        r"world_size:1 grad_accum_steps:1",
        r"sdp_backends:.+",
        r"attention_mode:gqa num_heads:4 num_kv_heads:2",
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
        r"input cost .*",
        r"peak memory allocated: \d+ MiB reserved: \d+ MiB",
        r"ema:applying EMA weights",
        rf"DIAGNOSTIC post_ema {timed}",
        r"Serialized model: \d+ bytes",
        r"Code size: \d+ bytes",
        r"Serialized model int6\+lzma: \d+ bytes",
        r"Total submission size int6\+lzma: \d+ bytes",
        rf"final_int6_roundtrip {timed}",
        rf"final_int6_roundtrip_exact {exact}",
        r"final_int6_sliding_window val_loss:\d\.\d{4} val_bpb:\d\.\d{4} stride:16 "
        r"eval_time:\d+ms partial_val:1",
        rf"final_int6_sliding_window_exact {exact}",
        rf"final_int8_zlib_roundtrip_exact {exact}",
        r"ttt_sliding:start chunks=4 chunk_tokens=256 total_windows=62 stride=16 "
        r"ttt_lr=0.01 ttt_epochs=2 freeze_blocks=2",
        r"ttt_sliding:params unfrozen=\d+ frozen=520",
        r"  ttt_chunk \[1/4\] bpb=\d\.\d{6} time=\d+\.\ds eta:\d+s",
        r"  ttt_chunk \[4/4\] bpb=\d\.\d{6} time=\d+\.\ds eta:0s",
        r"ttt_sliding:done val_loss=\d\.\d{6} val_bpb=\d\.\d{6} elapsed=\d+\.\ds",
        rf"legal_ttt {timed}",
        rf"legal_ttt_exact {exact}",
    ]
    lines = iter(whole.text.splitlines())
    for pattern in patterns:  # in this order
        assert any(re.fullmatch(pattern, line) for line in lines), pattern
    last = float(re.search(r"ttt_chunk \[4/4\] bpb=(\S+)", whole.text)[1])
    score = float(re.search(r"legal_ttt_exact .*val_bpb:(\S+)", whole.text)[1])
    assert last == pytest.approx(score, abs=1e-6)
    losses = [float(loss) for loss in re.findall(r"train_loss:(\S+)", whole.text)]
    assert losses[-1] < losses[0] - 0.5
    code = len(SCRIPT.read_bytes())
    artifact = (whole.folder / "final_model.int6.ptz").stat().st_size
    assert f"Total submission size int6+lzma: {code + artifact} bytes" in whole.text
    assert whole.log_path.read_text("utf-8").startswith(SCRIPT.read_text("utf-8"))


@pytest.mark.slow
def test_overlap_on_and_off_are_identical(corpus: Any, whole: Finished, tmp_path: Path) -> None:
    off = finished(corpus, tmp_path, **WHOLE, **OFF)
    assert len(scores(whole)) > 40 and scores(off) == scores(whole)
    for done, on in ((whole, True), (off, False)):
        assert f"train_io:prefetch:{on}" in done.text and f"val_io:overlap:{on}" in done.text


@pytest.mark.slow
def test_packed_and_readable_are_identical(corpus: Any, whole: Finished, tmp_path: Path) -> None:
    """The submitted form of the script."""
    packed = tmp_path / "train_gpt.py"
    packed.write_bytes(package_form())
    settings = {**corpus.env, **TINY, **WHOLE}
    done = run_trainer(tmp_path / "run", script=packed, **settings)
    assert done.code == 0, done.err[-3000:]
    assert scores(done) == scores(whole)
    assert f"Code size: {packed.stat().st_size} bytes" in done.text
    files = [folder / "final_model.int6.ptz" for folder in (done.folder, whole.folder)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_and_score_as_one(
    corpus: Any, whole: Finished, tmp_path: Path, ranks: int
) -> None:
    """The chunk's eight sequences divide by them; what differs is the order of sums."""
    several = finished(corpus, tmp_path, ranks=ranks, **WHOLE)
    ours, theirs = scores(whole), scores(several)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        if name == "data_crc":
            assert mine == other
        else:
            assert float(mine) == pytest.approx(float(other), abs=1e-3), name


@pytest.mark.slow
def test_a_rank_without_sequences_takes_every_step(corpus: Any, tmp_path: Path) -> None:
    """One sequence a chunk for two ranks."""
    settings = {"ITERATIONS": 1, "WARMUP_STEPS": 0, "TTT_CHUNK_TOKENS": 32, "GRAD_CLIP_NORM": 0}
    results = []
    for ranks in (0, 2):
        done = finished(corpus, tmp_path / str(ranks), ranks=ranks, VAL_TOKENS=257, **settings)
        results.append(float(re.search(r"legal_ttt_exact val_loss:(\S+)", done.text)[1]))
    assert results[0] == pytest.approx(results[1], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_ends_the_run(corpus: Any, tmp_path: Path, ranks: int) -> None:
    settings = {**corpus.env, **TINY, "SCALAR_LR": 1e18}
    done = run_trainer(tmp_path, ranks=ranks, script=SCRIPT, **settings)
    assert done.code == 1
    told = r"train_gpt.py: rank \d: step \d+: loss or gradient not finite: .+"
    assert re.search(told, done.err)
    assert not (tmp_path / "final_model.int6.ptz").exists()
    assert ranks or "Traceback" not in done.err


@pytest.mark.slow
def test_a_signal_ends_the_run_with_one_line(corpus: Any, tmp_path: Path) -> None:
    """While it trains: its step is left out on all ranks, so nothing is exported."""
    env = clean_environment(**{**corpus.env, **TINY, "ITERATIONS": 100_000, "RUN_ID": "told"})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, SCRIPT], env=env, cwd=tmp_path, **pipes) as process:
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
        "VAL_BATCH_SIZE": (16, "set at least 32"),
        "LATE_QAT": (2, "set 0 or 1"),
    }
    settings = {**corpus.env, **TINY, **{name: value for name, (value, _) in wrong.items()}}
    del settings["LATE_QAT"], settings["EMA_DECY"]  # these two are told before all others
    done = run_trainer(tmp_path, script=SCRIPT, **settings)
    assert done.code == 2 and "Traceback" not in done.err and not (tmp_path / "logs").exists()
    faults = done.err + "\n".join(
        f"  {fault}" for fault in record.read_config({"EMA_DECY": "1", "LATE_QAT": "2"})[1]
    )
    for name, (value, words) in wrong.items():
        assert re.search(rf"^  {name}={value}: .*{words}", faults, re.MULTILINE), name
    [fault] = [f for f in record.find_faults(tiny(VE_LAYERS="x"), 1, {}) if "VE_LAYERS" in f]
    assert fault == "VE_LAYERS=x: set layers, as 9,10"


# The folder.


def test_help_names_every_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    record.print_help()
    out, settings = capsys.readouterr().out, dataclasses.fields(record.Config)
    for field in settings:
        kind = int if isinstance(field.default, bool) else type(field.default)
        line = re.search(rf"^  {field.name.upper()}=(.*?)  \(.+, .+?\) .+$", out, re.MULTILINE)
        assert line and kind(line[1]) == field.default, field.name
    assert len(re.findall(r"^  [A-Z]\w+=", out, re.MULTILINE)) == len(settings)


def test_the_script_is_written_to_be_read(tmp_path: Path) -> None:
    """By the root's rules, which leave out what is frozen; of a bounded size."""
    rules = (ROOT / ".ruff.toml").read_text("utf-8")
    (tmp_path / ".ruff.toml").write_text(re.sub(r"extend-exclude = .*", "", rules))
    shutil.copy(SCRIPT, tmp_path)
    for words in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--no-cache", str(tmp_path)]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    text = SCRIPT.read_text("utf-8")
    functions = [f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef)]
    assert max(f.end_lineno - f.lineno + 1 for f in functions) <= 60
    assert len(text.encode()) <= 105_000


def log_text() -> str:
    return (FOLDER / "train_seed1337.log").read_text("utf-8")


def exact(label: str) -> tuple[str, str]:
    return re.search(rf"(?m)^{label}_exact val_loss:(\S+) val_bpb:(\S+)$", log_text()).groups()


def test_the_readme_says_what_its_log_says() -> None:
    log = log_text()
    train = re.search(r"step:60/60 val_loss:(\S+) val_bpb:(\S+) train_time:(\d+)ms", log)
    ema = re.search(r"post_ema val_loss:(\S+) val_bpb:(\S+) eval_time:(\d+)ms", log)
    expected = [train.groups(), ema.groups()]
    labels = "final_int6_roundtrip", "final_int6_sliding_window", "legal_ttt"
    for label in labels:
        milliseconds = re.search(rf"(?m)^{label} .*eval_time:(\d+)ms", log)[1]
        expected.append((*exact(label), milliseconds))
    number = r"([\d.]+)"
    line = rf"(?m)^\| [^|]+ \| {number} \| {number} \| {number}(?: of training)? \|$"
    rows = re.findall(line, README)
    assert rows == [(loss, bpb, f"{int(ms) / 1e3:.1f}") for loss, bpb, ms in expected]
    artifact = re.search(r"(?m)^Serialized model int6\+lzma: (\d+) bytes", log)[1]
    assert f"({int(artifact):,} bytes)" in README
    params = re.search(r"(?m)^model_params:(\d+)", log)[1]
    assert f"{int(params):,} parameters, 60 steps of 4,096 tokens" in README


def test_the_log_is_of_this_script_and_of_the_command_shown() -> None:
    log, values = log_text(), config(**SMALL)
    assert log.startswith(SCRIPT.read_text("utf-8"))
    assert f"val_loader:shards pattern={values.data_path}/fineweb_val_*.bin" in log
    for line in (
        f"tokenizer_path={values.tokenizer_path}\n",
        f"train_batch_tokens:{values.train_batch_tokens} train_seq_len:{values.train_seq_len} "
        f"iterations:{values.iterations} warmup_steps:{values.warmup_steps} ",
        f"chunk_tokens={values.ttt_chunk_tokens} ",
        f"ttt_epochs={values.ttt_epochs} freeze_blocks={values.ttt_freeze_blocks}\n",
        f"\nseed:{values.seed}\n",
    ):
        assert line in log
    with torch.device("meta"):
        params = sum(p.numel() for p in record.GPT(values, torch.float32).parameters())
    assert f"\nmodel_params:{params}\n" in log


def test_the_submission_and_the_margins_are_true_and_accepted() -> None:
    submission = json.loads((FOLDER / "submission.json").read_text("utf-8"))
    loss, bpb = map(float, exact("legal_ttt"))
    code, packed = len(SCRIPT.read_bytes()), len(package_form())
    artifact = int(re.search(r"(?m)^Serialized model int6\+lzma: (\d+)", log_text())[1])
    assert submission["track"] == "track_non_record_16mb"
    assert submission["date"] == FOLDER.name[:10]
    assert (submission["val_loss"], submission["val_bpb"]) == (loss, bpb)
    assert (submission["bytes_code"], submission["bytes_total"]) == (code, code + artifact)
    largest = 15_910_908
    over, left = largest + code - 16_000_000, 16_000_000 - largest - packed
    assert left > 50_000
    for number in (largest, code, over, packed, left):
        assert f"{number:,}" in README
    check = [sys.executable, str(ROOT / "records/check.py"), str(FOLDER)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0 and ": accepted as" in done.stdout, done.stdout


def package_form() -> bytes:
    """The packed script, by records/package.py."""
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder, "train_gpt.py")
        package = [sys.executable, str(ROOT / "records/package.py"), "--pack", str(SCRIPT)]
        subprocess.run([*package, "--output", str(packed)], check=True, capture_output=True)
        return packed.read_bytes()
