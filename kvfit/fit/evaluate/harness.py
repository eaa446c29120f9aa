"""Run public benchmarks on a mapped cache, as a model for lm-evaluation-harness.

    python -m kvfit.fit.evaluate.harness run --model kvfit --model_args bundle=FOLDER,arm=transfer --tasks hellaswag

The harness has no plug-ins, so it is started through this module, which adds the model ``kvfit`` and leaves everything else to
the harness. Every prompt is moved as the arm says, without its last token, which the target runs itself. The target scores or
generates the answer; in the arm ``source``, the source does. In the arm ``native``, results are those of the harness's own
model ``hf``.
"""

from __future__ import annotations

import logging
from itertools import groupby
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from kvfit.bundle.bundle import Bundle
from kvfit.errors import MismatchError
from kvfit.fit.capture import models
from kvfit.fit.capture.sequences import with_one_beginning
from kvfit.fit.evaluate import arms
from kvfit.fit.evaluate.arms import Arm
from kvfit.model.decoder import input_device, setting, text_config
from kvfit.model.generate import generate
from kvfit.runtime import EXACT_HEAD

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "kvfit.fit.evaluate.harness: found no lm_eval, needed the extra `eval`: pip install 'kvfit-mappers[fit,eval]'"
    ) from error

_log = logging.getLogger("kvfit")

# `shuffled` needs another document besides the prompt, so it cannot answer the prompt.
ARMS: tuple[Arm, ...] = tuple(arm for arm in get_args(Arm) if arm != "shuffled")
# A task's names for the maximal length of an answer; the first one that it sets counts.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def _registered(model: type) -> Any:
    """Register the model once. When this file runs as a script, it is imported a second time under its own name."""
    return model if __name__ == "__main__" else register_model("kvfit")(model)


