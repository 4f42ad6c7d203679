"""The drift study: its conventional run is transformers' own, its truth is exact, its rows say what was seen."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

hf = pytest.importorskip("transformers")
pytest.importorskip("typer")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from replayssm.bench import report
from replayssm.cli.app import app
from replayssm.cli.loading import load
from replayssm.integrations.transformers import drift, enable, presets
from replayssm.integrations.transformers.lanes import Lanes
from replayssm.integrations.transformers.recall import weave
from tests.cases import relative

SHARED, SEPARATE = "nvfp4", "fp32/nvfp4"
FORMATS = ("fp32", "fp16+sr", "e4m3+sr", SHARED, SEPARATE)
TEXT = presets.book()


def reader_of(model, tokens, formats=("fp32",), window=16, watch=None):
    """A Reader that read all tokens, the last one under `watch`."""
    with torch.no_grad(), enable(model, window=window) as enabled:
        of = replace(enabled.layout, stagger=False)  # every row's folds on the same steps
        lanes = Lanes(model, drift.layouts(formats, of), len(tokens))
        reader = drift.Reader(model, lanes, tokens)
        reader.read_prompt(drift.prompt_tokens(model, window))
        for _ in range(reader.prompt, reader.length - 1):
            reader.step()
        with watch or nullcontext():
            reader.step()
    return reader


@pytest.fixture(scope="module")
def one_preset():
    """A model, its texts, and the drift of every format."""
    model, tokenizer = presets.build("qwen3.5")
    texts = drift.texts(TEXT, tokenizer, 2, 128)
    return model, texts, drift.measure("qwen3.5", model, texts, FORMATS)


@pytest.mark.parametrize("family", ["mamba2", "gdn", "kda"])
def test_the_conventional_run_is_transformers_own(family, tmp_path):
    """Losses of one forward over the whole text with a masked window, and states, of a model from its saved folder."""
    train = pytest.importorskip("training.train")
    torch.manual_seed(0)
    train.save(train.build(family, 24).to(torch.bfloat16), tmp_path, {})
    model, tokenizer = load(str(tmp_path), torch.float32, torch.device("cpu"))
    tokens = drift.texts(TEXT, tokenizer, 2, 70).tokens
    reader = reader_of(model, tokens)
    assert (reader.prompt, reader.windowed) == (24, True)
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(tokens[:, :-1], past_key_values=cache, use_cache=True).logits
    losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")[:, 24:]
    for lane in (0, 1):
        torch.testing.assert_close(reader.kept.loss[lane, :, 24:].float(), losses, atol=2e-4, rtol=0)
    assert reader.kept.kl.max() < 1e-8
    states = reader.lanes.lanes[0].states(2)
    for i, index in enumerate(reader.lanes.indices):
        theirs = cache.layers[index].recurrent_states[0]
        assert relative(states[i], theirs.mT if reader.lanes.transposed else theirs) < 1e-5


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.__name__)
        return function(*args, **(kwargs or {}))


def test_a_steady_step_neither_reads_nor_makes_host_values():
    """What a CUDA graph of a step could not hold, as far as a CPU shows it: values read back, tensors made of numbers."""
    train = pytest.importorskip("training.train")
    model = train.build("gdn", 24).eval()
    seen = Operators()
    reader_of(model, drift.texts(TEXT, presets.tokenizer(), 1, 60).tokens, ("fp32", "fp16+sr/nvfp4"), watch=seen)
    assert "index_copy_.default" in seen.names
    assert not seen.names & {"_local_scalar_dense.default", "lift_fresh.default", "nonzero.default", "equal.default"}


def test_shared_formats_drift_and_separate_ones_do_not(one_preset):
    _, _, found = one_preset
    last = {row["format"]: row for row in found.rows if row["position"] == [64, 128]}
    assert list(last) == list(FORMATS)
    kl = {name: row["kl_mean"] for name, row in last.items()}
    assert 0 <= kl["fp32"] < 1e-9 < kl["fp16+sr"] < 1e-4 < kl["e4m3+sr"]
    assert 1e-4 < kl[SEPARATE] < kl[SHARED]
    assert all(row["kl_mean"] <= row["kl_p99"] for row in last.values())
    assert last["fp32"]["top1"] == 1.0 > last[SHARED]["top1"] > 0.5
    worst = {name: max(row["state_error"]) for name, row in last.items()}
    conventional = max(found.conventional[-1]["state_error"])
    # A read copy leaves the state as exact as without one; fp64 itself would show 0.
    assert 1e-9 < conventional < 1e-6 and worst["fp32"] < 1e-6 and worst[SEPARATE] < 1e-6
    assert 1e-5 < worst["fp16+sr"] < 1e-3 < worst["e4m3+sr"] < 1e-1 and worst[SHARED] > 1e-2


def test_losses_are_the_texts_own(one_preset):
    """The conventional loss per bucket is that of one forward of the model as it is."""
    model, texts, found = one_preset
    with torch.no_grad():
        logits = model(texts.tokens[:, :-1]).logits
    losses = F.cross_entropy(logits.transpose(1, 2), texts.tokens[:, 1:], reduction="none")
    assert [row["position"] for row in found.conventional] == [[16, 64], [64, 128]]
    for row in found.conventional:
        low, high = row["position"]
        assert row["loss"] == pytest.approx(float(losses[:, low:high].mean()), abs=1e-4)


def test_rows_of_equal_texts_round_differently():
    """Stochastic rounding draws by request: equal rows differ by chance then, and not otherwise."""
    model, tokenizer = presets.build("qwen3.5")
    reader = reader_of(model, drift.texts(TEXT, tokenizer, 1, 60).tokens.repeat(2, 1), ("fp16+sr", "fp16"))
    assert reader.lanes.lanes[1].state.cursors.key.tolist() == [0, 1]
    conventional, stochastic, nearest = reader.kept.loss[:, :, 40:]
    assert torch.equal(*conventional) and torch.equal(*nearest) and not torch.equal(*stochastic)


def test_facts_are_found_in_any_tokens():
    """Answers of a byte-level tokenizer are letters; of one that merges, the tokens that hold them."""
    bytes_alone = presets.tokenizer()
    merging = Tokenizer(models.BPE())
    merging.pre_tokenizer, merging.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    merging.train_from_iterator([weave(TEXT.splitlines(keepends=True), random.Random(5)).text] * 9, trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    ))  # fmt: skip
    merging = hf.PreTrainedTokenizerFast(tokenizer_object=merging)
    text = TEXT * 4
    woven = weave(text.splitlines(keepends=True), random.Random(0))
    asked = [woven.text[at] for at, _ in woven.questions]
    assert len(asked) > 10
    for tokenizer in (bytes_alone, merging):
        length = len(tokenizer(woven.text)["input_ids"]) - 1
        texts = drift.texts(text, tokenizer, 1, length)
        answers = [tokenizer.decode(texts.tokens[0, first : last + 1]) for _, first, last in texts.answers]
        assert len(answers) == len(asked)
        if tokenizer is bytes_alone:
            assert answers == asked
        assert all(letter in answer for letter, answer in zip(asked, answers, strict=True))
        before = [tokenizer.decode(texts.tokens[0, :first]) for _, first, _ in texts.answers]
        assert all(text.endswith("?") for text in before)


def test_recall_needs_every_token_of_an_answer():
    kept = drift.Kept(*(torch.zeros(2, 1, 10, dtype=kind) for kind in (torch.float64, torch.bool, torch.float64, torch.bool)))
    kept.right[:, 0, [2, 3, 5, 6, 8]] = True  # predictions of tokens 3, 4, 6, 7, 9
    texts = drift.Texts(torch.zeros(1, 11), [(0, 3, 4), (0, 6, 7), (0, 9, 10)])
    kept.right[1, 0, 6] = False
    rows, conventional = drift._summaries("m", ["bf16"], kept, texts, [(0, 4), (4, 10)], [torch.zeros(2, 1)] * 2)
    assert [(row["recall"], row["answers"]) for row in conventional] == [(1.0, 1), (0.5, 2)]
    assert [row["recall"] for row in rows] == [1.0, 0.0]


@pytest.mark.parametrize("begin, length", [(16, 17), (16, 128), (128, 256), (64, 64 + 1), (16, 131_072), (128, 100_000)])
def test_buckets_cover_every_position_once(begin, length):
    found = drift.buckets(begin, length)
    assert found[0][0] == begin and found[-1][1] == length and len(found) <= 8
    assert all(end == start for (_, end), (start, _) in pairwise(found)) and all(low < high for low, high in found)


def test_numbers_that_are_not_finite_are_none():
    """JSON has no NaN; a run that breaks is not healthy."""
    assert drift._number(torch.tensor(float("nan"))) is None and drift._number(torch.tensor(2.0)) == 2.0
    assert drift.fit([{"loss": 2.0}, {"loss": 2.1}])
    assert not drift.fit([{"loss": 2.0}, {"loss": 2.3}]) and not drift.fit([{"loss": 2.0}, {"loss": None}])


ROW = {"model", "format", "state", "read", "position", "loss", "recall", "state_error", "kl_mean", "kl_p99", "top1"}


def invoke(*args: str):
    return CliRunner().invoke(app, ["drift", *args])


def test_the_command_writes_what_report_reads(tmp_path):
    out = tmp_path / "drift.json"
    args = ["--length", "40", "--window", "8", "--formats", "fp32,bf16/e4m3", "--out", str(out)]
    done = invoke("--model", "qwen3.5", "--json", *args)
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert results == json.loads(out.read_text())
    assert all(set(row) == ROW for row in results["rows"])
    assert [(row["format"], row["state"], row["read"], row["position"]) for row in results["rows"]] == [
        ("fp32", "fp32", None, [8, 40]), ("bf16/e4m3", "bf16", "e4m3", [8, 40])
    ]  # fmt: skip
    done = invoke("--model", "nemotron-h", *args)
    assert done.exit_code == 0 and "mean KL divergence" in done.output and "bf16/e4m3" in done.output
    results = json.loads(out.read_text())
    assert [row["model"] for row in results["conventional"]] == ["qwen3.5", "nemotron-h"]
    section = report.section("drift", {"drift": results})
    assert "| qwen3.5 | bf16/e4m3 |" in section and "| nemotron-h |" in section
    assert set(report.drawable({"drift": results})) == {"drift"}
    done = invoke("--model", "qwen3.5", *args[:-2], "--out", str(out), "--texts", "1")
    assert done.exit_code == 2 and "out: expected results with texts 1 in" in done.stderr


@pytest.mark.parametrize(
    "args, message",
    [
        (["--model", "nothing"], "model: expected a preset ("),
        (["--formats", "fp32,fp32"], "formats: expected at least one, each once, got ['fp32', 'fp32']"),
        (["--formats", "fp12"], "state format: expected one of"),
        (["--formats", "fp32/bf16"], "read format: expected one of ['e4m3', 'int8', 'nvfp4'], got 'bf16'"),
        (["--formats", "fp32/e4m3+sr"], "a read copy rounds to nearest"),
        (["--formats", "bf16+sr"], "stochastic rounding is supported for ['fp16', 'e4m3', 'int8'], got 'bf16+sr'"),
        (["--length", "16"], "length: expected more than the 16 tokens of the prompt, got 16"),
        (["--length", "5000"], "as many tokens as the text has in 2 equal parts, got 5000; give a longer text or fewer texts"),
        (["--texts", "0"], "texts: expected >= 1, got 0"),
        (["--window", "0"], "window: expected an integer >= 1, got 0"),
        (["--text", "/nonexistent"], "No such file"),
        (["--dtype", "fp4"], "dtype: expected one of"),
        (["--device", "abacus"], "device: expected cpu, cuda or cuda:N"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(args, message):
    model = [] if args[0] == "--model" else ["--model", "qwen3.5"]
    done = invoke(*model, *args)
    assert done.exit_code == 2 and done.stdout == "", done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("replayssm: ") and message in line
