"""RESUME continues a run as if nothing had happened, and refuses what would be another run."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import Command

from faults.live import Live, assert_same_result

Whole = Callable[[int], Live]

# An edit with state of every kind: an average of the weights, a counter of late steps, AdamW on
# the skip weights, an optimizer with row-wise state and a `k` in its groups on the embedding, and
# random numbers of Python, numpy and torch in the model.
OPTIMIZER = '''class Rows(torch.optim.Optimizer):
    """Adagrad with one number for each row; the rate depends on `k`, the steps so far."""

    def __init__(self, params, lr=0.01, power=0.5):
        super().__init__(params, {"lr": lr, "power": power, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                rows = self.state[p].setdefault("rows", torch.zeros(len(p), 1))
                rows += p.grad.square().mean(1, keepdim=True)
                p.sub_(group["lr"] / (1 + group["k"]) * p.grad / (rows + 1e-8) ** group["power"])


class Trainer:
'''
STATE = """        self.adam, self.muon = make_optimizers(self.model, config, runtime)
        embedding = self.model.tok_emb.weight
        skips = self.model.skip_weights
        self.adam.param_groups = self.adam.param_groups[1:]
        others = self.adam.param_groups[0]["params"]
        self.adam.param_groups[0]["params"] = [p for p in others if p is not skips]
        self.ema = [p.detach().clone() for p in self.model.parameters()]
        self.late = {"steps": 0}
        self.keep = config.head_lr
        self.begun = None  # from step 3 on weights
        self.counts = collections.Counter(steps=0)
        self.grown = []
        self.shrunk = [3, 9, 15, 99]
        self.number = torch.tensor(0)  # then a fraction
        self.of_rank = 0.0
        self.more = [torch.optim.AdamW([skips], lr=0.01, fused=False), Rows([embedding])]
"""
NOISE = """        x = F.relu(self.fc(x)).square()
        if self.training:
            x = x * (0.9 + 0.1 * random.random()) * (0.9 + 0.1 * np.random.rand())
            x = F.dropout(x, 0.1)
"""
AFTER = """        skips = self.model.skip_weights
        torch._foreach_lerp_(self.ema, list(self.model.parameters()), 0.1)
        self.late["steps"] += self.step >= 6
        if self.step == 2:
            self.begun = skips.detach().clone()
        self.counts["steps"] += 1
        self.grown.extend(self.runtime.rank * [self.step])  # not on rank 0
        del self.shrunk[: self.step >= self.shrunk[0]]
        self.number = self.number + 0.25
        self.of_rank += 0.5 * self.runtime.rank
        if self.begun is not None:
            skips.lerp_(self.begun, 1e-3 * (self.counts["steps"] + len(self.shrunk) + self.number))
"""
EDIT = {
    "import re\n": "import collections\nimport re\n",
    "class Trainer:\n": OPTIMIZER,
    "        self.adam, self.muon = make_optimizers(self.model, config, runtime)\n": STATE,
    "        x = F.relu(self.fc(x)).square()\n": NOISE,
    "    def after_step(self):\n": "    def after_step(self):\n" + AFTER,
}


def copied(before: Live, folder: Path, step: int) -> Path:
    """A run's folder as it was when it had saved `step`."""
    shutil.copytree(before.folder, folder)
    for later in [number for number in before.checkpoints() if number > step]:
        (folder / before.checkpoint(later).relative_to(before.folder)).unlink()
    for name in ("final_model.int8.ptz", "final_model.pt", "logs/r.int8.ptz"):
        (folder / name).unlink()
    return folder


def resume(before: Live, folder: Path, step: int, ranks: int = 0, **more: object) -> Live:
    run = Live(copied(before, folder, step), ranks, **more, RESUME="auto").finish()
    assert run.resumed()[-1] == step
    return run


def refusal(folder: Path, **settings: object) -> str:
    """The one line of a run that is refused. No line of any run tells to destroy something."""
    run = Live(folder, **settings)
    assert run.end() == [1] and "Traceback" not in run.err
    [line] = run.said
    assert not re.search("remove|delete|rm ", line)
    return line


