"""tools/verify.py: its verdicts on runs that are made by hand, without running the trainer."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import probes
import pytest
import tinyruns
import torch
import verify

LATE = ["model", "clock", "sum", "scorer", "two-from-step-5", "from-step-5", "from-step-12"]
FIRST = ["full", "again", "fast-clock", "no-warm-up", "validated-each-step", "other-validation"]
FIRST += ["opposite-results", "not-read-ahead", "two-ranks"]
FACTS = {
    "nats": 3.0, "targets": 64, "tensors": 2, "counted": [100.0, 64.0], "foreign": [], "kept": [],
    "gaps": {"w": 0.1}, "untrained": [], "unused": [], "shares": [1.0, 0.9],
    "sight": {"leaks": [], "ignored": [], "length": 1024}, "late": [[8, 0.0], [24, 1e-6]],
    "wide": {"blocks": [], "score": "torch.float32"},
    "batch": {"targets": [32, 32], "loss": 3.0, "mean": 3.0},
}  # fmt: skip
STEP = {"crc": 1, "drawn": False, "before": [0, 0, 0], "stepped": [["adam", [0.1]]]}


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
        self.steps_noted = [STEP | {"after": [step, step, 0]} for step in range(1, 13)]

    @property
    def steps(self) -> dict[int, tuple[float, str]]:
        return dict([*self.losses.items()][-7:]) if self.env else self.losses

    def read(self) -> None:
        """Do nothing. A real run reads its files here."""

    def text(self, name: str) -> str:
        if name.endswith(".jsonl"):
            return "\n".join(map(json.dumps, self.steps_noted))
        return json.dumps(self.noted.get(name.removeprefix("notes/").removesuffix("0.json"), {}))


def change(run: FakeRun, what: str, value: Any) -> None:
    if what in FACTS:
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
    ("model", "unused", ["w"], "artifact"),
    ("model", "wide", {"blocks": [1], "score": "torch.float32"}, "dtype"),
    ("model", "wide", {"blocks": [], "score": "torch.bfloat16"}, "dtype"),
    ("model", "wide", "RuntimeError('expected m1 and m2 to have the same dtype')", "dtype"),
    ("model", "wide", "AttributeError(\"'GPT' object has no attribute 'blocks'\")", ""),
    ("model", "counted", [90.0, 24.0], "targets"),
    ("model", "counted", [101.0, 64.0], "targets"),
    ("sum", "shares", [1.001, math.nan], "sum"),
    ("scorer", "late", [[8, 0.0], [24, 0.01]], "scorer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "what", "value", "faults"), ROWS)
def test_each_difference_is_a_fault_of_its_property(
    name: str, what: str, value: Any, faults: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {each: FakeRun(each, tmp_path) for each in FIRST + LATE}
    change(runs[name], what, value)
    monkeypatch.setattr(verify, "first_runs", lambda *_: {each: runs[each] for each in FIRST})
    monkeypatch.setattr(verify, "late_runs", lambda *_: {each: runs[each] for each in LATE})
    script = tmp_path / "mine.py"
    script.write_text("pass\n")
    lab = SimpleNamespace(steps=12, seq_len=32, val_bytes=100, script=script, data=tmp_path)
    lab.run_all = lambda _: None
    found = list(verify.verify(lab, None, score_differs=True))
    assert [each for each, kind, _ in found if kind == "FAULT"] == faults.split()


def test_without_score_differs_the_score_must_be_that_of_the_logits(tmp_path: Path) -> None:
    lab = SimpleNamespace(seq_len=32, val_bytes=100, script=Path(__file__))
    for nats, kind in ((3.0, "ok"), (3.001, "FAULT")):
        rows = verify.score_verdicts(lab, FakeRun("full", tmp_path), FACTS | {"nats": nats}, False)
        assert next(rows)[:2] == ("score", kind)


def test_state_that_is_not_restored_is_listed(tmp_path: Path) -> None:
    full, again, resumed = (FakeRun(name, tmp_path) for name in ("full", "again", "from-step-5"))
    full.noted["values"] = {"Trainer.val_ms": "2.0", "Trainer.count": "12", "model.scale": "None"}
    again.noted["values"] = full.noted["values"] | {"Trainer.val_ms": "3.0"}
    resumed.noted["values"] = again.noted["values"] | {"Trainer.count": "7"}
    resumed.artifact = b"other"
    text = verify.judge_equal("resume", full, [resumed], again)[2]
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
    assert probes.find_sight(Toy(64), x) == {"leaks": [], "ignored": [], "length": 64}
    found = probes.find_sight(Toy(40), x)
    assert found["ignored"] == [] and 62 in found["leaks"]
    assert min(place % 64 for place in found["leaks"]) >= 40


def test_a_note_says_that_longer_sequences_were_not_checked() -> None:
    sight = FACTS["sight"] | {"short": "TypeError('it needs a table')"}
    words = "longer sequences were not checked: TypeError('it needs a table')"
    assert [*verify.sight_verdicts(sight)][2:] == [("look-ahead", "note", words)]


def test_gradients_may_differ_by_rounding() -> None:
    ones = {"a": torch.ones(3), "b": torch.ones(3)}
    near, far = torch.full((3,), 1 + 1e-6), torch.tensor([1.0, 1.0, 1.01])
    assert verify.gradient_gaps(ones, {"a": near, "b": near}) == {}
    assert [*verify.gradient_gaps(ones, {"a": near, "b": far})] == ["b"]


def test_the_cause_is_not_the_error_that_it_causes_on_another_rank() -> None:
    lost = "train_gpt.py: rank 1: RuntimeError: [gloo/pair.cc] Connection closed by peer"
    late = "train_gpt.py: rank 0: RuntimeError: [gloo/buffer.cc] Timed out waiting 60000ms"
    own = "train_gpt.py: rank 0: ValueError: no luck"
    for ends, cause in (([own, lost], own), ([late, lost], late), ([lost, late], late)):
        assert tinyruns.choose_cause(ends) == cause
    assert tinyruns.choose_cause(["", lost]) == lost
