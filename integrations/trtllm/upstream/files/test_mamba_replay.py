# SPDX-License-Identifier: Apache-2.0
"""`kv_cache_config.mamba_replay`, and that nothing changes without it."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from tensorrt_llm._torch import replayssm
from tensorrt_llm.llmapi.llm_args import KvCacheConfig


def loaded(replay, text_config=None):
    """The configuration that a loader with these arguments returns."""

    @replayssm.configured
    def load(self):
        return SimpleNamespace(pretrained_config=SimpleNamespace(text_config=text_config))

    arguments = SimpleNamespace(kv_cache_config=KvCacheConfig(mamba_replay=replay))
    return load(SimpleNamespace(llm_args=arguments)).pretrained_config


def test_off_by_default():
    assert KvCacheConfig().mamba_replay is None
    assert not hasattr(loaded(None), "replayssm")
    assert not hasattr(loaded({"mode": "off"}), "replayssm")


def test_reaches_the_model():
    text = SimpleNamespace()
    found = loaded({"window": 8}, text)
    assert found.replayssm == text.replayssm
    assert found.replayssm["window"] == 8 and found.replayssm["mode"] == "require"


@pytest.mark.parametrize("wrong", [{"windo": 8}, {"window": 0}, {"mode": "on"}])
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(ValidationError):
        KvCacheConfig(mamba_replay=wrong)


@pytest.mark.parametrize("asked", [False, True])
def test_hooks(asked, monkeypatch):
    """A function is called alone where nothing was asked for, else by the package's hook."""
    hooks = SimpleNamespace(twice=lambda function, config, **kwargs: 2 * function(config, **kwargs))
    monkeypatch.setattr(replayssm, "_hooks", lambda: hooks)

    @replayssm.around("twice")
    def seven(config, add=0):
        return 7 + add

    config = SimpleNamespace(pretrained_config=SimpleNamespace())
    if asked:
        config.pretrained_config.replayssm = {}
    assert seven(config, add=1) == seven(config=config, add=1) == (16 if asked else 8)
