"""Images to logits: data sets as they lie on disk, pretrained networks, extraction, bundles of profile ``paper``.

``make plan PROFILE=paper`` shows what that takes, ``make all PROFILE=paper`` does it. The pieces, in the order in which
data flow through them:

* `sources`: labelled images in a fixed order, from the layouts in which the data sets are published;
* `models`: a pretrained network, cut before its last linear layer, with the transform that it was trained with;
* `extraction`: logits and features of all images, in shards that are written once and never lost (`shards`);
* `catalogue`: which data sets and networks profile ``paper`` has, and where they are looked for; `planning`: the cost;
* `bundles`: what was extracted, as bundles for ``smartlib.load("imagenet/resnet50")``.

Needs the extra ``zoo`` (torchvision, timm), and for streaming from the Hugging Face hub the package datasets.
"""
