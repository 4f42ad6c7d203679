"""SGLang's scheduler and model runner in this process: no tokenizer, no detokenizer and no other process takes part.

Imports SGLang; whatever of it a process wants otherwise is arranged before.
"""

from __future__ import annotations

import contextlib
import inspect
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args

from .requests import Answer, Request


class _Done(Exception):
    """Every request is answered."""


class Server:
    """One model, loaded once a process; answers lists of requests one after another.

    Under tensor parallelism each rank's process has one, with the same options, and answers the same requests.

    Args:
        options: SGLang's, of the command line; with ``--tp-size`` also ``--nccl-port``, where ranks meet.
        rank: this process's, and the number of its GPU.
        fp32: activations that not all of SGLang's kernels take.

    Attributes:
        scheduler: SGLang's.
        pool: its pool of recurrent states.
    """

    def __init__(self, folder: Path, options: Sequence[str], rank: int = 0, fp32: bool = False):
        load_plugins()
        if fp32:
            _prefer_torch()
        arguments = prepare_server_args(
            ["--model-path", str(folder), "--skip-tokenizer-init", "--grammar-backend=none", *options]
        )
        ports = PortArgs.init_new(arguments)
        self._apart = arguments.disaggregation_mode != "null"
        if self._apart:
            from . import transfer

            transfer.install()
        if "gpu_id" in inspect.signature(Scheduler.__init__).parameters:  # to 0.5.18
            publish(arguments, role="scheduler")
            self.scheduler = Scheduler(arguments, ports, rank, rank, 0, 0, 0, 0, None)  # of all ranks, GPU and tp_rank
        else:
            from sglang.srt.runtime_context import SpawnRanks

            publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
            self.scheduler = Scheduler(arguments, ports)
        self.scheduler.request_receiver = self
        self.scheduler.output_streamer.send_to_detokenizer = self
        self.pool = self.scheduler.req_to_token_pool.mamba_pool
        self._rooms = 0

    def run(self, requests: Sequence[Request], each: Callable[[int, int], None] | None = None) -> list[Answer]:
        """The answers, in the order of the requests.

        Args:
            each: called before each of the scheduler's iterations with its number and that of requests that decode.
        """
        self._rooms += len(requests)
        self._requests, self._each = requests, each
        self._answers = [Answer() for _ in requests]
        self._iteration, self._unfinished = -1, len(requests)
        self.scheduler.gracefully_exit = False
        with contextlib.suppress(_Done):
            self.scheduler.run_event_loop()
        return self._answers

    @property
    def slot_bytes(self) -> tuple[int, int] | None:
        """What a slot of ReplaySSM takes of this rank's memory, as allocated and as its Layout says; None without ReplaySSM."""
        replay = getattr(self.pool, "replay", None)
        if replay is None:
            return None
        L, S = replay.state.buffers.state.shape[:2]
        return sum(x.nbytes for x in replay.state.buffers if x is not None) // S, L * replay.layout.slot_bytes

    def generated(self) -> int:
        """Tokens so far of the requests that decode."""
        return sum(len(one.output_ids) for one in self.scheduler.running_batch.reqs)

    # ---- what the scheduler calls --------------------------------------------------------------------------------

    def recv_requests(self, local_reqs: Any = None) -> list[TokenizedGenerateReqInput]:
        """In place of the tokenizer's process."""
        self._iteration += 1
        if self._each is not None:
            self._each(self._iteration, len(self.scheduler.running_batch.reqs))
        self.scheduler.gracefully_exit = not self._unfinished and self.scheduler.last_batch is None
        if self._apart and self.scheduler.gracefully_exit:
            raise _Done  # the loops of separate prefill and decode do not look before 0.5.23
        new = [(i, one) for i, one in enumerate(self._requests) if one.at == self._iteration]
        return [_tokenized(str(i), self._rooms - i, one) for i, one in new]

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        """In place of the detokenizer's process."""
        for i, rid in enumerate(getattr(output, "rids", None) or ()):
            answer = self._answers[int(rid)]
            answer.tokens += output.output_ids[i]
            if output.output_top_logprobs_val:
                answer.likeliest += output.output_top_logprobs_val[i]
            answer.cached, answer.retracted = output.cached_tokens[i], output.retraction_counts[i]
            self._unfinished -= output.finished_reasons[i] is not None


def _prefer_torch() -> None:
    """Norms, activations and rotary embeddings by SGLang's own torch code: their kernels take 16-bit numbers alone."""
    for name in ("layernorm", "activation", "rotary_embedding.base"):
        for kind in vars(import_module(f"sglang.srt.layers.{name}")).values():
            if isinstance(kind, type) and "forward_cuda" in vars(kind) and hasattr(kind, "forward_native"):
                kind.forward_cuda = kind.forward_native


def _tokenized(rid: str, room: int, request: Request) -> TokenizedGenerateReqInput:
    """With a number of its own, by which a prefill and a decode server know a request."""
    sampling = SamplingParams(max_new_tokens=request.tokens, temperature=0, ignore_eos=request.reserved)
    sampling.normalize(None)
    absent = dict.fromkeys(("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=array("q", request.prompt), sampling_params=sampling, return_logprob=request.logits,
        logprob_start_len=-1, top_logprobs_num=2 * request.logits, stream=False,
        bootstrap_host="127.0.0.1", bootstrap_room=room, **absent,
    )  # fmt: skip
