"""The digest of the code that a network's layer graph depends on: what changes it, and what leaves it as it is."""

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ipucnn
from ipucnn.models import sources
from ipucnn.models.build import build_model
from ipucnn.models.registry import get_model, list_models
from ipucnn.models.sources import SourceTree
from ipucnn.planning.graphs.extract import graph_of

PACKAGE = Path(ipucnn.__file__).parent
EXTRACTION = [(function.__module__, function.__qualname__) for function in (build_model, graph_of)]


def roots_of(name):
    builder = get_model(name).builder
    return [(builder.__module__, builder.__qualname__), *EXTRACTION]


@pytest.fixture
def copy(tmp_path):
    """A copy of the followed packages."""
    for package in sources.PACKAGES:
        part = Path(*package.split("."))
        ignored = shutil.ignore_patterns("__pycache__", "*.gz")
        shutil.copytree(str(PACKAGE.parent / part), str(tmp_path / part), ignore=ignored)
    return tmp_path


def file_of(folder, function):
    return folder.joinpath(*function.__module__.split(".")).with_suffix(".py")


def change(path, old, new):
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))


def digests(folder, *names):
    tree = SourceTree(folder)
    return [tree.digest(roots_of(name)) for name in names]


@functools.lru_cache(maxsize=None)
def package_digests(*names):
    """Those of an unchanged copy: it does not matter where the sources lie."""
    return digests(PACKAGE.parent, *names)


def test_a_copy_has_the_package_s_digests(copy):
    assert digests(copy, "lenet", "unet") == package_digests("lenet", "unet")


def test_what_stands_beside_a_network_does_not_change_its_digest(copy):
    before = digests(copy, "lenet", "cifar_resnet8")
    small = copy / "ipucnn" / "models" / "families" / "small.py"
    small.write_text(
        small.read_text()
        + "\n\n_WIDTH = 8\n\n\ndef build_tinynet(inputs, num_classes):\n"
        + "    from tensorflow import keras\n\n    x = keras.layers.Conv2D(_WIDTH, 3)(inputs)\n"
        + "    return read_blueprint(keras.Model(inputs, x))\n\n\n"
        + "MODELS = (*MODELS, ModelRecord('tinynet', 'small', 'none', build_tinynet))\n"
    )
    (small.parent / "another.py").write_text("MODELS = ()\n")
    change(copy / "ipucnn" / "models" / "counts.py", "def layer_macs", "def of_layer")
    assert digests(copy, "lenet", "cifar_resnet8") == before


def test_comments_docstrings_annotations_and_formatting_do_not_change_it(copy):
    before = digests(copy, "lenet", "resnet50")
    small = copy / "ipucnn" / "models" / "families" / "small.py"
    change(small, 'name="conv1")', 'name=\n        "conv" "1" # The first.\n    )')
    change(small, '"""LeNet-5, LeCun', '"""The LeNet-5, LeCun')
    change(
        small,
        "def build_lenet(inputs: Tensor, num_classes: int) -> Blueprint:",
        "def build_lenet(inputs, num_classes):",
    )
    editing = copy / "ipucnn" / "models" / "editing.py"
    change(
        editing,
        "def end_in_logits(blueprint: Blueprint) -> None:",
        "def end_in_logits(  blueprint  ):\n    # Why.",
    )
    for module in ("blueprint.py", "build.py", "families/resnet.py"):
        path = copy / "ipucnn" / "models" / module
        path.write_text("# New.\n\n" + path.read_text().replace("\n\n\n", "\n\n\n\n"))
    assert digests(copy, "lenet", "resnet50") == before


