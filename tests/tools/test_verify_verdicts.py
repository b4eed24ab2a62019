"""tools/verify.py: its verdicts on runs that are made by hand, without running the trainer."""

import copy
import json
import math
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import judge
import numpy as np
import probes
import pytest
import tinyruns
import torch
import verify
from running import ROOT

LATE = ["model", "clock", "sum", "scorer", "two-from-step-5", "from-step-5", "from-step-12"]
FIRST = ["full", "again", "fast-clock", "no-warm-up", "validated-each-step", "other-validation"]
FIRST += ["opposite-results", "not-read-ahead", "two-ranks", "reads", "compiled"]
FACTS = {
    "nats": 3.0, "targets": 64, "tensors": 2, "counted": [100.0, 64.0], "foreign": [], "kept": [],
    "gaps": {"w": 0.1}, "untrained": [], "unused": [], "twice": [], "shares": [1.0, 0.9, 1.0],
    "shifts": {"w": 0.07}, "average": [0.0] * 12 + [1.0], "rest": 0.0, "score_losses": [3.88],
    "sight": {"leaks": [], "ignored": [], "length": 1024}, "late": [[8, 0.0], [24, 1e-6]],
    "wide": {"blocks": [], "score": "torch.float32"},
    "batch": {"targets": [32, 32], "loss": 3.0, "mean": 3.0},
}  # fmt: skip
STEP = {"crc": 1, "drawn": [False] * 3, "before": [0, 0, 0], "stepped": [["adam", [0.1]]]}


