"""Shared parts of tests, benchmarks and scripts: fakes, builders, clusters, a clock that jumps.

The product never imports it; `make check` holds that, its types (strict) and the order of its packages. Helpers
of one folder of tests are in that folder. docs/architecture.md lists the packages.

An API server, from the simplest:
- `fuzz.operator_harness.StaticApiServer`: returns given objects and accepts every write.
- `api.recorded_jobs.RecordedApiServer`: a response for each path, over HTTP, with the objects of real jobs.
- `api.fake_api_server.FakeApiServer`: stores, watches and applies objects in memory, with faults.
- `api.http_api_server.HttpApiServer`: the same over HTTP, for other processes.
- `tests/cluster/definition` (`api`, `crd_api`): a real one without nodes.

Nodes and agents:
- `tests/unit/plan/plan_builders.py`: one observation of the operator; no time passes.
- `tests/unit/plan/plan_cluster.py` (`FakeCluster`): one job whose plans are executed in virtual time; no API server.
- `virtual.replicas` (`Scenario`, `OperatorDeployment`): the whole operator, or its replicas, in virtual time.
- `tests/wire/agent` (`AgentJob`): agents as processes, with a coordinator.
- `cluster.shared_cluster.SharedCluster`: a real cluster, with kubelets and containers.

Builders, with defaults for what a test does not set:
- `api.objects`: objects as the API server stores them; `operator.job_views`: a job as the operator reads it.
- `operator.wire_messages`: messages of agents; `operator.reporting_agent`: an agent whose records grow.
- `tests/unit/plan/plan_builders.py`, `pod_manifests.py`, `kueue_builders.py`: observations, manifests, Workloads.
"""
