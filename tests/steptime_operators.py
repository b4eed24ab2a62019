"""The recipes qkv_operator and mlp_operator: their values and gradients are the eager lines'.

Without a GPU they run in Triton's interpreter, which Triton takes into use for a whole process:
test_recipes_steptime.py starts this file with TRITON_INTERPRET=1. With one they run on it:

    python3 -m pytest tests/steptime_operators.py
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steptime import OPERATORS, SMALL, config_of, load, open_log
from torch.library import opcheck

script = load(*OPERATORS, "leaky_relu2")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NEAR = 5e-6 if INTERPRETED else 2e-5  # of the largest number; a GPU adds up in another order
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs CUDA or TRITON_INTERPRET=1"
    ),
]
Tensors = list[torch.Tensor]


def draw(
    *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed + sum(shape))
    numbers = torch.randn(shape, generator=random) * scale
    return numbers.to(DEVICE, dtype).requires_grad_()


def with_gradients(inputs: Tensors, outputs: Any, permuted: bool = False) -> Tensors:
    """The outputs and the gradients of `inputs`; permuted: of gradients in another memory order."""
    outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
    incoming = [draw(*t.shape, seed=7 + i).detach().to(t.dtype) for i, t in enumerate(outputs)]
    if permuted:
        incoming = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in incoming]
        assert not any(t.is_contiguous() for t in incoming)
    return [*outputs, *torch.autograd.grad(outputs, inputs, incoming)]


def assert_near(found: Tensors, wanted: Tensors) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        off = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert off <= NEAR, f"{tuple(b.shape)} is off by {off:.2g}"


def assert_no_farther(found: Tensors, eager: Tensors, exact: Tensors) -> None:
    """Rounded once, at the end: about as near to float32's values as the eager form, or nearer."""
    for a, b, c in zip(found, eager, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a - c).norm() <= 1.1 * (b - c).norm() + 1e-3 * c.norm()


def heads_eager(
    x: torch.Tensor, weights: Tensors, gain: torch.Tensor, rotary: tuple[torch.Tensor, ...]
) -> Tensors:
    """What Attention does with x, in the script's own words."""
    cos, sin = (t.to(x.dtype) for t in rotary)
    q, k, v = (F.linear(x, weight).unflatten(-1, (-1, 2 * cos.size(-1))) for weight in weights)
    q = script.rotate(script.rms_norm(q), cos, sin) * gain.to(q.dtype)[:, None]
    return [q, script.rotate(script.rms_norm(k), cos, sin), v]


def mlp_eager(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.relu(F.linear(x, up)).square(), down)


# Heads: batch, tokens, heads of queries, heads of keys, channels of a head.


def heads_of(
    form: Callable,
    sizes: tuple[int, ...],
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    gain: torch.Tensor | None = None,
    permuted: bool = False,
) -> Tensors:
    B, T, q_heads, kv_heads, head_dim = sizes
    x, angle = draw(B, T, 40, scale=scale, dtype=dtype), draw(T, 1, head_dim // 2).detach()
    weights = [
        draw(heads * head_dim, 40, seed=i, scale=0.2, dtype=dtype)
        for i, heads in enumerate((q_heads, kv_heads, kv_heads))
    ]
    gain = draw(q_heads) if gain is None else gain
    outputs = form(x, weights, gain, (angle.cos(), angle.sin()))
    return with_gradients([x, *weights, gain], outputs, permuted)


def both_heads(sizes: tuple[int, ...], **how: Any) -> tuple[Tensors, Tensors]:
    found, wanted = (heads_of(form, sizes, **how) for form in (script.heads_operator, heads_eager))
    return found, wanted


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 13, 4, 2, 32),
        (3, 5, 2, 1, 64),
        (2, 7, 3, 1, 20),
        (1, 1, 1, 1, 2),
        (1, 8, 4, 4, 16),
        (2, 16, 6, 2, 24),
    ],
    ids=str,
)
def test_heads_are_the_eager_ones(sizes: tuple[int, ...]) -> None:
    assert_near(*both_heads(sizes))


