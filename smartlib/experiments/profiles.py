"""Which bundles the notebooks use in each profile."""

from __future__ import annotations

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
        ValueError: an unknown profile; the message lists the known ones.

    >>> bundle_names("embedded")[0]
    'fashion/resnet'
    """
    if profile not in BUNDLES:
        raise ValueError(f"unknown profile {profile!r}; known: {', '.join(BUNDLES)}")
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
SKEWED = {
    "embedded": ("fashion/resnet", "fashion-pairs/resnet"),
    "public": ("public/cifar10-resnet50-ce", "public/cifar100-densenet-bc-100"),
}

# Models whose fitting pool and held-out samples the ablations of notebook 09 use: few and many classes.
ABLATION_BUNDLES = {
    "embedded": ("fashion/resnet", "fashion/vit", "fashion-pairs/resnet"),
    "public": ("public/cifar10-resnet50-ce", "public/cifar100-wideresnet-16-4"),
}
