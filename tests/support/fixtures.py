"""Fixtures that tests of recipes share."""

import pytest

from support.recipes import environment, make_bert
from support.zygote import Zygote


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """The folder of a tiny BERT that knows the words of the recipes' sample data."""
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    zygote = Zygote(tmp_path_factory.mktemp("logs"), environment())
    yield zygote
    zygote.close()
