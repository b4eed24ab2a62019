"""The edits that people make: right at the first run, or refused by the name of what is wrong.

Each test makes the edit, as the table at the head of train_gpt.py says or against it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL_MODEL, Recorder, byte_data, config_of, runtime_of
from conftest import train_gpt as tg
from torch import nn

pytestmark = pytest.mark.timeout(120)
SETTINGS = {**SMALL_MODEL, "ITERATIONS": 6, "WARMUP_STEPS": 2, "VAL_LOSS_EVERY": 0, "RUN_ID": "r"}


@pytest.fixture
def trainer_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tg.Trainer]:
    """Makes a Trainer, or an edited one, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    data = byte_data(tmp_path / "data", train_tokens=30_000)

    def make(kind: type = tg.Trainer, **settings: object) -> tg.Trainer:
        config = config_of(**{**SETTINGS, **data, **settings})
        return kind(config, runtime_of(config), Recorder())

    return make


def weights(run: tg.Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


# --- A step's own changes ---------------------------------------------------------------------


class Decayed(tg.Trainer):
    """Weight decay. Right: times `counts`."""

    right = True

    def train_step(self, batches: tg.Pipeline) -> None:
        super().train_step(batches)
        rate = 0.01 * (self.exchange.counts if self.right else 1.0)
        with torch.no_grad():
            for p in self.muon.matrices:
                p.mul_(1 - rate)


class Averaged(tg.Trainer):
    """An average of the weights, held as a list of tensors."""

    right = True

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.average = [p.detach().clone() for p in self.model.parameters()]

    def train_step(self, batches: tg.Pipeline) -> None:
        super().train_step(batches)
        share = 0.1 * (self.exchange.counts if self.right else torch.ones(()))
        with torch.no_grad():
            for mean, p in zip(self.average, self.model.parameters(), strict=True):
                mean.lerp_(p, share)


class Counted(tg.Trainer):
    """A number that counts the steps, those that do not count as well."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.updates = 0

    def train_step(self, batches: tg.Pipeline) -> None:
        super().train_step(batches)
        self.updates += 1


@pytest.mark.parametrize("edit", [Decayed, Averaged])
def test_a_change_times_counts_is_right_with_any_number_of_priming_steps(
    trainer_of: Callable, edit: type
) -> None:
    ends = []
    for steps in (0, 3):
        run = trainer_of(edit, WARMUP_STEPS=steps)
        run.train()
        ends.append([weights(run), *getattr(run, "average", [])])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
    plain = trainer_of()
    plain.train()
    assert torch.equal(ends[0][0], weights(plain)) == (edit is Averaged)


@pytest.mark.parametrize(
    ("edit", "named"),
    [(Decayed, "model"), (Averaged, "average"), (Counted, "updates")],
)
def test_a_change_that_forgets_counts_is_refused_by_name(
    trainer_of: Callable, edit: type, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit, "right", False, raising=False)
    with pytest.raises(tg.RunError, match=rf"Trainer\.{named}\S* was changed .*exchange\.counts"):
        trainer_of(edit).train()


# --- State ------------------------------------------------------------------------------------


class Third(tg.Trainer):
    """The embedding in an optimizer of its own; nothing else says so."""

    fused = True

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        embedding = self.model.tok_emb.weight
        self.adam.param_groups = [
            group for group in self.adam.param_groups if group["params"][0] is not embedding
        ]
        self.third = {"embedding": torch.optim.AdamW([embedding], lr=0.01, fused=self.fused)}
        tg.check_optimizers(self)


class Everything(Averaged, Third):
    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.shadow = nn.Linear(3, 3)
        self.best = {"loss": 9.0, "step": 0}

    def train_step(self, batches: tg.Pipeline) -> None:
        super().train_step(batches)
        if self.exchange.counts > 0:
            self.best["step"] = self.step
            self.shadow.weight.data += 1


def test_what_the_trainer_holds_resumes_to_the_bit(trainer_of: Callable) -> None:
    """An average, a third optimizer, a module and numbers, without a list of them."""
    whole = trainer_of(Everything)
    whole.train()
    half = trainer_of(Everything, ITERATIONS=3, WARMDOWN_ITERS=0)
    half.train()
    full = trainer_of(Everything, WARMDOWN_ITERS=0)
    full.train()
    again = trainer_of(Everything, WARMDOWN_ITERS=0)
    tg.restore(again, tg.snapshot(half))
    assert again.best == {"loss": 9.0, "step": 3} and again.step == 3
    again.train()
    mine, theirs = (dict(tg.state_by_name(tg.held_state(run))) for run in (again, full))
    for name in ("logged", "val_ms"):  # clocks
        mine = {key: value for key, value in mine.items() if not key.startswith(name)}
    assert len(mine) > 40 and any(name.startswith("third.embedding.state.0") for name in mine)
    for name, value in mine.items():
        assert tg.is_same(theirs[name], value), name
    assert not torch.equal(whole.average[0], full.average[0])


def test_a_checkpoint_without_a_part_is_refused_by_its_name(trainer_of: Callable) -> None:
    with pytest.raises(tg.RunError, match="this Trainer differs in average"):
        tg.restore(trainer_of(Averaged), tg.snapshot(trainer_of()))


def test_state_that_cannot_be_saved_is_refused_by_its_name(trainer_of: Callable) -> None:
    class Hidden:
        def __init__(self) -> None:
            self.mean = torch.zeros(3)

    class Half(Hidden):
        state_dict = vars  # without load_state_dict, no checkpoint could be restored

    for kind in (Hidden, Half):
        run = trainer_of()
        run.hidden = [kind()]
        said = rf"Trainer\.hidden\[0\] is a {kind.__name__}: .*state_dict and load_state_dict"
        with pytest.raises(tg.RunError, match=said):
            run.train()


def test_an_optimizer_that_cannot_leave_a_step_out_is_refused(
    trainer_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Third, "fused", False)
    with pytest.raises(tg.RunError, match="AdamW cannot leave out .*: give it fused=True"):
        trainer_of(Third)


# --- Parameters, schedules, storage -----------------------------------------------------------


def test_a_parameter_that_forward_forgets_is_an_error_with_its_name(
    trainer_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hashed(tg.GPT):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            self.blocks[0].bigram = nn.Parameter(torch.zeros(7))

    monkeypatch.setattr(tg, "GPT", Hashed)
    run = trainer_of()
    with pytest.raises(tg.RunError, match=r"^blocks\.0\.bigram has no gradient: use it in GPT"):
        run.train()


@pytest.mark.parametrize("edit", [lambda p: p.requires_grad_(False), nn.Module.bfloat16])
def test_a_parameter_that_is_frozen_or_cast_is_refused_by_name(
    trainer_of: Callable, monkeypatch: pytest.MonkeyPatch, edit: Callable
) -> None:
    class Edited(tg.GPT):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            edit(self.blocks[0].mlp.fc)

    monkeypatch.setattr(tg, "GPT", Edited)
    with pytest.raises(tg.RunError, match=r"^blocks\.0\.mlp\.fc\.weight is not float32, or is not"):
        trainer_of()


def test_what_training_cannot_see_is_refused_by_its_place(
    trainer_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers in a plain list: they would keep their first values, and be in no artifact."""

    class Listed(tg.GPT):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            self.blocks[1].mlp.more = [nn.LayerNorm(4)]

    monkeypatch.setattr(tg, "GPT", Listed)
    with pytest.raises(tg.RunError, match=r"GPT\.blocks\.1\.mlp hides a LayerNorm .*ModuleList"):
        trainer_of()


def test_a_buffer_that_priming_changes_is_refused_by_its_name(
    trainer_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that state_dict leaves out."""

    class Running(tg.GPT):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            self.register_buffer("mean", torch.zeros(()), persistent=False)

        def logits(self, tokens: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean += 1
            return super().logits(tokens)

    monkeypatch.setattr(tg, "GPT", Running)
    with pytest.raises(
        tg.RunError, match=r"Trainer\.mean was changed by a step that does not count"
    ):
        trainer_of().train()


def test_a_kind_of_storage_that_pack_does_not_know_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tg, "storage", lambda name, t, config: "int4")
    with pytest.raises(KeyError, match="int4"):
        tg.pack({"weight": torch.zeros(3)}, config_of())


@pytest.mark.parametrize("line", ["ema = 0.9", "EMA: float = 0.9", "ema: tuple = (0.9,)"])
def test_a_line_of_config_that_nobody_could_set_is_refused(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, default = line.split(" = ")
    name, _, kind = name.partition(": ")
    monkeypatch.setattr(tg.Config, name, eval(default), raising=False)
    if kind:
        monkeypatch.setitem(tg.SETTINGS, name.upper(), eval(kind))
    with pytest.raises(SystemExit, match=rf"^train_gpt.py: Config\.{name}: write `name: type = "):
        tg.read_config({})


def test_more_levels_than_int8_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else numbers would wrap around, and a run would end well with a score of nonsense."""
    monkeypatch.setattr(tg, "LEVELS", 255)
    with pytest.raises(SystemExit, match="^train_gpt.py: LEVELS=255: int8 holds at most 127$"):
        tg.read_config({})


def test_random_numbers_of_an_edit_repeat_on_resume(
    trainer_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dropped(tg.MLP):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x, scale), 0.2, self.training)

    monkeypatch.setattr(tg, "MLP", Dropped)
    settings = {"WARMDOWN_ITERS": 0}
    whole, half = trainer_of(**settings), trainer_of(**settings, ITERATIONS=3)
    whole.train()
    half.train()
    again = trainer_of(**settings)
    tg.restore(again, tg.snapshot(half))
    again.train()
    assert torch.equal(weights(again), weights(whole))


def test_progress_is_the_share_of_the_run_whatever_ends_it() -> None:
    capped = config_of(ITERATIONS=20_000, MAX_WALLCLOCK_SECONDS=4)
    assert [tg.progress(capped, 13, ms) for ms in (0, 2000, 4000, 9000)] == [13 / 2e4, 0.5, 1, 1]
    short = config_of(ITERATIONS=10, MAX_WALLCLOCK_SECONDS=600)
    assert [tg.progress(short, step, 10.0) for step in (0, 5, 10)] == pytest.approx(
        [0, 0.5, 1], abs=1e-4
    )


@pytest.mark.parametrize(("iterations", "share"), [(6, 0), (4, 80)])
def test_a_warm_down_that_is_longer_than_the_run_is_said(
    trainer_of: Callable, iterations: int, share: int
) -> None:
    run = trainer_of(ITERATIONS=iterations)  # WARMDOWN_ITERS=5
    tg.log_header(run, "math")
    said = [line for line in run.log.lines if line.startswith("WARNING: WARMDOWN_ITERS")]
    assert [line.rsplit(" ", 1)[1] for line in said] == [f"{share:.1f}%"] * bool(share)
    assert tg.lr_multiplier(run.config, 0, 0.0) == (share / 100 or 1.0)


def test_rows_may_be_shorter_than_the_rotary_tables(trainer_of: Callable) -> None:
    model = trainer_of().model
    tokens = torch.randint(0, 260, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens)[:, :9], model.logits(tokens[:, :9]))


