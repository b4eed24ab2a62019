"""The record StepTime's operators in Triton's interpreter, on the CPU:
for test_steptime_record.py, which sets it.

Triton takes the interpreter into use for a whole process (TRITON_INTERPRET=1 before its import),
so these tests have one of their own; pytest does not find them by their file's name."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from steptime import load_record
from torch.library import opcheck

assert os.environ.get("TRITON_INTERPRET") == "1", (
    "run by test_steptime_record.py, with TRITON_INTERPRET=1"
)
record = load_record()
slow = pytest.mark.slow  # the record is frozen: only another torch or triton can break these
SIZES = {
    "train_seq_len": 33,
    "model_dim": 48,
    "num_heads": 3,
    "num_kv_heads": 1,
    "num_layers": 2,
    "vocab_size": 97,
    "mlp_mult": 3,
}


class Lines(list):
    """Stands for the run's log."""

    line = list.append


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    yield
    record.OPERATORS = frozenset()


def numbers(
    *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale
    return drawn.to(dtype).requires_grad_()


def values(
    form: Callable,
    inputs: list[torch.Tensor],
    outputs: tuple[torch.Tensor, ...] | torch.Tensor,
    permute: bool = False,
) -> list[torch.Tensor]:
    """The outputs and their gradients with regard to `inputs`;
    permute: the incoming ones in another memory order."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    incoming = [numbers(*t.shape, seed=7 + i).detach().to(t.dtype) for i, t in enumerate(outputs)]
    if permute:
        incoming = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in incoming]
        assert not any(t.is_contiguous() for t in incoming)
    return [*outputs, *torch.autograd.grad(outputs, inputs, incoming)]


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor], relative: float) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        off = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert off <= relative, f"{tuple(b.shape)} is off by {off:.2g}"


def of_heads(
    form: Callable,
    sizes: tuple[int, ...],
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    gain: torch.Tensor | None = None,
    permute: bool = False,
) -> list[torch.Tensor]:
    B, T, heads, kv_heads, d = sizes
    x, angle = numbers(B, T, 40, scale=scale, dtype=dtype), numbers(T, 1, d // 2).detach()
    weights = [
        numbers(n * d, 40, seed=i, scale=0.2, dtype=dtype)
        for i, n in enumerate((heads, kv_heads, kv_heads))
    ]
    gain = numbers(heads) if gain is None else gain
    outputs = form(x, weights, gain, torch.stack((angle.cos(), angle.sin())))
    return values(form, [x, *weights, gain], outputs, permute)


HEADS = [
    (1, 8, 4, 4, 16),
    (2, 13, 4, 2, 32),
    (3, 5, 2, 1, 64),
    (2, 7, 3, 1, 20),
    (1, 1, 1, 1, 2),
    (2, 16, 6, 2, 24),
]


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_heads_are_the_eager_ones(sizes: tuple[int, ...]) -> None:
    assert_near(of_heads(record.qkv_operator, sizes), of_heads(record.qkv_eager, sizes), 2e-6)


def test_heads_of_small_numbers_have_the_same_epsilon() -> None:
    sizes, scale = (2, 5, 2, 1, 16), 3e-4  # the mean square is about that of rms norm's epsilon
    assert_near(
        of_heads(record.qkv_operator, sizes, scale=scale),
        of_heads(record.qkv_eager, sizes, scale=scale),
        2e-6,
    )


def test_heads_take_gradients_in_any_memory_order_and_gains_of_zero() -> None:
    sizes = (2, 9, 3, 1, 16)
    wanted, found = (
        of_heads(form, sizes, gain=torch.tensor([0.0, -2.0, 1.5], requires_grad=True), permute=True)
        for form in (record.qkv_eager, record.qkv_operator)
    )
    assert_near(found, wanted, 2e-6)
    assert found[0][:, :, 0].abs().max() == 0 and found[-1][0] != 0


def test_heads_in_bfloat16() -> None:
    """Rounded once at the end, so nearer to the float32 values than the eager form."""
    sizes = (2, 13, 4, 2, 32)
    exact = of_heads(record.qkv_eager, sizes)
    eager, found = (
        of_heads(form, sizes, dtype=torch.bfloat16)
        for form in (record.qkv_eager, record.qkv_operator)
    )
    for a, b, c in zip(exact, eager, found, strict=True):
        assert c.dtype == b.dtype
        assert (c - a).norm() <= 1.1 * (b - a).norm() + 1e-3 * a.norm()


def of_mlp(
    form: Callable,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    permute: bool = False,
) -> list[torch.Tensor]:
    *rows, D, wide = sizes
    x, up = numbers(*rows, D, dtype=dtype), numbers(wide, D, scale=D**-0.5, dtype=dtype)
    down = numbers(D, wide, scale=D**-0.5, dtype=dtype)
    return values(form, [x, up, down], form(x, up, down), permute)


MLPS = [(2, 32, 32, 64), (1, 1, 3, 5), (2, 33, 40, 72), (3, 11, 65, 31), (70, 24, 33)]


@pytest.mark.parametrize("sizes", MLPS, ids=str)
def test_the_mlp_is_the_eager_one(sizes: tuple[int, ...]) -> None:
    assert_near(of_mlp(record.mlp_operator, sizes), of_mlp(record.mlp_eager, sizes), 5e-6)


def test_the_mlp_takes_gradients_and_weights_in_any_memory_order() -> None:
    found, wanted = (
        of_mlp(form, (2, 33, 40, 72), permute=True)
        for form in (record.mlp_operator, record.mlp_eager)
    )
    assert_near(found, wanted, 5e-6)
    x, up, down = numbers(5, 24), numbers(24, 40).t(), numbers(40, 24).t()
    assert not up.is_contiguous() and not down.is_contiguous()
    inputs = [x, up, down]
    found, wanted = (
        values(form, inputs, form(*inputs)) for form in (record.mlp_operator, record.mlp_eager)
    )
    assert_near(found, wanted, 5e-6)


def test_the_mlp_in_float16() -> None:
    """As test_heads_in_bfloat16; the interpreter multiplies no matrices of bfloat16."""
    exact = of_mlp(record.mlp_eager, (2, 33, 40, 72))
    eager, found = (
        of_mlp(form, (2, 33, 40, 72), torch.float16)
        for form in (record.mlp_eager, record.mlp_operator)
    )
    for a, b, c in zip(exact, eager, found, strict=True):
        assert c.dtype == b.dtype
        assert (c - a).norm() <= 1.1 * (b - a).norm() + 1e-3 * a.norm()


def test_the_mlp_keeps_what_is_not_a_number() -> None:
    x, up = torch.ones(3, 8), torch.ones(16, 8)
    x[1, 2] = float("nan")
    _, a = record.mlp(x, up, torch.ones(8, 16))
    assert a[1].isnan().all() and not a[[0, 2]].isnan().any()


@slow
def test_operators_are_registered_as_torch_wants_them() -> None:
    packed, gain, rotary = numbers(2, 9, 7 * 16), numbers(3), numbers(2, 9, 1, 8).detach()
    opcheck(record.split_heads, (packed, gain, rotary, 2))
    grads = [
        torch.ones_like(t) for t in record.split_heads(packed.detach(), gain.detach(), rotary, 2)
    ]
    opcheck(record.split_heads_grad, (*grads, packed.detach(), gain.detach(), rotary))
    x, up, down = numbers(2, 5, 24), numbers(40, 24), numbers(24, 40)
    opcheck(record.mlp, (x, up, down))
    y, a = record.mlp(x, up, down)
    assert y.requires_grad and not a.requires_grad
    opcheck(record.mlp_grad, (y.detach(), down.detach(), a))


# --- the whole model ------------------------------------------------------------------------------


def loss_and_gradients(wrap: Callable = lambda model: model) -> dict[str, torch.Tensor]:
    """Of a GPT whose weights are all random: those that begin at zero would hide the MLP and
    attention."""
    torch.manual_seed(3)
    model = record.GPT(record.Config(run_id="x", **SIZES), torch.float32)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=random)
    model.cast()
    ids = torch.randint(0, SIZES["vocab_size"], (2, SIZES["train_seq_len"] + 1), generator=random)
    loss = wrap(model)(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def eager() -> dict[str, torch.Tensor]:
    """The same without operators."""
    taken, record.OPERATORS = record.OPERATORS, frozenset()
    wanted = loss_and_gradients()
    record.OPERATORS = taken
    return wanted


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, b in wanted.items():
        assert b.norm() > 0, name
        assert (found[name] - b).norm() <= 1e-5 * b.norm(), name


def take(operators: str = "auto") -> list[str]:
    lines = Lines()
    record.use_operators(
        record.Config(run_id="x", operators=operators, **SIZES), record.Runtime(), lines
    )
    return lines


@pytest.mark.parametrize(
    "operators", ["auto", *(pytest.param(word, marks=slow) for word in ("qkv", "mlp", "0"))]
)
def test_the_model_with_operators_is_the_eager_one(
    operators: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"auto": {"qkv", "mlp"}, "0": set()}.get(operators, {operators})
    assert take(operators) == [f"operators:{'+'.join(sorted(used)) or 'none'}"]
    wanted, calls = eager(), []
    for name, (plain, form) in record.FORMS.items():
        spied = (plain, lambda *args, name=name, form=form: (calls.append(name), form(*args))[1])
        monkeypatch.setitem(record.FORMS, name, spied)
    assert_same(loss_and_gradients(), wanted)
    assert set(calls) == used


@slow
def test_a_compiled_model_is_one_graph_with_the_operators_in_it() -> None:
    take()
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable:
        graphs.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    def wrap(model: torch.nn.Module) -> Callable:
        return torch.compile(model, dynamic=False, fullgraph=True, backend=backend)

    assert_same(loss_and_gradients(wrap), eager())
    assert len(graphs) == 1
    assert all(
        graphs[0].count(f"steptime.{name}.") == SIZES["num_layers"] for name in ("heads", "mlp")
    )


# --- what does not work is eager ------------------------------------------------------------------


class Raises:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*args: object, **options: object) -> None:
            raise RuntimeError("no such instruction\nand a long story")

        return launch


class Fills:
    """Writes one number into everything."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return lambda *args, **options: [
            t.detach().fill_(self.number) for t in args if isinstance(t, torch.Tensor)
        ]


