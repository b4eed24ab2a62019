"""Recipes of the records of April 2026: each against a plain reference, and all of them together.

The references are written from what the records of 2026-04-05 and 2026-04-09 do, in words.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import verify
from tiny import config_of
from torch import Tensor, nn

pytestmark = pytest.mark.timeout(300)
ON = {
    "orthogonal_init": {"ORTHOGONAL_INIT": 1},
    "layer_scale": {"LAYER_SCALE": 1},
    "parallel_residuals": {"PARALLEL_START": 3},
    "skip_gates": {"SKIP_GATES": 1},
    "loop": {"LOOP_START": 1, "LOOP_END": 2, "LOOP_COUNT": 2, "LOOP_FROM": 0.5},
    "xsa": {"XSA_LAST_N": 5},
    "partial_rope": {"ROPE_DIMS": 4},
    "leaky_relu2": {"LEAKY_SLOPE": 0.5},
    "muon_row_norm": {"MUON_ROW_NORM": 1},
    "muon_weight_decay": {"MUON_WD": 0.1},
    "adam_weight_decay": {"EMBED_WD": 0.3, "SCALAR_WD": 0.2, "SKIP_WD": 0.1},
    "warmdown_share": {"WARMDOWN_SHARE": 0.6, "MIN_LR": 0.1},
    "ema": {"EMA_DECAY": 0.8},
    "shuffled_order": {"SHUFFLE_SPANS": 1},
    "sliding_window": {"EVAL_STRIDE": 8},
}
OURS = [
    "layer_scale", "skip_gates", "orthogonal_init", "loop", "parallel_residuals", "muon_row_norm",
    "adam_weight_decay", "warmdown_share",
]  # fmt: skip
MODEL = {"NUM_LAYERS": 5, "NUM_HEADS": 4, "NUM_KV_HEADS": 2}
Run = Callable[..., Any]


def settings_of(*names: str) -> dict[str, Any]:
    return {setting: value for name in names for setting, value in ON[name].items()}


def with_random_weights(run: Any) -> nn.Module:
    """The run's model, of which every part has an effect."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in run.model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=random))
    return run.model