@pytest.mark.parametrize(
    "path, old, new, changed",
    [
        ("families/small.py", "Conv2D(6, 5", "Conv2D(7, 5", ["lenet"]),
        ("families/resnet.py", "_EPSILON = 1.001e-5", "_EPSILON = 1.002e-5", ["resnet18"]),
        (
            "families/resnet.py",
            "from tensorflow import keras",
            "from elsewhere import keras",
            ["resnet18", "resnet50"],
        ),
        ("families/unet.py", "_DEPTH = 5", "_DEPTH = 4", ["unet"]),
        ("families/cifar_resnet.py", 'f"{name}_conv_ds"', 'f"{name}_conv"', ["cifar_resnet8"]),
        (
            "families/keras_applications.py",
            "include_top=True",
            "include_top=False",
            ["resnet50", "mobilenetv3-small"],
        ),
        (
            "families/mobilenet.py",
            '_HARD_SWISH = ("hard_swish"',
            '_HARD_SWISH = ("swish"',
            ["mobilenetv3-small"],
        ),
        ("layers/per_sample.py", "inputs[:, ::2, ::2, :]", "inputs[:, ::2, 1::2, :]", ["cifar_resnet8"]),
        ("layers/micro_batches.py", "momentum: float = 0.97", "momentum: float = 0.98", None),
        ("editing.py", "_USUAL_GROUPS = 32", "_USUAL_GROUPS = 16", None),
        ("names.py", 'INPUT_NAME = "input"', 'INPUT_NAME = "images"', None),
        ("registry.py", "size >= record.min_size", "size > record.min_size", None),
    ],
)
def test_what_a_builder_reaches_changes_it(copy, path, old, new, changed):
    names = ["lenet", "cifar_resnet8", "resnet18", "resnet50", "unet", "mobilenetv3-small"]
    before = dict(zip(names, package_digests(*names)))
    change(copy / "ipucnn" / "models" / path, old, new)
    after = dict(zip(names, digests(copy, *names)))
    assert [name for name in names if after[name] != before[name]] == (names if changed is None else changed)


def test_the_extraction_of_the_graph_changes_all_of_them(copy):
    before = digests(copy, "lenet", "unet")
    change(file_of(copy, graph_of), "for layer in model.layers}", "for layer in model.layers[1:]}")
    after = digests(copy, "lenet", "unet")
    assert all(a != b for a, b in zip(after, before))


def test_the_digest_needs_no_tensorflow_and_little_time():
    code = (
        "import sys, time\n"
        "from ipucnn.models.registry import get_model\n"
        "from ipucnn.planning.graphs.extract import graph_key, home_options\n"
        "record = get_model('resnet50')\n"
        "began = time.process_time()\n"
        "graph_key(record, home_options(record))\n"
        "print(time.process_time() - began)\n"
        "assert not any(m.split('.')[0] in ('tensorflow', 'keras') for m in sys.modules)\n"
    )
    # Without any load it takes about 0.05 s.
    assert float(subprocess.check_output([sys.executable, "-c", code])) < 0.5


# --- small trees of one's own


def tree_of(folder, **modules):
    for name, text in modules.items():
        path = folder / "ours" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (folder / "ours" / "__init__.py").touch()
    return SourceTree(folder, ("ours",)).digest([("ours.a", "build")])


BUILD = "from ours.b import {0}\ndef build():\n    return {0}\n"


@pytest.mark.parametrize(
    "a, b, unrelated, is_changed",
    [
        # Only what is named counts ...
        ("from ours.b import f\ndef build(): return f()", "def f(): pass", "def g(): pass", False),
        ("import ours.b\ndef build(): return ours.b.f()", "def f(): pass", "def g(): pass", False),
        ("from ours import b\ndef build(): return b.f()", "def f(): pass", "X = 1", False),
        ("from . import b as c\ndef build(): return c.f()", "def f(): pass", "X = 1", False),
        ("from .b import f as g\ndef build(): return getattr(g(), 'x')", "def f(): pass", "X = 1", False),
        ("import keras\ndef build(n): return getattr(keras.layers, n)", "", "X = 1", False),
        (
            "from ours.b import f\ndef build(): return f()",
            "def f(): pass",
            "import os\nif os.TYPE_CHECKING: X = 1",
            False,
        ),
        (
            "def build():\n    from ours.b import f\n    return f()",
            "import os\n@os.cache\ndef f(): pass",
            "@os.cache\ndef g(): pass",
            False,
        ),
        # ... and what can't be told does.
        ("from ours import b\ndef build(): return vars(b)", "def f(): pass", "X = 1", True),
        ("from ours import b\ndef build(n): return getattr(b, n)", "def f(): pass", "X = 1", True),
        ("from ours import b\ndef build(n): return b", "def f(): pass", "X = 1", True),
        ("def build(x, n): return getattr(x, n)", "", "X = 1", True),
        ("def build(x, n): return map(getattr, x, n)", "", "X = 1", True),
        ("import ours\ndef build(): return ours", "", "X = 1", True),
        ("import importlib\ndef build(n): return importlib.import_module(n)", "", "X = 1", True),
        ("from importlib import import_module as i\ndef build(n): return i(n)", "", "X = 1", True),
        ("def build(n): return __import__(n)", "", "X = 1", True),
        ("def build(n): return eval(n)", "", "X = 1", True),
        ("import sys\ndef build(n): return sys.modules[n]", "", "X = 1", True),
        ("import inspect\ndef build(x): return inspect.getmodule(x).f", "", "X = 1", True),
        ("from inspect import getmodule\ndef build(x): return getmodule(x).f", "", "X = 1", True),
        ("class C: pass\ndef build(n): return C.__subclasses__()", "", "X = 1", True),
        ("def build(x): return type(x).__subclasses__()", "", "X = 1", True),
        ("from ours.b import *\ndef build(): return f()", "def f(): pass", "X = 1", True),
        ("def build(): return nothing_binds_this", "", "X = 1", True),
        (
            "try:\n    from ours.b import f\nexcept ImportError:\n    from ours.c import f\ndef build(): return f()",
            "def f(): pass",
            "X = 1",
            False,
        ),
        # What runs on import counts with the module.
        ("from ours.b import T\ndef build(): return T", "T = {}", "T['x'] = 1", True),
        ("from ours.b import T\ndef build(): return T", "T = {}", "T.update(x=1)", True),
        ("from ours.b import T\ndef build(): return T", "T = {}", "for i in T: print(i)", True),
        ("import ours.b\ndef build(): return 1", "T = {}", "print(1)", True),
        (
            "from ours.b import T\ndef build(): return T",
            "T = {}\ndef add(f): T[0] = f",
            "@add\ndef g(): pass",
            True,
        ),
        (
            "from ours.b import T\ndef build(): return T",
            "T = {}\nclass Base: pass",
            "class D(Base): pass",
            True,
        ),
        (
            "from ours.b import f\ndef build(): return f",
            "N = 1\ndef f(): return N",
            "def g():\n    global N\n    N = 2",
            True,
        ),
        ("from ours.b import f\ndef build(): return f", "N = 1\ndef f(): return N", "if 1:\n    N = 2", True),
        ("from ours.b import f\ndef build(): return f", "def f(): return N\nN = 1", "N += 1", True),
    ],
)
def test_in_doubt_everything_counts(tmp_path, a, b, unrelated, is_changed):
    before = tree_of(tmp_path, a=a, b=b, c="def f(): pass\n")
    after = tree_of(tmp_path, a=a, b=f"{b}\n{unrelated}\n", c="def f(): pass\n")
    assert (after != before) == is_changed


