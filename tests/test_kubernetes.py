"""The manifests of ``examples/kubernetes``, against a schema and against what they start.

There is no cluster here: ``kubernetes.json`` holds the documented fields that the manifests use,
and the commands are run with the variables that the Kubeflow Trainer sets.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
CHECKOUT, RUN = "/opt/pyg_scale", "/run/pyg-scale"


def manifests() -> dict[str, Any]:
    found = [each for path in FILES for each in yaml.safe_load_all(path.read_text())]
    by_kind = {each["kind"]: each for each in found}
    assert len(by_kind) == len(found) == 4
    return by_kind


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(Path(__file__).with_name("kubernetes.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "Job", "TrainingRuntime", "TrainJob"])
def test_fields_are_those_that_are_documented(validator, kind):
    validator.validate(manifests()[kind])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there are mappings."""
    if isinstance(value, dict):
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


@pytest.mark.parametrize("kind", ["Job", "TrainingRuntime", "TrainJob"])
def test_a_field_that_is_misspelt_is_found(validator, kind):
    """The schema is worth something: at every place, a field that is none, and a wrong type."""
    free = {"labels", "requests", "limits"}
    whole, tried = manifests()[kind], 0
    for path in places(whole):
        if path and path[-1] in free:
            continue
        wrong = copy.deepcopy(whole)
        at = wrong
        for key in path:
            at = at[key]
        at["mispelt"] = 1
        assert not validator.is_valid(wrong), path
        tried += 1
        for name in list(at):
            changed = copy.deepcopy(whole)
            inner = changed
            for key in path:
                inner = inner[key]
            inner[name] = [[]]
            assert not validator.is_valid(changed), (path, name)
    assert tried > 5


def closed(schema: Any) -> Any:
    """A schema of the API server, in which fields that it does not know are refused."""
    if not isinstance(schema, dict):
        return [closed(each) for each in schema] if isinstance(schema, list) else schema
    # Metadata is described as any object: the API server has its own checks of it.
    found = {key: value if key == "metadata" else closed(value) for key, value in schema.items()}
    if found.get("type") == "object" and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TrainingRuntime", "TrainJob"])
def test_the_custom_resources_of_the_trainer_take_them(kind):
    checkout = os.environ.get("KUBEFLOW_TRAINER")
    if not checkout:
        pytest.skip("KUBEFLOW_TRAINER=DIR, a checkout of github.com/kubeflow/trainer")
    file = f"trainer.kubeflow.org_{kind.lower()}s.yaml"
    resource = yaml.safe_load((Path(checkout) / "manifests" / "base" / "crds" / file).read_text())
    manifest = manifests()[kind]
    group, version = manifest["apiVersion"].split("/")
    assert resource["spec"]["group"] == group and resource["spec"]["names"]["kind"] == kind
    (schema,) = (
        each["schema"]["openAPIV3Schema"]
        for each in resource["spec"]["versions"]
        if each["name"] == version and each["served"]
    )
    validator = jsonschema.Draft202012Validator(closed(schema))
    validator.validate(manifest)
    free, tried = {"metadata", "labels", "requests", "limits"}, 0
    for path in places(manifest):
        if not free & set(path):
            wrong = copy.deepcopy(manifest)
            at = wrong
            for key in path:
                at = at[key]
            at["mispelt"] = 1
            assert not validator.is_valid(wrong), path
            tried += 1
    assert tried > 3


def test_names_refer_to_what_there_is():
    found = manifests()
    runtime, job, claim = (
        found[kind] for kind in ("TrainingRuntime", "TrainJob", "PersistentVolumeClaim")
    )
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    # By these the trainer finds the container that gets command, resources and variables.
    assert node["name"] == "node" and labels == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    pods = [node["template"]["spec"]["template"]["spec"], found["Job"]["spec"]["template"]["spec"]]
    assert [pod["containers"][0]["name"] for pod in pods] == ["node", "graph"]
    for pod in pods:
        volumes = {each["name"]: each for each in pod["volumes"]}
        (container,) = pod["containers"]
        assert {each["name"] for each in container["volumeMounts"]} == set(volumes)
        assert volumes["run"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    grace = pods[0]["terminationGracePeriodSeconds"]
    torchrun = get_args_parser().parse_args(job["spec"]["trainer"]["args"])
    assert torchrun.shutdown_timeout < grace, "torchrun must not be killed before its ranks"


def here(words: list[str], folder: Path) -> list[str]:
    """A command as it is on this machine."""
    return [
        word.replace(CHECKOUT, str(ROOT)).replace(RUN, str(folder))
        if word != "torchrun"
        else "torch.distributed.run"
        for word in words
    ]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_commands_train(tmp_path):
    found = manifests()
    (graph,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    (python, *script), made = graph["command"], [*graph["args"], "--tiny"]
    assert python == "python"
    subprocess.run([sys.executable, *here([*script, *made], tmp_path)], check=True, timeout=100)
    trainer = found["TrainJob"]["spec"]["trainer"]
    words = [*trainer["command"], *trainer["args"], "--tiny", "--epochs=1"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes = []
    for number in range(trainer["numNodes"]):
        variables = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-m", *here(words, tmp_path)],
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [node.communicate(timeout=150)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "2 ranks, from step 0" in said[0] and "done after" in said[0]
    assert any((tmp_path / "checkpoints").iterdir())