def test_heads_of_small_numbers_have_the_same_epsilon() -> None:
    assert_near(*both_heads((2, 5, 2, 1, 16), scale=3e-4))  # their mean square is about epsilon


def test_heads_take_gradients_in_any_memory_order_and_gains_of_zero() -> None:
    gain = torch.tensor([0.0, -2.0, 1.5], device=DEVICE, requires_grad=True)
    found, wanted = both_heads((2, 9, 3, 1, 16), gain=gain, permuted=True)
    assert_near(found, wanted)
    assert found[0][:, :, 0].abs().max() == 0 and found[-1][0] != 0


def test_heads_in_bfloat16() -> None:
    found, eager = both_heads((2, 13, 4, 2, 32), dtype=torch.bfloat16)
    assert_no_farther(found, eager, heads_of(heads_eager, (2, 13, 4, 2, 32)))


# The MLP: rows (one size or two), channels, hidden channels.


def mlp_of(
    form: Callable,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    permuted: bool = False,
) -> Tensors:
    *rows, D, hidden = sizes
    x, up = draw(*rows, D, dtype=dtype), draw(hidden, D, scale=D**-0.5, dtype=dtype)
    down = draw(D, hidden, scale=D**-0.5, dtype=dtype)
    return with_gradients([x, up, down], form(x, up, down), permuted)


def both_mlps(sizes: tuple[int, ...], **how: Any) -> tuple[Tensors, Tensors]:
    found, wanted = (mlp_of(form, sizes, **how) for form in (script.mlp_operator, mlp_eager))
    return found, wanted


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 3, 5),
        (2, 33, 40, 72),
        (70, 24, 33),
        (2, 32, 32, 64),
        (3, 11, 65, 31),
    ],
    ids=str,
)
def test_the_mlp_is_the_eager_one(sizes: tuple[int, ...]) -> None:
    assert_near(*both_mlps(sizes))


def test_the_mlp_takes_gradients_and_weights_in_any_memory_order() -> None:
    assert_near(*both_mlps((2, 33, 40, 72), permuted=True))
    inputs = [draw(5, 24), draw(24, 40).t(), draw(40, 24).t()]
    assert not inputs[1].is_contiguous() and not inputs[2].is_contiguous()
    found, wanted = (
        with_gradients(inputs, form(*inputs)) for form in (script.mlp_operator, mlp_eager)
    )
    assert_near(found, wanted)


def test_the_mlp_in_half_precision() -> None:
    """float16: the interpreter multiplies no matrices of bfloat16."""
    found, eager = both_mlps((2, 33, 40, 72), dtype=torch.float16)
    assert_no_farther(found, eager, mlp_of(mlp_eager, (2, 33, 40, 72)))


def test_the_mlp_keeps_what_is_not_a_number() -> None:
    x, up = torch.ones(3, 8, device=DEVICE), torch.ones(16, 8, device=DEVICE)
    x[1, 2] = float("nan")
    _, a = script.mlp(x, up, torch.ones(8, 16, device=DEVICE))
    assert a[1].isnan().all() and not a[[0, 2]].isnan().any()


def test_operators_are_registered_as_torch_wants_them() -> None:
    operators = torch.ops.recipes
    packed, gain = draw(2, 9, 7 * 16), draw(3)
    cos, sin = draw(9, 1, 8).detach(), draw(9, 1, 8, seed=1).detach()
    opcheck(operators.heads.default, (packed, gain, cos, sin, 2))
    plain = packed.detach(), gain.detach(), cos, sin
    grads = [torch.ones_like(t) for t in script.heads(*plain, 2)]
    opcheck(operators.heads_gradient.default, (grads, *plain))
    inputs = draw(2, 5, 24), draw(40, 24), draw(24, 40)
    opcheck(operators.mlp.default, inputs)
    y, a = operators.mlp(*inputs)
    assert y.requires_grad and not a.requires_grad
    opcheck(operators.mlp_gradient.default, (y.detach(), inputs[2].detach(), a))


