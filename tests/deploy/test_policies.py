"""Allowed connections, computed from the rendered policies as Kubernetes does: both sides must allow them."""

import copy
from typing import Any, NamedTuple

import pytest

from tests.deploy.helm import NAMESPACE, ON_CPUS, Document, Values, merged, render, the
from tests.deploy.pods import pod_templates

EVERY = ({"port": 1, "endPort": 65535},)
PORTS = {"http": 8000, "gateway grpc": 8001, "target": 9001, "draft": 9002, "redis": 6379, "metrics": 9100}


class Pod(NamedTuple):
    """A sender or receiver."""

    namespace: str
    labels: dict[str, str]


def rendered(policy: Values, **others: Values) -> list[Document]:
    ports = {name: {"port": PORTS[name]} for name in ("target", "draft")}
    return render(merged(ON_CPUS, ports, {"networkPolicy": {"clientNamespaces": ["apps"], **policy}}, others))


def components(documents: list[Document], release: str | None = None) -> dict[str, Pod]:
    """The pods of these objects, or the same pods of another release."""
    changed = {"app.kubernetes.io/instance": release} if release else {}
    labels = [template["metadata"]["labels"] | changed for _, template in pod_templates(documents)]
    return {each["app.kubernetes.io/component"]: Pod(NAMESPACE, each) for each in labels}


def allowed(documents: list[Document], sender: Pod, receiver: Pod, port: int) -> bool:
    return _side(documents, sender, receiver, port, "egress", "to") and _side(
        documents, receiver, sender, port, "ingress", "from"
    )


def _side(documents: list[Document], owner: Pod, peer: Pod, port: int, direction: str, key: str) -> bool:
    """Whether the policies of `owner` allow the connection. A pod without a policy may do anything."""
    mine = [
        document["spec"]
        for document in documents
        if document["kind"] == "NetworkPolicy"
        and document["metadata"]["namespace"] == owner.namespace
        and document["spec"]["podSelector"]["matchLabels"].items() <= owner.labels.items()
    ]
    return not mine or any(
        any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule.get("ports", EVERY))
        and (key not in rule or any(_is_peer(one, peer) for one in rule[key]))
        for spec in mine
        for rule in spec[direction]
    )


def _is_peer(one: dict[str, Any], peer: Pod) -> bool:
    if "ipBlock" in one:
        return False  # whether pods count among addresses depends on the cluster
    if "podSelector" in one:
        return peer.namespace == NAMESPACE and one["podSelector"]["matchLabels"].items() <= peer.labels.items()
    (expression,) = one["namespaceSelector"]["matchExpressions"]
    return peer.namespace in expression["values"]


def links(documents: list[Document]) -> set[tuple[str, str, str]]:
    receivers = components(documents)
    senders = {
        **receivers,
        "client": Pod("apps", {}),
        "prometheus": Pod("monitoring", {}),
        "stranger": Pod("elsewhere", {}),
        "neighbour": Pod(NAMESPACE, {"app.kubernetes.io/name": "other"}),
    }
    return {
        (sender, receiver, name)
        for sender in senders
        for receiver in receivers
        for name, port in PORTS.items()
        if sender != receiver and allowed(documents, senders[sender], receivers[receiver], port)
    }


WANTED = {
    ("client", "gateway", "http"),
    ("client", "gateway", "gateway grpc"),
    ("gateway", "target", "target"),
    ("target", "draft", "draft"),
    *((sender, "redis", "redis") for sender in ("gateway", "target", "draft")),
    ("prometheus", "gateway", "http"),
    ("prometheus", "target", "metrics"),
    ("prometheus", "draft", "metrics"),
}


def test_only_the_wanted_links_are_allowed() -> None:
    documents = rendered({})
    assert links(documents) == WANTED
    loose = copy.deepcopy(documents)
    del the("NetworkPolicy", "target", loose)["spec"]["ingress"][0]["from"]
    assert ("stranger", "target", "target") in links(loose), "this test finds a rule without a peer"
    assert ("stranger", "draft", "draft") in links(rendered({"enabled": False}))


@pytest.mark.parametrize(("url", "port"), [("http://c.monitoring:4318/v1/traces", 4318), ("https://c.monitoring", 443)])
def test_services_reach_the_collector_of_traces(url: str, port: int) -> None:
    """It is in a namespace of the monitoring, which the chart has no policies for."""
    documents, collector = rendered({}, tracing={"otlpEndpoint": url}), Pod("monitoring", {})
    reached = {(name, each) for name, pod in components(documents).items() for each in (80, 443, 4318)
               if allowed(documents, pod, collector, each)}  # fmt: skip
    assert reached == {(name, port) for name in ("gateway", "target", "draft")}
    assert not any(allowed(rendered({}), pod, collector, port) for pod in components(documents).values())


def test_gateways_are_open_without_client_namespaces() -> None:
    added = links(rendered({"clientNamespaces": []})) - WANTED
    assert ("stranger", "gateway", "http") in added
    assert {receiver for _, receiver, _ in added} == {"gateway"}
    assert not {sender for sender, *_ in added} & {"target", "draft", "redis"}


def test_releases_that_share_a_redis_reach_each_other() -> None:
    drawn = rendered({"otherReleases": ["small"]})
    ours, small, strangers = components(drawn), components(drawn, "small"), components(drawn, "other")
    for sender, receiver, port in WANTED & links(drawn):
        if sender in small:
            assert allowed(drawn, ours[sender], small[receiver], PORTS[port])
            assert allowed(drawn, small[sender], ours[receiver], PORTS[port])
            assert not allowed(drawn, strangers[sender], ours[receiver], PORTS[port])
    elsewhere = {"enabled": False, "external": {"urlSecret": {"name": "redis"}, "cidr": "203.0.113.0/24"}}
    without_redis = rendered({"otherReleases": ["small"]}, redis=elsewhere)
    assert allowed(without_redis, components(without_redis)["gateway"], small["redis"], PORTS["redis"])


def test_ray_pods_reach_only_each_other() -> None:
    on_ray = links(rendered({}, target={"ray": {"enabled": True}}))
    assert on_ray - WANTED == {(*pair, name) for pair in (("ray", "target"), ("target", "ray")) for name in PORTS}
    assert on_ray > WANTED
