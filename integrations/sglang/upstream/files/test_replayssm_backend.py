"""Unit tests for the ReplaySSM backends' seam: no server, no model loading."""

import argparse
import unittest
from types import SimpleNamespace
from unittest.mock import patch

from sglang.kernels.ops.mamba.triton_ops import ssu_dispatch
from sglang.srt.layers.attention.linear import replayssm
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

OPTIONS = ("window", "checkpoint", "read", "u")


def _args(**given):
    fields = {f"replayssm_{name}": None for name in OPTIONS}
    backends = {"linear_attn_decode_backend": None, "mamba_backend": "triton"}
    return SimpleNamespace(**{**fields, **backends, **given})


def _exec(**given):
    namespace = SimpleNamespace(mamba=_args(**given))
    return patch.object(replayssm, "get_exec", lambda: namespace)


class TestReplaySSMArguments(CustomTestCase):
    def _parse(self, *options):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        return parser.parse_args(["--model-path", "model", *options])

    def test_options_default_to_none(self):
        parsed = self._parse()
        for name in OPTIONS:
            self.assertIsNone(getattr(parsed, f"replayssm_{name}"))

    def test_options_are_parsed(self):
        parsed = self._parse(
            "--linear-attn-decode-backend",
            "replayssm",
            "--mamba-backend",
            "replayssm",
            "--replayssm-window",
            "8",
            "--replayssm-read",
            "e4m3",
        )
        self.assertEqual(parsed.linear_attn_decode_backend, "replayssm")
        self.assertEqual(parsed.mamba_backend, "replayssm")
        self.assertEqual(parsed.replayssm_window, 8)
        self.assertEqual(parsed.replayssm_read, "e4m3")

    def test_prefill_is_not_offered(self):
        with self.assertRaises(SystemExit):
            self._parse("--linear-attn-prefill-backend", "replayssm")

    def test_options_without_a_backend_are_refused(self):
        with self.assertRaisesRegex(ValueError, "--replayssm-window"):
            replayssm.resolve(_args(replayssm_window=8))


class TestReplaySSMHooks(CustomTestCase):
    def test_off_calls_the_function_alone(self):
        hooked = replayssm.around("size")(lambda memory: memory)
        with _exec(), patch.object(replayssm, "_hooks") as hooks:
            self.assertEqual(hooked(3.0), 3.0)
            replayssm.become(None, None)
            hooks.assert_not_called()

    def test_without_a_configuration_calls_the_function_alone(self):
        hooked = replayssm.around("size")(lambda memory: memory)
        unpublished = ValueError("config namespace 'exec' not published")
        with patch.object(replayssm, "get_exec", side_effect=unpublished):
            self.assertEqual(hooked(3.0), 3.0)

    def test_on_calls_the_hook_with_the_function(self):
        def function(memory):
            return memory

        hooks = SimpleNamespace(size=lambda original, memory: original(memory) / 2)
        with (
            _exec(mamba_backend="replayssm"),
            patch.object(replayssm, "_hooks", lambda: hooks),
        ):
            self.assertEqual(replayssm.around("size")(function)(3.0), 1.5)

    def test_state_update_is_registered(self):
        registry = ssu_dispatch._BACKEND_REGISTRY
        self.assertIs(registry["replayssm"], replayssm.state_update)


if __name__ == "__main__":
    unittest.main()
