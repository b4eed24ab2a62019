"""The root and every stack at their own sizes: data, plans, readers, packing, records.

A test of three documents proves mathematics. What has a size fails at that size: a batch of 64 long
documents, the last batch of a split, 16,000,000 bytes.
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
    """Of up to 400 MB, which do not stay."""
    yield tmp_path
    shutil.rmtree(tmp_path)


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
    """With random weights: scales by row use all levels for them, as for trained ones."""
    assert rehearse.rehearse(name, folder, rehearse.FULL_WIDTH).faults == []


@pytest.fixture(scope="module")
def caseops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The stack's module, and what makes its config and data."""
    folder = tmp_path_factory.mktemp("caseops")
    given = real_size.make("caseops", folder)
    script = folder / "caseops_of_real_size.py"
    script.write_text(rehearse.script_of("caseops"))
    module = import_script(script)

    def opened(**settings: object) -> tuple[Any, Any]:
        config = make_config(module, **given, **settings)
        return config, module.check_settings(config, {"WORLD_SIZE": "1"})[1]

    yield SimpleNamespace(module=module, opened=opened, folder=folder)
    shutil.rmtree(folder)


def test_eight_ranks_read_all_documents(caseops: Any) -> None:
    """All targets of the split and their bytes, once; among them 64 documents of 10,000 to 13,000
    tokens, which are 400 parts in one batch, and the 16 that are left for the last one."""
    module, (config, data) = caseops.module, caseops.opened()
    runtime = module.Runtime(config, {})
    run = {"config": config, "runtime": runtime, "log": make_log(module), "phase": nullcontext}
    scorer = module.DocumentTTT(SimpleNamespace(**run, data=data, model=None))
    documents, batches = scorer.find()
    runtime.world_size = 8
    found = np.zeros(2, int)
    for runtime.rank in range(8):
        plan = module.DocumentPlan(documents, scorer.share(documents, batches))
        hooks = {"summarize": scorer.summarize_batch}
        reader = module.DocumentPipeline(data.val, plan, scorer.overlap, runtime.device, **hooks)
        with closing(reader) as read:
            found += sum(np.array(batch.summary) for batch in read)
    tokens = np.fromfile(caseops.folder / "fineweb_val_000000.bin", "<u2", offset=1024)
    in_bytes = np.cumsum(real_size.byte_counts("caseops", tokens))
    lengths = [document.seq_len for document in documents]
    assert (len(documents), max(lengths), min(lengths)) == (50_000, 97_114, 27)
    assert found.tolist() == [sum(lengths), in_bytes[-1] - in_bytes[0]]