# The whole model.


def make_model(**settings: Any) -> tuple[torch.nn.Module, Any]:
    """A GPT whose weights are all random: those that begin at zero hide attention and MLP."""
    config, log = config_of(script, **SMALL, **settings), open_log(script)
    torch.manual_seed(3)
    model = script.GPT(config, torch.float32).to(DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * draw(*p.shape)
    runtime = script.Runtime(config, {})
    runtime.device = torch.device(DEVICE)
    if DEVICE == "cuda":  # so that the trial is of the dtype of runs; the model here is in float32
        runtime.dtype = torch.bfloat16
    script.use_operators(model, config, runtime, log)
    return model, log


def loss_and_gradients(model: torch.nn.Module, run: Callable | None = None) -> Tensors:
    ids = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    loss = (model if run is None else run)(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


GRADIENTS = {"qkv_operator": "heads_gradient", "mlp_operator": "mlp_gradient"}


@pytest.mark.parametrize("used", [OPERATORS[:1], OPERATORS[1:], OPERATORS], ids="+".join)
def test_the_model_with_operators_is_the_eager_one(used: tuple[str, ...]) -> None:
    model, log = make_model(**{name.upper(): 1 for name in used})
    assert log.lines == [f"operators:{'+'.join(used)}"]
    with torch.profiler.profile() as profiler:
        found = loss_and_gradients(model)
    called = {event.key for event in profiler.key_averages()}
    for name, operator in GRADIENTS.items():
        assert (f"recipes::{operator}" in called) == (name in used)
    eager, log = make_model()
    assert log.lines == []
    for a, b in zip(found, loss_and_gradients(eager), strict=True):
        assert b.norm() > 0 and (a - b).norm() <= 1e-5 * b.norm()


def test_a_compiled_model_is_one_graph_with_the_operators_in_it() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: Tensors) -> Callable:
        graphs.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    model, _ = make_model(QKV_OPERATOR=1, MLP_OPERATOR=1)
    run = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
    found = loss_and_gradients(model, run)
    for a, b in zip(found, loss_and_gradients(make_model()[0]), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    assert len(graphs) == 1
    for name in ("heads", "mlp"):
        assert graphs[0].count(f"= torch.ops.recipes.{name}(") == SMALL["NUM_LAYERS"]


# What does not work is eager.


class Fills:
    """A kernel that writes one number into everything."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*arguments: Any, **options: Any) -> None:
            for t in arguments:
                if isinstance(t, torch.Tensor):
                    t.detach().fill_(self.number)

        return launch


@pytest.mark.parametrize(
    "name, part, number",
    [
        ("qkv_operator", "heads_gradient_kernel", 0.0),
        ("mlp_operator", "relu2_kernel", float("nan")),
        ("qkv_operator", "heads_kernel", 0.0),
    ],
)
def test_an_operator_with_other_values_is_eager_after_one_warning(
    name: str, part: str, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, part, Fills(number))
    _, log = make_model(QKV_OPERATOR=1, MLP_OPERATOR=1)
    [other] = {*OPERATORS} - {name}
    assert log.lines[1:] == [f"operators:{other}"]
    said = f"warning: {name} does not work here, so eager: it is off by "
    assert log.lines[0].startswith(said)


def test_an_operator_is_eager_where_another_recipe_changes_its_lines() -> None:
    """The trial compares with the script's own lines: here the recipe leaky_relu2 is on."""
    model, log = make_model(QKV_OPERATOR=1, MLP_OPERATOR=1, LEAKY_SLOPE=0.5)
    assert log.lines[0].startswith("warning: mlp_operator does not work here, so eager: it is off")
    assert log.lines[1:] == ["operators:qkv_operator"]
    assert model.blocks[0].attn.operator and not model.blocks[0].mlp.operator


def test_a_trial_draws_no_number_of_the_runs() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    config = config_of(script, **SMALL)
    for name in OPERATORS:
        script.operator_fault(name, config, script.Runtime(config, {}))
    assert torch.equal(torch.get_rng_state(), before)
