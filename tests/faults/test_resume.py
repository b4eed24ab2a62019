"""Tests of RESUME: it continues a run exactly, and it refuses to continue as a different run."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults.live import Live, assert_same_result, edit_each_step
from running import Command

ReferenceRun = Callable[[int], Live]

# An edit that adds several kinds of state: an average of the weights, a counter of late steps,
# AdamW on the embedding, and random numbers of Python, numpy and torch in the model.
MADE = "        self.adam, self.muon = make_optimizers(self.model, config, runtime)\n"
STATE = """        self.adam.param_groups = self.adam.param_groups[1:]
        self.adamw = torch.optim.AdamW([self.model.tok_emb.weight], lr=0.01, fused=False)
        self.ema = copy.deepcopy(self.model)
        self.late = {"steps": 0}
        self.begun = None  # the skip weights after step 2
        self.free = [print, np.random.default_rng(1), torch.Generator(), Path("x"), deque([1])]
        self.free += [self.model, self.model.tok_emb, self.model.tok_emb.weight[1:]]
"""
PARTS = '"muon": self.muon, '
NUMBERS = '"over": self.finished_training, '

NOISE = """        x = F.relu(self.fc(x)).square()
        if self.training:
            x = x * (0.9 + 0.1 * random.random()) * (0.9 + 0.1 * np.random.rand())
            x = F.dropout(x, 0.1)
"""
AFTER = """        skips = self.model.skip_weights
        torch._foreach_lerp_(list(self.ema.parameters()), list(self.model.parameters()), 0.1)
        self.late["steps"] += self.step >= 6
        if self.step == 2:
            self.begun = skips.detach().clone()
        if self.begun is not None:
            skips.lerp_(self.begun, 1e-3 * self.late["steps"])
"""
EDIT = {
    MADE: MADE + STATE,
    "        x = F.relu(self.fc(x)).square()\n": NOISE,
    PARTS: PARTS + '"ema": self.ema, "adamw": self.adamw, ',
    NUMBERS: NUMBERS + '"late": self.late, "begun": self.begun, ',
    "    def after_step(self):\n": "    def after_step(self):\n" + AFTER,
}


def copy_run_folder(before: Live, folder: Path, step: int) -> Path:
    """Copy a run's folder, as it was after the checkpoint of `step`."""
    shutil.copytree(before.folder, folder)
    for later in [number for number in before.checkpoint_steps() if number > step]:
        (folder / before.checkpoint(later).relative_to(before.folder)).unlink()
    for name in ("final_model.int8.ptz", "final_model.pt", "logs/r.int8.ptz"):
        (folder / name).unlink()
    return folder


def resume_copy(before: Live, folder: Path, step: int, ranks: int = 0, **more: object) -> Live:
    run = Live(copy_run_folder(before, folder, step), ranks, **more, RESUME="auto").finish()
    assert run.resumed_steps()[-1] == step
    return run


def run_refused(folder: Path, **settings: object) -> str:
    """Start a run that must be refused; return its one line, which must not advise deleting."""
    run = Live(folder, **settings)
    assert run.wait_for_exit() == [1] and "Traceback" not in run.err
    [line] = run.error_lines
    assert not re.search("remove|delete|rm ", line)
    return line


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_resume_is_exact_for_all_state_that_is_saved(
    tmp_path: Path, data: dict, ranks: int
) -> None:
    """Warm-up steps before the resumed steps change nothing."""
    settings = data | {"GRAD_ACCUM_STEPS": 0, "edits": EDIT}
    reference = Live(tmp_path / "whole", ranks, **settings).finish()
    parts = reference.load_checkpoint(20)["parts"]
    assert parts["run"]["late"] == {"steps": 14} and parts["adamw"]["state"][0]["step"] == 20
    once = resume_copy(reference, tmp_path / "once", 4, ranks, **settings | {"WARMUP_STEPS": 2})
    twice = resume_copy(once, tmp_path / "twice", 12, ranks, **settings)
    for run in (once, twice):
        assert_same_result(run, reference)
        again = run.load_checkpoint(20)["parts"]
        assert again["run"]["late"] == {"steps": 14}
        assert all(torch.equal(t, parts["ema"][name]) for name, t in again["ema"].items())
    times = [
        run.load_checkpoint(step)["train_ms"]
        for run, step in ((reference, 4), (once, 12), (twice, 20))
    ]
    assert 0 < times[0] < times[1] < times[2]


