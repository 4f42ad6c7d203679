"""The command, as a user starts it: exit codes, tables, JSON, and one line for what cannot run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

import torch
from typer.testing import CliRunner

from replayssm.cli import compare
from replayssm.cli.app import app
from replayssm.integrations.transformers import presets

START = "from replayssm.cli import main; main()"


def replayssm(*args: str, prefix: str = "") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", prefix + START, *args], capture_output=True, text=True, timeout=240)


def refused(*args: str) -> str:
    """The one line that a bad call prints, in this process."""
    outcome = CliRunner().invoke(app, list(args))
    assert outcome.exit_code == 2, outcome.output
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("replayssm: ")
    return line


def test_run_prints_text_and_table():
    done = replayssm(
        "run", "--model", "mamba2", "--model", "qwen3.5", "--prompt", presets.book()[:90], "--max-new-tokens", "40"
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "mamba2: 3 mamba2 layers, cpu, fp32", "row 0, after 90 tokens",
        "bytes read per token", "bytes written per token", "bytes held", "ms per token of every row",
        "window 16; flushes per request and layer: 2", "tokens: identical, 1 x 40",
        "logits: differ most at token", "smallest top-1 margin:",
        "80 tokens generated; 2 of 2 models: tokens identical",
    ):  # fmt: skip
        assert words in done.stdout, words


def test_json_has_every_number():
    done = replayssm("run", "--model", "kimi-linear", "--batch", "3", "--window", "5", "--prompt", presets.book()[:90],
                     "--max-new-tokens", "30", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (model,) = answer["models"]
    assert answer["identical"] is model["identical"] is True
    assert model["prompt_tokens"] == [90, 60, 30]
    assert model["new_tokens"] == 30 and len(model["text"]) == 3
    # 29 decode steps: five records in the first row, two and four in the others, then a fold before each five more.
    assert model["flushes"] == [5, 6, 5]
    assert model["family"] == "kda" and model["layers"] == 3 and model["window"] == 5
    # H = 2, V = K = 64 in fp32, three layers.
    assert model["stock"]["read"] == model["stock"]["written"] == model["stock"]["memory"] == 3 * 2 * 64 * 64 * 4
    # k, v, u, g and its sum per channel, beta, 1 / |k|; and a fifth of a checkpoint.
    record = 2 * (5 * 64 + 2) * 4
    assert model["replay"]["written"] == pytest.approx(3 * (record + 2 * 64 * 64 * 4 / 5))
    assert 0 < model["logit_difference"] < model["smallest_margin"]
    assert model["first_difference"] is None
    assert all(model[way]["milliseconds"] > 0 for way in ("stock", "replay"))


def test_formats_are_what_decodes():
    args = ("run", "--model", "qwen3.5", "--prompt", presets.book()[:90], "--max-new-tokens", "30", "--state", "fp16+sr",
            "--read", "int8", "--u", "bf16")  # fmt: skip
    (model,) = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)["models"]
    assert (model["state"], model["read"], model["u"]) == ("fp16+sr", "int8", "bfloat16")
    # H = 4, G = 2, V = K = 64, three layers: states in fp16 and in int8 with a scale per 16, 17 records as in test_speculation.
    S, copy, record = 4 * 64 * 64 * 2, 4 * 64 * (64 + 64 // 16 * 4), (2 * 64 + 4 * 64 + 3 * 4 + 2) * 4 + 4 * 64 * 2
    assert model["replay"]["memory"] == 3 * (S + copy + 17 * record)
    assert model["stock"]["read"] == model["stock"]["memory"] == 3 * 2 * S
    assert 0 < model["logit_difference"]
    done = CliRunner().invoke(app, [*args[:7]])
    assert "state fp32, read copy none, u float32" in done.output


def found(tokens: list[int], n: int) -> list[int]:
    """What prompt lookup drafts after these tokens: the n after the first occurrence of their last two, or last one."""
    for size in (2, 1):
        for i in range(len(tokens) - size):
            if tokens[i : i + size] == tokens[-size:]:
                return tokens[i + size : i + size + n]
    return []


def lookup_steps(tokens: list[int], prompt: int, n: int) -> list[tuple[int, int]]:
    """(tokens read, tokens kept) of each step that makes these tokens; a first one of drafts alone follows the prompt."""
    at, steps = prompt, []
    while at < len(tokens):
        drafts = found(tokens[:at], n if at + 1 < len(tokens) else 0)
        right = 0
        while right < len(drafts) and at + right < len(tokens) and drafts[right] == tokens[at + right]:
            right += 1
        made = min(right + 1, len(tokens) - at)
        known = at > prompt
        if known or drafts:
            steps.append((known + len(drafts), known + made - 1))
        at += made
    return steps


def test_speculation(tmp_path):
    """A model that often goes on as the alphabet does, with which its prompt begins: figures are those of our own lookup."""
    model, tokenizer = presets.build("qwen3.5")
    alphabet = "abcdefghijklmnopqrstuvwxyz "
    recited = tokenizer(alphabet)["input_ids"]
    with torch.no_grad():
        for one, following in zip(recited, recited[1:] + recited[:1], strict=True):
            model.lm_head.weight[following] += 2.5 * model.get_input_embeddings().weight[one]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompt, n = alphabet + presets.book()[:173], 120
    tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=n)[0].tolist()
    steps = lookup_steps(tokens, 200, 3)

    args = ("--model", str(tmp_path), "--prompt", prompt, "--max-new-tokens", str(n), "--speculate", "prompt-lookup")
    done = CliRunner().invoke(app, ["run", *args, "--draft-tokens", "3", "--json"])
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.stdout)["models"]
    assert result["identical"] and result["new_tokens"] == n
    assert result["text"] == [tokenizer.decode(tokens[200:])]
    assert 0 < result["logit_difference"] < result["smallest_margin"]
    drafted = result["speculation"]
    read, kept = (sum(one) for one in zip(*steps, strict=True))
    assert (drafted["draft_tokens"], drafted["steps"], drafted["tokens"], drafted["kept"]) == (3, len(steps), read, kept)
    assert drafted["acceptance"] == kept / len(steps) > 1.5
    assert drafted["snapshots_avoided"] == 3 * read
    # Three layers of H = 4, G = 2, V = K = 64 in fp32; a record is k, v, u, beta, g, gsum and 1 / |k|, T_max is 4.
    S, record = 4 * 64 * 64 * 4, (2 * 64 + 2 * 4 * 64 + 3 * 4 + 2) * 4
    assert drafted["snapshots"]["memory"] == 3 * (1 + 4) * S
    assert result["replay"]["memory"] == 3 * (S + (16 + 4) * record)
    assert drafted["snapshots"]["written"] == pytest.approx(3 * read * S / kept)
    (flushes,) = result["flushes"]
    assert flushes >= kept // 16 and result["replay"]["written"] == pytest.approx(3 * (read * record + flushes * S) / kept)


def test_speculation_prints_its_table():
    args = ("--model", "nemotron-h", "--prompt", presets.book()[:90], "--max-new-tokens", "30", "--speculate", "prompt-lookup")
    done = CliRunner().invoke(app, ["run", *args])
    assert done.exit_code == 0, done.output
    for words in (
        "speculation, per token kept", "snapshots", "up to 4 drafts a step:", "tokens and kept 29; acceptance length",
        "state snapshots avoided:", "tokens: identical, 1 x 30",
    ):  # fmt: skip
        assert words in done.output, words


def test_a_checkpoint_folder(tmp_path):
    """The folder's own weights run: they are another seed's than the preset's."""
    model, tokenizer = presets.build("qwen3.5")
    with torch.no_grad():
        model.lm_head.weight.neg_()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    args = ("--prompt", presets.book()[:90], "--max-new-tokens", "12", "--batch", "2", "--json")
    done = replayssm("run", "--model", str(tmp_path), "--model", "qwen3.5", *args)
    assert done.returncode == 0, done.stderr
    folder, preset = json.loads(done.stdout)["models"]
    assert folder["identical"] and folder["text"] != preset["text"]


