"""Settings that other programs left for Keras and Numba change nothing, or are an error with a hint."""

import json
import os
import shlex
import subprocess
import sys
import textwrap

import pytest
from support.workers import ROOT, completed

from ipucnn.filesystem import private_cache_folder

LOAD = """
import sys
from ipucnn import cli, interrupts
from ipucnn.sessions.host.environment import import_tensorflow
def load(args):
    import_tensorflow()
    from tensorflow import keras
    backend = keras.backend
    layer = keras.layers.BatchNormalization(epsilon=backend.epsilon())
    print(backend.image_data_format(), backend.floatx(), layer.epsilon, type(layer).__module__.split(".")[0])
    print(*[name for name in ("sklearn", "matplotlib") if name in sys.modules])
    import matplotlib, sklearn
    return 0
interrupts.listen()
cli._dispatch = load
cli.main([])
"""


def load(folder, **variables):
    """Runs a command that imports Keras in a new process and prints Keras's settings."""
    return completed(folder, ["-c", LOAD], NO_COLOR="1", **variables)


# The libraries that Keras imports for what no command uses are left out of its import, and can be imported later.
STOCK = ["channels_last", "float32", "1e-07", "keras"]


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 9), reason="Keras 2 imports neither")
def test_a_program_that_imports_ipucnn_has_all_of_keras(tmp_path):
    lines = """
        from ipucnn.sessions.host.environment import import_tensorflow
        import_tensorflow()
        from tensorflow import keras
        keras.wrappers.SKLearnClassifier(keras.Sequential())
    """
    done = completed(tmp_path, ["-c", textwrap.dedent(lines)])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_keras_is_imported_without_a_home_folder(tmp_path):
    assert load(tmp_path, HOME="", XDG_CACHE_HOME="").stdout.split() == STOCK


# Each process that imports Keras takes seconds, so one has several settings.
@pytest.mark.slow_cases("{'epsilon': 'nonsense'}")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"backend": "jax", "image_data_format": "channels_first", "floatx": "float16", "epsilon": 0.1},
            marks=pytest.mark.slow,
        ),
        {"epsilon": "nonsense"},
        [],
    ],
    ids=str,
)
def test_settings_of_keras_change_nothing_or_are_an_error(settings, tmp_path):
    path = tmp_path / "my home" / "keras.json"
    path.parent.mkdir()
    path.write_text(json.dumps(settings))
    variables = {"KERAS_BACKEND": "torch", "TF_USE_LEGACY_KERAS": "1", "KERAS_HOME": str(path.parent)}
    done = load(tmp_path, **variables)
    assert "Traceback" not in done.stderr and "bug" not in done.stderr
    if done.returncode == 0:
        assert done.stdout.split() == STOCK
    else:
        assert settings in ([], {"epsilon": "nonsense"}) and done.returncode == 2, done.stderr
        error, hint = done.stderr.splitlines()[-2:]
        assert error.startswith("error: ") and "keras.json" in error
        assert hint == f"hint: correct or remove the file: rm {shlex.quote(str(path))}"


@pytest.mark.skipif(sys.version_info < (3, 9), reason="Numba compiles nothing on Python 3.8")
@pytest.mark.slow_cases("{'XDG_CACHE_HOME': ''}", "{'HOME': '~', 'XDG_CACHE_HOME': None}")
@pytest.mark.parametrize(
    "variables",
    [{"XDG_CACHE_HOME": ""}, {"HOME": "~", "XDG_CACHE_HOME": None}, {"NUMBA_CACHE_DIR": "cache"}],
    ids=str,
)
def test_compiled_code_comes_from_an_absolute_folder_of_the_user(variables, tmp_path):
    """With each of these, Numba alone would look for its cache, which it unpickles, in the current folder."""
    code = (
        "from ipucnn.compiled import jit\n"
        "import os\n"
        "function = jit()(lambda x: x + 1)\n"
        "assert function(1) == 2\n"
        "folder = os.environ['NUMBA_CACHE_DIR']\n"
        "assert folder == '' or os.path.isabs(folder), folder\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPUCNN_CACHE_DIR": "", "NUMBA_CACHE_DIR": "", **variables}
    env = {name: value for name, value in env.items() if value is not None}
    subprocess.run([sys.executable, "-c", code], cwd=str(tmp_path), env=env, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_world_writable_folder_is_not_used_for_compiled_code(tmp_path, monkeypatch):
    monkeypatch.setenv("IPUCNN_CACHE_DIR", str(tmp_path))
    assert private_cache_folder("numba") == tmp_path / "numba"
    (tmp_path / "numba").chmod(0o777)
    assert private_cache_folder("numba") is None
    monkeypatch.setenv("IPUCNN_CACHE_DIR", "relative")
    assert private_cache_folder("numba") is None
