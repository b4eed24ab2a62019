"""Tests of the learning rate under a time limit, on a simulated device.

The learning rate follows the published formula, although the host learns times and losses late. A
run uses the whole time limit.
"""

import math
import time
from collections.abc import Iterator

import pytest
import torch
from running import make_config, make_log, make_runtime, open_data
from running import train_gpt as tg

TINY = {"MODEL_DIM": 8, "TRAIN_SEQ_LEN": 8, "TRAIN_BATCH_TOKENS": 128}
TINY |= {"VAL_BATCH_SIZE": 1024, "GRAD_ACCUM_STEPS": 0, "VAL_LOSS_EVERY": 0}


@pytest.fixture(autouse=True)
def no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off checkpoints and warm-up steps: a Trainer with replaced methods cannot be saved."""
    for name in ("save_checkpoint", "warm_up"):
        monkeypatch.setattr(tg, name, lambda run: None)


class Device:
    """A simulated host, which issues a step in `host_ms`, and a device, which takes `device_ms`.

    With device_ms = 0 it is a CPU: a step is done when it has been issued. Otherwise torch.cuda's
    events and synchronization are replaced.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host_ms: float, device_ms: float) -> None:
        self.host_s, self.device_s = host_ms / 1e3, device_ms / 1e3
        self.now = self.busy_until = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        if device_ms:
            monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.wait(self.busy_until))
            monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))

    def wait(self, end: float) -> None:
        """Let the host wait until the time `end`."""
        self.now = max(self.now, end)

    def issue(self) -> None:
        """Issue a step."""
        self.busy_until = max(self.busy_until, self.now) + self.device_s
        self.now += self.host_s

    def elapsed_ms(self) -> float:
        """Return the time that all steps issued so far take, until the last one is done."""
        return 1e3 * (max(self.now, self.busy_until) - 1000.0)


class Event:
    """A stand-in for torch.cuda.Event."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, math.inf

    def query(self) -> bool:
        return self.device.now >= self.at

    def record(self) -> None:
        self.at = self.device.busy_until

    def synchronize(self) -> None:
        self.device.wait(self.at)


class NoInput:
    """A stand-in for the Pipeline: endless batches without data and without a thread."""

    total_wait_ms, bytes_read, rows, x, y = 0.0, 0, range(1), None, None
    summary = 0

    def __iter__(self) -> Iterator["NoInput"]:
        return self

    def __next__(self) -> "NoInput":
        return self

    def close(self) -> None:
        pass


def published(config: tg.Config, step: int, elapsed_ms: float) -> float:
    """The rule of the challenge's script."""
    warmdown_ms = config.warmdown_iters * elapsed_ms / max(step, 1)
    left_ms = max(1e3 * config.max_wallclock_seconds - elapsed_ms, 0)
    return left_ms / max(warmdown_ms, 1e-9) if left_ms <= warmdown_ms else 1.0


def simulate(config: tg.Config, device: Device) -> tuple[tg.Trainer, list[tuple[float, float]]]:
    """Trains on `device`, without work; (used, published) multiplier of each step from 1 on."""
    runtime, pairs = make_runtime(config), []
    runtime.read_delay_steps = 2 if device.device_s else 0
    trainer = tg.Trainer(config, runtime, make_log(), open_data(config))
    runtime.cuda, weights = device.device_s > 0, list(trainer.model.parameters())
    train_step, (adam, muon) = trainer.train_step, (trainer.adam, trainer.muon)
    adam.step = muon.step = lambda: None
    trainer.batches = NoInput
    trainer.validation.evaluate = lambda *_: (1.0, 1.0, 1.0)

    def loss(x: None, y: None) -> torch.Tensor:
        device.issue()
        return sum(weight.sum() for weight in weights)

    def timed_step(batches: NoInput) -> None:
        step, elapsed_ms = trainer.step, device.elapsed_ms()
        train_step(batches)
        rates = {g["lr"] / g["base_lr"] for o in (adam, muon) for g in o.param_groups}
        if step:
            pairs.append((min(rates), published(config, step, elapsed_ms)))
            assert max(rates) == pytest.approx(min(rates), rel=1e-9)

    trainer.model.forward, trainer.train_step = loss, timed_step
    trainer.train()
    return trainer, pairs


WORK = {"cpu": (1.0, 0.0), "ahead": (0.02, 1.0), "slow host": (1.0, 0.02)}  # host, device: shares
SCHEDULES = [(work, 9000, *more) for work in WORK for more in ((3500, 0), (1200, 200))]
SCHEDULES += [("cpu", 650, 3500, 200), ("ahead", 650, 1200, 0)]
SCHEDULES += [pytest.param("ahead", 45, 1200, 0, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("work", "ms", "warmdown", "every"), SCHEDULES)
def test_the_learning_rate_is_the_published_one_whatever_is_known_late(
    data: dict,
    monkeypatch: pytest.MonkeyPatch,
    work: str,
    ms: float,
    warmdown: int,
    every: int,
) -> None:
    """On a CPU, by a host ahead of its device, and by one that its device waits for."""
    length = {"MAX_WALLCLOCK_SECONDS": 600, "WARMDOWN_ITERS": warmdown, "ITERATIONS": 20000}
    config = make_config(**data | TINY | length | {"TRAIN_LOG_EVERY": every, "GRAD_ACCUM_STEPS": 1})
    device = Device(monkeypatch, *(share * ms for share in WORK[work]))
    trainer, pairs = simulate(config, device)
    assert len(pairs) == trainer.step - 1
    for step, (used, wanted) in enumerate(pairs, 1):
        assert used == pytest.approx(wanted, rel=0.02), step
    assert 600e3 - 2 * ms < device.elapsed_ms() < 600e3 + ms
    assert any(line.startswith("stopping_early: wallclock_cap") for line in trainer.log.lines)
