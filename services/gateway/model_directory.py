"""The models of a gateway, by the names under which requests ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from paceline_services.gateway.admission import Capacity
from paceline_services.gateway.api_errors import (
    InvalidRequestError,
    OverloadedError,
    RetryLaterError,
    UnknownModelError,
)
from paceline_services.gateway.served_model import ServedModel


class ModelDirectory:
    """One or more. They share the process: its room, its metrics, its ports."""

    def __init__(self, gateways: Sequence[ServedModel], aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        """`aliases`: further names, and the models that they mean."""
        self._gateways = {gateway.model: gateway for gateway in gateways}
        self._names = {alias: self._gateways[model] for alias, model in aliases.items()} | self._gateways

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._gateways.values())

    @property
    def first(self) -> ServedModel:
        return next(iter(self))

    @property
    def capacity(self) -> Capacity:
        return self.first.capacity

    def model(self, name: str | None) -> ServedModel:
        """No name at all means the only model. Raises `UnknownModelError`."""
        if name is None:
            if len(self._gateways) == 1:
                return self.first
            raise InvalidRequestError(f"model: required, one of {', '.join(self._gateways)}", param="model")
        if name not in self._names:
            raise UnknownModelError(name, self._gateways)
        return self._names[name]

    def check_capacity(self) -> None:
        """Whether there may be room for a request that nobody has read yet. Raises `OverloadedError` if not."""
        full = []
        for gateway in self:
            try:
                gateway.queue.check(1)
                return
            except OverloadedError as error:
                full.append(error)
        self.count_rejection(full[0])
        raise full[0]

    def count_rejection(self, error: RetryLaterError) -> None:
        """Count a request that was turned away unread. Nobody knows its model: it counts as the first one's."""
        self.first.metrics.rejected(self.first.model, error.reason)

    def check_available(self) -> None:
        """Raises `NoTargetError` unless requests for some model would be served."""
        reasons = [gateway.unavailable() for gateway in self]
        if all(reasons) and reasons[0]:
            raise reasons[0]
