"""Device types: which name stands for which accelerator, however a vendor, a driver or a user spells it.

A name is compared by its words: in lower case, without the vendor's and the brand's, memory as `80gb`. A known type has
the words that its names use; a name may stand for every known type that has all of the name's words.

    NVIDIA A100-SXM4-80GB -> a100 sxm4 80gb -> a100-80gb
    A100                  -> a100           -> a100-40gb or a100-80gb
    NVIDIA A100 80GB PCIe -> a100 80gb pcie -> none that is known
"""

import re

KNOWN_TYPES = {
    "v100-16gb": "V100-SXM2-16GB",
    "v100-32gb": "V100-SXM2-32GB",
    "a100-40gb": "A100-SXM4-40GB",
    "a100-80gb": "A100-SXM4-80GB",
    "h100-sxm": "H100-SXM5-80GB",
    "h100-pcie": "H100-PCIe-80GB",
    "h200-sxm": "H200-SXM-141GB",
    "l4": "L4",
    "t4": "T4",
    "a10g": "A10G",
    "rtx-3090": "RTX 3090",
    "rtx-4090": "RTX 4090",
}
"""Keys of the datasheets, and the names that profiles and clusters made from them give their device."""

_MODELS = frozenset({"v100", "a100", "h100", "h200", "l4", "t4", "a10g", "3090", "4090"})
"""The word of a name that says which chip it is: without it the name stands for no type."""

_MORE_WORDS = {
    "v100-16gb": ("sxm",),
    "v100-32gb": ("sxm",),
    "a100-40gb": ("sxm",),
    "a100-80gb": ("sxm",),
    "h100-sxm": ("sxm", "hbm3"),
    "h100-pcie": ("hbm2e",),
    "h200-sxm": ("sxm5", "hbm3e"),
    "l4": ("24gb", "pcie"),
    "t4": ("16gb", "pcie"),
    "a10g": ("24gb", "pcie"),
    "rtx-3090": ("24gb",),
    "rtx-4090": ("24gb",),
}
"""Words that names of a type may have beside those of its key and its name, as the vendor's driver has them."""

_BRANDS = frozenset({"nvidia", "corporation", "tesla", "geforce", "gpu"})
_MARKETING = re.compile(r"\btensor[\W_]+core\b")
_MEMORY = re.compile(r"(?<![a-z0-9])(\d+)[\s_-]*gi?b?(?![a-z0-9])")
_RTX = re.compile(r"\brtx(?=\d)")
_SEPARATORS = re.compile(r"[\W_]+")


def words(name: str) -> tuple[str, ...]:
    """The words of a name that are compared, in their order; the brands only where there is nothing else."""
    text = _MARKETING.sub(" ", name.casefold())
    text = _MEMORY.sub(r" \1gb ", _RTX.sub("rtx ", text))
    every = tuple(word for word in _SEPARATORS.split(text) if word)
    return tuple(word for word in every if word not in _BRANDS) or every


def is_unknown(name: str) -> bool:
    """Whether a name says nothing of the device, as in an imported profile: `unknown`, or empty."""
    return name.strip().casefold() in ("", "unknown")


def known_types(name: str) -> frozenset[str]:
    """The known types that a name may stand for, by their keys: none, one, or several where it is short."""
    asked = set(words(name))
    if asked.isdisjoint(_MODELS):
        return frozenset()
    return frozenset(key for key, of_type in _WORDS.items() if asked <= of_type)


def is_same(one: str, other: str) -> bool:
    """Whether two names surely stand for one type: the same words, or spellings of one known type."""
    types = known_types(one)
    return words(one) == words(other) or (len(types) == 1 and types == known_types(other))


def differ(one: str, other: str) -> bool:
    """Whether two names surely stand for two types: of two known chips, or of known types without a common one."""
    models, others = _MODELS.intersection(words(one)), _MODELS.intersection(words(other))
    if models and others and models.isdisjoint(others):
        return True
    types, other_types = known_types(one), known_types(other)
    return bool(types and other_types) and types.isdisjoint(other_types)


_WORDS = {key: {*words(key), *words(name), *_MORE_WORDS[key]} for key, name in KNOWN_TYPES.items()}
