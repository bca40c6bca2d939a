"""Allowed connections, computed from the rendered policies as Kubernetes does: both sides must allow them."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest

from tests.deploy.helm import NAMESPACE, Document, merged, on_cpus, render, the
from tests.deploy.pods import pod_templates

EVERY = ({"port": 1, "endPort": 65535},)
COMPONENTS = ("gateway", "target", "draft", "redis")
PORTS = {"http": 8000, "gateway grpc": 8001, "target": 9001, "draft": 9002, "redis": 6379, "metrics": 9100}
VALUES = merged(
    on_cpus(),
    {
        "target": {"port": PORTS["target"]},
        "draft": {"port": PORTS["draft"]},
        "networkPolicy": {"clientNamespaces": ["apps"]},
    },
)


class Pod:
    """A sender or receiver."""

    def __init__(self, namespace: str, labels: dict[str, str]) -> None:
        self.namespace = namespace
        self.labels = labels


def components(documents: list[Document]) -> dict[str, Pod]:
    found = [template["metadata"]["labels"] for _, template in pod_templates(documents)]
    return {labels["app.kubernetes.io/component"]: Pod(NAMESPACE, labels) for labels in found}


def allowed(documents: list[Document], sender: Pod, receiver: Pod, port: int) -> bool:
    policies = [document for document in documents if document["kind"] == "NetworkPolicy"]
    return _side(policies, sender, receiver, port, "egress", "to") and _side(
        policies, receiver, sender, port, "ingress", "from"
    )


def _side(policies: Iterable[Document], owner: Pod, peer: Pod, port: int, direction: str, key: str) -> bool:
    """Whether the policies of `owner` allow the connection. A pod without a policy may do anything."""
    mine = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == owner.namespace
        and policy["spec"]["podSelector"]["matchLabels"].items() <= owner.labels.items()
    ]
    if not mine:
        return True
    return any(
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
    pods = {
        **components(documents),
        "client": Pod("apps", {}),
        "prometheus": Pod("monitoring", {}),
        "stranger": Pod("elsewhere", {}),
        "neighbour": Pod(NAMESPACE, {"app.kubernetes.io/name": "other"}),
    }
    return {
        (sender, receiver, name)
        for sender in pods
        for receiver in (*COMPONENTS, "ray")
        if receiver in pods
        for name, port in PORTS.items()
        if sender != receiver and allowed(documents, pods[sender], pods[receiver], port)
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


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return render(VALUES)


def test_only_the_wanted_links_are_allowed(documents: list[Document]) -> None:
    assert links(documents) == WANTED


def test_gateways_are_open_without_client_namespaces() -> None:
    open_to_all = render(merged(VALUES, {"networkPolicy": {"clientNamespaces": []}}))
    strangers = {link for link in links(open_to_all) - WANTED if link[1] == "gateway"}
    assert links(open_to_all) - WANTED == strangers
    assert ("stranger", "gateway", "http") in strangers
    assert not any(sender in ("target", "draft", "redis") for sender, *_ in strangers)


def test_a_rule_without_a_peer_is_found(documents: list[Document]) -> None:
    loose = copy.deepcopy(documents)
    del the("NetworkPolicy", "target", loose)["spec"]["ingress"][0]["from"]
    assert ("stranger", "target", "target") in links(loose) - WANTED


def test_without_policies_everything_is_allowed(documents: list[Document]) -> None:
    assert ("stranger", "draft", "draft") in links(render(merged(VALUES, {"networkPolicy": {"enabled": False}})))


def of_release(documents: list[Document], name: str) -> dict[str, Pod]:
    """The same pods as another release's."""
    return {
        component: Pod(NAMESPACE, pod.labels | {"app.kubernetes.io/instance": name})
        for component, pod in components(documents).items()
    }


def test_releases_that_share_a_redis_reach_each_other() -> None:
    elsewhere = {"redis": {"enabled": False, "external": {"urlSecret": {"name": "redis"}, "cidr": "203.0.113.0/24"}}}
    drawn = render(merged(VALUES, {"networkPolicy": {"otherReleases": ["small"]}}))
    without_redis = render(merged(VALUES, elsewhere, {"networkPolicy": {"otherReleases": ["small"]}}))
    small, strangers = of_release(drawn, "small"), of_release(drawn, "other")
    for sender, receiver, port in WANTED & links(drawn):
        if sender in small:
            assert allowed(drawn, components(drawn)[sender], small[receiver], PORTS[port])
            assert allowed(drawn, small[sender], components(drawn)[receiver], PORTS[port])
            assert not allowed(drawn, strangers[sender], components(drawn)[receiver], PORTS[port])
    assert allowed(without_redis, components(drawn)["gateway"], small["redis"], PORTS["redis"])


def test_ray_pods_reach_only_each_other() -> None:
    on_ray = links(render(merged(VALUES, {"target": {"ray": {"enabled": True}}})))
    among_themselves = {("ray", "target"), ("target", "ray")}
    assert {(*pair, name) for pair in among_themselves for name in PORTS} == on_ray - WANTED
    assert on_ray > WANTED
