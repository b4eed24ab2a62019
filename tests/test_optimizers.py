"""Tests of the optimizers.

A step equals plain Muon, one matrix at a time, and torch's Adam on all other parameters, although
the trainer batches matrices and shares them between ranks. No parameter is forgotten. Learning
rates and momentum follow their documented schedules, and gradients are clipped to their limit.
"""

import copy
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import torch
from running import (
    SMALL_MODEL,
    SimulatedRanks,
    byte_data,
    make_config,
    make_log,
    make_runtime,
    open_data,
)
from running import train_gpt as tg
from torch import nn

SHAPE = {"NUM_LAYERS": 3, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "TRAIN_SEQ_LEN": 8}
SHAPE |= {"TRAIN_BATCH_TOKENS": 64, "GRAD_ACCUM_STEPS": 0}
# Learning rates fall from the third step on, and momentum rises until the fourth step.
SCHEDULE = {"ITERATIONS": 5, "WARMDOWN_ITERS": 3, "MUON_MOMENTUM_WARMUP_STEPS": 4}


def config_for(data: dict[str, str], **more: object) -> tg.Config:
    return make_config(**data | SHAPE | SCHEDULE | more)


def random_gradients(model: tg.GPT, step: int) -> dict[str, torch.Tensor]:
    """Return the gradients that a step must have, by the names of the parameters."""
    generator = torch.Generator().manual_seed(1000 + step)
    named = model.named_parameters()
    return {name: 0.3 * torch.randn(p.shape, generator=generator) for name, p in named}


def make_trainer(runtime: tg.Runtime, config: tg.Config) -> tg.Trainer:
    """Return a Trainer whose loss has the gradients of `random_gradients`.

    Each rank has a different share of them; the mean over the ranks is the whole gradient.
    """
    trainer = tg.Trainer(config, runtime, make_log(), open_data(config))
    model = trainer.model
    with torch.no_grad():  # no parameter is constant, so that every update shows
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
            p.add_(noise, alpha=0.1)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wanted = random_gradients(model, trainer.step)
        share = 2 * (1 + runtime.rank) / (1 + runtime.world_size)  # 1 in the mean over the ranks
        return share * sum((p * wanted[name]).sum() for name, p in model.named_parameters())

    model.forward = loss
    return trainer


class PlainOptimizers:
    """Textbook Muon, one parameter at a time, with torch's own Adam and gradient clipping."""

    def __init__(self, model: tg.GPT, config: tg.Config) -> None:
        self.model, self.config, self.averages = model, config, {}
        controls = config.control_tensor_name_patterns.split(",")
        embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
        rates = {"tok_emb.weight": embed_lr, "lm_head.weight": config.head_lr}
        self.matrices, self.rates, groups = [], [], []
        for name, p in model.named_parameters():
            control = any(part and part in name for part in controls)
            if name.startswith("blocks.") and p.ndim == 2 and not control:
                self.matrices.append((name, p))
            else:
                self.rates.append(rates.get(name, config.scalar_lr))
                groups.append({"params": [p]})
        betas = config.beta1, config.beta2
        self.adam = torch.optim.Adam(
            groups, betas=betas, eps=config.adam_eps, foreach=False, fused=False
        )

    @torch.no_grad()
    def step(self, step: int) -> None:
        config = self.config
        lr_scale = min(1.0, (config.iterations - step) / config.warmdown_iters)
        ramp = min(1.0, step / config.muon_momentum_warmup_steps)
        momentum = (1 - ramp) * config.muon_momentum_warmup_start + ramp * config.muon_momentum
        for name, gradient in random_gradients(self.model, step).items():
            self.model.get_parameter(name).grad = gradient
        if config.grad_clip_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip_norm)
        for name, p in self.matrices:
            average = self.averages.setdefault(name, torch.zeros_like(p))
            average.copy_(momentum * average + p.grad)
            update = self.orthogonal(p.grad + momentum * average)
            rate = config.matrix_lr * lr_scale * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            p.sub_(rate * update)
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * lr_scale
        self.adam.step()

    def orthogonal(self, x: torch.Tensor) -> torch.Tensor:
        if tall := x.shape[0] > x.shape[1]:
            x = x.t()
        x = x / (x.norm() + 1e-7)
        for _ in range(self.config.muon_backend_steps):
            a = x @ x.t()
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x.t() if tall else x


