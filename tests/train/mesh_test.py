"""One mesh from text, and the rules by parameter path."""

import jax
import numpy as np
import pytest
import small
from jax.sharding import PartitionSpec

from jaxmeth import models, train
from jaxmeth.types import ConfigError


def test_rules_by_path():
    mesh = train.make_mesh("data=4,model=2")
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    specs = jax.tree.map(lambda s: s.spec, train.param_shardings(models.abstract_params(small.CFG), mesh))
    assert specs["layers"]["attn"]["q"]["weight"] == PartitionSpec(None, "model", None)
    assert specs["layers"]["attn"]["o"]["weight"] == PartitionSpec(None, None, "model")
    assert specs["layers"]["mlp"]["down"]["weight"] == PartitionSpec(None, None, "model")
    assert specs["embed"]["embedding"] == PartitionSpec("model", None)
    assert specs["norm"]["scale"] == PartitionSpec()
    assert train.batch_sharding(mesh).spec == PartitionSpec("data")


def test_what_does_not_divide_stays_whole():
    mesh = train.make_mesh("model=8")
    odd = {"layers": {"attn": {"q": {"weight": jax.ShapeDtypeStruct((1, 12, 8), np.float32)}}}}
    assert train.param_shardings(odd, mesh)["layers"]["attn"]["q"]["weight"].spec == PartitionSpec(None, None, None)
    assert train.batch_sharding(mesh).spec == PartitionSpec(None)


def test_the_sharded_model_gives_the_same_logits():
    params, (tokens, mask) = small.params(), small.prompts()
    mesh = train.make_mesh("data=4,model=2")
    spread = jax.device_put(params, train.param_shardings(params, mesh))
    tokens, mask = np.tile(tokens, (2, 1)), np.tile(mask, (2, 1))
    rows = jax.device_put((tokens, mask), train.batch_sharding(mesh))
    found = models.apply(spread, small.CFG, rows[0], mask=rows[1]).logits
    np.testing.assert_allclose(found, models.apply(params, small.CFG, tokens, mask=mask).logits, atol=1e-6)


@pytest.mark.parametrize("text", ["", "data", "data=0", "data=4,data=2", "data=4;model=2", "data=4,model=x", "data=3"])
def test_refused(text):
    with pytest.raises(ConfigError, match="mesh: found"):
        train.make_mesh(text)
