"""Profiled: which profile stands for which type of a cluster's devices, where it may, and what a plan says of it."""

from collections.abc import Callable, Sequence

from planner_service.core.device_types import differ, is_same, is_unknown
from planner_service.core.errors import require, shown
from planner_service.core.profile import Device, Profile


def profiles_of_types(profiles: Sequence[Profile], types: Sequence[Device], *, as_if: bool) -> tuple[Profile, ...]:
    """A profile for each type of several, in the types' order, matched by name.

    A single one that does not name its device takes the type that is left; with `as_if` all that are left are taken in
    the order in which they come. Raises InvalidInputError where that is not a profile for each type.
    """
    named = [profile.device.name for profile in profiles]
    found = _matched(named, types)
    left = [index for index in range(len(profiles)) if index not in found.values()]
    missing = [device.name for device in types if device.name not in found]
    takes = as_if or not left or (len(left) == 1 and is_unknown(named[left[0]]))
    rule = f"must be one profile for each type of device, {', '.join(device.name for device in types)}"
    require(takes and len(left) == len(missing), "other_profiles", rule, named)
    found.update(zip(missing, left, strict=True))
    return tuple(profiles[found[device.name]] for device in types)


def _matched(named: Sequence[str], types: Sequence[Device]) -> dict[str, int]:
    """The profiles' places by the name of the type: equal names first, then other spellings."""
    found: dict[str, int] = {}
    equal: Callable[[str, str], bool] = str.__eq__
    for matches in (equal, is_same):
        for device in types:
            free = (index for index in range(len(named)) if index not in found.values())
            place = next((index for index in free if matches(named[index], device.name)), None)
            if device.name not in found and place is not None:
                found[device.name] = place
    return found


def require_same_type(profile: Profile, device: Device) -> None:
    """Raises InvalidInputError where profile and device are surely of two types."""
    profiled, present = profile.device.name, device.name
    rule = (
        f"must be the cluster's type of device, {shown(present)}: profile the model on such a device, or plan as if "
        "it were one (--as-if, options.as_if)"
    )
    require(not differ(profiled, present), "profile.device.name", rule, profiled)


def warning(profile: Profile, device: Device, *, as_if: bool) -> str | None:
    """What a plan says where a profile may not be of the device that it is planned for; None where it is."""
    if is_same(profile.device.name, device.name) or (is_unknown(profile.device.name) and is_unknown(device.name)):
        return None
    profiled, present = shown(profile.device.name), shown(device.name)
    if is_unknown(profile.device.name):
        return f"the profile does not name its device: its figures count as those of the cluster's, {present}"
    if is_unknown(device.name):
        return f"the cluster does not name its device, which counts as the profile's, {profiled}"
    if as_if:
        return (
            f"planned as if {present} were {profiled}: the figures are of {profiled}, the profile's device; "
            "links and memory limits alone are the cluster's"
        )
    return (
        f"the profile is of {profiled}, the cluster of {present}: the figures are of {profiled}, "
        "and hold only where both are names of one type"
    )
