"""The models of a gateway, by the names under which requests ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from paceline.state.state_errors import StateUnavailableError
from paceline_services.gateway.api_errors import (
    InvalidRequestError,
    OverloadedError,
    RetryLaterError,
    UnavailableError,
    UnknownModelError,
)
from paceline_services.gateway.generation.admission import Capacity
from paceline_services.gateway.generation.served_model import ServedModel


class ModelDirectory:
    """One or more models, which share the gateway's capacity, metrics and ports."""

    def __init__(self, models: Sequence[ServedModel], aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        """`aliases`: further names, and the models that they mean."""
        self._models = {model.model: model for model in models}
        self._names = {alias: self._models[name] for alias, name in aliases.items()} | self._models

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def first(self) -> ServedModel:
        return next(iter(self))

    @property
    def capacity(self) -> Capacity:
        return self.first.capacity

    @property
    def load(self) -> dict[str, float]:
        """Completions that run, and tokens since the start: for other gateways' reports."""
        return {"running": self.capacity.in_flight, "tokens": sum(each.totals.tokens for each in self)}

    def model(self, name: str | None) -> ServedModel:
        """By name; None means the only model. Raises `UnknownModelError` or `InvalidRequestError`."""
        if name is None:
            if len(self._models) == 1:
                return self.first
            raise InvalidRequestError(f"model: required, one of {', '.join(self._models)}", param="model")
        if name not in self._names:
            raise UnknownModelError(name, self._models)
        return self._names[name]

    def aliases_of(self, name: str) -> list[str]:
        """Further names of a model."""
        return [alias for alias, model in self._names.items() if model.model == name != alias]

    def abort(self, client: str, id_: str) -> bool:
        """End a client's running requests: see `RunningRequests.abort`. Returns whether there was one."""
        found = [model.running.abort(client, id_) for model in self]
        return any(found)

    async def report(self, client: str, id_: str) -> str | None:
        """What is known of a client's request, as JSON: see `RunningRequests.report`. Raises `UnavailableError`."""
        try:
            return await self.first.running.report(client, id_)
        except StateUnavailableError as error:
            raise UnavailableError("Redis does not answer now; try again soon") from error

    def abort_all(self) -> None:
        """The gateway stops: end all requests that run. Their clients may send them, or the last event id, again."""
        for model in self:
            model.running.abort_all(lambda: UnavailableError("the gateway is closing", reason="closing"))

    def check_capacity(self) -> None:
        """Check, before a request is read, whether any model admits one more. Raises `OverloadedError` if none does."""
        errors = []
        for model in self:
            try:
                model.queue.check(1)
                return
            except OverloadedError as error:
                errors.append(error)
        self.count_rejection(errors[0])
        raise errors[0]

    def count_rejection(self, error: RetryLaterError) -> None:
        """Count a request refused before its model is known: it counts as the first model's."""
        self.first.metrics.rejected(self.first.model, error.reason)

    def check_available(self) -> None:
        """Raises `UnavailableError` unless some model can serve requests."""
        errors = [model.unavailable() for model in self]
        if all(errors) and errors[0]:
            raise errors[0]
