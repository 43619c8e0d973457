"""Tables of ranks, machines, sizes, speeds and cost, from recorded objects of a real job."""

import base64
import gzip
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.testing.api.recorded_jobs import NOW, recorded_object
from tests.unit.client.recorded_views import (
    job_view,
    members,
    recorded_job,
    render_plain,
)
from trainium_client.render.tables import (
    render_goodput,
    render_machines,
    render_scaling,
    render_sizes,
)
from trainium_client.views.machines import find_machine, parse_machines
from trainium_client.views.sizes import list_scaling_rows, list_size_rows
from trainium_contract.views.job import compute_cost
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.workers import Members, build_rank_rows, count_workers, parse_pod_table
from trainium_contract.wire.recorded_membership import MAX_RECORD_BYTES, parse_members, parse_membership
from trainium_operator.plan.fleet.memory import MachineState


def test_members_spares_and_failing_pods_are_counted_separately() -> None:
    table = recorded_object("pods")
    bad = json.loads(json.dumps(table["rows"][0]))
    bad["cells"][0], bad["cells"][2] = "llama-w-9", "ImagePullBackOff"
    node = [column["name"] for column in table["columnDefinitions"]].index("Node")
    bad["cells"][node] = "<none>"
    table["rows"].append(bad)

    view = count_workers(parse_pod_table(table), members())

    assert view.members == {"Running": 2}
    assert view.others == {"Running": 1, "ImagePullBackOff": 1}
    assert [(row.name, row.node) for row in view.unhealthy] == [("llama-w-9", "")]


def test_a_member_whose_pod_is_missing_is_counted_as_missing() -> None:
    table = recorded_object("pods")
    table["rows"] = [row for row in table["rows"] if row["cells"][0] != "llama-w-0"]

    assert count_workers(parse_pod_table(table), members()).members == {"Running": 1, "missing": 1}


def test_the_slowest_rank_comes_first_and_a_silent_worker_before_it() -> None:
    healthy = [{"localRank": 0, "step": 20, "step_seconds": 0.5, "phase": "TRAINING", "updated": NOW - 1}]
    behind = [{**healthy[0], "step": 19}]

    rows = build_rank_rows(members(), {"llama-w-0": healthy, "llama-w-2": behind}, read_public_status({}), NOW)
    assert [row.rank for row in rows] == [1, 0]
    rows = build_rank_rows(
        members(), {"llama-w-0": "llama-w-0 is gone", "llama-w-2": behind}, read_public_status({}), NOW
    )
    assert [(row.rank, row.note) for row in rows] == [(0, "llama-w-0 is gone"), (1, "")]


def test_a_straggler_comes_before_a_rank_with_a_longer_step() -> None:
    records = {pod: [{"localRank": 0, "step": 20, "step_seconds": 0.5}] for pod in ("llama-w-0", "llama-w-2")}
    status = read_public_status({"status": {"stragglers": [{"pod": "llama-w-2", "slowdown": 2.5}]}})

    assert [row.rank for row in build_rank_rows(members(), records, status, NOW)] == [1, 0]


def test_a_global_rank_is_mapped_to_its_worker() -> None:
    other_generation = Members(1, 4, members().rows)

    assert [other_generation.find_by_rank(rank).pod for rank in (0, 3, 4, 7)] == ["llama-w-0"] * 2 + ["llama-w-2"] * 2  # type: ignore[union-attr]
    assert other_generation.find_by_rank(8) is None
    assert other_generation.find_by_rank(-1) is None


def test_cost_is_node_hours_and_divides_fully_into_causes() -> None:
    view = job_view()
    assert view.eta_seconds is not None
    cost = compute_cost(view, price=36.0)

    assert cost.so_far == pytest.approx(6.33808), "a hundredth for each of 633.808 node-seconds"
    assert cost.productive == pytest.approx(6.33808 * 0.2511)
    assert cost.to_end == pytest.approx(0.01 * view.eta_seconds * (2 + view.spares))
    # Other jobs of this cluster left 5.2 nodes with this one.
    assert cost.lost["Crash"] == pytest.approx(0.01 * 2.834 * 633.808 / 120.851)
    assert cost.idle > 0
    assert cost.productive + sum(cost.lost.values()) + cost.idle == pytest.approx(cost.so_far)


def test_the_ledger_shows_the_cost_of_each_part_where_a_price_is_given() -> None:
    view = job_view()
    goodput = replace(view.goodput, cost=compute_cost(view, price=3600.0))

    page = render_plain(render_goodput(goodput, 120))
    assert re.search(r"Cost +633\.81 so far, [\d,.]+ more until the last step", page)
    assert re.search(r"CAUSE +SECONDS +SHARE +COST", page)
    assert re.search(r"productive +79\.6 +65\.8 % +159\.15", page)
    assert re.search(r"idle nodes +\d", page)
    assert "COST" not in render_plain(render_goodput(view.goodput, 120))


def test_a_job_that_has_not_started_costs_nothing_yet() -> None:
    cost = compute_cost(job_view(goodput={}, progress={}), price=10.0)
    assert (cost.so_far, cost.productive, cost.lost, cost.idle, cost.to_end) == (0, 0, {}, 0, None)