VARIANTS = {
    "tied": {},
    "untied": {"TIE_EMBEDDINGS": 0, "EMBED_LR": 0.03, "HEAD_LR": 0.002},
    "rates": {"TIED_EMBED_LR": 0.011, "MATRIX_LR": 0.023, "SCALAR_LR": 0.017, "BETA1": 0.8}
    | {"BETA2": 0.97, "ADAM_EPS": 1e-3, "MUON_MOMENTUM": 0.9, "MUON_BACKEND_STEPS": 2},
    "clipped": {"GRAD_CLIP_NORM": 0.5},
    "clip_out_of_reach": {"GRAD_CLIP_NORM": 1e6},
    "matrices_to_adam": {"CONTROL_TENSOR_NAME_PATTERNS": tg.CONTROL_TENSOR_NAMES + ",c_k,mlp.fc"},
    "a_control_to_muon": {"CONTROL_TENSOR_NAME_PATTERNS": "q_gain"},
    "one_layer": {"NUM_LAYERS": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_equal_a_plain_reference(data: dict[str, str], variant: str) -> None:
    """Both use the schedules and the clipping."""
    config = config_for(data, **VARIANTS[variant])
    trainer = make_trainer(make_runtime(config), config)
    plain = PlainOptimizers(copy.deepcopy(trainer.model), config)
    found, wanted = (dict(m.named_parameters()) for m in (trainer.model, plain.model))
    batches = trainer.batches()
    for step in range(config.iterations):
        before = {name: p.detach().clone() for name, p in found.items()}
        trainer.train_step(batches)
        plain.step(step)
        for name, p in found.items():
            torch.testing.assert_close(p, wanted[name], rtol=0, atol=2e-6, msg=f"{step} {name}")
            assert torch.equal(p, before[name]) == (p.numel() == 0), (step, name)
    batches.close()


def test_ranks_share_the_cost_of_the_matrices_evenly_and_agree(
    data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks agree to the last bit, and with one process; the whole gradient is clipped.

    The cost of a matrix is its size times its shorter side.
    """
    more = {"NUM_LAYERS": 4, "NUM_KV_HEADS": 4, "GRAD_CLIP_NORM": 0.5, "ITERATIONS": 3}
    config, real, own = config_for(data, **more), tg.newton_schulz, threading.local()

    def count_matrices(x: torch.Tensor, iterations: int, dtype: torch.dtype) -> torch.Tensor:
        own.shapes[tuple(x.shape[-2:])] += len(x)
        return real(x, iterations, dtype)

    monkeypatch.setattr(tg, "newton_schulz", count_matrices)

    def train(count: int) -> list[tuple[Counter, dict[str, torch.Tensor]]]:
        ranks = SimulatedRanks(config, count)
        trainers = [make_trainer(runtime, config) for runtime in ranks.runtimes]

        def work(rank: int) -> tuple[Counter, dict[str, torch.Tensor]]:
            own.shapes = Counter()
            with closing(trainers[rank].batches()) as batches:
                for _ in range(3):
                    trainers[rank].train_step(batches)
            return own.shapes, trainers[rank].model.state_dict()

        return ranks.run(work)

    ((shapes, expected),) = train(1)
    assert shapes == {(32, 32): 3 * 16, (64, 32): 3 * 4, (32, 64): 3 * 4}
    for count in (2, 8):
        results = train(count)
        assert sum((counts for counts, _ in results), Counter()) == shapes
        costs = [
            sum(n * rows * cols * min(rows, cols) for (rows, cols), n in counts.items())
            for counts, _ in results
        ]
        largest = 3 * 64 * 32 * 32  # cost of one matrix in three steps
        assert max(costs) <= sum(costs) / count + largest
        assert max(len(counts) for counts, _ in results) <= 2, "few shapes, so few batches"
        for _, state in results:
            for name, t in state.items():
                assert torch.equal(t, results[0][1][name]), name
                torch.testing.assert_close(t, expected[name], rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("time_limit", [0, 10])
def test_without_warmdown_the_full_rate_lasts_to_the_end(time_limit: int) -> None:
    config = make_config(ITERATIONS=100, WARMDOWN_ITERS=0, MAX_WALLCLOCK_SECONDS=time_limit)
    for step in (0, 1, 99, 100):
        assert tg.lr_multiplier(config, step, 99.0 * step) == 1.0


def test_a_frozen_matrix_has_no_optimizer(tmp_path: Path) -> None:
    config = make_config(**{**SMALL_MODEL, **byte_data(tmp_path)})
    model = tg.GPT(config, torch.float32)
    frozen = model.blocks[0].mlp.fc.weight.requires_grad_(False)
    adam, muon = tg.make_optimizers(model, config, make_runtime(config))
    trained = [p for group in adam.param_groups + muon.param_groups for p in group["params"]]
    assert len(trained) == len(list(model.parameters())) - 1
    assert all(p is not frozen for p in trained)
