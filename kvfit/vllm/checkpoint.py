"""Find out which model an engine runs.

The checkpoint tells, not the engine's weights: an engine fuses and packs the weights that it loads.
"""

from __future__ import annotations

from typing import Any

import torch

from kvfit.errors import MismatchError
from kvfit.model.content import part_digests
from kvfit.model.digests import config_digest, id_count, quantisation, weight_fingerprint
from kvfit.model.identity import check_model
from kvfit.spec import ModelSpec
from kvfit.vllm.addresses import SourceIdentity, content_identity, sampled_identity

_ADVICE = "needed the checkpoint that the mapper was fitted on, without quantisation by the engine"


def load_checkpoint(ref: str, revision: str | None, *, weights: bool, trust_remote_code: bool) -> Any:
    """Load a checkpoint as a transformers model on the CPU, in the dtype that it is stored in.

    Args:
        ref: the checkpoint's folder or name in the engine's configuration.
        revision: its revision in the engine's configuration.
        weights: whether to load the weights; without them the model is on the meta device.
        trust_remote_code: as in the engine's configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    if not weights:
        config = AutoConfig.from_pretrained(ref, **options)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return AutoModelForCausalLM.from_pretrained(ref, dtype="auto", **options).eval()


def check_engine(spec: ModelSpec, model_config: Any, *, weights: bool) -> None:
    """Refuse an engine that does not run the model of a spec.

    Args:
        spec: the target, as recorded when the map was fitted.
        model_config: vLLM's ``ModelConfig``.
        weights: whether to compare the weights too.

    Raises:
        MismatchError: names the field that differs.
    """
    found = getattr(model_config, "quantization", None)
    if found != spec.quantisation:
        raise MismatchError(f"engine: found quantization {found}, needed {spec.quantisation} as {spec.ref} had: {_ADVICE}")
    model = load_checkpoint(
        model_config.model, model_config.revision, weights=weights, trust_remote_code=model_config.trust_remote_code
    )
    if weights:
        check_model(spec, model)
        return
    digest = config_digest(model.config)
    if digest != spec.config_digest:
        raise MismatchError(
            f"engine: found another configuration ({digest[:12]}), needed that of {spec.ref} ({spec.config_digest[:12]})"
        )


def engine_identity(model_config: Any) -> SourceIdentity:
    """The identity of the model that an engine runs; it equals the identity of a spec that was recorded from this model.

    Raises:
        MismatchError: the engine quantises the weights, so that they are not the checkpoint's.
    """
    model = load_checkpoint(
        model_config.model, model_config.revision, weights=True, trust_remote_code=model_config.trust_remote_code
    )
    found, stored = getattr(model_config, "quantization", None), quantisation(model.config)
    if found != stored:
        raise MismatchError(f"engine: found quantization {found} of a checkpoint with {stored}, {_ADVICE}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model_config.tokenizer,
        revision=model_config.tokenizer_revision,
        trust_remote_code=model_config.trust_remote_code,
    )
    n_ids = id_count(tokenizer)
    return SourceIdentity(
        sampled_identity(config_digest(model.config), weight_fingerprint(model), stored),
        content_identity(part_digests(model, n_ids, rounding=True), n_ids),
    )