def test_speeds_are_compared_with_the_smallest_size() -> None:
    job = recorded_job()
    batch = job["spec"]["trainer"]["batch"]["globalSize"]
    measured = [(4, 30, batch / 30.0), (1, 10, batch / 10.0), (3, 5, None), (2, 20, batch / 16.0)]
    job["status"]["goodput"]["sizes"] = [
        {"size": size, "steps": steps, "stepSeconds": seconds} for size, steps, seconds in measured
    ]

    rows = list_scaling_rows(job)
    assert [(row.nodes, row.steps, row.current) for row in rows] == [(1, 10, False), (2, 20, True), (4, 30, False)]
    assert [row.samples_per_second for row in rows] == pytest.approx([10.0, 16.0, 30.0])
    assert [(row.speedup, row.efficiency) for row in rows] == [(1.0, 1.0), (1.6, 0.8), (3.0, 0.75)]
    assert re.search(r"4 +30 .* 30 +x3\.00 +75\.0 %", render_plain(render_scaling(rows, 100)))


def test_speeds_of_a_program_whose_batch_is_not_known_are_step_times() -> None:
    job = recorded_job()
    del job["spec"]["trainer"], job["spec"]["checkpoint"]
    job["spec"]["program"] = {"image": "x", "command": ["train"]}

    (row,) = list_scaling_rows(job)
    assert (row.step_seconds, row.samples_per_second, row.efficiency) == (0.301376, None, None)
    assert "Give program.batch" in render_plain(render_scaling((row,), 100))
    assert "no step time was measured yet" in render_plain(render_scaling((), 100))


def test_machines_are_shown_with_their_evidence_and_found_by_node_or_key() -> None:
    entry = (
        "machine: aws:///us-west-2a/i-0abc\nnode: ip-10-0-3-7\nstate: Quarantined\nuntil: '2026-11-23T03:00:00Z'\n"
        "quarantines: 1\nstrikes:\n- 2026-11-23T02:00:00Z Device team/llama\n"
    )
    data = {"about": "…", "accounted": "{}", "aws.us-west-2a.i-0abc": entry, "odd": "- 1", "worse": ": :"}

    machines = parse_machines({"data": data}, {"ip-10-0-0-1": ""})

    assert machines[0].state == "Quarantined"
    assert machines[0].strikes[0].cause == "Device"
    assert machines[0].present is False
    assert {machine.state for machine in machines[1:]} == {"Unreadable"}
    assert find_machine(machines, "ip-10-0-3-7") is machines[0]
    assert find_machine(machines, "nowhere") is None
    assert "Device 11-23 02:00 by team/llama" in render_plain(render_machines(machines, 160, now=NOW), 160)


def test_machines_are_sorted_by_the_states_that_the_operator_writes() -> None:
    data = {f"m{number}": f"node: n{number}\nstate: {state.value}\n" for number, state in enumerate(MachineState)}
    data["m9"] = "node: n9\n"

    states = [machine.state for machine in parse_machines({"data": data}, None)]

    assert states == ["Permanent", "Quarantined", "Probation", "Watched", "Watched"]
    assert set(states) == {state.value for state in MachineState}


def test_nodes_that_save_no_pass_are_one_row() -> None:
    job: dict[str, Any] = {
        "spec": {
            "workers": {"replicas": 128, "minReplicas": 64, "accelerator": {"instanceType": "trn1.32xlarge"}},
            "trainer": {"batch": {"globalSize": 1024}},
            "parallelism": {"tensor": 8},
        }
    }
    rows = list_size_rows(job)
    assert [(row.min_nodes, row.max_nodes, row.trains, row.micro_batches) for row in rows] == [
        (128, 128, 128, 2),
        (86, 127, 86, 3),
        (64, 85, 64, 4),
    ]
    assert rows[1].speed == pytest.approx(2 / 3)
    assert rows[1].fill_ratio == pytest.approx(1024 / (3 * 344))
    assert {row.compiled for row in rows} == {None}
    job["spec"]["trainer"]["batch"]["tolerance"] = 0.01
    job["spec"]["precompile"] = {"enabled": True, "sizes": "Background"}
    job["status"] = {"compiled": {"sizes": [86, "many", [3]]}}
    assert [(row.min_nodes, row.trains, row.batch, row.compiled) for row in list_size_rows(job)] == [
        (128, 128, 1024, True),
        (127, 127, 1016, False),
        (86, 86, 1032, True),
        (85, 85, 1020, False),
        (64, 64, 1024, False),
    ]


def test_sizes_above_the_requested_one_are_marked_as_idle_nodes() -> None:
    job: dict[str, Any] = {
        "spec": {
            "workers": {"replicas": 2, "maxReplicas": 4, "accelerator": {"device": "cpu"}},
            "trainer": {"batch": {"globalSize": 12}},
            "elasticity": {"idleNodes": "Take"},
        }
    }
    rows = list_size_rows(job)
    assert [(row.trains, row.speed, row.uses_idle_nodes) for row in rows] == [
        (4, 2.0, True),
        (3, 1.5, True),
        (2, 1.0, False),
        (1, 0.5, False),
    ]
    assert render_plain(render_sizes(rows, 120), 120).count("idle nodes") == 2


def test_a_malformed_or_oversized_membership_is_refused() -> None:
    def membership_config_map(text: bytes) -> dict[str, Any]:
        return {"binaryData": {"membership.json.gz": base64.b64encode(gzip.compress(text)).decode()}}

    assert parse_members(recorded_object("membership"))[0]["podName"] == "llama-w-0"
    for config_map in (
        membership_config_map(b" " * (MAX_RECORD_BYTES + 1)),
        membership_config_map(b"[]"),
        {"binaryData": {"membership.json.gz": "AAAA"}},
    ):
        with pytest.raises(ValueError, match="membership"):
            parse_membership(config_map)
    with pytest.raises(KeyError):
        parse_membership({"data": {}})
