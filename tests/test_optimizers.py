"""Proves that the batched, flat optimizers compute plain per-parameter Muon and Adam, and roll back exactly."""

import copy
from collections.abc import Callable

import pytest
import torch
from conftest import SMALL_MODEL, config_of, train_gpt
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(60)

SHAPES = dict(
    NUM_LAYERS=3, MODEL_DIM=32, NUM_HEADS=4, NUM_KV_HEADS=2, VOCAB_SIZE=40, TRAIN_SEQ_LEN=8
)
DEFAULT_CONTROLS = "attn_scale,mlp_scale,resid_mix,q_gain,skip_weight"


def small_config(**more: object) -> train_gpt.Config:
    return config_of(
        **{**SMALL_MODEL, **SHAPES, "CONTROL_TENSOR_NAME_PATTERNS": DEFAULT_CONTROLS, **more}
    )


def small_model(config: train_gpt.Config) -> train_gpt.GPT:
    """A model none of whose parameters is constant, so that no update can hide."""
    torch.manual_seed(7)
    model = train_gpt.GPT(config, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    model.cast()
    return model


def random_gradients(model: train_gpt.GPT, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(p.shape, generator=generator) * 0.3
        for name, p in model.named_parameters()
    }


def take_step(
    model: train_gpt.GPT, optimizers: train_gpt.Optimizers, step: int, momentum: float = 0.9
) -> None:
    optimizers.reduced.zero_()
    for name, gradient in random_gradients(model, step).items():
        dict(model.named_parameters())[name].grad.copy_(gradient)
    optimizers.reduce(train_gpt.Runtime())
    optimizers.clip()
    optimizers.step(1.0, momentum)


# --- Newton-Schulz ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 32, 32), (3, 64, 16), (3, 16, 64)])
def test_batch_of_matrices_is_the_loop_bit_for_bit(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    batch = train_gpt.newton_schulz(matrices, 5, dtype)
    loop = torch.cat([train_gpt.newton_schulz(matrix[None], 5, dtype) for matrix in matrices])
    assert batch.shape == shape and batch.dtype == dtype
    assert torch.equal(batch, loop)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    iterations=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_newton_schulz_is_its_polynomial_on_the_singular_values(
    rows: int, cols: int, iterations: int, seed: int
) -> None:
    matrix = torch.randn(
        rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    ours = train_gpt.newton_schulz(matrix[None], iterations, torch.float64)[0]
    assert torch.allclose(ours, u @ torch.diag(s) @ vh, atol=1e-9)


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 0.0), (torch.bfloat16, 0.05)])
def test_five_iterations_bring_every_singular_value_near_one(
    dtype: torch.dtype, slack: float
) -> None:
    matrices = torch.randn(4, 24, 64, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(train_gpt.newton_schulz(matrices * 1e4, 5, dtype).float())
    assert 0.6 - slack < values.min() and values.max() < 1.3 + slack


# --- The step against a plain reference -------------------------------------------------------------------------------


class PlainOptimizers:
    """Muon one parameter at a time in its textbook form, torch's own Adam, torch's own gradient clipping."""

    def __init__(self, model: train_gpt.GPT, config: train_gpt.Config) -> None:
        self.model, self.config, self.momentum = model, config, {}
        controls, tied = config.control_tensor_name_patterns.split(","), config.tie_embeddings
        rates = {
            "tok_emb.weight": config.tied_embed_lr if tied else config.embed_lr,
            "lm_head.weight": config.head_lr,
        }
        self.matrices, groups = [], []
        for name, p in model.named_parameters():
            if (
                name.startswith("blocks.")
                and p.ndim == 2
                and not any(control in name for control in controls)
            ):
                self.matrices.append((name, p))
            else:
                groups.append({"params": [p], "lr": rates.get(name, config.scalar_lr)})
        self.rates = [group["lr"] for group in groups]
        self.adam = torch.optim.Adam(
            groups,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            foreach=False,
            fused=False,
        )

    @torch.no_grad()
    def step(self, lr_scale: float, momentum: float) -> None:
        if self.config.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip_norm)
        for name, p in self.matrices:
            buffer = self.momentum.setdefault(name, torch.zeros_like(p))
            buffer.copy_(momentum * buffer + p.grad)
            rows, cols = p.shape
            scale = max(1.0, rows / cols) ** 0.5
            p.sub_(
                self.config.matrix_lr
                * lr_scale
                * scale
                * self.orthogonal(p.grad + momentum * buffer)
            )
        for group, rate in zip(self.adam.param_groups, self.rates):
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
    "tied": dict(TIE_EMBEDDINGS=1),
    "untied": dict(TIE_EMBEDDINGS=0, EMBED_LR=0.03, HEAD_LR=0.002),
    "rates": dict(
        TIED_EMBED_LR=0.011, MATRIX_LR=0.023, SCALAR_LR=0.017, BETA1=0.8, BETA2=0.97, ADAM_EPS=1e-3
    ),
    "clipped": dict(GRAD_CLIP_NORM=0.5),
    "clip_out_of_reach": dict(GRAD_CLIP_NORM=1e6),
    "a_matrix_to_adam": dict(CONTROL_TENSOR_NAME_PATTERNS=DEFAULT_CONTROLS + ",c_k,mlp.fc"),
    "a_control_to_muon": dict(CONTROL_TENSOR_NAME_PATTERNS="q_gain"),
    "one_iteration": dict(MUON_BACKEND_STEPS=1),
    "one_layer": dict(NUM_LAYERS=1),
    "sizes_not_aligned": dict(
        MODEL_DIM=20, NUM_HEADS=2, NUM_KV_HEADS=1, VOCAB_SIZE=41, TIE_EMBEDDINGS=0
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_equal_a_plain_per_parameter_reference(variant: str) -> None:
    config = small_config(**VARIANTS[variant])
    model = small_model(config)
    plain = PlainOptimizers(copy.deepcopy(model), config)
    optimizers = train_gpt.Optimizers(model, config, tail=3)
    ours, theirs = dict(model.named_parameters()), dict(plain.model.named_parameters())
    for step, (lr_scale, momentum) in enumerate(
        [(1.0, 0.85), (1.0, 0.9), (0.5, 0.95), (0.0, 0.95), (0.25, 0.95)]
    ):
        before = {name: p.detach().clone() for name, p in ours.items()}
        optimizers.reduced.zero_()
        for name, gradient in random_gradients(model, step).items():
            if gradient.numel():
                ours[name].grad.copy_(gradient)
            theirs[name].grad = gradient.clone()
        optimizers.reduce(train_gpt.Runtime())
        optimizers.clip()
        optimizers.step(lr_scale, momentum)
        plain.step(lr_scale, momentum)
        for name in ours:
            assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6), (step, name)
            moved = not torch.equal(ours[name], before[name])
            assert moved == (lr_scale > 0 and ours[name].numel() > 0), (step, name)


