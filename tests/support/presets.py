"""A few presets that replace the shipped ones, whose values tests must not depend on."""

import pytest

TEXT = """\
lenet: {optimizer: adam, num-epochs: 5}
cifar_resnet8: {micro-batch-size: 32, lr-warmup-params: {warmup_mode: shift, warmup_epochs: 1}}
efficientnet-b0: &b0 {micro-batch-size: 8}
efficientnet-b0@digits: {<<: *b0, image-size: 32}
"""


@pytest.fixture
def few_presets(monkeypatch, tmp_path_factory):
    """Makes them the built-in presets."""
    folder = tmp_path_factory.mktemp("presets")
    (folder / "presets.yml").write_text(TEXT)
    monkeypatch.setattr("ipucnn.config.presets.BUILT_IN_FOLDER", folder)
