"""The manifest of a worker pod: identity, security, devices, volumes, variables, and the merged template."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW, SETTINGS
from tests.unit.plan.plan_results import make_plan
from tests.unit.plan.pod_manifests import container, environment, volumes, worker_pod
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.internal import FailureRecord
from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.wire import worker_env as env
from trainium_contract.wire.log_line import LogFormat
from trainium_operator.plan.manifests import config_maps
from trainium_operator.plan.manifests.affinity import AvoidedNodes, assign_unit
from trainium_operator.plan.manifests.owned_object import compute_content_hash
from trainium_operator.plan.manifests.strategic_merge import merge_template
from trainium_operator.plan.manifests.worker_pod import (
    TEMPLATE_REVISION,
    build_pod_template,
    compute_template_hash,
)
from trainium_operator.plan.model.observed import PodPhase


def build_pod(**changes: Any) -> Any:
    return worker_pod(build.spec(**changes))


def test_a_worker_pod_has_its_labels_owner_command_and_annotations() -> None:
    manifest = worker_pod(ordinal=7)
    pod_spec, metadata = manifest["spec"], manifest["metadata"]
    assert metadata["name"] == "demo-w-7"
    assert pod_spec["restartPolicy"] == "Never"
    assert pod_spec["terminationGracePeriodSeconds"] == 70
    assert pod_spec["automountServiceAccountToken"] is False
    assert pod_spec["enableServiceLinks"] is False
    assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    assert metadata["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert metadata["ownerReferences"][0]["controller"] is True
    assert metadata["labels"]["trainium.dev/job-name"] == "demo"
    assert metadata["labels"]["trainium.dev/role"] == "worker"
    assert metadata["labels"]["app.kubernetes.io/managed-by"] == "trainium-operator"
    assert container(manifest)["command"] == ["trainium-agent"]
    assert environment(manifest)["TRAINIUM_COORDINATOR"] == "coordinator.system.svc:8443"
    assert environment(manifest)["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_workers_get_a_log_format_only_where_it_is_not_text() -> None:
    assert env.ENV_LOG_FORMAT not in environment(build_pod())
    settings = replace(SETTINGS, worker_log_format=LogFormat.JSON)
    manifest = worker_pod(build.spec(precompile={"enabled": True}), settings)
    assert environment(manifest)[env.ENV_LOG_FORMAT] == "json"
    (first,) = manifest["spec"]["initContainers"]
    assert {"name": env.ENV_LOG_FORMAT, "value": "json"} in first["env"]
    template = {"spec": {"containers": [{"env": [{"name": env.ENV_LOG_FORMAT, "value": "text"}]}]}}
    spec = build.spec(workers={"replicas": 1, "template": template})
    assert environment(worker_pod(spec, settings))[env.ENV_LOG_FORMAT] == "text"


def test_a_worker_pod_meets_the_restricted_security_standard() -> None:
    manifest = build_pod()
    context = manifest["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["runAsGroup"] == 1000
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container(manifest)["securityContext"]
    assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    kinds = {next(key for key in volume if key != "name") for volume in manifest["spec"]["volumes"]}
    assert kinds == {"configMap", "projected", "emptyDir"}


@pytest.mark.parametrize(
    ("user", "ids", "non_root"), [(None, {}, True), (0, {"runAsUser": 0, "runAsGroup": 0, "fsGroup": 0}, False)]
)
def test_a_worker_pod_has_the_ids_of_the_settings(user: int | None, ids: dict[str, int], non_root: bool) -> None:
    context = worker_pod(settings=replace(SETTINGS, worker_user=user))["spec"]["securityContext"]
    assert {key: context[key] for key in ("runAsUser", "runAsGroup", "fsGroup") if key in context} == ids
    assert context["runAsNonRoot"] is non_root


def test_a_worker_on_the_network_of_its_node_resolves_services() -> None:
    def policy(**template: Any) -> str | None:
        return build_pod(workers={"template": {"spec": template}})["spec"].get("dnsPolicy")

    assert policy() is None
    assert policy(hostNetwork=True) == "ClusterFirstWithHostNet"
    assert policy(hostNetwork=True, dnsPolicy="Default") == "Default"


def test_the_token_is_for_the_coordinator_only() -> None:
    by_name = volumes(build_pod())
    token = by_name["token"]["projected"]["sources"][0]["serviceAccountToken"]
    assert token["audience"] == "trainium.dev/coordinator"
    assert by_name["shared-memory"]["emptyDir"]["medium"] == "Memory"
    mounts = {mount["name"]: mount["mountPath"] for mount in container(build_pod())["volumeMounts"]}
    assert mounts["token"] == "/var/run/secrets/trainium.dev"
    assert mounts["shared-memory"] == "/dev/shm"


def test_workers_without_devices_have_anti_affinity() -> None:
    term = build_pod()["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"] == {"trainium.dev/job-name": "demo", "trainium.dev/role": "worker"}


def test_a_trainium_worker_takes_all_devices_of_its_instance_type() -> None:
    manifest = build_pod(
        workers={"accelerator": {"instanceType": "trn1.32xlarge"}}, trainer={"batch": {"globalSize": 128}}
    )
    wanted = {"aws.amazon.com/neuron": "16", "vpc.amazonaws.com/efa": "8"}
    resources = container(manifest)["resources"]
    assert resources == {
        "limits": wanted,
        "requests": {**wanted, "cpu": "33", "memory": resources["requests"]["memory"]},
    }
    assert manifest["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "trn1.32xlarge"}
    assert {"key": "aws.amazon.com/neuron", "operator": "Exists"} in manifest["spec"]["tolerations"]
    assert "affinity" not in manifest["spec"]
    assert environment(manifest)["FI_PROVIDER"] == "efa"
    assert environment(manifest)["TRAINIUM_PROCESSES_PER_NODE"] == "32"


@pytest.mark.parametrize(
    ("accelerator", "resources", "efa"),
    [
        ({"instanceType": "trn1.2xlarge"}, {"aws.amazon.com/neuron": "1"}, False),
        ({"device": "neuron", "resources": {"aws.amazon.com/neuron": "4"}}, {"aws.amazon.com/neuron": "4"}, False),
        ({"device": "cuda", "coresPerNode": 2}, {"nvidia.com/gpu": "2"}, False),
        ({"device": "cpu"}, None, False),
    ],
)
def test_resources_follow_the_accelerator(accelerator: Any, resources: Any, efa: Any) -> None:
    manifest = build_pod(workers={"accelerator": accelerator})
    assert container(manifest).get("resources", {}).get("limits") == resources
    assert ("FI_PROVIDER" in environment(manifest)) is efa


def test_only_neuron_workers_of_an_ultra_server_get_the_number_of_its_nodes() -> None:
    trn2u = {"instanceType": "trn2u.48xlarge", "unit": "UltraServer"}
    batch = {"batch": {"globalSize": 512}}
    manifest = build_pod(workers={"replicas": 4, "accelerator": trn2u}, trainer=batch)
    assert environment(manifest)["TRAINIUM_UNIT_NODES"] == "4"
    single = build_pod(workers={"replicas": 4, "accelerator": {"instanceType": "trn2u.48xlarge"}}, trainer=batch)
    assert "TRAINIUM_UNIT_NODES" not in environment(single)
    on_cpus = {"device": "cpu", "unit": "UltraServer", "unitNodes": 2, "unitTopologyKey": "topology.k8s.aws/x"}
    assert "TRAINIUM_UNIT_NODES" not in environment(build_pod(workers={"accelerator": on_cpus}))


def test_a_unit_keeps_the_terms_of_the_pod_and_adds_its_own() -> None:
    term = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "kubernetes.io/hostname"}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    template = {"spec": {"affinity": {"podAntiAffinity": {required: [term]}, "nodeAffinity": {"x": 1}}}}
    pod = assign_unit(build_pod(workers={"template": template}), "0abc-4", "topology.k8s.aws/ultraserver-id")
    assert pod["metadata"]["labels"]["trainium.dev/unit"] == "0abc-4"
    affinity = pod["spec"]["affinity"]
    (same,), others = affinity["podAffinity"][required], affinity["podAntiAffinity"][required]
    assert same == {
        "labelSelector": {"matchLabels": {"trainium.dev/unit": "0abc-4"}},
        "topologyKey": "topology.k8s.aws/ultraserver-id",
    }
    assert others[0] == term
    assert others[-1]["namespaceSelector"] == {}
    assert affinity["nodeAffinity"] == {"x": 1}


def test_lost_nodes_are_tolerated_for_a_short_time_only() -> None:
    short = [
        toleration
        for toleration in build_pod()["spec"]["tolerations"]
        if toleration["key"].startswith("node.kubernetes.io/")
    ]
    assert {toleration["key"]: toleration["tolerationSeconds"] for toleration in short} == {
        "node.kubernetes.io/not-ready": 30,
        "node.kubernetes.io/unreachable": 30,
    }


def test_avoided_nodes_are_a_preference_beside_the_users_own_affinity() -> None:
    own = {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}}
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    template = {"spec": {"affinity": {"nodeAffinity": {key: [own]}}}}
    spec = build.spec(workers={"template": template})
    manifest = worker_pod(spec, avoided=AvoidedNodes(preferred=("node-3",)))
    ours, theirs = manifest["spec"]["affinity"]["nodeAffinity"][key][::-1]
    assert theirs == own
    assert ours["preference"]["matchExpressions"][0]["values"] == ["node-3"]


def test_avoided_nodes_expire() -> None:
    records = (
        FailureRecord(at=NOW - 100, cause="Device", pod="a", node="node-1"),
        FailureRecord(at=NOW - 3601, cause="Device", pod="b", node="node-2"),
    )
    result = make_plan(
        build.observation(build.job(status=TrainingJobStatus(failures=records, avoided_nodes=("node-1", "node-2"))))
    )
    assert result.status.avoided_nodes == ("node-1",)


def test_the_template_of_the_job_is_merged_by_name() -> None:
    template = {
        "metadata": {"labels": {"team": "x", "trainium.dev/job-name": "stolen"}, "annotations": {"a": "b"}},
        "spec": {
            "priorityClassName": "high",
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 5,
            "containers": [
                {
                    "name": "worker",
                    "env": [{"name": "OMP_NUM_THREADS", "value": "2"}, {"name": "MINE", "value": "1"}],
                    "resources": {"limits": {"memory": "1Gi"}},
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
                {"name": "sidecar", "image": "side:1"},
            ],
            "volumes": [{"name": "data", "emptyDir": {}}, {"name": "checkpoints", "nfs": {"server": "s", "path": "/"}}],
        },
    }
    manifest = build_pod(workers={"template": template})
    assert manifest["metadata"]["labels"]["team"] == "x"
    assert manifest["metadata"]["labels"]["trainium.dev/job-name"] == "demo"
    assert manifest["metadata"]["annotations"]["a"] == "b"
    assert manifest["spec"]["restartPolicy"] == "Never"
    assert manifest["spec"]["priorityClassName"] == "high"
    assert [container["name"] for container in manifest["spec"]["containers"]] == ["worker", "sidecar"]
    assert container(manifest)["image"] == "trainer:1"
    assert environment(manifest)["OMP_NUM_THREADS"] == "2"
    assert environment(manifest)["MINE"] == "1"
    assert environment(manifest)["TRAINIUM_JOB"] == "demo"
    assert {"name": "data", "mountPath": "/data"} in container(manifest)["volumeMounts"]
    assert volumes(manifest)["checkpoints"] == {"name": "checkpoints", "nfs": {"server": "s", "path": "/"}}


def test_the_agent_gets_another_path_of_the_termination_message() -> None:
    """It writes there that its ranks have finished, and the operator believes nothing else after its end."""
    worker = {"name": "worker", "terminationMessagePath": "/tmp/last-words"}
    template = {"spec": {"containers": [worker, {"name": "aside", "terminationMessagePath": "/aside"}]}}
    manifest = build_pod(workers={"template": template})
    assert environment(manifest)[env.ENV_TERMINATION_LOG] == "/tmp/last-words"
    assert env.ENV_TERMINATION_LOG not in environment(build_pod())
    assert "env" not in manifest["spec"]["containers"][1]


def test_a_single_container_without_a_name_is_the_workers() -> None:
    manifest = build_pod(workers={"template": {"spec": {"containers": [{"image": "mine:2"}]}}})
    assert [(container["name"], container["image"]) for container in manifest["spec"]["containers"]] == [
        ("worker", "mine:2")
    ]


def test_null_removes_a_field_and_merging_does_not_mutate() -> None:
    ours, theirs = {"a": {"b": 1, "c": [1]}}, {"a": {"b": None, "c": [2]}}
    assert merge_template(ours, theirs) == {"a": {"c": [2]}}
    assert (ours, theirs) == ({"a": {"b": 1, "c": [1]}}, {"a": {"b": None, "c": [2]}})


def test_the_template_hash_ignores_the_ordinal_and_follows_the_image() -> None:
    first, second = worker_pod(ordinal=0), worker_pod(ordinal=1)
    key = "trainium.dev/template-hash"
    assert first["metadata"]["annotations"][key] == second["metadata"]["annotations"][key]
    assert compute_template_hash(build.job(), SETTINGS) != compute_template_hash(
        build.job(build.spec(image="other:1")), SETTINGS
    )


@pytest.mark.parametrize(
    ("storage", "volume", "path"),
    [
        ({}, {"emptyDir": {}}, "/checkpoints"),
        (
            {"hostPath": {"path": "/mnt/fsx"}},
            {"hostPath": {"path": "/mnt/fsx", "type": "DirectoryOrCreate"}},
            "/checkpoints/default/demo",
        ),
        (
            {"persistentVolumeClaim": {"claimName": "fsx"}, "subPath": "runs/one"},
            {"persistentVolumeClaim": {"claimName": "fsx"}},
            "/checkpoints/runs/one",
        ),
        ({"uri": "s3://bucket/team"}, {"emptyDir": {}}, "s3://bucket/team/default/demo"),
    ],
)
def test_checkpoints_go_to_the_storage_below_a_folder_of_the_job(storage: Any, volume: Any, path: Any) -> None:
    view = build.job(build.spec(checkpoint={"storage": storage}))
    assert volumes(worker_pod(view))["checkpoints"] == {"name": "checkpoints", **volume}
    written = json.loads(config_maps.render_trainer_configuration(view))
    assert written["checkpoint"]["path"] == path
    assert TrainingConfig.model_validate(written).checkpoint.records.startswith("/checkpoints")


def test_the_trainer_accepts_the_configuration() -> None:
    text = config_maps.build_config_map(build.job(), "CERT")["data"]["trainer.yaml"]
    assert TrainingConfig.model_validate(json.loads(text)).steps == 100


@pytest.mark.parametrize(("workers", "nodes"), [({"replicas": 4}, "4\n"), ({"replicas": 4, "maxReplicas": 9}, "9\n")])
def test_the_workers_get_the_largest_size_of_the_job(workers: dict[str, int], nodes: str) -> None:
    assert config_maps.build_config_map(build.job(build.spec(workers=workers)), "CERT")["data"]["nodes"] == nodes


def test_children_are_applied_only_when_their_content_changes() -> None:
    observed = build.observation(build.job(status=TrainingJobStatus(desired=4, next_pod_ordinal=4)))
    applied = [type(action).__name__ for action in make_plan(observed).actions]
    assert "ApplyObject" not in applied
    rotated = make_plan(replace(observed, ca_bundle="NEW"))
    changed = [
        action.manifest["metadata"]["name"]
        for action in rotated.actions
        if hasattr(action, "manifest") and action.manifest["kind"] == "ConfigMap"
    ]
    assert changed == ["demo-config"]


def with_templates(pending: str, running: str) -> Any:
    """Return a job whose first pod waits for a node; both arguments are hashes of templates."""
    pods = (
        build.pod(0, phase=PodPhase.PENDING, template_hash=pending),
        *(build.pod(ordinal, template_hash=running) for ordinal in (1, 2, 3)),
    )
    status = TrainingJobStatus(desired=4, next_pod_ordinal=4)
    return build.observation(build.job(status=status), pods, build.agents((1, 2, 3)))


@pytest.mark.parametrize("running", ["old", "9-b"])
def test_a_pending_pod_of_an_older_template_is_replaced_and_a_running_one_is_kept(running: str) -> None:
    assert make_plan(with_templates("old", running)).deleted_pods == {"demo-w-0": None}


def test_a_pending_pod_of_another_template_revision_is_kept() -> None:
    result = make_plan(with_templates("9-old", "9-b"))
    assert (result.deleted_pods, result.created_pods) == ({}, [])
    assert result.status.outdated_pods == 0
    assert "TemplateChanged" not in [event.reason for event in result.events]


def test_changing_the_pod_template_requires_a_new_revision() -> None:
    """Set TEMPLATE_REVISION one higher and take the new digest: else an upgrade replaces pods that wait for a node."""
    jobs = (
        build.spec(),
        build.spec(workers={"accelerator": {"instanceType": "trn1.32xlarge"}}, image="mine:1"),
        build.spec(precompile={"enabled": True}, checkpoint={"storage": {"hostPath": {"path": "/shared"}}}),
        build.spec(workers={"template": {"spec": {"priority": 7}}}, recovery={"hang": {"stepFloorSeconds": 3}}),
    )
    digest = compute_content_hash(
        [build_pod_template(build.job(job_spec), SETTINGS, with_estimates=False) for job_spec in jobs]
    )
    assert (TEMPLATE_REVISION, digest) == (0, "0fda702813446699")


def test_anti_affinity_of_the_job_is_kept() -> None:
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    own = {"labelSelector": {"matchLabels": {"app": "noisy"}}, "topologyKey": "kubernetes.io/hostname"}
    template = {"spec": {"affinity": {"podAntiAffinity": {key: [own]}}}}
    spec = build_pod(workers={"template": template})["spec"]
    terms = spec["affinity"]["podAntiAffinity"][key]
    assert terms[0] == own
    assert terms[1]["labelSelector"]["matchLabels"]["trainium.dev/role"] == "worker"


PRECOMPILE: dict[str, Any] = {"enabled": True}
ELASTIC: dict[str, Any] = {"replicas": 4, "minReplicas": 2, "maxReplicas": 6, "accelerator": {"device": "cpu"}}


def build_compiling_pod(**changes: Any) -> Any:
    return build_pod(
        **{"precompile": PRECOMPILE, "workers": ELASTIC, "trainer": {"batch": {"globalSize": 12}}} | changes
    )


def test_an_init_container_compiles_the_first_size() -> None:
    manifest = build_compiling_pod()
    (first,) = manifest["spec"]["initContainers"]
    assert first["command"] == [
        *("trainium-trainer", "precompile", "--config", "/etc/trainium/trainer.yaml"),
        *("--cores-per-node", "1", "--sizes", "4"),
    ]
    same = ("image", "env", "volumeMounts", "securityContext")
    assert all(first[key] == container(manifest)[key] for key in same)
    assert environment(manifest)["TRAINIUM_IMAGE"] == container(manifest)["image"]
    assert "initContainers" not in build_pod()["spec"]


def test_precompile_all_compiles_the_nearest_sizes_first() -> None:
    manifest = build_compiling_pod(precompile={"enabled": True, "sizes": "All"})
    assert manifest["spec"]["initContainers"][0]["command"][-1] == "4,3,2,6"


def test_precompile_background_gives_other_sizes_to_spares() -> None:
    background = {"enabled": True, "sizes": "Background"}
    manifest = build_compiling_pod(precompile=background, workers=ELASTIC | {"spares": 1})
    assert manifest["spec"]["initContainers"][0]["command"][-1] == "4"
    assert environment(manifest)["TRAINIUM_BACKGROUND_SIZES"] == "3,2,6"
    for changes in ({"precompile": background}, {"workers": ELASTIC | {"spares": 1}}):
        assert "TRAINIUM_BACKGROUND_SIZES" not in environment(build_compiling_pod(**changes))


@pytest.mark.parametrize("sizes", ["Start", "All", "Background"])
def test_a_scale_makes_no_worker_outdated_by_the_sizes_to_compile(sizes: str) -> None:
    pods = [
        build_compiling_pod(
            precompile={"enabled": True, "sizes": sizes}, workers=ELASTIC | {"spares": 1, "replicas": replicas}
        )
        for replicas in (4, 3)
    ]
    digests = {pod["metadata"]["annotations"]["trainium.dev/template-hash"] for pod in pods}
    assert len(digests) == 1
    assert len({pod["spec"]["initContainers"][0]["command"][-1] for pod in pods}) == 2


def test_init_containers_of_the_job_run_before_precompile() -> None:
    template = {
        "spec": {
            "initContainers": [{"name": "fetch", "image": "fetch:1"}],
            "containers": [{"name": "worker", "volumeMounts": [{"name": "corpus", "mountPath": "/data"}]}],
            "volumes": [{"name": "corpus", "emptyDir": {}}],
        }
    }
    fetch, first = build_compiling_pod(workers=ELASTIC | {"template": template})["spec"]["initContainers"]
    assert fetch["name"] == "fetch"
    assert {"name": "corpus", "mountPath": "/data"} in first["volumeMounts"]


@pytest.mark.parametrize(
    ("storage", "own", "folder"),
    [
        ({"persistentVolumeClaim": {"claimName": "fsx"}}, None, "/checkpoints/compiled"),
        ({"persistentVolumeClaim": {"claimName": "fsx"}}, "/shared/compiled", "/shared/compiled"),
        ({"uri": "s3://bucket/jobs"}, None, None),
        ({}, None, None),
    ],
)
def test_compiled_graphs_are_stored_on_the_checkpoint_volume_by_default(
    storage: Any, own: str | None, folder: str | None
) -> None:
    trainer = {"neuron": {"sharedCacheDirectory": own}} if own else {}
    described = build.spec(precompile=PRECOMPILE, checkpoint={"storage": storage}, trainer=trainer)
    config = TrainingConfig.model_validate_json(config_maps.render_trainer_configuration(build.job(described)))
    assert config.neuron.shared_cache_directory == folder


def test_neuron_settings_of_the_job_override_the_environment() -> None:
    workers = {"accelerator": {"instanceType": "trn1.32xlarge"}}
    neuron = {"cacheDirectory": "/nvme/compiled", "retryFailedCompilation": False}
    own = environment(build_pod(workers=workers, parallelism={"tensor": 8}, trainer={"neuron": neuron}))
    assert not {"NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL"} & set(own)
    assert environment(build_pod(workers=workers))["NEURON_COMPILE_CACHE_URL"] == "/var/cache/trainium/neuron"


def test_a_pod_asks_for_the_instance_type_and_the_priority_that_the_job_names() -> None:
    accelerator = {"device": "neuron", "instanceType": "trn1.32xlarge"}
    body = build_pod(workers={"accelerator": accelerator}, scheduling={"priorityClassName": "high"})["spec"]
    assert body["nodeSelector"] == {"node.kubernetes.io/instance-type": "trn1.32xlarge"}
    assert body["priorityClassName"] == "high"
    plain = build_pod()["spec"]
    assert "priorityClassName" not in plain
    assert "nodeSelector" not in plain


def test_a_private_image_is_pulled_with_the_secrets_of_the_installation() -> None:
    settings = replace(SETTINGS, image_pull_secrets=("registry", "mirror"))
    manifest = worker_pod(settings=settings)
    assert manifest["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
    assert "imagePullSecrets" not in build_pod()["spec"]