def test_fewer_levels_need_a_smaller_least_scale() -> None:
    """With the challenge's floor a small row has few levels, whatever their number."""
    rows = 0.01 * torch.randn(4, 200, generator=torch.Generator().manual_seed(1))

    def error(levels: int, least: float) -> float:
        return float((tg.dequantize(*tg.quantize(rows, levels, least)) - rows).norm() / rows.norm())

    assert error(31, tg.LEAST_SCALE) == error(127, tg.LEAST_SCALE)
    assert error(127, 2.0**-14) < 0.01 < error(31, 2.0**-14) < 0.1 < error(31, tg.LEAST_SCALE)


# --- The score --------------------------------------------------------------------------------


class Scaled(tg.GPT):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x, y)


class Tupled(tg.GPT):
    """As nanoGPT's."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.logits(x), super().forward(x, y)


class Summed(tg.GPT):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) * y.numel()


class Smoothed(tg.GPT):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.logits(x).flatten(0, 1)
        smoothing = 0.1 if self.training or self.always else 0.0
        return nn.functional.cross_entropy(logits, y.flatten(), label_smoothing=smoothing)

    always = True


class SmoothedInTraining(Smoothed):
    always = False


class Dropping(tg.GPT):
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().logits(tokens)
        return logits + 0.1 * torch.rand_like(logits)


class Looking(tg.GPT):
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().logits(tokens)
        return logits + nn.functional.one_hot(tokens.roll(-1, 1), logits.size(-1))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (tg.GPT, ""),
        (SmoothedInTraining, ""),
        (Scaled, "in eval mode GPT.forward gives"),
        (Smoothed, "GPT.forward gives"),
        (Dropping, "GPT.forward gives"),
        (Looking, "depend on later tokens"),
    ],
)
def test_a_score_that_is_none_is_named(
    trainer_of: Callable, monkeypatch: pytest.MonkeyPatch, edit: type, said: str
) -> None:
    """Such runs would end well, with a better number."""
    monkeypatch.setattr(tg, "GPT", edit)
    run = trainer_of()
    run.train()
    fault = tg.find_score_fault(run)
    assert bool(fault) == bool(said) and re.search(said, fault)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (Scaled, "in eval mode GPT.forward gives"),
        (Tupled, r"gives \(tensor.*, not the mean [0-9]"),
        (Summed, r"gives tensor\(.*\), not the mean [0-9]"),
        (Smoothed, "put what only training needs under `if self.training:`"),
        (None, "depend on later tokens: hide them, as is_causal does"),
    ],
    ids=["scaled", "with logits", "summed", "smoothed", "without a mask"],
)
@pytest.mark.row("an edit whose loss is no cross-entropy of the score, ..", "refused before step 1")
def test_such_a_run_ends_before_its_first_step(
    trainer_of: Callable, monkeypatch: pytest.MonkeyPatch, edit: type, said: str
) -> None:
    """Also if the initial zeros of attention's projection hide the fault."""
    attention = nn.functional.scaled_dot_product_attention

    def unmasked(*qkv: torch.Tensor, is_causal: bool, **more: bool) -> torch.Tensor:
        return attention(*qkv, **more)

    if edit:
        monkeypatch.setattr(tg, "GPT", edit)
    else:
        monkeypatch.setattr(tg.F, "scaled_dot_product_attention", unmasked)
    run = trainer_of()
    with pytest.raises(tg.RunError, match=said):
        tg.run_to_the_end(run.config, run.runtime, run.log, None)
    assert not any("train_loss" in line for line in run.log.lines)


def test_every_step_of_a_run_is_in_training_mode(
    trainer_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else dropout would be off, and nothing would say so."""
    modes = []

    class Watched(tg.GPT):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                modes.append(self.training)
            return super().forward(x, y)

    monkeypatch.setattr(tg, "GPT", Watched)
    run = trainer_of(WARMUP_STEPS=0, ITERATIONS=3)
    assert tg.run_to_the_end(run.config, run.runtime, run.log, None) == (0, "finished", "")
    assert modes and all(modes)


def test_targets_that_are_not_the_next_tokens_are_named(
    trainer_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    widen = tg.BatchPlan.widen

    def unshifted(plan: tg.BatchPlan, rows: range, tokens: Any, x: Any, y: Any) -> None:
        widen(plan, rows, tokens, x, y)
        y[:] = x

    def masked(plan: tg.BatchPlan, rows: range, tokens: Any, x: Any, y: Any) -> None:
        widen(plan, rows, tokens, x, y)
        y[:, ::3] = -100

    for edit, said in ((masked, ""), (unshifted, "a target that is not the next token")):
        monkeypatch.setattr(tg.BatchPlan, "widen", edit)
        fault = tg.find_score_fault(trainer_of())
        assert bool(fault) == bool(said) and said in fault