def test_exit_code_1_where_tokens_differ():
    """A ReplaySSM that mixes up its heads is found out."""
    wrong = (
        "from replayssm.integrations.transformers.cache import Replay; step = Replay.step\n"
        "Replay.step = lambda self, layer, **inputs: step(self, layer, **inputs).flip(1)\n"
    )
    done = replayssm("run", "--model", "mamba2", "--prompt", presets.book()[:90], "--max-new-tokens", "30", prefix=wrong)
    assert done.returncode == 1, done.stderr
    assert "tokens: different from token" in done.stdout and "0 of 1 models" in done.stdout


def test_differences_stop_at_a_rows_first_different_token():
    def run(tokens, logits):
        return compare._Run(torch.tensor(tokens), list(torch.tensor(logits).transpose(0, 1)), 0.0)

    off = float("-inf")
    stock = run([[0, 0, 0], [1, 1, 0]], [[[3.0, 1, off]] * 3, [[1.0, 3, off], [1, 3, off], [5, 1, off]]])
    ours = run([[0, 0, 0], [1, 0, 0]], [[[3.0, 1, off], [3, 1.5, off], [3, 1, off]], [[1.0, 3, off], [4, 3, off], [9, 9, off]]])
    assert compare._differences(stock, ours) == ((1, 1), 3.0, (1, 1), 2.0)
    assert compare._differences(stock, stock) == (None, 0.0, (0, 0), 2.0)


def test_presets_are_listed():
    done = CliRunner().invoke(app, ["presets"])
    assert done.exit_code == 0
    for name, preset in presets.PRESETS.items():
        assert name in done.output and preset.model in done.output
    listed = json.loads(CliRunner().invoke(app, ["presets", "--json"]).stdout)["presets"]
    assert {one["preset"]: one["class"] for one in listed}.items() >= {n: p.model for n, p in presets.PRESETS.items()}.items()


