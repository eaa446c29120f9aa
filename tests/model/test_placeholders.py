"""Which ids a configuration names as placeholders for images, sound and video."""

from typing import Any

import pytest
from zoo import FAMILIES, build

from kvfit.model.placeholders import placeholder_ids


@pytest.mark.parametrize(
    ("model_type", "values", "wanted"),
    [
        ("qwen2_vl", {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92}, {90, 91}),
        ("llava", {"image_token_index": 77}, {77}),
        ("gemma3", {"image_token_index": 80, "boi_token_index": 81, "eoi_token_index": 82}, {80}),
        ("qwen2_audio", {"audio_token_index": 60}, {60}),
    ],
)  # fmt: skip
def test_the_ids_of_multimodal_wrappers(model_type: str, values: dict[str, int], wanted: set[int]) -> None:
    from transformers import AutoConfig

    assert placeholder_ids(AutoConfig.for_model(model_type, **values)) == wanted


def test_text_models_have_none() -> None:
    for family in FAMILIES:
        assert placeholder_ids(build(family).config) == frozenset(), family.name


def test_names_that_only_look_alike() -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {
                "image_start_token_id": 1, "audio_bos_token_id": 2, "image_size": 3, "image_token_index": -200,
                "pad_token_id": 4, "imagined_token_id": 5, "video_token_ids": [6, 7], "media_placeholder_token_id": 8,
                "audio_token_id": None, "image_token_id": True,
            }  # fmt: skip

        def get_text_config(self, **_: Any) -> Any:
            return self

    assert placeholder_ids(Config()) == {6, 7, 8}
