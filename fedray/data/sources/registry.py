"""The sources that come with fedray: what each one is, where to get it, and which variants it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedray.config import DataConfig
from fedray.data.normalization import OF_IMAGES, OF_PHOTOGRAPHS, OF_PIXELS, OF_TABLES, OF_TOKENS
from fedray.errors import UserError, near_miss
from fedray.usercode.importing import FORMS, check_user_object, is_user_defined

FREE_FOR_RESEARCH = "no formal licence; free for research"


@dataclass(frozen=True)
class SourceEntry:
    """Describes a source, that is, a function that loads a data set and that the key ``data.source`` names.
    :data:`SOURCES` has an entry for each source that comes with fedray.

    Args:
        loader: the function as ``module:function`` or ``file.py:function``. It is imported only when it is used.
        about: a description of the data: samples, shape, classes and clients.
        licence: the terms under which the data may be used.
        tested: which files fedray's tests load from this source, such as "the published files".
        normalizations: the allowed values of ``data.normalization``, each with a line about it.
        variants: the allowed values of ``data.variant``, each with a line about it; the first is the default. It is
            empty for data without variants, and for a user's source, whose function checks ``data.variant`` itself.
    """

    loader: str
    about: str = ""
    licence: str = ""
    tested: str = ""
    normalizations: Mapping[str, str] = field(default_factory=lambda: OF_TOKENS)
    variants: Mapping[str, str] = field(default_factory=dict)

    def variant(self, name: str, asked: str | None) -> str | None:
        """Checks the value of ``data.variant``, and returns the variant of this source that is to be loaded.

        This is ``asked``, the value that the user has set; if it is None, the default variant, or None if there is no
        default. ``name`` is the source's name. Raises :class:`UserError` for a variant that the source does not have.
        """
        if asked is not None and not self.variants and name in SOURCES:
            raise UserError(f"data.variant: the source {name} has no variants")
        if asked is not None and self.variants and asked not in self.variants:
            raise UserError(f"data.variant: the source {name} has no {asked!r}{near_miss(asked, self.variants)}")
        return asked or next(iter(self.variants), None)

    def check_normalization(self, name: str, asked: str) -> None:
        """Checks that ``asked``, the value of ``data.normalization``, is one that this source, called ``name``, has.
        Raises :class:`UserError` otherwise."""
        if asked not in self.normalizations:
            hint = near_miss(asked, self.normalizations)
            raise UserError(f"data.normalization: the source {name} has no {asked!r}{hint}")


SOURCES = {
    "sample": SourceEntry(
        "fedray.data.sources.idx:sample",
        "Fashion-MNIST cut down to 10,000 + 2,000 images [1, 28, 28], 10 classes, balanced; inside the package",
        "MIT, Zalando SE 2017",
        "itself",
        OF_PIXELS,
    ),
    "mnist": SourceEntry(
        "fedray.data.sources.idx:mnist",
        "MNIST: 60,000 + 10,000 handwritten digits [1, 28, 28], 10 classes (LeCun et al. 1998)",
        FREE_FOR_RESEARCH,
        "the published files",
        OF_PIXELS,
    ),
    "fashion_mnist": SourceEntry(
        "fedray.data.sources.idx:fashion_mnist",
        "Fashion-MNIST: 60,000 + 10,000 pictures of clothes [1, 28, 28], 10 classes (Xiao et al. 2017)",
        "MIT, Zalando SE 2017",
        "the published files",
        OF_PIXELS,
    ),
    "emnist": SourceEntry(
        "fedray.data.sources.emnist:emnist",
        "EMNIST: handwritten digits and letters [1, 28, 28], upright (Cohen et al. 2017)",
        "derived from NIST Special Database 19, of the US government",
        "the published test files of bymerge; small files in the published formats for the rest",
        OF_PIXELS,
        variants={
            "balanced": "112,800 + 18,800 images, 47 classes",
            "bymerge": "697,932 + 116,323 images, 47 classes: letters that look alike in both cases are one class",
            "byclass": "697,932 + 116,323 images, 62 classes",
            "bymerge_test": "the test images of bymerge alone; every fifth of each class is a test image",
            "femnist": "62 classes, each writer a client: LEAF's json files (Caldas et al. 2018), at most 805,263 "
            "images of 3,550 writers",
        },
    ),
    "cifar10": SourceEntry(
        "fedray.data.sources.cifar:cifar10",
        "CIFAR-10: 50,000 + 10,000 colour photographs [3, 32, 32], 10 classes (Krizhevsky 2009)",
        FREE_FOR_RESEARCH,
        "the published images, in the binary layout",
        {**OF_PIXELS, "ghbm": "the standard deviations 0.2023, 0.1994, 0.2010 of GHBM's code, for its tables"},
    ),
    "cifar100": SourceEntry(
        "fedray.data.sources.cifar:cifar100",
        "CIFAR-100: 50,000 + 10,000 colour photographs [3, 32, 32], 100 classes (Krizhevsky 2009)",
        FREE_FOR_RESEARCH,
        "6,000 of the images, in the published layouts",
        {**OF_PIXELS, "ghbm": "CIFAR-10's mean and the standard deviations 0.2023, 0.1994, 0.2010, as in GHBM's code"},
        {"fine": "the 100 classes", "coarse": "their 20 groups of five"},
    ),
    "tiny_imagenet": SourceEntry(
        "fedray.data.sources.tiny_imagenet:tiny_imagenet",
        "Tiny-ImageNet: 100,000 + 10,000 photographs [3, 64, 64], 200 classes; val is the test set (Le and Yang 2015)",
        "terms of ImageNet: research only",
        "5,000 of the images, in the published layout",
        OF_IMAGES,
    ),
    "har": SourceEntry(
        "fedray.data.sources.har:har",
        "UCI-HAR: 7,352 + 2,947 windows of a phone's sensors, 6 activities; 21 + 9 people, each of the 21 a client "
        "(Anguita et al. 2013)",
        "research only, by its README; CC BY 4.0 on its page",
        "the published signals; small files in the published format for the features",
        OF_TABLES,
        {"features": "561 features [561]", "signals": "the nine raw signals [9, 128]"},
    ),
    "shakespeare": SourceEntry(
        "fedray.data.sources.shakespeare:shakespeare",
        "Shakespeare's plays: the next of 80 characters after 80 characters, each role a client",
        "public domain",
        "37 plays and tinyshakespeare, complete; small files in LEAF's format",
        variants={
            "leaf": "LEAF's json files (Caldas et al. 2018), at most 4,226,158 samples of 1,129 roles",
            "plays": "plays as texts (*.txt), with the speaker on a separate line: 3,293,099 + 765,381 samples of "
            "1,109 roles in 37 plays",
            "tiny": "tinyshakespeare's input.txt, with NAME: before a speech: 800,308 + 186,812 samples of 247 roles",
        },
    ),
    "stackoverflow": SourceEntry(
        "fedray.data.sources.stackoverflow:stackoverflow",
        "posts of a Stack Exchange dump (Posts.xml), as many as it has: the next of 10,000 words + 4 after each of 20 "
        "words of a sentence, each user a client",
        "CC BY-SA, with attribution",
        "592 posts of 115 users in the published format: 4,403 + 767 sentences",
    ),
    "omniglot": SourceEntry(
        "fedray.data.sources.omniglot:omniglot",
        "Omniglot: 25,968 + 6,492 drawings of 1,623 characters, its classes, of 50 alphabets [1, 28, 28]; a client for "
        "each of 16 drawers of an alphabet, the other four give the tests (Lake et al. 2015)",
        "MIT",
        "4,672 + 1,168 of the drawings, of 160 drawers (images_background_small1 and 2)",
        OF_PIXELS,
    ),
    "fire": SourceEntry(
        "fedray.data.sources.image_folder:fire",
        "photographs with and without fire: two folders of images, fire and nofire; [3, 64, 64] unless data.image_size "
        "says otherwise",
        "that of the photographs",
        "519 + 128 photographs of cair/Fire-Detection-Image-Dataset",
        OF_IMAGES,
    ),
    "image_folder": SourceEntry(
        "fedray.data.sources.image_folder:image_folder",
        "your image files in data.root: train/CLASS/..., test/CLASS/...; data.image_size scales them",
        "yours",
        "generated images, and photographs",
        OF_IMAGES,
    ),
    "federated_csv": SourceEntry(
        "fedray.data.sources.federated_csv:federated_csv",
        "photographs of users: train.csv (user_id,image_id,class), test.csv, images (data.root); data.image_size",
        "yours",
        "4,358 photographs of 40 cameras (iWildCam)",
        OF_PHOTOGRAPHS,
    ),
    "gldv2": SourceEntry(
        "fedray.data.sources.federated_csv:gldv2",
        "Landmarks-User-160k of Google Landmarks v2, as federated_csv: 1,262 users, 164,172 photographs, 2,028 classes",
        "terms of Google and of the photographs' authors; not checked",
        "generated files at the published counts",
        OF_PHOTOGRAPHS,
    ),
    "inaturalist": SourceEntry(
        "fedray.data.sources.federated_csv:inaturalist",
        "iNaturalist-User-120k, as federated_csv: 9,275 users, 120,300 photographs, 1,203 classes",
        "terms of iNaturalist 2017; not checked",
        "generated files at the published counts",
        OF_PHOTOGRAPHS,
    ),
    "csv": SourceEntry(
        "fedray.data.sources.csv_files:csv",
        "your csv files (data.root): train.csv and test.csv, or one file; data.target_column, "
        "data.client_column, data.input_columns",
        "yours",
        "generated tables",
        OF_TABLES,
    ),
    "hf": SourceEntry(
        "fedray.data.sources.hf:hf",
        "a data set of Hugging Face (data.root): its name on the hub, a folder of save_to_disk, or Parquet files; "
        "data.target_column, data.client_column, data.input_columns",
        "that of the data set",
        "saved data sets and Parquet files; none from the hub",
        OF_TABLES,
    ),
    "npz": SourceEntry(
        "fedray.data.sources.npz:npz",
        "your file (data.root): x_train, y_train, x_test, y_test, optional client_train, x_public, ...",
        "yours",
        "generated arrays",
        OF_TABLES,
    ),
}


def entry_of(name: str) -> SourceEntry:
    """Returns the entry that describes the source ``name``, the value of ``data.source``.

    For a source that comes with fedray this is its entry in :data:`SOURCES`, and for a user-defined function a new one.
    Raises :class:`UserError` if there is no such source. No module is imported and no data are read.
    """
    if name in SOURCES:
        return SOURCES[name]
    if not is_user_defined(name):
        hint = near_miss(name, SOURCES)
        raise UserError(f"data.source: there is no source {name!r}{hint}; a function of yours is given as {FORMS}")
    check_user_object(name, "data.source")
    return SourceEntry(name, normalizations=OF_TABLES)


def check_source(data: DataConfig) -> None:
    """Checks the source that a configuration names in its section ``data``, before any data are loaded.

    Raises :class:`UserError` if there is no such source, or if it does not have the variant or the normalization that
    the section asks for.
    """
    entry = entry_of(data.source)
    entry.variant(data.source, data.variant)
    if data.source in SOURCES:
        entry.check_normalization(data.source, data.normalization)
