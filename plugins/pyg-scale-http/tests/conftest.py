"""A graph, a predictor of its nodes, and a server of it."""

import pytest

from pyg_scale.datasets import planted_communities

from .clients import predictor_of, serving


@pytest.fixture(scope="module")
def data():
    return planted_communities(300, 4_000, num_classes=4, num_features=8)


@pytest.fixture(scope="module")
def predictor(data):
    with predictor_of(data) as made:
        yield made


@pytest.fixture(scope="module")
def port(predictor):
    with serving(predictor) as found:
        yield found