def test_clipping_bounds_the_norm_of_the_whole_gradient() -> None:
    config = small_config(GRAD_CLIP_NORM=0.5)
    model = small_model(config)
    optimizers = train_gpt.Optimizers(model, config, tail=1)
    take_step(model, optimizers, 0)
    whole = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert whole == pytest.approx(0.5, rel=1e-4)


# --- Flat parameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["untied", "sizes_not_aligned"])
def test_every_parameter_and_gradient_is_a_view_of_one_vector(variant: str) -> None:
    config = small_config(**VARIANTS[variant])
    model = small_model(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = train_gpt.Optimizers(model, config, tail=5)
    assert optimizers.values.dtype == optimizers.reduced.dtype == torch.float32
    seen: set[int] = set()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
        assert p.untyped_storage().data_ptr() == optimizers.values.untyped_storage().data_ptr(), (
            name
        )
        assert (
            p.grad.untyped_storage().data_ptr() == optimizers.reduced.untyped_storage().data_ptr()
        ), name
        assert p.storage_offset() == p.grad.storage_offset() and p.is_contiguous(), name
        places = set(range(p.storage_offset(), p.storage_offset() + p.numel()))
        assert not places & seen, name
        seen |= places
    assert len(seen) == sum(p.numel() for p in model.parameters())
    if variant != "sizes_not_aligned":  # sizes of 64 and its multiples leave every group aligned
        assert all(
            values.storage_offset() % 64 == 0 for values, *_ in [*optimizers.banks, optimizers.adam]
        )
    optimizers.values.fill_(3.0)
    optimizers.grads.fill_(4.0)
    assert all((p == 3.0).all() and (p.grad == 4.0).all() for p in model.parameters())


def test_tail_travels_with_the_gradients_and_is_none_of_them() -> None:
    config = small_config()
    optimizers = train_gpt.Optimizers(small_model(config), config, tail=5)
    assert optimizers.tail.shape == (5,)
    assert len(optimizers.reduced) == len(optimizers.grads) + 5 == len(optimizers.values) + 5
    optimizers.tail.fill_(2.0)
    assert optimizers.grads.abs().sum() == 0 and optimizers.reduced.sum() == 10.0


def test_gradients_of_two_backwards_add_up_in_place() -> None:
    config = small_config(TIE_EMBEDDINGS=0)
    model = small_model(config)
    plain = copy.deepcopy(model)
    optimizers = train_gpt.Optimizers(model, config, tail=2)
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        x, y = (
            torch.randint(0, config.vocab_size, (2, config.train_seq_len), generator=generator)
            for _ in "xy"
        )
        model(x, y).backward()
        plain(x, y).backward()
    assert [p.grad.data_ptr() for p in model.parameters()] == addresses
    assert optimizers.grads.abs().sum() > 0
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7), name