@_registered
class KvfitLM(TemplateLM):  # type: ignore[misc]
    """A pair of models and the mapper between them, as the harness sees a model."""

    def __init__(
        self,
        bundle: str,
        arm: Arm = "handoff",
        source: str | None = None,
        target: str | None = None,
        dtype: str = "auto",
        source_device: str | None = None,
        device: str | None = None,
        exact_head: int = EXACT_HEAD,
        exact_tail: int = 0,
        recompute: float = 0.0,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ) -> None:
        """Load both models and the mapper.

        Args:
            bundle: folder of the bundle.
            arm: how the prompt reaches the target, see `kvfit.fit.evaluate.arms`.
            source: ref of the source model; by default the one in the bundle.
            target: ref of the target model; by default the one in the bundle.
            dtype: dtype of both models.
            source_device: device of the source; by default `device`.
            device: device of the target, from the harness's own option ``--device``.
            exact_head: `exact_head` of the arm `handoff`.
            exact_tail: `exact_tail` of the arm `handoff`.
            recompute: `recompute` of the arm `handoff`.
            max_gen_toks: maximal length of a generated answer, unless the task sets one.
            max_length: the most tokens that are run; a longer prompt loses its beginning, and the log says how many did. The
                last token of an answer that is scored is not run. Default: the positions of the model that answers.
            batch_size: not used, because prompts are run one by one.
            max_batch_size: not used.

        Raises:
            MismatchError: the arm does not exist, the pair cannot run it, or the models are not those of the bundle.
        """
        super().__init__()
        del batch_size, max_batch_size
        if arm not in ARMS:
            raise MismatchError(f"arm: found {arm!r}, needed one of {', '.join(ARMS)}")
        # Without a device from its user, the harness asks for the first GPU.
        device = None if device is not None and device.startswith("cuda") and not torch.cuda.is_available() else device
        loading = tuple(models.Options(dtype=dtype, device=place) for place in (source_device or device, device))
        self.pair, self.tokenizer = arms.load_pair(
            Bundle.open(bundle),
            source=source,
            target=target,
            loading=(loading[0], loading[1]),
            exact_head=int(exact_head),
            exact_tail=int(exact_tail),
            recompute=float(recompute),
        )
        if arm == "raw" and not arms.raw_allowed(self.pair.mapper):
            raise MismatchError("arm raw: found two geometries, needed a source cache of the target's shape")
        self.arm = arm
        self.model = arms.model_of(self.pair, arm)
        self.vocabulary = arms.shared_vocabulary(self.pair)
        self.max_gen_toks = int(max_gen_toks)
        self.max_length = int(max_length or setting(text_config(self.model), "max_position_embeddings") or 2048)

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a prompt."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """The name for the harness's own caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Apply the tokenizer's chat template."""
        return str(
            self.tokenizer.apply_chat_template(chat_history, tokenize=False, add_generation_prompt=add_generation_prompt)
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text."""
        if add_special_tokens is None or add_special_tokens:
            return with_one_beginning(self.tokenizer, string)
        ids: list[int] = self.tokenizer(string, add_special_tokens=False)["input_ids"]
        return ids

    def prompt_cache(self, prompt: list[int]) -> arms.Rewindable:
        """The arm's cache of a prompt without its last token."""
        ids = torch.tensor([prompt])
        if len(prompt) < 2 or self.arm == "no_context":
            return arms.Rewindable(None)
        return arms.Rewindable(arms.Prefixes(self.pair, ids[:, :-1]).cache(self.arm, next_ids=ids[:, -1:]))

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        out: list[tuple[float, bool]] = []
        n_cut = 0
        bar = tqdm(total=len(requests), desc=f"loglikelihood, {self.arm}", disable=disable_tqdm or None)
        # The answers to one question are consecutive and share its prompt.
        for prompt, group in groupby(requests, key=lambda request: request[1]):
            cache: tuple[int, arms.Rewindable] | None = None
            for _text, _prompt, continuation in group:
                kept = self._fitted(prompt, len(continuation) - 1)
                n_cut += len(kept) < len(prompt)
                if cache is None or cache[0] != len(kept):
                    cache = (len(kept), self.prompt_cache(kept))
                out.append(self._scored(kept, continuation, cache[1]))
                bar.update()
        bar.close()
        self._warn_of_cut("loglikelihood", n_cut, len(requests))
        return out

    def _fitted(self, prompt: list[int], n_run: int) -> list[int]:
        """The end of the prompt that fits into `max_length` with the `n_run` tokens of the answer that are run."""
        room = self.max_length - n_run
        if room < 1:
            raise MismatchError(f"max_length: found {self.max_length}, needed more than the {n_run} tokens of an answer")
        return prompt[-room:]

    def _warn_of_cut(self, kind: str, n_cut: int, n_requests: int) -> None:
        if n_cut:
            _log.warning("%s: %d of %d prompts lost their beginning (max_length=%d)", kind, n_cut, n_requests, self.max_length)

    @torch.no_grad()
    def _scored(self, prompt: list[int], continuation: list[int], cache: arms.Rewindable) -> tuple[float, bool]:
        ids = torch.tensor([[*prompt, *continuation]])
        logits = arms.continuation_logits(self.model, cache.fresh(self.model), ids, len(prompt), self.vocabulary)
        wanted = ids[0, len(prompt) :].to(logits.device)
        scores = F.log_softmax(logits[0].float(), -1)
        greedy = bool((scores.argmax(-1) == wanted).all())
        return float(scores.gather(-1, wanted[:, None]).double().sum()), greedy

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refuse the task, because without a prompt there is nothing to move.

        Raises:
            MismatchError: always.
        """
        del requests, disable_tqdm
        raise MismatchError(
            "loglikelihood_rolling: found a task without prompts, needed one with a prompt whose cache can be moved: "
            "use kvfit evaluate for perplexity"
        )

    @torch.no_grad()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate greedy answers up to the task's stop strings.

        An answer also ends at any end token of the model's generation configuration, of which chat models have several. The
        task's further settings, and those of that configuration, are `generate`'s.

        Raises:
            MismatchError: the task asks for sampling.
        """
        out, n_cut = [], 0
        for request in tqdm(requests, desc=f"generate, {self.arm}", disable=disable_tqdm or None):
            context, wanted = request.args
            settings = {name: value for name, value in wanted.items() if name not in ("until", *LENGTHS)}
            asked = settings.pop("do_sample", None)
            if float(settings.pop("temperature", 1.0 if asked else 0.0)) > 0 and asked is not False:
                raise MismatchError("generate_until: found a task that samples, needed greedy decoding (do_sample: false)")
            until = wanted.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            most = int(next((wanted[name] for name in LENGTHS if wanted.get(name)), self.max_gen_toks))
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            kept = self._fitted(prompt, most)
            n_cut += len(kept) < len(prompt)
            out.append(self._said(kept, stops, max_new_tokens=most, **settings))
            self.cache_hook.add_partial("generate_until", request.args, out[-1])
        self._warn_of_cut("generate", n_cut, len(requests))
        return out

    def _said(self, prompt: list[int], stops: list[str], **settings: Any) -> str:
        cache = self.prompt_cache(prompt).fresh(self.model)
        ids = torch.tensor([prompt if self.arm != "no_context" else prompt[-1:]]).to(input_device(self.model))
        # The tokenizer's end token ends an answer even if the model's configuration does not list it.
        stops = [*stops, self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)]
        found = generate(
            self.model,
            ids,
            cache,
            do_sample=False,
            pad_token_id=self.eot_token_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id,
            stopping_criteria=StoppingCriteriaList([_Said(self.tokenizer, stops, ids.shape[1])]),
            logits_processor=LogitsProcessorList([_Shared(self.vocabulary)]),
            **settings,
        )
        text = self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0] if stop else text
        return str(text)


class _Said(StoppingCriteria):  # type: ignore[misc]
    """Ends an answer at a stop string, which may be the text of a special token."""

    def __init__(self, tokenizer: Any, stops: list[str], n_prompt: int) -> None:
        self.tokenizer, self.stops, self.n_prompt = tokenizer, stops, n_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # noqa: ARG002
        texts = (self.tokenizer.decode(row[self.n_prompt :], skip_special_tokens=False) for row in input_ids)
        return torch.tensor([any(stop in text for stop in self.stops) for text in texts], device=input_ids.device)


class _Shared(LogitsProcessor):  # type: ignore[misc]
    """Leaves out the logits that only one of the two models has."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        return scores.index_fill(-1, torch.arange(self.vocabulary, scores.shape[-1], device=scores.device), float("-inf"))


def main() -> None:
    """The harness's own command, with ``kvfit`` as an additional model."""
    import lm_eval.models  # noqa: F401  # the registry loads its own models only if it is empty
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    # As a script, this file is the module `__main__`; the registry needs the one with its real name.
    from kvfit.fit.evaluate.harness import main as registered_main

    registered_main()
