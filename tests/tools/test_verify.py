"""tools/verify.py: silent about train_gpt.py and right edits, loud about edits that are wrong
without a word from the trainer."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import verify
from running import ROOT, Call, heed_interrupts

# Where the edits below go in train_gpt.py.
BEGIN = "        self.begin(step=0, data_crc=0)\n"  # in Trainer.__init__
CLIP = '        with phase("grad_clip"):\n'  # in Trainer.train_step, after the all-reduce
END = "        # Whatever else a step changes belongs here"
SCALE = "            scale = lr_multiplier(config, self.step, exchange.elapsed_ms(self.step))\n"
RATE = '            rate = group["lr"] * max(1.0, rows / cols) ** 0.5'
MUON = "        self.iterations = config.muon_backend_steps\n"
MUON_STEP = "        self.reduced.zero_()\n"
EMBED = "        x = x0 = rms_norm(self.tok_emb(tokens).to(self.dtype))"
HEAD = "        head = self.tok_emb if self.lm_head is None else self.lm_head\n"
HEADS = "        self.lm_head = None if config.tie_embeddings else"
SKIPS = "        self.skip_weights = nn.Parameter("
FORWARD = "        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())\n\n\n"
MEAN_NATS = "    return F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())\n"
EXPORT = "        state = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}\n"
EVALUATE = """\
        self.model.eval()
        result = self.validation.evaluate(self.model, scope)
        self.model.train()
