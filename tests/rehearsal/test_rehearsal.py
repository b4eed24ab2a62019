"""The root and every stack at their own sizes: data, plans, readers, packing, records.

A test of three documents proves mathematics. What has a size fails at that size: a batch of 64 long
documents, the last batch of a split, 16,000,000 bytes.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import real_size
import rehearse
from running import ROOT, log_of

STACKS = {path.stem for path in (ROOT / "records" / "stacks").glob("*.json")}


@pytest.fixture(scope="module")
def folders() -> Iterator[Path]:
    """Of up to 400 MB each, which do not stay."""
    with TemporaryDirectory(prefix="rehearsal") as name:
        yield Path(name)


@pytest.fixture
def folder(folders: Path) -> Iterator[Path]:
    with TemporaryDirectory(dir=folders) as name:
        yield Path(name)


def test_every_stack_is_rehearsed() -> None:
    assert {"root", *STACKS} == {*rehearse.CASES}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", rehearse.CASES)
def test_a_run_at_its_own_size(name: str, folder: Path) -> None:
    """Narrow, on two ranks: scores are those of the shards, a record is made, RESUME goes on."""
    assert rehearse.rehearse(name, folder, rehearse.NARROW).faults == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", sorted(STACKS - {"baseline_plus"}))
def test_what_is_submitted_at_full_width_is_within_the_cap(name: str, folder: Path) -> None:
    """Random weights are an upper estimate: trained ones are easier to compress."""
    assert rehearse.rehearse(name, folder, rehearse.FULL_WIDTH).faults == []


def without_last_batch(script: str) -> str:
    whole = "return math.ceil((self.end_row - self.first_row) / self.stride)"
    assert script.count(whole) == 1
    return script.replace(whole, "return (self.end_row - self.first_row) // self.stride")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("name", "settings", "edit", "words"),
    [
        ("caseops", {"DOC_ENDS": 40}, None, "DOC_ENDS=40: rows 0 to 31, which are one"),
        ("root", {"MLP_MULT": 150}, None, "over the cap"),
        ("root", {}, without_last_batch, "validation: nats and bits"),
    ],
)
def test_faults_of_size_are_found(
    name: str, settings: dict, edit: Any, words: str, folder: Path
) -> None:
    faults = rehearse.rehearse(name, folder, rehearse.NARROW | settings, edit).faults
    assert any(words in fault for fault in faults), faults


@pytest.fixture(scope="module")
def caseops(folders: Path) -> SimpleNamespace:
    """The stack's module, and what makes its config and data."""
    folder = folders / "caseops"
    given = real_size.make("caseops", folder) | {"DEVICE": "cpu"}
    script = folder / "frontier.py"
    script.write_text(rehearse.script_of("caseops"))
    spec = importlib.util.spec_from_file_location("caseops_of_real_size", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)

    def opened(**settings: object) -> tuple[Any, Any]:
        words = [f"{name}={value}" for name, value in (given | settings).items()]
        config = module.read_config(words, {})[0]
        faults, data = module.find_faults(config, {"WORLD_SIZE": "1"})
        assert faults == []
        return config, data

    return SimpleNamespace(module=module, opened=opened, folder=folder)


def test_eight_ranks_read_the_longest_and_the_shortest_documents(caseops: Any) -> None:
    """All targets of these batches and their bytes, once; among them 64 documents of 10,000 to
    13,000 tokens, which are 400 parts in one batch, and the 16 that are left for the last one."""
    module, (config, data) = caseops.module, caseops.opened()
    runtime, log = module.Runtime(config, {}), log_of(module)
    run = SimpleNamespace(config=config, runtime=runtime, log=log, phase=nullcontext, data=data)
    run.model = None
    scorer = module.DocumentTTT(run)
    documents, batches = scorer.find()
    chosen = batches[:10] + batches[-10:]
    runtime.world_size = 8
    found = np.zeros(2, int)
    for runtime.rank in range(8):
        plan = module.DocumentPlan(documents, scorer.share(documents, chosen))
        hooks = {"summarize": scorer.summarize_batch}
        reader = module.DocumentPipeline(data.val, plan, scorer.overlap, runtime.device, **hooks)
        with closing(reader) as read:
            found += sum(np.array(batch.summary) for batch in read)
    tokens = np.fromfile(caseops.folder / "fineweb_val_000000.bin", "<u2", offset=1024)
    in_bytes = np.cumsum(real_size.byte_counts("caseops", tokens))
    used = [documents[number] for batch in chosen for number in batch]
    lengths = [document.seq_len for document in used]
    assert len(documents) == 50_000 and max(lengths) == 97_114 and min(lengths) < 30
    wanted = sum(in_bytes[d.start + d.seq_len] - in_bytes[d.start] for d in used)
    assert found.tolist() == [sum(lengths), wanted]


@pytest.mark.parametrize("micro_steps", [1, 4, 8])
def test_documents_of_training_fit_into_micro_batches_of_any_size(
    micro_steps: int, caseops: Any
) -> None:
    """On one GPU; 48 rows on eight or with 8 micro-steps, and up to 384 with one."""
    module = caseops.module
    for ends, fits in (256, True), (100, False):
        config, data = caseops.opened(GRAD_ACCUM_STEPS=micro_steps, DOC_ENDS=ends)
        plan = module.BatchPlan.train(config)
        overlap = module.Overlap.of(config, "train", module.torch.device("cpu"))
        count = 7_000_000 * micro_steps // config.train_batch_tokens
        reader = module.Pipeline(data.train, plan, overlap, module.torch.device("cpu"))
        with closing(reader), nullcontext() if fits else pytest.raises(module.RunError):
            for _ in zip(range(count), reader, strict=False):
                pass
