"""Recipes for a faster step: each is at work when on, and changes results by rounding at most."""

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

Run = Callable[..., Any]
# How far losses and weights may be off when it is on, and whether it is at work.
ON = {
    "kv_one_product": (1e-5, lambda run: products(run) == 5 * 3 + 1),
    "muon_one_bank": (1e-5, lambda run: len(run.muon.param_groups) == 3),
    "add_compiled": (0, lambda run: run.config.add_compiled),
    "max_autotune": (0, lambda run: run.config.max_autotune),
    "coordinate_descent": (0, lambda run: run.config.coordinate_descent),
    "fewest_micro_steps": (0, lambda run: run.config.fewest_micro_steps),
}


@pytest.fixture(autouse=True)
def inductor() -> Iterator[Any]:
    """The compiler's options, which a test may change."""
    config = importlib.import_module("torch._inductor.config")
    with config.patch(max_autotune=False, coordinate_descent_tuning=False):
        yield config


def numbers(run: Any) -> torch.Tensor:
    """All losses of a run, and all weights at its end."""
    run.train()
    events = run.log.events
    losses = [event["train_loss"] for event in events if event["event"] == "step"]
    losses += [event["val_loss"] for event in events if event["event"] == "validation"]
    assert len(losses) > 6
    weights = [p.detach().flatten().double() for p in run.model.parameters()]
    return torch.cat([torch.tensor(losses, dtype=torch.float64), *weights])


def products(run: Any) -> int:
    """How many matrix products a forward pass has, except for attention's own."""
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    with torch.profiler.profile() as profiler, torch.no_grad():
        run.model(tokens, tokens)
    return sum(event.count for event in profiler.key_averages() if event.key == "aten::linear")


@pytest.mark.parametrize("name", [*ON, "+".join(ON)])
def test_on_it_is_the_run_without_it(name: str, run_of: Run) -> None:
    """To the digit or to rounding: each alone, and all together."""
    names = tuple(name.split("+"))
    plain = numbers(run_of())
    run = run_of(names, **{one.upper(): 1 for one in names})
    bounds = [ON[one][0] for one in names]
    assert (numbers(run) - plain).abs().max() <= max(bounds)
    assert all(ON[one][1](run) for one in names)


def test_micro_steps_are_as_few_as_fit(monkeypatch: pytest.MonkeyPatch, script: Run) -> None:
    """At the defaults one micro-step needs 88 GB: an H200 has that, an H100 half of it."""
    module, device = script("fewest_micro_steps"), SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: device)
    for world_size, memory, steps in (1, 149, 1), (1, 85, 2), (1, 25, 8), (2, 85, 1), (8, 25, 1):
        device.total_memory = memory * 1e9
        config = module.Config()
        found = module.fewest_micro_steps(config, world_size).grad_accum_steps
        assert found == steps, (world_size, memory, found)


OPTIONS = {"max_autotune": "max_autotune", "coordinate_descent": "coordinate_descent_tuning"}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_compiler_gets_its_option(name: str, run_of: Run, inductor: Any) -> None:
    for wanted in (False, True):
        run = run_of((name,), TORCH_COMPILE=1, **{name.upper(): int(wanted)})
        assert getattr(inductor, OPTIONS[name]) is wanted and run.model._compiled_call_impl