"""
SCORE = "                nats = self.mean_nats(model, batch.x, batch.y).double() * targets\n"
MICRO_STEPS = "        for batch in islice(batches, self.runtime.micro_steps):\n"

DROPOUT = (HEAD, "        x = F.dropout(x, 0.1, self.training)\n" + HEAD)
# A step of gradient descent on a batch of the validation.
LEARN = """\
{indent}with torch.enable_grad():
{indent}    grads = torch.autograd.grad(model(batch.x, batch.y), list(model.parameters()))
{indent}torch._foreach_add_(list(model.parameters()), grads, alpha=-0.1)
"""


def learning(first: bool, restored: bool) -> list[tuple[str, str]]:
    """Test-time training: it learns from a batch before or after it scores it."""
    learn = LEARN.format(indent=" " * 16)
    score = (SCORE, learn + SCORE if first else SCORE + learn)
    if not restored:
        return [score]
    saved = "        saved = [p.detach().clone() for p in self.model.parameters()]\n"
    put_back = (
        "        torch._foreach_copy_([p.detach() for p in self.model.parameters()], saved)\n"
    )
    return [score, (EVALUATE, saved + EVALUATE + put_back)]


def averaged(holder: str, when: str) -> list[tuple[str, str]]:
    """An average of the weights, which is exported."""
    named = "self.model.named_parameters()"
    return [
        (BEGIN, f"        {holder} = {{n: p.detach().clone() for n, p in {named}}}\n" + BEGIN),
        (
            END,
            f"""\
        if {when}:
            for name, p in {named}:
                {holder}[name].lerp_(p.detach(), 0.1)
{END}""",
        ),
        (EXPORT, EXPORT + f"        state |= {holder}\n"),
    ]


COUNTED = [
    (MUON, MUON + "        self.seen = 0\n"),
    (MUON_STEP, "        self.seen += 1\n" + MUON_STEP),
]
FAULTS = {  # what each edit breaks; the trainer itself says nothing, or only on two ranks
    "noise on the gradients of each rank": (
        {"ranks", "replicas"},
        [
            (
                CLIP,
                "        noise = torch.randn_like(exchange.gradients)\n"
                "        exchange.gradients.add_(noise, alpha=0.001)\n" + CLIP,
            )
        ],
    ),
    "a count in an optimizer's attribute": (
        {"resume", "priming"},
        [*COUNTED, (RATE, RATE + " * (1 + 0.1 * self.seen)")],
    ),
    "an average in the model's attribute": (
        {"resume", "priming"},
        averaged("self.model.average", "True"),
    ),
    "an average in the model's attribute, in the last steps": (
        {"resume"},
        averaged("self.model.average", "self.step > 6"),
    ),
    "a buffer that is not saved": (
        {"resume", "priming", "score", "ranks"},
        [
            (
                SKIPS,
                '        self.register_buffer("level", torch.ones(()), persistent=False)\n' + SKIPS,
            ),
            (EMBED, "        self.level += 0.1 * self.training\n" + EMBED + " * self.level"),
        ],
    ),
    "random numbers without a seed": (
        {"repeatable"},
        [(EMBED, EMBED + " * random.Random().uniform(0.5, 1.5)")],
    ),
    "random numbers with a seed of their own": (
        {"resume", "priming"},
        [
            (BEGIN, "        self.model.random = random.Random(1)\n" + BEGIN),
            (SCALE, SCALE + "            scale *= self.model.random.uniform(0.5, 1.5)\n"),
        ],
    ),
    "a rate that depends on the last loss": (
        {"resume"},
        [(SCALE, SCALE + "            scale *= 1 + exchange.mean_loss()\n")],
    ),
    "half of the micro-steps at first": (
        {"resume", "ranks"},
        [
            (
                MICRO_STEPS,
                "        few = self.runtime.micro_steps // (1 + (self.step < 6))\n"
                "        for batch in islice(batches, few):\n",
            )
        ],
    ),
    "a validation that trains": (
        {"validation", "unseen", "score", "ranks", "resume"},
        learning(first=False, restored=False),
    ),
    "a validation that turns dropout off": (
        {"validation"},
        [DROPOUT, (EVALUATE, EVALUATE.replace("self.model.train()", "self.model.eval()"))],
    ),
    "a score with dropout": (
        {"score", "resume"},
        [DROPOUT, (EVALUATE, EVALUATE.replace(".eval()", ".train()"))],
    ),
    "a score of weights that are not quantized": (
        {"score"},
        [("load_state_dict(unpack(data, state))", "load_state_dict(state)")],
    ),
    "a score of smoothed targets": (
        {"score"},
        [(MEAN_NATS, MEAN_NATS.replace("flatten())", "flatten(), label_smoothing=0.1)"))],
    ),
    "a space counted after each boundary": (
        {"score"},
        [("self.leading_space[target] & ~self.boundary[x]", "self.leading_space[target]")],
    ),
    "attention to later tokens": (
        {"look-ahead"},
        [("is_causal=True", "is_causal=False")],
    ),
    "a gate, zero at first, for later tokens": (
        {"look-ahead"},
        [
            (SKIPS, "        self.later = nn.Parameter(torch.zeros(D))\n" + SKIPS),
            (HEAD, "        x = x + self.later * x.roll(-1, 1)\n" + HEAD),
        ],
    ),
    "a training-only head in the artifact": (
        {"artifact"},
        [
            (HEADS, "        self.second_head = Linear(D, config.vocab_size)\n" + HEADS),
            (
                FORWARD,
                "        second = F.cross_entropy(self.second_head(self.tok_emb(x)).mT, y)\n"
                + FORWARD.replace("\n\n\n", " + 0.1 * second\n\n\n"),
            ),
        ],
    ),
    "an export that depends on what the last step has set": (
        {"resume"},
        [
            (BEGIN, "        self.model.late = False\n" + BEGIN),
            (END, "        self.model.late = self.step > 6\n" + END),
            (EXPORT, EXPORT + '        state["skip_weights"] *= 1 + self.model.late\n'),
        ],
    ),
    "a parameter in no optimizer": (
        {"trained"},
        [('{"params": others, ', '{"params": others[1:], ')],
    ),
    "a parameter in two optimizers": (
        {"trained"},
        [(BEGIN, "        self.sgd = torch.optim.SGD([self.model.tok_emb.weight], 0.1)\n" + BEGIN)],
    ),
    "a tensor in an optimizer that is no parameter": (
        {"trained"},
        [
            (
                BEGIN,
                "        self.sgd = torch.optim.SGD([torch.ones(3).requires_grad_()])\n" + BEGIN,
            )
        ],
    ),
    "training on the validation split": (
        {"unseen"},
        [('self.shards = Shards(config, "train")', 'self.shards = Shards(config, "val")')],
    ),
    "blocks that share weights, stored once for each": (
        {"artifact"},
        [
            (
                "Block(config) for _ in range(config.num_layers)",
                "[Block(config)] * config.num_layers",
            )
        ],
    ),
    "a log line that changes weights": (
        {"validation"},
        [
            (
                "    run.logged = step, ms, wait_ms\n",
                "    run.logged = step, ms, wait_ms\n    run.model.skip_weights.data.mul_(0.9)\n",
            )
        ],
    ),
}
RIGHT = [  # edits that once were refused or lost, all in one script
    DROPOUT,
    *averaged("self.average", "True"),
    # a number that counts late steps, random numbers of Python
    ("        self.val_ms = 0.0", "        self.late_steps = 0\n        self.val_ms = 0.0"),
    (
        SCALE,
        SCALE + "            self.late_steps += self.step > 8\n"
        "            scale /= 1 + self.late_steps\n",
    ),
    (EMBED, EMBED + " * (random.uniform(0.9, 1.1) if self.training else 1.0)"),
    # a state of one number for each row, an entry in param_groups
    (
        MUON_STEP,
        """\
        for p in self.matrices:
            rows = self.state[p].setdefault("rows", torch.zeros(p.size(0), 1))
            rows.lerp_(p.grad.square().mean(1, keepdim=True), 0.1)
            p.grad.div_(rows.sqrt() + 1e-8)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