# What continues


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_resume_is_exact_whatever_the_trainer_holds(tmp_path: Path, data: dict, ranks: int) -> None:
    """Also with priming steps, which leave no trace."""
    settings = data | {"GRAD_ACCUM_STEPS": 0, "edits": EDIT}
    reference = Live(tmp_path / "whole", ranks, **settings).finish()
    held = reference.load(20)["held"]
    assert held["late"] == {"steps": 14} and held["more"][1]["param_groups"][0]["k"] == 20
    assert held["more"][1]["state"][0]["rows"].shape == (260, 1)
    assert held["more"][0]["state"][0]["step"] == 20
    once = resume(reference, tmp_path / "once", 4, ranks, **settings | {"WARMUP_STEPS": 2})
    twice = resume(once, tmp_path / "twice", 12, ranks, **settings)
    for run in (once, twice):
        assert_same_result(run, reference)
        assert run.load(20)["held"]["late"] == held["late"]
        own = [(each["of_rank"], each["grown"]) for each in run.load(20)["values"]]
        assert own == [(0.0, []), (10.0, [*range(20)])][: max(1, ranks)]
    times = [run.load(step)["train_ms"] for run, step in ((reference, 4), (once, 12), (twice, 20))]
    assert 0 < times[0] < times[1] < times[2]


def test_resume_on_other_ranks_appends_to_the_log(tmp_path: Path, data: dict, whole: Whole) -> None:
    settings = data | {"GRAD_ACCUM_STEPS": 0}
    two = resume(whole(0), tmp_path / "two", 4, 2, **settings)
    before, text = (run.text("logs/r.txt") for run in (whole(0), two))
    words = "\nresumed: step:4 resumed_from:checkpoints/r/step_00000004.pt"
    assert text.startswith(before) and words in text[len(before) :]
    names = {path.name for path in (two.folder / "logs").iterdir()}
    assert names == {"r.int8.ptz", "r.jsonl", "r.txt"}
    four = resume(two, tmp_path / "four", 12, 4, **settings)
    for run in (two, four):
        assert run.load(20)["data_crc"] == whole(0).load(20)["data_crc"]
        run.losses()  # each step twice: the same to rounding
        scores = [each.events("score")[-1]["val_bpb"] for each in (run, whole(0))]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_rates_of_this_run_win_over_those_in_the_checkpoint(tmp_path: Path, data: dict) -> None:
    """And betas, numbers that an edit keeps, what else an optimizer is made with; counters and
    other entries are restored."""
    settings = data | {"edits": EDIT, "ITERATIONS": 4}
    before = Live(tmp_path / "run", **settings).finish()
    changed = {
        old: new.replace("Rows([embedding])", "Rows([embedding], 0.5, 0.25)")
        for old, new in EDIT.items()
    }
    other = settings | {"edits": changed, "MATRIX_LR": 0.0, "BETA1": 0.5, "ITERATIONS": 8}
    other["HEAD_LR"] = 0.75
    run = resume(before, tmp_path / "again", 4, **other)
    assert "WARNING: RESUME continues with another script: " in run.log
    assert "RESUME continues with another BETA1: 0.5 here, 0.9 there" in run.log
    held = run.load(8)["held"]
    [group] = held["more"][1]["param_groups"]
    assert (group["base_lr"], group["power"], group["k"]) == (0.5, 0.25, 8)
    assert held["adam"]["param_groups"][0]["betas"] == (0.5, 0.95)
    assert (held["keep"], held["late"]) == (0.75, {"steps": 2})
    older = before.load(4)["held"]["model"]
    moved = {name for name in older if not torch.equal(older[name], held["model"][name])}
    assert "tok_emb.weight" in moved and "blocks.0.attn.c_q.weight" not in moved


def test_an_optimizer_held_twice_steps_once(tmp_path: Path, data: dict, whole: Whole) -> None:
    line = "        self.val_ms = 0.0"
    edits = {line: f"        self.mine = {{'all': [self.adam, self.muon]}}\n{line}"}
    run = Live(tmp_path / "run", 0, edits, **data).finish()
    again = resume(run, tmp_path / "again", 12, edits=edits, **data)
    for each in (run, again):
        assert_same_result(each, whole(0))