class FakeRun:
    """A run that was not made: the attributes and files that verify.py reads."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.error, self.artifact = name, "", b"artifact"
        self.ranks = range(2 if name in ("two-ranks", "two-from-step-5", "clock") else 1)
        self.env = {"RESUME": "file"} if "from-step" in name else {}
        self.processes, self.folder = [None], folder / name
        self.losses = {step: (4.0 - 0.01 * step, "rows") for step in range(1, 13)}
        self.scores = 3.0, 3.0 * 64 / math.log(2) / 100
        self.weights = {"w": torch.ones(2, 2)}
        self.log = SimpleNamespace(validations=[], code_bytes=9, model_bytes=9)
        self.noted: dict[str, Any] = {"facts": copy.deepcopy(FACTS), "values": {"Trainer.n": "1"}}
        self.noted["counted"] = FACTS["counted"]
        self.steps_noted = [STEP | {"after": [step, step, 0]} for step in range(1, 13)]

    @property
    def steps(self) -> dict[int, tuple[float, str]]:
        return dict([*self.losses.items()][-7:]) if self.env else self.losses

    def read(self) -> None:
        """Do nothing. A real run reads its files here."""

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        raise FileNotFoundError(name)

    def text(self, name: str) -> str:
        if name.endswith(".jsonl"):
            return "\n".join(map(json.dumps, self.steps_noted))
        if name.startswith("lines"):
            return self.noted.get("lines", "")
        return json.dumps(self.noted.get(name.removeprefix("notes/").removesuffix("0.json"), {}))


def change(run: FakeRun, what: str, value: Any) -> None:
    if what == "counted" and run.name == "two-ranks":
        run.noted["counted"] = value
    elif what in FACTS:
        run.noted["facts"][what] = value
    elif what in STEP or what == "after":
        run.steps_noted = [step | {what: value} for step in run.steps_noted]
    else:
        setattr(run, what, value)


OTHER_ROWS = {step: (4.0 - 0.01 * step, "others") for step in range(1, 13)}
ROWS = [  # the run, its attribute that differs, the value, the expected faults
    ("full", "foreign", [], ""),
    ("again", "artifact", b"other", "repeatable"),
    ("again", "losses", OTHER_ROWS, "repeatable"),
    ("fast-clock", "weights", {"w": torch.zeros(2, 2)}, "time"),
    ("no-warm-up", "artifact", b"other", "warm-up"),
    ("validated-each-step", "artifact", b"other", "validation unseen"),
    ("other-validation", "artifact", b"other", "unseen"),
    ("opposite-results", "weights", {"v": torch.ones(2, 2)}, "unseen"),
    ("not-read-ahead", "losses", OTHER_ROWS, "overlap"),
    ("two-ranks", "error", "RunError: no luck", "replicas resume"),
    ("two-ranks", "scores", (3.0, 2.0), "ranks resume"),
    ("two-from-step-5", "scores", (3.1, 1.5), "resume"),
    ("from-step-5", "scores", (3.1, 1.5), "resume"),
    ("from-step-12", "artifact", b"other", "resume"),
    ("clock", "stepped", [["adam", [-0.1]]], "clock"),
    ("full", "after", [1, 1, 1], "random"),
    ("model", "sight", {"leaks": [600], "ignored": [], "length": 1024}, "look-ahead"),
    ("model", "sight", {"leaks": [], "ignored": [0], "length": 1024}, "own-token"),
    ("model", "gaps", {"w": 1.4}, "stored"),
    ("model", "untrained", ["w"], "trained"),
    ("model", "kept", ["w"], "exported"),
    ("model", "foreign", ["w"], "whole"),
    ("model", "unused", ["w"], ""),  # the scorer may use it
    ("model", "twice", ["w"], "artifact"),
    ("model", "shifts", {"w": 0.9}, "stored"),
    ("model", "average", [0.0] * 9 + [0.25] * 4, ""),
    ("model", "average", [0.0] * 9 + [0.2] * 4, "average"),
    ("model", "sight", {"leaks": [], "ignored": [], "length": 1024, "random": True}, "look-ahead"),
    ("two-ranks", "counted", [200.0, 128.0], "ranks"),
    ("model", "wide", {"blocks": [1], "score": "torch.float32"}, "dtype"),
    ("model", "wide", {"blocks": [], "score": "torch.bfloat16"}, "dtype"),
    ("model", "wide", "RuntimeError('expected m1 and m2 to have the same dtype')", "dtype"),
    ("model", "wide", "AttributeError(\"'GPT' object has no attribute 'blocks'\")", ""),
    ("model", "counted", [90.0, 24.0], "targets"),
    ("model", "counted", [101.0, 64.0], "targets"),
    ("sum", "shares", [1.001, math.nan, math.nan], "sum"),
    ("sum", "shares", [1.0, 1.0, 1.279], "sum"),
    ("scorer", "late", [[8, 0.0], [24, 0.01]], "scorer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "what", "value", "faults"), ROWS)
def test_each_difference_is_a_fault_of_its_property(
    name: str, what: str, value: Any, faults: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {each: FakeRun(each, tmp_path) for each in FIRST + LATE}
    change(runs[name], what, value)
    monkeypatch.setattr(judge, "first_runs", lambda *_: {each: runs[each] for each in FIRST})
    monkeypatch.setattr(judge, "late_runs", lambda *_: {each: runs[each] for each in LATE})
    script = tmp_path / "mine.py"
    script.write_text("pass\n")
    lab = SimpleNamespace(steps=12, seq_len=32, val_bytes=100, script=script, data=tmp_path)
    lab.run_all = lambda _, **more: None
    found = list(judge.verify(lab, None, score_differs=True))
    assert [each for each, kind, _ in found if kind == "FAULT"] == faults.split()
    hints = [verify.find_hint(each, text) for each, kind, text in found if kind == "FAULT"]
    assert all(hints)


def test_what_was_not_compared_is_not_ok(tmp_path: Path) -> None:
    alone, two, scorer = (FakeRun(name, tmp_path) for name in ("no-warm-up", "two-ranks", "scorer"))
    runs = {"no-warm-up": alone, "two-ranks": two}

    def ranks() -> tuple[str, str]:
        rows = {name: rest for name, *rest in judge.two_rank_verdicts(runs, None, False)}
        return rows["ranks"]

    assert ranks()[0] == "ok"
    two.error = "RunError: no luck"
    assert ranks()[0] == "note" and "were not compared" in ranks()[1]
    two.error, alone.error = "", "RunError: no luck"
    del alone.losses  # the run has no results
    assert ranks()[0] == "note" and "were not compared" in ranks()[1]
    assert judge.scorer_verdict(scorer)[1] == "ok"
    scorer.error = "RunError: no luck"
    assert judge.scorer_verdict(scorer)[1:] == ("note", "RunError: no luck")
    scorer.error, scorer.noted["facts"]["late"] = "", []
    assert judge.scorer_verdict(scorer)[1] == "note"


def test_a_sum_that_was_not_possible_is_reported(tmp_path: Path) -> None:
    run = FakeRun("sum", tmp_path)
    run.noted["facts"]["shares"] = [math.nan, 1.0, math.nan]
    _, kind, text = judge.sum_verdict(run)
    assert kind == "ok" and "nan" not in text
    assert "1.000000 for the first target alone; " in text
    assert text.endswith("all others are scored, too") and "computed for the last target" in text


def test_without_score_differs_the_score_must_be_that_of_the_logits(tmp_path: Path) -> None:
    lab = SimpleNamespace(seq_len=32, val_bytes=100, script=Path(__file__))
    for nats, kind in ((3.0, "ok"), (3.001, "FAULT")):
        rows = judge.score_verdicts(lab, FakeRun("full", tmp_path), FACTS | {"nats": nats}, False)
        assert next(rows)[:2] == ("score", kind)


def test_state_that_is_not_restored_is_listed(tmp_path: Path) -> None:
    full, again, resumed = (FakeRun(name, tmp_path) for name in ("full", "again", "from-step-5"))
    full.noted["values"] = {"Trainer.val_ms": "2.0", "Trainer.count": "12", "model.scale": "None"}
    again.noted["values"] = full.noted["values"] | {"Trainer.val_ms": "3.0"}
    resumed.noted["values"] = again.noted["values"] | {"Trainer.count": "7"}
    resumed.artifact = b"other"
    text = judge.judge_equal("resume", full, [resumed], again)[2]
    assert text == "from-step-5 differs: artifact, and at the end Trainer.count (7 instead of 12)"


class Toy(torch.nn.Module):
    """Logits that are sums of the tokens so far and, from `place` on, also use the next token."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens.float().cumsum(1)
        x[:, self.place :] += tokens.roll(-1, 1)[:, self.place :]
        return x[..., None] * torch.ones(5)