def test_book_is_ascii_prose():
    text = presets.book()
    assert text.isascii() and 1500 < len(text) < 5000
    assert [len(piece) for piece in presets.pieces(text, 4)] == sorted({len(text) * n // 4 for n in (1, 2, 3, 4)}, reverse=True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--model", "gpt-2"],
            "model: expected a preset (tiny-gdn, tiny-kda, tiny-mamba2, qwen3.5, qwen3-next, ",
        ),
        (["--model", "/nonexistent"], "model: expected a preset"),
        (["--window", "0"], "window: expected an integer >= 1, got 0"),
        (["--batch", "0"], "batch: expected >= 1, got 0"),
        (["--max-new-tokens", "0"], "max-new-tokens: expected >= 1, got 0"),
        (["--dtype", "fp4"], "dtype: expected one of fp32, bf16, fp16, got 'fp4'"),
        (["--state", "fp7"], "state format: expected one of ['fp32', 'bf16'"),
        (["--read", "fp16"], "read format: expected one of ['e4m3', 'int8', 'nvfp4'], got 'fp16'"),
        (["--u", "fp64"], "u: expected one of fp32, bf16, fp16, got 'fp64'"),
        (["--u", "fp16"], "u: expected with the delta rule alone, got torch.float16 for mamba2"),
        (["--device", "cuda:99"], "device: expected a device of this machine, which has"),
        (["--device", "abacus"], "device: expected cpu, cuda or cuda:N, got 'abacus'"),
        (["--device", "meta"], "device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["--prompt", ""], "prompt: expected text"),
        (["--speculate", "medusa"], "speculate: expected prompt-lookup, got 'medusa'"),
        (["--speculate", "prompt-lookup"], "speculate: transformers has no assisted generation for Mamba2ForCausalLM"),
        (["--speculate", "prompt-lookup", "--batch", "2"], "batch: expected 1 with speculate, as"),
        (["--speculate", "prompt-lookup", "--max-new-tokens", "1"], "max-new-tokens: expected >= 2 with speculate"),
        (["--speculate", "prompt-lookup", "--draft-tokens", "0"], "draft-tokens: expected >= 1, got 0"),
        (["--speculate", "prompt-lookup", "--draft-tokens", "16"], "draft_tokens: expected an integer from 0 to window - 1"),
        (["--draft-tokens", "4"], "draft-tokens: expected with speculate, got it alone"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(args, message):
    model = [] if args[0] == "--model" else ["--model", "mamba2"]
    assert message in refused("run", *model, *args)


def test_folders_that_cannot_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "replayssm: " in refused("run", "--model", str(tmp_path))
    import transformers as hf

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=presets.VOCAB, **small)).save_pretrained(tmp_path)
    presets.tokenizer().save_pretrained(tmp_path)
    assert "LlamaForCausalLM has no recurrent layer" in refused("run", "--model", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["FutureForCausalLM"]}')
    assert "transformers has no class ['FutureForCausalLM'] as" in refused("run", "--model", str(tmp_path))


def test_a_bad_second_model_is_refused_before_the_first_runs(monkeypatch):
    monkeypatch.setattr(compare, "compare", lambda *args, **kwargs: pytest.fail("ran"))
    assert "got 'nothing'" in refused("run", "--model", "mamba2", "--model", "nothing")


def test_extras_that_are_missing():
    done = replayssm("presets", prefix="import sys; sys.modules['typer'] = None\n")
    assert done.returncode == 2
    assert done.stderr == "replayssm: typer is not installed; pip install 'replayssm[cli,transformers]'\n"
    done = replayssm("presets", prefix="import sys; sys.modules['transformers'] = None\n")
    assert done.returncode == 2
    assert done.stderr == "replayssm: transformers is not installed; pip install 'replayssm[cli,transformers]'\n"


def test_a_trained_model_of_the_package(tmp_path, monkeypatch):
    """It is named as presets are, and listed; no preset hides it."""
    assert not set(presets.TRAINED) & set(presets.PRESETS)
    assert presets.DEFAULTS == (tuple(presets.TRAINED) or ("qwen3.5", "nemotron-h", "kimi-linear"))
    for one in presets.build("qwen3.5"):
        one.save_pretrained(tmp_path)
    monkeypatch.setitem(presets.TRAINED, "tiny", tmp_path)
    listed = CliRunner().invoke(app, ["presets"])
    assert any(line.split()[:3] == ["tiny", "Qwen3_5ForCausalLM", "trained"] for line in listed.output.splitlines())
    done = CliRunner().invoke(app, ["run", "--model", "tiny", "--max-new-tokens", "2"])
    assert done.exit_code == 0 and "tiny: 3 gdn layers" in done.output, done.output


def commands() -> list[list[str]]:
    groups = [([], app), *(([group.name], group.typer_instance) for group in app.registered_groups)]
    return [[*words, one.name or one.callback.__name__] for words, of in groups for one in of.registered_commands]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_an_example_exit_codes_and_json(words):
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0
    assert f"Example: replayssm {' '.join(words)}" in done.output and "Exit code 0" in done.output
    assert "--json" in done.output or words == ["bench", "stage"]  # which fills a folder and has nothing to tell


def test_help_names_the_commands():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    for name in ("run", "presets", "drift", "plan", "config", "doctor", "soak", "bench", "report"):
        assert f" {name} " in done.output, name
