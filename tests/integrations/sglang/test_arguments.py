"""SGLang's own parser, resolution and plugin loader with our choices, options and refusals."""

import json
import pickle

import pytest

pytest.importorskip("sglang")

from tests.integrations.sglang.alone import alone

QWEN = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts": 2, "mlp_only_layers": [0, 1], "torch_dtype": "float32",
}  # fmt: skip
OURS = ("--linear-attn-decode-backend", "replayssm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN))
    return folder


def resolved(folder, *options, engine=None):
    """What the server arguments are after SGLang's resolution, in another process as well."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    load_plugins()
    common = ["--model-path", str(folder), "--device", "cpu", "--skip-tokenizer-init", "--disable-radix-cache"]
    if engine is None:
        args = prepare_server_args([*common, *options])
    else:  # as Engine(**kwargs) makes them
        args = ServerArgs(
            model_path=str(folder), device="cpu", skip_tokenizer_init=True, disable_radix_cache=True, **engine
        )  # fmt: skip
    args.resolve_once()
    from sglang.srt.arg_groups.overrides import resolving_view

    from replayssm.integrations.sglang.settings import chosen, settings_of

    there = pickle.loads(pickle.dumps(args))
    return chosen(there), settings_of(there).model_dump(exclude_none=True), resolving_view(there).mamba_ssm_dtype


def without_plugin(folder):
    """SGLang alone knows nothing of us."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    prepare_server_args(["--model-path", str(folder), "--device", "cpu", *OURS])


def unsupported(folder, *options):
    """As with an SGLang of another version."""
    from replayssm.integrations.sglang import names

    names.SUPPORTED = names.SpecifierSet(">=0.5.17,<=0.5.22")
    return resolved(folder, *options)


def unhooked(folder, *options):
    """As where a method that we hook has another name."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    HybridReqToTokenPool._make_pool = HybridReqToTokenPool._init_mamba_pool
    del HybridReqToTokenPool._init_mamba_pool
    return resolved(folder, *options)


def test_options_reach_other_processes(model):
    options = (*OURS, "--replayssm-window", "12", "--replayssm-checkpoint", "bf16", "--replayssm-u", "fp32")
    chosen, settings, dtype = alone(resolved, model, *options, plugins="replayssm")
    assert chosen == (True, False) and dtype == "bfloat16"
    assert settings == {"window": 12, "checkpoint": "bf16", "u": "fp32"}


def test_mamba2_and_defaults(model):
    chosen, settings, dtype = alone(resolved, model, "--mamba-backend", "replayssm", plugins="replayssm")
    assert (chosen, settings, dtype) == ((False, True), {"window": 16}, None)


def test_options_join_other_overrides(model):
    given = json.dumps({"rms_norm_eps": 1e-5, "replayssm": {"window": 9, "read": "e4m3"}})
    options = (*OURS, "--json-model-override-args", given, "--replayssm-window", "7")
    assert alone(resolved, model, *options, plugins="replayssm")[1] == {"window": 7, "read": "e4m3"}


def engine(folder):
    from functools import partial

    return partial(resolved, folder, engine={
        "linear_attn_decode_backend": "replayssm", "json_model_override_args": '{"replayssm": {"window": 5}}'
    })()  # fmt: skip


def test_python_engine(model):
    assert alone(engine, model, plugins="replayssm")[:2] == ((True, False), {"window": 5})


def test_servers_that_did_not_choose_it(model):
    assert alone(resolved, model, plugins="replayssm")[0] == (False, False)
    assert alone(unsupported, model, plugins="replayssm")[0] == (False, False)


REFUSALS = [
    ((*OURS, "--replayssm-window", "0"), "window: Input should be greater than or equal to 1"),
    ((*OURS, "--replayssm-checkpoint", "nvfp4"), "checkpoint: Input should be 'fp32', 'bf16', 'fp16' or 'fp16+sr'"),
    ((*OURS, "--json-model-override-args", '{"replayssm": {"windo": 3}}'), "windo: Extra inputs"),
    ((*OURS, "--replayssm-checkpoint", "bf16", "--mamba-ssm-dtype", "float32"), "--mamba-ssm-dtype: expected bfloat16"),
    (("--replayssm-window", "8"), "replayssm settings: expected --linear-attn-decode-backend replayssm"),
    (("--linear-attn-backend", "replayssm"), "--linear-attn-backend replayssm: prefill is SGLang's"),
    ((*OURS, "--enable-linear-replayssm"), "--enable-linear-replayssm True: not supported with replayssm, it is SGLang's"),
    ((*OURS, "--linear-attn-verify-backend", "triton"), "--linear-attn-verify-backend triton: not supported"),
]


def refusals(folder):
    """What start-up says to each."""
    said = []
    for options, _ in REFUSALS:
        try:
            resolved(folder, *options)
            said.append("")
        except (ValueError, NotImplementedError) as error:
            said.append(str(error))
    return said


def test_refusals(model):
    for said, (options, message) in zip(alone(refusals, model, plugins="replayssm"), REFUSALS, strict=True):
        assert message in said, options


def test_a_failed_plugin_stops_the_server_that_chose_it(model):
    with pytest.raises(RuntimeError, match="replayssm cannot run here: sglang: supported are .*0.5.22.*, got 0.5.23"):
        alone(unsupported, model, *OURS, plugins="replayssm")


def test_what_sglang_could_not_hook_stops_the_server_that_chose_it(model):
    with pytest.raises(RuntimeError, match="cannot run here: SGLang could not hook .*HybridReqToTokenPool._init_mamba_pool;"):
        alone(unhooked, model, *OURS, plugins="replayssm")
    assert alone(unhooked, model, plugins="replayssm")[0] == (False, False)


def test_without_the_plugin_the_choice_is_unknown(model):
    with pytest.raises(SystemExit):
        alone(without_plugin, model)
