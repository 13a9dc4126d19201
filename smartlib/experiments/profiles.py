"""Which bundles the notebooks use in each profile.

Those of profile ``paper`` are what was extracted on this machine, in the order of its catalogue
(`smartlib.data.vision.catalogue`).
"""

from __future__ import annotations

from smartlib.data.vision import bundles as extracted

# The first bundle of a profile is the one that single examples show.
BUNDLES = {
    # Trained for this companion, shipped with it: no network, minutes on a laptop.
    "embedded": ("fashion/resnet", "fashion/densenet", "fashion/vit"),
    # Public logits, downloaded once: among them the paper's own CIFAR-10 ResNet-50.
    "public": (
        "public/cifar10-resnet50-ce",
        "public/cifar10-resnet50-focal",
        "public/cifar10-densenet40",
        "public/cifar10-wideresnet-16-4",
        "public/cifar100-wideresnet-16-4",
        "public/cifar100-densenet-bc-100",
    ),
}

PROFILES = (*BUNDLES, "paper")

# What the experiments of notebooks 05 to 10 add to them: training methods that calibrate, and a many-class task.
_FURTHER = {
    "embedded": (
        "fashion/wideresnet",
        "fashion/resnet-focal",
        "fashion/resnet-smoothing",
        "fashion/resnet-mixup",
        "fashion-pairs/resnet",
        "fashion-pairs/wideresnet",
        "fashion-pairs/vit",
    ),
}

# Bundles whose values others reported: dataset and model in `smartlib.experiments.reported`.
REPORTED_AS = {
    "public/cifar10-resnet50-ce": ("cifar10", "resnet50"),
    "public/cifar10-densenet40": ("cifar10", "densenet40"),
}


def bundle_names(profile: str) -> tuple[str, ...]:
    """The bundles of a profile.

    Raises:
        ValueError: an unknown profile; the message lists the known ones. Or profile ``paper`` before anything was
            extracted.

    >>> bundle_names("embedded")[0]
    'fashion/resnet'
    """
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    if profile == "paper":
        if not (found := extracted.names()):
            raise ValueError("profile 'paper' has no logits here yet: `make plan PROFILE=paper` says what it needs")
        return found
    return BUNDLES[profile]


def experiment_bundles(profile: str) -> tuple[str, ...]:
    """The bundles of the experiments: those of :func:`bundle_names`, and more.

    Raises:
        ValueError: an unknown profile.
    """
    return bundle_names(profile) + _FURTHER.get(profile, ())


# Models whose logits of shifted images are shipped (notebook 06); no public logits of that kind are known.
SHIFTED = {"embedded": ("fashion/wideresnet", "fashion/resnet-mixup", "fashion-pairs/resnet")}

# Models trained on long-tailed classes, with the largest class divided by the smallest.
LONG_TAILED = {"embedded": {"fashion/resnet-lt10": 10, "fashion/resnet-lt100": 100}}

# Models trained on balanced classes that notebook 06 calibrates and judges under class skew: few and many classes.
_SKEWED = {
    "embedded": ("fashion/resnet", "fashion-pairs/resnet"),
    "public": ("public/cifar10-resnet50-ce", "public/cifar100-densenet-bc-100"),
}

# Models whose fitting pool and held-out samples the ablations of notebook 09 use: few and many classes.
_ABLATION = {
    "embedded": ("fashion/resnet", "fashion/vit", "fashion-pairs/resnet"),
    "public": ("public/cifar10-resnet50-ce", "public/cifar100-wideresnet-16-4"),
}


def skewed_bundles(profile: str) -> tuple[str, ...]:
    """The models that notebook 06 judges under class skew; in profile ``paper`` the first of up to two data sets.

    Raises:
        ValueError: an unknown profile.
    """
    return _SKEWED.get(profile) or _first_of_each(bundle_names(profile))[:2]


def ablation_bundles(profile: str) -> tuple[str, ...]:
    """The models of the ablations; in profile ``paper`` the first of up to two data sets.

    Raises:
        ValueError: an unknown profile.
    """
    return _ABLATION.get(profile) or _first_of_each(bundle_names(profile))[:2]


def _first_of_each(names: tuple[str, ...]) -> tuple[str, ...]:
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.partition("/")[0], name)
    return tuple(first.values())
