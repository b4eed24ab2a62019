"""Tests of recipes from the records of 27 and 29 April 2026.

Each recipe is compared with a plain reference, written from a description of what these records do.
"""

import itertools
import math
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reference import Reference
from running import make_config, make_log, write_split
from tiny import (
    MODEL_RECIPES,
    SETTINGS,
    attend_by_mask,
    call_on_all_ranks,
    randomize_weights,
    script_module,
    settings_for,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

Run = Callable[..., Any]
ALONE = {"WORLD_SIZE": "1"}


def compute_score(run: Any) -> tuple:
    """Return the final score: (nats, bits per byte, milliseconds)."""
    return run.scorer.evaluate(run.model, "x")


# --- byte_sidecar -----------------------------------------------------------------------------


@pytest.fixture
def with_bytes(data: SimpleNamespace, tmp_path: Path) -> SimpleNamespace:
    """Copy the data and add a file of bytes per validation token, which differ from the table's."""
    folder = tmp_path / "with_bytes"
    shutil.copytree(data.folder, folder)
    numbers = np.random.default_rng(1).integers(0, 6, len(data.val))
    numbers[data.val < 4] = 0  # control tokens
    write_split(folder, "val_bytes", numbers, [])
    return SimpleNamespace(env={"DATA_PATH": str(folder)}, numbers=numbers, folder=folder)


@pytest.mark.parametrize("stride", [0, 8])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_per_byte_use_the_bytes_of_the_sidecar_file(
    stride: int, ranks: int, make_run: Run, with_bytes: SimpleNamespace
) -> None:
    names = ("byte_sidecar", "sliding_window") if stride else ("byte_sidecar",)
    settings = {"BYTE_SIDECAR": 1, "GRAD_ACCUM_STEPS": 8 // ranks} | with_bytes.env
    settings |= {"EVAL_STRIDE": stride} if stride else {}
    runs, scores = call_on_all_ranks(make_run(names, ranks=ranks, **settings), compute_score)
    targets = (600 - 1) // 32 * 32
    in_bytes = with_bytes.numbers[1 : targets + 1].sum()
    for nats, bpb, _ in scores:
        assert bpb == pytest.approx(nats * targets / np.log(2) / in_bytes, rel=1e-12)
    made = script_module(runs[0]).fingerprint(runs[0].config, runs[0].data)
    assert "fineweb_val_bytes_000000.bin" in made, "its checksum decides the score"


def test_rejects_bytes_of_other_tokens(
    script: Callable, data: SimpleNamespace, with_bytes: SimpleNamespace
) -> None:
    module = script("byte_sidecar")
    env = data.env | with_bytes.env | {"VOCAB_SIZE": 260, "DEVICE": "cpu", "BYTE_SIDECAR": 1}
    config = make_config(module, **env, TRAIN_SEQ_LEN=32, TRAIN_BATCH_TOKENS=2048)
    assert module.check_settings(config, ALONE)[0] == []
    path = f"{with_bytes.folder.resolve()}/fineweb_val_bytes_*.bin"
    write_split(with_bytes.folder, "val_bytes", with_bytes.numbers[1:], [])
    wanted = f"{path} do not fit the validation shards: they end after [1999] tokens, the shards "
    wanted += "after [2000]; get the byte files of these shards"
    assert module.check_settings(config, ALONE)[0] == [wanted]
    write_split(with_bytes.folder, "val_bytes", np.roll(with_bytes.numbers, 1), [])
    runtime, opened = module.Runtime(config, {}), module.check_settings(config, ALONE)[1]
    validation = module.Validation(config, runtime, make_log(module), nullcontext, opened)
    named = r"tokens 0 to 1984: [1-5] bytes for control token 1"
    with closing(validation.batches()) as batches, pytest.raises(module.RunError, match=named):
        next(batches)
    (with_bytes.folder / "fineweb_val_bytes_000000.bin").unlink()
    [fault] = module.check_settings(config, ALONE)[0]
    assert "no fineweb_val_bytes_*.bin" in fault
    on_gpu = replace(config, val_bytecount_device="cuda")
    faults, _ = module.check_settings(on_gpu, ALONE)
    words = "does not work with BYTE_SIDECAR=1; set VAL_BYTECOUNT_DEVICE=cpu"
    assert f"VAL_BYTECOUNT_DEVICE=cuda {words}" in faults


# --- documents --------------------------------------------------------------------------------

DOCUMENTS = {"DOC_TOKEN": 1, "DOC_MAX": 24, "DOC_ENDS": 200}
LAYERS = {"NUM_LAYERS": 5, "NUM_HEADS": 4, "NUM_KV_HEADS": 2}
alone_and_in_a_stack = pytest.mark.parametrize(
    "names", [(), tuple(MODEL_RECIPES)], ids=["alone", "stack"]
)


def split_into_segments(row: list[int], longest: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each segment, found token by token."""
    starts: list[int] = []
    for i, token in enumerate(row):
        if i == 0 or token == 1 or i - starts[-1] == longest:
            starts.append(i)
    return list(itertools.pairwise([*starts, len(row)]))


@alone_and_in_a_stack
def test_packed_logits_equal_those_of_each_document_alone(names: tuple, make_run: Run) -> None:
    """The sequences are longer than TRAIN_SEQ_LEN; the reference computes in float64."""
    settings = LAYERS | DOCUMENTS | settings_for(*names)
    run = make_run(("documents", *names), **settings)
    model = randomize_weights(run)
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(4, 260, (2, 96), generator=random)
    for row in tokens:  # the token 1 begins a document, also twice in succession and at the end
        row[torch.randint(96, (8,), generator=random)] = 1
    tokens[0, 40:42] = 1
    tokens[1, -1] = 1
    tokens[1, 7:80] = torch.arange(7, 80) + 100  # longer than three times DOC_MAX
    reference = Reference(model, run.config)
    for model.looping in (False, True) if names else (False,):
        with torch.no_grad():
            logits = model.logits(tokens).double()
        for row, found in zip(tokens, logits, strict=True):
            parts = split_into_segments(row.tolist(), 24)
            assert len(parts) > 4
            for start, end in parts:
                wanted = reference.logits(row[start:end], model.looping)
                torch.testing.assert_close(found[start:end], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("ranks", "micro_steps", "width"), [(1, 8, 256), (2, 1, 256), (4, 4, 128)])
def test_training_sequences_are_whole_spans(
    ranks: int, micro_steps: int, width: int, make_run: Run, data: SimpleNamespace
) -> None:
    """A span has 256 targets. With 16 micro-batches per step, each of them has half a span."""

    def read(run: Any) -> list[tuple[Tensor, Tensor]]:
        run.step = 1
        with closing(run.batches()) as batches:
            return [(b.x.clone(), b.y.clone()) for b in itertools.islice(batches, micro_steps)]

    made = make_run(("documents",), ranks=ranks, **DOCUMENTS, GRAD_ACCUM_STEPS=micro_steps)
    in_order = list(itertools.chain(*zip(*call_on_all_ranks(made, read)[1], strict=True)))
    assert {x.shape for x, _ in in_order} == {(2048 // width // ranks // micro_steps, width)}
    x, y = (torch.cat(each).view(8, 256) for each in zip(*in_order, strict=True))
    spans = torch.from_numpy(data.train[2056 : 2056 + 8 * 257].astype(np.int64)).view(8, 257)
    assert torch.equal(x, spans[:, :-1]) and torch.equal(y, spans[:, 1:])


def test_too_many_documents_are_an_error_and_are_never_joined(
    make_run: Run, data: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DOC_ENDS as large as needed the run goes on; with one less it ends before that step."""
    used = data.train[: 6 * 8 * 257].reshape(-1, 257)
    most = max(len(split_into_segments(row[:-1].tolist(), 24)) for row in used) - 1
    settings = DOCUMENTS | {"GRAD_ACCUM_STEPS": 8, "DOC_ENDS": most}
    run = make_run(("documents",), **settings, VAL_TOKENS=33)
    run.train()
    few = make_run(("documents",), **settings | {"DOC_ENDS": most - 1}, VAL_TOKENS=33)
    named = rf"DOC_ENDS={most - 1} is too small: rows \d+ to \d+, which are one micro-batch, "
    named += f"need {most}; set"
    with pytest.raises(script_module(few).RunError, match=named):
        few.train()
    monkeypatch.setattr(script_module(run), "attend_one_by_one", attend_by_mask)
    tokens = torch.full((1, 24), 9)
    with torch.no_grad():
        for count in most, most + 1:
            tokens[0, 1 : count + 1] = 1
            assert run.model.logits(tokens).isnan().all() == (count > most)


def test_too_many_documents_of_validation_are_an_error_before_training(
    make_run: Run, make_validation_set: Callable
) -> None:
    """Both ranks report the number that rank 1 needs, whose batches are at the end of the set."""
    split = make_validation_set(20 * [64] + 64 * [20] + 300 * [4])
    settings = DOCUMENTS | split | {"TRAIN_SEQ_LEN": 64, "DOC_ENDS": 60, "VAL_BATCH_SIZE": 4096}
    made = make_run(("documents",), ranks=2, **settings)
    module = script_module(made[0][0])

    def warm_up_fails(run: Any) -> str:
        with pytest.raises(module.RunError) as error:
            module.warm_up(run)
        return str(error.value)

    errors = call_on_all_ranks(made, warm_up_fails)[1]
    assert errors[0] == errors[1]
    needed = int(re.search(r"^DOC_ENDS=60 is too small: batches .* need (\d+); set", errors[0])[1])
    call_on_all_ranks(
        make_run(("documents",), ranks=2, **settings | {"DOC_ENDS": needed}), module.warm_up
    )
    less = make_run(("documents",), ranks=2, **settings | {"DOC_ENDS": needed - 1})
    assert f" need {needed}; set" in call_on_all_ranks(less, warm_up_fails)[1][1]


def test_the_log_says_how_documents_are_attended_and_where_there_are_none(make_run: Run) -> None:
    assert not any("DOC_TOKEN" in line for line in make_run(("documents",), **DOCUMENTS).log.lines)
    run = make_run(("documents",), **DOCUMENTS | {"DOC_TOKEN": 2})
    warnings = [line for line in run.log.lines if line.startswith("WARNING: DOC_TOKEN=2 is not")]
    assert [re.findall("fineweb_([a-z]+)", line) for line in warnings] == [["train"], ["val"]]
    assert any("documents: attention by SDPA" in line for line in run.log.lines)


def test_the_kernel_gets_all_segments(script: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake tensors: the arguments that reach the kernel, and gradients of the right shape."""
    module = script("documents")
    settings = {"MODEL_DIM": 64, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "TRAIN_SEQ_LEN": 32}
    config = make_config(module, **settings, NUM_LAYERS=2, VOCAB_SIZE=260, DOC_TOKEN=1, DOC_ENDS=20)
    seen: list[tuple] = []
    kernel = module.varlen_attn

    def record_call(*arguments: Any, **more: Any) -> Tensor:
        seen.append((*arguments, more))
        return kernel(*arguments, **more)

    monkeypatch.setattr(module, "varlen_attn", record_call)
    monkeypatch.setattr(module, "attend_one_by_one", module.attend_packed)  # as on CUDA
    for options, heads in (module.PACKED_OPTIONS, 2), (set(), 4):  # torch 2.13, 2.11
        monkeypatch.setattr(module, "PACKED_OPTIONS", options)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = module.GPT(config, torch.bfloat16)
            tokens = torch.zeros(2, 128, dtype=torch.int64)
            model(tokens, tokens).backward()
            assert model.blocks[0].attn.c_k.weight.grad.shape == (32, 64)
        [*_, (q, k, v, edges, key_edges, *longest, more)] = seen
        assert (q.shape, k.shape, v.shape) == ((256, 4, 16), (256, heads, 16), (256, heads, 16))
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert edges is key_edges and edges.shape == (2 + 20 + 1,) and edges.dtype == torch.int32
        assert longest == [32, 32] and more.pop("window_size") == (-1, 0)
        assert more == {"enable_gqa": True} if options else more == {}
    assert len(seen) == 4


def test_documents_need_a_torch_that_has_their_attention(
    script: Callable, data: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("documents")
    config = make_config(module, **SETTINGS | data.env | {"DOC_TOKEN": 1})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(module, "PACKED_OPTIONS", set())
    assert module.check_settings(config, ALONE)[0] == []
    words = f"torch {torch.__version__} does not have; install torch 2.11 to 2.13"
    faults, _ = module.check_settings(replace(config, device="auto"), ALONE)
    assert faults == [f"DOC_TOKEN=1 needs an attention kernel that {words}"]


# --- document_ttt -----------------------------------------------------------------------------

LORA = settings_for("document_ttt") | {"VAL_TOKENS": 200}


def split_into_documents(tokens: np.ndarray) -> list[np.ndarray]:
    """Return the documents; each begins with a 1 and ends with the next 1, its last target."""
    starts = [i for i in range(len(tokens) - 1) if i == 0 or tokens[i] == 1]
    ends = [*starts[1:], len(tokens) - 1]
    return [tokens[start : end + 1] for start, end in zip(starts, ends, strict=True)]


class AdaptedReference(Reference):
    """The reference with low-rank matrices, given as `pairs` (A, B) in the order of their use.

    In each visit of a layer these are for queries, keys, values, attention and MLP; the last pair
    is for the head. Those of queries, keys, values and head are added to the weights.
    """

    def __init__(self, model: nn.Module, config: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(model, config)
        self.weights = dict(self.p)
        self.factor = config.lora_alpha / config.lora_rank
        self.pairs = [tuple(t.detach().double().requires_grad_() for t in pair) for pair in pairs]

    def next_product(self) -> Tensor:
        a, b = next(self.left)
        return self.factor * b @ a

    def attention(self, x: Tensor, layer: str, xsa: bool) -> Tensor:
        for each in "qkv":
            name = f"{layer}.attn.c_{each}.weight"
            self.p[name] = self.weights[name] + self.next_product()
        more = self.p[f"{layer}.attn_scale"] * (x @ self.next_product().T)
        return super().attention(x, layer, xsa) + more

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        more = self.p[f"{layer}.mlp_scale"] * (x @ self.next_product().T)
        return super().mlp(x, layer) + more

    def logits(self, tokens: Tensor, looping: bool) -> Tensor:
        self.left = iter(self.pairs)
        logits = super().logits(tokens, looping)
        assert next(self.left, None) is None, "every pair must be used"
        return logits

    def head(self, x: Tensor) -> Tensor:
        return x @ (self.p["tok_emb.weight"] + self.next_product()).T


def split_into_chunks(tokens: Tensor) -> list[tuple[int, int, int]]:
    """Return for each chunk (begin of its window, begin of the chunk, end of the chunk)."""
    firsts = range(0, len(tokens) - 1, 8)
    return [(max(0, first - 24), first, min(first + 8, len(tokens) - 1)) for first in firsts]


def reference_document_nats(
    reference: AdaptedReference, document: np.ndarray, looping: bool
) -> float:
    """Return the nats of a document: chunk by chunk in float64, with AdamW as in its paper."""
    config = reference.config
    tokens = torch.from_numpy(document.astype(np.int64))
    leaves = [t for pair in reference.pairs for t in pair]
    squares = [torch.zeros_like(t) for t in leaves]
    total = 0.0
    for number, (begin, first, end) in enumerate(split_into_chunks(tokens), 1):
        logits = reference.logits(tokens[begin:end], looping)[first - begin :]
        loss = F.cross_entropy(logits, tokens[first + 1 : end + 1], reduction="sum")
        total += loss.item()
        if end == len(tokens) - 1:
            break
        gradients = torch.autograd.grad(loss / 8, leaves)
        with torch.no_grad():
            for p, g, square in zip(leaves, gradients, squares, strict=True):
                square.mul_(0.99).add_(0.01 * g * g)
                p *= 1 - config.lora_lr * config.lora_wd
                p -= config.lora_lr * g / ((square / (1 - 0.99**number)).sqrt() + 1e-10)
    return total


@alone_and_in_a_stack
def test_each_document_is_scored_before_it_is_learned(
    names: tuple, make_run: Run, data: SimpleNamespace
) -> None:
    settings = LORA | (settings_for(*names) | LAYERS if names else {"NUM_LAYERS": 2})
    run = make_run(("document_ttt", *names), **settings)
    model = randomize_weights(run)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.6)
    model.looping = bool(names)
    seen: dict[int, list] = {}
    draw = script_module(run).Adapters.draw

    def draw_and_record(adapters: Any, documents: int, seed: int) -> Any:
        adamw = draw(adapters, documents, seed)
        seen[seed] = [tuple(t.detach().clone() for t in pair) for pair in adapters.pairs]
        return adamw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script_module(run).Adapters, "draw", draw_and_record)
        nats, bpb, _ = compute_score(run)
    documents = sorted(split_into_documents(data.val[:200]), key=len)
    assert len(seen) == -(-len(documents) // 3) > 1
    total = plain = 0.0
    for number, document in enumerate(documents):
        drawn = seen[run.config.seed + 1_000_003 * (1 + number // 3 * 3)]
        pairs = [(a[number % 3], b[number % 3]) for a, b in drawn]
        assert all(a.any() and not b.any() for a, b in pairs)
        total += reference_document_nats(
            AdaptedReference(model, run.config, pairs), document, bool(names)
        )
    assert nats == pytest.approx(total / 199, rel=2e-4)
    assert bpb == pytest.approx(total / np.log(2) / (data.val[1:200] >= 4).sum(), rel=2e-4)
    run.scorer.adapters.config = replace(run.config, lora_lr=0.0)
    plain = compute_score(run)[0]
    assert abs(plain - nats) > 0.01, "without steps the score differs"


@pytest.mark.parametrize("names", [("document_ttt",), ("document_ttt", "byte_sidecar")])
def test_score_of_documents_is_the_same_on_any_number_of_ranks(
    names: tuple, make_run: Run, with_bytes: SimpleNamespace, data: SimpleNamespace
) -> None:
    # Three ranks, too, can share 1536 training tokens. A run computes the shape of its batches.
    settings = LORA | {"VAL_TOKENS": 600, "GRAD_ACCUM_STEPS": 0, "TRAIN_BATCH_TOKENS": 1536}
    counts = data.val[1:600] >= 4
    if len(names) > 1:
        settings |= {"BYTE_SIDECAR": 1} | with_bytes.env
        counts = with_bytes.numbers[1:600]
    alone = make_run(names, **settings)
    before = [p.clone() for p in randomize_weights(alone).parameters()]
    nats, bpb, _ = compute_score(alone)
    assert bpb == pytest.approx(nats * 599 / np.log(2) / counts.sum(), rel=1e-12)
    again = compute_score(alone)
    assert again[:2] == (nats, bpb)
    assert all(map(torch.equal, before, alone.model.parameters()))
    assert all(p.requires_grad for p in alone.model.parameters())
    for ranks in 2, 3:
        several = make_run(names, ranks=ranks, **settings | {"GRAD_ACCUM_STEPS": 8})
        assert all(map(randomize_weights, several[0]))
        for score in call_on_all_ranks(several, compute_score)[1]:
            assert score[:2] == pytest.approx((nats, bpb), rel=1e-13)


@pytest.fixture
def make_validation_set(
    data: SimpleNamespace, tmp_path: Path
) -> Callable[[list[int]], dict[str, str]]:
    """Return a function that writes a validation set of documents of these lengths.

    It returns the settings that read this set.
    """

    def make(lengths: list[int]) -> dict[str, str]:
        tokens = np.random.default_rng(3).integers(4, 260, sum(lengths) + 1)
        tokens[np.cumsum([0, *lengths])] = 1
        folder = tmp_path / "split"
        write_split(folder, "val", tokens, [])
        write_split(folder, "train", data.train, [])
        return data.env | {"DATA_PATH": str(folder), "VAL_TOKENS": 0}

    return make


def test_batches_of_many_parts_are_scored(make_run: Run, make_validation_set: Callable) -> None:
    """64 documents of 5 sequences have more parts than DOC_ENDS=256.

    DOC_ENDS limits what a model sees at once, and no model sees all these parts at once. With room
    for all of them, the score has the same digits.
    """
    settings = LORA | {"LORA_BATCH": 64, "TRAIN_SEQ_LEN": 16, "DOC_TOKEN": 1, "DOC_ENDS": 256}
    settings |= make_validation_set(64 * [80] + 64 * [10])
    names = "documents", "document_ttt"
    scores = [
        compute_score(make_run(names, **settings | {"DOC_ENDS": ends})) for ends in (256, 400)
    ]
    assert scores[0][:2] == scores[1][:2]


@pytest.mark.parametrize("lengths", [[1, 1, 30, 1, 3, 1, 1], [2] + 39 * [1]])
def test_documents_of_one_token_are_scored(
    lengths: list[int], make_run: Run, make_validation_set: Callable
) -> None:
    """The only target of such a document is the first token of the next document."""
    settings = (
        LORA | {"LORA_BATCH": 64, "LORA_CHUNK": 32, "LORA_LR": 0} | make_validation_set(lengths)
    )
    settings |= {"DOC_TOKEN": 1, "DOC_ENDS": 40}
    run = make_run(("documents", "document_ttt"), **settings)
    model = randomize_weights(run)
    tokens = np.empty(sum(lengths) + 1, np.uint16)
    run.scorer.shards.read(0, tokens)
    total = 0.0
    for document in split_into_documents(tokens):
        x = torch.from_numpy(document.astype(np.int64))
        with torch.no_grad():
            total += F.cross_entropy(model.logits(x[None, :-1])[0], x[1:], reduction="sum").item()
    assert compute_score(run)[0] == pytest.approx(total / sum(lengths), rel=1e-5)


def test_documents_are_learned_in_one_graph(make_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of graphs does not grow with the lengths of windows and the sizes of batches."""
    names = "document_ttt", "documents", "loop"
    settings = LORA | settings_for("loop") | DOCUMENTS | {"DOC_MAX": 0, "NUM_LAYERS": 3}
    run = make_run(names, **settings)
    randomize_weights(run)
    monkeypatch.setattr(script_module(run), "attend_one_by_one", attend_by_mask)
    plain = compute_score(run)
    graphs = []

    def record_graph(graph: torch.fx.GraphModule, _: Any) -> Callable:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    nats = script_module(run).document_nats
    run.scorer.document_nats = torch.compile(
        nats, backend=record_graph, fullgraph=True, dynamic=True
    )
    assert compute_score(run)[:2] == pytest.approx(plain[:2], rel=1e-6)
    assert len(graphs) <= 4, "with and without gradients; one document or more"
    lines = "\n".join(run.log.lines)
    times = (
        r"compiled in [\d.]+ s, before its clock starts\ndocument_ttt: scoring will take about \d"
    )
    assert re.search(times, lines), lines


@pytest.mark.parametrize("name", ["document_ttt", "global_sgd"])
def test_the_time_of_the_score_is_estimated_before_it_begins(make_run: Run, name: str) -> None:
    """A score that would take longer than the challenge allows gives a warning with a remedy."""
    run = make_run((name,), **LORA | {"VAL_TOKENS": 600})
    scorer, size = run.scorer, run.config.lora_chunk
    documents, batches = scorer.find_batches()
    chunks = [math.ceil(documents[rows.stop - 1].seq_len / size) for rows in batches]
    assert len(set(chunks)) > 1
    assert scorer.estimate_seconds({size: 2.0}) == pytest.approx(2 * sum(chunks))
    growing = scorer.estimate_seconds({size: 1.0, 2 * size: 2.0})
    assert growing == pytest.approx(sum(2 * count - 1 for count in chunks))
    scorer.log_estimate({size: 0.01})
    assert "scoring will take about 0 s" in run.log.lines[-1]
    scorer.log_estimate({size: 1000.0})
    words = (
        f"the challenge allows 600 s for the score; .* RESUME=auto and .*LORA_CHUNK={2 * size}, "
    )
    assert re.search(words, run.log.lines[-1]), run.log.lines
    scorer.runtime.world_size = 2
    by_rank = [
        sum(math.ceil(documents[rows.stop - 1].seq_len / size) for rows in share)
        for share in scorer.share(documents, batches)
    ]
    assert scorer.estimate_seconds({size: 1.0}) == max(by_rank) < sum(by_rank)


def test_input_of_documents_is_read_ahead_and_its_cost_is_logged(make_run: Run) -> None:
    run = make_run(("document_ttt",), **LORA | {"VAL_TOKENS": 600})
    module = script_module(run)
    readers = set()
    read = module.Shards.read

    def read_and_record(shards: Any, first: int, array: np.ndarray, *more: Any) -> None:
        readers.add(threading.current_thread().name)
        read(shards, first, array, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Shards, "read", read_and_record)
        compute_score(run)
    assert readers == {"MainThread", "reader"}, (
        "the main thread reads only once, to find the documents"
    )
    [event] = [event for event in run.log.events if event["event"] == "document_ttt"]
    assert 0 <= event["input_wait_ms"] < event["eval_time_ms"]
    assert re.search(r"document_ttt: \d+ documents, input_wait:", run.log.lines[-1])


# --- global_sgd -------------------------------------------------------------------------------

SGD = settings_for("global_sgd") | {"SGD_DOCS": 9, "SGD_MARGIN": 3, "VAL_TOKENS": 1200}


def train_on(model: nn.Module, documents: list[np.ndarray], root: Any) -> None:
    """Train one pass of SGD on sequences of 32 tokens, two per step; drop the rest at the end."""
    stream = torch.from_numpy(np.concatenate([each[:-1] for each in documents]).astype(np.int64))
    chunks = -(-(len(stream) - 1) // 64)
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    for chunk in range(chunks - 1):
        rows = stream[64 * chunk : 64 * chunk + 65]
        model.zero_grad()
        root.mean_nats(model, rows[:-1].view(2, 32), rows[1:].view(2, 32)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sgd.param_groups[0]["lr"] = 0.15 * (1 + np.cos(np.pi * chunk / (chunks - 1)))
        sgd.step()


def test_scored_documents_are_trained_on_in_passes(
    make_run: Run, data: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each document is scored once, the longest documents first, with the weights of that moment.

    The first pass comes when 4 + 3 documents are scored, and trains on the 4 shortest of them. The
    second pass comes when 9 + 3 documents are scored.
    """
    run = make_run(("global_sgd",), **LORA | SGD | {"LORA_LR": 0})
    module = script_module(run)
    documents = sorted(split_into_documents(data.val[:1200]), key=len)
    copy = module.GPT(run.config, torch.float32).eval()
    copy.load_state_dict(randomize_weights(run).state_dict())
    total = 0.0
    scored = 0
    while scored < len(documents):
        size = len(documents) % 3 or 3 if scored == 0 else 3
        longest = len(documents) - scored - size
        for document in documents[longest : longest + size]:
            tokens = torch.from_numpy(document.astype(np.int64))
            for begin, first, end in split_into_chunks(tokens):
                with torch.no_grad():
                    logits = copy.logits(tokens[None, begin:end])[0, first - begin :]
                targets = tokens[first + 1 : end + 1]
                total += float(F.cross_entropy(logits, targets, reduction="sum"))
        before, scored = scored, scored + size
        for limit in 4, 9:
            if before < limit + 3 <= scored:
                train_on(copy, documents[longest:][:limit], module)
    nats, bpb, _ = compute_score(run)
    assert nats == pytest.approx(total / 1199, rel=1e-5)
    for (name, p), q in zip(run.model.named_parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)
    lines = [line[:12] for line in run.log.lines if line.startswith("sgd:")]
    assert lines == ["sgd: pass 1/", "sgd: pass 2/"]
    run = make_run(("global_sgd",), **LORA | SGD | {"SGD_MARGIN": 1200})
    compute_score(run)
    assert any("sgd: pass 1 has no effect" in line for line in run.log.lines)


@pytest.mark.parametrize(
    ("documents", "scored"), [(2000, [1104, 1808, 2448]), (2500, [1296, 2128, 2960])]
)
def test_passes_begin_where_they_begin_in_the_records(
    documents: int, scored: list[int], script: Callable
) -> None:
    """`scored` has the documents scored before each pass in the logs of 04-29 and 04-27."""
    module = script("--stack", "caseops")
    config = replace(module.Config(), sgd_docs=documents)
    batches = [range(first, min(first + 64, 50_000)) for first in reversed(range(0, 50_000, 64))]
    stages = module.PhasedTTT.split_into_stages(SimpleNamespace(config=config), batches)
    done = itertools.accumulate(sum(map(len, stage)) for stage in stages)
    assert list(done) == [*scored, 50_000]


def test_too_many_documents_of_a_pass_are_an_error_before_training(
    make_run: Run, make_validation_set: Callable
) -> None:
    """A pass trains on the shortest documents, which have more parts than any scored sequences."""
    settings = LORA | SGD | make_validation_set(40 * [60, 4]) | {"SGD_DOCS": 60, "SGD_MARGIN": 15}
    settings |= {"SGD_PHASES": 1, "TRAIN_SEQ_LEN": 64, "SGD_CHUNK": 128, "LORA_CHUNK": 32}
    settings |= {"VAL_BATCH_SIZE": 512, "DOC_TOKEN": 1, "TRAIN_BATCH_TOKENS": 2048}
    run = make_run(("documents", "global_sgd"), **settings, DOC_ENDS=200)
    script_module(run).warm_up(run)
    run = make_run(("documents", "global_sgd"), **settings, DOC_ENDS=20)
    script_module(run).check_validation(run)
    with pytest.raises(script_module(run).RunError, match="DOC_ENDS=20 .*: rows 0 to 1, .* need 3"):
        script_module(run).warm_up(run)


def test_a_signal_of_one_rank_ends_the_passes_of_all(make_run: Run) -> None:
    runs, simulated = make_run(("global_sgd",), ranks=2, **LORA | SGD, GRAD_ACCUM_STEPS=4)
    runs[1].runtime.signum = 15
    halt = script_module(runs[0]).HaltError

    def evaluate(run: Any) -> bool:
        with pytest.raises(halt):
            compute_score(run)
        assert all(p.requires_grad for p in run.model.parameters())
        return not run.model.blocks[0].attn._forward_hooks and run.model.add_to_logits is None

    assert call_on_all_ranks((runs, simulated), evaluate)[1] == [True, True]
