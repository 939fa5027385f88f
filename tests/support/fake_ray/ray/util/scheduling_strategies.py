from typing import Any


class PlacementGroupSchedulingStrategy:
    def __init__(self, group: Any, placement_group_bundle_index: int = -1) -> None:
        self.group, self.bundle = group, placement_group_bundle_index
