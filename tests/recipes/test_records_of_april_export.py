"""Tests of recipes from the records of April 2026 that change how a model is stored or scored.

Each recipe is compared with a plain reference. The references were written from a description of
what the records of 2026-04-05 and 2026-04-09 do.
"""

import itertools
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recipe
import torch
from running import SMALL_MODEL, make_config
from tiny import call_on_all_ranks, read_artifact, script_module, train_and_export
from torch import Tensor
from torch.nn import functional as F

# The validation set has 13 sequences of 32 tokens: four chunks of 3 sequences and one of 1.
SETTINGS = {"TRAIN_BATCH_TOKENS": 512, "VAL_BATCH_SIZE": 256, "ITERATIONS": 4, "MATRIX_LR": 0.2}
SETTINGS |= {"WARMDOWN_ITERS": 5, "VAL_TOKENS": 13 * 32 + 1, "VOCAB_SIZE": 260}
GPTQ = {"GPTQ_BATCHES": 6, "MATRIX_CLIP_SIGMAS": 3, "EMBED_CLIP_SIGMAS": 4, "EMBED_BITS": 7}
GPTQ |= {"MLP_CLIP_SIGMAS": 2.5}
TTT = {"EVAL_STRIDE": 8, "TTT_EPOCHS": 2, "TTT_CHUNK_TOKENS": 96, "TTT_LR": 0.5}


