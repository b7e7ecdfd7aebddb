"""``Reception``: where engines are received, and what each is told in INIT. Source: protocol B.2, remote engines."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

from enginewire.client.link import Link
from enginewire.client.startup import Expected
from enginewire.config import EngineConfig
from enginewire.transport.endpoints import Endpoints, free_ports
from enginewire.wire.handshake import EngineZmqAddresses

if TYPE_CHECKING:
    from enginewire.coordinator import DPCoordinator

logger = logging.getLogger(__name__)

NUM_GROUP_PORTS: Final = 5
"""As many as the reference gives to the ranks' process groups, the first of them for the one that all join."""


class Reception:
    """Where engines are received: makes a link for each incarnation, and knows what to tell it.

    Args:
        context: for the links' sockets.
        config: of the client.
        endpoints: where links are bound.
        known: addresses of links at which engines may be already, by rank.
        coordinator: engines are told where it is.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: EngineConfig,
        endpoints: Endpoints,
        known: Mapping[int, tuple[str, str]],
        coordinator: DPCoordinator | None,
    ) -> None:
        self._coordinator = {} if coordinator is None else msgspec.structs.asdict(coordinator.addresses)
        self._parallel_config = parallel_config(config)
        self._known = known
        self._context = context
        self._config = config
        self._endpoints = endpoints
        self._incarnations: Counter[int] = Counter()

    def _is_local(self, index: int) -> bool:
        return index in self._config.local_ranks and not self._config.starts_by_tcp

    def open_link(self, index: int) -> Link:
        """Bind a link for the next incarnation of an engine. Raises :class:`OSError`."""
        self._incarnations[index] += 1
        if self._incarnations[index] == 1 and index in self._known:
            try:
                return Link(self._context, self._config, self._known[index])
            except OSError as exc:
                logger.warning("engine %d of an earlier frontend is not looked for: %s", index, exc.strerror)
        name = f"{index}.{self._incarnations[index]}"
        addresses = self._endpoints.of_link(name, is_local=self._is_local(index))
        return Link(self._context, self._config, addresses)

    def expected(self, index: int, link: Link) -> Expected:
        """Say what is agreed with the incarnation of an engine that gets this link."""
        addresses = EngineZmqAddresses(inputs=[link.input_address], outputs=[link.output_address], **self._coordinator)
        return Expected(
            addresses,
            is_local=self._is_local(index),
            is_other_nodes=index in self._config.other_ranks,
            parallel_config=self._parallel_config,
            heartbeat_s=(self._config.heartbeat_interval_s, self._config.heartbeat_timeout_s),
        )


def parallel_config(config: EngineConfig) -> dict[str, Any]:
    """Return what ranks in lock-step are told of how they meet, empty for all others. Source: protocol B.2.

    The ports are free here and now, which is where rank 0 is.
    """
    if not config.data_parallel_lock_step or config.data_parallel_size == 1:
        return {}
    master, *others = free_ports(config.data_parallel_address, NUM_GROUP_PORTS)
    return {
        "data_parallel_master_ip": config.data_parallel_address,
        "data_parallel_master_port": master,
        "_data_parallel_master_port_list": others,
        "data_parallel_size": config.data_parallel_size,
    }
