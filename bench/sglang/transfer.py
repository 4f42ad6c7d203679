"""Requests go from a SGLang server that prefills to one that decodes, over a socket: both on one machine, no RDMA needed.

SGLang's servers, queues and buffers are its own; these classes stand where its NIXL backend's would. They send what SGLang
lists in KVArgs as it lies in memory: pages of the key-value cache, states of recurrent layers, the first token.
"""

from __future__ import annotations

import ctypes
import sys
import time
import types
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.fake import FakeKVManager, FakeKVReceiver, FakeKVSender
from sglang.srt.disaggregation.utils import DisaggregationMode
from torch import Tensor

BACKEND = "nixl"
WAIT = 120.0  # seconds that a prefill server looks for its decode server
Rows = list[np.ndarray]  # uint8 [items, bytes], one per buffer; torch would send tensors as files


def install() -> None:
    """SGLang imports these classes in place of its NIXL backend's."""
    module: Any = types.ModuleType(f"sglang.srt.disaggregation.{BACKEND}")
    module.NixlKVManager, module.NixlKVSender, module.NixlKVReceiver = Manager, Sender, Receiver
    module.NixlKVBootstrapServer = None
    sys.modules[module.__name__] = module


class _Anywhere(dict[str, Any]):
    """There is one prefill server, whatever its address."""

    def get(self, *_: Any) -> Any:
        return types.SimpleNamespace(dp_size=1)


class Manager(FakeKVManager):
    """A server's end of the socket, and its buffers.

    Attributes:
        arrived: of a decode server: what came for each request's room, chunk by chunk.
    """

    supports_host_destination = False

    def __init__(self, args: Any, mode: DisaggregationMode, server_args: Any, is_mla_backend: bool | None = False) -> None:
        super().__init__(args, mode, server_args, is_mla_backend)
        self.prefill_info_table = _Anywhere()
        self.device = server_args.device
        address = "127.0.0.1", server_args.disaggregation_bootstrap_port
        if mode == DisaggregationMode.DECODE:
            with Listener(address) as listener:
                self._peer = listener.accept()
        else:
            self._peer = _connect(address)
        self.arrived: dict[int, list[tuple[Rows, list[Rows], Rows, bool]]] = defaultdict(list)

    def send(self, room: int, pages: Any, states: Sequence[Any] | None, aux: int | None) -> None:
        """A chunk; the last one has states and the auxiliary buffers' entry."""
        last = states is not None
        self._wait()
        chunk = (
            _read(self._kv(), pages),
            [_read(buffers, slots) for buffers, slots in zip(self._states(), states or (), strict=last)],
            _read(self._aux(), [aux]) if last else [],
            last,
        )
        self._peer.send((room, chunk))

    def receive(self, room: int, pages: Any, states: Sequence[Any], aux: int | None) -> bool:
        """Whether all of the request is there; then it is put in its place."""
        chunks = self.arrived[room]
        while not (chunks and chunks[-1][-1]):
            if not self._peer.poll():
                return False
            where, chunk = self._peer.recv()
            self.arrived[where].append(chunk)
        _write(self._kv(), pages, [np.concatenate(rows) for rows in zip(*(chunk[0] for chunk in chunks), strict=True)])
        _, of_states, of_aux, _ = chunks[-1]
        for buffers, slots, rows in zip(self._states(), states, of_states, strict=True):
            _write(buffers, slots, rows)
        _write(self._aux(), [aux], of_aux)
        self._wait()
        del self.arrived[room]
        return True

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _kv(self) -> list[Tensor]:
        of = self.kv_args
        return _buffers(of.kv_data_ptrs, of.kv_data_lens, of.kv_item_lens, self.device)

    def _states(self) -> list[list[Tensor]]:
        of = self.kv_args
        every = zip(of.state_data_ptrs, of.state_data_lens, of.state_item_lens, strict=True)
        return [_buffers(*one, self.device) for one in every]

    def _aux(self) -> list[Tensor]:
        of = self.kv_args
        return _buffers(of.aux_data_ptrs, of.aux_data_lens, of.aux_item_lens, "cpu")


class Sender(FakeKVSender):
    """Of one request; SGLang calls ``send`` for each chunk of its prompt, when it has been computed."""

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kwargs)
        self.room = bootstrap_room

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)
        self.aux = aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        self.kv_mgr.send(self.room, kv_indices, state_indices, self.aux)
        self.has_sent = state_indices is not None


class Receiver(FakeKVReceiver):
    """Of one request; SGLang polls it from when it has set the request's memory aside."""

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self.manager, self.room = mgr, bootstrap_room

    def send_metadata(
        self, kv_indices: Any, aux_index: Any = None, state_indices: Any = None, decode_prefix_len: int | None = None
    ) -> None:
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len)
        self.place = kv_indices, state_indices, aux_index

    def poll(self) -> int:
        if self.conclude_state is None and self.has_sent_metadata:
            if not self.manager.receive(self.room, *self.place):
                return KVPoll.Transferring
        return super().poll()


def _connect(address: tuple[str, int]) -> Connection:
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return Client(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class _Memory:
    """Bytes at an address of a GPU, for torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _buffers(addresses: Sequence[int], sizes: Sequence[int], items: Sequence[int], device: str) -> list[Tensor]:
    """Views [items, bytes] of memory that SGLang owns."""

    def view(address: int, size: int) -> Tensor:
        if device == "cuda":
            return torch.as_tensor(_Memory(address, size), device="cuda")
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)

    return [view(address, size).view(-1, item) for address, size, item in zip(addresses, sizes, items, strict=True)]


def _rows(where: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(np.asarray(where, dtype=np.int64).reshape(-1), device=device)


def _read(buffers: list[Tensor], where: Any) -> Rows:
    return [one[_rows(where, one.device)].cpu().numpy() for one in buffers]


def _write(buffers: list[Tensor], where: Any, rows: Rows) -> None:
    for one, values in zip(buffers, rows, strict=True):
        one[_rows(where, one.device)] = torch.from_numpy(values).to(one.device)