@pytest.fixture
def trainer(make_run: Callable) -> Callable:
    """Return a function that makes a Trainer with recipes and with the SETTINGS above."""

    def make(*names: str, ranks: int = 1, **settings: Any) -> Any:
        settings = SETTINGS | {"GRAD_ACCUM_STEPS": 2 // ranks} | settings
        return make_run(names, ranks=ranks, **settings)

    return make


@pytest.mark.parametrize("on", [GPTQ, TTT], ids=["gptq", "ttt"])
def test_a_signal_of_one_rank_ends_the_export_of_all(on: dict, trainer: Callable) -> None:
    """The signal comes with a batch of GPTQ, or in the first step of test-time training.

    The model then has the weights of the last training step again, so that a checkpoint can be
    written, and RESUME repeats the export.
    """
    runs, simulated = trainer("gptq", "score_first_ttt", "ema", ranks=2, **on, EMA_DECAY=0.8)

    def send_signal(*_: Any) -> None:
        if on is GPTQ or torch.is_grad_enabled():
            runs[1].runtime.signum = 15

    runs[1].model.blocks[0].register_forward_pre_hook(send_signal)

    def export(run: Any) -> bool:
        before = [p.detach().clone() for p in run.model.parameters()]
        with torch.no_grad():
            for mean in run.average.parameters():
                mean += 1
        with pytest.raises(script_module(run).HaltError):
            run.export_and_score()
        return all(map(torch.equal, before, run.model.parameters()))

    assert call_on_all_ranks((runs, simulated), export)[1] == [True, True]
    assert simulated.sums[0] == simulated.sums[1]


def reference_gptq(weight: Tensor, hessian: Tensor, levels: int, sigmas: float) -> tuple:
    """Round column by column in float64, without blocks and without reordering in memory.

    Return (int8 integers, float16 scales of the rows).
    """
    w, hessian = weight.double(), hessian.double()
    rows, columns = w.shape
    diagonal = [float(hessian[j, j]) or 1.0 for j in range(columns)]
    damping = 0.01 * sum(diagonal) / columns
    damped = hessian.clone()
    for j in range(columns):
        w[:, j] = w[:, j] if hessian[j, j] else 0.0
        damped[j, j] = diagonal[j] + damping
    order = sorted(range(columns), key=lambda j: -damped[j, j])
    u = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    scales = []
    for row in weight.double():
        deviation = math.sqrt(float(((row - row.mean()) ** 2).sum()) / (columns - 1))
        scales.append(max(sigmas * deviation / levels, 2.0**-24))
    scale = torch.tensor(scales).half()
    q = torch.zeros(rows, columns)
    for i, j in enumerate(order):
        q[:, j] = (w[:, j] / scale.double()).round().clamp(-levels, levels)
        error = (w[:, j] - q[:, j] * scale.double()) / u[i, i]
        for later in range(i + 1, columns):
            w[:, order[later]] -= error * u[i, later]
    return q.to(torch.int8), scale


@pytest.mark.parametrize(("levels", "sigmas"), [(31, 12.85), (127, 20.0), (7, 3.0), (1, 1.5)])
def test_gptq_equals_a_plain_loop(levels: int, sigmas: float, script: Callable) -> None:
    random = torch.Generator().manual_seed(levels)
    weight = 0.02 * torch.randn(24, 300, generator=random)
    weight[3] = 0.0
    weight[4] = 1e-9  # below the smallest float16 number
    inputs = torch.randn(500, 300, generator=random) @ torch.randn(300, 300, generator=random)
    inputs[:, [5, 200]] = 0.0
    inputs /= 400  # the diagonal is about 1, which is also the value for columns without inputs
    q, scale = script("gptq").gptq(weight, inputs.T @ inputs, levels, sigmas)
    wanted_q, wanted_scale = reference_gptq(weight, inputs.T @ inputs, levels, sigmas)
    assert torch.equal(scale, wanted_scale) and (scale > 0).all()
    assert int((q != wanted_q).sum()) == 0
    assert not q[:, [5, 200]].any() and not q[3].any()
    plain = (weight / scale[:, None]).round().clamp(-levels, levels)
    error, plain_error = (((n * scale[:, None] - weight) @ inputs.T).norm() for n in (q, plain))
    assert error < 0.9 * plain_error  # GPTQ makes the error of the outputs small


def test_hessians_are_those_of_the_first_batches_on_any_number_of_ranks(
    trainer: Callable, data: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer("gptq", **GPTQ)
    module = script_module(run)
    on_two = call_on_all_ranks(trainer("gptq", ranks=2, **GPTQ), module.collect_hessians)[1]
    on_one = module.collect_hessians(run)
    assert on_one.keys() == {n for n, p in run.model.named_parameters() if p.numel() > 500}
    wanted = {name: torch.zeros(h.shape, dtype=torch.float64) for name, h in on_one.items()}
    names = {p.data_ptr(): name for name, p in run.model.named_parameters()}

    blocks = itertools.cycle(range(run.config.num_layers))

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        found = [names.get(weight.data_ptr())]  # None for proj, whose weight is scaled before use
        if found == [None] and len(weight) == 32 + 2 * 16:  # queries, keys and values
            number = next(blocks)
            found = [f"blocks.{number}.attn.c_{each}.weight" for each in "qkv"]
        for name in filter(None, found):
            wanted[name] += x.double().flatten(0, -2).T @ x.double().flatten(0, -2) / 6
        return torch._C._nn.linear(x, weight)

    monkeypatch.setattr(F, "linear", linear)
    starts = range(0, 6 * 256 + 24, 65)  # spans of 2 sequences; 6 batches are 24 spans
    for start in starts[:24]:
        tokens = torch.from_numpy(data.train[start : start + 64].astype(np.int64))
        run.model.logits(tokens.view(2, 32))
    for name, hessian in on_one.items():
        torch.testing.assert_close(on_two[0][name], hessian, rtol=1e-4, atol=1e-4)
        if ".proj." not in name:
            torch.testing.assert_close(hessian.double(), wanted[name], rtol=1e-4, atol=1e-4)


def test_the_artifact_holds_the_rounded_average(trainer: Callable) -> None:
    run = trainer("gptq", "ema", **GPTQ, EMA_DECAY=0.8)
    module = script_module(run)
    train_and_export(run)
    run.swap_average()
    state = run.model.state_dict()
    stored = module.unpack(read_artifact(), state)
    hessians = module.collect_hessians(run)
    assert len(hessians) == 19
    for name, hessian in hessians.items():
        levels, sigmas = (63, 4.0) if name == "tok_emb.weight" else (31, 3.0)
        sigmas = 2.5 if ".mlp." in name else sigmas
        q, scale = module.gptq(state[name], hessian, levels, sigmas)
        assert torch.equal(stored[name], module.dequantize(q, scale)), name
    assert "\ngptq: 19 matrices, 6 bits (head: 7), mean error" in "\n".join(run.log.lines)


def test_a_matrix_without_inputs_is_stored_as_without_gptq(
    trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit may use such a matrix outside of its module."""
    run = trainer("gptq", **GPTQ)
    module, name = script_module(run), "blocks.0.attn.c_v.weight"
    modules = module.input_modules(run.model) | {name: torch.nn.Identity()}
    monkeypatch.setattr(module, "input_modules", lambda model: modules)
    train_and_export(run)
    stored = module.unpack(read_artifact(), run.model.state_dict())
    expected = module.dequantize(*module.quantize(run.model.get_parameter(name)))
    assert torch.equal(stored[name], expected) and expected.any()


def test_the_reserve_is_subtracted_from_the_time_limit(script: Callable, trainer: Callable) -> None:
    module = script("gptq")
    settings = {"MAX_WALLCLOCK_SECONDS": 600, "ITERATIONS": 1000, "WARMDOWN_ITERS": 100}
    reserve = {"GPTQ_BATCHES": 6, "GPTQ_RESERVE_SECONDS": 100}
    reserved = make_config(module, **settings, **reserve)
    root = make_config(script(), **settings | {"MAX_WALLCLOCK_SECONDS": 500})
    for ms in 1.0, 250_000.0, 499_999.0, 500_001.0:
        for function in "progress", "lr_multiplier":
            with_reserve = getattr(module, function)(reserved, 50, ms)
            assert with_reserve == getattr(script(), function)(root, 50, ms)
    for ms, steps in (499_999.0, 1), (500_001.0, 0):
        run = trainer("gptq", MAX_WALLCLOCK_SECONDS=600, ITERATIONS=1, **reserve)
        run.reducer.elapsed_ms = lambda step, ms=ms: ms
        run.train()
        assert run.step == steps


def test_gptq_that_takes_longer_than_its_reserve_is_one_warning(trainer: Callable) -> None:
    for reserve, warnings in (0, 1), (500, 0):
        run = trainer("gptq", **GPTQ, MAX_WALLCLOCK_SECONDS=600, GPTQ_RESERVE_SECONDS=reserve)
        script_module(run).quantize_by_inputs(run, run.model.state_dict())
        warned = [line for line in run.log.lines if line.startswith("WARNING: GPTQ_RESERVE")]
        assert len(warned) == warnings


def test_brotli_restores_every_byte(script: Callable, trainer: Callable) -> None:
    pytest.importorskip("brotli")
    module = script("brotli")
    for length in 0, 1, 2, 7, 100_001:
        random = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
        assert module.decompress(module.compress_by_brotli(random)) == random
    ends = []
    for on in 0, 1:
        run = trainer("brotli", ARTIFACT_BROTLI=on)
        train_and_export(run)
        ends.append((len(read_artifact()), module.unpack(read_artifact(), run.model.state_dict())))
    (plain, weights), (small, others) = ends
    assert small < plain and all(torch.equal(t, weights[name]) for name, t in others.items())


def test_without_brotli_nothing_starts(
    script: Callable, data: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("brotli")
    monkeypatch.setitem(sys.modules, "brotli", None)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    settings = {"WORLD_SIZE": 1} | SMALL_MODEL | SETTINGS | data.env
    env = {name: str(value) for name, value in settings.items()}
    assert module.check_settings(module.read_config([], env)[0], env)[0] == []
    config = module.read_config(["ARTIFACT_BROTLI=1"], env)[0]
    [fault] = module.check_settings(config, env)[0]
    assert fault.endswith("needs the package brotli; run python3 -m pip install brotli")


def reference_nats(model: Any, tokens: Tensor, stride: int, settings: dict) -> Tensor:
    """Return the nats of each target that is in a full sequence, as float64 (targets,).

    The windows are scored one after the other, with the steps of training in between.
    """
    length, size = 32, settings["TTT_CHUNK_TOKENS"]
    total = (len(tokens) - 1) // length * length
    nats = torch.full((total,), math.nan, dtype=torch.float64)
    chunks = math.ceil(total / size)
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    for chunk in range(chunks):
        for start in range(0, total - length + 1, stride):
            first = start + length - stride if start else 0
            if first // size == chunk:
                with torch.no_grad():
                    logits = model.logits(tokens[start : start + length][None])[0]
                y = tokens[start + 1 : start + length + 1]
                each = F.cross_entropy(logits, y, reduction="none")
                nats[first : start + length] = each[first - start :].double()
        if chunk == chunks - 1:
            return nats
        rows = tokens[chunk * size : (chunk + 1) * size + 1]
        lr = settings["TTT_LR"] * 0.5 * (1 + math.cos(math.pi * chunk / (chunks - 1)))
        for _ in range(settings["TTT_EPOCHS"]):
            logits = model.logits(rows[:-1].view(-1, length)).flatten(0, 1)
            grads = torch.autograd.grad(F.cross_entropy(logits, rows[1:]), model.parameters())
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
            with torch.no_grad():
                for p, grad, momentum in zip(model.parameters(), grads, momenta, strict=True):
                    momentum.mul_(0.9).add_(grad / max(1.0, norm + 1e-6))
                    p.sub_(lr * momentum)
    raise AssertionError


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [{}, {"TTT_EPOCHS": 3, "EVAL_STRIDE": 32}, {"TTT_CHUNK_TOKENS": 32}, {"TTT_EPOCHS": 0}],
    ids=str,
)
def test_scores_equal_a_plain_loop(
    settings: dict, ranks: int, trainer: Callable, data: SimpleNamespace
) -> None:
    settings = TTT | settings
    runs, ends = call_on_all_ranks(
        trainer("score_first_ttt", ranks=ranks, **settings), train_and_export
    )
    module = script_module(runs[0])
    model = module.GPT(runs[0].config, torch.float32)
    model.load_state_dict(module.unpack(read_artifact(), model.state_dict()))
    tokens = torch.from_numpy(data.val[: SETTINGS["VAL_TOKENS"]].astype(np.int64))
    wanted = float(reference_nats(model, tokens, settings["EVAL_STRIDE"], settings).mean())
    bits = wanted / math.log(2) * 13 * 32 / (data.val[1 : 13 * 32 + 1] >= 4).sum()
    for _, score in ends:
        assert score == pytest.approx((wanted, bits), rel=2e-7)
    # Files and checkpoint hold the weights from before the test-time training.
    state = torch.load("final_model.pt")
    held = torch.load(f"checkpoints/{runs[0].config.run_id}/step_00000004.pt")["parts"]["model"]
    for name, t in runs[0].model.state_dict().items():
        assert torch.equal(t, state[name]) and torch.equal(t, held[name])
    scores_differ = (
        abs(wanted - train_and_export(trainer("score_first_ttt", EVAL_STRIDE=8))[1][0]) > 1e-4
    )
    assert scores_differ == (settings["TTT_EPOCHS"] > 0)


def test_without_steps_the_score_is_that_of_sliding_window(trainer: Callable) -> None:
    root = recipe.TRAINER.read_text(encoding="utf-8")
    alone, sliding = recipe.load_recipe("score_first_ttt"), recipe.load_recipe("sliding_window")
    assert recipe.combine(root, [alone]) == recipe.combine(root, [sliding, alone])
    ends = [train_and_export(trainer(r.name, EVAL_STRIDE=8)) for r in (alone, sliding)]
    assert ends[0] == ends[1] and ends[0][1] != train_and_export(trainer())[1]