def test_leaks_are_found_from_the_position_where_they_begin() -> None:
    x = torch.randint(5, (2, 64), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    assert probes.find_sight(Toy(64), x, 5) == {"leaks": [], "ignored": [], "length": 64}
    found = probes.find_sight(Toy(40), x, 5)
    assert found["ignored"] == [] and 62 in found["leaks"]
    assert min(place % 64 for place in found["leaks"]) >= 40


class Lookup(Toy):
    """Logits that have more values than there are tokens, and whose table has one row per token."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.arange(3.0)[tokens][..., None].cumsum(1) * torch.ones(8)


@pytest.mark.parametrize("length", [4, 11, 64])
def test_padded_logits_and_short_sequences_can_be_examined(length: int) -> None:
    x = torch.randint(3, (2, length), generator=torch.Generator().manual_seed(0))
    sight = {"leaks": [], "ignored": [], "length": length}
    assert probes.find_sight(Lookup(64), x, 3) == sight


def test_an_unused_tensor_is_a_fault_unless_the_score_differs() -> None:
    facts = FACTS | {"unused": ["w"]}
    kinds = [[kind for _, kind, _ in judge.artifact_verdicts(facts, d)] for d in (False, True)]
    assert kinds == [["ok", "FAULT"], ["ok", "note"]]
    twice = [*judge.artifact_verdicts(facts | {"twice": ["v"]}, True)]
    assert [kind for _, kind, _ in twice] == ["ok", "note", "FAULT"]


def test_weights_are_compared_with_infinities_and_nan() -> None:
    inf, nan = math.inf, math.nan
    same = {"a": torch.tensor([-inf, nan, 0.0]), "empty": torch.empty(0, 32)}
    assert judge.weight_differences(same, {name: t.clone() for name, t in same.items()}) == []
    small, lost = same | {"b": torch.tensor([1.0, nan])}, same | {"b": torch.tensor([nan, nan])}
    assert judge.weight_differences(small, lost) == ["weights by up to inf"]
    near = same | {"b": torch.tensor([1.5, nan])}
    assert judge.weight_differences(small, near) == ["weights by up to 0.5"]


def test_rates_below_0_are_those_of_the_run_that_has_them(tmp_path: Path) -> None:
    full, clock = FakeRun("full", tmp_path), FakeRun("clock", tmp_path)
    change(full, "stepped", [["adam", [-0.1]]])
    [[_, kind, text]] = judge.clock_verdicts(
        SimpleNamespace(steps=12), {"full": full, "clock": clock}
    )
    assert kind == "FAULT" and text.startswith("in a run without a time limit learning rates")


def test_a_time_limit_that_leaves_no_step_is_a_fault(tmp_path: Path) -> None:
    full, clock = FakeRun("full", tmp_path), FakeRun("clock", tmp_path)
    clock.steps_noted = []
    runs = {"full": full, "clock": clock}
    [[_, kind, text]] = judge.clock_verdicts(SimpleNamespace(steps=12), runs)
    assert kind == "FAULT" and text.endswith("with MAX_WALLCLOCK_SECONDS there is no step")


def test_both_faults_of_dtypes_are_reported() -> None:
    _, kind, text = judge.dtype_verdict({"blocks": [1], "score": "torch.bfloat16"})
    assert kind == "FAULT" and "score is computed in bfloat16" in text and "blocks 1" in text
    assert judge.dtype_verdict("RuntimeError('expected scalar type Float')")[1] == "FAULT"
    assert judge.dtype_verdict("TypeError(\"missing an argument: 'dtype'\")")[1] == "note"


def test_gradients_that_all_ranks_have_are_not_added(tmp_path: Path) -> None:
    """Only a gradient that differs between two ranks is added up later, by its optimizer."""
    one, two = FakeRun("one", tmp_path), FakeRun("two", tmp_path)
    ones = {"matrix": torch.tensor([3.0]), "vector": torch.tensor([5.0])}
    first = {"matrix": torch.tensor([1.0]), "vector": torch.tensor([5.0])}
    second = {"matrix": torch.tensor([2.0]), "vector": torch.tensor([5.0])}
    one.tensors = lambda _: ones
    two.tensors = lambda name: (second if "1" in name else first).copy()
    assert judge.gradient_gaps(*judge.first_gradients(one, two)) == {}


def test_lines_are_numbered_as_python_numbers_them(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text("x = 1\n")
    (tmp_path / "mine.py").write_text("x = 1\n\f\ny = 2\n")
    assert judge.changed_lines(tmp_path / "mine.py", tmp_path / "base.py") == {3: "y = 2"}


def test_a_method_may_be_called_with_names() -> None:
    class Plan:
        def fill(self, x: int, y: int = 0) -> int:
            return x + y

    probes.call_after(SimpleNamespace(Plan=Plan), Plan, "fill", lambda result, _, x, y: [x, y])
    assert Plan().fill(y=2, x=1) == [1, 2]


def test_a_training_loss_may_be_that_of_buffers_that_the_step_has_set(tmp_path: Path) -> None:
    [[_, kind, _]] = judge.loss_verdicts(FakeRun("full", tmp_path), {"score_losses": [3.0, 3.88]})
    assert kind == "ok"


def test_all_clocks_of_python_are_faster() -> None:
    code = (
        "import datetime, time, probes; real, real_ns = time.sleep, time.perf_counter_ns\n"
        "before = datetime.datetime.now(); probes.speed_up_clocks()\n"
        "read = lambda: [datetime.datetime.now().timestamp(), time.clock_gettime(1), time.time(),\n"
        "    time.clock_gettime_ns(time.CLOCK_REALTIME) / 1e9, time.monotonic()]\n"
        "first = read(); thread = time.thread_time(); real(0.2); sum(range(10**6))\n"
        "assert all(b - a > 100 for a, b in zip(first, read())), (first, read())\n"
        "assert time.thread_time() - thread > 1 and isinstance(before, datetime.datetime)\n"
        "from datetime import datetime as d; assert (d.utcnow() - before).days < 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "tools")


def test_a_note_says_that_longer_sequences_were_not_checked() -> None:
    sight = FACTS["sight"] | {"short": "TypeError('it needs a table')"}
    words = "longer sequences were not checked: TypeError('it needs a table')"
    assert [*judge.sight_verdicts(sight)][2:] == [("look-ahead", "note", words)]


def test_gradients_may_differ_by_rounding() -> None:
    ones = {"a": torch.ones(3), "b": torch.ones(3)}
    near, far = torch.full((3,), 1 + 1e-6), torch.tensor([1.0, 1.0, 1.01])
    assert judge.gradient_gaps(ones, {"a": near, "b": near}) == {}
    assert [*judge.gradient_gaps(ones, {"a": near, "b": far})] == ["b"]


def test_the_cause_is_not_the_error_that_it_causes_on_another_rank() -> None:
    lost = "train_gpt.py: rank 1: RuntimeError: [gloo/pair.cc] Connection closed by peer"
    late = "train_gpt.py: rank 0: RuntimeError: [gloo/buffer.cc] Timed out waiting 60000ms"
    own = "train_gpt.py: rank 0: ValueError: no luck"
    for ends, cause in (([own, lost], own), ([late, lost], late), ([lost, late], late)):
        assert tinyruns.choose_cause(ends) == cause
    assert tinyruns.choose_cause(["", lost]) == lost


@pytest.mark.parametrize("place", ["<module>", "<lambda>", "step"])
def test_the_place_of_an_error_is_found_in_any_folder(place: str, tmp_path: Path) -> None:
    run = tinyruns.Run.__new__(tinyruns.Run)
    run.folder, run.script = tmp_path, Path("/home/edits (1)+/mine.py")
    (tmp_path / "output0.txt").write_text(f'  File "{run.script}", line 7, in {place}\n    x = 1')
    assert run.find_place(0) == f"in {place}, line 7"


def test_a_setting_that_cannot_be_given_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(verify.cli.ToolError, match="scores the whole validation split"):
        tinyruns.Lab(tmp_path, tmp_path / "mine.py", {"VAL_TOKENS": "64"})


def test_a_hint_belongs_to_the_words_of_the_fault() -> None:
    """No hint says that clocks differ if a rate falls below 0, or speaks of random numbers if a
    later token changes logits."""
    assert "clocks" not in verify.find_hint("clock", "learning rates of adam fall below 0")
    assert "clocks" in verify.find_hint("clock", "the rates of two ranks differ at step 3")
    assert "random" not in verify.find_hint("look-ahead", "logits change with later tokens")
    assert "random" in verify.find_hint("look-ahead", "two equal calls of logits return ...")


LAST = "the weights after the last step have no share"
AVERAGES = [  # shares of the initial weights and of those after each step, words of the note
    ([0, 0, 0, 0, 1], ""),
    ([0, 0, 0.25, 0.25, 0.5], ""),
    ([0.8**4, 0.2 * 0.8**3, 0.2 * 0.8**2, 0.2 * 0.8, 0.2], ""),  # a moving average
    ([0.997**4, 0.003, 0.003, 0.003, 0.003], ""),
    ([0, 0.997**3, 0.003, 0.003, 0.003], ""),  # it begins after step 1
    ([0.8**3, 0.2 * 0.8**2, 0.2 * 0.8, 0.2, 0], LAST),
    ([0.2, 0.2, 0.2, 0.2, 0.2], "do the initial weights belong to it?"),
    ([0, 0.2, 0.2, 0.2, 0.4], "is the share of step 4 intended?"),
]


@pytest.mark.parametrize(("shares", "words"), AVERAGES)
def test_a_note_says_what_is_odd_in_an_average(shares: list[float], words: str) -> None:
    _, kind, text = judge.average_verdict(shares)
    assert kind == ("note" if words else "ok") and words in text


def test_the_shares_of_an_average_are_found() -> None:
    draw = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(40, 40, generator=draw)} for _ in range(5)]
    shares = [0.0, 0.1, 0.2, 0.3, 0.4]
    mean = sum(share * state["w"] for share, state in zip(shares, states, strict=True))
    found = probes.find_average(states, {"w": mean})
    assert found["average"] == pytest.approx(shares, abs=1e-4) and found["rest"] < 1e-4
    assert probes.find_average(states, {"w": mean.square()})["rest"] > 0.1


def test_equal_weights_have_one_share() -> None:
    draw = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(40, 40, generator=draw)} for _ in range(4)]
    states.append(states[-1])  # the last step has the rate 0
    found = probes.find_average(states, states[-1])
    assert found["average"] == pytest.approx([0, 0, 0, 0, 1], abs=1e-4)
    moving = {"w": 0.2 * states[2]["w"] + 0.8 * states[3]["w"] - 0.0 * states[0]["w"]}
    assert probes.find_average(states, moving)["average"][2:] == pytest.approx([0.2, 0, 0.8])
    shares = [0.8**4, 0.2 * 0.8**3, 0.2 * 0.8**2, 0.0, 0.2 * 0.8 + 0.2]
    assert judge.average_verdict(shares, [0, 1, 2, 4, 4])[1] == "ok"
    assert judge.average_verdict([0, 0.25, 0.25, 0, 0.5], [0, 1, 2, 4, 4])[1] == "ok"


def test_a_shift_is_told_from_rounding_and_from_weights_stored_as_zero() -> None:
    t = torch.randn(40, 40, generator=torch.Generator().manual_seed(0)) + 0.1
    stored = {"round": (8 * t).round() / 8, "floor": (8 * t).floor() / 8, "zero": 0 * t}
    shifts = probes.find_shifts(stored, dict.fromkeys(stored, t))
    assert shifts["round"] < 0.1 and shifts["zero"] < 0.1 and shifts["floor"] > 0.8


@pytest.mark.parametrize("spread", [0.3, 0.02, 0.002, 0.0])
def test_rounding_is_no_shift_if_all_weights_are_far_from_zero(spread: float) -> None:
    for seed in range(20):
        t = 1 + spread * torch.randn(16, 40, generator=torch.Generator().manual_seed(seed))
        scale = t.abs().amax(1, keepdim=True) / 127
        stored = {"round": (t / scale).round() * scale, "floor": (t / scale).floor() * scale}
        stored["half"] = t.half().float()
        shifts = probes.find_shifts(stored, dict.fromkeys(stored, t)) if spread else {}
        assert shifts.get("round", 0.0) < 0.3 and shifts.get("half", 0.0) < 0.3
        assert spread < 0.01 or shifts["floor"] > 0.6
    same = torch.full((16, 40), 0.3)
    assert probes.find_shifts({"w": same.bfloat16().float()}, {"w": same}) == {"w": 0.0}


@pytest.mark.parametrize("levels", [2, 3, 7])
def test_a_shift_is_found_with_few_levels(levels: int) -> None:
    t = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    scale = 2.5 / levels
    floor = (t / scale).floor().clamp(-levels, levels) * scale
    assert probes.find_shifts({"w": floor}, {"w": t})["w"] > 0.5


def test_a_tensor_that_is_not_stored_has_no_effect_on_the_verdicts() -> None:
    left_out = torch.full((40, 40), math.nan)
    assert probes.is_left_out(left_out) and not probes.is_left_out(torch.empty(0, 3))
    assert not probes.is_left_out(torch.tensor([1.0, math.nan]))


def test_checksums_are_made_of_tensors_of_all_dtypes() -> None:
    for t in (torch.ones(2, 3).bfloat16(), torch.tensor(True), torch.empty(0, 32), torch.ones(())):
        assert len(probes.tensor_bytes(t.mT if t.ndim == 2 else t)) == t.nbytes


def test_a_read_of_a_device_is_told_from_one_of_a_number_on_the_host(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    lines = ["x = weight.sum()", "torch.rand(1).item()", "float(x)", "x.tolist()", "weight[x > 0]"]
    lines += ["def attend(): x.is_cuda or x.tolist()  # this may be for a CPU only", "attend()"]
    lines += ["torch.rand((), device=x.device).item()", "x.to(x.device)", "x.to(torch.float64)"]
    lines += ["torch.equal(x, x)", "torch.bincount(weight.long())", "torch.zeros(()).item()"]
    lines += ["def train_step(): x.to('cpu'); x.to('cuda' if 0 else x.dtype)", "train_step()"]
    lines += ["y = weight * 2", "y[y > 0] = 0", "y[y > 0] = x", "one_hot(y.long(), num_classes=3)"]
    script.write_text("\n".join(lines))
    weight = torch.ones(3)
    code = compile(script.read_text(), str(script), "exec")
    mode = probes.ReadCounter(script)
    mode.step = 1
    try:
        with mode, probes.DeviceMarks():
            one_hot = probes.make_one_hot(torch.nn.functional.one_hot)
            exec(code, {"torch": torch, "weight": weight, "one_hot": one_hot})
    finally:
        mode.restore()
    assert {*mode.reads} == {3, 4, 5, 8, 11, 12, 14, 18} and mode.uncounted == {6}
    classes = torch.tensor([[0, 2], [1, 1]])
    assert torch.equal(one_hot(classes, 3), torch.nn.functional.one_hot(classes, 3))


def test_the_users_hash_seed_is_not_that_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[str | None] = []
    start = lambda: seeds.append(os.environ.get("PYTHONHASHSEED"))  # noqa: E731
    monkeypatch.setattr(tinyruns.forkserver, "ensure_running", start)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    tinyruns.make_contexts()
    assert seeds == [None] and os.environ["PYTHONHASHSEED"] == "1"


def test_no_script_sets_another_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    dist = torch.distributed
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **named: asked.append(named))
    change = lambda timeout: asked.append({"timeout": timeout})  # noqa: E731
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", change)
    tinyruns.keep_short_timeout()
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    dist.distributed_c10d._set_pg_timeout(timedelta(hours=1))
    assert asked == [{"timeout": timedelta(minutes=1)}] * 2


def test_lines_that_only_one_kind_of_run_executes_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, script = tmp_path / "base.py", tmp_path / "mine.py"
    base.write_text("def work(name):\n    return name\n")
    script.write_text(
        "def work(name):\n    if name == 'clock':\n        return 1\n    if name == 'none':\n"
        "        return 2\n    return name\n"
    )
    changed = judge.changed_lines(script, base)
    runs = {name: FakeRun(name, tmp_path) for name in ("base", "full", "clock")}
    for name in ("full", "clock"):
        path = tmp_path / f"lines-{name}"
        code = (
            "import runpy, sys, tinyruns; from pathlib import Path; "
            f"tinyruns.trace_lines({str(script)!r}, {{*{[*changed]}}}, {str(path)!r}); "
            f"compiled = compile(Path({str(script)!r}).read_text(), {str(script)!r}, 'exec'); "
            f"space = {{}}; exec(compiled, space); space['work']({name!r}); import os; os._exit(0)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "tools")
        runs[name].noted["lines"] = path.read_text()
    rows = {name: text for name, _, text in judge.edit_verdicts(base, runs, changed)}
    assert rows["lines"] == "no run executed these lines of the edit: 5 `return 2`"


def test_random_numbers_are_replaced_by_constants() -> None:
    x = torch.arange(6.0)
    with probes.WithoutRandomNumbers():
        dropped = torch.nn.functional.dropout(x, 0.5)
        drawn = [torch.rand(2), torch.randn(2), torch.empty(2).uniform_()]
        with pytest.raises(NotImplementedError):
            torch.randperm(5)
    assert torch.equal(dropped, x)
    assert [each.tolist() for each in drawn] == [[0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]


def test_numbers_of_a_generator_and_other_probabilities_are_replaced() -> None:
    own, half = torch.Generator(), torch.tensor([0.25, 0.75])
    x = torch.arange(2.0)
    with probes.WithoutRandomNumbers():
        made = torch.rand(2, generator=own), torch.empty(2).normal_(generator=own)
        kept = torch.bernoulli(half), torch.bernoulli(x, 0.5), torch.ones(2).bernoulli_(half)
        with pytest.raises(NotImplementedError):
            torch.randperm(5, generator=own)
    assert [each.tolist() for each in made] == [[0.5, 0.5], [0.0, 0.0]]
    assert [each.tolist() for each in kept] == [[0.25, 0.75], [0.5, 0.5], [0.25, 0.75]]
    with probes.GeneratorSeeker() as seeker:
        torch.rand(2)
        assert not seeker.found
        torch.empty(2).normal_(generator=own)
        assert seeker.found


def test_a_line_says_that_gradients_were_not_compared(tmp_path: Path) -> None:
    names = "no-warm-up", "two-ranks", "first-step", "first-step-of-two"
    runs = {name: FakeRun(name, tmp_path) for name in names}
    change(runs["no-warm-up"], "drawn", [False, False, True])
    runs["first-step"].noted["not-replaced"] = "randperm"
    [_, [_, kind, text], _] = judge.two_rank_verdicts(runs, None, False)
    why = "verify.py cannot replace the random numbers of randperm by constants"
    assert kind == "ok" and text.endswith(
        f"the gradients of step 1 were not compared, because {why}"
    )


def test_random_numbers_may_begin_in_a_later_step(tmp_path: Path) -> None:
    run = FakeRun("no-warm-up", tmp_path)
    run.steps_noted[7] = STEP | {"after": [8, 8, 0], "drawn": [False, False, True]}
    assert judge.find_drawn(run) == ["torch"]


def test_matrices_of_all_blocks_are_one_group() -> None:
    names = {f"blocks.{i}.fc.weight": ("muon", (4, 2)) for i in range(12)}
    names["tok_emb.weight"] = "adam", (9, 2)
    words = "muon trains blocks.*.fc.weight (4 x 2, 12 times); adam trains tok_emb.weight (9 x 2)"
    assert judge.group_names(names) == words


def test_files_are_seen_in_a_temporary_folder_of_a_system_folder() -> None:
    run = FakeRun("full", Path("/dev/shm/verify-(1)"))
    lab = SimpleNamespace(script=Path("/home/mine.py"), data=Path("/dev/shm/verify-(1)/data"))
    usual = ["/dev/null", "/dev/shm/verify-(1)/data/tiny.model", str(run.folder / "notes/a.json")]
    run.noted["opened"] = [*usual, str(run.folder / "shapes.txt")]
    [[name, kind, text]] = judge.file_verdicts(lab, run)
    assert (name, kind) == ("files", "note") and text.startswith("shapes.txt: ")


def test_the_end_of_the_tokens_for_sums_is_repeated() -> None:
    tokens = np.arange(3, 300)
    tokens[90] = 1  # a document begins
    made = judge.repeat_end(tokens, 32)
    assert len(made) == 97 and made[-8:].tolist() == made[-16:-8].tolist() and min(made[-8:]) > 2
