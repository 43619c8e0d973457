"""The table of instance types agrees with itself, and each device has one row."""

from __future__ import annotations

import pytest

from trainium_contract.accelerators import DEVICES, INSTANCES, Device, Instance


def test_each_device_has_one_row() -> None:
    assert DEVICES.keys() == set(Device)


@pytest.mark.parametrize("name", INSTANCES)
def test_the_figures_of_an_instance_type_agree(name: str) -> None:
    instance = INSTANCES[name]
    assert instance.cores % instance.devices == 0
    assert bool(instance.host_bytes) == bool(instance.vcpus)
    assert list(instance.ultra_server_nodes) == sorted(instance.ultra_server_nodes)
    assert all(nodes > 1 for nodes in instance.ultra_server_nodes)


def test_the_device_memory_is_that_of_the_pages_of_the_vendor() -> None:
    gib = {name: instance.cores * instance.core_bytes >> 30 for name, instance in INSTANCES.items()}
    assert gib == {
        "trn1.2xlarge": 32,
        "trn1.32xlarge": 512,
        "trn1n.32xlarge": 512,
        "trn2.3xlarge": 96,
        "trn2.48xlarge": 1536,
        "trn2u.48xlarge": 1536,
    }


def test_a_core_that_is_used_singly_has_its_part_of_the_memory() -> None:
    instance = INSTANCES["trn2.48xlarge"]
    assert (instance.compute_core_memory(), instance.compute_core_memory(1)) == (24 << 30, 12 << 30)
    assert Instance(devices=1, cores=1, efa=0).compute_core_memory() == 0