def test_resume_on_other_ranks_appends_to_the_log(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    settings = data | {"GRAD_ACCUM_STEPS": 0}
    two = resume_copy(reference_run(0), tmp_path / "two", 4, 2, **settings)
    before, text = (run.read("logs/r.txt") for run in (reference_run(0), two))
    words = "\nresumed: step:4 resumed_from:checkpoints/r/step_00000004.pt"
    assert text.startswith(before) and words in text[len(before) :]
    names = {path.name for path in (two.folder / "logs").iterdir()}
    assert names == {"r.int8.ptz", "r.jsonl", "r.txt"}
    four = resume_copy(two, tmp_path / "four", 12, 4, **settings)
    for run in (two, four):
        assert (
            run.load_checkpoint(20)["data_crc"] == reference_run(0).load_checkpoint(20)["data_crc"]
        )
        run.losses()  # a step that was trained twice gave the same loss up to rounding
        scores = [each.events("score")[-1]["val_bpb"] for each in (run, reference_run(0))]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_learning_rates_of_this_run_replace_those_in_the_checkpoint(
    tmp_path: Path, data: dict
) -> None:
    """So do betas and the other arguments of an optimizer. Counters are restored."""
    settings = data | {"edits": EDIT, "ITERATIONS": 4}
    before = Live(tmp_path / "run", **settings).finish()
    changed = EDIT | {MADE: MADE + STATE.replace("lr=0.01", "lr=0.5, eps=0.25")}
    other = settings | {"edits": changed, "MATRIX_LR": 0.0, "BETA1": 0.5, "ITERATIONS": 8}
    run = resume_copy(before, tmp_path / "again", 4, **other)
    assert "WARNING: RESUME continues with another script: " in run.text
    assert "RESUME continues with another BETA1: 0.5 in this run, 0.9 in the checkpoint" in run.text
    parts = run.load_checkpoint(8)["parts"]
    [group] = parts["adamw"]["param_groups"]
    assert (group["base_lr"], group["eps"]) == (0.5, 0.25)
    assert parts["adamw"]["state"][0]["step"] == 8
    assert parts["adam"]["param_groups"][0]["betas"] == (0.5, 0.95)
    assert parts["run"]["late"] == {"steps": 2}
    older = before.load_checkpoint(4)["parts"]["model"]
    moved = {name for name in older if not torch.equal(older[name], parts["model"][name])}
    assert "tok_emb.weight" in moved and "blocks.0.attn.c_q.weight" not in moved


LINE = "        self.val_ms = 0.0"
FORGOTTEN = {  # {an attribute of the Trainer: its place in the message}
    "self.mean = {'fast': torch.zeros(3)}": "mean.fast",
    "self.held = [(torch.zeros(3),)]": "held.0.0",
    "self.other = nn.Linear(2, 2)": "other.weight",
    "self.more = {'lion': torch.optim.SGD(self.model.parameters())}": "more.lion",
}


@pytest.mark.parametrize("code", FORGOTTEN)
def test_state_that_would_not_be_saved_is_an_error(tmp_path: Path, data: dict, code: str) -> None:
    """It is found by its type, before the first step. RESUME would start without this state."""
    run = Live(tmp_path, 0, {LINE: f"        {code}\n{LINE}"}, **data)
    assert run.wait_for_exit() == [1] and not run.events("step")
    place = f"rank 0: Trainer.{FORGOTTEN[code]} would not be saved in checkpoints; "
    [line] = run.error_lines
    assert line.startswith(place) and "add it to Trainer.parts or to Trainer.state_dict" in line


def test_state_that_the_first_steps_create_is_found_after_the_warm_up(
    tmp_path: Path, data: dict
) -> None:
    """The warm-up would change it, and RESUME would start without it."""
    edits = {LINE: f"        self.average = None\n{LINE}"}
    edits |= edit_each_step("self.average = (self.average or 0) + torch.ones(1)")
    run = Live(tmp_path, 0, edits, **data | {"WARMUP_STEPS": 2})
    assert run.wait_for_exit() == [1] and not run.events("step")
    [line] = run.error_lines
    assert line.startswith("rank 0: Trainer.average would not be saved in checkpoints; create it ")


def test_an_optimizer_that_a_subclass_adds_follows_the_schedule(tmp_path: Path, data: dict) -> None:
    """It comes after Trainer.__init__, and its rate may change when the run is resumed."""
    line = "        run = Trainer(config, runtime, log, data)\n"
    code = """
        class Own(Trainer):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                self.parts["sgd"] = torch.optim.SGD([self.model.skip_weights], lr=0.25)

        run = Own(config, runtime, log, data)
"""
    before = Live(tmp_path / "run", 0, {line: code}, **data | {"ITERATIONS": 4}).finish()
    [group] = before.load_checkpoint(4)["parts"]["sgd"]["param_groups"]
    assert group["base_lr"] == 0.25 and 0 < group["lr"] < 0.25
    changed = {"edits": {line: code.replace("lr=0.25", "lr=0.5")}, "ITERATIONS": 8}
    run = resume_copy(before, tmp_path / "again", 4, **data | changed)
    [group] = run.load_checkpoint(8)["parts"]["sgd"]["param_groups"]
    assert group["base_lr"] == 0.5


@pytest.mark.parametrize("more", [0, 1])
def test_a_part_that_is_missing_in_run_or_checkpoint_is_an_error(
    tmp_path: Path, data: dict, reference_run: ReferenceRun, more: int
) -> None:
    edits = {PARTS: PARTS + '"mean": nn.Linear(1, 1), '}
    before = reference_run(0)
    if not more:
        before = Live(tmp_path / "before", 0, edits, **data | {"ITERATIONS": 4}).finish()
        edits = None
    folder = shutil.copytree(before.folder, tmp_path / "run")
    line = run_refused(folder, **data | {"edits": edits, "RESUME": "auto", "ITERATIONS": 24})
    own, other = ("Linear", "missing") if more else ("missing", "Linear")
    assert f"Trainer.parts mean: {own} in this run, {other} in the checkpoint" in line


SCALES = """        self.attn_scale = nn.Parameter(ones.clone())
        self.mlp_scale = nn.Parameter(ones.clone())
"""


def test_another_order_of_parameters_is_an_error(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    """Their shapes are equal, and a checkpoint has an optimizer's parameters by position only."""
    folder = copy_run_folder(reference_run(0), tmp_path / "run", 8)
    order = {SCALES: "".join(reversed(SCALES.splitlines(keepends=True)))}
    line = run_refused(folder, edits=order, **data | {"RESUME": "auto"})
    assert "the optimizers train other parameters than before, or in another order" in line


def test_a_finished_run_can_be_extended(tmp_path: Path, data: dict) -> None:
    """This also works without CHECKPOINT_EVERY."""
    settings = data | {"CHECKPOINT_EVERY": 0, "RESUME": "auto", "WARMDOWN_ITERS": 0}
    run = Live(tmp_path, **settings | {"ITERATIONS": 6}).finish()
    assert (
        "WARNING: RESUME=auto found no checkpoint of RUN_ID=r; the run begins at step 1" in run.out
    )
    assert run.checkpoint_steps() == [6]
    run = Live(tmp_path, **settings).finish()
    assert run.resumed_steps() == [6] and run.checkpoint_steps() == [6, 20]
    straight = Live(tmp_path / "straight", **settings | {"RESUME": ""}).finish()
    assert_same_result(run, straight)


def test_resume_of_a_finished_run_scores_again(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    """The log says so, and keeps the settings with which the run was trained."""
    again = data | {"RESUME": "auto"}
    folder = shutil.copytree(reference_run(0).folder, tmp_path / "run")
    run = Live(folder, **again | {"MATRIX_LR": 0.9}).finish()
    assert "training is complete: packing and scoring checkpoints/r/step_00000020.pt" in run.text
    assert len(run.events("config")) == 1 and not run.resumed_steps()
    assert_same_result(run, reference_run(0))
    assert "does not match this run: SEED: 9 in this run, 1337 in the checkpoint" in run_refused(
        folder, **again | {"SEED": 9}
    )


def test_the_newest_checkpoints_stay_and_so_do_copies(tmp_path: Path, data: dict) -> None:
    """Files with other names are neither used for a resume nor removed."""
    settings = data | {"ITERATIONS": 5, "CHECKPOINT_EVERY": 1, "CHECKPOINT_KEEP": 2}
    run = Live(tmp_path, **settings).finish()
    assert run.checkpoint_steps() == [4, 5]
    written = run.events("checkpoint")
    assert [event["step"] for event in written] == [1, 2, 3, 4, 5]
    assert written[-1]["path"] == "checkpoints/r/step_00000005.pt"
    copies = [run.checkpoint(4).with_name(f"step_{n}.pt") for n in ("baseline", "00000004 (best)")]
    for path in copies:
        shutil.copy(run.checkpoint(4), path)
    run = Live(tmp_path, **settings | {"ITERATIONS": 8, "RESUME": "auto"}).finish()
    assert run.resumed_steps() == [5] and run.checkpoint_steps() == [7, 8]
    assert all(path.exists() for path in copies)


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, data: dict) -> None:
    (tmp_path / "checkpoints/r/step.tmp").mkdir(parents=True)  # where the unfinished file would be
    (tmp_path / "final_model.pt").mkdir()
    run = Live(tmp_path, **data).finish()
    warnings = re.findall(
        "WARNING: checkpoints/r/step_000000(..).pt could not be saved: Is a directory", run.text
    )
    assert warnings == ["04", "08", "12", "16", "20"]
    assert (
        "WARNING: final_model.pt could not be written: Is a directory\n" in run.out
        and run.artifact()
    )


UNSAVABLE = {  # {a part: an edit that gives it state that cannot be saved}
    "run": {NUMBERS: NUMBERS + '"hidden": object(), '},
    "muon": {  # from the first step on
        "    def after_step(self):\n": """    def after_step(self):
        self.muon.param_groups[0]["k"] = np.float64(1)
"""
    },
}


@pytest.mark.parametrize("part", UNSAVABLE)
def test_state_that_cannot_be_saved_is_an_error(tmp_path: Path, data: dict, part: str) -> None:
    """Otherwise the checkpoints could not be loaded."""
    run = Live(tmp_path, edits=UNSAVABLE[part], **data | {"WARMUP_STEPS": 2})
    assert run.wait_for_exit() == [1] and not run.events("step") and not run.checkpoint_steps()
    reason = "GLOBAL object" if part == "run" else "numpy._core.multiarray.scalar"
    [line] = run.error_lines
    assert line.startswith(
        f'rank 0: Trainer.parts["{part}"] contains what a checkpoint cannot hold: '
    )
    assert reason in line and "Traceback" not in run.err


NO_ROOM = """            held = [each.stat().st_size for each in path.parent.glob("*.pt")]
            if path.name.startswith("step_") and sum(held) + len(data) > 2.6 * len(data):
                raise OSError(28, "No space left on device")
            file.write(data)
"""


def test_a_disk_error_removes_no_older_checkpoint(tmp_path: Path, data: dict) -> None:
    """Removing checkpoints only helps if the disk is full."""
    error = """            if "step" in temporary_name and list(path.parent.glob("step_*8.pt")):
                raise OSError(5, "Input/output error")
            file.write(data)
"""
    run = Live(tmp_path, 0, {"            file.write(data)\n": error}, **data).finish()
    assert run.checkpoint_steps() == [4, 8]
    assert run.text.count(": Input/output error") == 3


@pytest.mark.parametrize("keep", [1, 3])
def test_older_checkpoints_make_room_for_the_newest(tmp_path: Path, data: dict, keep: int) -> None:
    """The disk has room for two checkpoints. Older ones are removed only if room is needed."""
    edits = {"            file.write(data)\n": NO_ROOM}
    run = Live(tmp_path, 0, edits, **data | {"CHECKPOINT_KEEP": keep}).finish()
    assert [event["step"] for event in run.events("checkpoint")] == [4, 8, 12, 16, 20]
    assert run.checkpoint_steps() == ([20] if keep == 1 else [16, 20])
    assert "No space" not in run.text


def test_out_of_memory_while_saving_loses_only_that_checkpoint(tmp_path: Path, data: dict) -> None:
    text = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"
    edits = {
        '    try:\n        with warn_if_slow(run.log.line, f"for {path} to be': f"""    try:
        if run.step == 8:
            raise RuntimeError("{text}")
        with warn_if_slow(run.log.line, f"for {{path}} to be"""
    }
    run = Live(tmp_path, 0, edits, **data).finish()
    assert run.checkpoint_steps() == [4, 12, 16, 20]
    assert (
        run.text.count("WARNING: checkpoints/r/step_00000008.pt could not be saved: [enforce fail")
        == 1
    )


def test_a_run_id_that_has_files_is_refused(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    folder = shutil.copytree(reference_run(0).folder, tmp_path / "run")
    for gone in ("", "logs"):
        if gone:
            shutil.rmtree(folder / gone)
        run = Live(folder, **data)
        assert run.wait_for_exit() == [2]
        words = "RUN_ID=r already has a log or checkpoints (logs/r.txt); set another RUN_ID"
        assert words in run.err and run.checkpoint_steps() == [4, 8, 12, 16, 20]


def test_an_older_checkpoint_is_refused(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    """It is refused under any name, because the next RESUME=auto would take the newest one."""
    folder = shutil.copytree(reference_run(0).folder, tmp_path / "run")
    path = Path("checkpoints/r/zzz.pt")
    shutil.copy(folder / "checkpoints/r/step_00000008.pt", folder / path)
    line = run_refused(folder, **data | {"RESUME": path})
    assert (
        f"RESUME={path} of {os.uname().nodename} is of step 8, but RUN_ID=r already has a "
        "checkpoint of step 20; " in line
    )
    newest = Path("checkpoints/r/best.pt")
    shutil.copy(folder / "checkpoints/r/step_00000020.pt", folder / newest)
    assert (
        Live(folder, **data | {"RESUME": newest}).finish().artifact() == reference_run(0).artifact()
    )
    other = Live(folder, **data | {"RESUME": path, "RUN_ID": "other"}).finish()
    assert other.artifact() == reference_run(0).artifact()


def test_an_empty_newest_checkpoint_is_an_error(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    """A crash of the machine may leave it. A new start would overwrite older checkpoints."""
    folder = shutil.copytree(reference_run(0).folder, tmp_path / "run")
    (folder / "checkpoints/r/step_00000020.pt").write_bytes(b"")
    line = run_refused(folder, **data | {"RESUME": "auto"})
    assert "step_00000020.pt" in line and "empty or cannot be read; set the path" in line


NOT_LOADED = {  # {what is wrong with the file: the reason in the message}
    "missing": "cannot be read",
    "a folder": "cannot be read",
    "damaged": "its checksum is wrong",
    "weights": "is not a checkpoint of this version of the script",
    "command": "Weights only load failed",
}


@pytest.mark.parametrize("case", NOT_LOADED)
def test_a_bad_checkpoint_gives_one_line(
    tmp_path: Path, data: dict, reference_run: ReferenceRun, case: str
) -> None:
    path = tmp_path / "other.pt"
    if case == "damaged":
        content = bytearray(reference_run(0).checkpoint(8).read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif case == "weights":
        shutil.copy(reference_run(0).folder / "final_model.pt", path)
    elif case == "a folder":
        path.mkdir()
    elif case == "command":
        torch.save({"made_of": {}, "held": {}, "step": Command(tmp_path / "executed")}, path)
    line = run_refused(tmp_path / "run", **data | {"RESUME": path})
    assert line.startswith(f"rank 0: RESUME={path} of {os.uname().nodename}")
    assert NOT_LOADED[case] in line
    remedy = "set a new RUN_ID, because a RUN_ID continues from its newest checkpoint only"
    remedy = "set the path of a checkpoint" if "cannot" in NOT_LOADED[case] else remedy
    made_by = "the log of that run begins with a copy of the script"
    remedy = made_by if case == "weights" else remedy
    assert line.endswith(remedy)
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "run" / "logs").exists()
