"""Reports of small seeded commands equal those in ``tests/golden``; ``golden.py`` says how to renew them."""

import copy
import functools

import golden
import pytest


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Runs each scene once; returns the function that gives its reports."""

    @functools.lru_cache(maxsize=None)
    def play(scene):
        return golden.play(golden.SCENES[scene], tmp_path_factory.mktemp(scene.replace(" ", "-")))

    return play


# test_benchmark_command.py, test_runs_kfold.py and test_runs_masks.py run these commands, too.
SLOW = ("folds", "masks", "other benchmarks")


@pytest.mark.parametrize(
    ("scene", "name"),
    [
        pytest.param(scene, name, marks=[pytest.mark.slow] if scene in SLOW else [])
        for scene, parts in golden.SCENES.items()
        for name in parts.commands
    ],
)
def test_reports_are_the_stored_ones(reports, scene, name):
    changed = golden.differences(golden.stored(name), reports(scene)[name], name)
    assert not changed, "python tests/golden.py --renew stores these:\n" + "\n".join(changed)


def test_each_stored_report_has_a_command():
    assert sorted(path.stem for path in golden.FOLDER.iterdir()) == sorted(golden.NAMES)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda report: report.update({"exit code": 5}), "x.exit code: 0 is now 5"),
        (lambda report: report["stdout"]["measured"].pop("loss"), "x.stdout.measured.loss: only in one"),
        (lambda report: report["stdout"]["confusion_matrix"][0].append(0), "x.stdout.confusion_matrix[0]: "),
        (lambda report: report["stdout"]["classes"][1].update(name="other"), "x.stdout.classes[1].name: "),
        (lambda report: report["stdout"]["measured"].update(loss=9.0), "x.stdout.measured.loss: "),
    ],
)
def test_a_changed_field_is_one_difference(change, path):
    report = golden.stored("evaluate")
    changed = copy.deepcopy(report)
    assert golden.differences(report, changed, "x") == []
    change(changed)
    (line,) = golden.differences(report, changed, "x")
    assert line.startswith(path)


def test_last_digits_of_a_text_may_differ():
    assert not golden.differences("accuracy 0.1234, 9 of 12", "accuracy 0.1235, 9 of 12")
    for other in ("accuracy 0.1334, 9 of 12", "accuracy 0.1234, 8 of 12", "precision 0.1234, 9 of 12"):
        assert golden.differences("accuracy 0.1234, 9 of 12", other)
