"""The manifest of a worker that runs a program: the copied agent, compilation, variables and the template hash."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import CA, SETTINGS
from tests.unit.plan.pod_manifests import environment, worker_pod
from trainium_contract.spec.program import ProgramSpec
from trainium_contract.wire import worker_env as env
from trainium_operator.plan.manifests.config_maps import build_config_map
from trainium_operator.plan.manifests.worker_pod import compute_template_hash
from trainium_operator.plan.view.context import pin_running_image


def build_pod(**changes: Any) -> Any:
    return worker_pod(build.program_spec(**changes))


def test_an_init_container_copies_the_agent_into_the_program_s_container() -> None:
    manifest = build_pod()
    (first,), (worker,) = manifest["spec"]["initContainers"], manifest["spec"]["containers"]
    assert (first["image"], worker["image"]) == (SETTINGS.agent_image, "team/own:5")
    assert first["command"][: len(env.AGENT_INTERPRETER)] == [*env.AGENT_INTERPRETER]
    assert first["command"][-2:] == ["/trainium", "/copy/trainium"]
    assert first["volumeMounts"] == [{"name": "agent", "mountPath": "/copy"}]
    assert worker["command"] == [*env.AGENT_INTERPRETER, "-m", "trainium_agent"]
    mount = {"name": "agent", "mountPath": "/trainium", "subPath": "trainium", "readOnly": True}
    assert mount in worker["volumeMounts"]
    assert {"name": "agent", "emptyDir": {}} in manifest["spec"]["volumes"]


@pytest.mark.parametrize(
    ("fields", "storage", "sizes", "folder"),
    [
        ({}, {"persistentVolumeClaim": {"claimName": "fsx"}}, "4,3,2,5,6", "/checkpoints/compiled"),
        ({"sizes": "Start"}, {}, "4", None),
    ],
)
def test_a_program_compiles_by_its_command_in_its_image(
    fields: dict[str, Any], storage: Any, sizes: str, folder: str | None
) -> None:
    manifest = build_pod(
        workers={"minReplicas": 2, "maxReplicas": 6},
        program={"precompile": {"command": ["dry-run"], **fields}},
        checkpoint={"storage": storage},
    )
    copier, first = manifest["spec"]["initContainers"]
    assert (copier["name"], first["name"], first["image"]) == ("trainium-agent", "precompile", "team/own:5")
    assert first["command"][-6:] == ["-m", "trainium_agent.precompile", "--cores-per-node", "1", "--sizes", sizes]
    assert {"name": "agent", "mountPath": "/trainium", "subPath": "trainium", "readOnly": True} in first["volumeMounts"]
    variables = environment(manifest)
    assert variables["NEURON_COMPILE_CACHE_URL"] == variables["TRAINIUM_COMPILE_CACHE"]
    assert variables.get("TRAINIUM_SHARED_COMPILE_CACHE") == folder
    assert "TRAINIUM_COMPILE_CACHE" not in environment(build_pod())


def test_every_container_of_a_program_meets_the_restricted_security_standard() -> None:
    spec = build_pod()["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_the_agent_gets_the_program_spec_verbatim() -> None:
    command = ["sh", "-c", "echo $HOME $(POD_IP) $$"]
    variables = environment(build_pod(program={"command": command, "processesPerNode": 2, "batch": {"globalSize": 8}}))
    # As a kubelet reads it: two dollar signs are one.
    program = ProgramSpec.model_validate_json(variables[env.ENV_PROGRAM].replace("$$", "$"))
    assert program.command == tuple(command)
    assert "$" not in variables[env.ENV_PROGRAM].replace("$$", "")
    assert variables[env.ENV_PROCESSES_PER_NODE] == "2"
    assert json.loads(variables[env.ENV_PROGRAM])["batch"] == {"globalSize": 8, "microSize": 1}
    assert "trainer.yaml" not in build_config_map(build.job(build.program_spec()), CA)["data"]


def test_a_program_gets_device_variables_and_no_compiler_flags() -> None:
    neuron = {"accelerator": {"instanceType": "trn2.48xlarge"}}
    variables = environment(build_pod(workers=neuron))
    assert not {"NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL"} & variables.keys()
    assert (variables["FI_PROVIDER"], variables[env.ENV_PROCESSES_PER_NODE]) == ("efa", "64")
    assert environment(build_pod(workers=neuron, program={"processesPerNode": 1}))[env.ENV_PROCESSES_PER_NODE] == "1"
    (worker,) = build_pod(workers=neuron)["spec"]["containers"]
    assert worker["resources"]["limits"]["aws.amazon.com/neuron"] == "16"


def test_a_changed_program_changes_the_template_hash_and_keeps_the_agent_image() -> None:
    plain = build.job(build.program_spec())
    assert compute_template_hash(plain, SETTINGS) == compute_template_hash(build.job(build.program_spec()), SETTINGS)
    assert compute_template_hash(
        build.job(build.program_spec(program={"args": ["-v"]})), SETTINGS
    ) != compute_template_hash(plain, SETTINGS)
    newer = replace(SETTINGS, agent_image="trainium-agent:2")
    manifest = worker_pod(plain)
    image = manifest["metadata"]["annotations"][env.ANNOTATION_IMAGE]
    observed = build.observation(plain, (build.pod(0, image=image),), {})
    pinned = pin_running_image(observed, newer)
    assert (pinned.agent_image, pinned.image) == (SETTINGS.agent_image, newer.image)
    assert pin_running_image(build.observation(plain), newer) is newer
