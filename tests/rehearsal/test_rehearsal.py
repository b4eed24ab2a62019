"""Tests of train_gpt.py and all stacks with their own data sizes: plans, readers, packing, records.

Small tests check the mathematics. Other faults appear only at the real sizes: in a batch of 64 long
documents, in the last batch of the validation set, or at 16,000,000 bytes.
"""

import shutil
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import real_size
import rehearse
from running import ROOT, import_script, make_config, make_log

STACKS = {path.stem for path in (ROOT / "records" / "stacks").glob("*.json")}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Give a folder for up to 400 MB of data, which is deleted after the test."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_every_stack_is_rehearsed() -> None:
    assert {"root", *STACKS} == {*rehearse.CASES}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", rehearse.CASES)
def test_a_narrow_run_with_its_own_data_sizes(name: str, folder: Path) -> None:
    """On two ranks: the scores are right, a record can be made, and RESUME continues."""
    assert rehearse.rehearse(name, folder, rehearse.NARROW).faults == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", rehearse.CASES)
def test_a_submission_at_full_width_is_within_the_size_limit(name: str, folder: Path) -> None:
    """The weights are random. The scales of rows use all levels, as for trained weights."""
    assert rehearse.rehearse(name, folder, rehearse.FULL_WIDTH).faults == []


@pytest.fixture(scope="module")
def caseops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Give the module of the stack caseops, its data, and a function that opens the data."""
    folder = tmp_path_factory.mktemp("caseops")
    given = real_size.write_data("caseops", folder)
    script = folder / "caseops_of_real_size.py"
    script.write_text(rehearse.build_script("caseops"))
    module = import_script(script)

    def open_with(**settings: object) -> tuple[Any, Any]:
        config = make_config(module, **given, **settings)
        return config, module.check_settings(config, {"WORLD_SIZE": "1"})[1]

    yield SimpleNamespace(module=module, open_with=open_with, folder=folder)
    shutil.rmtree(folder)


def test_eight_ranks_read_all_documents(caseops: Any) -> None:
    """Together they read all targets of the validation set and their bytes once.

    One batch has 64 documents of 10,000 to 13,000 tokens, which are 400 parts. The last batch has
    the 16 documents that are left.
    """
    module, (config, data) = caseops.module, caseops.open_with()
    runtime = module.Runtime(config, {})
    run = {"config": config, "runtime": runtime, "log": make_log(module), "phase": nullcontext}
    scorer = module.DocumentTTT(SimpleNamespace(**run, data=data, model=None))
    documents, batches = scorer.find_batches()
    runtime.world_size = 8
    found = np.zeros(2, int)
    for runtime.rank in range(8):
        plan = module.DocumentPlan(documents, scorer.share(documents, batches)[scorer.runtime.rank])
        hooks = {"summarize": scorer.summarize_batch}
        reader = module.DocumentPipeline(data.val, plan, scorer.overlap, runtime.device, **hooks)
        with closing(reader) as read:
            found += sum(np.array(batch.summary) for batch in read)
    tokens = real_size.read_validation_tokens(caseops.folder)
    in_bytes = np.cumsum(real_size.byte_counts("caseops", tokens))
    lengths = [document.seq_len for document in documents]
    assert (len(documents), max(lengths), min(lengths)) == (50_000, 97_114, 27)
    assert found.tolist() == [sum(lengths), in_bytes[-1] - in_bytes[0]]