@pytest.mark.parametrize(
    "broken, word",
    [
        pytest.param(Raises(), "RuntimeError: no such instruction", marks=slow),
        (Fills(0.0), "off by"),
        pytest.param(Fills(float("nan")), "off by nan", marks=slow),
    ],
    ids=["raises", "zeros", "nan"],
)
@pytest.mark.parametrize(
    "name, part",
    [
        pytest.param("qkv", "heads_kernel", marks=slow),
        ("qkv", "heads_grad_kernel"),
        ("mlp", "relu2_kernel"),
    ],
)
def test_a_broken_operator_is_eager_after_one_warning(
    name: str, part: str, broken: object, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, part, broken)
    lines, other = take(), {"qkv": "mlp", "mlp": "qkv"}[name]
    assert len(lines) == 2 and lines[1] == f"operators:{other}"
    assert (
        lines[0].startswith(f"warning: operator {name} does not work here, it is eager: ")
        and word in lines[0]
    )
    assert "\n" not in lines[0]
    assert_same(loss_and_gradients(), eager())


def test_an_operator_that_fails_on_another_rank_is_eager_on_all() -> None:
    class Two(record.Runtime):
        def all_reduce(self, tensor: torch.Tensor, place: str = "") -> torch.Tensor:
            return tensor.add_(torch.tensor([1.0, 0.0]))  # there, the second of FORMS failed

    lines = Lines()
    record.use_operators(record.Config(run_id="x", **SIZES), Two(world_size=2), lines)
    forms, operators = record.FORMS, record.OPERATORS
    assert list(forms) == ["qkv", "mlp"] and operators == {"qkv"}
    assert lines == [
        "warning: operator mlp does not work here, it is eager: so on another rank",
        "operators:qkv",
    ]


def test_looking_at_operators_draws_no_number_of_the_runs() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    take()
    assert torch.equal(torch.get_rng_state(), before)
