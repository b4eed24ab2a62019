"""Tests of recipes for a faster step: each has its effect, and results differ by rounding only."""

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

Run = Callable[..., Any]
# For each recipe: how far losses and weights may differ, and a check that the recipe is active.
ON = {
    "muon_one_bank": (1e-5, lambda run: len(run.muon.param_groups) == 3),
    "fused_mlp": (0, lambda run: run.model.blocks[0].mlp.fused),
    "add_compiled": (0, lambda run: run.config.add_compiled),
    "max_autotune": (0, lambda run: run.config.max_autotune),
    "coordinate_descent": (0, lambda run: run.config.coordinate_descent),
    "fewest_micro_steps": (0, lambda run: run.config.fewest_micro_steps),
}


@pytest.fixture(autouse=True)
def inductor() -> Iterator[Any]:
    """Give the options of torch's compiler, and restore them after the test."""
    config = importlib.import_module("torch._inductor.config")
    with config.patch(max_autotune=False, coordinate_descent_tuning=False):
        yield config


def train_and_collect(run: Any) -> torch.Tensor:
    """Train; return one vector of all losses and of all weights at the end."""
    run.train()
    events = run.log.events
    losses = [event["train_loss"] for event in events if event["event"] == "step"]
    losses += [event["val_loss"] for event in events if event["event"] == "validation"]
    assert len(losses) > 6
    weights = [p.detach().flatten().double() for p in run.model.parameters()]
    return torch.cat([torch.tensor(losses, dtype=torch.float64), *weights])


@pytest.mark.parametrize("name", [*ON, "+".join(ON)])
def test_recipes_that_are_on_change_results_by_rounding_only(name: str, make_run: Run) -> None:
    """Each recipe alone, and all recipes together."""
    names = tuple(name.split("+"))
    plain = train_and_collect(make_run())
    run = make_run(names, **{one.upper(): 1 for one in names})
    bounds = [ON[one][0] for one in names]
    assert (train_and_collect(run) - plain).abs().max() <= max(bounds)
    assert all(ON[one][1](run) for one in names)


def test_micro_steps_are_as_few_as_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, script: Run
) -> None:
    """With the default settings one micro-step needs 88 GB; an H200 has more, an H100 has less."""
    module, device = script("fewest_micro_steps"), SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: device)
    for world_size, memory, steps in (1, 149, 1), (1, 85, 2), (1, 25, 8), (2, 85, 1), (8, 25, 1):
        device.total_memory = memory * 1e9
        config = module.Config()
        found = module.with_fewest_micro_steps(config, world_size).grad_accum_steps
        assert found == steps, (world_size, memory, found)


OPTIONS = {"max_autotune": "max_autotune", "coordinate_descent": "coordinate_descent_tuning"}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_compiler_gets_its_option(name: str, make_run: Run, inductor: Any) -> None:
    for wanted in (False, True):
        run = make_run((name,), TORCH_COMPILE=1, **{name.upper(): int(wanted)})
        assert getattr(inductor, OPTIONS[name]) is wanted and run.model._compiled_call_impl