def test_a_finished_run_can_be_extended(tmp_path: Path, data: dict) -> None:
    """Without CHECKPOINT_EVERY, too."""
    settings = data | {"CHECKPOINT_EVERY": 0, "RESUME": "auto", "WARMDOWN_ITERS": 0}
    run = Live(tmp_path, **settings | {"ITERATIONS": 6}).finish()
    assert "WARNING: RESUME: r has no checkpoint: step 1 is next" in run.out
    assert run.checkpoints() == [6]
    run = Live(tmp_path, **settings).finish()
    assert run.resumed() == [6] and run.checkpoints() == [6, 20]
    straight = Live(tmp_path / "straight", **settings | {"RESUME": ""}).finish()
    assert_same_result(run, straight)


def test_resume_of_a_finished_run_scores_again(tmp_path: Path, data: dict, whole: Whole) -> None:
    """The log says so, and keeps the settings that trained."""
    again = data | {"RESUME": "auto"}
    folder = shutil.copytree(whole(0).folder, tmp_path / "run")
    run = Live(folder, **again | {"MATRIX_LR": 0.9}).finish()
    assert "no step is left: packs and scores checkpoints/r/step_00000020.pt" in run.log
    assert len(run.events("config")) == 1 and not run.resumed()
    assert_same_result(run, whole(0))
    assert "is of other things: SEED: 9 here, 1337 there" in refusal(folder, **again | {"SEED": 9})


# Saving


def test_the_newest_checkpoints_stay_and_so_do_copies(tmp_path: Path, data: dict) -> None:
    """Files of other names are neither resumed nor removed."""
    settings = data | {"ITERATIONS": 5, "CHECKPOINT_EVERY": 1, "CHECKPOINT_KEEP": 2}
    run = Live(tmp_path, **settings).finish()
    assert run.checkpoints() == [4, 5]
    written = run.events("checkpoint")
    assert [event["step"] for event in written] == [1, 2, 3, 4, 5]
    assert written[-1]["path"] == "checkpoints/r/step_00000005.pt"
    copies = [run.checkpoint(4).with_name(f"step_{n}.pt") for n in ("baseline", "00000004 (best)")]
    for path in copies:
        shutil.copy(run.checkpoint(4), path)
    run = Live(tmp_path, **settings | {"ITERATIONS": 8, "RESUME": "auto"}).finish()
    assert run.resumed() == [5] and run.checkpoints() == [7, 8]
    assert all(path.exists() for path in copies)


def test_a_full_disk_costs_a_file_and_not_the_run(tmp_path: Path, data: dict) -> None:
    for step in range(4, 21, 4):  # where the unfinished file would be
        (tmp_path / f"checkpoints/r/step_{step:08d}.tmp").mkdir(parents=True)
    (tmp_path / "final_model.pt").mkdir()
    run = Live(tmp_path, **data).finish()
    warnings = re.findall("WARNING: checkpoints/r/step_000000(..).pt: Is a directory", run.log)
    assert warnings == ["04", "08", "12", "16", "20"]
    assert "WARNING: final_model.pt: Is a directory\n" in run.out and run.artifact()


RATE = "    return min(1.0, steps_left / config.warmdown_iters)"
LINE = "        self.val_ms = 0.0"
UNSAVABLE = {  # a place, and an edit
    "hidden[0] is a builtins.object": {LINE: f"        self.hidden = [object()]\n{LINE}"},
    "mean has a key that is a torch.nn.parameter.Parameter": {
        LINE: f"        self.mean = {{p: 0.0 for p in self.model.parameters()}}\n{LINE}"
    },
    "adam.param_groups[0]['lr'] is a numpy.float64": {
        RATE: "    return min(1.0, np.float64(steps_left / config.warmdown_iters))"  # late
    },
}


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("place", UNSAVABLE)
def test_unsavable_state_is_named(tmp_path: Path, data: dict, place: str, warmup: int) -> None:
    """Or every checkpoint would be one that does not load."""
    more = {"WARMUP_STEPS": warmup, "MAX_WALLCLOCK_SECONDS": 20 * warmup}
    run = Live(tmp_path, edits=UNSAVABLE[place], **data | more)
    assert run.end() == [1]
    rule = "torch.load(weights_only=True) must be able to read it, or it needs load_state_dict"
    rule = "use texts or whole numbers" if " has a key " in place else rule
    assert run.said == [f"rank 0: {place}: {rule}"] and not run.events("step")
    assert "Traceback" not in run.err and not run.checkpoints()


