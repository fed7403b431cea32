"""From a call to the request that a worker gets: checked, with token ids, seed and deadline.

The same for all front ends; service.py runs what is made here.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

from penstock.deployments.ingress.core.admission_request import AdmissionRequest, admission_request
from penstock.deployments.ingress.core.answers.reasoning import ReasoningSplit, split_of
from penstock.deployments.ingress.core.answers.tool_forms.table import ToolSupport
from penstock.deployments.ingress.core.billing import Bill, Billing
from penstock.deployments.ingress.core.call import Call, ChatPrompt, ServedModel
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.prompts import PromptReader
from penstock.deployments.ingress.core.text_pool import TextPool
from penstock.deployments.ingress.core.validation import (
    cache_domain,
    check_num_scores,
    checked_params,
    checked_priority,
    num_prompt_scores,
)
from penstock.workers.context_policy import ContextSettings
from penstock.workers.request import Request
from penstock.workers.text.pair_template import PairTemplate
from penstock.workers.text.reasoning import Marks
from penstock.workers.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparationSettings:
    """How calls become requests.

    contexts: which context policies requests may choose. marks: of reasoning. tools: how the model
    is given tools, and how its calls are read.
    longest_wait_s: until a worker computes a request; None: only its own deadline counts.
    shares_prefixes: tenants share cached prompts. pairs: how a reranker reads them; None: the model
    is none.
    """

    contexts: ContextSettings
    marks: Marks | None
    tools: ToolSupport
    longest_wait_s: float | None
    shares_prefixes: bool
    pairs: PairTemplate | None = None


class Preparation:
    """Makes requests of calls, for one model. Lives on one event loop."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        texts: TextPool,
        settings: PreparationSettings,
        *,
        seed: int,
    ):
        """`seed`: of the seeds of requests that bring none."""
        self._model, self._tokenizer, self._how = model, tokenizer, settings
        self.billing: Billing | None = None  # quotas and weights; None: there are none
        self.prompts = PromptReader(tokenizer, texts, settings.tools, settings.pairs)
        self._seeds = random.Random(seed)

    def bill(self, call: Call, request: Request, num_answers: int) -> Bill | None:
        """What the call costs its tenant; None: nothing, or an earlier call has paid for it, or one
        bill is for several texts that are embedded. Raises RequestError quota_too_small."""
        billing = self.billing
        if billing is None or call.context.is_continued or call.options.embeds:
            return None
        num_prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
        return billing.bill(call.context.principal, num_prompt, max_tokens, num_answers)

    async def admission(
        self, call: Call, num_choices: int, *, has_features: bool
    ) -> tuple[AdmissionRequest, ReasoningSplit | None]:
        """The checked request, and how its reasoning is split from the answer.

        `has_features`: with those that an answer's length is predicted from. Raises RequestError
        or ServiceError.
        """
        how, model = self._how, self._model
        toolset = call.prompt.tools if isinstance(call.prompt, ChatPrompt) else None
        if toolset is not None:
            how.tools.check(toolset)
        params, limit = checked_params(call, num_choices, model.vocab_size, how.contexts)
        prompt_ids = await self.prompts.fitting_ids(call, model, params, limit)
        check_num_scores(call, num_choices * num_prompt_scores(call, len(prompt_ids)))
        split = split_of(call, prompt_ids, how.marks, self._tokenizer)
        if toolset is not None:
            params = how.tools.params(params, toolset, self._tokenizer)
        if split is not None:
            params = split.params(params, self._tokenizer)
        if call.options.bad_words:
            words = await self.prompts.bad_words_ids(call)
            params = replace(params, bad_words_ids=params.bad_words_ids + words)
            params.check(model.vocab_size)
        if params.seed is None and params.temperature > 0:
            # Chosen here, so that another worker can continue the answer with the same draws.
            seed = call.context.seed
            params = replace(params, seed=self._seeds.getrandbits(63) if seed is None else seed)
        context, now_s, wait_s = call.context, time.monotonic(), how.longest_wait_s
        if context.deadline_s is not None and now_s >= context.deadline_s:
            raise ServiceError("deadline_exceeded")
        request = Request(
            context.request_id,
            prompt_ids,
            params,
            deadline_s=context.deadline_s,
            wait_until_s=None if wait_s is None else now_s + wait_s,
            priority=checked_priority(call),
            cache_domain=cache_domain(
                "" if how.shares_prefixes else context.principal, call.options.cache_salt
            ),
            embeds=call.options.embeds,
            adapter=model.adapter(call.options.model),
        )
        weight = 1.0 if self.billing is None else self.billing.weight(context.principal)
        if not has_features:
            return AdmissionRequest(request, longest_wait_s=wait_s, weight=weight), split
        return admission_request(request, call, model.name, how.contexts, wait_s, weight), split
