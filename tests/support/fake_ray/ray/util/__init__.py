"""Placement groups: bundles of resources, each on one node."""

from __future__ import annotations

import ray
import ray.util.placement_group  # whose name is the function's from here on

removed: list[PlacementGroup] = []


def get_node_ip_address() -> str:
    return ray.node


class PlacementGroup:
    def __init__(self, bundles: list[dict[str, float]], strategy: str) -> None:
        self.bundles, self.strategy = bundles, strategy
        names = [f"127.0.0.{n + 1}" for n in range(ray.N_NODES)]
        free = {node: dict(ray.NODE) for node in names}
        self._gpus: dict[str, list[int]] = {node: [0, 1] for node in names}
        self.nodes: list[str] = []
        self.left = [dict(bundle) for bundle in bundles]
        for i, bundle in enumerate(bundles):
            for node in names[i % len(names) :] + names[: i % len(names)]:  # round-robin
                is_taken = strategy == "STRICT_SPREAD" and node in self.nodes
                if not is_taken and all(free[node].get(kind, 0) >= n for kind, n in bundle.items()):
                    for kind, n in bundle.items():
                        free[node][kind] -= n
                    self.nodes.append(node)
                    break

    def wait(self, timeout_s: float) -> bool:
        return len(self.nodes) == len(self.bundles)

    def place(self, bundle: int, needs: dict[str, float]) -> tuple[str, list[int]]:
        """Return the node and the GPUs for an actor or task in that bundle."""
        for kind, n in needs.items():
            if n:
                self.left[bundle][kind] -= n
                assert self.left[bundle][kind] >= 0, "there is no room left in the bundle"
        node = self.nodes[bundle]
        return node, [self._gpus[node].pop(0) for _ in range(int(needs["GPU"]))]


def placement_group(bundles: list[dict[str, float]], strategy: str) -> PlacementGroup:
    return PlacementGroup(bundles, strategy)


def remove_placement_group(group: PlacementGroup) -> None:
    removed.append(group)
