"""The names of what is served."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overspill.core.errors import ConfigError
from overspill.serve.llm import LLM
from overspill.server.errors import ApiError
from overspill.server.service import Service
from overspill.server.settings import ServerConfig
from tests.models.huggingface.adapters import Adapted, make_adapter
from tests.serve.models import family
from tests.server.running import running
from tests.train.finetune.tiny import make_tokenizer


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    made = make_adapter(family("mixtral"), tmp_path_factory.mktemp("models"))
    make_tokenizer().save_pretrained(made.base)
    return made


@pytest.fixture(scope="module")
def llm(adapted: Adapted) -> Iterator[LLM]:
    with LLM(adapted.folder, device="cpu", context=64, max_batch=2) as opened:
        yield opened


def names(in_weights: Path | None, model: Path | str, **flags: Any) -> Service:
    llm: Any = SimpleNamespace(adapter=in_weights, context=64)
    service = Service(llm, str(model), ServerConfig.make(flags))
    service.close()
    return service


def test_the_model_list_names_the_adapter_and_its_base(llm: LLM) -> None:
    with running(llm) as server:
        (card,) = server.http.get("/v1/models").json()["data"]
        assert (card["id"], card["adapter"], card["parent"]) == ("tiny", "models/tiny", "base")


def test_without_an_adapter_the_list_names_none(adapted: Adapted) -> None:
    with LLM(adapted.base, device="cpu", context=64) as plain, running(plain) as server:
        (card,) = server.http.get("/v1/models").json()["data"]
        assert card.keys().isdisjoint({"adapter", "parent"})


def test_an_adapter_is_served_under_its_own_name(adapted: Adapted) -> None:
    own = names(adapted.folder, adapted.folder)
    assert (own.name, own.adapter, own.base) == ("adapter", "adapter", "base")
    given = names(adapted.folder, "org/large-moe", adapter=str(adapted.folder))
    assert (given.name, given.adapter, given.base) == ("adapter", "adapter", "org/large-moe")
    given.check_model(str(adapted.folder))
    with pytest.raises(ApiError, match="does not exist; this server has 'adapter'"):
        given.check_model("org/large-moe")  # which would answer otherwise
    named = names(adapted.folder, adapted.folder, served_name="x")
    assert (named.name, named.adapter) == ("x", "adapter")
    with pytest.raises(ConfigError, match="--served-name is empty; give a name"):
        names(adapted.folder, adapted.folder, served_name="")
    plain = names(None, adapted.base)
    assert (plain.name, plain.adapter, plain.base) == ("base", None, None)
