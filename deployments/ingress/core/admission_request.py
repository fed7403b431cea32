"""A Request plus the features that admission needs: predicted length, tenant, prompt prefix.

Made at the ingress, which alone has the prompt's text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.deployments.gate.forecast.prefix_affinity import prefix_marks
from penstock.deployments.ingress.core.call import Call, ChatPrompt
from penstock.deployments.ingress.core.tracing import AnswerTrace
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.text_digest import digest_ids, digest_text
from penstock.workers.context_policy import ContextSettings
from penstock.workers.request import Request

MAX_TENANT_CHARS = 64


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A Request as a token backend takes it. `text` is read only if the gate must be asked."""

    request: Request
    features: Features = field(default_factory=lambda: Features(""))
    text: str | None = None  # of the prompt; None: only its token ids are known
    ceiling: int | None = None  # tokens of KV that it never exceeds: a window that rolls
    has_limit: bool = True  # the client said how long the answer may be
    prefix: tuple[int, ...] = ()  # hashes of its first blocks, made by prefix_marks
    weight: float = 1.0  # share of its tenant beside other tenants that wait
    longest_wait_s: float | None = None  # until a worker computes it, at first and after a loss
    trace: AnswerTrace | None = field(default=None, compare=False, repr=False)  # None: no record
    # Of an answer that another ingress began: WorkerInfo.computes of the worker that made its
    # tokens. Others would continue it with another model's. Empty: nothing is known of that.
    computes: str = ""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def features_with_text(self) -> Features:
        """The features with the digest of the prompt: about 0.2 ms."""
        if self.text is None:
            digest = digest_ids(self.request.prompt_ids, self.features.model)
        else:
            digest = digest_text(self.text)
        return replace(self.features, text=digest)


def admission_request(
    request: Request,
    call: Call,
    model: str,
    contexts: ContextSettings,
    longest_wait_s: float | None = None,
    weight: float = 1.0,
) -> AdmissionRequest:
    """`request`, made from `call` with a checked context, and its features for the gate."""
    params, num_prompt = request.params, len(request.prompt_ids)
    limit = max(contexts.max_total_tokens(params) - num_prompt, 1)
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    full_tokens = contexts.context(params).full_tokens
    chat = call.prompt if isinstance(call.prompt, ChatPrompt) else None
    features = Features(
        model=model,
        tenant=call.context.principal or call.options.tenant[:MAX_TENANT_CHARS],
        template=_template(chat.messages) if chat else "",
        prompt_tokens=num_prompt,
        max_tokens=limit,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        ignore_eos=params.ignore_eos,
        num_stop=len(params.stop) + len(params.stop_token_ids),
        structured=params.structured is not None,
        num_messages=len(chat.messages) if chat else 1,
        has_tools=bool(chat and chat.tools),
    )
    return AdmissionRequest(
        request,
        features=features,
        text=_last_text(chat.messages) if chat else _plain(call.prompt),
        ceiling=None if full_tokens is None else full_tokens + contexts.block_size,
        has_limit=params.max_tokens is not None,
        prefix=prefix_marks(request.prompt_ids, request.cache_domain),
        weight=weight,
        longest_wait_s=longest_wait_s,
    )


def _plain(prompt: Any) -> str | None:
    return prompt if isinstance(prompt, str) else None


def _text_of(message: Mapping[str, Any]) -> str:
    """A message's text, whether it is in one piece or in parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return " ".join(str(p["text"]) for p in parts if isinstance(p, Mapping) and "text" in p)


def _last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Of the last message that the user wrote."""
    own = [each for each in messages if each.get("role") == "user"]
    return _text_of(own[-1]) if own else ""


def _template(messages: Sequence[Mapping[str, Any]]) -> str:
    """A name for the system prompt: what requests of one application share; "" without one."""
    system = [_text_of(each) for each in messages if each.get("role") in ("system", "developer")]
    if not system:
        return ""
    return hashlib.blake2b("\n".join(system).encode(), digest_size=8).hexdigest()