# --- Rolling back -----------------------------------------------------------------------------------------------------


def test_restore_brings_back_every_bit_of_weights_and_states() -> None:
    config = small_config(TIE_EMBEDDINGS=0)
    model = small_model(config)
    optimizers = train_gpt.Optimizers(model, config, tail=1)
    for step in range(3):
        take_step(model, optimizers, step)
    at_snapshot, saved = optimizers.values.clone(), optimizers.snapshot()
    trajectories = []
    for _ in range(3):
        optimizers.restore(saved)
        assert torch.equal(optimizers.values, at_snapshot)
        for step in range(3, 6):
            take_step(model, optimizers, step)
        trajectories.append(optimizers.values.clone())
    assert not torch.equal(trajectories[0], at_snapshot)
    assert torch.equal(trajectories[0], trajectories[1]) and torch.equal(
        trajectories[0], trajectories[2]
    )


def test_restoring_a_fresh_state_leaves_no_trace_of_priming_steps() -> None:
    config = small_config()
    primed, fresh = small_model(config), small_model(config)
    primed_optimizers, fresh_optimizers = (
        train_gpt.Optimizers(m, config, tail=1) for m in (primed, fresh)
    )
    saved = primed_optimizers.snapshot()
    for step in range(10, 14):
        take_step(primed, primed_optimizers, step, momentum=0.5)
    primed_optimizers.restore(saved)
    for step in range(3):
        take_step(primed, primed_optimizers, step)
        take_step(fresh, fresh_optimizers, step)
        assert torch.equal(primed_optimizers.values, fresh_optimizers.values), step


# --- Schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "step", "elapsed_ms", "expected"),
    [
        # No cap: over the last WARMDOWN_ITERS steps, whatever the clock says.
        (dict(MAX_WALLCLOCK_SECONDS=0, ITERATIONS=100, WARMDOWN_ITERS=20), 0, 0.0, 1.0),
        (dict(MAX_WALLCLOCK_SECONDS=0, ITERATIONS=100, WARMDOWN_ITERS=20), 80, 1e9, 1.0),
        (dict(MAX_WALLCLOCK_SECONDS=0, ITERATIONS=100, WARMDOWN_ITERS=20), 81, 0.0, 19 / 20),
        (dict(MAX_WALLCLOCK_SECONDS=0, ITERATIONS=100, WARMDOWN_ITERS=20), 99, 0.0, 1 / 20),
        (dict(MAX_WALLCLOCK_SECONDS=-1, ITERATIONS=100, WARMDOWN_ITERS=20), 90, 1e9, 0.5),
        (dict(MAX_WALLCLOCK_SECONDS=0, ITERATIONS=100, WARMDOWN_ITERS=0), 99, 0.0, 1.0),
        (dict(MAX_WALLCLOCK_SECONDS=0, ITERATIONS=10, WARMDOWN_ITERS=20), 0, 0.0, 0.5),
        # A cap of 60 s: remaining time over (WARMDOWN_ITERS x mean step time so far), where that is below 1.
        (dict(MAX_WALLCLOCK_SECONDS=60, ITERATIONS=100, WARMDOWN_ITERS=20), 0, 0.0, 1.0),
        (dict(MAX_WALLCLOCK_SECONDS=60, ITERATIONS=100, WARMDOWN_ITERS=20), 10, 10_000.0, 1.0),
        (dict(MAX_WALLCLOCK_SECONDS=60, ITERATIONS=100, WARMDOWN_ITERS=20), 40, 40_000.0, 1.0),
        (dict(MAX_WALLCLOCK_SECONDS=60, ITERATIONS=100, WARMDOWN_ITERS=20), 50, 50_000.0, 0.5),
        (dict(MAX_WALLCLOCK_SECONDS=60, ITERATIONS=100, WARMDOWN_ITERS=20), 25, 50_000.0, 0.25),
        (
            dict(MAX_WALLCLOCK_SECONDS=60, ITERATIONS=100, WARMDOWN_ITERS=20),
            99,
            59_000.0,
            1_000 / (20 * 59_000 / 99),
        ),
        (dict(MAX_WALLCLOCK_SECONDS=60, ITERATIONS=100, WARMDOWN_ITERS=20), 60, 60_000.0, 0.0),
        (dict(MAX_WALLCLOCK_SECONDS=60, ITERATIONS=100, WARMDOWN_ITERS=20), 60, 75_000.0, 0.0),
        (dict(MAX_WALLCLOCK_SECONDS=60, ITERATIONS=100, WARMDOWN_ITERS=0), 60, 59_999.0, 1.0),
    ],
)
def test_learning_rate_falls_over_the_warmdown_only(
    changes: dict, step: int, elapsed_ms: float, expected: float
) -> None:
    assert train_gpt.lr_multiplier(small_config(**changes), step, elapsed_ms) == pytest.approx(
        expected, abs=1e-12
    )