def test_another_import_of_the_same_name_changes_it(tmp_path):
    """Also where both meanings were reached before."""
    modules = {"b": "def g(): pass\ndef f(): return g()\n", "c": "def g(): return 1\ndef f(): return g()\n"}
    text = "from ours import b, c\nfrom ours.{} import f\ndef build(): return f(), b.f(), c.f()\n"
    assert tree_of(tmp_path, a=text.format("b"), **modules) != tree_of(
        tmp_path, a=text.format("c"), **modules
    )


def test_a_module_can_be_renamed(tmp_path):
    before = tree_of(tmp_path, a="from ours.b import f\ndef build(): return f()\n", b="def f(): return 1\n")
    assert (
        tree_of(tmp_path, a="from ours.c import f\ndef build(): return f()\n", c="def f(): return 1\n")
        == before
    )


def test_a_syntax_that_this_python_does_not_know_makes_everything_count(tmp_path):
    before = tree_of(tmp_path, a="def build(: pass\n", b="X = 1\n")
    assert tree_of(tmp_path, a="def build(: pass\n", b="X = 2\n") != before


EXPRESSIONS = st.recursive(
    st.sampled_from(
        ["a", "1", "2.5", "'x'", "None", "-1", "f(a)", "a.b", "a[1:2, 0]", "f'{a!r:>3}'", "(a, 1)"]
    ),
    lambda inner: st.one_of(
        st.builds("({} + {})".format, inner, inner),
        st.builds("[{} for a in {}]".format, inner, inner),
        st.builds("f({}, k={})".format, inner, inner),
        st.builds("({} if {} else 0)".format, inner, inner),
        st.builds("{{1: {}}}[{}]".format, inner, inner),
        st.builds("(lambda a: {})({})".format, inner, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(EXPRESSIONS, EXPRESSIONS)
def test_two_expressions_have_the_same_digest_only_if_they_are_the_same(tmp_path, first, second):
    def digest_of(expression):
        return tree_of(tmp_path, a=f"def f(*a, k=0): return 0\n\ndef build(a): return {expression}\n")

    assert (digest_of(first) == digest_of(second)) == (_plain(first) == _plain(second))


def _plain(expression):
    """The expression without what only groups: the oracle is Python's own parser."""
    import ast

    return re.sub(r", kind=None", "", ast.dump(ast.parse(expression)))


def test_the_package_has_one_digest_for_each_builder():
    builders = {record.builder for record in list_models()}
    found = {sources.code_digest(builder, build_model, graph_of) for builder in builders}
    assert len(found) == len(builders)
