"""The API server accepts what `kubectl trn import` prints, once the missing fields are given."""

from pathlib import Path

import pytest

from tests.cluster.definition.conftest import Api
from trainium_client.importing.importer import Options, import_jobs

pytestmark = pytest.mark.cluster

CASES = sorted((Path(__file__).parents[2] / "unit/client/importing/cases").iterdir())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_imported_job_is_accepted(crd_api: Api, case: Path) -> None:
    inputs = [(case.name, case.read_text(encoding="utf-8"))]
    ((_, job),) = import_jobs(inputs, Options("trn2.48xlarge", "registry.example.com/team/neuron:1"))
    job.document["metadata"].pop("namespace", None)
    assert crd_api.refusal_of_new(job.document) == ""

    ((_, job),) = import_jobs(inputs, Options())
    job.document["metadata"].pop("namespace", None)
    refusal = crd_api.refusal_of_new(job.document)
    assert bool(refusal) == bool(job.missing), refusal