# What is refused


def test_a_run_id_that_has_files_is_refused(tmp_path: Path, data: dict, whole: Whole) -> None:
    folder = shutil.copytree(whole(0).folder, tmp_path / "run")
    for gone in ("", "logs"):
        if gone:
            shutil.rmtree(folder / gone)
        run = Live(folder, **data)
        assert run.end() == [2]
        words = "RUN_ID=r: logs/r.txt or its checkpoints exist: set another RUN_ID, or RESUME=auto"
        assert words in run.err and run.checkpoints() == [4, 8, 12, 16, 20]


def test_an_older_checkpoint_is_refused(tmp_path: Path, data: dict, whole: Whole) -> None:
    """Whatever its name is: the next RESUME=auto would take another one."""
    folder = shutil.copytree(whole(0).folder, tmp_path / "run")
    path = Path("checkpoints/r/zzz.pt")
    shutil.copy(folder / "checkpoints/r/step_00000008.pt", folder / path)
    line = refusal(folder, **data | {"RESUME": path})
    assert f"RESUME={path} of {os.uname().nodename}: RUN_ID=r has step 20, and this is" in line
    newest = Path("checkpoints/r/best.pt")
    shutil.copy(folder / "checkpoints/r/step_00000020.pt", folder / newest)
    assert Live(folder, **data | {"RESUME": newest}).finish().artifact() == whole(0).artifact()
    other = Live(folder, **data | {"RESUME": path, "RUN_ID": "other"}).finish()
    assert other.artifact() == whole(0).artifact()


def test_an_empty_newest_checkpoint_is_named(tmp_path: Path, data: dict, whole: Whole) -> None:
    """As a crash of a machine may leave it. From step 1 on, older ones would be written over."""
    folder = shutil.copytree(whole(0).folder, tmp_path / "run")
    (folder / "checkpoints/r/step_00000020.pt").write_bytes(b"")
    line = refusal(folder, **data | {"RESUME": "auto"})
    assert "step_00000020.pt" in line and "does not load: File is not a zip file" in line


NOT_LOADED = {  # a file, and the reason that is given
    "missing": "No such file or directory",
    "a folder": "Is a directory",
    "cut": "File is not a zip file",
    "damaged": "its checksum is wrong",
    "weights": "it is no checkpoint",
    "command": "Weights only load failed",
}


@pytest.mark.parametrize("case", NOT_LOADED)
def test_a_bad_checkpoint_is_one_line(tmp_path: Path, data: dict, whole: Whole, case: str) -> None:
    path = tmp_path / "other.pt"
    if case == "cut":
        path.write_bytes(whole(0).checkpoint(8).read_bytes()[:20_000])
    elif case == "damaged":
        content = bytearray(whole(0).checkpoint(8).read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif case == "weights":
        shutil.copy(whole(0).folder / "final_model.pt", path)
    elif case == "a folder":
        path.mkdir()
    elif case == "command":
        torch.save({"made_of": {}, "held": {}, "step": Command(tmp_path / "executed")}, path)
    line = refusal(tmp_path / "run", **data | {"RESUME": path})
    assert line.startswith(f"rank 0: RESUME={path} of {os.uname().nodename}")
    assert NOT_LOADED[case] in line
    unread = case in ("missing", "a folder")
    remedy = "the path of a checkpoint" if unread else "another step_<n>.pt and another RUN_ID"
    assert f": set {remedy}" in line and (" does not load: " in line) != unread
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "run" / "logs").exists()