"""
        + MUON_STEP,
    ),
    (RATE, RATE + ' / group["count"] ** 0.1'),
]


def edited(folder: Path, replacements: list[tuple[str, str]]) -> Path:
    """train_gpt.py with some texts replaced, each of which it must have once."""
    text = (ROOT / "train_gpt.py").read_text("utf-8")
    for old, new in replacements:
        assert text.count(old) == 1, f"train_gpt.py has {text.count(old)} times: {old}"
        text = text.replace(old, new)
    path = folder / "mine.py"
    path.write_text(text, "utf-8")
    return path


def faults_of(found: Iterable[tuple[str, str, str]]) -> set[str]:
    rows = list(found)
    print("\n".join(map(str, rows)))
    return {name for name, verdict, _ in rows if verdict == "FAULT"}


@pytest.mark.slow
def test_train_gpt_keeps_all_promises(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITERATIONS", "7")  # a user's settings are not those of the tiny runs
    code, out, err = call(verify.main, ROOT / "train_gpt.py")
    assert (code, err) == (0, "")
    verdicts = dict(line.split()[1::-1] for line in out.splitlines()[1:-1])
    assert verdicts.pop("bytes") == "note"
    assert set(verdicts.values()) == {"ok"}
    every = {*verify.MEANS} - {"model", "sum", "bytes"}
    assert verdicts.keys() == every


def living(group: int) -> list[list[str]]:
    """The processes of a group."""
    listed = subprocess.check_output(["ps", "-e", "-o", "pgid=,stat=,args="], text=True)
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    return [row for row in rows if row[0] == str(group) and row[1][0] != "Z"]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For temporary files, among them sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.slow
def test_interrupt_ends_all_processes(temporary: Path) -> None:
    script = edited(temporary, [(END, "        time.sleep(300 * (self.step == 5))\n" + END)])
    command = [sys.executable, ROOT / "tools" / "verify.py", script, "WARMUP_STEPS=0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, **pipes, start_new_session=True, preexec_fn=heed_interrupts)
    try:
        until = time.monotonic() + 120
        while not list(temporary.glob("verify-*/full/checkpoints/full/step_00000005.pt")):
            assert time.monotonic() < until and run.poll() is None
            time.sleep(0.05)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        out, err = run.communicate(timeout=90)
        assert (run.returncode, out.count("\n"), err) == (130, 1, "")
        time.sleep(1)  # the server of processes ends when verify.py has ended
        assert living(run.pid) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert not list(temporary.glob("verify-*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_names_what_an_edit_breaks(name: str, tmp_path: Path) -> None:
    broken, replacements = FAULTS[name]
    assert faults_of(verify.verdicts(edited(tmp_path, replacements), {}, quick=True)) == broken


@pytest.mark.slow
def test_is_silent_about_right_edits(tmp_path: Path) -> None:
    assert faults_of(verify.verdicts(edited(tmp_path, RIGHT), {}, quick=True)) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "broken"), [(False, set()), (True, {"sum"})])
def test_learning_before_a_score_is_a_fault_and_after_it_is_none(
    first: bool, broken: set[str], tmp_path: Path
) -> None:
    script = edited(tmp_path, learning(first, restored=True))
    assert faults_of(verify.verdicts(script, {}, quick=True, score_differs=True)) == broken


@pytest.mark.slow
def test_base_shows_an_edit_without_effect(tmp_path: Path) -> None:
    rate = '        self.adam.param_groups[0]["lr"] = 0.001\n'  # the next step sets it again
    script = edited(tmp_path, [(END, rate + END)])
    rows = list(verify.verdicts(script, {}, base=ROOT / "train_gpt.py", quick=True))
    assert rows[-1][:2] == ("effect", "note")
    assert rows[-1][2].startswith("against train_gpt.py the edit changes nothing, bit for bit")


@pytest.mark.slow
def test_says_why_an_edit_does_not_run(tmp_path: Path) -> None:
    script = edited(tmp_path, [(BEGIN, "        self.average = object()\n" + BEGIN)])
    with pytest.raises(
        verify.cli.ToolError, match=r"tiny size: .*Trainer\['average'\] is a object"
    ):
        list(verify.verdicts(script, {}, quick=True))