@settings(deadline=None)
@given(
    cap=st.sampled_from([0, 60]),
    warmdown=st.integers(0, 200),
    iterations=st.integers(1, 100),
    data=st.data(),
)
def test_learning_rate_factor_stays_between_zero_and_one(
    cap: int, warmdown: int, iterations: int, data: st.DataObject
) -> None:
    config = small_config(MAX_WALLCLOCK_SECONDS=cap, WARMDOWN_ITERS=warmdown, ITERATIONS=iterations)
    step, elapsed_ms = data.draw(st.integers(0, iterations - 1)), data.draw(st.floats(0, 2e5))
    assert 0.0 <= train_gpt.lr_multiplier(config, step, elapsed_ms) <= 1.0


@pytest.mark.parametrize(
    ("warmup", "step", "expected"),
    [
        (500, 0, 0.85),
        (500, 250, 0.90),
        (500, 499, 0.85 + 0.1 * 499 / 500),
        (500, 500, 0.95),
        (500, 10_000, 0.95),
        (1, 0, 0.85),
        (1, 1, 0.95),
        (0, 0, 0.95),
        (0, 1, 0.95),
        (0, 10_000, 0.95),
    ],
)
def test_momentum_ramps_from_its_start_to_its_end(warmup: int, step: int, expected: float) -> None:
    config = small_config(
        MUON_MOMENTUM=0.95, MUON_MOMENTUM_WARMUP_START=0.85, MUON_MOMENTUM_WARMUP_STEPS=warmup
    )
    assert train_gpt.muon_momentum(config, step) == pytest.approx(expected, abs=1e-12)


# --- Reductions under updates -----------------------------------------------------------------------------------------


class Ordered(train_gpt.Runtime):
    """Notes where each reduction begins and where it is awaited."""

    def begin(self, call: object, part: torch.Tensor) -> Callable[[], None]:
        self.noted.append(("begun", len(part)))
        return lambda: self.noted.append(("awaited", len(part)))


@pytest.mark.parametrize(
    ("env", "at_once"),
    [({}, 1), ({"GRAD_CLIP_NORM": 1}, None), ({"TRAINING_TIMING_BREAKDOWN": 1}, None)],
)
def test_a_bank_is_awaited_behind_the_update_before_it(env: dict, at_once: int | None) -> None:
    config = small_config(**env)
    optimizers, runtime = train_gpt.Optimizers(small_model(config), config, tail=3), Ordered()
    noted = runtime.noted = []
    for name in ("update_adam", "update_muon", "cast"):
        monitored = getattr(optimizers, name)
        setattr(
            optimizers,
            name,
            lambda *args, name=name, run=monitored: (noted.append((name,)), run(*args)),
        )
    optimizers.reduce(runtime)
    parts = optimizers.buckets
    assert sum(part.numel() for part in parts) == len(
        optimizers.reduced
    )  # each element is reduced once
    for part in parts:
        part.add_(1)
    assert (optimizers.reduced == 1).all()
    assert (
        parts[0][-3:].data_ptr() == optimizers.tail.data_ptr()
    )  # what decides the step comes first
    begun, awaited = (
        [("begun", len(part)) for part in parts],
        [("awaited", len(part)) for part in parts],
    )
    assert noted == begun + awaited[:at_once]
    noted.clear()
    optimizers.step(1.0, 0.9)
    under = [event for wait in awaited[1:] for event in (wait, ("update_muon",))]
    assert len(under) >= 6 and noted == [("update_adam",), *under, ("cast",)]


def test_no_state_takes_what_is_not_finite() -> None:
    config = small_config()
    model = small_model(config)
    optimizers = train_gpt.Optimizers(model, config, tail=1)
    take_step(model, optimizers, 0)
    before = optimizers.snapshot()
    optimizers.grads.fill_(float("nan"))
    optimizers.halted.fill_(True)
    optimizers.reduce(train_gpt.Runtime())
    optimizers.step(1.0, 0.9)
    assert all(torch.equal(a, b) for a, b in zip(optimizers.tensors(), before, strict=True))
