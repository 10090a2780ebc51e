"""A few presets that replace the shipped ones, whose values tests must not depend on."""

import pytest

from ipucnn.command_group import build_root
from ipucnn.command_table import COMMANDS

TEXT = """\
lenet: {optimizer: adam, num-epochs: 5}
cifar_resnet8: {micro-batch-size: 32, lr-warmup-params: {warmup_mode: shift, warmup_epochs: 1}}
efficientnet-b0: &b0 {micro-batch-size: 8}
efficientnet-b0@digits: {<<: *b0, image-size: 32}
"""


@pytest.fixture
def few_presets(monkeypatch, tmp_path_factory):
    """Makes them the built-in presets, but for the help: a command keeps its help for all later tests."""
    for name in COMMANDS:
        build_root().get_command(None, name)
    folder = tmp_path_factory.mktemp("presets")
    (folder / "presets.yml").write_text(TEXT)
    monkeypatch.setattr("ipucnn.config.presets.BUILT_IN_FOLDER", folder)