@pytest.fixture
def interpreted(script: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a script whose kernel is run by Triton's interpreter on the CPU, with small tiles."""
    pytest.importorskip("triton")
    module = script("fused_mlp", "leaky_relu2")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel = module.triton.jit(module.squared_product.fn)
    monkeypatch.setattr(module, "squared_product", kernel)
    monkeypatch.setattr(module, "FUSED_TILE", (32, 32, 16))
    return module


def mlp_operands(*shape: int, hidden: int) -> list[torch.Tensor]:
    """Return random x, the two weights of an MLP, and a gradient of its output."""
    random = torch.Generator().manual_seed(1)
    width = shape[-1]
    shapes = shape, (hidden, width), (width, hidden)
    operands = [torch.randn(each, generator=random).requires_grad_() for each in shapes]
    return [*operands, torch.randn(shape, generator=random)]


@pytest.mark.parametrize("slope", [0.0, 0.5])
@pytest.mark.parametrize(("shape", "hidden"), [((2, 33, 20), 52), ((64, 64), 128), ((1, 4), 36)])
def test_the_fused_mlp_equals_the_eager_mlp(
    shape: tuple, hidden: int, slope: float, interpreted: Any
) -> None:
    """In float32, and also if rows, columns and depth are not multiples of a tile."""
    *operands, gradient = mlp_operands(*shape, hidden=hidden)
    x, up, down = operands
    fused = interpreted.fused_mlp(x, up, down, slope)[0]
    eager = F.linear(F.leaky_relu(F.linear(x, up), slope).square(), down)
    found = fused, *torch.autograd.grad(fused, operands, gradient)
    wanted = eager, *torch.autograd.grad(eager, operands, gradient)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_the_fused_mlp_is_a_valid_custom_operator(interpreted: Any) -> None:
    """torch.compile relies on shapes, on no hidden writes, and on gradients by autograd."""
    x, up, down, gradient = mlp_operands(2, 8, 12, hidden=16)
    hidden = torch.randn(2, 8, 16)
    for operator, operands in (
        (interpreted.fused_mlp, (x, up, down, 0.5)),
        (interpreted.fused_mlp_gradient, (gradient, down.detach(), hidden, 0.5)),
    ):
        assert set(torch.library.opcheck(operator, operands).values()) == {"SUCCESS"}


def test_training_uses_the_fused_mlp_and_scores_do_not(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ and adapters put hooks on the module of the first product; only scores must run it."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    processors = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    config = interpreted.Config(model_dim=16, leaky_slope=0.5, fused_mlp="1")
    mlp = interpreted.MLP(config)
    torch.nn.init.normal_(mlp.proj.weight)
    x = torch.randn(2, 40, 16, requires_grad=True)
    scale = torch.randn(16, requires_grad=True)
    modules = []
    mlp.fc.register_forward_hook(lambda module, *_: modules.append(module))
    results = []
    for mode in True, False:
        output = mlp.train(mode)(x, scale)
        found = torch.autograd.grad(output.sin().sum(), [x, scale, *mlp.parameters()])
        results.append((output, *found))
        assert len(modules) == (0 if mode else 1)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("capability", "width", "auto", "fault"),
    [
        (0, 16, False, ""),
        (9, 16, True, ""),
        (8, 16, False, "needs an H100 or H200; set FUSED_MLP=auto"),
        (9, 20, False, "needs a MODEL_DIM that is a multiple of 8, not 20"),
    ],
)
def test_fused_mlp_auto_is_on_where_the_kernel_works(
    capability: int, width: int, auto: bool, fault: str, script: Run, request: Any
) -> None:
    """FUSED_MLP=1 is an error on a GPU on which the kernel does not work; auto is not. A capability
    of 0 means that there is no GPU."""
    module = script("fused_mlp")
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setattr(module, "triton", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(capability > 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    for value, on, faults in ("0", False, {}), ("auto", auto, {}), ("1", True, {fault} - {""}):
        config = module.Config(model_dim=width, fused_mlp=value)
        assert module.MLP(config).fused is on
        found = module.find_wrong_device_settings(config, {})
        assert {text for setting, text in found if setting == "FUSED_MLP"} == set(faults)
    assert not module.uses_fused_mlp(module.Config(device="cpu", fused_mlp="auto"))


@pytest.mark.parametrize("forward", [True, False])
def test_the_fused_mlp_compiles_for_an_h100(forward: bool, script: Run) -> None:
    """Its tile fits into the shared memory that a program may use on an H100."""
    triton = pytest.importorskip("triton")
    module = script("fused_mlp", "leaky_relu2")
    rows, columns, depth = module.FUSED_TILE
    result = f"tensordesc<bf16[{rows}, {columns}]>"
    weight = (columns, depth) if forward else (depth, columns)
    kinds = {"x": f"tensordesc<bf16[{rows}, {depth}]>", "hidden": result, "result": result}
    kinds |= {"weight": f"tensordesc<bf16[{weight[0]}, {weight[1]}]>", "slope": "fp32"}
    names = module.squared_product.arg_names
    signature = {name: kinds.get(name, "constexpr") for name in names}
    given = {(len(names) - 1,): forward}
    source = triton.compiler.ASTSource(module.squared_product, signature, given)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    options = {"num_warps": 8, "num_stages": 3}
    made = triton.compile(source, target=target, options=options)
    assert made.metadata.shared <= 232_448 and "wgmma" in made.asm["ptx"]
