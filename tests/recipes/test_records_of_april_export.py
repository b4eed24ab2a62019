"""Recipes of the records of April 2026 that store and score: each against a plain reference.

The references are written from what the records of 2026-04-05 and 2026-04-09 do, in words.
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
from tiny import artifact, everywhere, finish, module_of
from torch import Tensor
from torch.nn import functional as F

# Validation has 13 rows of 32: four chunks of 3 rows and one of 1 row.
SETTINGS = {"TRAIN_BATCH_TOKENS": 512, "VAL_BATCH_SIZE": 256, "ITERATIONS": 4, "MATRIX_LR": 0.2}
SETTINGS |= {"WARMDOWN_ITERS": 5, "VAL_TOKENS": 13 * 32 + 1, "VOCAB_SIZE": 260}
GPTQ = {"GPTQ_BATCHES": 6, "MATRIX_CLIP_SIGMAS": 3, "EMBED_CLIP_SIGMAS": 4, "EMBED_BITS": 7}
GPTQ |= {"MLP_CLIP_SIGMAS": 2.5}
TTT = {"EVAL_STRIDE": 8, "TTT_EPOCHS": 2, "TTT_CHUNK_TOKENS": 96, "TTT_LR": 0.5}


@pytest.fixture
def trainer(run_of: Callable) -> Callable:

    def make(*names: str, ranks: int = 1, **settings: Any) -> Any:
        settings = SETTINGS | {"GRAD_ACCUM_STEPS": 2 // ranks} | settings
        return run_of(names, ranks=ranks, **settings)

    return make


@pytest.mark.parametrize("on", [GPTQ, TTT], ids=["gptq", "ttt"])
def test_a_signal_of_one_rank_ends_the_export_of_all(on: dict, trainer: Callable) -> None:
    """It comes with a batch of gptq, or in the first step on what was scored. The weights are those
    of the last step then: a checkpoint is written, and RESUME repeats the export."""
    runs, together = trainer("gptq", "score_first_ttt", "ema", ranks=2, **on, EMA_DECAY=0.8)

    def tell(*_: Any) -> None:
        if on is GPTQ or torch.is_grad_enabled():
            runs[1].runtime.signum = 15

    runs[1].model.blocks[0].register_forward_pre_hook(tell)

    def export(run: Any) -> bool:
        before = [p.detach().clone() for p in run.model.parameters()]
        with torch.no_grad():
            for mean in run.average.parameters():
                mean += 1
        with pytest.raises(module_of(run).HaltError):
            run.export_and_score()
        return all(map(torch.equal, before, run.model.parameters()))

    assert everywhere((runs, together), export)[1] == [True, True]
    assert together.sums[0] == together.sums[1]


def reference_gptq(weight: Tensor, hessian: Tensor, levels: int, sigmas: float) -> tuple:
    """One column after the other, in float64, without blocks and without a new order in memory."""
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
def test_gptq_rounds_as_the_plain_loop_does(levels: int, sigmas: float, script: Callable) -> None:
    random = torch.Generator().manual_seed(levels)
    weight = 0.02 * torch.randn(24, 300, generator=random)
    weight[3] = 0.0
    weight[4] = 1e-9  # below float16's least number
    inputs = torch.randn(500, 300, generator=random) @ torch.randn(300, 300, generator=random)
    inputs[:, [5, 200]] = 0.0
    inputs /= 400  # so that the diagonal is about 1, as that of columns without inputs
    q, scale = script("gptq").gptq(weight, inputs.T @ inputs, levels, sigmas)
    wanted_q, wanted_scale = reference_gptq(weight, inputs.T @ inputs, levels, sigmas)
    assert torch.equal(scale, wanted_scale) and (scale > 0).all()
    assert int((q != wanted_q).sum()) == 0
    assert not q[:, [5, 200]].any() and not q[3].any()
    plain = (weight / scale[:, None]).round().clamp(-levels, levels)
    ours, theirs = (((n * scale[:, None] - weight) @ inputs.T).norm() for n in (q, plain))
    assert ours < 0.9 * theirs  # the error in the outputs is what it makes small


def test_hessians_are_of_the_first_batches_on_any_number_of_ranks(
    trainer: Callable, data: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer("gptq", **GPTQ)
    module = module_of(run)
    on_two = everywhere(trainer("gptq", ranks=2, **GPTQ), module.collect_hessians)[1]
    on_one = module.collect_hessians(run)
    assert on_one.keys() == {n for n, p in run.model.named_parameters() if p.numel() > 500}
    wanted = {name: torch.zeros(h.shape, dtype=torch.float64) for name, h in on_one.items()}
    names = {p.data_ptr(): name for name, p in run.model.named_parameters()}

    blocks = itertools.cycle(range(run.config.num_layers))

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        found = [names.get(weight.data_ptr())]  # of all but the scaled ones: proj
        if found == [None] and len(weight) == 32 + 2 * 16:  # queries, keys and values
            number = next(blocks)
            found = [f"blocks.{number}.attn.c_{each}.weight" for each in "qkv"]
        for name in filter(None, found):
            wanted[name] += x.double().flatten(0, -2).T @ x.double().flatten(0, -2) / 6
        return torch._C._nn.linear(x, weight)

    monkeypatch.setattr(F, "linear", linear)
    starts = range(0, 6 * 256 + 24, 65)  # spans of 2 rows: 6 batches are 24 of them
    for start in starts[:24]:
        tokens = torch.from_numpy(data.train[start : start + 64].astype(np.int64))
        run.model.logits(tokens.view(2, 32))
    for name, hessian in on_one.items():
        torch.testing.assert_close(on_two[0][name], hessian, rtol=1e-4, atol=1e-4)
        if ".proj." not in name:
            torch.testing.assert_close(hessian.double(), wanted[name], rtol=1e-4, atol=1e-4)


def test_the_artifact_holds_the_rounded_average(trainer: Callable) -> None:
    run = trainer("gptq", "ema", **GPTQ, EMA_DECAY=0.8)
    module = module_of(run)
    finish(run)
    run.swap_average()
    state = run.model.state_dict()
    stored = module.unpack(artifact(), state)
    hessians = module.collect_hessians(run)
    assert len(hessians) == 19
    for name, hessian in hessians.items():
        levels, sigmas = (63, 4.0) if name == "tok_emb.weight" else (31, 3.0)
        sigmas = 2.5 if ".mlp." in name else sigmas
        q, scale = module.gptq(state[name], hessian, levels, sigmas)
        assert torch.equal(stored[name], module.dequantize(q, scale)), name
    assert "\ngptq: 19 matrices, 6 bits (head: 7), mean error" in "\n".join(run.log.lines)


def test_a_matrix_without_inputs_is_stored_as_in_the_root(
    trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be one that an edit multiplies elsewhere."""
    run = trainer("gptq", **GPTQ)
    module, name = module_of(run), "blocks.0.attn.c_v.weight"
    modules = module.input_modules(run.model) | {name: torch.nn.Identity()}
    monkeypatch.setattr(module, "input_modules", lambda model: modules)
    finish(run)
    stored = module.unpack(artifact(), run.model.state_dict())
    expected = module.dequantize(*module.quantize(run.model.get_parameter(name)))
    assert torch.equal(stored[name], expected) and expected.any()


