"""The number of modules of the package that a command imports."""

import subprocess
import sys

import pytest

COUNTING = (
    "import sys; from ipucnn.__main__ import main; sys.argv[0] = 'ipucnn'\n"
    "try: main()\n"
    "finally: print(*(name for name in sys.modules if name.split('.')[0] == 'ipucnn'), file=sys.stderr)"
)
BENCHMARK = (
    "benchmark lenet --inference --host-generated-data --micro-batch-size 4 --min-time 0 --executions 3 "
    "--run-dir ."
)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "most"), [("plan-splits resnet50 --stages 4", 80), (BENCHMARK, 144)])
def test_a_command_imports_few_modules(command, most, tmp_path):
    """A registry names the modules that read data sets or build networks; they are imported on use."""
    ran = subprocess.run(
        [sys.executable, "-c", COUNTING, *command.split()],
        cwd=str(tmp_path),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    modules = ran.stderr.splitlines()[-1].split()
    assert len(modules) <= most, modules
