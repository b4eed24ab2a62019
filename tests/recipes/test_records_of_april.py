"""Tests of recipes from the records of April 2026 that change the model or the training.

Each recipe is compared with a plain reference, and all model recipes are compared together. The
references were written from a description of what the records of 2026-04-05, 2026-04-09 and
2026-04-27 do.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference import Reference, initial_state
from running import make_config
from tiny import randomize_weights, script_module, settings_for
from torch import nn

MODEL = {"NUM_LAYERS": 5, "NUM_HEADS": 4, "NUM_KV_HEADS": 2}
Run = Callable[..., Any]


MODELS = ["layer_scale", "parallel_residuals", "skip_gates", "loop", "xsa", "partial_rope"]
MODELS += ["leaky_relu2", "attn_gate", "two_lanes", "bigram_hash", "smear_gate"]
CASES = [*(([name], {}) for name in MODELS), (MODELS, {}), (["smear_gate"], {"SMEAR_WINDOW": 0})]


@pytest.mark.parametrize(("names", "more"), CASES, ids=str)
def test_logits_equal_the_reference(names: list[str], more: dict, make_run: Run) -> None:
    run = make_run(tuple(names), **MODEL | settings_for(*names) | more)
    model = randomize_weights(run)
    tokens = torch.randint(260, (32,), generator=torch.Generator().manual_seed(2))
    tokens[[9, 20]] = 1
    for looping in (False, True) if "loop" in names else (False,):
        model.looping = looping
        with torch.no_grad():
            logits = model.logits(tokens[None])[0].double()
        wanted = Reference(model, run.config).logits(tokens, looping)
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_initial_matrices_are_orthogonal_in_the_order_of_draws(make_run: Run) -> None:
    """The reference first makes the draws of the construction, which are thrown away."""
    # The matrices of keys and values have 32 rows, so they are not made orthogonal.
    settings = {"NUM_LAYERS": 2, "MODEL_DIM": 64, "ORTHOGONAL_INIT": 1}
    run = make_run(("orthogonal_init",), **settings, SEED=7)
    model = run.model
    torch.manual_seed(7)
    wanted = initial_state(run.config)
    for name, t in wanted.items():
        if t.ndim == 2 and min(t.shape) >= 64 and name.endswith(("c_q.weight", "fc.weight")):
            wanted[name] = nn.init.orthogonal_(t).bfloat16().float()
    for name, t in model.state_dict().items():
        assert torch.equal(t, wanted[name]), name
    matrix = model.blocks[1].mlp.fc.weight
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(64), rtol=0, atol=0.02)


def take_three_steps(run: Any) -> list[tuple]:
    """Take three steps from random gradients, with changing learning rates and momentum.

    Return for each step (factor of the learning rates, gradients, weights before, weights after);
    the last three are dictionaries by name.
    """
    model = randomize_weights(run)
    random = torch.Generator().manual_seed(3)
    steps = []
    for share in 1.0, 0.5, 0.25:
        for group in run.groups:
            group["base_lr"] = group.get("base_lr", group["lr"])
            group["lr"] = share * group["base_lr"]
        for group in run.muon.param_groups:
            group["momentum"] = 1 - share / 2
        for p in model.parameters():
            p.grad.copy_(torch.randn(p.shape, generator=random))
        before = {name: p.detach().double() for name, p in model.named_parameters()}
        gradients = {name: p.grad.double() for name, p in model.named_parameters()}
        for optimizer in run.optimizers:
            optimizer.step()
        after = {name: p.detach().double() for name, p in model.named_parameters()}
        steps.append((share, gradients, before, after))
    return steps


@pytest.mark.parametrize("polar", [False, True])
def test_muon_divides_rows_by_their_norm_and_decays_before_it_updates(
    polar: bool, make_run: Run
) -> None:
    names = "muon_row_norm", "muon_weight_decay", *["polar_express"] * polar
    run = make_run(names, **MODEL | settings_for(*names), MATRIX_LR=0.04)
    coefficients = 5 * [(3.4445, -4.775, 2.0315)]
    if polar:
        coefficients = script_module(run).POLAR_EXPRESS
    steps = take_three_steps(run)
    for name in "blocks.0.attn.c_q.weight", "blocks.1.attn.c_k.weight", "blocks.4.mlp.fc.weight":
        buffer = torch.zeros_like(steps[0][1][name])
        for share, gradients, before, after in steps:
            momentum = 1 - share / 2
            buffer = momentum * buffer + gradients[name]
            x = gradients[name] + momentum * buffer
            x = torch.stack([row / row.norm() for row in x])
            x = x.T / x.norm() if len(x) > x.size(1) else x / x.norm()
            for a, b, c in coefficients:
                x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
            rows, columns = before[name].shape
            x = math.sqrt(max(1, rows / columns)) * (x.T if rows > columns else x)
            wanted = (1 - 0.04 * share * 0.1) * before[name] - 0.04 * share * x
            torch.testing.assert_close(after[name], wanted, rtol=1e-4, atol=1e-5)


def test_polar_express_brings_singular_values_closer_to_one(script: Callable) -> None:
    module = script("polar_express")
    values = torch.logspace(-3, 0, 400, dtype=torch.float64)
    values /= values.norm()
    matrix = torch.diag(values).unsqueeze(0)
    for iterations, low, high in (
        (module.POLAR_EXPRESS, 0.859, 1.141),
        (5 * module.KELLER_JORDAN, 0.471, 1.202),
    ):
        found = module.newton_schulz(matrix, iterations, torch.float64)[0].diagonal()
        found = found[values > 1e-3]
        assert float(found.min()) == pytest.approx(low, abs=4e-3)
        assert float(found.max()) == pytest.approx(high, abs=4e-3)


def test_new_gates_and_lanes_begin_as_published_and_adam_trains_them(make_run: Run) -> None:
    names = "attn_gate", "two_lanes", "smear_gate"
    run = make_run(names, **MODEL | settings_for(*names))
    begins = {"lanes": [1.1, 1.0, 1.0, 1.1, 1.0, 1.0]}
    begins |= dict.fromkeys(("gate", "smear", "smear_scale"), 0.0)
    vectors = {id(p) for p in run.adam.param_groups[1]["params"]}
    found = [(n.split(".")[-1], p) for n, p in run.model.named_parameters()]
    found = [(kind, p) for kind, p in found if kind in begins]
    assert len(found) == 5 + 2 + 2 and all(id(p) in vectors for _, p in found)
    for kind, p in found:
        torch.testing.assert_close(p, torch.tensor(begins[kind]).expand(p.shape))


def test_adam_decays_each_kind_at_its_own_rate(make_run: Run) -> None:
    names = "adam_weight_decay", "skip_gates", "muon_weight_decay"  # the last must not change these
    settings = {"TIE_EMBEDDINGS": 0, "EMBED_LR": 0.02, "HEAD_LR": 0.01, "SCALAR_LR": 0.05}
    steps = take_three_steps(make_run(names, **MODEL | settings_for(*names) | settings))
    kinds = {
        "tok_emb.weight": (0.02, 0.3),
        "lm_head.weight": (0.01, 0.0),  # the record does not decay it either
        "skip_weights": (0.05, 0.1),
        "skip_gates": (0.05, 0.1),
        "blocks.0.attn.q_gain": (0.05, 0.2),
        "blocks.3.mlp_scale": (0.05, 0.2),
        "blocks.3.resid_mix": (0.05, 0.2),
    }
    for name, (rate, decay) in kinds.items():
        mean = square = 0
        for number, (share, gradients, before, after) in enumerate(steps, 1):
            mean = 0.9 * mean + 0.1 * gradients[name]
            square = 0.95 * square + 0.05 * gradients[name] ** 2
            root = (square / (1 - 0.95**number)).sqrt() + 1e-8
            update = mean / (1 - 0.9**number) / root
            wanted = (1 - share * rate * decay) * before[name] - share * rate * update
            torch.testing.assert_close(after[name], wanted, rtol=1e-4, atol=1e-5)


def test_learning_rates_decay_over_the_last_share_to_min_lr(script: Callable) -> None:
    module = script("warmdown_share")
    settings = {"WARMDOWN_SHARE": 0.6, "MIN_LR": 0.1, "ITERATIONS": 100}
    with_limit = make_config(module, **settings)
    without_limit = make_config(module, **settings, MAX_WALLCLOCK_SECONDS=0)
    by_step = partial(module.lr_multiplier, without_limit, elapsed_ms=0.0)
    by_time = partial(module.lr_multiplier, with_limit, 1)
    for share, wanted in (0, 1), (0.4, 1), (0.7, 0.5), (0.88, 0.2), (0.94, 0.1), (1, 0.1):
        assert by_step(step=round(100 * share)) == pytest.approx(wanted)
        assert by_time(elapsed_ms=600e3 * share) == pytest.approx(wanted)
    short = settings | {"MAX_WALLCLOCK_SECONDS": 0}
    _, _, faults, warnings = module.read_config([f"{n}={v}" for n, v in short.items()], {})
    assert faults == warnings == [], "WARMDOWN_ITERS has no effect, so there is no warning about it"


def test_loops_begin_at_their_share_and_the_warm_up_runs_both_graphs(make_run: Run) -> None:
    """The test counts how often a looped layer is visited in each pass through the model."""
    settings = settings_for("loop") | {
        "WARMUP_STEPS": 3,
        "VAL_LOSS_EVERY": 3,
        "GRAD_ACCUM_STEPS": 1,
    }
    run = make_run(("loop",), **MODEL | settings)
    passes: dict[str, list[int]] = {"train": [], "score": []}
    kind = {True: "train", False: "score"}
    run.model.tok_emb.register_forward_hook(lambda *_: passes[kind[run.model.training]].append(0))
    run.model.blocks[1].register_forward_hook(lambda *_: count(passes[kind[run.model.training]]))

    def count(visits: list[int]) -> None:
        visits[-1] += 1

    run.train()
    batches = run.validation.plan.num_batches
    assert passes["train"] == [1, 3, 3] + [1, 1, 1] + [3, 3, 3]  # the warm-up steps, then the run
    ahead = [3]  # one batch of validation is run before the start
    assert passes["score"] == ahead + 2 * batches * [1] + batches * [3]  # after 0, 3 and 6 steps
    assert run.log.lines.count("loop: from step 4 on: [0, 1, 2, 1, 2, 1, 2, 3, 4]") == 1


def test_the_artifact_is_scored_with_loops_whatever_training_did(make_run: Run) -> None:
    run = make_run(("loop",), **MODEL | settings_for("loop") | {"LOOP_FROM": 0.9, "ITERATIONS": 2})
    run.train()
    assert not run.model.looping
    run.export_and_score()
    assert run.model.looping


def test_loops_begin_by_elapsed_time_and_stay_on(make_run: Run) -> None:
    run = make_run(("loop",), **MODEL | settings_for("loop"), MAX_WALLCLOCK_SECONDS=10)
    for elapsed_ms, looping in (4900.0, False), (5000.0, True), (4900.0, True):
        run.reducer.elapsed_ms = lambda step, ms=elapsed_ms: ms
        run.begin_to_loop()
        assert run.model.looping == looping