def test_the_reserve_is_taken_off_the_cap(script: Callable, trainer: Callable) -> None:
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
        module_of(run).quantize_by_inputs(run, run.model.state_dict())
        told = [line for line in run.log.lines if line.startswith("WARNING: GPTQ_RESERVE")]
        assert len(told) == warnings


def test_brotli_gives_back_every_byte(script: Callable, trainer: Callable) -> None:
    pytest.importorskip("brotli")
    module = script("brotli")
    for length in 0, 1, 2, 7, 100_001:
        random = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
        assert module.decompress(module.compress_by_brotli(random)) == random
    ends = []
    for on in 0, 1:
        run = trainer("brotli", ARTIFACT_BROTLI=on)
        finish(run)
        ends.append((len(artifact()), module.unpack(artifact(), run.model.state_dict())))
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
    assert fault.endswith("brotli is missing: python3 -m pip install brotli")


def reference_nats(model: Any, tokens: Tensor, stride: int, settings: dict) -> Tensor:
    """The nats of each target of whole rows: one window after the other, steps in between."""
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
def test_scores_first_as_the_plain_loop_does(
    settings: dict, ranks: int, trainer: Callable, data: SimpleNamespace
) -> None:
    settings = TTT | settings
    runs, ends = everywhere(trainer("score_first_ttt", ranks=ranks, **settings), finish)
    module = module_of(runs[0])
    model = module.GPT(runs[0].config, torch.float32)
    model.load_state_dict(module.unpack(artifact(), model.state_dict()))
    tokens = torch.from_numpy(data.val[: SETTINGS["VAL_TOKENS"]].astype(np.int64))
    wanted = float(reference_nats(model, tokens, settings["EVAL_STRIDE"], settings).mean())
    bits = wanted / math.log(2) * 13 * 32 / (data.val[1 : 13 * 32 + 1] >= 4).sum()
    for _, score in ends:
        assert score == pytest.approx((wanted, bits), rel=2e-7)
    # Files and checkpoint hold the weights from before.
    state = torch.load("final_model.pt")
    held = torch.load(f"checkpoints/{runs[0].config.run_id}/step_00000004.pt")["parts"]["model"]
    for name, t in runs[0].model.state_dict().items():
        assert torch.equal(t, state[name]) and torch.equal(t, held[name])
    apart = abs(wanted - finish(trainer("score_first_ttt", EVAL_STRIDE=8))[1][0]) > 1e-4
    assert apart == (settings["TTT_EPOCHS"] > 0)


def test_without_steps_it_is_sliding_window(trainer: Callable) -> None:
    root = recipe.TRAINER.read_text(encoding="utf-8")
    alone, sliding = recipe.load("score_first_ttt"), recipe.load("sliding_window")
    assert recipe.combined(root, [alone]) == recipe.combined(root, [sliding, alone])
    ends = [finish(trainer(r.name, EVAL_STRIDE=8)) for r in (alone, sliding)]
    assert ends[0] == ends[1] and ends[0][1] != finish(trainer())[1]
