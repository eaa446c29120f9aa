"""The mapper that the engines are tested with changes nothing, and would change everything if its inputs were read wrongly."""

import pytest
import torch
from planted_identity import write_identity

from kvfit import load_mapper
from kvfit.demo import MODELS
from kvfit.model.cache import forward, full_cache


@pytest.mark.filterwarnings("ignore:mapper")
def test_its_inputs_cancel(load, tmp_path):
    model = load(str(MODELS["demo:source"])).model
    cache = full_cache()
    forward(model, torch.arange(5, 69)[None], cache, base=True)
    plain = [(layer.keys, layer.values) for layer in cache.layers]
    for cancel in (True, False):
        mapper = load_mapper(write_identity(tmp_path / str(cancel), model, cancel=cancel))
        assert (mapper.spec.lexical_lags, mapper.spec.rank) == ((0,), 1280)
        mapped = mapper.transfer_layers(plain, first_layer=plain[0])
        same = [
            torch.allclose(a, b, atol=1e-3)
            for pair, other in zip(mapped, plain, strict=True)
            for a, b in zip(pair, other, strict=True)
        ]
        assert all(same) == cancel
