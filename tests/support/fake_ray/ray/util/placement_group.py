from typing import Any

current: Any = None


def get_current_placement_group() -> Any:
    return current
