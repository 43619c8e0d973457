"""Objects and messages from outside the operator: one of each kind, with every field that it reads."""

from typing import Any

from tests.testing.api.objects import owner_reference

Json = dict[str, Any]

JOB_UID = "882a352e-b6c2-4b1d-b8f0-56b2b4af9314"
"""uid of the recorded job `team/llama`."""
OWNER: Json = owner_reference(uid=JOB_UID)
OWNED: Json = {"labels": {"trainium.dev/job-name": "llama"}, "ownerReferences": [OWNER], "namespace": "team"}
MACHINE: Json = {
    "machine": "aws:///us-west-2a/i-0abc",
    "node": "ip-10-0-0-1",
    "state": "Quarantined",
    "until": "2027-01-15T09:00:00Z",
    "quarantines": 1,
    "strikes": ["2027-01-15T08:00:00Z Device team/llama", "2027-01-15T08:11:40Z NodeLost team/other"],
    "judged": "2027-01-15T08:11:40Z",
    "reported": True,
}
REGISTER: Json = {
    "protocol": 2, "namespace": "team", "job": "llama", "podName": "llama-w-0", "podUid": "uid-0", "nodeName": "n",
    "podIp": "10.0.0.1", "rendezvousPort": 29400, "agentVersion": "1",
}  # fmt: skip
HEARTBEAT: Json = {
    "namespace": "team", "job": "llama", "podName": "llama-w-0", "podUid": "uid-0", "generation": 1,
    "phase": "Training",
    "progress": {"step": 7, "loss": 4.2, "alerts": [{"kind": "LossSpike", "step": 3, "message": "m"}]},
    "restarts": [{"sequence": 0, "generation": 1, "attempt": 1, "cause": "Crash", "failedAt": 1.0, "detectedAt": 2.0}],
}  # fmt: skip
POD: Json = {
    "metadata": {
        **OWNED, "name": "llama-w-0", "uid": "uid-0", "annotations": {"trainium.dev/template-hash": "a-b"},
        "creationTimestamp": "2027-01-15T08:00:00Z",
    },
    "spec": {
        "nodeName": "n", "containers": [{"name": "worker", "image": "trainer:1"}],
        "resourceClaims": [{"name": "neuron", "resourceClaimTemplateName": "llama-devices-1"}],
    },
    "status": {
        "phase": "Failed", "podIP": "10.0.0.1", "reason": "", "message": "",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"},
            {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},
            {"type": "Ready", "status": "True"},
        ],
        "containerStatuses": [
            {
                "name": "worker",
                "state": {
                    "terminated": {
                        "exitCode": 70, "finishedAt": "2027-01-15T09:00:00Z", "reason": "Error", "message": "m",
                    }
                },
                "allocatedResourcesStatus": [
                    {
                        "name": "claim:neuron/neuron",
                        "resources": [{"resourceID": "neuron.aws.com/n/d", "health": "Unhealthy", "message": "m"}],
                    }
                ],
            }
        ],
        "initContainerStatuses": [
            {"name": "precompile", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "m"}}}
        ],
    },
}  # fmt: skip
NODE: Json = {
    "metadata": {
        "name": "n",
        "labels": {
            "topology.kubernetes.io/zone": "a",
            "node.kubernetes.io/instance-type": "trn1.32xlarge",
            "sagemaker.amazonaws.com/node-health-status": "Schedulable",
        },
    },
    "spec": {
        "providerID": "aws:///a/i-0abc",
        "unschedulable": False,
        "taints": [{"key": "karpenter.sh/disrupted", "value": "x", "effect": "NoSchedule"}],
    },
    "status": {
        "allocatable": {"aws.amazon.com/neuron": "16", "vpc.amazonaws.com/efa": "8"},
        "conditions": [
            {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2027-01-15T08:00:00Z"},
            {"type": "AcceleratedHardwareReady", "status": "False", "reason": "NeuronHasError", "message": "m"},
        ],
    },
}
WORKLOAD: Json = {
    "metadata": {
        **OWNED,
        "name": "llama-quota-0",
        "uid": "u",
        "resourceVersion": "7",
        "annotations": {"trainium.dev/part": "0"},
    },
    "spec": {"active": True, "queueName": "q", "podSets": [{"name": "workers", "count": 2}]},
    "status": {
        "conditions": [{"type": "Admitted", "status": "True", "reason": "Admitted", "message": "m"}],
        "admission": {"podSetAssignments": [{"name": "workers", "flavors": {"cpu": "trn1"}, "count": 2}]},
        "admissionChecks": [
            {
                "state": "Ready",
                "podSetUpdates": [
                    {
                        "name": "workers",
                        "labels": {"a": "b"},
                        "annotations": {"a": "b"},
                        "nodeSelector": {"a": "b"},
                        "tolerations": [{"key": "k", "operator": "Exists"}],
                    }
                ],
            }
        ],
    },
}
FLAVOR: Json = {
    "metadata": {"name": "trn1"},
    "spec": {"nodeLabels": {"pool": "a"}, "tolerations": [{"key": "pool"}]},
}
PRIORITY: Json = {"metadata": {"name": "high"}, "value": 1000, "globalDefault": True}
CLAIM_TEMPLATE: Json = {"metadata": {**OWNED, "name": "llama-devices-1", "uid": "t"}}
SLICE: Json = {
    "metadata": {"name": "s"},
    "spec": {
        "driver": "neuron.aws.com", "nodeName": "n", "pool": {"name": "n", "generation": 3},
        "devices": [
            {"name": "d", "taints": [{"key": "k", "effect": "NoExecute", "timeAdded": "2027-01-15T08:00:00Z"}]}
        ],
    },
}  # fmt: skip
CLAIM: Json = {
    "metadata": {"name": "c", "namespace": "team"},
    "status": {
        "reservedFor": [{"resource": "pods", "name": "llama-w-0", "uid": "uid-0"}],
        "allocation": {"devices": {"results": [{"driver": "neuron.aws.com", "pool": "n", "device": "d"}]}},
    },
}
BUDGET: Json = {"metadata": {**OWNED, "name": "llama", "annotations": {"trainium.dev/content-hash": "h"}}}
POLICY: Json = {"metadata": {**OWNED, "name": "llama-workers", "annotations": {"trainium.dev/content-hash": "h"}}}
LEASE: Json = {
    "metadata": {"name": "trainium-operator", "namespace": "trainium-system", "resourceVersion": "7"},
    "spec": {
        "holderIdentity": "another", "leaseDurationSeconds": 15, "leaseTransitions": 3,
        "acquireTime": "2027-01-15T08:00:00.000000Z", "renewTime": "2027-01-15T08:00:00.000000Z",
    },
}  # fmt: skip
EVENT: Json = {
    "metadata": {"name": "e", "creationTimestamp": "2027-01-15T08:00:00Z"},
    "involvedObject": {"kind": "TrainingJob", "name": "llama", "uid": JOB_UID},
    "type": "Warning", "reason": "WorkerFailed", "message": "m", "count": 2, "eventTime": None,
    "lastTimestamp": "2027-01-15T08:00:00Z", "series": {"count": 3, "lastObservedTime": "2027-01-15T08:00:00.000000Z"},
}  # fmt: skip
TEMPLATE: Json = {
    "metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}},
    "spec": {
        "containers": [
            {"name": "worker", "env": [{"name": "A", "value": "b"}], "resources": {"requests": {"cpu": "1"}}},
            {"name": "aside", "image": "busybox"},
        ],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "tolerations": [{"key": "k", "operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]
                }
            },
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []},
        },
    },
}
"""A pod template with every field that the operator reads."""
