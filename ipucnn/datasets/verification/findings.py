"""The kinds of problems of data sets: a code, a severity and a hint for each."""

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

from ipucnn.datasets.limits import UNBALANCED
from ipucnn.datasets.segmentation.masks import IGNORE, ONE_CLASS, TABLE, TABLE_HINT

ERROR, WARNING = "error", "warning"
TRAIN, EVAL = "train", "eval"


@dataclass(frozen=True)
class Code:
    """A kind of finding.

    Attributes:
        severity: ERROR if training would fail or give a misleading result, else WARNING.
        message: the problem, in words that fit all files or samples of a finding.
        hint: the way to correct it.
        partial: whether a part of the set is missing, which ``--allow-partial`` makes a warning.
        as_published: whether the published set itself may have the problem.  It is then a warning if all files are byte
            for byte the published ones, because nobody can correct it.
    """

    severity: str
    message: str
    hint: str
    partial: bool = False
    as_published: bool = False


_AGAIN = "copy or download the files again"
_PARTIAL = "copy or download what is missing"
CODES: Dict[str, Code] = {
    # -- missing and additional parts
    "missing-subset": Code(ERROR, "a subset without samples", "add it", partial=True),
    "no-eval-subset": Code(
        WARNING, "the set has no subset for evaluation: the last 10 % of train serve as one", "none is needed"
    ),
    "missing-file": Code(ERROR, "files that are not there", _PARTIAL, partial=True),
    "fewer-samples": Code(ERROR, "fewer samples than the set has", _PARTIAL, partial=True),
    "more-samples": Code(
        WARNING, "more samples than the set has", "check that nothing was mixed into the set"
    ),
    "unpaired": Code(
        ERROR,
        "images without a mask of their name, or masks without an image",
        "add the partner or remove the file",
        partial=True,
    ),
    "several-masks": Code(
        ERROR,
        "images with several masks, and these masks",
        "copy the set with the masks of each image joined, with the command that `ipucnn train` gives",
        partial=True,
    ),
    "class-names": Code(
        WARNING, "the file of the class names is not there", "copy it beside the data, for names in reports"
    ),
    "unread-part": Code(
        WARNING, "parts of the set, or features of its records, that training does not read", "none is needed"
    ),
    "passed-over": Code(
        WARNING,
        "files or folders that are not samples, and are skipped",
        "remove them, or check their names",
    ),
    # -- reading
    "empty-file": Code(ERROR, "files of 0 bytes", _AGAIN),
    "truncated": Code(ERROR, "files or samples that end too early", _AGAIN),
    "checksum": Code(ERROR, "records or files whose checksum is wrong", _AGAIN),
    "unreadable": Code(ERROR, "files or samples that cannot be read", "replace or remove them"),
    "unusable": Code(
        ERROR, "files, folders or tables that cannot be used as they are", "correct what the examples name"
    ),
    "too-large": Code(
        ERROR,
        "images of more pixels than --max-image-pixels, or larger than the memory allows",
        "shrink them, or allow more with --max-image-pixels",
    ),
    "count-mismatch": Code(ERROR, "files with other numbers of images than labels", _AGAIN),
    "not-published": Code(
        WARNING,
        "files that differ from the published ones, by their checksum",
        "packed again or changed: compare the other findings, or download them again",
    ),
    "not-checked": Code(
        WARNING, "parts that this command cannot look into", "store them as TFRecord to have them checked"
    ),
    # -- properties of a sample
    "wrong-dtype": Code(ERROR, "pixels or labels of another type than bytes", "convert them to uint8"),
    "wrong-shape": Code(
        ERROR,
        "images of another size than their masks, or than the set's",
        "bring both to one size, or remove them",
    ),
    "wrong-mode": Code(
        ERROR,
        "images or masks of pixels that are not read, or grey images beside colour ones",
        "save all images as grey of 8 or 16 bits, or all as 8-bit colour; masks as grey, or name their colours in "
        "DIR/classes.txt",
    ),
    "orientation": Code(
        ERROR,
        "images or masks that their orientation tag turns, and their partners are not",
        "save both upright, without the tag",
    ),
    "page-order": Code(
        ERROR,
        "stacks whose axes have another order or other lengths than those of their masks",
        "save the masks with the axes and the order of the images",
    ),
    "several-pages": Code(
        ERROR,
        "images or masks of several pages that are no TIFF stacks",
        "save each page as a file of its own, with its partner",
    ),
    "odd-mode": Code(
        WARNING,
        "images whose pixels are of another mode than the set's; training converts them",
        "check that they belong to the set; white is laid under transparency",
    ),
    "odd-form": Code(
        WARNING,
        "images or masks that are stored in another way than most: depth, white as zero, palette or orientation",
        "check that they belong to the set; all are read by one rule: docs/pixels.md",
    ),
    "wrong-format": Code(
        WARNING, "images in another format than their name's ending says", "rename them; they are read anyway"
    ),
    "several-frames": Code(
        WARNING,
        "images of several frames, of which the first is used",
        "save the frames as images of their own",
    ),
    "stretched": Code(
        WARNING,
        "images of more than 8 bits: each one's own dark and bright become 0 and 255",
        "none is needed, unless brightness differs from image to image and matters: then save 8 bits by one rule",
    ),
    "colour-profile": Code(
        WARNING,
        "images with a profile (ICC) of other colours than sRGB's, which is not applied",
        "convert them to sRGB: colours differ from what viewers show",
    ),
    "small-image": Code(
        WARNING, "images smaller than --image-size, which are enlarged", "use a smaller --image-size"
    ),
    "constant-image": Code(WARNING, "images of one colour all over", "check how they were exported"),
    # -- labels
    "label-range": Code(
        ERROR, "labels that are none of the classes", "correct the labels, or remove the samples"
    ),
    "unknown-class": Code(
        ERROR, "classes of the evaluation subset that the training subset lacks", "rename or move the folders"
    ),
    "empty-class": Code(WARNING, "classes without samples in a subset", "add samples, or drop the class"),
    "alike-classes": Code(
        WARNING,
        "classes whose names differ only in case or blanks",
        "join their folders if they are one class",
    ),
    "inner-folder": Code(
        WARNING,
        "folders inside class folders: their images are of the class",
        "if they are the classes, move them out of the folders that they lie in",
    ),
    "imbalance": Code(
        WARNING,
        f"the largest class has at least {UNBALANCED} times the samples of the smallest",
        "read accuracies class by class: ipucnn evaluate; train with --class-weights balanced",
    ),
    "mask-values": Code(
        ERROR,
        "masks with values that are no class: of two classes 0 and one other, of more 0, 1, 2, ...",
        f"save masks without smoothing or JPEG compression; where each object has a number of its own, {ONE_CLASS}; "
        "other values are named there, too",
    ),
    "void-class": Code(
        WARNING,
        "classes of masks with a name that elsewhere means pixels that do not count",
        f"call it {IGNORE} in DIR/{TABLE} to leave its pixels out of the loss and of all scores",
    ),
    "unnamed-classes": Code(
        WARNING,
        "values of masks that no table names, and that are taken for classes",
        f"{TABLE_HINT}; if they number objects, {ONE_CLASS}",
    ),
    "other-values": Code(
        WARNING,
        f"values of masks that the line '* NAME' of {TABLE} makes one class",
        "if they are no objects of that class, save masks of one value for each class",
    ),
    "mask-constant": Code(WARNING, "masks of one class all over", "check that they are finished"),
    "nothing-to-learn": Code(
        ERROR, "all samples of the set are of one class", "add samples of other classes"
    ),
    # -- equal samples
    "duplicate": Code(
        WARNING, "samples that are in a subset more than once, pixel for pixel", "keep one of each"
    ),
    "conflict": Code(
        ERROR,
        "identical images with different labels or masks",
        "at least one of the labels is wrong: correct or remove it",
        as_published=True,
    ),
    "leakage": Code(
        ERROR,
        "evaluation samples that are in the training subset, too: accuracies come out too high",
        "remove them from one of the subsets",
        as_published=True,
    ),
    # -- statistics of all samples
    "statistics": Code(
        ERROR,
        "mean or standard deviation is not the published one",
        "check the order of channels and the range of values, or whether this is the set it is called",
    ),
    "shift": Code(
        WARNING,
        "the subsets differ in brightness by more than chance",
        "check that both were prepared in the same way",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One kind of problem in one subset.

    Attributes:
        code: a key of CODES.
        severity: ERROR or WARNING.
        subset: "train" or "eval"; None for the set as a whole.
        count: number of files, samples or classes with the problem.
        message: the problem.
        examples: the first of them, each with its file or sample and the details.
        hint: the way to correct it.
    """

    code: str
    severity: str
    subset: Optional[str]
    count: int
    message: str
    examples: Tuple[str, ...]
    hint: str
