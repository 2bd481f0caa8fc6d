"""The manifests for Kubernetes against the real schemas: the core's JSON schemas, Kubeflow's models of TrainJob and JobSet.

`make test-kubernetes` installs the packages that hold them, and runs this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

GOLDEN: Final = Path(__file__).parents[2] / "golden" / "launch_plans"
PLANS: Final = tuple(sorted(file.stem for file in GOLDEN.glob("kubernetes_*.txt")))
VERSIONS: Final = ("1.31", "1.34")
"""Versions of Kubernetes: podFailurePolicy is stable since 1.31."""
REASON: Final = "needs the schemas that `make test-kubernetes` installs"


def documents(plan: str) -> list[dict[str, Any]]:
    """The objects in the manifest of an accepted plan."""
    lines = (GOLDEN / f"{plan}.txt").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("file "))
    rows = [
        line[4:]
        for line in lines[start + 1 :]
        if line.startswith("    ") or not line.startswith("process ")
    ]
    text = "\n".join(row for row in rows if not row.startswith("kubectl "))
    return [document for document in yaml.safe_load_all(text) if document]


def templates(manifest: object) -> Iterator[dict[str, Any]]:
    """Every pod template below an object."""
    if isinstance(manifest, dict):
        for key, value in manifest.items():
            if (
                key == "template"
                and isinstance(value, dict)
                and "containers" in value.get("spec", {})
            ):
                yield value
            yield from templates(value)
    elif isinstance(manifest, list):
        for item in manifest:
            yield from templates(item)


def jobs(manifest: object) -> Iterator[dict[str, Any]]:
    """The specification of every Job below an object."""
    if isinstance(manifest, dict):
        for key, value in manifest.items():
            if (
                key == "spec"
                and isinstance(value, dict)
                and "podFailurePolicy" in value
            ):
                yield value
            yield from jobs(value)
    elif isinstance(manifest, list):
        for item in manifest:
            yield from jobs(item)


def kind(plan: str) -> set[str]:
    """The kinds in a manifest."""
    return {document["kind"] for document in documents(plan)}


def test_every_kind_is_among_the_plans() -> None:
    assert set().union(*map(kind, PLANS)) == {
        "JobSet",
        "TrainingRuntime",
        "TrainJob",
    }
    assert all(list(templates(documents(plan))) for plan in PLANS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_pods_and_jobs_fit_the_schemas_of_the_core(plan: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason=REASON).validate
    pods = [*templates(documents(plan))]
    for template in pods:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "a", **template["metadata"]},
        }
        validate({**pod, "spec": template["spec"]}, version, strict=True)
    for spec in jobs(documents(plan)):
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "a"},
            "spec": spec,
        }
        validate(job, version, strict=True)
    wrong = {**pods[0]["spec"], "terminationGracePeriod": 1}
    # the schemas are strict, so the check can fail
    with pytest.raises(Exception, match="terminationGracePeriod"):
        validate(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "a"},
                "spec": wrong,
            },
            version,
            strict=True,
        )


@pytest.mark.parametrize("plan", PLANS)
def test_jobsets_and_trainjobs_fit_the_models_of_kubeflow(plan: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=REASON)
    classes = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    for document in documents(plan):
        model = classes[document["kind"]].from_dict(document)
        # a field that the model does not have would be missing
        assert model.to_dict() == document
        assert (
            classes[document["kind"]]
            .from_dict({**document, "specification": {}})
            .to_dict()
            == document
        )