# --- The model --------------------------------------------------------------------------------


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def rotated(x: Tensor, dims: int) -> Tensor:
    """Position t turns the channels i and i + dims / 2 by -t / 10000^(2 i / dims)."""
    y = x.clone()
    for t in range(len(x)):
        for i in range(dims // 2):
            angle = -t / 10_000 ** (2 * i / dims)
            a, b = x[t, i], x[t, i + dims // 2]
            y[t, i] = a * math.cos(angle) - b * math.sin(angle)
            y[t, i + dims // 2] = a * math.sin(angle) + b * math.cos(angle)
    return y


class Reference:
    """The logits of one row of tokens in float64, head by head and visit by visit."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.p = {name: t.double() for name, t in model.state_dict().items()}
        self.config = config

    def on(self, setting: str, default: Any = 0) -> Any:
        return getattr(self.config, setting, default)

    def attention(self, x: Tensor, layer: str, xsa: bool) -> Tensor:
        heads = []
        width = x.size(1) // self.config.num_heads
        q, k, v = (x @ self.p[f"{layer}.attn.c_{each}.weight"].T for each in "qkv")
        for head in range(self.config.num_heads):
            mine = slice(width * head, width * (head + 1))
            shared = head * self.config.num_kv_heads // self.config.num_heads
            its = slice(width * shared, width * (shared + 1))
            dims = self.on("rope_dims") or width
            gain = self.p[f"{layer}.attn.q_gain"][head]
            scores = gain * rotated(norm(q[:, mine]), dims) @ rotated(norm(k[:, its]), dims).T
            later = torch.ones_like(scores).triu(1).bool()
            y = (scores / math.sqrt(width)).masked_fill(later, -math.inf).softmax(-1) @ v[:, its]
            if xsa:
                own = v[:, its] / v[:, its].norm(dim=-1, keepdim=True)
                y = y - (y * own).sum(-1, keepdim=True) * own
            heads.append(y)
        out = torch.cat(heads, dim=1) @ self.p[f"{layer}.attn.proj.weight"].T
        return self.p[f"{layer}.attn_scale"] * out

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        inner = x @ self.p[f"{layer}.mlp.fc.weight"].T
        inner = torch.where(inner > 0, inner, self.on("leaky_slope") * inner).square()
        return self.p[f"{layer}.mlp_scale"] * (inner @ self.p[f"{layer}.mlp.proj.weight"].T)

    def block(self, number: int, x: Tensor, x0: Tensor) -> Tensor:
        layer = f"blocks.{number}"
        scale = 1 / math.sqrt(number + 1) if self.on("layer_scale") else 1
        xsa = number >= self.config.num_layers - self.on("xsa_last_n")
        mix = self.p[f"{layer}.resid_mix"]
        x = mix[0] * x + mix[1] * x0
        y = x + self.attention(scale * norm(x), layer, xsa)
        parallel = 0 <= self.on("parallel_start", -1) <= number
        return y + self.mlp(scale * norm(x if parallel else y), layer)

    def logits(self, tokens: Tensor, looping: bool) -> Tensor:
        order = list(range(self.config.num_layers))
        if looping:
            first, last = self.config.loop_start, self.config.loop_end
            again = self.config.loop_count * list(range(first, last + 1))
            order = order[: last + 1] + again + order[last + 1 :]
        x = x0 = norm(self.p["tok_emb.weight"][tokens])
        half = len(order) // 2
        skips = []
        for number in order[:half]:
            x = self.block(number, x, x0)
            skips.append(x)
        for row, number in enumerate(order[half:]):
            if skips:
                skip = self.p["skip_weights"][row] * skips.pop()
                gate = None
                if self.on("skip_gates"):
                    gate = 1 / (1 + (-self.p["skip_gates"][row]).exp())
                x = x + skip if gate is None else gate * x + (1 - gate) * skip
            x = self.block(number, x, x0)
        return 30 * torch.tanh(self.head(norm(x)) / 30)

    def head(self, x: Tensor) -> Tensor:
        return x @ self.p["tok_emb.weight"].T


MODELS = ["layer_scale", "parallel_residuals", "skip_gates", "loop"]
ALL_MODELS = [*MODELS, "xsa", "partial_rope", "leaky_relu2"]


@pytest.mark.parametrize("names", [*([name] for name in MODELS), ALL_MODELS], ids=" ".join)
def test_logits_are_those_of_the_reference(names: list[str], run_of: Run) -> None:
    run = run_of(tuple(names), **MODEL | settings_of(*names))
    model = with_random_weights(run)
    tokens = torch.randint(260, (32,), generator=torch.Generator().manual_seed(2))
    for looping in (False, True) if "loop" in names else (False,):
        model.looping = looping
        with torch.no_grad():
            logits = model.logits(tokens[None])[0].double()
        wanted = Reference(model, run.config).logits(tokens, looping)
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_visits_and_skip_rows_are_those_of_the_records(run_of: Run) -> None:
    settings = {"NUM_LAYERS": 11, "LOOP_COUNT": 2, "LOOP_END": 5}
    for start, encoder, decoder in (
        (3, [0, 1, 2, 3, 4, 5, 3, 4], [5, 3, 4, 5, 6, 7, 8, 9, 10]),
        (4, [0, 1, 2, 3, 4, 5, 4], [5, 4, 5, 6, 7, 8, 9, 10]),
    ):
        model = run_of(("loop",), **settings, LOOP_START=start).model
        assert model.visits == encoder + decoder
        assert len(model.skip_weights) == len(encoder)


@pytest.mark.parametrize(("start", "end"), [(3, 11), (6, 5)])
def test_layers_that_cannot_loop_are_a_wrong_setting(start: int, end: int, run_of: Run) -> None:
    run = run_of(("loop",), NUM_LAYERS=11)
    config = replace(run.config, loop_start=start, loop_end=end, loop_count=1)
    faults, _ = sys.modules[type(run).__module__].find_faults(config, {})
    assert faults == [f"LOOP_END={end}: set {start} to 10, or another LOOP_START"]


def test_skip_rows_that_are_not_used_yet_have_no_gradient(run_of: Run) -> None:
    names = "loop", "skip_gates"
    model = with_random_weights(run_of(names, **MODEL | settings_of(*names)))
    tokens = torch.arange(33)[None]
    for model.looping, used in (False, 2), (True, 4):  # 5 layers, then 9 visits
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        for rows in model.skip_weights, model.skip_gates:
            assert rows.grad.abs().sum(1).bool().tolist() == [row < used for row in range(4)]


def test_initial_matrices_are_orthogonal_in_the_order_of_draws(run_of: Run) -> None:
    """Drawn here one after the other: the construction, which is thrown away, then the rest."""
    # Keys and values have 32 rows: they stay as they are drawn.
    settings = {"NUM_LAYERS": 2, "MODEL_DIM": 64, "ORTHOGONAL_INIT": 1}
    model = run_of(("orthogonal_init",), **settings, SEED=7).model
    torch.manual_seed(7)
    embedding = nn.Embedding(260, 64).weight
    shapes = {
        "attn.c_q": (64, 64), "attn.c_k": (64, 32), "attn.c_v": (64, 32), "attn.proj": (64, 64),
        "mlp.fc": (64, 128), "mlp.proj": (128, 64),
    }  # fmt: skip
    wanted = {
        f"blocks.{block}.{name}": nn.Linear(*shape, bias=False).weight
        for block in range(2)
        for name, shape in shapes.items()
    }
    nn.init.normal_(embedding, std=0.005)
    for name, weight in wanted.items():
        if name.endswith("proj"):
            nn.init.zeros_(weight)
        elif min(weight.shape) >= 64:
            nn.init.orthogonal_(weight)
    for name, weight in {**wanted, "tok_emb": embedding}.items():
        assert torch.equal(model.state_dict()[f"{name}.weight"], weight.bfloat16().float()), name
    matrix = model.blocks[1].mlp.fc.weight
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(64), rtol=0, atol=0.02)


# --- The optimizers ---------------------------------------------------------------------------


def three_steps(run: Any) -> list[tuple]:
    """From random gradients, with rates and momentum that change: for each step the factor of the
    rates, the gradients, and the weights before and after it, by name."""
    model = with_random_weights(run)
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


def test_muon_divides_rows_by_their_norm_and_decays_before_it_updates(run_of: Run) -> None:
    names = "muon_row_norm", "muon_weight_decay"
    steps = three_steps(run_of(names, **MODEL | settings_of(*names), MATRIX_LR=0.04))
    for name in "blocks.0.attn.c_q.weight", "blocks.1.attn.c_k.weight", "blocks.4.mlp.fc.weight":
        buffer = torch.zeros_like(steps[0][1][name])
        for share, gradients, before, after in steps:
            momentum = 1 - share / 2
            buffer = momentum * buffer + gradients[name]
            x = gradients[name] + momentum * buffer
            x = torch.stack([row / row.norm() for row in x])
            x = x.T / x.norm() if len(x) > x.size(1) else x / x.norm()
            for _ in range(5):
                x = 3.4445 * x - 4.775 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
            rows, columns = before[name].shape
            x = math.sqrt(max(1, rows / columns)) * (x.T if rows > columns else x)
            wanted = (1 - 0.04 * share * 0.1) * before[name] - 0.04 * share * x
            torch.testing.assert_close(after[name], wanted, rtol=1e-4, atol=1e-5)


def test_adam_decays_each_kind_at_its_own_rate(run_of: Run) -> None:
    names = "adam_weight_decay", "skip_gates"
    settings = {"TIE_EMBEDDINGS": 0, "EMBED_LR": 0.02, "HEAD_LR": 0.01, "SCALAR_LR": 0.05}
    steps = three_steps(run_of(names, **MODEL | settings_of(*names) | settings))
    kinds = {
        "tok_emb.weight": (0.02, 0.3),
        "lm_head.weight": (0.01, 0.0),  # as the record's
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


def test_rates_fall_over_the_last_share_to_the_floor(script: Callable) -> None:
    module = script("warmdown_share")
    settings = {"WARMDOWN_SHARE": 0.6, "MIN_LR": 0.1, "ITERATIONS": 100}
    capped = config_of(module, **settings)
    uncapped = config_of(module, **settings, MAX_WALLCLOCK_SECONDS=0)
    by_step = partial(module.lr_multiplier, uncapped, elapsed_ms=0.0)
    by_clock = partial(module.lr_multiplier, capped, 1)
    for share, wanted in (0, 1), (0.4, 1), (0.7, 0.5), (0.88, 0.2), (0.94, 0.1), (1, 0.1):
        assert by_step(step=round(100 * share)) == pytest.approx(wanted)
        assert by_clock(elapsed_ms=600e3 * share) == pytest.approx(wanted)


# --- Whole runs -------------------------------------------------------------------------------


def results(run: Any) -> tuple[list, list, bytes]:
    """Losses, score and artifact."""
    run.train()
    run.export_and_score()
    losses = [event["train_loss"] for event in run.log.events if event["event"] == "step"]
    scores = [event["val_bpb"] for event in run.log.events if event["event"] == "score"]
    assert losses and scores
    return losses, scores, Path("final_model.int8.ptz").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_off_it_is_the_root_to_the_digit(name: str, run_of: Run) -> None:
    settings = {"WARMDOWN_ITERS": 2, "WARMUP_STEPS": 2}
    assert results(run_of((name,), **settings)) == results(run_of(**settings))


def test_the_loop_begins_at_its_share_with_both_graphs_primed(run_of: Run) -> None:
    """Counted are the visits of a layer that loops, in each pass through the model."""
    settings = settings_of("loop") | {"WARMUP_STEPS": 3, "VAL_LOSS_EVERY": 3, "GRAD_ACCUM_STEPS": 1}
    run = run_of(("loop",), **MODEL | settings)
    passes: dict[str, list[int]] = {"train": [], "score": []}
    kind = {True: "train", False: "score"}
    run.model.tok_emb.register_forward_hook(lambda *_: passes[kind[run.model.training]].append(0))
    run.model.blocks[1].register_forward_hook(lambda *_: count(passes[kind[run.model.training]]))

    def count(visits: list[int]) -> None:
        visits[-1] += 1

    run.train()
    batches = run.validation.plan.num_batches
    assert passes["train"] == [1, 3, 3] + [1, 1, 1] + [3, 3, 3]  # priming, then the run
    assert passes["score"] == 2 * batches * [1] + batches * [3]  # after 0, 3 and 6 steps
    assert run.log.lines.count("loop: from step 4 on: [0, 1, 2, 1, 2, 1, 2, 3, 4]") == 1


def test_the_artifact_is_scored_with_loops_whatever_training_did(run_of: Run) -> None:
    run = run_of(("loop",), **MODEL | settings_of("loop") | {"LOOP_FROM": 0.9, "ITERATIONS": 2})
    run.train()
    assert not run.model.looping
    run.export_and_score()
    assert run.model.looping


def test_the_loop_begins_by_the_clock_and_stays(run_of: Run) -> None:
    run = run_of(("loop",), **MODEL | settings_of("loop"), MAX_WALLCLOCK_SECONDS=10)
    for elapsed_ms, looping in (4900.0, False), (5000.0, True), (4900.0, True):
        run.exchange.elapsed_ms = lambda step, ms=elapsed_ms: ms
        run.begin_to_loop()
        assert run.model.looping == looping


TINY = {"MODEL_DIM": 64, "LOOP_END": 1, "PARALLEL_START": 2}  # verify.py has three layers


@pytest.mark.slow
@pytest.mark.parametrize("names", [*([name] for name in OURS), list(ON)], ids=" ".join)
def test_verify_finds_no_fault(names: list[str], script: Callable) -> None:
    """Also on two ranks, and resumed to the bit from before and after the loop's begin."""
    wanted = settings_of(*names)
    wanted = {"MODEL_DIM": 64} | wanted | {n: v for n, v in TINY.items() if n in wanted}
    whole = len(names) > 1
    file = script(*names).__file__
    found = list(verify.verdicts(file, wanted, quick=not whole, score_differs=whole))
    assert {name for name, _, _ in found} >= {"resume", "ranks", "replicas", "trained"}
    assert [(name, text) for name, kind, text in found if kind == "FAULT"] == []
