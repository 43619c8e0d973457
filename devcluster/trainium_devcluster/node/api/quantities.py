"""Parse Kubernetes quantities ("500m", "32Gi", "1e3") as exact numbers.

Guarantees:
- No floats are used, so that sums of milli-CPUs are exact.
"""

from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

from trainium_devcluster.node.api.objects import Json, get_containers, get_init_containers, is_sidecar

_SUFFIXES = {
    **{suffix: Decimal(2) ** (10 * (power + 1)) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
    **{suffix: Decimal(10) ** (3 * (power - 3)) for power, suffix in enumerate(("n", "u", "m"))},
    **{suffix: Decimal(10) ** (3 * (power + 1)) for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"))},
}


def parse(text: str | float) -> Decimal:
    """Return the number of a quantity.

    Raises:
        ValueError: when it is not a quantity.
    """
    raw = str(text).strip()
    suffix = next((s for s in _SUFFIXES if raw.endswith(s)), "")
    try:
        return Decimal(raw[: len(raw) - len(suffix)] if suffix else raw) * _SUFFIXES.get(suffix, Decimal(1))
    except InvalidOperation:
        raise ValueError(f"{raw!r} is not a quantity: give a number, perhaps with m, k, M, G, Ki, Mi or Gi") from None


def sum_pod_requests(pod: Json) -> dict[str, Decimal]:
    """Return the requests that the scheduler counts: of containers and sidecars, or of an init container if larger."""
    total: dict[str, Decimal] = {"pods": Decimal(1)}
    for container in get_containers(pod):
        _add(total, container)
    sidecars: dict[str, Decimal] = {}
    peaks: list[dict[str, Decimal]] = []
    for container in get_init_containers(pod):
        if is_sidecar(container):
            _add(sidecars, container)
            _add(total, container)
        else:
            peak = dict(sidecars)
            _add(peak, container)
            peaks.append(peak)
    return {name: max(_parse_values(name, [total, *peaks])) for name in {n for part in (total, *peaks) for n in part}}


def _parse_values(name: str, parts: Iterable[dict[str, Decimal]]) -> list[Decimal]:
    return [part.get(name, Decimal(0)) for part in parts]


def _add(total: dict[str, Decimal], container: Json) -> None:
    resources = container.get("resources") or {}
    requests = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    for name, quantity in requests.items():
        total[name] = total.get(name, Decimal(0)) + parse(quantity)
